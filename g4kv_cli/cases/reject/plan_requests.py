"""Reject cases of a plan's requests: each by itself, as PlanRequest.of makes it, pages of two rows, and padding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from g4kv_cli.cases.reject.changes import no_window, request_with, set_field, shape_with
from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_PAGES, PAGE_SIZE, WINDOW_LEFT
from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.plan_request import PlanRequest

I32 = 2**31
U32 = 2**32


def request_cases() -> list[Spoiled]:
    def request(rule: str, variant: str, field: str, number: int, twin: Change | None = None, **fields: Any) -> Spoiled:
        """Spoil fields of one request; ``field`` is what the error names."""
        return Spoiled(rule, variant, f"requests[{number}].{field}", request_with(number, **fields), twin)

    half = I32 // 2
    long_request = PlanRequest(start_pos=0, q_len=half, page_indices=(0,), last_page_len=half)
    return [
        Spoiled("extent_positive", "no-requests", "requests", set_field("requests", ())),
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
        Spoiled("window_pages", "no-window", "requests[2].page_origin", shape_with(window_left=-1), no_window),
        Spoiled("window_pages", "window-one-wider", "requests[2].page_origin", shape_with(window_left=6), _edge_window),
        Spoiled("fits_i32", "all-tokens", "tokens of all requests", _long_requests(long_request, long_request)),
        Spoiled("fits_i32", "rows-of-all-heads", "tokens * query heads", _long_requests(long_request)),
    ]


def made_request_cases() -> list[Spoiled]:
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


def shared_page_cases(entry: Entry) -> list[Spoiled]:
    """Pages that stand in two rows, or twice in one."""
    cases = [
        Spoiled("slot_unique", "two-requests", "requests[1].page_indices", _one_slot, _shared_prefix),
        Spoiled("slot_history", "two-requests", "requests[1].page_indices", _history_of_another, _shared_prefix),
        Spoiled("slot_history", "of-a-later-request", "requests[0].page_indices", _history_of_a_later, _shared_prefix),
        Spoiled("page_position", "two-requests", "requests[2].page_indices", _prefix_elsewhere, _shared_prefix),
        Spoiled("page_unique", "history", "requests[2].page_indices", request_with(2, page_indices=(3, 3))),
        Spoiled("page_unique", "pages-between", "requests[0].page_indices", _page_again, _pages_apart),
    ]
    if entry.takes_tile:
        # A request without a new token holds what it has all the same.
        cases.append(
            Spoiled("slot_history", "of-a-request-at-rest", "requests[1].page_indices", _at_rest(3), _at_rest(2))
        )
    return cases


def padding_cases(entry: Entry) -> list[Spoiled]:
    """The reserved page, and requests that use it."""
    return [
        Spoiled(
            "padding_page", "among-own-pages", "requests[2].page_indices", set_field("padding_page", 6), _padding(6)
        ),
        Spoiled("padding_page", "as-history", "requests[2].page_indices", set_field("padding_page", 3), _padding(3)),
        Spoiled("slot_unique", "not-said-to-be-padding", "requests[2].page_indices", _padding(None), _padding(6)),
        Spoiled("page_id_range", "padding-negative", "padding_page", set_field("padding_page", -1), _padding(0)),
        Spoiled(
            "page_id_range",
            "padding-num_pages",
            "plan.padding_page",
            set_field("padding_page", NUM_PAGES),
            _padding(NUM_PAGES - 1),
        ),
        Spoiled("fits_i32", "padding-wraps", "padding_page", set_field("padding_page", U32)),
        Spoiled("integer", "padding-float", "padding_page", set_field("padding_page", 0.0)),
    ]


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
    request_with(1, start_pos=start, last_page_len=PAGE_SIZE)(draft)


def _surplus_page(draft: Draft) -> None:
    """4 tokens fill a page: a second one with 1 slot taken is one page too many."""
    _full_page(draft)
    request_with(1, page_indices=(1, 4), last_page_len=1)(draft)


def _edge_window(draft: Draft) -> None:
    """Query 9 sees keys 4..9: page 1 is the first that it needs."""
    shape_with(window_left=5)(draft)


def _one_slot(draft: Draft) -> None:
    """Requests 0 and 1 share page 5 and both write on from where it ends."""
    _two_of_one_prefix(draft, (5, 2), (5, 2))


def _shared_prefix(draft: Draft) -> None:
    """Requests 0 and 1 share page 5, which is full; each writes to a page of its own."""
    _two_of_one_prefix(draft, (5, 2), (5, 1))


def _prefix_elsewhere(draft: Draft) -> None:
    """Requests 0 and 2 share page 5, which is full: positions 0 to 3 of the one, 4 to 7 of the other."""
    _shared_prefix(draft)
    request_with(2, page_indices=(5, 6))(draft)


def _two_of_one_prefix(draft: Draft, *rows: tuple[int, int]) -> None:
    for number, row in enumerate(rows):
        q_len = draft.requests[number].q_len
        request_with(number, start_pos=PAGE_SIZE, page_indices=row, last_page_len=q_len)(draft)


def _history_of_another(draft: Draft) -> None:
    """Request 1 begins at slot 0 of the page whose slot 0 request 0 has filled."""
    q_len = draft.requests[1].q_len
    request_with(1, start_pos=0, page_indices=(5,), last_page_len=q_len)(draft)


def _history_of_a_later(draft: Draft) -> None:
    """Request 0 goes on in page 3, which request 2 has filled."""
    q_len = draft.requests[0].q_len
    request_with(0, start_pos=PAGE_SIZE, page_indices=(5, 3), last_page_len=q_len)(draft)


def _page_again(draft: Draft) -> None:
    _long_row(draft, (5, 2, 5))


def _pages_apart(draft: Draft) -> None:
    _long_row(draft, (5, 2, 4))


def _long_row(draft: Draft, pages: tuple[int, ...]) -> None:
    """Request 0 with two full pages of history."""
    q_len = draft.requests[0].q_len
    request_with(0, start_pos=2 * PAGE_SIZE, page_indices=pages, last_page_len=q_len)(draft)


@cache  # one twin for all cases that share it
def _at_rest(kv_len: int) -> Change:
    """Request 0 has ``kv_len`` tokens in page 5 and no new one; request 1 goes on from position 2 of that page."""

    def change(draft: Draft) -> None:
        request_with(0, start_pos=kv_len, q_len=0, page_indices=(5,), last_page_len=kv_len)(draft)
        tokens = draft.bench.tokens - draft.requests[2].q_len
        last_page_len = 2 + tokens - PAGE_SIZE
        request_with(1, start_pos=2, q_len=tokens, page_indices=(5, 1), last_page_len=last_page_len)(draft)

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
