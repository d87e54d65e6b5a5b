"""Reject cases of the plan: requests and shape at the build, capacity at a refill, recorded bounds at each use."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from g4kv_cli.cases.reject.request import OUTPUTS, Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_PAGES, PAGE_SIZE, WINDOW_LEFT
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles
from g4kv_cli.model.checked import F32_MAX
from g4kv_cli.model.plan_request import F32_MIN, LOG2_E, PlanRequest
from g4kv_cli.model.prefill_plan import check_requests
from g4kv_cli.oracle.compare import POISON_BYTE

I32 = 2**31
U32 = 2**32
LARGEST_SCALE = F32_MAX / LOG2_E
SMALLEST_SCALE = F32_MIN / LOG2_E
"""What times log2(e) is the largest and the smallest float32."""


def plan_cases(entry: Entry) -> list[Spoiled]:
    """Cases of every form that takes a plan; none elsewhere."""
    if not entry.takes_plan:
        return []
    return [
        *_shape_cases(entry),
        *_request_cases(),
        *_made_request_cases(),
        *_shared_page_cases(entry),
        *_padding_cases(entry),
        *_capacity_cases(),
        *_use_cases(entry),
        *_type_cases(),
    ]


def _shape_cases(entry: Entry) -> list[Spoiled]:
    def shape(rule: str, variant: str, field: str, value: Any, twin: Any = ...) -> Spoiled:
        in_range = None if twin is ... else _shape(**{field: twin})
        return Spoiled(rule, f"plan-{field}-{variant}", field, _shape(**{field: value}), in_range)

    # Prep takes no scale from a plan: a twin of another scale would prove nothing there.
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
        shape("fits_i32", "wraps", "window_left", U32 + WINDOW_LEFT),
        shape("fits_i32", "wraps", "cta_tile_q", U32 + 16),
        shape("integer", "float", "num_qo_heads", 16.0),
        shape("integer", "none", "page_size", None),
        shape("integer", "text", "window_left", "3"),
        shape("head_dim", "128", "head_dim", 128),
        Spoiled("window_left", "minus-two", "window_left", _shape(window_left=-2), _no_window),
        shape("window_left", "lowest", "window_left", -I32),
        Spoiled("cta_tile_q", "plan-cta_tile_q-zero", "cta_tile_q", _shape(cta_tile_q=0), _own_tile),
        Spoiled("cta_tile_q", "plan-cta_tile_q-48", "cta_tile_q", _shape(cta_tile_q=48), _own_tile),
        Spoiled("cta_tile_q", "plan-cta_tile_q-negative", "cta_tile_q", _shape(cta_tile_q=-16), _own_tile),
    ]
    for variant, value, edge in (
        ("nan", math.nan, 1 / 16),
        ("inf", math.inf, 1 / 16),
        ("minus-inf", -math.inf, 1 / 16),
        ("negative", -1.0, 1 / 16),
        ("zero", 0.0, SMALLEST_SCALE),
        ("zero-in-float32", SMALLEST_SCALE / 4, SMALLEST_SCALE),
        ("past-float32", 3.5e38, LARGEST_SCALE),
        ("infinite-in-base-2", 1.001 * LARGEST_SCALE, LARGEST_SCALE),
        ("none", None, 1 / 16),
        ("text", "1.0", 1 / 16),
        ("digits", 10**400, 1 / 16),
    ):
        cases.append(shape("sm_scale", variant, "sm_scale", value, ... if entry.is_prep else edge))
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
        Spoiled("fits_i32", "all-tokens", "tokens of all requests", _long_requests(long_request, long_request)),
        Spoiled("fits_i32", "rows-of-all-heads", "tokens * query heads", _long_requests(long_request)),
    ]


def _made_request_cases() -> list[Spoiled]:
    """Requests that PlanRequest.of is asked for."""

    def made(rule: str, variant: str, field: str, **arguments: Any) -> Spoiled:
        return Spoiled(rule, f"of-{variant}", field, _made(**arguments), _made())

    return [
        made("extent_positive", "kv_len-zero", "kv_len", kv_len=0, q_len=0),
        made("extent_positive", "page_size-zero", "page_size", page_size=0),
        made("extent_positive", "window-zero", "window", window=0),
        made("fits_i32", "kv_len-wraps", "kv_len", kv_len=U32 + 5),
        made("integer", "q_len-float", "q_len", q_len=1.0),
        made("q_len", "negative", "q_len", q_len=-1),
        made("start_pos", "more-new-than-all", "kv_len - q_len", q_len=6),
        made("argument_type", "pages-none", "pages", pages=None),
        made("page_list_not_empty", "no-page", "pages", pages=()),
        made("length_equation", "surplus-page", "pages", pages=(5, 2, 4)),
        # What is left out of a row is for the plan to find.
        Spoiled("window_pages", "of-page-too-few", "requests[0].page_origin", _made_of_last_page, _made()),
    ]


def _shared_page_cases(entry: Entry) -> list[Spoiled]:
    """Pages that stand in two rows, or twice in one."""
    cases = [
        Spoiled("slot_unique", "two-requests", "requests[1].page_indices", _one_slot, _shared_prefix),
        Spoiled("slot_history", "two-requests", "requests[1].page_indices", _history_of_another, _shared_prefix),
        Spoiled("slot_history", "of-a-later-request", "requests[0].page_indices", _history_of_a_later, _shared_prefix),
        Spoiled("page_position", "two-requests", "requests[2].page_indices", _prefix_elsewhere, _shared_prefix),
        Spoiled("page_unique", "history", "requests[2].page_indices", _request(2, page_indices=(3, 3))),
        Spoiled("page_unique", "pages-between", "requests[0].page_indices", _page_again, _pages_apart),
    ]
    if entry.takes_tile:
        # A request without a new token holds what it has all the same.
        cases.append(
            Spoiled("slot_history", "of-a-request-at-rest", "requests[1].page_indices", _at_rest(3), _at_rest(2))
        )
    return cases


def _padding_cases(entry: Entry) -> list[Spoiled]:
    """The reserved page, and requests that use it."""
    return [
        Spoiled("padding_page", "among-own-pages", "requests[2].page_indices", _set("padding_page", 6), _padding(6)),
        Spoiled("padding_page", "as-history", "requests[2].page_indices", _set("padding_page", 3), _padding(3)),
        Spoiled("slot_unique", "not-said-to-be-padding", "requests[2].page_indices", _padding(None), _padding(6)),
        Spoiled("page_id_range", "padding-negative", "padding_page", _set("padding_page", -1), _padding(0)),
        Spoiled(
            "page_id_range",
            "padding-num_pages",
            "plan.padding_page",
            _set("padding_page", NUM_PAGES),
            _padding(NUM_PAGES - 1),
        ),
        Spoiled("fits_i32", "padding-wraps", "padding_page", _set("padding_page", U32)),
        Spoiled("integer", "padding-float", "padding_page", _set("padding_page", 0.0)),
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
        Spoiled("plan_tile", "plan-overridden", "plan.cta_tile_q", _shape(cta_tile_q=64), _own_tile),
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
            Spoiled("plan_tile", "call-overridden", "plan.cta_tile_q", _tiles(None, 64), _own_tile_of_call),
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


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _made(**arguments: Any) -> Change:
    """Request 0 as PlanRequest.of makes it."""

    def change(draft: Draft) -> None:
        first = draft.requests[0]
        valid: dict[str, Any] = {
            "kv_len": first.start_pos + first.q_len,
            "q_len": first.q_len,
            "pages": first.page_indices,
            "page_size": PAGE_SIZE,
            "window": WINDOW_LEFT + 1,
        }
        draft.requests = (PlanRequest.of(**valid | arguments), *draft.requests[1:])

    return change


def _made_of_last_page(draft: Draft) -> None:
    """Request 0 in its third page, of which the second is seen and not there."""
    q_len = draft.requests[0].q_len
    _made(kv_len=2 * PAGE_SIZE + q_len, pages=(2,))(draft)


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


def _one_slot(draft: Draft) -> None:
    """Requests 0 and 1 share page 5 and both write on from where it ends."""
    _two_of_one_prefix(draft, (5, 2), (5, 2))


def _shared_prefix(draft: Draft) -> None:
    """Requests 0 and 1 share page 5, which is full; each writes to a page of its own."""
    _two_of_one_prefix(draft, (5, 2), (5, 1))


def _prefix_elsewhere(draft: Draft) -> None:
    """Requests 0 and 2 share page 5, which is full: positions 0 to 3 of the one, 4 to 7 of the other."""
    _shared_prefix(draft)
    _request(2, page_indices=(5, 6))(draft)


def _two_of_one_prefix(draft: Draft, *rows: tuple[int, int]) -> None:
    for number, row in enumerate(rows):
        q_len = draft.requests[number].q_len
        _request(number, start_pos=PAGE_SIZE, page_indices=row, last_page_len=q_len)(draft)


def _history_of_another(draft: Draft) -> None:
    """Request 1 begins at slot 0 of the page whose slot 0 request 0 has filled."""
    q_len = draft.requests[1].q_len
    _request(1, start_pos=0, page_indices=(5,), last_page_len=q_len)(draft)


def _history_of_a_later(draft: Draft) -> None:
    """Request 0 goes on in page 3, which request 2 has filled."""
    q_len = draft.requests[0].q_len
    _request(0, start_pos=PAGE_SIZE, page_indices=(5, 3), last_page_len=q_len)(draft)


def _page_again(draft: Draft) -> None:
    _long_row(draft, (5, 2, 5))


def _pages_apart(draft: Draft) -> None:
    _long_row(draft, (5, 2, 4))


def _long_row(draft: Draft, pages: tuple[int, ...]) -> None:
    """Request 0 with two full pages of history."""
    q_len = draft.requests[0].q_len
    _request(0, start_pos=2 * PAGE_SIZE, page_indices=pages, last_page_len=q_len)(draft)


@cache  # one twin for all cases that share it
def _at_rest(kv_len: int) -> Change:
    """Request 0 has ``kv_len`` tokens in page 5 and no new one; request 1 goes on from position 2 of that page."""

    def change(draft: Draft) -> None:
        _request(0, start_pos=kv_len, q_len=0, page_indices=(5,), last_page_len=kv_len)(draft)
        tokens = draft.bench.tokens - draft.requests[2].q_len
        last_page_len = 2 + tokens - PAGE_SIZE
        _request(1, start_pos=2, q_len=tokens, page_indices=(5, 1), last_page_len=last_page_len)(draft)

    return change


@cache  # one twin for all cases that share it
def _padding(page: int | None) -> Change:
    """Requests 1 and 2 are padding, all at the first slots of page 6 or of the page said."""

    def change(draft: Draft) -> None:
        draft.padding_page = page
        row = (6 if page is None else page,)
        first = draft.requests[0]
        padding = [replace(request, start_pos=0, page_indices=row, last_page_len=request.q_len, page_origin=0)
                   for request in draft.requests[1:]]  # fmt: skip
        draft.requests = (first, *padding)
        # Padding requests of the same slots leave fewer slots written than there are tokens.
        draft.written_slots = first.q_len + max(request.q_len for request in padding)

    return change


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


def _derived_tile(draft: Draft) -> int:
    return check_requests(draft.requests, draft.shape, plan_tiles(draft.device, draft.shape)).bounds.cta_tile_q


def _own_tile(draft: Draft) -> None:
    """An override that is what would be derived."""
    draft.shape = replace(draft.shape, cta_tile_q=_derived_tile(draft))


def _own_tile_of_call(draft: Draft) -> None:
    draft.arguments["cta_tile_q"] = _derived_tile(draft)


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
