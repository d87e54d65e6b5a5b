"""A prep problem on a device: sets of random rows, a pool for each, and a check of what was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.bench.attention_problem import CheckedRow
from g4kv_cli.bench.noise_data import BF16, NoiseArena
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import entry_named
from g4kv_cli.inputs import rope_rows, turning_columns
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.oracle.reference import Expected, expected_folded_query, expected_rotated, expected_value_rows
from g4kv_cli.records.bench import Shape

Array = npt.NDArray[Any]

START_POS = 5
"""Not page-aligned, so that rows and slots differ."""
MAX_CHECKED_TOKENS = 16
PEER_ROW_MAX_SHARE = 2 * 2.0**-8
"""Of a row's largest value, on top of ours: a chain of library calls rounds to bf16 behind the norm and behind RoPE,
and a rotated value takes up the errors of both of its pair."""


def input_elems(shape: Shape) -> int:
    """Elements of Q, K and V of one set."""
    return shape.read_bytes // int(BF16.itemsize)


@dataclass(slots=True)
class PrepProblem:
    """``pools`` are the sets: inputs in the arena from ``first_elems`` on, a pool and outputs of their own."""

    shape: Shape
    geometry: Geometry
    entry: Entry
    arena: NoiseArena
    layout: KvLayout
    pools: tuple[PagedPool, ...]
    q_outs: tuple[DeviceArray, ...]
    k_outs: tuple[DeviceArray, ...]
    first_elems: list[int]
    pages: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    weights: tuple[Array, Array]
    weight_arrays: tuple[DeviceArray, DeviceArray]
    tables: tuple[Array, Array]
    rope: RopeTables
    rows: tuple[CheckedRow, ...]

    @classmethod
    def make(cls, shape: Shape, geometry: Geometry, arena: NoiseArena, num_sets: int, *, seed: int) -> PrepProblem:
        """Lay the sets out and allocate outputs. Raises what the device raises."""
        device, tokens, head_dim = arena.device, shape.tokens, shape.head_dim
        entry = entry_named(shape.id.split("/")[2])
        layout = derived_layout(geometry, shape.page_size, 1, shape.kv_format or SPLIT)
        random = np.random.Generator(np.random.PCG64([seed, 11, tokens]))
        if entry.metadata == "batch":
            # Each token is a request of its own, at the same position: one page each.
            positions = np.full(tokens, START_POS, np.int64)
            num_pages = tokens
        else:
            positions = START_POS + np.arange(tokens, dtype=np.int64)
            num_pages = -(-(START_POS + tokens) // shape.page_size)
        pages = random.permutation(num_pages).astype(np.int32)
        q_shape = (tokens, shape.num_qo_heads, head_dim)
        k_shape = (tokens, shape.num_kv_heads, head_dim)
        contiguous = entry.metadata == "none"
        pools, q_outs, k_outs = [], [], []
        for index in range(num_sets):
            q_outs.append(device.allocate(q_shape, BF16, f"q_out {index}"))
            if contiguous:
                k_outs.append(device.allocate(k_shape, BF16, f"k_out {index}"))
            pool_elems = layout.page_stride * (1 if contiguous else num_pages)
            pools.append(PagedPool(layout, device.allocate((pool_elems,), BF16, f"pool {index}")))
        weights = tuple((1 + 0.25 * random.standard_normal(head_dim)).astype(np.float32).astype(BF16) for _ in range(2))
        tables = rope_rows(geometry, np.arange(int(positions.max()) + 1, dtype=np.int64), geometry.rotary_dim)
        return cls(
            shape=shape,
            geometry=geometry,
            entry=entry,
            arena=arena,
            layout=layout,
            pools=tuple(pools),
            q_outs=tuple(q_outs),
            k_outs=tuple(k_outs),
            first_elems=[index * input_elems(shape) for index in range(num_sets)],
            pages=pages,
            positions=positions,
            weights=(weights[0], weights[1]),
            weight_arrays=(device.upload(weights[0], "q weight"), device.upload(weights[1], "k weight")),
            tables=tables,
            rope=RopeTables(device.upload(tables[0], "cos"), device.upload(tables[1], "sin")),
            rows=tuple(
                CheckedRow(0, token, 0)
                for token in dict.fromkeys(np.linspace(0, tokens - 1, min(tokens, MAX_CHECKED_TOKENS)).astype(int))
            ),
        )

    def inputs(self, index: int) -> tuple[DeviceArray, DeviceArray, DeviceArray | None]:
        """Q, K and V of a set, in this order in the arena."""
        shape, found, begin = self.shape, [], self.first_elems[index]
        for heads in (shape.num_qo_heads, *[shape.num_kv_heads] * self.entry.kv_bands):
            view = (shape.tokens, heads, shape.head_dim)
            found.append(self.arena.data.view(view, offset_elems=begin))
            begin += shape.tokens * heads * shape.head_dim
        return found[0], found[1], found[2] if len(found) > 2 else None

    def renew_queries(self) -> None:
        """Other rows: each set moves on in the arena by an eighth of a set, to where no set of this shape began."""
        step = max(8, input_elems(self.shape) // 8 // 8 * 8)
        room = self.arena.elems - self.first_elems[-1] - input_elems(self.shape)
        self.first_elems = [begin + min(step, room) // 8 * 8 for begin in self.first_elems]

    def places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Page and slot of every token, int64 [tokens] each."""
        index, slots = np.divmod(self.positions, self.shape.page_size)
        if self.entry.metadata == "batch":
            index = np.arange(self.shape.tokens)
        return self.pages[index].astype(np.int64), slots

    def poison(self) -> None:
        """Every output of every set: the next check may look at any of them."""
        device = self.arena.device
        for pool in self.pools:
            device.fill(pool.data, POISON_BYTE)
        for array in (*self.q_outs, *self.k_outs):
            device.fill(array, POISON_BYTE)

    def written(self, pool: int, order: PoolOrder = OWN_ORDER) -> Array:
        """What ``check`` takes: the checked tokens' rows in q_out and in the pool (or k_out) of a set. A folded row of
        K has its columns in their places, and zeros in the others."""
        device, heads, head_dim = self.arena.device, self.shape.num_kv_heads, self.shape.head_dim
        pages, slots = self.places() if self.entry.metadata != "none" else (None, None)
        rows = []
        for row in self.rows:
            parts = [device.read(_row(self.q_outs[pool], row.token, self.shape.num_qo_heads, head_dim))]
            if pages is None or slots is None:
                parts.append(device.read(_row(self.k_outs[pool], row.token, heads, head_dim)))
            else:
                page, slot = int(pages[row.token]), int(slots[row.token])
                data = self.pools[pool].data
                image = PoolImage.of(self.layout, len(self.pages), order)
                for is_v in (0, 1):
                    # pool[page][layer][K, V][slot][head][dim], one layer, in the order of the pool's axes
                    first = image.offsets((page, 0, slot, np.arange(heads), 0), is_v)
                    columns = image.row_dim(is_v)
                    rows_of = np.zeros((heads, head_dim), BF16)
                    kept = slice(None) if columns == head_dim else turning_columns(self.geometry)
                    for head, at in enumerate(first):
                        rows_of[head, kept] = device.read(data.view((columns,), offset_elems=int(at)))
                    parts.append(rows_of)
            rows.append(np.concatenate(parts))
        return np.stack(rows)

    def check(self, out: Array, pool: int, *, is_peer: bool = False, rounds_norm: bool = False) -> str:
        """``out`` [checked tokens, q heads + 2 x KV heads, head_dim]: what stands in q_out and in the pool."""
        shape = self.shape
        tokens = np.array([row.token for row in self.rows])
        bands = []
        begin = self.first_elems[pool]
        for heads in (shape.num_qo_heads, *[shape.num_kv_heads] * self.entry.kv_bands):
            # arena[first + (token, head, dim)]
            first = begin + tokens[:, None] * heads * shape.head_dim + np.arange(heads) * shape.head_dim
            rows = self.arena.rows(first.reshape(-1), shape.head_dim)
            bands.append(rows.reshape(len(tokens), heads, shape.head_dim))
            begin += shape.tokens * heads * shape.head_dim
        cos, sin = (table[self.positions[tokens]] for table in self.tables)
        q = expected_rotated(bands[0], self.weights[0], cos, sin, rounds_norm=rounds_norm)
        k = expected_rotated(bands[1], self.weights[1], cos, sin, rounds_norm=rounds_norm)
        if shape.kv_format:
            turning = turning_columns(self.geometry)
            q = expected_folded_query(bands[0], *self.weights, cos, sin, turning)
            turns = np.isin(np.arange(shape.head_dim), turning)
            k = Expected(np.where(turns, k.value, 0.0), np.where(turns, k.limit, 0.0), k.limit_text)
        wanted: list[tuple[str, Expected]] = [("q", q), ("k", k)]
        if self.entry.writes_v:
            wanted.append(("v", expected_value_rows(bands[-1])))
        begin = 0
        for name, want in wanted:
            got = out[:, begin : begin + want.value.shape[1]].astype(np.float64)
            begin += want.value.shape[1]
            limit = want.limit
            if is_peer:
                limit = limit + PEER_ROW_MAX_SHARE * np.abs(want.value).max(axis=-1, keepdims=True)
            wrong = ~(np.abs(got - want.value) <= limit)
            if wrong.any():
                at = np.argwhere(wrong)[0]
                place = f"token {tokens[at[0]]}, head {at[1]}, dim {at[2]}"
                return f"{name}: {int(wrong.sum())} of {wrong.size} checked elements are wrong, first at {place}"
        return ""


