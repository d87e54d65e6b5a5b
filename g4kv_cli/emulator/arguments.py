"""Arguments of a launch held against what the kernel's PTX, and its C++ symbol where there is one, say of them.

Nothing is converted that C++ would not convert without loss: an int that fits, a Python float for float or double.
NumPy scalars and arrays, ctypes values and structs keep their bytes, so their type has to be the parameter's.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g4kv_cli.device.emulated.memory.tensor_map import TENSOR_MAP_BYTES
from g4kv_cli.device.emulated.ptx.parse import Parameter
from g4kv_cli.emulator.element_types import host_name, mismatch
from g4kv_cli.emulator.errors import ArgumentError
from g4kv_cli.emulator.mangled import CxxType, Signature
from g4kv_cli.emulator.memory import Address, DeviceArray, HostArray, Output, TensorMapOf

POINTER_BYTES = 8
_FOR_A_POINTER = "an array, a device array, an Address or None"
_UNSIGNED_WORDS = ("unsigned", "bool")


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """An array on the host that has to be in device memory during the launch."""

    array: HostArray
    label: str
    is_output: bool


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor map, made when its memory has an address."""

    memory: HostBuffer | DeviceArray
    extents: tuple[int, ...]
    box: tuple[int, ...]
    element_bytes: int
    swizzle_bytes: int
    kind: str
    """Type of its elements as tensor maps have it; empty if they have none such."""
    place: str
    """Which argument it is, for messages."""


Prepared = bytes | HostBuffer | DeviceArray | TensorArgument
"""An argument that passed: the parameter's bytes, or memory whose address it takes, or a map of."""


def memory_of(argument: Prepared) -> HostBuffer | DeviceArray | None:
    """The memory that an argument is about."""
    if isinstance(argument, TensorArgument):
        return argument.memory
    return None if isinstance(argument, bytes) else argument


@dataclass(frozen=True, slots=True)
class _Place:
    """Which argument is looked at, for messages."""

    name: str
    kernel: str
    parameter: Parameter
    kind: CxxType | None

    def fail(self, words: str) -> ArgumentError:
        return ArgumentError(f"{self.name} of {self.kernel}: {words}")

    @property
    def takes(self) -> str:
        """What the parameter is, in words."""
        return parameter_words(self.parameter, self.kind)


def parameter_words(parameter: Parameter, kind: CxxType | None) -> str:
    """A parameter's C++ type where it is known, else what the PTX says of it."""
    if kind is not None:
        return str(kind)
    if parameter.is_array:
        return f"a struct of {parameter.nbytes} bytes"
    if parameter.is_pointer:
        return "a pointer"
    if parameter.kind.startswith("f"):
        return {2: "a 16-bit float", 4: "a float", 8: "a double"}[parameter.nbytes]
    bits = 8 * parameter.nbytes
    return "a pointer or a 64-bit integer" if bits == 64 else f"an integer of {bits} bits"


def prepare(
    kernel: str,
    parameters: Sequence[Parameter],
    signature: Signature | None,
    arguments: Sequence[Any] | Mapping[str, Any],
) -> list[Prepared]:
    """One prepared argument for each parameter. A mapping names them, in the parameters' order, for messages.

    Raises ArgumentError for what the kernel does not take; nothing was allocated or copied then.
    """
    if isinstance(arguments, (str, bytes, np.ndarray)) or not isinstance(arguments, (Sequence, Mapping)):
        raise ArgumentError(f"the arguments of {kernel} are a list, not {host_name(arguments)}; write args=[...]")
    named = list(arguments.items()) if isinstance(arguments, Mapping) else None
    if named is None:
        named = [(f"args[{number}]", value) for number, value in enumerate(arguments)]
    if len(named) != len(parameters):
        taken = f"{len(parameters)} argument{'' if len(parameters) == 1 else 's'}"
        raise ArgumentError(f"{kernel} takes {taken}, {len(named)} given")
    kinds: Sequence[CxxType | None] = [None] * len(parameters)
    if signature is not None and len(signature.parameters) == len(parameters):
        kinds = signature.parameters
    prepared = []
    for (name, value), parameter, kind in zip(named, parameters, kinds, strict=True):
        prepared.append(_prepared(value, _Place(str(name), kernel, parameter, kind)))
    memory = [memory_of(item) for item in prepared]
    _require_apart([item for item in memory if isinstance(item, HostBuffer)], kernel)
    return prepared


