"""The PTX inside a fat binary, as nvcc embeds it in an object; the container was read from files that nvcc made."""

from __future__ import annotations

import struct

from g4kv_cli.errors import CompileError

_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2
_COMPRESSED_FLAGS = 0x2000 | 0x8000
"""Set for entries that LZ4 or Zstandard made smaller."""


def ptx_texts(data: bytes, name: str) -> list[str]:
    """Every PTX text of the container, newest architecture first. CompileError for compressed PTX, or none."""
    if len(data) < 16 or struct.unpack_from("<I", data)[0] != _MAGIC:
        raise CompileError(f"{name}: what it registers with CUDA is no fat binary")
    _, _, header, size = struct.unpack_from("<IHHQ", data)
    found: list[tuple[int, str]] = []
    machine_code = compressed = 0
    at, end = header, min(header + size, len(data))
    while at + 64 <= end:
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        body = data[at + entry_header : at + entry_header + payload]
        if kind == _PTX and b".version" in body[:4096]:
            found.append((arch, body.rstrip(b"\0").decode()))
        elif kind == _PTX:
            compressed += 1
        else:
            machine_code += 1
        at += entry_header + payload
    if found:
        return [text for _, text in sorted(found, key=lambda item: -item[0])]
    if compressed:
        raise CompileError(f"{name} has its PTX compressed; build it with nvcc --no-compress")
    raise CompileError(
        f"{name} has machine code for {machine_code} architectures and no PTX, which the emulated device needs; build "
        "it with -gencode arch=compute_90,code=compute_90, or run it on a GPU"
    )
