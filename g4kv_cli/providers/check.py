"""What can be said of a manifest before anything runs: names that mean nothing, functions and kernels that are not
there, and which entries it serves."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.table import entries
from g4kv_cli.errors import G4kvError
from g4kv_cli.providers.builder import KERNEL_OF_PTX
from g4kv_cli.providers.callables import find_module
from g4kv_cli.providers.cudart.library import ptx_of_libraries, read_library, stand_in_for
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.manifest import ArgumentSpec, EntrySpec, Image, Manifest, Step
from g4kv_cli.providers.manifest_provider import names_entry
from g4kv_cli.providers.scope import BUILT_NAMES, input_arrays, names_of


@dataclass(frozen=True, slots=True)
class Served:
    """One entry of the table and the line of the [[entry]] that serves it, 0 if none does."""

    entry: str
    line: int


@dataclass(frozen=True, slots=True)
class ManifestCheck:
    """What was found. ``problems`` begin with the line they stand at; ``notes`` leave a GPU to run on."""

    served: tuple[Served, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_manifest(manifest: Manifest) -> ManifestCheck:
    """Hold a manifest against the table of entries and against its own images."""
    problems: list[tuple[str, str]] = []
    notes: list[str] = []
    table = entries()
    served = []
    for entry in table:
        spec = next((spec for spec in manifest.entries if names_entry(spec, entry.name)), None)
        served.append(Served(entry.name, spec.line if spec is not None else 0))
        if spec is not None:
            problems += _unknown_names(manifest, spec, entry)
    for spec in manifest.entries:
        for pattern in spec.names:
            names = [entry.name for entry in table]
            if not fnmatch.filter(names, pattern):
                close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
                hint = f"; nearest: {close[0]}" if close else ""
                problems.append((f"{spec.line}: {pattern!r} names no entry{hint}", ""))
        for step in (*spec.prepare, *spec.steps):
            problems += [(text, "") for text in _missing_code(manifest, step)]
    for image in manifest.images.values():
        if image.kind == "library" and image.path is not None and not image.is_compiled:
            try:
                stand_in_for(image.path)
                ptx_of_libraries(image.path)
            except G4kvError as error:
                notes.append(f"image {image.name} runs on a GPU only: {error}")
        elif image.kind == "python":
            missing = find_module(image.function, manifest.file.resolve().parent)
            if missing:
                problems.append((f"{image.line}: {missing}", ""))
        elif image.kind == "cubin":
            notes.append(f"image {image.name} runs on a GPU only: it is machine code")
    return ManifestCheck(tuple(served), _once(problems), tuple(notes))


def _once(problems: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Each problem (text, entry) once, with the first of the entries that have it and how many others do."""
    entries_of: dict[str, list[str]] = {}
    for text, entry in problems:
        entries_of.setdefault(text, []).append(entry)
    lines = []
    for text, names in entries_of.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{text} (in {names[0]}{more})" if names[0] else text)
    return tuple(lines)


