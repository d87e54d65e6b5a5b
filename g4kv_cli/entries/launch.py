"""The only launch in the code base. Everything is checked before it, nothing after."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from g4kv_cli.device.interface import DeviceArray, Launch
from g4kv_cli.entries.library import KernelLibrary


def launch(
    library: KernelLibrary,
    source_name: str,
    symbol: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: ctypes.Structure,
    dynamic_shared_bytes: int = 0,
    must_write: Sequence[DeviceArray] = (),
    may_collide: Sequence[DeviceArray] = (),
) -> None:
    """Queue one kernel with its by-value parameter struct. Raises CompileError or DeviceFault."""
    kernel = library.kernel(source_name, symbol)
    request = Launch(
        grid=grid,
        block=block,
        parameters=library.pack(parameters),
        dynamic_shared_bytes=dynamic_shared_bytes,
        must_write=tuple(must_write),
        may_collide=tuple(may_collide),
    )
    library.device.launch(kernel, request)
