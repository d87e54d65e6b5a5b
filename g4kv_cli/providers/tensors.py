"""Arrays as DLPack tensors (array API standard, ``__dlpack__``): on the host NumPy arrays that torch and JAX take too,
bfloat16 among them, which NumPy's own exchange does not know; on a GPU what lies there, without a copy.

The structures are those of dlpack.h (dmlc/dlpack, version 1.0).
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import DeviceArray

CPU, CUDA = 1, 2  # DLDeviceType
_CODES = {"i": 0, "u": 1, "f": 2}  # DLDataTypeCode
_BFLOAT, _BOOL = 4, 6
_LEGACY_STREAM = 1
"""In which a producer's GPU work is waited for, as ``__dlpack__`` takes it."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VERSION = (1, 0)


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_alive: dict[int, Any] = {}
"""What an exported tensor needs, until its consumer lets it go, by the structure's address."""


def _let_go(address: int) -> None:
    _alive.pop(address, None)


_release = _Deleter(_let_go)


_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_PLAIN_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_offered: list[tuple[Any, int]] = []
"""Capsules that may not have been taken, with their structures. They have no destructor: it would run Python code while
a consumer's error is pending."""


def let_go_of_unused() -> None:
    """Forget the structures of capsules that nobody has taken and nobody holds; a consumer renames what it takes."""
    kept = []
    while _offered:
        capsule, address = _offered.pop()
        is_open = any(_python.PyCapsule_IsValid(capsule, name) for name in (_PLAIN_NAME, _VERSIONED_NAME))
        if is_open and sys.getrefcount(capsule) > _OWN_REFERENCES:
            kept.append((capsule, address))
        elif is_open:
            _let_go(address)
    _offered.extend(kept)


_OWN_REFERENCES = 2
"""The name ``capsule`` and the argument of getrefcount."""


def _capsule(address: int, owner: Any, device: tuple[int, int], array: Any, max_version: tuple[int, int] | None) -> Any:
    """A capsule of the memory at ``address``; ``array`` says its shape, dtype and strides in bytes."""
    kind = np.dtype(array.dtype)
    code = _BFLOAT if kind == _BFLOAT16 else _CODES.get(kind.kind)
    if code is None:
        raise BufferError(f"DLPack has no type for {kind}")
    rank = len(array.shape)
    extents = (ctypes.c_int64 * max(rank, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*(step // kind.itemsize for step in array.strides))
    tensor = _DLTensor(
        address, _DLDevice(*device), rank, _DLDataType(code, 8 * kind.itemsize, 1),
        ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    is_versioned = max_version is not None and max_version[0] >= 1
    managed: _Managed | _ManagedVersioned
    managed = (
        _ManagedVersioned(*VERSION, None, _release, 0, tensor) if is_versioned else _Managed(tensor, None, _release)
    )
    _alive[ctypes.addressof(managed)] = (managed, extents, strides, owner)
    name = _VERSIONED_NAME if is_versioned else _PLAIN_NAME
    capsule = _python.PyCapsule_New(ctypes.addressof(managed), name, None)
    _offered.append((capsule, ctypes.addressof(managed)))
    return capsule


class HostTensor(np.ndarray[Any, Any]):
    """A NumPy array that can be handed on by DLPack in every type that kernels use."""

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_options: Any) -> Any:
        """A capsule that shares the memory, writable."""
        return _capsule(self.ctypes.data, self, (CPU, 0), self, max_version)

    def __dlpack_device__(self) -> tuple[Literal[1], Literal[0]]:
        """The host."""
        return 1, 0


class DeviceTensor:
    """An array on a GPU: ``torch.from_dlpack(tensor)`` shares its memory. What was queued before has been done."""

    def __init__(self, array: DeviceArray, ordinal: int) -> None:
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides_bytes
        self._array, self._ordinal = array, ordinal

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_options: Any) -> Any:
        """A capsule that shares the memory, writable. The stream is not asked for: nothing is pending in any."""
        return _capsule(self._array.address, self._array, (CUDA, self._ordinal), self, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The GPU."""
        return CUDA, self._ordinal


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """Somebody else's contiguous tensor. ``owner`` has to live as long as its memory is read."""

    address: int
    device_type: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: object

    def on_host(self) -> npt.NDArray[Any]:
        """A copy of one that lies on the host."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        raw = ctypes.string_at(self.address, nbytes) if nbytes else b""
        return np.frombuffer(raw, self.dtype).reshape(self.shape)


def given_tensor(value: Any) -> GivenTensor:
    """What any library's array says of itself by DLPack. Raises TypeError for what is none, BufferError for a tensor
    with gaps or of a type that kernels have not."""
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{type(value).__name__} is no array (it has no __dlpack__)")
    device_type = int(value.__dlpack_device__()[0])
    capsule = value.__dlpack__() if device_type == CPU else value.__dlpack__(stream=_LEGACY_STREAM)
    tensor = _Managed.from_address(_python.PyCapsule_GetPointer(capsule, _PLAIN_NAME)).dl_tensor
    shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
    code, width, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    letters = {number: letter for letter, number in _CODES.items()}
    if lanes != 1 or width % 8 or not (code in letters or (code, width) in ((_BFLOAT, 16), (_BOOL, 8))):
        raise BufferError(f"its elements are of DLPack's type {code} with {width} bits, which no array here has")
    kind = _BFLOAT16 if code == _BFLOAT else np.dtype(bool if code == _BOOL else f"{letters[code]}{width // 8}")
    strides = [tensor.strides[at] for at in range(tensor.ndim)] if tensor.strides and 0 not in shape else []
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=False):
        if extent > 1 and stride != step:
            raise BufferError("it has gaps between its elements: give a contiguous one")
        step *= extent
    return GivenTensor((tensor.data or 0) + tensor.byte_offset, device_type, shape, kind, (value, capsule))


def host_tensor(values: npt.NDArray[Any]) -> HostTensor:
    """The values as a tensor, sharing their memory."""
    return values.view(HostTensor)
