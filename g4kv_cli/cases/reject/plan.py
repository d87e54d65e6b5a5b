"""Reject cases of the plan: requests and shape at the build, capacity at a refill, recorded bounds at each use."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from g4kv_cli.cases.reject.request import OUTPUTS, Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_PAGES, PAGE_SIZE, WINDOW_LEFT
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.model.prefill_plan import PlanRequest, check_requests
from g4kv_cli.oracle.compare import POISON_BYTE

I32 = 2**31
U32 = 2**32


def plan_cases(entry: Entry) -> list[Spoiled]:
    """Cases of every form that takes a plan; none elsewhere."""
    if not entry.takes_plan:
        return []
    built = [*_shape_cases(entry), *_request_cases(), *_capacity_cases()]
    if not entry.is_prep:
        # The build knows no entry: its edges are launched through the prep entries, whose kernels are quick to emulate.
        built = [replace(case, twin=None) for case in built]
    return [*built, *_use_cases(entry), *_type_cases()]


def _shape_cases(entry: Entry) -> list[Spoiled]:
    def shape(rule: str, variant: str, field: str, value: Any, twin: Any = ...) -> Spoiled:
        in_range = None if twin is ... else _shape(**{field: twin})
        return Spoiled(rule, f"plan-{field}-{variant}", field, _shape(**{field: value}), in_range)

    cases = [
        shape("extent_positive", "zero", "num_kv_heads", 0),
        shape("extent_positive", "negative", "num_kv_heads", -1),
        shape("extent_positive", "zero", "page_size", 0),
        shape("q_heads_multiple", "zero", "num_qo_heads", 0),
        shape("q_heads_multiple", "negative", "num_qo_heads", -16),
        Spoiled("q_heads_multiple", "not-a-multiple", "num_qo_heads", _one_head_less),
        shape("fits_i32", "wraps", "num_qo_heads", U32 + 16),
        shape("fits_i32", "wraps", "num_kv_heads", U32 + 1),
        shape("fits_i32", "wraps", "head_dim", U32 + entry.head_dim),
        shape("fits_i32", "wraps", "page_size", U32 + PAGE_SIZE),
        shape("fits_i32", "wraps", "window_left", U32 + WINDOW_LEFT, WINDOW_LEFT),
        shape("fits_i32", "wraps", "cta_tile_q", U32 + 16, 16),
        shape("integer", "float", "num_qo_heads", 16.0),
        shape("integer", "none", "page_size", None),
        shape("integer", "text", "window_left", "3"),
        shape("head_dim", "128", "head_dim", 128),
        shape("window_left", "minus-two", "window_left", -2),
        shape("window_left", "lowest", "window_left", -I32),
        shape("cta_tile_q", "zero", "cta_tile_q", 0, 16),
        shape("cta_tile_q", "48", "cta_tile_q", 48, 16),
        shape("cta_tile_q", "negative", "cta_tile_q", -16, 16),
    ]
    for variant, value in (
        ("nan", math.nan),
        ("inf", math.inf),
        ("minus-inf", -math.inf),
        ("past-float32", 3.5e38),
        ("none", None),
        ("text", "1.0"),
        ("digits", 10**400),
    ):
        cases.append(shape("sm_scale", variant, "sm_scale", value, 1 / 16))
    return cases


def _request_cases() -> list[Spoiled]:
    def request(rule: str, variant: str, field: str, number: int, twin: Change | None = None, **fields: Any) -> Spoiled:
        """Spoil fields of one request; ``field`` is what the error names."""
        return Spoiled(rule, variant, f"requests[{number}].{field}", _request(number, **fields), twin)

    half = I32 // 2
    long_request = PlanRequest(start_pos=0, q_len=half, page_indices=(0,), last_page_len=half)
    return [
        Spoiled("extent_positive", "no-requests", "requests", _set("requests", ())),
        request("start_pos", "negative", "start_pos", 0, start_pos=-1),
        request("fits_i32", "start_pos-wraps", "start_pos", 0, start_pos=U32 + 3),
        request("integer", "start_pos-float", "start_pos", 0, start_pos=3.0),
        request("q_len", "negative", "q_len", 1, q_len=-1),
        request("fits_i32", "q_len-wraps", "q_len", 1, q_len=U32 + 3),
        request("integer", "q_len-none", "q_len", 1, q_len=None),
        request("fits_i32", "kv_len", "start_pos + q_len", 0, start_pos=I32 - 1, q_len=1),
        request("page_list_not_empty", "among-others", "page_indices", 1, page_indices=()),
        request("page_id_range", "negative", "page_indices[1]", 0, page_indices=(5, -1)),
        request("fits_i32", "page-wraps", "page_indices[0]", 0, page_indices=(U32 + 5, 2)),
        request("integer", "page-float", "page_indices[1]", 0, page_indices=(5, 2.0)),
        request("last_page_len", "zero", "last_page_len", 1, last_page_len=0),
        request("last_page_len", "past-page_size", "last_page_len", 1, _full_page, last_page_len=PAGE_SIZE + 1),
        request("last_page_len", "negative", "last_page_len", 1, last_page_len=-1),
        # u32::MAX + 2: cut to 32 bits it would be 1, the right value.
        request("fits_i32", "last_page_len-u32-max-plus-2", "last_page_len", 0, last_page_len=U32 + 1),
        request("fits_i32", "last_page_len-2^31", "last_page_len", 1, last_page_len=I32),
        request("integer", "last_page_len-float", "last_page_len", 0, last_page_len=1.0),
        request("page_origin", "negative", "page_origin", 2, page_origin=-1),
        request("page_origin", "past-start_pos", "page_origin", 2, page_origin=3),
        request("fits_i32", "page_origin-wraps", "page_origin", 2, page_origin=U32 + 1),
        request("integer", "page_origin-none", "page_origin", 2, page_origin=None),
        request("length_equation", "one-slot-less", "last_page_len", 1, last_page_len=2),
        request("length_equation", "one-slot-more", "last_page_len", 1, last_page_len=4),
        request("length_equation", "page-missing", "last_page_len", 0, page_indices=(5,)),
        Spoiled("length_equation", "surplus-page", "requests[1].last_page_len", _surplus_page, _full_page),
        request("length_equation", "released-page-counted", "last_page_len", 2, page_origin=0),
        request("window_pages", "seen-page-released", "page_origin", 2, page_origin=2, page_indices=(6,)),
        Spoiled("window_pages", "no-window", "requests[2].page_origin", _shape(window_left=-1), _no_window),
        Spoiled("window_pages", "window-one-wider", "requests[2].page_origin", _shape(window_left=6), _edge_window),
        Spoiled("slot_unique", "two-requests", "requests[1].page_indices", _shared_page, _shared_page_apart),
        Spoiled("fits_i32", "all-tokens", "tokens of all requests", _long_requests(long_request, long_request)),
        Spoiled("fits_i32", "rows-of-all-heads", "tokens * query heads", _long_requests(long_request)),
    ]


def _capacity_cases() -> list[Spoiled]:
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


def _use_cases(entry: Entry) -> list[Spoiled]:
    cases = [
        Spoiled("plan_set", "preallocated", "plan", _unset, _refilled()),
        Spoiled("plan_tile", "plan-overridden", "plan.cta_tile_q", _shape(cta_tile_q=64), _shape(cta_tile_q=16)),
        Spoiled("plan_head_dim", "other-family", "plan.head_dim", _shape(head_dim=768 - entry.head_dim)),
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
            Spoiled("position_range", "tables-one-short", "plan.max_position", _tables(9), _tables(10)),
            Spoiled("plan_heads", "fewer-query-heads", "plan.num_qo_heads", _fewer_query_heads),
            Spoiled("plan_heads", "other-kv-heads", "plan.num_kv_heads", _other_kv_heads),
        ]
    if entry.takes_tile:
        cases += [
            Spoiled("plan_tile", "both-differ", "plan.cta_tile_q", _tiles(64, 16), _tiles(64, 64)),
            Spoiled("plan_tile", "call-overridden", "plan.cta_tile_q", _tiles(None, 64), _tiles(None, 16)),
            Spoiled("fits_i32", "call-tile-wraps", "cta_tile_q", _tiles(None, U32 + 16)),
            Spoiled("integer", "call-tile-text", "cta_tile_q", _tiles(None, "16")),
        ]
    return cases


def _type_cases() -> list[Spoiled]:
    return [
        Spoiled("argument_type", "plan-none", "plan", _replaced("plan", None)),
        Spoiled("argument_type", "plan-list", "plan", _replaced("plan", [1, 2])),
        Spoiled("argument_type", "requests-none", "requests", _set("requests", None)),
        Spoiled("argument_type", "requests-text", "requests", _set("requests", "123")),
        Spoiled("argument_type", "request-tuple", "requests[0]", _set("requests", ((3, 2, (5, 2), 1),))),
        Spoiled("argument_type", "shape-none", "shape", _set("shape", None)),
        Spoiled("argument_type", "pages-none", "requests[0].page_indices", _request(0, page_indices=None)),
        Spoiled("argument_type", "pages-number", "requests[0].page_indices", _request(0, page_indices=5)),
        Spoiled("argument_type", "device-none", "device", _plan_without_device),
        Spoiled("argument_type", "preallocated-device-none", "device", _preallocated_without_device),
        Spoiled("argument_type", "capacity-none", "capacity", _plan_without_capacity),
    ]


def _set(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        setattr(draft, name, value)

    return change


def _replaced(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.replaced[name] = value

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _shape(**fields: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.shape = replace(draft.shape, **fields)

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _request(number: int, **fields: Any) -> Change:
    def change(draft: Draft) -> None:
        requests = list(draft.requests)
        requests[number] = replace(requests[number], **fields)
        draft.requests = tuple(requests)

    return change


def _full_page(draft: Draft) -> None:
    """Request 1 ends with the last slot of its page."""
    start = PAGE_SIZE - draft.requests[1].q_len
    _request(1, start_pos=start, last_page_len=PAGE_SIZE)(draft)


def _surplus_page(draft: Draft) -> None:
    """4 tokens fill a page: a second one with 1 slot taken is one page too many."""
    _full_page(draft)
    _request(1, page_indices=(1, 4), last_page_len=1)(draft)


def _one_head_less(draft: Draft) -> None:
    kv_heads = max(2, draft.shape.num_kv_heads)
    draft.shape = replace(draft.shape, num_qo_heads=draft.shape.num_qo_heads - 1, num_kv_heads=kv_heads)


def _no_window(draft: Draft) -> None:
    """Without a window every page is resident."""
    _shape(window_left=-1)(draft)
    _request(2, page_origin=0, page_indices=(0, 3, 6))(draft)


def _edge_window(draft: Draft) -> None:
    """Query 9 sees keys 4..9: page 1 is the first that it needs."""
    _shape(window_left=5)(draft)


def _shared_page(draft: Draft) -> None:
    """Requests 0 and 1 both write slot 0 of page 2."""
    q_len = draft.requests[1].q_len
    _request(1, start_pos=0, page_indices=(2,), last_page_len=q_len)(draft)


def _shared_page_apart(draft: Draft) -> None:
    """Both take page 2, for different slots: a shared prefix that nobody writes again."""
    _full_page(draft)
    _request(1, page_indices=(2,))(draft)


def _long_requests(*requests: PlanRequest) -> Change:
    """Requests of a page each, as long as an int32 can say."""

    def change(draft: Draft) -> None:
        draft.requests = requests
        draft.shape = replace(draft.shape, page_size=I32 - 1, window_left=-1)

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _refilled(one_short: str = "", /, **capacity: Any) -> Change:
    """A preallocated plan with exactly the room that the valid requests take, updated with them."""

    def change(draft: Draft) -> None:
        bounds = check_requests(draft.requests, draft.shape).bounds
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


def _more_query_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_qo_heads=2 * draft.shape.num_qo_heads)


def _fewer_query_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_qo_heads=draft.shape.num_qo_heads - draft.shape.num_kv_heads)


def _other_kv_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_kv_heads=draft.shape.num_kv_heads // 2)


def _twice_the_page_size(draft: Draft) -> None:
    draft.shape = replace(draft.shape, page_size=2 * PAGE_SIZE)
    q_len = draft.requests[0].q_len
    draft.requests = (PlanRequest(start_pos=3 - q_len, q_len=q_len, page_indices=(1,), last_page_len=3),)


def _long_last_page(draft: Draft) -> None:
    draft.shape = replace(draft.shape, page_size=2 * PAGE_SIZE)
    q_len = draft.requests[0].q_len
    draft.requests = (PlanRequest(start_pos=6 - q_len, q_len=q_len, page_indices=(1,), last_page_len=6),)


def _last_page(page: int) -> Change:
    return _request(2, page_indices=(3, page))


def _smaller_pool(draft: Draft) -> None:
    draft.pool_data = draft.pool_data.view(((NUM_PAGES - 1) * draft.layout.page_stride,))


def _tables(rows: int) -> Change:
    def change(draft: Draft) -> None:
        draft.rope = replace(draft.rope, cos_max_pos=rows)

    return change


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


def _plan_without_device(draft: Draft) -> None:
    PrefillPagedPlan.batch(None, draft.requests, shape=draft.shape)  # type: ignore[arg-type]


def _preallocated_without_device(draft: Draft) -> None:
    PrefillPagedPlan.preallocated(None, max_tokens=1, max_requests=1, max_pages=1, max_tiles=1)  # type: ignore[arg-type]


def _plan_without_capacity(draft: Draft) -> None:
    PrefillPagedPlan(draft.device, None)  # type: ignore[arg-type]