def _prepared(value: Any, place: _Place) -> Prepared:
    parameter = place.parameter
    if isinstance(value, TensorMapOf):
        return _tensor(value, place)
    if isinstance(value, (np.ndarray, Output)) and not _is_by_value(value, place):
        return _buffer(value, place)
    if value is None or isinstance(value, (DeviceArray, Address)):
        return _pointer(value, place)
    if parameter.is_array:
        return _structure(value, place)
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return _number(value, place)
    return _typed(value, place)


def _is_by_value(value: HostArray | Output, place: _Place) -> bool:
    """Whether an array without axes stands for the number or struct in it."""
    is_pointer = place.parameter.nbytes == POINTER_BYTES and not place.parameter.is_array
    if place.kind is not None:
        is_pointer = place.kind.pointee is not None
    return isinstance(value, np.ndarray) and value.ndim == 0 and not is_pointer


def _buffer(value: HostArray | Output, place: _Place) -> HostBuffer:
    array = value.array if isinstance(value, Output) else value
    _require_pointer(place, host_name(array))
    buffer = _host_buffer(value, place)
    if place.kind is not None and (wrong := mismatch(array.dtype, place.kind)):
        raise place.fail(wrong)
    return buffer


def _host_buffer(value: HostArray | Output, place: _Place) -> HostBuffer:
    array = value.array if isinstance(value, Output) else value
    if array.dtype.hasobject:
        raise place.fail(f"an array of Python objects cannot go to a device; give it a number type, not {array.dtype}")
    if not array.dtype.isnative:
        raise place.fail(f"{array.dtype} is not in this machine's byte order; pass a.astype(a.dtype.newbyteorder('='))")
    if not array.flags.c_contiguous:
        raise place.fail(
            f"the array is not contiguous (strides {array.strides} for {list(array.shape)}); pass a contiguous one, "
            "such as np.ascontiguousarray(a), which then holds what the kernel stores"
        )
    if isinstance(value, Output) and not array.flags.writeable:
        raise place.fail("a read-only array cannot be an output")
    return HostBuffer(array, place.name, isinstance(value, Output))


_MAP_KINDS = {
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (32, 64)},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    "bfloat16": "bf16",
}
"""Of element types, by NumPy's names."""


def _tensor(value: TensorMapOf, place: _Place) -> TensorArgument:
    if not place.parameter.is_array or place.parameter.nbytes != TENSOR_MAP_BYTES:
        raise place.fail(f"it takes {place.takes}, which is no tensor map (a const __grid_constant__ CUtensorMap)")
    memory = value.of if isinstance(value.of, DeviceArray) else _host_buffer(value.of, place)
    extents, box = value.shape[::-1], value.box[::-1]
    kind = _MAP_KINDS.get(value.dtype.name, "")
    where = f"{place.name} of {place.kernel}"
    return TensorArgument(memory, extents, box, value.element_bytes, value.swizzle_bytes, kind, where)


def _pointer(value: DeviceArray | Address | None, place: _Place) -> Prepared:
    _require_pointer(place, "None" if value is None else type(value).__name__)
    if isinstance(value, DeviceArray):
        if place.kind is not None and (wrong := mismatch(value.dtype, place.kind)):
            raise place.fail(wrong)
        return value
    address = value.value if isinstance(value, Address) else 0
    if not 0 <= address < 1 << 64:
        raise place.fail(f"{address} is no address")
    return struct.pack("<Q", address)


def _require_pointer(place: _Place, got: str) -> None:
    parameter, kind = place.parameter, place.kind
    is_pointer = parameter.nbytes == POINTER_BYTES and not parameter.is_array and not parameter.kind.startswith("f")
    if kind is not None:
        is_pointer = is_pointer and kind.pointee is not None
    if not is_pointer:
        is_map = parameter.is_array and parameter.nbytes == TENSOR_MAP_BYTES
        hint = ": for a CUtensorMap pass emulator.tensor_map(array, box)" if is_map else ""
        raise place.fail(f"it takes {place.takes}, which is no pointer; got {got}{hint}")


def _structure(value: Any, place: _Place) -> bytes:
    """A struct by value: bytes, a ctypes structure, a NumPy scalar (structured, or of 16-bit floats)."""
    if isinstance(value, (bytes, bytearray, ctypes.Structure, ctypes.Union, ctypes.Array)):
        data = bytes(value)
    else:
        scalar = None if isinstance(value, (bool, int, float, str, list, tuple, dict)) else np.asarray(value)
        if scalar is None or scalar.ndim or scalar.dtype.hasobject:
            raise place.fail(
                f"it takes {place.takes} by value ({place.parameter.nbytes} bytes); got {host_name(value)}: pass "
                "bytes, a ctypes.Structure or a NumPy scalar of that size"
            )
        if place.kind is not None and (wrong := mismatch(scalar.dtype, CxxType(f"{place.kind}*", place.kind))):
            raise place.fail(wrong)
        data = scalar.tobytes()
    if len(data) != place.parameter.nbytes:
        raise place.fail(
            f"it takes {place.takes} by value, {place.parameter.nbytes} bytes aligned to {place.parameter.align}; "
            f"got {len(data)} bytes"
        )
    return data