@dataclass(slots=True)
class PrepCall:
    """One prep entry on the problem's sets."""

    problem: PrepProblem
    library: KernelLibrary
    metadata: dict[str, Any]
    pool: int = 0
    renewed_in_place: bool = False

    def queue(self, pool: int) -> None:
        """One call on this set."""
        problem = self.problem
        self.pool = pool
        q, k, v = problem.inputs(pool)
        entry = problem.entry
        arguments: dict[str, Any] = {
            "q": q,
            "k": k,
            "q_norm_weight": problem.weight_arrays[0],
            "k_norm_weight": problem.weight_arrays[1],
            "rope": problem.rope,
            "rotary_dim": problem.geometry.rotary_dim,
            "q_out": problem.q_outs[pool],
            **self.metadata,
        }
        if problem.entry.has_v_input:
            arguments["v"] = v
        if problem.entry.metadata == "none":
            arguments["k_out"] = problem.k_outs[pool]
        else:
            arguments |= {"pool": problem.pools[pool], "layer": 0}
        entry(self.library, **arguments)

    def poison(self) -> None:
        """As PrepProblem."""
        self.problem.poison()

    def output(self) -> Array:
        """What PrepProblem.check takes, of the set that was called last."""
        return self.problem.written(self.pool, self.library.pool_order)


def _row(array: DeviceArray, token: int, heads: int, head_dim: int) -> DeviceArray:
    return array.view((heads, head_dim), offset_elems=token * heads * head_dim)


def prep_call(problem: PrepProblem, library: KernelLibrary) -> PrepCall:
    """Make the metadata of the entry's form."""
    device, shape, takes = library.device, problem.shape, problem.entry.metadata
    if takes == "none":
        metadata: dict[str, Any] = {"start_pos": START_POS}
    elif takes == "page_row":
        metadata = {"start_pos": START_POS, "page_row": PageRow.from_host(device, problem.pages.tolist())}
    elif takes == "batch":
        batch = PagedBatch.from_host(
            device, positions=problem.positions.tolist(), page_lists=[[page] for page in problem.pages.tolist()]
        )
        metadata = {"batch": batch}
    else:
        request = PlanRequest.of(
            kv_len=START_POS + shape.tokens,
            q_len=shape.tokens,
            pages=problem.pages.tolist(),
            page_size=shape.page_size,
        )
        plan = PrefillPagedPlan.batch(
            device, [request], shape=PlanShape.of(problem.geometry, page_size=shape.page_size)
        )
        metadata = {"plan": plan}
    return PrepCall(problem, library, metadata)
