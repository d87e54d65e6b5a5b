"""Short ways to launch a test kernel on a fresh machine."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.emulated import Fault, Kernel, LaunchFault, LaunchReport, Machine


def pointer(address: int) -> bytes:
    """A device address as a kernel argument."""
    return struct.pack("<Q", address)


def int32(value: Any) -> bytes:
    """A 32-bit integer as a kernel argument."""
    return struct.pack("<i", int(value))


def float32(value: Any) -> bytes:
    """A float as a kernel argument."""
    return struct.pack("<f", float(value))


def upload(machine: Machine, values: npt.NDArray[Any], label: str) -> int:
    """A new allocation with these contents."""
    address = machine.allocate(values.nbytes, label)
    machine.write(address, values)
    return address


def launch_on(
    machine: Machine, kernel: Kernel, *arguments: bytes, grid: int = 1, block: int = 32, **options: Any
) -> LaunchReport:
    """A one-dimensional launch."""
    return machine.launch(kernel, (grid, 1, 1), (block, 1, 1), list(arguments), **options)


def faults_of(
    machine: Machine, kernel: Kernel, *arguments: bytes, grid: int = 1, block: int = 32, **options: Any
) -> list[Fault]:
    """The faults of a launch; empty if it is clean."""
    try:
        launch_on(machine, kernel, *arguments, grid=grid, block=block, **options)
    except LaunchFault as error:
        return error.faults
    return []


def read_as(machine: Machine, address: int, count: int, dtype: Any) -> npt.NDArray[Any]:
    """Device elements on the host."""
    kind = np.dtype(dtype)
    return machine.read(address, count * kind.itemsize).view(kind)
