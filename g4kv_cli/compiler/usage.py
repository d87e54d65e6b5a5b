"""What a kernel costs on the chip, as the assembler states it (``--ptxas-options=-v``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """One kernel: registers, stack and spill bytes per thread, static shared bytes per block."""

    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


def resource_usage(log: str) -> tuple[ResourceUsage, ...]:
    """Read the assembler's report of every kernel in a compiler log, in its order.

    A device function that was not inlined has a frame of its own; its bytes count to the kernel before it.
    """
    found: list[dict[str, int | str]] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            found.append(dict.fromkeys(("registers", "stack", "stores", "loads", "shared"), 0))
            found[-1].update(kernel=entry.group(1), arch=entry.group(2))
        if not found:
            continue
        current = found[-1]
        if frame := _FRAME.search(line):
            for name, text in zip(("stack", "stores", "loads"), frame.groups(), strict=True):
                current[name] = int(current[name]) + int(text)
        if registers := _REGISTERS.search(line):
            current["registers"] = int(registers.group(1))
            if shared := _SHARED.search(line):
                current["shared"] = int(shared.group(1))
    return tuple(
        ResourceUsage(
            kernel=str(item["kernel"]),
            arch=str(item["arch"]),
            registers=int(item["registers"]),
            stack_bytes=int(item["stack"]),
            spill_store_bytes=int(item["stores"]),
            spill_load_bytes=int(item["loads"]),
            static_shared_bytes=int(item["shared"]),
        )
        for item in found
    )
