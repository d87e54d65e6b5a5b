"""Any CUDA kernel without a GPU: an emulated device with an H200's arithmetic, as a library.

    import numpy as np
    from g4kv_cli import emulator

    module = emulator.load("scale.cu")  # or CUDA or PTX text
    x = np.arange(1024, dtype=np.float32)
    report = module.launch("scale", grid=4, block=256, args=[x, 2.0, x.size])
    print(report)  # and x holds what the kernel stored

A launch holds every access against races, bounds, alignment, memory that nobody wrote, barriers in divergent code and
more, and raises LaunchFailed with source line, block and thread. ``policy`` reports or ignores a kind instead:
``emulator.load(..., policy={"block_write_conflict": "report"})``.

``load`` makes a device of its own for what it loads; ``Emulator`` is one that several modules share, with memory that
stays (``array``, ``empty``). ``Module.get`` and ``set`` reach ``__device__`` and ``__constant__`` variables. Every
mistake of the caller is a G4kvError whose text is one line; they are in ``g4kv_cli.emulator.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g4kv_cli.device.emulated import Fault, LaunchReport
from g4kv_cli.emulator.device import DEFAULT_SECONDS, Emulator
from g4kv_cli.emulator.errors import (
    ArgumentError,
    DeviceLost,
    KernelNotFound,
    LaunchFailed,
    LaunchRefused,
    LaunchTimedOut,
    SourceError,
    SymbolError,
    Unsupported,
)
from g4kv_cli.emulator.memory import Address, DeviceArray, out, tensor_map
from g4kv_cli.emulator.module import Kernel, Module
from g4kv_cli.emulator.policy import Policy, PolicyLike
from g4kv_cli.emulator.report import Report
from g4kv_cli.errors import CompileError, G4kvError, UsageError

__all__ = [
    "Address",
    "ArgumentError",
    "CompileError",
    "DeviceArray",
    "DeviceLost",
    "Emulator",
    "Fault",
    "G4kvError",
    "Kernel",
    "KernelNotFound",
    "LaunchFailed",
    "LaunchRefused",
    "LaunchReport",
    "LaunchTimedOut",
    "Module",
    "Policy",
    "Report",
    "SourceError",
    "SymbolError",
    "Unsupported",
    "UsageError",
    "launch",
    "load",
    "out",
    "tensor_map",
]


def load(
    source: str | bytes | Path,
    *,
    arch: str | None = None,
    options: Sequence[str] = (),
    include: Sequence[str | Path] = (),
    names: Sequence[str] = (),
    policy: PolicyLike | Policy = "raise",
    seconds: float = DEFAULT_SECONDS,
) -> Module:
    """Load code on an emulated device of its own: ``Emulator(policy, seconds).load(source, ...)``."""
    return Emulator(policy, seconds).load(source, arch=arch, options=options, include=include, names=names)


def launch(
    kernel: Kernel,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] | Mapping[str, Any] = (),
    **options: Any,
) -> Report:
    """``Emulator.launch`` on the device that the kernel was loaded on."""
    return kernel.module.emulator.launch(kernel, grid, block, args, **options)
