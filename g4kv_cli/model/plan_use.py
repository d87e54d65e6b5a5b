"""What a use of a plan is held against: the room of its arrays, and the call that is about to launch by it."""

from __future__ import annotations

from collections.abc import Sequence

from g4kv_cli.model import rules
from g4kv_cli.model.checked import CheckedGeometry
from g4kv_cli.model.prefill_plan import CTA_TILES_Q, PlanBounds, PlanCapacity, derive_cta_tile_q
from g4kv_cli.model.rules import rule

CAPACITY = rule("capacity", "does not fit the array that the plan has for it")
PLAN_TILE = rule("plan_tile", "is not the tile of this call: one of the two overrides what is derived")
PLAN_HEAD_DIM = rule("plan_head_dim", "is not this entry's: the plan was made for the other family")
PLAN_HEADS = rule("plan_heads", "differs from the heads of this call: the plan was made for others")
PLAN_PAGE_SIZE = rule("plan_page_size", "differs from the pool's page size: the plan was made for another")
Q_LEN_ONE = rule("q_len_one", "is for decode only where every request has one new token")
PLAN_ROWS = rule("plan_rows", "has fewer rows than the plan has tokens")


def check_capacity(bounds: PlanBounds, capacity: PlanCapacity) -> None:
    """Hold each array's length against what was preallocated for it. Raises ContractError (capacity)."""
    for name, got, most in (
        ("requests", bounds.num_requests, capacity.max_requests),
        ("tokens", bounds.num_tokens, capacity.max_tokens),
        ("page_indices", bounds.num_pages, capacity.max_pages),
        ("tiles", bounds.num_tiles, capacity.max_tiles),
    ):
        CAPACITY.require(got <= most, name, got, f"<= {most}")


def check_plan_use(
    bounds: PlanBounds,
    *,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    rows: int,
    geometry: CheckedGeometry,
    tiles: Sequence[int] = CTA_TILES_Q,
    max_positions: int | None = None,
    cta_tile_q: int | None = None,
) -> None:
    """Compare a plan's recorded bounds, tile and head relation with the call that is about to use it.

    ``rows`` are the token rows of q and of the output; ``max_positions`` the rows of the RoPE tables where there are
    any; ``tiles`` those that the device can run; ``cta_tile_q`` the call's own override, None where it derives the
    tile.

    Raises ContractError: plan_head_dim, plan_heads, plan_rows, page_id_range, last_page_len, plan_page_size,
    position_range, plan_tile.
    """
    shape, layout = bounds.shape, geometry.layout
    PLAN_HEAD_DIM.require(shape.head_dim == head_dim, "plan.head_dim", shape.head_dim, head_dim)
    PLAN_HEADS.require(shape.num_qo_heads == num_qo_heads, "plan.num_qo_heads", shape.num_qo_heads, num_qo_heads)
    PLAN_HEADS.require(shape.num_kv_heads == num_kv_heads, "plan.num_kv_heads", shape.num_kv_heads, num_kv_heads)
    PLAN_ROWS.require(rows >= bounds.num_tokens, "q", f"{rows} rows", f">= {bounds.num_tokens}")
    rules.LAST_PAGE_LEN.require(
        bounds.max_last_page_len <= layout.page_size,
        "plan.max_last_page_len",
        bounds.max_last_page_len,
        f"<= {layout.page_size}",
    )
    PLAN_PAGE_SIZE.require(shape.page_size == layout.page_size, "plan.page_size", shape.page_size, layout.page_size)
    rules.PAGE_ID_RANGE.require(
        bounds.max_page_index < geometry.num_pages,
        "plan.max_page_index",
        bounds.max_page_index,
        f"<= {geometry.num_pages - 1}",
    )
    padding_page = bounds.padding_page
    rules.PAGE_ID_RANGE.require(
        padding_page is None or padding_page < geometry.num_pages,
        "plan.padding_page",
        padding_page,
        f"<= {geometry.num_pages - 1}",
    )
    rules.POSITION_RANGE.require(
        max_positions is None or bounds.max_position < max_positions,
        "plan.max_position",
        bounds.max_position,
        f"< {max_positions}",
    )
    packed_rows = bounds.num_tokens * (num_qo_heads // num_kv_heads)
    derived = derive_cta_tile_q(packed_rows, bounds.num_requests, tiles)
    want = derived if cta_tile_q is None else cta_tile_q
    PLAN_TILE.require(bounds.cta_tile_q == want, "plan.cta_tile_q", bounds.cta_tile_q, want)


def check_one_token_each(bounds: PlanBounds) -> None:
    """Decode takes one new token of each request. Raises ContractError (q_len_one)."""
    Q_LEN_ONE.require(
        bounds.min_q_len == bounds.max_q_len == 1,
        "plan",
        f"requests of {bounds.min_q_len} to {bounds.max_q_len} new tokens",
        "1 each",
    )
