"""The tensor map that bulk tensor copies (TMA) take: what the driver's cuTensorMapEncodeTiled encodes on a GPU.

The driver's 128 bytes are opaque, so the emulator has an encoding of its own. A kernel cannot tell the difference: it
only hands the address of its ``__grid_constant__`` parameter, or of a copy in global memory, to the copy instructions,
and changes a copy by ``tensormap.replace`` alone, which may also fill 128 zeros.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..faults import EmulatorError

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
MAX_RANK = 5
MAX_BOX_EXTENT = 256
CHUNK_BYTES = 16
"""The unit of addresses, strides, inner boxes and swizzles."""
SWIZZLE_ROWS = {0: 1, 32: 2, 64: 4, 128: 8}
"""Swizzle span in bytes -> rows of 128 bytes after which the pattern repeats."""

MAGIC = b"g4kvTMAP"
_FORMAT = struct.Struct("<8s5Q5I5H3H")
SWIZZLE_MODES = (0, 32, 64, 128)
"""Bytes, by the number that ``tensormap.replace`` has for them."""
ELEMENTS = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "s32": 4,
    "u64": 8,
    "s64": 8,
    "f16": 2,
    "f32": 4,
    "f32.ftz": 4,
    "f64": 8,
    "bf16": 2,
    "tf32": 4,
    "tf32.ftz": 4,
}
"""Bytes of an element by its type, in the order of the numbers that ``tensormap.replace`` has for them."""


@dataclass(frozen=True)
class Field:
    """Where the map holds what ``tensormap.replace`` changes: ``nbytes`` at ``offset``, for each dimension if
    ``is_each``; what is held is the new value plus ``plus``."""

    offset: int
    nbytes: int
    is_each: bool = False
    plus: int = 0


FIELDS = {
    "global_address": Field(8, 8),
    "global_stride": Field(16, 8, True),
    "global_dim": Field(48, 4, True, -1),
    "box_dim": Field(68, 2, True),
    "elemtype": Field(78, 2),
    "rank": Field(80, 2, False, 1),
    "swizzle_mode": Field(82, 2),
}


def element_code(kind: str) -> int:
    """What the map holds of a type of ``ELEMENTS``."""
    return (1 + list(ELEMENTS).index(kind)) << 8 | ELEMENTS[kind]


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves. Sequences begin with the innermost dimension.

    address: device address of element 0, a multiple of 16.
    element_bytes: 1, 2, 4 or 8.
    extents: 1 to 5 sizes in elements.
    strides_bytes: bytes from one index to the next of each dimension but the innermost, which is contiguous; multiples
        of 16.
    box: sizes in elements, 1 to 256 each; the innermost a multiple of 16 bytes.
    swizzle_bytes: 0 (none), 32, 64 or 128; the innermost box must not be longer.
    kind: type of an element, a key of ``ELEMENTS``; empty if nobody said, where only bulk reductions ask for it.

    Elements outside of the extents are read as zeros and not written. Raises EmulatorError for what the driver would
    refuse.
    """

    address: int
    element_bytes: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    kind: str = ""

    def __post_init__(self) -> None:
        reason = self._fault()
        if reason:
            raise EmulatorError(f"tensor map refused: {reason}")

    def _fault(self) -> str:
        rank = len(self.extents)
        if not 1 <= rank <= MAX_RANK:
            return f"{rank} dimensions, must be 1 to {MAX_RANK}"
        if len(self.box) != rank or len(self.strides_bytes) != rank - 1:
            return f"{rank} extents need {rank} box sizes and {rank - 1} strides"
        if self.element_bytes not in (1, 2, 4, 8):
            return f"elements of {self.element_bytes} bytes, must be 1, 2, 4 or 8"
        if self.kind and ELEMENTS.get(self.kind) != self.element_bytes:
            return f"elements of type {self.kind!r} and {self.element_bytes} bytes"
        if self.swizzle_bytes not in SWIZZLE_ROWS:
            return f"swizzle of {self.swizzle_bytes} bytes, must be 0, 32, 64 or 128"
        if self.address % CHUNK_BYTES or self.address <= 0:
            return f"address {self.address:#x} is no multiple of {CHUNK_BYTES}"
        if any(not 1 <= extent <= 1 << 32 for extent in self.extents):
            return f"extents {self.extents}, must be 1 to 2^32"
        if any(stride % CHUNK_BYTES or not 0 <= stride < 1 << 40 for stride in self.strides_bytes):
            return f"strides {self.strides_bytes}, must be multiples of {CHUNK_BYTES} below 2^40"
        if any(not 1 <= extent <= MAX_BOX_EXTENT for extent in self.box):
            return f"box {self.box}, must be 1 to {MAX_BOX_EXTENT} in each dimension"
        if self.row_bytes % CHUNK_BYTES:
            return f"inner box of {self.row_bytes} bytes is no multiple of {CHUNK_BYTES}"
        if self.swizzle_bytes and self.row_bytes > self.swizzle_bytes:
            return f"inner box of {self.row_bytes} bytes is longer than the {self.swizzle_bytes}-byte swizzle"
        return ""

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.extents)

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row of the box."""
        return self.box[0] * self.element_bytes

    @property
    def row_pitch_bytes(self) -> int:
        """Bytes from one row to the next in shared memory: a row narrower than the swizzle is spread to it."""
        return self.swizzle_bytes or self.row_bytes

    @property
    def rows(self) -> int:
        """Rows of the box."""
        return math.prod(self.box[1:])

    @property
    def box_bytes(self) -> int:
        """What one load adds to the transaction count, elements out of bounds included."""
        return self.rows * self.row_bytes

    def pack(self) -> bytes:
        """The 128 bytes of a kernel parameter."""
        rank = self.rank
        extents = [extent - 1 for extent in self.extents] + [0] * (MAX_RANK - rank)
        strides = [*self.strides_bytes] + [0] * (MAX_RANK - rank)  # of all dimensions but the innermost
        box = [*self.box] + [0] * (MAX_RANK - rank)
        element = element_code(self.kind) if self.kind else self.element_bytes
        tail = element, rank, self.swizzle_bytes
        return _FORMAT.pack(MAGIC, self.address, *strides, *extents, *box, *tail).ljust(TENSOR_MAP_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> TensorMap:
        """The map that ``pack`` encoded. Raises EmulatorError for other bytes."""
        if len(data) != TENSOR_MAP_BYTES or data[: len(MAGIC)] != MAGIC:
            raise EmulatorError("these bytes are no tensor map; pack one with TensorMap.pack")
        _, address, *rest, element, rank, swizzle_bytes = _FORMAT.unpack_from(data)
        strides, extents, box = rest[:4], rest[4:9], rest[9:]
        if not 1 <= rank <= MAX_RANK:
            raise EmulatorError(f"a tensor map of {rank} dimensions")
        return cls(
            address,
            element & 0xFF,
            tuple(extent + 1 for extent in extents[:rank]),
            tuple(strides[: rank - 1]),
            tuple(box[:rank]),
            swizzle_bytes,
            list(ELEMENTS)[(element >> 8) - 1] if 0 < element >> 8 <= len(ELEMENTS) else "",
        )


def contiguous_strides(extents: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Byte strides of all dimensions but the innermost, for a tensor without gaps."""
    strides: list[int] = []
    for extent in extents[:-1]:
        strides.append((strides[-1] if strides else element_bytes) * extent)
    return tuple(strides)