def _number(value: float, place: _Place) -> bytes:
    """A Python number."""
    parameter, size = place.parameter, place.parameter.nbytes
    is_float = place.kind.name in ("float", "double") if place.kind is not None else parameter.kind.startswith("f")
    if (place.kind is not None and place.kind.pointee is not None) or parameter.is_pointer:
        raise place.fail(f"it takes {place.takes}, got {value!r}; pass {_FOR_A_POINTER}")
    if is_float:
        try:
            data = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        except OverflowError as error:
            raise place.fail(f"{value!r} does not fit {place.takes}") from error
        if isinstance(value, int) and struct.unpack({2: "<e", 4: "<f", 8: "<d"}[size], data)[0] != value:
            raise place.fail(f"{value} is not exact as {place.takes}; pass float({value}) if rounding is meant")
        return data
    if isinstance(value, float):
        raise place.fail(f"it takes {place.takes}, got the float {value!r}; pass int(...)")
    lowest, highest = -(1 << (8 * size - 1)), (1 << (8 * size)) - 1
    if place.kind is not None:
        if place.kind.name.startswith(_UNSIGNED_WORDS):
            lowest = 0
        elif place.kind.name != "char":
            highest = -lowest - 1
    if not lowest <= value <= highest:
        raise place.fail(f"{value} does not fit {place.takes} ({lowest} to {highest})")
    return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def _typed(value: Any, place: _Place) -> bytes:
    """A number with a type of its own: NumPy's, ml_dtypes' or ctypes'."""
    if isinstance(value, ctypes.c_void_p):
        return _pointer(Address(value.value or 0), place)  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        raise place.fail(f"a {type(value).__name__} is no argument; pass np.array(values, dtype)")
    if np.ndim(value):
        raise place.fail(
            f"a {type(value).__name__} is no NumPy array; pass np.asarray(a), and read what the kernel stored from that"
        )
    dtype = np.dtype(type(value)) if isinstance(value, ctypes._SimpleCData) else np.asarray(value).dtype
    if dtype.hasobject or (dtype.kind in "USMmOV" and dtype.names is None and dtype.itemsize not in (1, 2)):
        raise place.fail(f"it takes {place.takes}; got {host_name(value)}")
    data = bytes(value) if isinstance(value, ctypes._SimpleCData) else np.asarray(value).tobytes()
    wants_float = place.parameter.kind.startswith("f")
    is_number = dtype.kind in "biu"
    untyped = place.parameter.kind.startswith("b")
    if len(data) != place.parameter.nbytes or (not untyped and wants_float == is_number):
        raise place.fail(f"it takes {place.takes}, got {host_name(value)}; pass {_wrapped(place, value)}")
    if place.kind is not None and (wrong := mismatch(dtype, CxxType(f"{place.kind}*", place.kind))):
        raise place.fail(wrong)
    return data


def _wrapped(place: _Place, value: Any) -> str:
    if (place.kind is not None and place.kind.pointee is not None) or place.parameter.is_pointer:
        return _FOR_A_POINTER
    if place.parameter.kind.startswith("f"):
        return f"np.float{8 * place.parameter.nbytes}(...)"
    is_unsigned = place.kind is not None and place.kind.name.startswith(_UNSIGNED_WORDS)
    return f"np.{'u' if is_unsigned else ''}int{8 * place.parameter.nbytes}(...)"


def _require_apart(buffers: list[HostBuffer], kernel: str) -> None:
    """Each array is copied by itself, so two that overlap would no longer do so; the same one twice is one copy."""
    for number, one in enumerate(buffers):
        for other in buffers[:number]:
            if is_same(one.array, other.array):
                if one.is_output != other.is_output:
                    raise ArgumentError(
                        f"{other.label} and {one.label} of {kernel} are one array, but only one is out()"
                    )
            elif np.may_share_memory(one.array, other.array) and one.array.size and other.array.size:
                raise ArgumentError(
                    f"{other.label} and {one.label} of {kernel} overlap on the host; make one device array, "
                    "Emulator.array(...), and pass addresses in it, .at(element)"
                )


def is_same(one: HostArray, other: HostArray) -> bool:
    """Whether two contiguous arrays are the same memory."""
    return one.ctypes.data == other.ctypes.data and one.nbytes == other.nbytes
