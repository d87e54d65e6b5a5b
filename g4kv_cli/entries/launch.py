"""The only launch in the code base. Everything is checked before it, nothing after."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from g4kv_cli.device.arguments import Argument, by_value
from g4kv_cli.device.interface import DeviceArray, Launch, PagedReads
from g4kv_cli.entries.library import KernelLibrary


def launch(
    library: KernelLibrary,
    source_name: str,
    symbol: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[ctypes.Structure | Argument],
    dynamic_shared_bytes: int = 0,
    must_write: Sequence[DeviceArray] = (),
    may_collide: Sequence[DeviceArray] = (),
    cluster: tuple[int, int, int] = (1, 1, 1),
    overlap: bool = False,
    paged_reads: Sequence[PagedReads] = (),
    arch_specific: bool = False,
) -> None:
    """Queue one kernel; a struct among the arguments is passed by value, the rest as Launch says.

    ``arch_specific``: the kernel uses instructions of this very architecture (``sm_90a``). Raises CompileError or
    DeviceFault.
    """
    kernel = library.kernel(source_name, symbol, arch_specific=arch_specific)
    request = Launch(
        grid=grid,
        block=block,
        arguments=tuple(
            argument if isinstance(argument, Argument) else by_value(library.pack(argument)) for argument in arguments
        ),
        dynamic_shared_bytes=dynamic_shared_bytes,
        must_write=tuple(must_write),
        may_collide=tuple(may_collide),
        cluster=cluster,
        overlap=overlap,
        paged_reads=tuple(paged_reads),
    )
    library.device.launch(kernel, request)
