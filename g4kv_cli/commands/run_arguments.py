"""Arguments of a kernel as words on the command line: ``i32:5``, ``f32[1024]:random``, ``@x.npy``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli import emulator
from g4kv_cli.emulator.memory import Output
from g4kv_cli.errors import UsageError

FORMS = (
    "write i32:5, f32:1.5, f32[1024]:random, i32[64]:arange, bf16[8,64]:zeros, f32[4]:out, @file.npy, bytes:0a0b "
    "or null"
)
RANDOM_INTEGERS = 100
"""Random integers lie below this, so that they may be indices of small arrays."""
_TYPES: dict[str, Any] = {
    "bool": np.bool_, "i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16, "i32": np.int32,
    "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_SPEC = re.compile(r"(?P<type>[a-z]+\d*)(?:\[(?P<extents>[^\]]*)\])?:(?P<value>.*)", re.DOTALL)
_NAMED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<spec>.*)", re.DOTALL)
_LARGEST_BYTES = 1 << 36


@dataclass(frozen=True, slots=True)
class RunArgument:
    """One argument: ``value`` goes to the launch, ``array`` is the host's where it is one."""

    name: str
    spec: str
    value: Any
    array: npt.NDArray[Any] | None = None


def parse_arguments(option: str, words: tuple[str, ...], seed: int) -> list[RunArgument]:
    """All ``[NAME=]SPEC`` of an option, in order; random data comes from ``seed`` and the place in the list.

    Raises UsageError for a spec that is none, a name that stands twice, or a file that cannot be read.
    """
    found: list[RunArgument] = []
    for number, word in enumerate(words):
        named = _NAMED.fullmatch(word)
        name, spec = (named["name"], named["spec"]) if named is not None else (f"args[{number}]", word)
        if any(known.name == name for known in found):
            raise UsageError(f"{option} {word}: {name} stands there already; give each its own name")
        try:
            value = _value(spec, np.random.default_rng([seed, number]))
        except ValueError as error:
            raise UsageError(f"{option} {word}: {error}; {FORMS}") from error
        array = value.array if isinstance(value, Output) else value
        found.append(RunArgument(name, spec, value, array if isinstance(array, np.ndarray) else None))
    return found


def _value(spec: str, random: np.random.Generator) -> Any:
    """What a spec stands for. Raises ValueError with the reason."""
    if spec == "null":
        return None
    if spec.startswith("@"):
        return _file(Path(spec[1:]))
    if spec.startswith("bytes:"):
        return bytes.fromhex(spec.removeprefix("bytes:"))
    matched = _SPEC.fullmatch(spec)
    if matched is None:
        raise ValueError("it is no type with a value")
    if matched["type"] not in _TYPES:
        raise ValueError(f"there is no type {matched['type']!r}, only {', '.join(_TYPES)}")
    dtype = np.dtype(_TYPES[matched["type"]])
    if matched["extents"] is None:
        return _number(matched["value"], dtype)
    return _array(_extents(matched["extents"], dtype), dtype, matched["value"], random)


def _extents(text: str, dtype: np.dtype[Any]) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"[{text}] is no shape")
    shape = tuple(int(part) for part in parts)
    if math.prod(shape) * dtype.itemsize > _LARGEST_BYTES:
        raise ValueError(f"[{text}] is more than {_LARGEST_BYTES >> 30} GiB")
    return shape


def _array(shape: tuple[int, ...], dtype: np.dtype[Any], fill: str, random: np.random.Generator) -> Any:
    size = math.prod(shape)
    if fill == "out":
        return emulator.out(np.zeros(shape, dtype))
    if fill in ("zeros", "ones"):
        return np.full(shape, fill == "ones").astype(dtype)
    if fill == "arange":
        return np.arange(size).astype(dtype).reshape(shape)
    if fill == "random":
        if dtype.kind in "iu":
            return random.integers(0, RANDOM_INTEGERS, shape).astype(dtype)
        return (
            random.integers(0, 2, shape).astype(dtype)
            if dtype.kind == "b"
            else random.standard_normal(shape).astype(dtype)
        )
    return np.full(shape, _number(fill, dtype))


def _number(text: str, dtype: np.dtype[Any]) -> Any:
    """A scalar of the type. Raises ValueError for what it does not hold."""
    if dtype.kind == "b":
        if text not in ("true", "false", "0", "1"):
            raise ValueError(f"{text!r} is not true or false")
        return dtype.type(text in ("true", "1"))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        try:
            value = int(text, 0)
        except ValueError as error:
            raise ValueError(f"{text!r} is no whole number") from error
        if not limits.min <= value <= limits.max:
            raise ValueError(f"{value} is not from {limits.min} to {limits.max}")
        return dtype.type(value)
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no number") from error
    with np.errstate(over="ignore"):
        scalar = np.float64(number).astype(dtype)
    if math.isfinite(number) and not np.isfinite(scalar):
        raise ValueError(f"{text} is more than {dtype} holds")
    return scalar


def _file(path: Path) -> npt.NDArray[Any]:
    try:
        values = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file") from error
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{path} holds several arrays; save one with np.save")
    # np.save knows no bfloat16: its bytes come back without a type.
    return np.ascontiguousarray(values.view(ml_dtypes.bfloat16) if values.dtype == np.dtype("V2") else values)
