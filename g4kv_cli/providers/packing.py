"""From expressions to what a launch or a C function takes: host values, extents, typed arguments, structs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from g4kv_cli.device.arguments import Argument, TensorMapShape, by_value, pointer, scalar
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.providers.builder import LaunchFacts
from g4kv_cli.providers.callables import TensorArgument
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.manifest import ELEMENT_KINDS, ArgumentSpec, MadeArray, Step

Scope = Mapping[str, Any]
Maps = Callable[[int, int, TensorMapShape, str], Argument]
"""Makes a tensor map: ``Device.tensor_map_at``."""
_MAP_ALIGNMENT = 64
C_TYPES: dict[str, Any] = {
    "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16, "u16": ctypes.c_uint16, "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
    "f64": ctypes.c_double, "ptr": ctypes.c_void_p, "bool": ctypes.c_bool,
}  # fmt: skip


def element_type(kind: str) -> np.dtype[Any]:
    """The NumPy type of an element kind of manifests: ``i32``, ``u8``, ``f64``, ``bf16``, ``bool`` (a byte), ``ptr``
    (u64)."""
    kind = "u64" if kind == "ptr" else kind
    short = "u1" if kind == "bool" else f"{kind[0]}{int(kind[1:]) // 8}" if kind != "bf16" else ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(short)
    return found


def _no_maps(_address: int, _element_bytes: int, _shape: TensorMapShape, _label: str) -> Argument:
    raise ExpressionError("there is no device to make a tensor map")


def values_of(array: MadeArray, scope: Scope, addresses: Scope, maps: Maps = _no_maps) -> Any:
    """Host values of an element kind, or a struct's bytes. Raises ExpressionError if one does not fit it."""
    if array.fields:
        raw = _struct(ArgumentSpec("struct", fields=array.fields), scope, addresses, maps)[0]
        return np.frombuffer(raw, np.uint8).copy()
    found = array.value.evaluate(addresses if array.kind == "ptr" else scope)
    if isinstance(found, str):
        if array.kind not in ("u8", "i8"):
            raise ExpressionError(f"{array.name}: a text goes as u8, not as {array.kind}")
        found = np.frombuffer(found.encode() + b"\0", np.uint8)
    values, kind = np.asarray(found), element_type(array.kind)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise ExpressionError(f"{array.name}: values from {values.min()} to {values.max()} do not fit {array.kind}")
    return np.ascontiguousarray(values.astype(kind))


def extents_of(items: Sequence[Expression], scope: Scope) -> tuple[int, int, int]:
    """Grid, block or cluster: what is not given is 1."""
    found = [item.integer(scope) for item in items]
    x, y, z = (*found, 1, 1, 1)[:3]
    return (x, y, z)


def packed(step: Step, facts: LaunchFacts, scope: Scope, addresses: Scope, maps: Maps) -> tuple[Argument, ...]:
    """A kernel's arguments, in the step's order or in that of the builder. Raises ExpressionError."""
    if facts.arguments is None:
        return tuple(_argument(item, scope, addresses, maps) for item in step.arguments)
    named = dict(step.named)
    missing = [name for name in facts.arguments if name not in named]
    if missing:
        raise ExpressionError(f"the kernel takes {', '.join(missing)}, which 'named' does not give")
    return (*(_argument(named[name], scope, addresses, maps) for name in facts.arguments), *facts.trailing)


def c_argument(spec: ArgumentSpec, scope: Scope, addresses: Scope) -> Any:
    """An argument of a C function, as ctypes passes it. Raises ExpressionError, or ValueError for a number that does
    not fit."""
    data = _argument(spec, scope, addresses).data
    return _c_type(spec).from_buffer_copy(data)


def _c_type(spec: ArgumentSpec) -> Any:
    if spec.kind != "struct":
        return C_TYPES[spec.kind]
    fields = [(f"field{number}", _c_type(field)) for number, field in enumerate(spec.fields)]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


def python_arguments(
    step: Step, scope: Scope, arrays: Mapping[str, DeviceArray], shapes: Mapping[str, tuple[int, ...]],
    outputs: Collection[str], absent: Collection[str],
) -> tuple[dict[str, TensorArgument], dict[str, Any]]:  # fmt: skip
    """(tensors, numbers) of a Python function by name: an expression that is an array's name is the array, None if the
    call has not this optional one. Raises ExpressionError, also for an array of another type than is said."""
    tensors: dict[str, TensorArgument] = {}
    values: dict[str, Any] = {}
    for key, spec in step.named:
        if spec.value is None:
            raise ExpressionError(f"{key}: an argument without a value")
        name = spec.value.text.strip()
        if name in arrays:
            array, wanted = arrays[name], element_type(spec.kind)
            if array.dtype != wanted:
                raise ExpressionError(f"{key}: {name} is of {_kind_of(array.dtype)}, not of {spec.kind}")
            tensors[key] = TensorArgument(array.view(shapes.get(name, array.shape)), name in outputs)
        elif name in absent:
            values[key] = None
        elif spec.kind == "bool":
            values[key] = spec.value.truth(scope)
        elif spec.kind in ("f32", "f64"):
            values[key] = float(spec.value.evaluate(scope))
        else:
            values[key] = spec.value.integer(scope)
    return tensors, values


def _kind_of(dtype: np.dtype[Any]) -> str:
    return next((kind for kind in ELEMENT_KINDS if element_type(kind) == dtype), str(dtype))


def _argument(spec: ArgumentSpec, scope: Scope, addresses: Scope, maps: Maps = _no_maps) -> Argument:
    if spec.kind == "struct":
        return by_value(_struct(spec, scope, addresses, maps)[0])
    if spec.value is None:
        raise ExpressionError("an argument without a value")
    if spec.map is not None:
        one = spec.map
        extents, strides, box = (
            tuple(item.integer(scope) for item in items) for items in (one.extents, one.strides, one.box)
        )
        shape = TensorMapShape(extents, strides, box, one.swizzle_bytes)
        size = element_type(one.elements).itemsize
        return maps(spec.value.integer(addresses), size, shape, f"the tensor map of {spec.value.text!r}")
    if spec.kind == "ptr":
        return pointer(spec.value.integer(addresses))
    if spec.kind == "f32" or spec.kind == "f64":
        return scalar(spec.kind, float(spec.value.evaluate(scope)))
    if spec.kind == "bool":
        return scalar("u8", spec.value.truth(scope))
    if spec.kind in ("bf16", "tensor_map"):
        raise ExpressionError(f"{spec.kind} is no type of a kernel's argument")
    return scalar(spec.kind, spec.value.integer(scope))  # type: ignore[arg-type]


def _struct(spec: ArgumentSpec, scope: Scope, addresses: Scope, maps: Maps = _no_maps) -> tuple[bytes, int]:
    """A struct's bytes and alignment by C's rules: each field at a multiple of its own, the end of the largest."""
    raw, most = bytearray(), 1
    for field in spec.fields:
        if field.kind == "struct":
            data, align = _struct(field, scope, addresses, maps)
        else:
            data = _argument(field, scope, addresses, maps).data
            align = len(data) if field.map is None else _MAP_ALIGNMENT
        raw += b"\0" * (-len(raw) % align) + data
        most = max(most, align)
    return bytes(raw + b"\0" * (-len(raw) % most)), most
