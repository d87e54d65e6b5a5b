"""From expressions to what a launch or a C function takes: host values, extents, typed arguments, structs by value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from g4kv_cli.device.arguments import Argument, by_value, pointer, scalar
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.providers.callables import TensorArgument
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.images import LaunchFacts
from g4kv_cli.providers.manifest import ELEMENT_KINDS, ArgumentSpec, MadeArray, Step

Scope = Mapping[str, Any]


def element_type(kind: str) -> np.dtype[Any]:
    """The NumPy type of an element kind of manifests: ``i32``, ``u8``, ``f64``, ``bf16``, ``bool`` (a byte)."""
    short = "u1" if kind == "bool" else f"{kind[0]}{int(kind[1:]) // 8}" if kind != "bf16" else ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(short)
    return found


def values_of(array: MadeArray, scope: Scope) -> Any:
    """Host values of an element kind. Raises ExpressionError if one does not fit it."""
    values = np.asarray(array.value.evaluate(scope))
    kind = element_type(array.kind)
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


def packed(step: Step, facts: LaunchFacts, scope: Scope, addresses: Scope) -> tuple[Argument, ...]:
    """A kernel's arguments, in the step's order or in that of the builder. Raises ExpressionError."""
    if facts.arguments is None:
        return tuple(_argument(item, scope, addresses) for item in step.arguments)
    named = dict(step.named)
    missing = [name for name in facts.arguments if name not in named]
    if missing:
        raise ExpressionError(f"the kernel takes {', '.join(missing)}, which 'named' does not give")
    return (*(_argument(named[name], scope, addresses) for name in facts.arguments), *facts.trailing)


def number_of(spec: ArgumentSpec, scope: Scope, addresses: Scope) -> tuple[str, float]:
    """An argument of a C function: its kind and value. Raises ExpressionError."""
    if spec.value is None:
        raise ExpressionError("a C function takes numbers and pointers, not structs by value")
    if spec.kind == "ptr":
        return "ptr", spec.value.integer(addresses)
    if spec.kind in ("f32", "f64"):
        return spec.kind, float(spec.value.evaluate(scope))
    value = spec.value.integer(scope)
    scalar(spec.kind, value)  # type: ignore[arg-type]
    return spec.kind, value


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


def _argument(spec: ArgumentSpec, scope: Scope, addresses: Scope) -> Argument:
    if spec.kind == "struct":
        return by_value(_struct(spec, scope, addresses)[0])
    if spec.value is None:
        raise ExpressionError("an argument without a value")
    if spec.kind == "ptr":
        return pointer(spec.value.integer(addresses))
    if spec.kind == "f32" or spec.kind == "f64":
        return scalar(spec.kind, float(spec.value.evaluate(scope)))
    if spec.kind == "bf16" or spec.kind == "bool":
        raise ExpressionError(f"{spec.kind} is no type of a kernel's argument")
    return scalar(spec.kind, spec.value.integer(scope))


def _struct(spec: ArgumentSpec, scope: Scope, addresses: Scope) -> tuple[bytes, int]:
    """A struct's bytes and alignment by C's rules: each field at a multiple of its own, the end of the largest."""
    raw, most = bytearray(), 1
    for field in spec.fields:
        if field.kind == "struct":
            data, align = _struct(field, scope, addresses)
        else:
            data = _argument(field, scope, addresses).data
            align = len(data)
        raw += b"\0" * (-len(raw) % align) + data
        most = max(most, align)
    return bytes(raw + b"\0" * (-len(raw) % most)), most
