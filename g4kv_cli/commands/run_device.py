"""Runs a kernel through the interface of all devices: on a GPU, where nothing is checked but what the driver sees."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from g4kv_cli.device.arguments import Argument, pointer
from g4kv_cli.device.interface import Device, DeviceArray, Launch
from g4kv_cli.emulator.arguments import HostBuffer, is_same, prepare
from g4kv_cli.emulator.errors import Unsupported
from g4kv_cli.emulator.mangled import read_symbol
from g4kv_cli.emulator.module import Module
from g4kv_cli.emulator.names import kernel_words
from g4kv_cli.records.run import KernelImage


def launch_on(
    device: Device,
    module: Module,
    symbol: str,
    image: bytes,
    extents: tuple[tuple[int, int, int], tuple[int, int, int]],
    arguments: Mapping[str, Any],
    shared: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
) -> None:
    """Launch and wait; arrays on the host hold what the kernel left in them.

    ``image`` is of the device's kind. Raises ArgumentError and ContractError before the launch, DeviceFault after it.
    """
    parameters = module.parameters(symbol)
    name = kernel_words(symbol)
    prepared = prepare(name, parameters, read_symbol(symbol), arguments)
    loaded = device.load(_image(device, module, image), symbol)
    placed: list[tuple[HostBuffer, DeviceArray]] = []
    try:
        values = []
        for item, parameter in zip(prepared, parameters, strict=True):
            if isinstance(item, HostBuffer):
                values.append(pointer(_place(device, item, placed).address))
            elif isinstance(item, bytes):
                is_float = parameter.kind.startswith("f") and not parameter.is_array
                kind = "struct" if parameter.is_array else f"{'f' if is_float else 'u'}{8 * parameter.nbytes}"
                values.append(Argument(kind, item))  # type: ignore[arg-type]
        outputs = tuple(array for buffer, array in placed if buffer.is_output)
        launch = Launch(
            *extents,
            tuple(values),
            shared,
            must_write=outputs,
            cluster=cluster,
            cooperative=_is_cooperative(module, symbol),
        )
        device.launch(loaded, launch)
        device.synchronize()
        for buffer, array in placed:
            if buffer.array.flags.writeable and buffer.array.size:
                buffer.array[...] = device.read(array).view(buffer.array.dtype).reshape(buffer.array.shape)
    finally:
        if not device.is_lost:
            device.free_all([array for _, array in placed])


def _is_cooperative(module: Module, symbol: str) -> bool:
    """Whether the kernel has a barrier of its grid, as far as that can be seen without a GPU."""
    try:
        return module.kernel(symbol).handle.synchronises_grid
    except Unsupported:
        return False


def _place(device: Device, buffer: HostBuffer, placed: list[tuple[HostBuffer, DeviceArray]]) -> DeviceArray:
    for known, array in placed:
        if is_same(known.array, buffer.array):
            return array
    raw = buffer.array.reshape(-1).view(np.uint8)
    array = device.allocate(raw.shape, np.uint8, buffer.label) if buffer.is_output else device.upload(raw, buffer.label)
    placed.append((buffer, array))
    return array


def _image(device: Device, module: Module, data: bytes) -> KernelImage:
    kind = device.image_kind if not data.lstrip().startswith((b"//", b".version")) else "ptx"
    return KernelImage(kind, device.info.arch, module.name, data, hashlib.sha256(data).hexdigest(), "")
