"""What compiled sources say of their kernels' blocks, held against the table's rows.

The host launches a kernel with the threads and the shared memory of its row. A source that was written for another
block would run all the same and give wrong results, or none, that say nothing of the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import SourceFile, find_source
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.entry import KernelVariant
from g4kv_cli.entries.table import kernel_variants
from g4kv_cli.errors import UsageError

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(.*?\)\s*((?:\.\w+[^{.]*)*)\{", re.DOTALL)
_THREADS = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def declared_threads(ptx: bytes) -> dict[str, int]:
    """Threads a block by kernel, of those that declare it (``__launch_bounds__``)."""
    found = {}
    for name, directives in _ENTRY.findall(ptx.decode()):
        stated = _THREADS.search(directives)
        if stated is not None:
            x, y, z = (int(extent or 1) for extent in stated.groups())
            found[name] = x * y * z
    return found


def stated_shared_bytes(source: SourceFile, symbol: str) -> int | None:
    """The dynamic shared memory a block that the source states for a kernel; None where it does not.

    It is the last number of the line that names the kernel, ``G4KV_...(symbol, ..., bytes)``, and the source asserts it
    against its own layout.
    """
    stated = re.search(rf"\(\s*{symbol}\s*,[^;()]*?\b(\d+)\s*\)", source.text)
    return None if stated is None else int(stated[1])


def compile_sources(device: Device, kernels_directory: Path | None, names: Iterable[str], forced: str = "") -> None:
    """Compile these sources for the device, so that a broken one is an error of the run, not of each case.

    A source none of whose kernels the device can run is left out, and one whose kernels it runs on request alone unless
    ``forced`` (see choose_variant) names them. Kernels of a directory must have the blocks that
    the table launches them with. Raises CompileError; UsageError.
    """
    for name in dict.fromkeys(names):
        source = find_source(name, kernels_directory)
        kernels = [kernel for kernel in kernel_variants().values() if kernel.source == name]
        by_arch: dict[str, list[KernelVariant]] = {}
        for kernel in kernels:
            asked = not {kernel.path, kernel.symbol}.isdisjoint(forced.split(","))
            wanted = asked or device.info.kind not in kernel.on_request
            if wanted and device.info.kind in kernel.device_kinds and kernel.suits(device.info.arch):
                by_arch.setdefault(kernel.arch_on(device.info.arch), []).append(kernel)
        for arch, built in by_arch.items():
            compile_image(source, arch=arch, kind=device.image_kind)
            if kernels_directory is not None:
                require_shapes(source, compile_image(source, arch=arch, kind="ptx").data, built)


def require_shapes(source: SourceFile, ptx: bytes, kernels: Iterable[KernelVariant]) -> None:
    """Raises UsageError for the first kernel whose block is not its row's. A kernel that declares none passes."""
    threads = declared_threads(ptx)
    for kernel in kernels:
        shared = stated_shared_bytes(source, kernel.symbol) if kernel.shared_bytes else None
        pairs = (
            ("threads a block", threads.get(kernel.symbol), kernel.threads),
            ("bytes of shared memory", shared, kernel.shared_bytes),
        )
        for what, stated, launched in pairs:
            if stated is not None and stated != launched:
                raise UsageError(
                    f"{source.path or source.name}: {kernel.symbol} is written for {stated} {what}, and is launched "
                    f"with {launched} (entries/table.py): keep the block of the built-in kernel, or change its row too"
                )
