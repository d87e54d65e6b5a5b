"""Reject cases of a plan that is made: its capacity at a refill, and its recorded bounds at each use."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from g4kv_cli.cases.reject.changes import derived_tile, own_tile, request_with, rope_positions, shape_with
from g4kv_cli.cases.reject.request import OUTPUTS, Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_PAGES, PAGE_SIZE
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.prefill_plan import check_requests
from g4kv_cli.oracle.compare import POISON_BYTE

U32 = 2**32


def capacity_cases() -> list[Spoiled]:
    names = {"max_tokens": "tokens", "max_requests": "requests", "max_pages": "page_indices", "max_tiles": "tiles"}
    cases = [
        Spoiled("capacity", f"{field}-one-short", field, _refilled(name), _refilled()) for name, field in names.items()
    ]
    cases += [Spoiled("extent_positive", f"{name}-zero", name, _refilled("", **{name: 0})) for name in names]
    cases += [
        Spoiled("fits_i32", "max_pages-wraps", "max_pages", _refilled(max_pages=U32 + 5)),
        Spoiled("integer", "max_tokens-float", "max_tokens", _refilled(max_tokens=6.0)),
    ]
    return cases


def use_cases(entry: Entry) -> list[Spoiled]:
    cases = [
        Spoiled("plan_set", "preallocated", "plan", _unset, _refilled()),
        Spoiled("plan_tile", "plan-overridden", "plan.cta_tile_q", shape_with(cta_tile_q=64), own_tile),
        Spoiled("plan_head_dim", "other-family", "plan.head_dim", shape_with(head_dim=768 - entry.head_dim)),
        Spoiled("plan_heads", "more-query-heads", "plan.num_qo_heads", _more_query_heads),
        Spoiled("plan_page_size", "twice", "plan.page_size", _twice_the_page_size),
        Spoiled("last_page_len", "past-the-pools-page", "plan.max_last_page_len", _long_last_page),
        Spoiled("page_id_range", "num_pages", "plan.max_page_index", _last_page(NUM_PAGES), _last_page(NUM_PAGES - 1)),
        Spoiled("page_id_range", "smaller-pool", "plan.max_page_index", _smaller_pool),
        Spoiled("plan_rows", "one-row-less", "q", _rows(-1), _rows(1)),
        Spoiled("not_freed", "plan-freed", "plan.page_indices", _freed_plan),
        Spoiled("same_device", "plan-elsewhere", "plan.page_indices", _foreign_plan),
    ]
    if entry.is_prep:
        cases += [
            Spoiled("position_range", "tables-one-short", "plan.max_position", rope_positions(9), rope_positions(10)),
            Spoiled("plan_heads", "fewer-query-heads", "plan.num_qo_heads", _fewer_query_heads),
            Spoiled("plan_heads", "other-kv-heads", "plan.num_kv_heads", _other_kv_heads),
        ]
    if entry.takes_tile:
        cases += [
            Spoiled("plan_tile", "both-differ", "plan.cta_tile_q", _tiles(64, 16), _tiles(64, 64)),
            Spoiled("plan_tile", "call-overridden", "plan.cta_tile_q", _tiles(None, 64), _own_tile_of_call),
            Spoiled("fits_i32", "call-tile-wraps", "cta_tile_q", _tiles(None, U32 + 16)),
            Spoiled("integer", "call-tile-text", "cta_tile_q", _tiles(None, "16")),
        ]
    return cases


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _refilled(one_short: str = "", /, **capacity: Any) -> Change:
    """A preallocated plan with exactly the room that the valid requests take, updated with them."""

    def change(draft: Draft) -> None:
        bounds = check_requests(draft.requests, draft.shape, plan_tiles(draft.device, draft.shape)).bounds
        room: dict[str, Any] = {
            "max_tokens": bounds.num_tokens,
            "max_requests": bounds.num_requests,
            "max_pages": bounds.num_pages,
            "max_tiles": bounds.num_tiles,
        }
        if one_short:
            room[one_short] -= 1
        plan = draft.keep(PrefillPagedPlan.preallocated(draft.device, **room | capacity))
        plan.update(draft.requests, shape=draft.shape)
        draft.replaced["plan"] = plan

    return change


def _unset(draft: Draft) -> None:
    plan = PrefillPagedPlan.preallocated(draft.device, max_tokens=6, max_requests=3, max_pages=5, max_tiles=3)
    draft.replaced["plan"] = draft.keep(plan)


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _tiles(of_plan: Any, of_call: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.shape = replace(draft.shape, cta_tile_q=of_plan)
        draft.arguments["cta_tile_q"] = of_call

    return change


def _own_tile_of_call(draft: Draft) -> None:
    draft.arguments["cta_tile_q"] = derived_tile(draft)


def _more_query_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_qo_heads=2 * draft.shape.num_qo_heads)


def _fewer_query_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_qo_heads=draft.shape.num_qo_heads - draft.shape.num_kv_heads)


def _other_kv_heads(draft: Draft) -> None:
    """A KV head for each query head: no model's group is 1."""
    draft.shape = replace(draft.shape, num_kv_heads=draft.shape.num_qo_heads)


def _twice_the_page_size(draft: Draft) -> None:
    draft.shape = replace(draft.shape, page_size=2 * PAGE_SIZE)
    q_len = draft.requests[0].q_len
    draft.requests = (PlanRequest(start_pos=3 - q_len, q_len=q_len, page_indices=(1,), last_page_len=3),)


def _long_last_page(draft: Draft) -> None:
    draft.shape = replace(draft.shape, page_size=2 * PAGE_SIZE)
    q_len = draft.requests[0].q_len
    draft.requests = (PlanRequest(start_pos=6 - q_len, q_len=q_len, page_indices=(1,), last_page_len=6),)


def _last_page(page: int) -> Change:
    return request_with(2, page_indices=(3, page))


def _smaller_pool(draft: Draft) -> None:
    draft.pool_data = draft.pool_data.view(((NUM_PAGES - 1) * draft.layout.page_stride,))


def _rows(step: int) -> Change:
    """Token rows of q and all that goes with it; those past the plan's tokens are padding."""

    def change(draft: Draft) -> None:
        for name in ("q", "k", "v", "q_out", "out", "lse"):
            if name in draft.arguments:
                array = draft.arguments[name]
                draft.arguments[name] = draft.fresh((array.shape[0] + step, *array.shape[1:]), array.dtype)
                if name in OUTPUTS:
                    draft.device.fill(draft.arguments[name], POISON_BYTE)

    return change


def _freed_plan(draft: Draft) -> None:
    draft.plan().free()


def _foreign_plan(draft: Draft) -> None:
    plan = PrefillPagedPlan.batch(draft.bench.foreign, draft.requests, shape=draft.shape)
    draft.replaced["plan"] = draft.keep(plan)
