"""The page-first paged layout of one family's KV pool: the one home of offset arithmetic on the host.

A pool is one buffer per family; a page holds ``page_size`` token slots of ALL the family's layers::

    pool[page][layer][K, V][slot][kv_head][dim]

A row of V has ``head_dim`` columns, a row of K ``k_dim``: as many (``split``), or its rotated ones alone (``folded``;
kv_format.py). Everything about K's block follows from it.

All strides and offsets count elements, as plain Python integers (no overflow). The device twin is
``kernels/kv_offsets.cuh``; ``g4kv layout`` proves that both agree.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_format import KvFormat, format_of

KvKind = Literal["k", "v"]
KV_KINDS: tuple[KvKind, ...] = ("k", "v")
DEFAULT_PAGE_SIZE_TOKENS = 16
MAX_PAGE_SIZE_TOKENS = 4096
"""The largest that cases and workloads have."""
SPARSE_POOL_BYTES = 192 << 20
"""Pools above this are never copied to the host as a whole on a device that records what was written."""
BF16_BYTES = 2
INT32_MAX = (1 << 31) - 1
"""The kernels hold extents and page ids in int32."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One element of the pool in logical terms; ``kv`` is ``"k"`` or ``"v"``, ``dim`` the place in that row."""

    page: int
    layer: int
    kv: KvKind
    slot: int
    head: int
    dim: int


