"""A family's pool with NaN in every element until something is written, addressed as people think of it: by request
and position.

Places are NumPy indices into ``pool[page][layer][K, V][slot][head][dim]``, or into the same axes in the order in which
other kernels want them, never the offset arithmetic that kernels and their callers use, so that what is read back does
not depend on what is under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import BF16, PagedPool
from g4kv_cli.model import rules
from g4kv_cli.model.checked import product_i64, require_i32, require_type
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder, PoolShape
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.oracle.compare import POISON_BYTE

Array = npt.NDArray[Any]


class PoisonedPool:
    """``num_pages`` pages of a geometry's layout on a device. ``pool`` is what entries take.

    ``num_layers`` defaults to the layers of the family that own K and V; ``order`` is how the axes lie in memory, and
    ``kv_format`` what a row of K holds: in the folded one, k_dim columns.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        *,
        num_pages: int,
        page_size: int = DEFAULT_PAGE_SIZE_TOKENS,
        num_layers: int | None = None,
        order: PoolOrder = OWN_ORDER,
        kv_format: KvFormat = SPLIT,
    ) -> None:
        """Allocate and poison it. Raises ContractError (extent_positive), UsageError or DeviceUnavailable."""
        self.device = device
        self.order = order
        self.num_pages = require_i32("num_pages", num_pages)
        rules.EXTENT_POSITIVE.require(self.num_pages >= 1, "num_pages", self.num_pages, ">= 1")
        layout = derived_layout(geometry, page_size, num_layers, kv_format)
        elements = product_i64("pool elements", self.num_pages, layout.page_stride)
        self.pool = PagedPool(layout, device.allocate((elements,), BF16, f"{geometry.name} pool"))
        self.image = PoolImage.of(layout, self.num_pages, order)
        device.fill(self.pool.data, POISON_BYTE)

    @property
    def shape(self) -> PoolShape:
        """[page][layer][K, V][slot][head][dim]; a pool of folded rows has none (ValueError): see ``image.blocks``."""
        return self.image.shape

    def fill(self, request: PlanRequest, layer: int, first_position: int, k: Array, v: Array) -> None:
        """Write K and V, bf16 [tokens, num_kv_heads, columns of a row], of the positions from ``first_position`` on.

        Raises ContractError: argument_type, dtype, shape, layer_range, page_coverage, page_id_range.
        """
        for kv, (name, rows) in enumerate((("k", k), ("v", v))):
            require_type(name, rows, np.ndarray)
            rules.DTYPE.require(rows.dtype == BF16, name, rows.dtype, BF16)
            wanted = (len(k), self.image.num_kv_heads, self.image.row_dim(kv))
            rules.SHAPE.require(rows.shape == wanted, name, list(rows.shape), list(wanted))
        positions = range(first_position, first_position + len(k))
        for places, run in self._runs(request, layer, positions):
            for kv, rows in enumerate((k, v)):
                for piece, part in self._pieces(places, kv, rows[run]):
                    self.device.write(piece, np.ascontiguousarray(part))

    def read(self, request: PlanRequest, layer: int, positions: range | None = None) -> tuple[Array, Array]:
        """K and V as they lie in the pool, bf16 [positions, num_kv_heads, columns of a row]; NaN (0xffff) where nobody
        wrote.

        ``positions`` defaults to all that the request's pages hold. Raises ContractError: layer_range, page_coverage,
        page_id_range.
        """
        if positions is None:
            page_size = self.image.page_size
            positions = range(request.page_origin * page_size, request.start_pos + request.q_len)
        heads = self.image.num_kv_heads
        k, v = (np.empty((len(positions), heads, self.image.row_dim(kv)), BF16) for kv in (0, 1))
        for places, run in self._runs(request, layer, positions):
            for kv, rows in enumerate((k, v)):
                for piece, part in self._pieces(places, kv, rows[run]):
                    part[...] = self.device.read(piece)
        return k, v

    def poison(self, page: int) -> None:
        """Put NaN in every element of a page, of all layers: what a page given back holds."""
        rules.PAGE_ID_RANGE.require(0 <= page < self.num_pages, "page", page, f"0..{self.num_pages - 1}")
        for begin, elements in self.image.page_pieces(page):
            self.device.fill(self.pool.data.view((elements,), offset_elems=begin), POISON_BYTE)

    def free(self) -> None:
        """Return the memory to the device."""
        self.device.free(self.pool.data)

    def _runs(self, request: PlanRequest, layer: int, positions: range) -> list[tuple[tuple[int, int, int], slice]]:
        """Page by page: (page, layer, first slot) of the slots that the positions take, and which of the positions they
        are."""
        num_layers, page_size = self.image.num_layers, self.image.page_size
        rules.LAYER_RANGE.require(0 <= layer < num_layers, "layer", layer, f"0..{num_layers - 1}")
        first_held = request.page_origin * page_size
        held = range(first_held, first_held + len(request.page_indices) * page_size)
        rules.PAGE_COVERAGE.require(
            not positions or (positions.start in held and positions[-1] in held and positions.step == 1),
            "positions",
            positions,
            f"{held.start}..{held.stop - 1}",
        )
        runs = []
        at = positions.start
        while at < positions.stop:
            logical_page, slot = divmod(at, page_size)
            end = min((logical_page + 1) * page_size, positions.stop)
            page = request.page_indices[logical_page - request.page_origin]
            rules.PAGE_ID_RANGE.require(0 <= page < self.num_pages, "page_indices", page, f"0..{self.num_pages - 1}")
            runs.append(((page, layer, slot), slice(at - positions.start, end - positions.start)))
            at = end
        return runs

    def _pieces(self, places: tuple[int, int, int], kv: int, rows: Array) -> Iterator[tuple[DeviceArray, Array]]:
        """The stretches of memory that neighbouring slots of a page lie in, each with its part of ``rows``
        [slots, num_kv_heads, columns]."""
        page, layer, slot = places
        heads, columns = self.image.num_kv_heads, self.image.row_dim(kv)

        def view(shape: tuple[int, ...], first_slot: int, head: int) -> DeviceArray:
            # pool[page][layer][K, V][slot][head][dim], or in the order of the pool's own axes
            offset = int(self.image.offsets((page, layer, first_slot, head, 0), kv))
            return self.pool.data.view(shape, offset_elems=offset)

        if self.order.axes[-3:] == ("slot", "head", "dim"):
            yield view(rows.shape, slot, 0), rows
        elif self.order.axes[-2:] == ("slot", "dim"):
            for head in range(heads):
                yield view((len(rows), columns), slot, head), rows[:, head]
        else:
            for number, head in itertools.product(range(len(rows)), range(heads)):
                yield view((columns,), slot + number, head), rows[number, head]