def _unknown_names(manifest: Manifest, spec: EntrySpec, entry: Entry) -> list[tuple[str, str]]:
    known, arrays = (set(names) for names in names_of(entry, manifest.pool_form))
    known |= BUILT_NAMES
    inputs = frozenset(input_arrays(entry))
    problems: list[tuple[str, str]] = []

    def check(line: int, expressions: Iterable[Expression], more: Collection[str] = frozenset()) -> None:
        for expression in expressions:
            for name in sorted(expression.names - known - frozenset(more)):
                close = difflib.get_close_matches(name, [*known, *more], n=1, cutoff=0.4)
                hint = f" (nearest: {close[0]})" if close else ""
                problems.append((f"{line}: {expression.text!r}: no {name!r} here{hint}", entry.name))

    for name in spec.requires:
        if name not in arrays:
            problems.append((f"{spec.line}: requires {name!r}, which the call never has", entry.name))
    for name, expression in spec.let:
        check(spec.line, [expression], inputs)
        known.add(name)
    check(spec.line, (condition for condition, _ in spec.only_if), inputs)

    def check_arrays(*, late: bool) -> None:
        waiting = spec.late_names
        of_values = [made for made in (*spec.arrays, *spec.host) if (made.name in waiting) is late]
        for made in of_values:
            if not made.is_of_addresses:
                check(spec.line, [made.value], inputs)
            known.add(made.name)
            arrays.add(made.name)
        for made in spec.workspace:
            if (made.name in waiting) is late:
                check(spec.line, [made.value])
                arrays.add(made.name)
        for made in of_values:
            if made.is_of_addresses:
                for kind, expression in _leaves(ArgumentSpec(made.kind, made.value, made.fields)):  # type: ignore[arg-type]
                    check(spec.line, [expression], arrays if kind == "ptr" else frozenset())

    def check_step(step: Step) -> None:
        texts = [text for text in (step.image, step.call, step.symbol) if text is not None]
        expressions = [part for text in texts for part in text.parts if isinstance(part, Expression)]
        expressions += [*step.grid, *step.block, *step.cluster]
        expressions += [each for each in (step.condition, step.shared) if each is not None]
        check(step.line, expressions)
        for argument in [*step.arguments, *(argument for _, argument in step.named)]:
            for kind, expression in _leaves(argument):
                sees_arrays = kind == "ptr" or _image_kind(manifest, step) == "python"
                check(step.line, [expression], arrays if sees_arrays else frozenset())
        for name in step.writes:
            if name not in arrays:
                problems.append((f"{step.line}: writes {name!r}, which is no array of the call", entry.name))
        if step.gives:
            (arrays if step.returns == "ptr" else known).add(step.gives)

    check_arrays(late=False)
    for step in spec.prepare:
        check_step(step)
    check_arrays(late=True)
    for step in spec.steps:
        check_step(step)
    for name, expression in spec.results:
        check(spec.line, [expression], [made.name for made in spec.workspace])
        if name not in arrays:
            problems.append((f"{spec.line}: results has {name!r}, which is no output of the call", entry.name))
    return problems


def _image_kind(manifest: Manifest, step: Step) -> str:
    image = manifest.images.get(step.image.text)
    return "" if image is None else image.kind


def _leaves(argument: ArgumentSpec) -> list[tuple[str, Expression]]:
    if argument.map is not None and argument.value is not None:
        return [("ptr", argument.value), *(("i64", number) for number in argument.map.numbers)]
    if not argument.fields and argument.value is not None:
        return [(argument.kind, argument.value)]
    return [leaf for field in argument.fields for leaf in _leaves(field)]


def _missing_code(manifest: Manifest, step: Step) -> list[str]:
    """A function that a library does not export, or a kernel that PTX does not have, where the name is a plain one."""
    image = manifest.images.get(step.image.text)
    if image is None or image.path is None:
        return []
    if step.call is not None and _is_plain(step.call.parts):
        return _missing_function(image, step.call.text, step.line)
    if step.symbol is not None and _is_plain(step.symbol.parts) and image.kind == "ptx":
        names = KERNEL_OF_PTX.findall(image.path.read_text(errors="replace"))
        found = [name for name in names if re.search(step.symbol.text, name)]
        if len(found) != 1:
            what = f"{len(found)} kernels match" if found else "no kernel matches"
            has = ", ".join(names) or "none"
            return [f"{step.line}: {what} {step.symbol.text!r} in {image.path.name}; it has {has}"]
    return []


def _missing_function(image: Image, function: str, line: int) -> list[str]:
    if image.path is None or image.is_compiled:
        return []
    functions = read_library(image.path).functions
    if function in functions:
        return []
    close = difflib.get_close_matches(function, functions, n=3, cutoff=0.4)
    return [f"{line}: {image.path.name} has no function {function!r}; nearest: {', '.join(close) or 'none'}"]


def _is_plain(parts: tuple[str | Expression, ...]) -> bool:
    return all(isinstance(part, str) for part in parts)
