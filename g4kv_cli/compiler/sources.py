"""Kernel sources with the headers they include, as text: what is hashed is exactly what is compiled.

The built-in sources lie in ``g4kv_cli/kernels``. A directory of one's own overlays them: a file of the same
name there wins, and what is missing there comes from the built-in ones.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from g4kv_cli.errors import UsageError

BUILT_IN_KERNELS_DIRECTORY = Path(__file__).resolve().parent.parent / "kernels"
SOURCE_SUFFIXES = (".cu", ".cuh", ".h", ".hpp")

_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Header:
    """A header as the sources name it, with its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One translation unit: its text and all headers of ours that it includes, directly or not.

    ``name`` is what the compiler calls it in messages and line tables (``merge.cu``); ``path`` is where it was
    read, None for text made in memory. Headers of the CUDA toolkit are not in ``headers``.
    """

    name: str
    text: str
    headers: tuple[Header, ...] = ()
    path: Path | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the name, the text and every header, as hex."""
        return _digest([(self.name, self.text), *((header.name, header.text) for header in self.headers)])

    @staticmethod
    def from_text(name: str, text: str, directory: Path | None = None) -> SourceFile:
        """A translation unit from text; its headers are looked up as :func:`find_source` does."""
        return SourceFile(name, text, _collect_headers(text, _Files(directory)))


def find_source(name: str, directory: Path | None = None) -> SourceFile:
    """Read the kernel source ``name`` (``merge.cu``) from ``directory``, or from the built-in kernels.

    Raises UsageError if the directory does not exist, or if the file is in neither place or unreadable.
    """
    return _find(name, directory, _Files(directory))


def _find(name: str, directory: Path | None, files: _Files) -> SourceFile:
    path = _locate(name, files.search)
    if path is None:
        known = source_names(directory)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise UsageError(f"no kernel source {name} in {' or '.join(str(place) for place in files.search)}; {hint}")
    text = _read(path)
    return SourceFile(name, text, _collect_headers(text, files), path)


def source_names(directory: Path | None = None) -> tuple[str, ...]:
    """Names of all translation units (``*.cu``), those of ``directory`` and the built-in ones, sorted."""
    return tuple(name for name in sorted(_all_files(directory)) if name.endswith(".cu"))


def kernels_digest(names: Iterable[str], directory: Path | None = None) -> str:
    """SHA-256 over these translation units and all headers they include, as hex: what a run compiles.

    Raises UsageError like :func:`find_source`.
    """
    files = _Files(directory)  # the units have most headers in common
    return _digest([(name, _find(name, directory, files).digest) for name in sorted(set(names))])


def require_overlay(directory: Path, *, with_own: bool = False) -> None:
    """Raises UsageError if nothing in ``directory`` takes a built-in file's place: a run would test the built-in ones.

    ``with_own``: a translation unit of another name will do.
    """
    ours = {path.name for path in BUILT_IN_KERNELS_DIRECTORY.iterdir() if path.suffix in SOURCE_SUFFIXES}
    theirs = {path.name for path in directory.iterdir() if path.is_file() and path.suffix in SOURCE_SUFFIXES}
    if theirs & ours or (with_own and any(name.endswith(".cu") for name in theirs)):
        return
    raise UsageError(
        f"--kernels {directory}: nothing there replaces a built-in file; those are: {', '.join(sorted(ours))}"
    )


def _all_files(directory: Path | None) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for place in reversed(_search_path(directory)):
        if place.is_dir():
            files.update({path.name: path for path in place.iterdir() if path.suffix in SOURCE_SUFFIXES})
    return files


def _search_path(directory: Path | None) -> tuple[Path, ...]:
    if directory is None:
        return (BUILT_IN_KERNELS_DIRECTORY,)
    if not directory.is_dir():
        raise UsageError(f"the kernels directory {directory} does not exist; name a directory with .cu files")
    return (directory, BUILT_IN_KERNELS_DIRECTORY)


def _locate(name: str, search: tuple[Path, ...]) -> Path | None:
    for place in search:
        path = place / name
        if path.is_file():
            return path
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read the kernel source {path}: {why}; make it a readable text file") from error


class _Files:
    """Headers in the search path of a directory, each read once, and the names that they include."""

    def __init__(self, directory: Path | None) -> None:
        self.search = _search_path(directory)
        self._known: dict[str, tuple[Header, list[str]] | None] = {}

    def header(self, name: str) -> tuple[Header, list[str]] | None:
        """A header and what it includes; None if it lies nowhere."""
        if name not in self._known:
            path = _locate(name, self.search)
            text = "" if path is None else _read(path)
            self._known[name] = None if path is None else (Header(name, text), _QUOTED_INCLUDE.findall(text))
        return self._known[name]


def _collect_headers(text: str, files: _Files) -> tuple[Header, ...]:
    """All quoted includes that lie in the search path, recursively, sorted by name.

    An include inside ``#if 0`` is collected too: harmless, it only widens the digest. A quoted name that lies
    in no kernel directory is left to the compiler (a toolkit header, or an error with its line).
    """
    found: dict[str, Header] = {}
    pending = _QUOTED_INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        known = None if name in found else files.header(name)
        if known is not None:
            found[name], included = known
            pending.extend(included)
    return tuple(found[name] for name in sorted(found))


def _digest(files: list[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, text in files:
        total.update(hashlib.sha256(name.encode()).digest())
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()
