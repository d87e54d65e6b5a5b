"""A family's pool with NaN in every element until something is written, addressed as people think of it: by request
and position.

Places are NumPy indices into ``pool[page][layer][K, V][slot][head][dim]``, never the offset arithmetic that kernels
and their callers use, so that what is read back does not depend on what is under test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import BF16, PagedPool
from g4kv_cli.model import rules
from g4kv_cli.model.checked import product_i64, require_i32, require_type
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.oracle.compare import POISON_BYTE

Array = npt.NDArray[Any]


class PoisonedPool:
    """``num_pages`` pages of a geometry's layout on a device. ``pool`` is what entries take.

    ``num_layers`` defaults to the layers of the family that own K and V.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        *,
        num_pages: int,
        page_size: int = DEFAULT_PAGE_SIZE_TOKENS,
        num_layers: int | None = None,
    ) -> None:
        """Allocate and poison it. Raises ContractError (extent_positive), UsageError or DeviceUnavailable."""
        self.device = device
        self.num_pages = require_i32("num_pages", num_pages)
        rules.EXTENT_POSITIVE.require(self.num_pages >= 1, "num_pages", self.num_pages, ">= 1")
        layout = derived_layout(geometry, page_size, num_layers)
        elements = product_i64("pool elements", self.num_pages, layout.page_stride)
        self.pool = PagedPool(layout, device.allocate((elements,), BF16, f"{geometry.name} pool"))
        # pool[page][layer][K, V][slot][head][dim]
        self.shape = (
            self.num_pages, layout.num_layers, 2, layout.page_size, layout.num_kv_heads, layout.head_dim,
        )  # fmt: skip
        device.fill(self.pool.data, POISON_BYTE)

    def fill(self, request: PlanRequest, layer: int, first_position: int, k: Array, v: Array) -> None:
        """Write K and V, bf16 [tokens, num_kv_heads, head_dim], of the positions from ``first_position`` on.

        Raises ContractError: argument_type, dtype, shape, layer_range, page_coverage, page_id_range.
        """
        for name, rows in (("k", k), ("v", v)):
            require_type(name, rows, np.ndarray)
            rules.DTYPE.require(rows.dtype == BF16, name, rows.dtype, BF16)
            wanted = (len(k), *self.shape[4:])
            rules.SHAPE.require(rows.shape == wanted, name, list(rows.shape), list(wanted))
        positions = range(first_position, first_position + len(k))
        for k_slots, v_slots, run in self._runs(request, layer, positions):
            self.device.write(k_slots, np.ascontiguousarray(k[run]))
            self.device.write(v_slots, np.ascontiguousarray(v[run]))

    def read(self, request: PlanRequest, layer: int, positions: range | None = None) -> tuple[Array, Array]:
        """K and V as they lie in the pool, bf16 [positions, num_kv_heads, head_dim]; NaN (0xffff) where nobody wrote.

        ``positions`` defaults to all that the request's pages hold. Raises ContractError: layer_range, page_coverage,
        page_id_range.
        """
        if positions is None:
            page_size = self.shape[3]
            positions = range(request.page_origin * page_size, request.start_pos + request.q_len)
        k, v = (np.empty((len(positions), *self.shape[4:]), BF16) for _ in range(2))
        for k_slots, v_slots, run in self._runs(request, layer, positions):
            k[run] = self.device.read(k_slots)
            v[run] = self.device.read(v_slots)
        return k, v

    def poison(self, page: int) -> None:
        """Put NaN in every element of a page, of all layers: what a page given back holds."""
        rules.PAGE_ID_RANGE.require(0 <= page < self.num_pages, "page", page, f"0..{self.num_pages - 1}")
        elements = int(np.prod(self.shape[1:]))
        self.device.fill(self.pool.data.view((elements,), offset_elems=page * elements), POISON_BYTE)

    def free(self) -> None:
        """Return the memory to the device."""
        self.device.free(self.pool.data)

    def _runs(self, request: PlanRequest, layer: int, positions: range) -> list[tuple[DeviceArray, DeviceArray, slice]]:
        """Page by page: K rows and V rows of the slots that the positions take, and which of the positions they are."""
        _, num_layers, _, page_size, *row_shape = self.shape
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
            k, v = (
                # pool[page][layer][K, V][slot][head][dim]
                self.pool.data.view(
                    (end - at, *row_shape),
                    offset_elems=int(np.ravel_multi_index((page, layer, kv, slot, 0, 0), self.shape)),
                )
                for kv in (0, 1)
            )
            runs.append((k, v, slice(at - positions.start, end - positions.start)))
            at = end
        return runs