class KvLayoutParameters(ctypes.Structure):
    """``struct KvLayout`` of kernels/kv_offsets.cuh, which asserts the same offsets and the same 48 bytes."""

    _fields_ = (
        ("kv_block_len", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("k_dim", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Extents and strides of a pool. The strides are stored, public and NOT checked here.

    A layout may come from somebody else: whoever launches a kernel with it re-derives the strides first
    (model/checked.py). ``derive`` is the way to make a right one.
    """

    page_size: int
    """Token slots of a page."""
    num_layers: int
    """Layers of the family that own K/V."""
    num_kv_heads: int
    head_dim: int
    """Columns of a row of V."""
    k_dim: int
    """Columns of a row of K: head_dim, or in the folded format the rotated ones."""
    kv_block_len: int
    """Elements of one K block, of one page and one layer: so far behind its beginning the V block begins."""
    layer_stride: int
    """Elements from one layer to the next inside a page."""
    page_stride: int
    """Elements from one page to the next."""
    element_bytes: int = BF16_BYTES

    @classmethod
    def derive(
        cls,
        *,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        k_dim: int | None = None,
        element_bytes: int = BF16_BYTES,
    ) -> KvLayout:
        """The layout that these extents give; ``k_dim`` is head_dim where none is given.

        Raises UsageError if an extent is not positive, or a row of K has no even number of columns up to head_dim.
        """
        extents = {
            "page_size": page_size,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "k_dim": head_dim if k_dim is None else k_dim,
            "element_bytes": element_bytes,
        }
        for name, value in extents.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}: give a positive number")
        k_columns = extents["k_dim"]
        if k_columns != head_dim and (k_columns > head_dim or k_columns % 2):
            raise UsageError(f"k_dim must be {head_dim} (head_dim) or fewer columns, in pairs, got {k_columns}")
        kv_block_len = page_size * num_kv_heads * k_columns
        layer_stride = kv_block_len + page_size * num_kv_heads * head_dim
        return cls(
            page_size=page_size,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_dim=k_columns,
            kv_block_len=kv_block_len,
            layer_stride=layer_stride,
            page_stride=num_layers * layer_stride,
            element_bytes=element_bytes,
        )

    @property
    def kv_format(self) -> KvFormat:
        """What a row of K holds: all of its columns, or the rotated ones."""
        return format_of(self.head_dim, self.k_dim)

    def row_dim(self, kv: KvKind) -> int:
        """Columns of a head's row in a K or a V block."""
        return self.head_dim if kv == "v" else self.k_dim

    def slot_stride(self, kv: KvKind) -> int:
        """Elements of one token slot in a K or a V block: all KV heads."""
        return self.num_kv_heads * self.row_dim(kv)

    @property
    def v_block_len(self) -> int:
        """Elements of one V block: one page and one layer."""
        return self.layer_stride - self.kv_block_len

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.page_stride * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers, K and V."""
        return self.num_layers * (self.slot_stride("k") + self.slot_stride("v")) * self.element_bytes

    def pool_elems(self, num_pages: int) -> int:
        """Elements of a pool of ``num_pages`` pages."""
        # pool[page][..]
        return num_pages * self.page_stride

    def pool_bytes(self, num_pages: int) -> int:
        """Bytes of a pool of ``num_pages`` pages."""
        return self.pool_elems(num_pages) * self.element_bytes

    def layer_offset(self, page: int, layer: int, kv: KvKind) -> int:
        """Element offset of the first element of a layer's K or V block in a page."""
        # pool[page][layer][K, V][..]
        block = page * self.page_stride + layer * self.layer_stride
        return block + self.kv_block_len if kv == "v" else block

    def element_offset(self, page: int, layer: int, kv: KvKind, slot: int, head: int, dim: int) -> int:
        """Element offset of one element of the pool.

        Raises UsageError if a coordinate is outside the layout (the number of pages is not part of a layout,
        so ``page`` only has to be non-negative).
        """
        if kv not in ("k", "v"):
            raise UsageError(f"kv must be k or v, got {kv!r}")
        if page < 0:
            raise UsageError(f"page must be at least 0, got {page}")
        extents = (
            ("layer", layer, self.num_layers),
            ("slot", slot, self.page_size),
            ("head", head, self.num_kv_heads),
            ("dim", dim, self.row_dim(kv)),
        )
        for name, value, extent in extents:
            if not 0 <= value < extent:
                raise UsageError(f"{name} must be from 0 to {extent - 1} in this layout, got {value}")
        # pool[page][layer][K, V][slot][head][dim]
        return self.layer_offset(page, layer, kv) + slot * self.slot_stride(kv) + head * self.row_dim(kv) + dim

    def coordinates(self, offset: int) -> Coordinate:
        """The element at an offset: the inverse of ``element_offset``.

        Raises UsageError if the offset is negative, or if these strides leave a gap there (not derived).
        """
        if offset < 0:
            raise UsageError(f"an element offset must be at least 0, got {offset}")
        page, in_page = divmod(offset, self.page_stride)
        layer, in_layer = divmod(in_page, self.layer_stride)
        kv: KvKind = "v" if in_layer >= self.kv_block_len else "k"
        slot, in_slot = divmod(in_layer - (self.kv_block_len if kv == "v" else 0), self.slot_stride(kv))
        head, dim = divmod(in_slot, self.row_dim(kv))
        if layer >= self.num_layers or slot >= self.page_size:
            raise UsageError(f"element offset {offset} lies in a gap between the blocks of this layout")
        return Coordinate(page, layer, kv, slot, head, dim)

    def first_page_past(self, bits: int) -> int:
        """The first page whose element offset (page * page_stride) does not fit ``bits`` value bits.

        ``bits`` is 31 for int32 and 32 for uint32. Elements of the page before can be past it already.
        """
        return -(-(1 << bits) // self.page_stride)

    def parameters(self) -> KvLayoutParameters:
        """The struct that kernels take by value. Raises UsageError if a field does not fit it."""
        for name in ("page_size", "num_layers", "num_kv_heads", "head_dim", "k_dim"):
            if not 0 <= getattr(self, name) <= INT32_MAX:
                raise UsageError(f"{name} {getattr(self, name)} does not fit the kernel's int32")
        for name in ("kv_block_len", "layer_stride", "page_stride"):
            if not 0 <= getattr(self, name) < 1 << 63:
                raise UsageError(f"{name} {getattr(self, name)} does not fit the kernel's int64")
        return KvLayoutParameters(
            self.kv_block_len,
            self.layer_stride,
            self.page_stride,
            self.page_size,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.k_dim,
        )
