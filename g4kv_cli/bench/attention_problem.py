"""An attention problem on a device: pools of random keys, requests with permuted pages, queries, a check of results.

The pools hold one layer. Every pool has the same page tables, so one plan serves all of them, as in a server's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.bench.noise_data import BF16, NoiseArena
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import PagedPool
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.inputs import turning_columns
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.model.slots import derived_layout, page_origin, pages_for
from g4kv_cli.model.workload import PagedRequest, Workload
from g4kv_cli.oracle.attention_limits import (
    LOG2_E,
    KeySums,
    Rounding,
    mean_scale_limit,
    rounding_of,
    scale_error,
    weight_errors,
)
from g4kv_cli.records.bench import Shape

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

SM_SCALE = 1.0
"""Gemma 4's attention scale: its q_norm has it in the weights."""
QUERY_SCALE = 1.0
"""Queries have a root mean square of QUERY_SCALE / sqrt(head_dim), so scores spread by about 1: many keys count."""

OWN_ROUNDINGS = 1
"""To bf16 in front of the result: our kernels round the weights alone."""
PEER_ROUNDINGS = 2
"""Other libraries may also round the partial results of splits."""

MAX_CHECKED_ELEMS = 2**27
"""Key and value elements that one check reads at most; at least one row is checked whatever it takes."""
KEYS_PER_STEP = 8192
MAX_CHECKED_TOKENS = 6


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A token row and KV head whose results are checked, for all query heads of the group."""

    request: int
    token: int
    kv_head: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedRows:
    """``value`` float64 [rows, group, head_dim], and the rounding of a right kernel by the number of its
    bf16 roundings in front of the result."""

    value: Float64
    rounding: dict[int, Rounding]


@dataclass(slots=True)
class AttentionProblem:
    """``batch``: the requests with their rows of pages, ids of one pool of ``num_pages``; behind them ``num_padding``
    more of one token in the ``padding_page``. ``q`` bf16 [tokens, heads, head_dim]."""

    shape: Shape
    geometry: Geometry
    arena: NoiseArena
    layout: KvLayout
    pools: tuple[PagedPool, ...]
    batch: tuple[PagedRequest, ...]
    num_pages: int
    q: DeviceArray
    q_host: Array
    rows: tuple[CheckedRow, ...]
    padding_page: int | None = None
    num_padding: int = 0
    plans: dict[int, PrefillPagedPlan] = field(default_factory=dict)
    _expected: dict[tuple[int, PoolOrder], ExpectedRows] = field(default_factory=dict)
    _seed: int = 0

    @property
    def device(self) -> Device:
        """Where the pools are."""
        return self.arena.device

    @property
    def tokens(self) -> int:
        """Query rows of the batch."""
        return sum(request.q_len for request in self.batch) + self.num_padding

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """int32 [batch, pages a request], of a batch of equals."""
        return np.array([request.pages for request in self.batch], np.int32)

    @property
    def origin(self) -> int:
        """First resident page of each request, of a batch of equals."""
        return self.batch[0].origin

    @property
    def last_page_len(self) -> int:
        """Slots taken in each request's last page."""
        return self.shape.kv_len - (self.origin + int(self.pages.shape[1]) - 1) * self.layout.page_size

    def requests(self) -> list[PlanRequest]:
        """The batch as a plan takes it."""
        size = self.shape.page_size
        found = [
            PlanRequest.of(kv_len=one.kv_len, q_len=one.q_len, pages=one.pages, page_size=size) for one in self.batch
        ]
        if self.padding_page is not None:
            found += [PlanRequest.padding(self.padding_page)] * self.num_padding
        return found

    def renew_queries(self) -> None:
        """Other queries, at the same address: what was checked before says nothing about them."""
        self._seed += 1
        self.q_host = _queries(self.shape, self.tokens, self._seed)
        self.device.write(self.q, self.q_host)
        self._expected.clear()

    def check(self, out: Array, pool: int, *, roundings: int = OWN_ROUNDINGS, order: PoolOrder = OWN_ORDER) -> str:
        """Empty if the checked rows of ``out`` [tokens, heads, head_dim] are right for this pool; else what is not.

        ``roundings``: OWN_ROUNDINGS or PEER_ROUNDINGS; ``order``: how the pool's axes lie for the kernel.
        """
        key = (pool, order)
        if key not in self._expected:
            self._expected[key] = self._attend(pool, order)
        group = self.geometry.gqa_group
        token_rows = [self._token_row(row) for row in self.rows]
        heads = [slice(row.kv_head * group, (row.kv_head + 1) * group) for row in self.rows]
        got = np.stack([np.asarray(out[at, head], np.float64) for at, head in zip(token_rows, heads, strict=True)])
        want = self._expected[key]
        if got.shape != want.value.shape:
            return f"the output has the shape {got.shape[1:]}, not {want.value.shape[1:]}"
        return wrong_rows(got, want.value, want.rounding[roundings], self.rows)

    def _attend(self, pool: int, order: PoolOrder) -> ExpectedRows:
        """Expected output of the checked rows; sums of float32 products."""
        found = [self._attend_row(pool, order, row) for row in self.rows]
        return ExpectedRows(
            np.stack([one.value for one in found]),
            {
                count: Rounding.join([one.rounding[count] for one in found], np.stack)
                for count in (OWN_ROUNDINGS, PEER_ROUNDINGS)
            },
        )

    def _attend_row(self, pool: int, order: PoolOrder, row: CheckedRow) -> ExpectedRows:
        geometry = self.geometry
        group = geometry.gqa_group
        position = self.batch[row.request].start_pos + row.token
        first = 0 if geometry.window is None else max(0, position - geometry.window + 1)
        keys = np.arange(first, position + 1)
        heads = slice(row.kv_head * group, (row.kv_head + 1) * group)
        queries = self.q_host[self._token_row(row), heads].astype(np.float32)
        sizes = np.abs(queries)
        steps = [slice(begin, begin + KEYS_PER_STEP) for begin in range(0, len(keys), KEYS_PER_STEP)]
        scores, magnitudes = np.empty((group, len(keys))), np.empty((group, len(keys)))
        for step in steps:
            k = self._kv(pool, order, row, keys[step], is_v=False)
            scores[:, step], magnitudes[:, step] = SM_SCALE * (queries @ k.T), SM_SCALE * (sizes @ np.abs(k).T)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        bits = np.abs(scores).max(axis=1, keepdims=True) * LOG2_E
        errors = weight_errors(magnitudes, bits, geometry.head_dim, len(keys))
        mean_error = (weights * errors).sum(axis=1, keepdims=True)
        sums = KeySums(*(np.zeros((group, geometry.head_dim)) for _ in range(5)))
        for step in steps:
            v = self._kv(pool, order, row, keys[step], is_v=True)
            size, square = np.abs(v), np.square(v)
            weight, error = weights[:, step].astype(np.float32), errors[:, step].astype(np.float32)
            sums.value += weight @ v
            sums.size += weight @ size
            sums.error += (weight * (error + mean_error.astype(np.float32))) @ size
            sums.square += np.square(weight) @ square
            sums.error_square += np.square(weight * error) @ square
        overlaps = np.concatenate(
            [sums.value.astype(np.float32) @ self._kv(pool, order, row, keys[step], is_v=True).T for step in steps],
            axis=1,
        )
        return ExpectedRows(
            sums.value,
            {
                count: rounding_of(sums, weights, scores, errors, overlaps.astype(np.float64), count)
                for count in (OWN_ROUNDINGS, PEER_ROUNDINGS)
            },
        )

    def _token_row(self, row: CheckedRow) -> int:
        """Where a checked row's token stands in q and out."""
        return sum(request.q_len for request in self.batch[: row.request]) + row.token

    def _kv(
        self, pool: int, order: PoolOrder, row: CheckedRow, positions: npt.NDArray[np.int64], *, is_v: bool
    ) -> npt.NDArray[np.float32]:
        """Rows of K or V of one request and KV head: float32 [positions, head_dim]; folded, K's others are V's."""
        layout = self.layout
        request = self.batch[row.request]
        page = np.asarray(request.pages, np.int64)[positions // layout.page_size - request.origin]
        places = (page, 0, positions % layout.page_size, row.kv_head, 0)
        image = PoolImage.of(layout, self.num_pages, order)
        begin = self.pools[pool].data.offset_bytes // BF16.itemsize
        held = self.arena.rows(begin + image.offsets(places, int(is_v)), image.row_dim(int(is_v)))
        if is_v or layout.kv_format == SPLIT:
            return held
        k = self._kv(pool, order, row, positions, is_v=True)
        k[:, turning_columns(self.geometry)] = held
        return k


def wrong_rows(got: Float64, want: Float64, rounding: Rounding, rows: tuple[CheckedRow, ...]) -> str:
    """What is wrong with rows [rows, group, head_dim]: not finite, an element outside its limit, or all rows larger or
    smaller than roundings make them (oracle/attention_limits.py). Empty if nothing is."""

    def place(index: int) -> str:
        at = rows[index]
        return f"at request {at.request}, token {at.token}, KV head {at.kv_head}"

    if not np.isfinite(got).all():
        return f"not finite, first {place(int(np.argwhere(~np.isfinite(got))[0, 0]))}"
    error = np.abs(got - want)
    wrong = (error > rounding.limit).any(axis=-1)
    if wrong.any():
        times = float((error / rounding.limit).max())
        return (
            f"{int(wrong.sum())} of {wrong.size} checked rows are wrong, first {place(int(np.argwhere(wrong)[0, 0]))}: "
            f"off by up to {times:.3g} times what rounding may do to an element"
        )
    scale, limit = float(scale_error(got, want).mean()), mean_scale_limit(rounding)
    if abs(scale) <= limit:
        return ""
    return f"the checked rows are off together: their sizes by {scale:.3g} on average (limit {limit:.3g})"


def pool_elems_of(shape: Shape, geometry: Geometry, workload: Workload | None = None) -> int:
    """Elements of one pool, one layer: the resident pages of every request, or the workload's pool."""
    pages = shape.batch * _pages_a_request(shape, geometry) if workload is None else workload.num_pages
    return derived_layout(geometry, shape.page_size, 1, shape.kv_format or SPLIT).page_stride * pages


def attention_problem(
    shape: Shape, geometry: Geometry, arena: NoiseArena, num_pools: int, *, seed: int, workload: Workload | None = None
) -> AttentionProblem:
    """Lay ``num_pools`` pools out in the arena, permute the pages, upload queries. ValueError if they do not fit.

    The batch is ``workload``'s where one is given, with its pages, and of equals where none is.
    """
    layout = derived_layout(geometry, shape.page_size, 1, shape.kv_format or SPLIT)
    elems = pool_elems_of(shape, geometry, workload)
    if num_pools * elems > arena.elems:
        raise ValueError(f"{num_pools} pools of {elems} elements do not fit into {arena.elems}")
    pools = tuple(
        PagedPool(layout, arena.data.view((elems,), offset_elems=index * elems)) for index in range(num_pools)
    )
    batch = _equals(shape, geometry, seed) if workload is None else workload.requests
    padding = 0 if workload is None else workload.padding
    q_host = _queries(shape, sum(request.q_len for request in batch) + padding, seed)
    return AttentionProblem(
        shape=shape,
        geometry=geometry,
        arena=arena,
        layout=layout,
        pools=pools,
        batch=batch,
        num_pages=elems // layout.page_stride,
        padding_page=None if workload is None else workload.padding_page,
        num_padding=padding,
        q=arena.device.upload(q_host, "q"),
        q_host=q_host,
        rows=_checked_rows(shape, batch),
        _seed=seed,
    )


def _equals(shape: Shape, geometry: Geometry, seed: int) -> tuple[PagedRequest, ...]:
    """``batch`` requests of one length on permuted pages."""
    random = np.random.Generator(np.random.PCG64([seed, shape.batch, shape.kv_len, shape.tokens]))
    per_request, origin = _pages_a_request(shape, geometry), _origin(shape, geometry)
    pages = random.permutation(shape.batch * per_request).reshape(shape.batch, per_request)
    return tuple(PagedRequest(shape.kv_len, shape.tokens, origin, tuple(row)) for row in pages.tolist())


def _origin(shape: Shape, geometry: Geometry) -> int:
    """Pages are released by the position of the first new token, as a server does before the step."""
    return page_origin(shape.kv_len - shape.tokens, geometry.window, shape.page_size)


def _pages_a_request(shape: Shape, geometry: Geometry) -> int:
    return pages_for(shape.kv_len, shape.page_size) - _origin(shape, geometry)


def _queries(shape: Shape, tokens: int, seed: int) -> Array:
    random = np.random.Generator(np.random.PCG64([seed, 7, shape.batch, shape.tokens, shape.head_dim]))
    rows = (tokens, shape.num_qo_heads, shape.head_dim)
    scale = np.float32(QUERY_SCALE / np.sqrt(shape.head_dim))
    return (random.standard_normal(rows, dtype=np.float32) * scale).astype(BF16)


def _checked_rows(shape: Shape, batch: Sequence[PagedRequest]) -> tuple[CheckedRow, ...]:
    """First, last and middle (request, token), each at one KV head, first and last heads included; as many as the
    budget of elements allows."""
    ends = np.cumsum([request.q_len for request in batch])
    total = int(ends[-1])
    spread = dict.fromkeys(round(index * (total - 1) / (MAX_CHECKED_TOKENS - 1)) for index in range(MAX_CHECKED_TOKENS))
    order = list(spread)
    order = [order[-1], order[0], *order[1:-1]] if len(order) > 1 else order * MAX_CHECKED_TOKENS
    each = 2 * max(1, shape.visible_keys) * shape.head_dim
    count = max(1, min(len(order), MAX_CHECKED_ELEMS // each))
    rows = []
    for index, at in enumerate(order[:count]):
        request = int(np.searchsorted(ends, at, "right"))
        token = at - int(ends[request]) + batch[request].q_len
        head = (shape.num_kv_heads - 1 - index * 3) % shape.num_kv_heads
        rows.append(CheckedRow(request, token, head))
    return tuple(dict.fromkeys(rows))
