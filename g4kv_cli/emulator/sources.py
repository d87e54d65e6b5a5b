"""What can be loaded: CUDA source, PTX, a fat binary, an object or a shared library of nvcc, as text, bytes or file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from g4kv_cli.compiler.fatbin import ptx_of_library, ptx_texts
from g4kv_cli.compiler.foreign import compile_foreign, includes_own
from g4kv_cli.emulator.errors import SourceError
from g4kv_cli.errors import UsageError

DEFAULT_ARCH = "sm_90"
NEWEST_PTX = (9, 5)
"""The PTX ISA of the newest compiler whose text was read (NVRTC 13.5)."""
_IS_PTX = re.compile(r"^\s*\.version\s+(\S+)", re.MULTILINE)
_ADDRESS_SIZE = re.compile(r"^\s*\.address_size\s+(\d+)", re.MULTILINE)
_ELF, _FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """PTX texts under the name that messages give them; of CUDA source its text, the compiler's log and the symbols of
    name expressions too."""

    name: str
    ptx: tuple[str, ...]
    text: str = ""
    log: str = ""
    symbols: Mapping[str, str] = field(default_factory=dict)


def read_source(
    source: str | bytes | Path,
    *,
    arch: str | None = None,
    options: Sequence[str] = (),
    include: Sequence[str | Path] = (),
    names: Sequence[str] = (),
) -> LoadedSource:
    """PTX of ``source``, compiled if it is CUDA (see ``Emulator.load``). SourceError, CompileError, UsageError."""
    for what, value in (("options", options), ("include", include), ("names", names)):
        if isinstance(value, (str, bytes, Path)):
            raise UsageError(f"{what} is {value!r}; give a list of them")
    name, data, path = _contents(source)
    texts = _ptx_of(name, data, path)
    if texts is not None:
        for what, given in (("arch", arch), ("options", options), ("include", include), ("names", names)):
            if given:
                raise UsageError(f"{what} is for CUDA source; {name} is compiled already")
        return LoadedSource(name, tuple(_checked_ptx(name, text) for text in texts))
    text = _text_of(name, data)
    directories = [Path(directory) for directory in include]
    if path is not None and includes_own(text):
        directories.insert(0, path.resolve().parent)
    made = compile_foreign(
        name, text, arch=arch or DEFAULT_ARCH, options=tuple(options), include=directories, expressions=tuple(names)
    )
    return LoadedSource(name, (made.data.decode(),), text, made.log, made.symbols)


def _contents(source: str | bytes | Path) -> tuple[str, bytes, Path | None]:
    """(name for messages, bytes, the file they are of)."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "(bytes)", bytes(source), None
    if not isinstance(source, (str, Path)):
        raise SourceError(f"{type(source).__name__} is nothing to load; give CUDA or PTX text, bytes, or a file's path")
    if isinstance(source, str) and ("\n" in source or "{" in source or "__global__" in source):
        return "source.cu", source.encode(), None
    if not str(source).strip():
        raise SourceError("the source is empty; give CUDA or PTX text, or a file's path")
    path = Path(source)
    try:
        return path.name, path.read_bytes(), path
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SourceError(f"cannot read {path}: {why}; name a .cu, .ptx, .fatbin, .o or .so file") from error


def _ptx_of(name: str, data: bytes, path: Path | None) -> list[str] | None:
    """The PTX texts in what was given; None for CUDA source."""
    if data.startswith(_FATBIN):
        return ptx_texts(data, name)
    if data.startswith(_ELF):
        if path is None:
            raise SourceError("an object or shared library is loaded by its path, not by its bytes")
        return ptx_of_library(path)
    head = data.rstrip(b"\0")
    return [_text_of(name, head)] if _IS_PTX.search(head.decode(errors="replace")) else None


def _text_of(name: str, data: bytes) -> str:
    if not data.strip():
        raise SourceError(f"{name} is empty")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{name} is neither text nor a fat binary, an object or a shared library of Linux") from error


def _checked_ptx(name: str, text: str) -> str:
    """The text, if it is of a version and an address size that are known."""
    found = _IS_PTX.search(text)
    version = found.group(1) if found else ""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", version)
    if numbers is None or int(numbers[1]) < 1:
        raise SourceError(f"{name}: .version {version} is no version of PTX; it is written as .version 8.0")
    if (int(numbers[1]), int(numbers[2])) > NEWEST_PTX:
        newest = ".".join(map(str, NEWEST_PTX))
        raise SourceError(f"{name} is PTX {version}, the newest known is {newest}; make it with an older compiler")
    size = _ADDRESS_SIZE.search(text)
    if size is not None and size[1] != "64":
        raise SourceError(f"{name} has addresses of {size[1]} bits; only 64 are known")
    return text
