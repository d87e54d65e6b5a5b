"""Arguments of a launch: the bytes of each kernel parameter, with the type that the host meant."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Literal

ScalarKind = Literal["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64"]
ArgumentKind = Literal[ScalarKind, "pointer", "struct", "tensor_map"]

TENSOR_MAP_BYTES = 128
"""sizeof(CUtensorMap), which is aligned to 64 bytes (cuda.h)."""

_FORMATS: dict[ScalarKind, str] = {
    "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q",
    "f32": "<f", "f64": "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: ``data`` are the bytes of the kernel's parameter."""

    kind: ArgumentKind
    data: bytes


MAX_TENSOR_RANK = 5
SWIZZLE_BYTES = (0, 32, 64, 128)
"""Of tensor maps; a CUtensorMapSwizzle is a place in this list."""


@dataclass(frozen=True, slots=True)
class TensorMapShape:
    """What a tensor map says of memory (cuTensorMapEncodeTiled), from the innermost dimension on.

    extents: 1 to 5 sizes in elements; what lies outside of them is read as zeros and not written.
    strides_bytes: from one index to the next of each dimension but the innermost; multiples of 16 below 2^40.
    box: sizes in elements of what one copy moves, 1 to 256 each, the innermost a multiple of 16 bytes.
    swizzle_bytes: 0, 32, 64 or 128; the innermost box must not be longer.
    l2_bytes: what a miss fetches into the L2 cache at least: 0, 64, 128 or 256. It changes no result.
    kind: type of an element, such as f32 or bf16, if it is known; only bulk reductions ask for it.
    """

    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    l2_bytes: int = 256
    kind: str = ""


def scalar(kind: ScalarKind, value: float) -> Argument:
    """A number by value. Raises ValueError if the kind cannot hold it."""
    try:
        return Argument(kind, struct.pack(_FORMATS[kind], value if kind in ("f32", "f64") else int(value)))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{value} is no {kind}: {error}") from error


def pointer(address: int) -> Argument:
    """A device address; 0 is null."""
    return Argument("pointer", struct.pack("<Q", address))


def by_value(parameters: ctypes.Structure | bytes) -> Argument:
    """A struct by value."""
    return Argument("struct", bytes(parameters))
