"""The launches of one family of a served model: prep into its pool, attention out of it, through the entries.

Buffers live as long as the run, metadata is updated in place, and every output is poisoned before it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from g4kv_cli.cases.e2e.caches import FamilyCache
from g4kv_cli.cases.e2e.recorded_model import Array
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import INT32, Int32Array, PagedBatch, PageRow, RopeTables
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import decode_entry, entry_for
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.inputs import rope_rows
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import POISON_BYTE

_ROWS_A_TILE = 16


class FamilyLaunches:
    """Prep and attention of the layers of one family.

    ``norm_weights``: (q_norm, k_norm) of each layer; ``rope_positions``: the positions that tokens will have, all below
    ``cos_max_pos``; ``num_splits`` 0: no split decode.
    """

    def __init__(
        self,
        library: KernelLibrary,
        cache: FamilyCache,
        norm_weights: Sequence[tuple[Array, Array]],
        *,
        rope_positions: Sequence[range],
        cos_max_pos: int,
        max_rows: int,
        max_requests: int,
        num_splits: int,
    ) -> None:
        self.library, self.cache, self.geometry, self.num_splits = library, cache, cache.geometry, num_splits
        self._device = library.device
        self._arrays: dict[tuple[str, tuple[int, ...]], DeviceArray] = {}
        device, geometry = library.device, cache.geometry
        self._weights = [
            tuple(device.upload(weight, f"{geometry.name} norm weight") for weight in pair) for pair in norm_weights
        ]
        self._rope = _rope_tables(device, geometry, rope_positions, cos_max_pos)
        self.max_pages = max_requests * cache.max_row_pages
        group_tiles = -(-max_rows * geometry.gqa_group // _ROWS_A_TILE)
        self._plan = PrefillPagedPlan.preallocated(
            device,
            max_tokens=max_rows,
            max_requests=max_requests,
            max_pages=self.max_pages,
            max_tiles=group_tiles + max_requests,
        )
        self._workspace = None
        if num_splits:
            self._workspace = SplitWorkspace.allocate(
                device, tokens=max_requests, num_qo_heads=geometry.num_qo_heads, num_splits=num_splits,
                head_dim=geometry.head_dim,
            )  # fmt: skip
        self._page_row: PageRow | None = None
        self._start_pos = self._page_origin = 0
        self._batch: PagedBatch | None = None
        self._q_out: DeviceArray | None = None

    # --- metadata ----------------------------------------------------------------------------------------------

    def plan_shape(self, requests: Sequence[PlanRequest]) -> PlanShape:
        """What the family's requests share."""
        return PlanShape.of(self.geometry, page_size=self.cache.page_size)

    def decode_batch(self) -> PagedBatch:
        """What prep gets of a decode step."""
        return self._plan.decode_batch()

    def prepare_prefill(self, requests: Sequence[PlanRequest]) -> None:
        """Metadata of a prefill step, the same for all layers of the family."""
        self._plan.update(requests, shape=self.plan_shape(requests))
        self._page_row = None
        if len(requests) == 1:
            self.prepare_write(requests[0])

    def prepare_write(self, request: PlanRequest) -> None:
        """Metadata of one request for prep alone: no plan, so nothing is said of what its queries see."""
        pages = np.asarray(request.page_indices, np.int32)
        self._page_row = PageRow(self._metadata("page_row", pages), pages)
        self._start_pos, self._page_origin = request.start_pos, request.page_origin

    def prepare_decode(self, requests: Sequence[PlanRequest]) -> None:
        """Metadata of a decode step: the rows of the bucket, padding rows last."""
        self._plan.update(requests, shape=self.plan_shape(requests), padding_page=self.cache.padding_page)
        self._batch = self.decode_batch()

    # --- launches ----------------------------------------------------------------------------------------------

    def prefill(self, layer: int, q: Array, k: Array, v: Array | None) -> Array:
        """Attention of a prefill step's rows, bf16 [tokens, num_qo_heads, head_dim]."""
        self.write_prefill(layer, q, k, v)
        out = self._poisoned("out", q.shape)
        return self._attend(entry_for(self.geometry, "attention", "prefill"), layer, out)

    def write_prefill(self, layer: int, q: Array, k: Array, v: Array | None) -> None:
        """Prep alone. One request goes through the one-request entry, several through the ragged one."""
        if self._page_row is None:
            form = "batch_prefill"
            metadata: dict[str, Any] = {"plan": self._plan}
        else:
            form = "prefill"
            metadata = {
                "start_pos": self._start_pos, "page_row": self._page_row, "page_origin": self._page_origin,
            }  # fmt: skip
        self._write(layer, form, q, k, v, metadata)

    def decode(self, layer: int, q: Array, k: Array, v: Array | None, form: str) -> Array:
        """Attention of a decode step's rows (those of the padding last); ``form``: see decode_entry.

        It follows prep with nothing between them, and may begin while prep ends.
        """
        entry = decode_entry(self.geometry, form)
        out = self._poisoned("out", q.shape)
        self._write(layer, "decode", q, k, v, {"batch": self._batch})
        more: dict[str, Any] = {"enable_pdl": True} if entry.takes_pdl else {}
        if entry.takes_splits:
            more |= {"num_splits": self.num_splits, "workspace": self._workspace}
        return self._attend(entry, layer, out, **more)

    def rotated_queries(self) -> Array:
        """q_out of the last prep."""
        return self._device.read(self._rows())

    def free(self) -> None:
        """Give all device memory of the family back, the pool included."""
        arrays = [*self._arrays.values(), self._rope.cos, self._rope.sin, self.cache.pool.data]
        arrays += [weight for pair in self._weights for weight in pair]
        if self._workspace is not None:
            arrays += [self._workspace.partial_out, self._workspace.partial_max, self._workspace.partial_sum]
        self._device.free_all(arrays)
        self._plan.free()

    def _rows(self) -> DeviceArray:
        if self._q_out is None:
            raise ValueError("prep was not launched yet")
        return self._q_out

    def _write(self, layer: int, form: str, q: Array, k: Array, v: Array | None, metadata: dict[str, Any]) -> None:
        """Run prep."""
        entry = entry_for(self.geometry, "prep", form)
        inputs = {"q": self._input("q", q), "k": self._input("k", k)}
        if v is not None:
            inputs["v"] = self._input("v", v)
        q_weight, k_weight = self._weights[layer]
        self._q_out = self._poisoned("q_out", q.shape)
        entry(
            self.library,
            **inputs,
            **metadata,
            q_norm_weight=q_weight,
            k_norm_weight=k_weight,
            rope=self._rope,
            rotary_dim=self.geometry.rotary_dim,
            pool=self.cache.pool,
            layer=layer,
            q_out=self._q_out,
        )

    def _attend(self, entry: Entry, layer: int, out: DeviceArray, **more: Any) -> Array:
        """Run attention on what prep wrote last."""
        q = self._rows()
        entry(self.library, q=q, plan=self._plan, pool=self.cache.pool, layer=layer, out=out, **more)
        return self._device.read(out)

    # --- buffers -----------------------------------------------------------------------------------------------

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        key = (name, shape)
        if key not in self._arrays:
            self._arrays[key] = self._device.allocate(shape, dtype, f"{self.geometry.name} {name}")
        return self._arrays[key]

    def _input(self, name: str, values: Array) -> DeviceArray:
        array = self._array(name, values.shape, BF16)
        self._device.write(array, values)
        return array

    def _poisoned(self, name: str, shape: tuple[int, ...]) -> DeviceArray:
        array = self._array(name, shape, BF16)
        self._device.fill(array, POISON_BYTE)
        return array

    def _metadata(self, name: str, values: Int32Array) -> DeviceArray:
        """``values`` at the same address each time: a view of an array that has room for all."""
        view = self._array(name, (self.max_pages + 1,), INT32).view(values.shape)
        self._device.write(view, values)
        return view


def _rope_tables(device: Device, geometry: Geometry, positions: Sequence[range], cos_max_pos: int) -> RopeTables:
    """Tables of ``cos_max_pos`` rows of which only those of ``positions`` are written; NaN stands elsewhere, or
    nothing at all where the device tells a read of that."""
    shape = (cos_max_pos, geometry.rotary_dim)
    tables = [device.allocate(shape, BF16, name, sparse=True) for name in ("cos", "sin")]
    for table in tables:
        if device.info.kind == "cuda":
            device.fill(table, POISON_BYTE)
    for span in positions:
        for table, rows in zip(tables, rope_rows(geometry, np.asarray(span), geometry.rotary_dim), strict=True):
            device.write(table.view(rows.shape, offset_elems=span.start * geometry.rotary_dim), rows)
    return RopeTables(tables[0], tables[1])
