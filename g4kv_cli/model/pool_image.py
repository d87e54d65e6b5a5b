"""A pool as NumPy sees it: K's and V's blocks as views of its memory, and places from its shape alone.

Never the offset arithmetic that kernels and their callers use (kv_layout.py), so that what is filled and read back does
not depend on what is under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.model.kv_format import FOLDED, KvFormat, format_of
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.pool_order import OWN_ORDER, POOL_AXES, PoolOrder, PoolShape

Array = npt.NDArray[Any]
BLOCK_AXES = ("page", "layer", "slot", "head", "dim")
"""Of a view of all K or all V blocks."""


@dataclass(frozen=True, slots=True)
class PoolImage:
    """``[page][layer][K, V][slot][head][dim]``, in the order of axes that kernels want; in the folded format rows of K
    are shorter than those of V, and the order is the built-in one."""

    num_pages: int
    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    k_dim: int
    order: PoolOrder = OWN_ORDER

    @classmethod
    def of(cls, layout: KvLayout, num_pages: int, order: PoolOrder = OWN_ORDER) -> PoolImage:
        """That of a layout's extents; its strides are not looked at."""
        extents = (layout.num_layers, layout.page_size, layout.num_kv_heads, layout.head_dim, layout.k_dim)
        return cls(num_pages, *extents, order)

    @property
    def kv_format(self) -> KvFormat:
        return format_of(self.head_dim, self.k_dim)

    @property
    def shape(self) -> PoolShape:
        """Extents by POOL_AXES, where rows of K and V are equally long. ValueError where they are not."""
        if self.kv_format == FOLDED:
            raise ValueError("rows of K are shorter than those of V")
        return (self.num_pages, self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def elements(self) -> int:
        return self.num_pages * self.num_layers * self._layer_elems

    def row_dim(self, kv: int) -> int:
        """Columns of a head's row of K (0) or V (1)."""
        return self.head_dim if kv else self.k_dim

    def blocks(self, flat: Array) -> tuple[Array, Array]:
        """Views of a flat pool, K and V, by BLOCK_AXES; writing to them writes to the pool."""
        if self.kv_format != FOLDED:
            image = self.order.logical(flat, self.shape)
            return image[:, :, 0], image[:, :, 1]
        layers = flat.reshape(self.num_pages, self.num_layers, self._layer_elems)
        rest = (self.num_pages, self.num_layers, self.page_size, self.num_kv_heads)
        k, v = layers[..., : self._block_elems(0)], layers[..., self._block_elems(0) :]
        return k.reshape(*rest, self.k_dim), v.reshape(*rest, self.head_dim)

    def ordered(self, flat: Array) -> Array:
        """A flat pool's elements by the logical axes, however they lie in memory."""
        return flat if self.kv_format == FOLDED else np.ascontiguousarray(self.order.logical(flat, self.shape))

    def offsets(self, places: Sequence[npt.ArrayLike], kv: int) -> npt.NDArray[np.int64]:
        """Element offsets of places by BLOCK_AXES, broadcast together, of K (0) or V (1)."""
        page, layer, slot, head, dim = (np.asarray(axis, np.int64) for axis in places)
        if self.kv_format != FOLDED:
            return self.order.offsets((page, layer, kv, slot, head, dim), self.shape)
        layers, inside = (self.num_pages, self.num_layers), (self.page_size, self.num_kv_heads, self.row_dim(kv))
        block = np.ravel_multi_index(tuple(np.broadcast_arrays(page, layer)), layers) * self._layer_elems
        begins = block + (self._block_elems(0) if kv else 0)
        return np.asarray(begins + np.ravel_multi_index(tuple(np.broadcast_arrays(slot, head, dim)), inside))

    def coordinate(self, offset: int) -> dict[str, int]:
        """The place of an element by POOL_AXES: the inverse of ``offsets``."""
        if self.kv_format != FOLDED:
            found = self.order.coordinates(offset, self.shape)
            return {name: int(at) for name, at in zip(POOL_AXES, found, strict=True)}
        outer = np.unravel_index(offset, (self.num_pages, self.num_layers, self._layer_elems))
        page, layer, in_layer = (int(at) for at in outer)
        kv = int(in_layer >= self._block_elems(0))
        block = (self.page_size, self.num_kv_heads, self.row_dim(kv))
        inner = np.unravel_index(in_layer - (self._block_elems(0) if kv else 0), block)
        return dict(zip(POOL_AXES, (page, layer, kv, *(int(at) for at in inner)), strict=True))

    def page_pieces(self, page: int, layer: int | None = None) -> list[tuple[int, int]]:
        """(first element, number of elements) of each stretch of memory that a page lies in; of one layer, if given."""
        if self.kv_format != FOLDED:
            return self.order.page_pieces(page, self.shape, layer)
        first, layers = (0, self.num_layers) if layer is None else (layer, 1)
        return [((page * self.num_layers + first) * self._layer_elems, layers * self._layer_elems)]

    def _block_elems(self, kv: int) -> int:
        return math.prod((self.page_size, self.num_kv_heads, self.row_dim(kv)))

    @property
    def _layer_elems(self) -> int:
        return self._block_elems(0) + self._block_elems(1)
