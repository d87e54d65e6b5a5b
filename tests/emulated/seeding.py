"""Faults written into copies of the kernel sources, and no more compiled of them than the cases launch.

A fault is an exact replacement of text; a text that is no longer there fails the test, so a fault can never be seeded
in vain. Compiling is most of what such a test costs, so of each translation unit only the lines of those kernels stay
that the cases take on the emulated device. A kernel missed here is an error of the case, which no test takes for red.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from smoke_helper import chosen, smoke

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.emulated_device import ARCHS, DEFAULT_ARCH
from g4kv_cli.entries.entry import Entry, KernelVariant, Target
from g4kv_cli.entries.table import ENTRIES, decode_entries, entries_for, entry_for, entry_named, sources_of
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat

Edits = tuple[tuple[str, str, str], ...]
"""(source, text, replacement), each text to be found exactly once."""

_LINE = re.compile(r"^G4KV_\w+\((\w+), .*\)\n", re.MULTILINE)
"""One kernel, or the ``_rowsN`` kernels of a prep entry."""


def seed(
    directory: Path, edits: Edits, cases: Iterable[str] = (), variant: str = "", entries: Iterable[str] = ()
) -> Path:
    """Write the named sources with their texts replaced, and of the units what ``cases`` launch, or calls of
    ``entries``, by their names; all if there are none.

    ``variant``: what ``--variant`` will ask for. Gives the directory back, for ``--kernels``.
    """
    directory.mkdir(exist_ok=True)
    for source, text in edited(edits, directory).items():
        (directory / source).write_text(text)
    listed = list(cases)
    rows = [entry for case in listed for entry in _entries_of(case)] + [entry_named(name) for name in entries]
    if rows:
        formats = [FOLDED if f"/{FOLDED}/" in case else SPLIT for case in listed] or [SPLIT]
        # A case of many entries compiles all units.
        sources = sources_of(ENTRIES if any(case.startswith("serve/") for case in listed) else rows)
        only_kernels(directory, rows, variant, formats, sources)
    return directory


def edited(edits: Edits, directory: Path = BUILT_IN_KERNELS_DIRECTORY) -> dict[str, str]:
    """The edited sources by name: each as it is in the directory, or among the built-in ones where that lacks it."""
    texts: dict[str, str] = {}
    for source, old, new in edits:
        path = directory / source
        at = path if path.exists() else BUILT_IN_KERNELS_DIRECTORY / source
        text = texts.get(source) or at.read_text()
        assert text.count(old) == 1, f"{source} holds {text.count(old)} times: {old}"
        texts[source] = text.replace(old, new)
    return texts


def require_red(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    edits: Edits,
    cases: tuple[str, ...],
    words: Iterable[str],
    variant: str = "",
) -> None:
    """With these edits each of the cases fails (an error is no failure), and ``words`` all stand in what is said."""
    kernels = seed(directory / "kernels", edits, cases, variant)
    options = ("--variant", variant) if variant else ()
    if all(f"/{FOLDED}/" in case for case in cases):
        options += ("--kv-format", FOLDED)
    code, record = smoke(directory / "run.json", "--kernels", str(kernels), *options, *chosen(cases))
    shown = capsys.readouterr().out
    assert code == 1, shown
    assert {case["id"]: case["status"] for case in record["cases"]} == dict.fromkeys(cases, "failed"), shown
    for said in words:
        assert said in shown, shown


def only_kernels(
    directory: Path,
    rows: Iterable[Entry],
    variant: str = "",
    formats: Iterable[KvFormat] = (SPLIT,),
    sources: Iterable[str] = (),
) -> None:
    """Leave of their units, or of ``sources``, only the kernels that these entries take on the emulated device."""
    rows = list(rows)
    wanted = {
        kernel.symbol for entry in rows for kv_format in set(formats) for kernel in _taken(entry, variant, kv_format)
    }
    for source in sources or sources_of(rows):
        path = directory / source
        text = (path if path.exists() else BUILT_IN_KERNELS_DIRECTORY / source).read_text()

        def kept(line: re.Match[str]) -> str:
            return line[0] if any(name == line[1] or name.startswith(f"{line[1]}_rows") for name in wanted) else ""

        left = _LINE.sub(kept, text)
        if left != text:
            path.write_text(left)


def _entries_of(case: str) -> list[Entry]:
    kind, name, form, *rest = case.replace(f"/{FOLDED}/", "/").split("/")
    geometry = GEOMETRIES[name.partition("@")[0]]
    if kind == "serve":
        return entries_for(geometry)
    if rest[0] == "forms-agree":
        return decode_entries(geometry)
    rows = [entry_for(geometry, "prep" if kind == "trap" else kind, form)]
    if rest[0] == "serving":  # compared with the contiguous form, where the family has it
        rows += [entry for entry in entries_for(geometry, "prep") if entry.form == "contiguous"]
    return rows


def _taken(entry: Entry, variant: str, kv_format: KvFormat) -> list[KernelVariant]:
    """The first kernel of each tile and row count that the emulated device has and ``variant`` names, and the merge."""
    own = [kernel for kernel in entry.kernels if kv_format in kernel.kv_formats]
    target = Target("emulated", DEFAULT_ARCH, ARCHS[DEFAULT_ARCH].max_shared_bytes_per_block)
    able = [kernel for kernel in (*own, *entry.merge_kernels) if not kernel.lacking(target)]
    if variant:
        named = [kernel for kernel in able if kernel.path in variant.split(",")]
        return [*named, *(kernel.alone for kernel in named if kernel.alone is not None)]
    first: dict[tuple[bool, int, int], KernelVariant] = {}
    for kernel in able:
        if "emulated" not in kernel.on_request:
            first.setdefault((kernel in entry.merge_kernels, kernel.tile_rows, kernel.rows_per_warp), kernel)
    return list(first.values())
