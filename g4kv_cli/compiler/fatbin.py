"""The PTX inside a fat binary, as nvcc embeds it in an object; the container was read from files that nvcc made."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from g4kv_cli.errors import CompileError, UsageError

_MAGIC_BYTES = struct.pack("<I", 0xBA55ED50)
_PTX = 1


@dataclass(slots=True)
class _Contents:
    """What a container holds: PTX by architecture, and how many entries of other kinds."""

    ptx: list[tuple[int, str]] = field(default_factory=list)
    compressed: int = 0
    machine_code: int = 0

    def texts(self, name: str) -> list[str]:
        """The PTX, newest architecture first. Raises CompileError if there is none."""
        if self.ptx:
            return [text for _, text in sorted(self.ptx, key=lambda item: -item[0])]
        if self.compressed:
            raise CompileError(f"{name} has its PTX compressed; build it with nvcc --no-compress")
        lacks = "machine code and no PTX" if self.machine_code else "no PTX"
        raise CompileError(
            f"{name} has {lacks}, which the emulated device needs; build it with -gencode "
            "arch=compute_90,code=compute_90 and without -rdc=true, which links machine code alone, or run it on a GPU"
        )


def ptx_of_library(path: Path) -> list[str]:
    """Every PTX text that a shared library embeds. Raises CompileError where there is none that can be read."""
    data = _section_of(path, ".nv_fatbin")
    contents = _Contents()
    at = data.find(_MAGIC_BYTES)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        _read(data[at : at + header + size], contents)
        at = data.find(_MAGIC_BYTES, at + header + size)
    return contents.texts(path.name)


def ptx_texts(data: bytes, name: str) -> list[str]:
    """Every PTX text of one container, newest architecture first. CompileError for compressed PTX, or none."""
    if len(data) < 16 or not data.startswith(_MAGIC_BYTES):
        raise CompileError(f"{name}: what it registers with CUDA is no fat binary")
    contents = _Contents()
    _read(data, contents)
    return contents.texts(name)


def _section_of(path: Path, name: str) -> bytes:
    """The bytes of a section, empty if the library has none of this name. Raises UsageError."""
    try:
        with path.open("rb") as file:
            section = ELFFile(file).get_section_by_name(name)
            return b"" if section is None else bytes(section.data())
    except OSError as error:
        raise UsageError(f"library {path} cannot be read: {error.strerror}") from error
    except ELFError as error:
        raise UsageError(f"{path} is no shared library of Linux: {error}") from error


def _read(data: bytes, contents: _Contents) -> None:
    _, _, header, size = struct.unpack_from("<IHHQ", data)
    at, end = header, min(header + size, len(data))
    while at + 64 <= end:
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        body = data[at + entry_header : at + entry_header + payload]
        if kind == _PTX and b".version" in body[:4096]:
            contents.ptx.append((arch, body.rstrip(b"\0").decode()))
        elif kind == _PTX:
            contents.compressed += 1
        else:
            contents.machine_code += 1
        at += entry_header + payload
