"""The arithmetic and the validation of a PrefillPagedPlan: requests in, int32 arrays and recorded bounds out.

Pure NumPy, no device. The kernels that read a plan have no bounds checks of their own on most of it, so what is
refused here is the only defence. entries/plan.py puts the arrays on a device.

A request is a chunk of new tokens on top of what its pages hold already::

    positions of request r:  start_pos .. start_pos + q_len - 1,   kv_len = start_pos + q_len
    page_indices[page_indptr[r] : page_indptr[r + 1]]: index 0 is the logical page ``page_origin``
    (pages - 1) * page_size + last_page_len == kv_len - page_origin * page_size
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from g4kv_cli.model import rules
from g4kv_cli.model.checked import (
    F32_MAX,
    check_head_relation,
    finite_f32,
    product_i32,
    require_i32,
    require_i32_vector,
    require_sequence,
    require_type,
)
from g4kv_cli.model.geometry import ATTENTION_SCALE, Geometry
from g4kv_cli.model.page_rows import PageRows, check_page_rows
from g4kv_cli.model.rules import rule

Int32Array = npt.NDArray[np.int32]

CTA_TILES_Q = (16, 64)
"""Packed query rows (token, head of the group) of one tile, where no device says which it can run."""
HEAD_DIMS = (256, 512)
"""head_dim of the local and of the global family."""
LOG2_E = math.log2(math.e)
F32_MIN = 2.0**-149
"""The smallest positive float32, a subnormal one."""

Q_LEN = rule("q_len", "must not be negative (0 for a request without new tokens)")
PAGE_LIST_NOT_EMPTY = rule("page_list_not_empty", "must hold at least one page")
LENGTH_EQUATION = rule(
    "length_equation", "contradicts (pages - 1) * page_size + last_page_len == start_pos + q_len - released"
)
WINDOW_LEFT = rule("window_left", "must be -1 (no window) or at least 0")
WINDOW_PAGES = rule("window_pages", "releases a page that the first query still sees")
SM_SCALE = rule("sm_scale", "is not a positive number that float32 holds times log2(e)")
CTA_TILE_Q = rule("cta_tile_q", "is not a tile that the kernels are compiled for")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One request of a plan: ``q_len`` new tokens from position ``start_pos`` on, all numbers in tokens or pages.

    ``page_indices`` are all its resident pages, the ones the new tokens go to included; index 0 is the logical page
    ``page_origin``. ``last_page_len`` says how many slots of the last page are taken once the chunk is in. ``of``
    derives the two.
    """

    start_pos: int
    q_len: int
    page_indices: Sequence[int]
    last_page_len: int
    page_origin: int = 0

    @classmethod
    def of(
        cls, *, kv_len: int, pages: Sequence[int], page_size: int, q_len: int = 1, window: int | None = None
    ) -> PlanRequest:
        """The request whose ``pages`` hold ``kv_len`` tokens once its ``q_len`` new ones are in.

        ``pages`` are ids in the order of the tokens; the last one holds token ``kv_len - 1``. Where they are fewer
        than ``kv_len`` tokens span, the first ones were released. ``window`` counts keys, the query's own included
        (None: all); pages that no query of the chunk sees any more are left out.

        Raises ContractError: argument_type, integer, fits_i32, extent_positive, q_len, start_pos,
        page_list_not_empty, length_equation. Whether a page is missing that is seen, the plan decides (window_pages).
        """
        tokens = _at_least_1("kv_len", kv_len)
        size = _at_least_1("page_size", page_size)
        new = require_i32("q_len", q_len)
        Q_LEN.require(new >= 0, "q_len", new, ">= 0")
        start = tokens - new
        rules.START_POS.require(start >= 0, "kv_len - q_len", start, ">= 0")
        listed: list[int] = require_sequence("pages", pages)  # type: ignore[assignment]
        PAGE_LIST_NOT_EMPTY.require(len(listed) >= 1, "pages", "no page", ">= 1 page")
        origin = -(-tokens // size) - len(listed)
        LENGTH_EQUATION.require(origin >= 0, "pages", f"{len(listed)} pages", f"at most {origin + len(listed)}")
        unseen = 0
        if window is not None:
            first_seen = max(0, start - (_at_least_1("window", window) - 1))
            unseen = min(max(0, first_seen // size - origin), len(listed) - 1)
        return cls(start, new, tuple(listed[unseen:]), (tokens - 1) % size + 1, origin + unseen)

    @classmethod
    def padding(cls, page: int) -> PlanRequest:
        """A request that fills up a bucket: one token at position 0 of the reserved padding page."""
        return cls(start_pos=0, q_len=1, page_indices=(page,), last_page_len=1)


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the requests of a plan share. ``cta_tile_q`` overrides the derived tile; None derives it.

    ``window_left`` is the kernels' number: keys left of the query that it sees, -1 for all. ``of`` takes it from the
    model.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int = -1
    sm_scale: float = ATTENTION_SCALE
    cta_tile_q: int | None = None

    @classmethod
    def of(cls, geometry: Geometry, *, page_size: int, cta_tile_q: int | None = None) -> PlanShape:
        """The heads and the window of a family, and Gemma 4's attention scale."""
        return cls(
            num_qo_heads=geometry.num_qo_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            page_size=page_size,
            window_left=geometry.window_left,
            cta_tile_q=cta_tile_q,
        )


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
    min_page_index: int
    max_page_index: int
    max_last_page_len: int
    max_position: int
    max_kv_len: int


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


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request in Python ints, its length equation holding."""

    start_pos: int
    q_len: int
    kv_len: int
    pages: Int32Array
    last_page_len: int
    page_origin: int


def derive_cta_tile_q(packed_rows: int, num_requests: int, tiles: Sequence[int]) -> int:
    """Packed query rows of a tile: the smallest of ``tiles`` that holds a request of average length, else the largest.

    Integer arithmetic, as FlashInfer's FA2DetermineCtaTileQ decides by the average too. ``tiles`` are those that the
    device has the shared memory for (entries/table.py), smallest first.
    """
    average = -(-packed_rows // num_requests)
    return next((tile for tile in tiles if average <= tile), tiles[-1])


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """Requests that were found consistent, not laid out yet. Made by check_requests only."""

    bounds: PlanBounds
    requests: tuple[CheckedRequest, ...]


def check_sm_scale(sm_scale: object) -> tuple[float, float]:
    """(sm_scale, sm_scale * log2(e)): the kernels take the second, for powers of 2. Raises ContractError (sm_scale)."""
    number = finite_f32(sm_scale)
    scale_log2 = None if number is None else finite_f32(number * LOG2_E)
    SM_SCALE.require(
        scale_log2 is not None and float(np.float32(scale_log2)) > 0,
        "sm_scale",
        sm_scale,
        f"{F32_MIN / LOG2_E:.2e}..{F32_MAX / LOG2_E:.2e}",
    )
    return (0.0, 0.0) if number is None or scale_log2 is None else (number, scale_log2)


def check_requests(
    requests: object, shape: object, tiles: Sequence[int] = CTA_TILES_Q, padding_page: object = None
) -> CheckedPlan:
    """Validate everything that needs no arrays. ``tiles``: the cta_tile_q to choose from, smallest first.

    Raises ContractError: argument_type, integer, fits_i32, extent_positive, q_heads_multiple, head_dim, window_left,
    sm_scale, cta_tile_q, start_pos, q_len, page_list_not_empty, page_id_range, last_page_len, page_origin,
    length_equation, window_pages.
    """
    padding = None if padding_page is None else require_i32("padding_page", padding_page)
    rules.PAGE_ID_RANGE.require(padding is None or padding >= 0, "padding_page", padding, ">= 0")
    checked_shape = _check_shape(require_type("shape", shape, PlanShape), tiles)
    listed = require_sequence("requests", requests)
    rules.EXTENT_POSITIVE.require(len(listed) >= 1, "requests", len(listed), ">= 1 request")
    checked = tuple(
        _check_request(f"requests[{index}]", request, checked_shape) for index, request in enumerate(listed)
    )
    return CheckedPlan(_bounds_of(checked, checked_shape, tiles, padding), checked)


def _at_least_1(field: str, value: object) -> int:
    number = require_i32(field, value)
    rules.EXTENT_POSITIVE.require(number >= 1, field, number, ">= 1")
    return number


def _check_shape(shape: PlanShape, tiles: Sequence[int]) -> PlanShape:
    """The shape in Python numbers; the head relation first, before anything divides."""
    num_qo_heads, num_kv_heads = check_head_relation(shape.num_qo_heads, shape.num_kv_heads)
    head_dim = require_i32("head_dim", shape.head_dim)
    rules.HEAD_DIM.require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {HEAD_DIMS}")
    page_size = _at_least_1("page_size", shape.page_size)
    window_left = require_i32("window_left", shape.window_left)
    WINDOW_LEFT.require(window_left >= -1, "window_left", window_left, ">= -1")
    tile = None
    if shape.cta_tile_q is not None:
        tile = require_i32("cta_tile_q", shape.cta_tile_q)
        CTA_TILE_Q.require(tile in tiles, "cta_tile_q", tile, f"one of {tuple(tiles)}")
    return PlanShape(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        window_left=window_left,
        sm_scale=check_sm_scale(shape.sm_scale)[0],
        cta_tile_q=tile,
    )


def _check_request(name: str, request: object, shape: PlanShape) -> CheckedRequest:
    given = require_type(name, request, PlanRequest)
    start = require_i32(f"{name}.start_pos", given.start_pos)
    rules.START_POS.require(start >= 0, f"{name}.start_pos", start, ">= 0")
    q_len = require_i32(f"{name}.q_len", given.q_len)
    Q_LEN.require(q_len >= 0, f"{name}.q_len", q_len, ">= 0")
    kv_len = require_i32(f"{name}.start_pos + q_len", start + q_len)

    pages = require_i32_vector(f"{name}.page_indices", given.page_indices)
    PAGE_LIST_NOT_EMPTY.require(pages.size >= 1, f"{name}.page_indices", "no page", ">= 1 page")
    at = int(np.argmin(pages))
    rules.PAGE_ID_RANGE.require(pages[at] >= 0, f"{name}.page_indices[{at}]", int(pages[at]), ">= 0")
    last_page_len = require_i32(f"{name}.last_page_len", given.last_page_len)
    rules.LAST_PAGE_LEN.require(
        1 <= last_page_len <= shape.page_size, f"{name}.last_page_len", last_page_len, f"1..{shape.page_size}"
    )

    origin = require_i32(f"{name}.page_origin", given.page_origin)
    first_page = start // shape.page_size
    rules.PAGE_ORIGIN.require(0 <= origin <= first_page, f"{name}.page_origin", origin, f"0..{first_page}")
    resident = (len(pages) - 1) * shape.page_size + last_page_len
    want = kv_len - origin * shape.page_size
    LENGTH_EQUATION.require(resident == want, f"{name}.last_page_len", f"{resident} tokens in pages", want)
    # Query start_pos sees the keys from start_pos - window_left on, all of them without a window.
    first_seen = 0 if shape.window_left < 0 else max(0, start - shape.window_left)
    WINDOW_PAGES.require(
        origin <= first_seen // shape.page_size, f"{name}.page_origin", origin, f"<= {first_seen // shape.page_size}"
    )
    return CheckedRequest(start, q_len, kv_len, pages, last_page_len, origin)


def _bounds_of(
    requests: Sequence[CheckedRequest], shape: PlanShape, tiles: Sequence[int], padding_page: int | None
) -> PlanBounds:
    group = shape.num_qo_heads // shape.num_kv_heads
    num_tokens = require_i32("tokens of all requests", sum(request.q_len for request in requests))
    # Blocks of every launch by the plan, (tile, KV head) or (token, query head), are no more than these.
    product_i32("tokens * query heads", num_tokens, shape.num_qo_heads)
    packed_rows = num_tokens * group
    derived = derive_cta_tile_q(packed_rows, len(requests), tiles)
    tile = derived if shape.cta_tile_q is None else shape.cta_tile_q
    return PlanBounds(
        shape=shape,
        scale_log2=shape.sm_scale * LOG2_E,
        padding_page=padding_page,
        cta_tile_q=tile,
        num_requests=len(requests),
        num_tokens=num_tokens,
        num_pages=sum(len(request.pages) for request in requests),
        num_tiles=sum(_tiles_of(request, group, tile) for request in requests),
        min_q_len=min(request.q_len for request in requests),
        max_q_len=max(request.q_len for request in requests),
        min_page_index=min(int(request.pages.min()) for request in requests),
        max_page_index=max(int(request.pages.max()) for request in requests),
        max_last_page_len=max(request.last_page_len for request in requests),
        max_position=max((request.kv_len - 1 for request in requests if request.q_len), default=-1),
        max_kv_len=max(request.kv_len for request in requests),
    )


def _tiles_of(request: CheckedRequest, group: int, tile: int) -> int:
    return -(-request.q_len * group // tile)


def lay_out(plan: CheckedPlan) -> PlanArrays:
    """The arrays of checked requests. Raises ContractError: those of check_page_rows."""
    requests, bounds = plan.requests, plan.bounds
    group = bounds.shape.num_qo_heads // bounds.shape.num_kv_heads
    tiles = [_tiles_of(request, group, bounds.cta_tile_q) for request in requests]
    number = np.arange(len(requests), dtype=np.int32)
    arrays = PlanArrays(
        bounds=bounds,
        page_indices=np.concatenate([request.pages for request in requests]),
        page_indptr=_running_total([len(request.pages) for request in requests]),
        page_origins=np.array([request.page_origin for request in requests], np.int32),
        last_page_len=np.array([request.last_page_len for request in requests], np.int32),
        kv_lens=np.array([request.kv_len for request in requests], np.int32),
        q_indptr=_running_total([request.q_len for request in requests]),
        positions=_concatenate([np.arange(request.start_pos, request.kv_len) for request in requests]),
        token_requests=np.repeat(number, [request.q_len for request in requests]),
        tile_requests=np.repeat(number, tiles),
        tile_indices=_concatenate([np.arange(count) for count in tiles]),
    )
    check_page_rows(
        PageRows(
            page_indices=arrays.page_indices,
            page_indptr=arrays.page_indptr,
            page_origins=arrays.page_origins,
            start_pos=np.array([request.start_pos for request in requests], np.int32),
            kv_len=arrays.kv_lens,
        ),
        page_size=bounds.shape.page_size,
        num_pages=bounds.max_page_index + 1,
        padding_page=bounds.padding_page,
        name_of=lambda row: f"requests[{row}].page_indices",
    )
    return arrays


def _running_total(counts: Sequence[int]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _concatenate(parts: Sequence[npt.NDArray[np.integer]]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32)
