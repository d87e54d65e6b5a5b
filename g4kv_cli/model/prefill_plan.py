"""The arithmetic and the validation of a PrefillPagedPlan: requests in, int32 arrays and recorded bounds out.

Pure NumPy, no device. The kernels that read a plan have no bounds checks of their own on most of it, so what is
refused here is the only defence. entries/plan.py puts the arrays on a device; decode takes such plans too.

Requests are checked as columns: one array of each number, one row a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.model import rules
from g4kv_cli.model.checked import (
    I32_MAX,
    product_i32,
    require_i32,
    require_i32_vector,
    require_sequence,
    require_type,
)
from g4kv_cli.model.page_rows import PageRows, check_page_rows
from g4kv_cli.model.plan_request import (
    LENGTH_EQUATION,
    LOG2_E,
    PAGE_LIST_NOT_EMPTY,
    Q_LEN,
    PlanRequest,
    PlanShape,
    check_shape,
)
from g4kv_cli.model.rules import Rule, rule

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

CTA_TILES_Q = (16, 64)
"""Packed query rows (token, head of the group) of one tile, where no device says which it can run."""

WINDOW_PAGES = rule("window_pages", "releases a page that the first query still sees")


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What every use of a plan is compared with: recorded at construction and at each update.

    ``cta_tile_q`` is the tile in force, overridden or derived; ``shape.cta_tile_q`` says which. ``scale_log2`` is
    sm_scale * log2(e), which the kernels take (their softmax is one of powers of 2).
    """

    shape: PlanShape
    scale_log2: float
    padding_page: int | None
    cta_tile_q: int
    num_requests: int
    num_tokens: int
    num_pages: int
    num_tiles: int
    min_q_len: int
    max_q_len: int
    max_page_index: int
    max_last_page_len: int
    max_position: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanArrays:
    """A validated plan on the host; all arrays int32.

    page_indices [pages], page_indptr [requests + 1], page_origins, last_page_len, kv_lens [requests], q_indptr
    [requests + 1], positions, token_requests [tokens], tile_requests, tile_indices [tiles]: tile t covers packed
    rows ``tile_indices[t] * cta_tile_q`` onwards of request ``tile_requests[t]``.
    """

    bounds: PlanBounds
    page_indices: Int32Array
    page_indptr: Int32Array
    page_origins: Int32Array
    last_page_len: Int32Array
    kv_lens: Int32Array
    q_indptr: Int32Array
    positions: Int32Array
    token_requests: Int32Array
    tile_requests: Int32Array
    tile_indices: Int32Array

    def by_name(self) -> dict[str, Int32Array]:
        """The arrays by field name, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "bounds"}


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """What a preallocated plan has room for. CUDA graphs keep its addresses, so it never grows."""

    max_tokens: int
    max_requests: int
    max_pages: int
    max_tiles: int


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPlan:
    """Requests that were found consistent, not laid out yet; arrays as PlanArrays has them, and start_pos, q_lens and
    tiles [requests]. Made by check_requests only."""

    bounds: PlanBounds
    start_pos: Int64Array
    q_lens: Int64Array
    kv_lens: Int64Array
    last_page_len: Int64Array
    page_origins: Int64Array
    page_indices: Int32Array
    page_indptr: Int64Array
    tiles: Int64Array


def derive_cta_tile_q(packed_rows: int, num_requests: int, tiles: Sequence[int]) -> int:
    """Packed query rows of a tile: the first of ``tiles`` that holds a request of average length, else the largest.

    Integer arithmetic, as FlashInfer's FA2DetermineCtaTileQ decides by the average too. ``tiles`` are those that the
    device has the shared memory for, in the order of entries/table.py (preferred_tiles): smallest first, but for those
    that a larger one is faster than.
    """
    average = -(-packed_rows // num_requests)
    return next((tile for tile in tiles if average <= tile), max(tiles))


def check_requests(
    requests: object, shape: object, tiles: Sequence[int] = CTA_TILES_Q, padding_page: object = None
) -> CheckedPlan:
    """Validate everything that needs no arrays. ``tiles``: the cta_tile_q to choose from, in order of preference.

    Raises ContractError: those of check_shape, and argument_type, integer, fits_i32, extent_positive, start_pos, q_len,
    page_list_not_empty, page_id_range, last_page_len, page_origin, length_equation, window_pages.
    """
    padding = None if padding_page is None else require_i32("padding_page", padding_page)
    rules.PAGE_ID_RANGE.require(padding is None or padding >= 0, "padding_page", padding, ">= 0")
    common = check_shape(require_type("shape", shape, PlanShape), tiles)
    size, window_left = common.page_size, common.window_left
    listed: list[PlanRequest] = require_sequence("requests", requests)  # type: ignore[assignment]
    rules.EXTENT_POSITIVE.require(len(listed) >= 1, "requests", len(listed), ">= 1 request")
    for index, request in enumerate(listed):
        if not isinstance(request, PlanRequest):
            require_type(f"requests[{index}]", request, PlanRequest)

    start, q_len = _column(listed, "start_pos"), _column(listed, "q_len")
    require_each(rules.START_POS, start >= 0, "start_pos", start, lambda r: ">= 0")
    require_each(Q_LEN, q_len >= 0, "q_len", q_len, lambda r: ">= 0")
    kv_len = start + q_len
    require_each(rules.FITS_I32, kv_len <= I32_MAX, "start_pos + q_len", kv_len, lambda r: f"<= {I32_MAX}")

    rows = [require_i32_vector(f"requests[{index}].page_indices", one.page_indices) for index, one in enumerate(listed)]
    pages = np.array([row.size for row in rows], np.int64)
    require_each(PAGE_LIST_NOT_EMPTY, pages >= 1, "page_indices", pages, lambda r: ">= 1 page")
    page_indices, page_indptr = np.concatenate(rows), _running_total(pages)
    negative = int(np.argmin(page_indices))
    owner = int(np.searchsorted(page_indptr, negative, "right")) - 1
    rules.PAGE_ID_RANGE.require(
        page_indices[negative] >= 0,
        f"requests[{owner}].page_indices[{negative - page_indptr[owner]}]",
        int(page_indices[negative]),
        ">= 0",
    )
    last, origin = _column(listed, "last_page_len"), _column(listed, "page_origin")
    in_page = (last >= 1) & (last <= size)
    require_each(rules.LAST_PAGE_LEN, in_page, "last_page_len", last, lambda r: f"1..{size}")
    first_page = start // size
    begins = (origin >= 0) & (origin <= first_page)
    require_each(rules.PAGE_ORIGIN, begins, "page_origin", origin, lambda r: f"0..{first_page[r]}")
    held, needed = (pages - 1) * size + last, kv_len - origin * size
    require_each(LENGTH_EQUATION, held == needed, "last_page_len", held, lambda r: f"{needed[r]} tokens in pages")
    # Query start_pos sees the keys from start_pos - window_left on, all of them without a window.
    first_seen = (np.zeros_like(start) if window_left < 0 else np.maximum(0, start - window_left)) // size
    require_each(WINDOW_PAGES, origin <= first_seen, "page_origin", origin, lambda r: f"<= {first_seen[r]}")

    group = common.num_qo_heads // common.num_kv_heads
    num_tokens = require_i32("tokens of all requests", int(q_len.sum()))
    # Blocks of every launch by the plan, (tile, KV head) or (token, query head), are no more than these.
    product_i32("tokens * query heads", num_tokens, common.num_qo_heads)
    derived = derive_cta_tile_q(num_tokens * group, len(listed), tiles)
    tile = derived if common.cta_tile_q is None else common.cta_tile_q
    tiles_of = -(-q_len * group // tile)
    bounds = PlanBounds(
        shape=common,
        scale_log2=common.sm_scale * LOG2_E,
        padding_page=padding,
        cta_tile_q=tile,
        num_requests=len(listed),
        num_tokens=num_tokens,
        num_pages=page_indices.size,
        num_tiles=int(tiles_of.sum()),
        min_q_len=int(q_len.min()),
        max_q_len=int(q_len.max()),
        max_page_index=int(page_indices.max()),
        max_last_page_len=int(last.max()),
        max_position=int(np.where(q_len > 0, kv_len - 1, -1).max()),
    )
    return CheckedPlan(bounds, start, q_len, kv_len, last, origin, page_indices, page_indptr, tiles_of)


def _column(requests: Sequence[PlanRequest], name: str) -> Int64Array:
    """One number of each request, int32 in range and int64 wide. Raises ContractError (integer, fits_i32)."""
    values = [getattr(request, name) for request in requests]
    return require_i32_vector("requests", values, lambda at: f"requests[{at}].{name}").astype(np.int64)


def require_each(
    contract: Rule, holds: npt.NDArray[np.bool_], name: str, got: Int64Array, want: Callable[[int], object]
) -> None:
    """Refuse the first request for which the rule does not hold; ``want`` says what it asks of a request."""
    if not holds.all():
        at = int(np.argmin(holds))
        contract.require(False, f"requests[{at}].{name}", int(got[at]), want(at))


def lay_out(plan: CheckedPlan) -> PlanArrays:
    """The arrays of checked requests. Raises ContractError: those of check_page_rows."""
    bounds = plan.bounds
    number = np.arange(bounds.num_requests, dtype=np.int32)
    q_indptr = _running_total(plan.q_lens)
    token_requests, tile_requests = np.repeat(number, plan.q_lens), np.repeat(number, plan.tiles)
    arrays = PlanArrays(
        bounds=bounds,
        page_indices=plan.page_indices,
        page_indptr=plan.page_indptr.astype(np.int32),
        page_origins=plan.page_origins.astype(np.int32),
        last_page_len=plan.last_page_len.astype(np.int32),
        kv_lens=plan.kv_lens.astype(np.int32),
        q_indptr=q_indptr.astype(np.int32),
        positions=(plan.start_pos[token_requests] + _index_in_run(q_indptr, token_requests)).astype(np.int32),
        token_requests=token_requests,
        tile_requests=tile_requests,
        tile_indices=_index_in_run(_running_total(plan.tiles), tile_requests).astype(np.int32),
    )
    check_page_rows(
        PageRows(plan.page_indices, plan.page_indptr, plan.page_origins, plan.start_pos, plan.kv_lens),
        page_size=bounds.shape.page_size,
        num_pages=bounds.max_page_index + 1,
        padding_page=bounds.padding_page,
        name_of=lambda row: f"requests[{row}].page_indices",
    )
    return arrays


def _running_total(counts: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _index_in_run(indptr: Int64Array, runs: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """0, 1, .. of each element of consecutive runs; ``runs`` names the run of each, ``indptr`` where each begins."""
    index: Int64Array = np.arange(runs.size, dtype=np.int64) - indptr[runs]
    return index
