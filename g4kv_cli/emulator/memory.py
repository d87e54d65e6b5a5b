"""Device memory as a program holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.emulator.errors import ArgumentError, DeviceLost

if TYPE_CHECKING:
    from g4kv_cli.device.emulated import Machine

HostArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Address:
    """A device address as an argument: ``array.at(4)``, or one that you computed. 0 is null."""

    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A NumPy array whose contents do not matter to the kernel; made by :func:`out`."""

    array: HostArray


def out(array: HostArray) -> Output:
    """An array that the kernel only fills: it begins uninitialised on the device, so that a read before a store is
    found (``uninitialised_read``), and so is an element that no thread stored (``unwritten_output``)."""
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"out() takes a NumPy array, not {type(array).__name__}")
    return Output(array)


@dataclass(frozen=True, slots=True, eq=False)
class TensorMapOf:
    """A tensor map of an array, for bulk tensor copies; made by :func:`tensor_map`."""

    of: HostArray | Output | DeviceArray
    box: tuple[int, ...]
    swizzle_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the array."""
        return self.of.array.shape if isinstance(self.of, Output) else self.of.shape

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the array's elements."""
        return (self.of.array if isinstance(self.of, Output) else self.of).dtype


def tensor_map(array: HostArray | Output | DeviceArray, box: Sequence[int], *, swizzle_bytes: int = 0) -> TensorMapOf:
    """A ``CUtensorMap`` of an array as an argument: what ``cuTensorMapEncodeTiled`` makes on a GPU.

    array: as any argument, of 1 to 5 axes; elements outside of it are read as zeros and not written.
    box: extents of what one copy moves, in the order of the array's axes, the innermost last.
    swizzle_bytes: 0, 32, 64 or 128.

    What the driver would refuse is an ArgumentError at the launch.
    """
    if not isinstance(array, (np.ndarray, Output, DeviceArray)):
        raise ArgumentError(f"tensor_map() takes an array, not {type(array).__name__}")
    return TensorMapOf(array, tuple(int(extent) for extent in box), swizzle_bytes)


class DeviceArray:
    """An array in device memory that lives from launch to launch; ``Emulator.array`` and ``Emulator.empty`` make it.

    ``address`` is the device address of element 0, for structs and arrays of pointers.
    """

    def __init__(self, machine: Machine, shape: tuple[int, ...], dtype: np.dtype[Any], label: str) -> None:
        self.machine = machine
        self.shape = shape
        self.dtype = dtype
        self.label = label
        self.is_freed = False
        self.address = machine.allocate(self.nbytes, label)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def at(self, element: int) -> Address:
        """The address of an element, counted row by row; one behind the last is allowed."""
        if not 0 <= element <= self.size:
            raise ArgumentError(f"element {element} of {self.label} is outside its {self.size} elements")
        return Address(self.address + element * self.dtype.itemsize)

    def read(self) -> HostArray:
        """A copy on the host. What nobody wrote reads as it lies there."""
        self._require_live()
        values: HostArray = self.machine.read(self.address, self.nbytes).view(self.dtype)
        return values.reshape(self.shape)

    def write(self, values: HostArray) -> None:
        """Copy host values of this shape and dtype to the device."""
        self._require_live()
        if not isinstance(values, np.ndarray) or values.shape != self.shape or values.dtype != self.dtype:
            got = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ArgumentError(f"{self.label} holds {self.dtype} {list(self.shape)}, not {got}")
        self.machine.write(self.address, np.ascontiguousarray(values))

    def free(self) -> None:
        """Give the memory back; a kernel that still uses it is found (``use_after_free``)."""
        self._require_live()
        self.is_freed = True
        self.machine.free(self.address)

    def _require_live(self) -> None:
        if self.is_freed:
            raise ArgumentError(f"{self.label} was freed")

    def require_on(self, machine: Machine) -> None:
        """Raises DeviceLost or ArgumentError unless the array is live memory of this machine."""
        if self.machine is not machine:
            raise DeviceLost(f"{self.label} is memory of another device, or from before a reset; make it anew")
        self._require_live()

    def __repr__(self) -> str:
        return f"DeviceArray({self.label}: {self.dtype} {list(self.shape)} at {self.address:#x})"
