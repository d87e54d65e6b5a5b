"""What a plan is asked for: its requests, and what they share.

A request is a chunk of new tokens on top of what its pages hold already::

    positions of request r:  start_pos .. start_pos + q_len - 1,   kv_len = start_pos + q_len
    page_indices[i] is the logical page page_origin + i
    (pages - 1) * page_size + last_page_len == kv_len - page_origin * page_size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from g4kv_cli.model import rules
from g4kv_cli.model.checked import F32_MAX, check_head_relation, finite_f32, require_i32, require_sequence
from g4kv_cli.model.geometry import ATTENTION_SCALE, HEAD_DIMS, Geometry
from g4kv_cli.model.rules import rule

LOG2_E = math.log2(math.e)
F32_MIN = 2.0**-149
"""The smallest positive float32, a subnormal one."""

Q_LEN = rule("q_len", "must not be negative (0 for a request without new tokens)")
PAGE_LIST_NOT_EMPTY = rule("page_list_not_empty", "must hold at least one page")
LENGTH_EQUATION = rule(
    "length_equation", "contradicts (pages - 1) * page_size + last_page_len == start_pos + q_len - released"
)
WINDOW_LEFT = rule("window_left", "must be -1 (no window) or at least 0")
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


def _at_least_1(field: str, value: object) -> int:
    number = require_i32(field, value)
    rules.EXTENT_POSITIVE.require(number >= 1, field, number, ">= 1")
    return number


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


def check_shape(shape: PlanShape, tiles: Sequence[int]) -> PlanShape:
    """The shape in Python numbers; the head relation first, before anything divides.

    Raises ContractError: integer, fits_i32, extent_positive, q_heads_multiple, head_dim, window_left, sm_scale,
    cta_tile_q.
    """
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
