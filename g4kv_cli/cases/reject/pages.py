"""Reject cases of the page metadata: the prefill form's row and the decode form's CSR rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from g4kv_cli.cases.reject.changes import replaced, rope_positions, set_field
from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import (
    DECODE_PAGES,
    DECODE_POSITIONS,
    NUM_PAGES,
    PAGE_ROW,
    PAGE_SIZE,
    TABLE_POSITIONS,
)
from g4kv_cli.entries.arguments import PagedBatch, PageRow
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.model.plan_request import PlanRequest

I32 = 2**31
U32 = 2**32
SENTINEL = 9999
"""A page id that no pool here has."""


def page_cases(entry: Entry) -> list[Spoiled]:
    """Cases of the forms that take page metadata without a plan."""
    if entry.metadata == "page_row":
        return _row_cases()
    return _batch_cases() if entry.metadata == "batch" else []


def _row_cases() -> list[Spoiled]:
    first, second = PAGE_ROW
    return [
        Spoiled("page_origin", "negative", "page_origin", _origin(-1), _shifted_row),
        Spoiled("page_origin", "past-start_pos", "page_origin", _origin(1), _shifted_row),
        Spoiled("page_origin", "largest-i32", "page_origin", _origin(I32 - 1)),
        Spoiled("fits_i32", "page_origin-wraps", "page_origin", _origin(U32)),
        Spoiled("integer", "page_origin-none", "page_origin", _origin(None)),
        Spoiled("page_coverage", "last-page-missing", "page_row", _row([first])),
        Spoiled("page_coverage", "empty", "page_row", _row([])),
        Spoiled("page_coverage", "one-token-over", "page_row", _one_token_over, _to_the_last_slot),
        Spoiled("page_id_range", "negative", "page_row[1]", _row([first, -1])),
        Spoiled("page_id_range", "num_pages", "page_row[1]", _row([first, NUM_PAGES]), _row([first, NUM_PAGES - 1])),
        Spoiled("page_id_range", "first", "page_row[0]", _row([SENTINEL, second]), _row([0, second])),
        Spoiled("page_id_range", "largest-i32", "page_row[0]", _row([I32 - 1, second]), _unread_sentinels),
        Spoiled("fits_i32", "page-wraps", "page_row[0]", _row([U32 + first, second])),
        Spoiled("fits_i32", "page-below-i32", "page_row[1]", _row([first, -I32 - 1])),
        Spoiled("integer", "page-float", "page_row[0]", _row([float(first), second]), _numpy_row),
        Spoiled("integer", "page-none", "page_row[1]", _row([first, None])),
        Spoiled("page_unique", "page-twice", "page_row", _row([first, first])),
        Spoiled(
            "page_unique",
            "page-of-history",
            "page_row",
            _longer_row(first, second, first),
            _longer_row(-1, 2, 6, 6),
        ),
        Spoiled("fits_i32", "row-length", "page_row length", _long_row),
        Spoiled("argument_type", "page_row-none", "page_row", replaced("page_row", None)),
        Spoiled("argument_type", "page_row-list", "page_row", replaced("page_row", list(PAGE_ROW))),
        Spoiled("argument_type", "page_row-of-none", "page_row", _row(None)),
        Spoiled("argument_type", "page_row-of-text", "page_row", _row("26")),
        Spoiled("argument_type", "page_row-of-number", "page_row", _row(2)),
        Spoiled("argument_type", "device-none", "device", _row_without_device),
        Spoiled("host_copy", "shorter", "page_row.host", _row_host(np.array([first], np.int32))),
        Spoiled("host_copy", "int64", "page_row.host", _row_host(np.array(PAGE_ROW, np.int64))),
        Spoiled("host_copy", "list", "page_row.host", _row_host(list(PAGE_ROW))),
    ]


def _batch_cases() -> list[Spoiled]:
    def positions(*values: Any) -> Change:
        return set_field("positions", values)

    def pages(*lists: Any) -> Change:
        return set_field("page_lists", lists)

    def origins(*values: Any) -> Change:
        return set_field("page_origins", values)

    p0, p1, p2, p3 = DECODE_POSITIONS
    return [
        Spoiled("position_range", "negative", "positions[0]", positions(-1, p1, p2, p3), positions(0, p1, p2, p3)),
        Spoiled("position_range", "one-past-the-tables", "positions[2]", positions(p0, p1, 16, p3), _last_position),
        Spoiled("position_range", "tables-one-short", "positions[3]", rope_positions(p3), rope_positions(p3 + 1)),
        Spoiled("fits_i32", "position-wraps", "positions[1]", positions(p0, U32 + p1, p2, p3)),
        Spoiled("integer", "position-float", "positions[0]", positions(0.0, p1, p2, p3), _numpy_positions),
        Spoiled("page_origin", "negative", "page_origins[1]", origins(0, -1, 1, 1)),
        Spoiled("page_origin", "past-the-position", "page_origins[2]", origins(0, 0, 2, 1), origins(0, 0, 1, 1)),
        Spoiled("fits_i32", "origin-wraps", "page_origins[3]", origins(0, 0, 1, U32 + 1)),
        Spoiled("page_coverage", "no-page-of-one-token", "page_indices of token 2", pages((0,), (1, 2), (), (4, 6))),
        Spoiled("page_coverage", "one-page-short", "page_indices of token 3", pages((0,), (1, 2), (3,), (4,))),
        Spoiled("page_coverage", "origin-one-low", "page_indices of token 2", origins(0, 0, 0, 1)),
        Spoiled("page_id_range", "negative", "page_indices[2]", pages((0,), (1, -1), (3,), (4, 6))),
        Spoiled(
            "page_id_range",
            "num_pages",
            "page_indices[5]",
            pages((0,), (1, 2), (3,), (4, NUM_PAGES)),
            pages((0,), (SENTINEL, 2), (3, -5), (-1, NUM_PAGES - 1)),
        ),
        Spoiled("fits_i32", "page-wraps", "page_lists[0][0]", pages((U32,), (1, 2), (3,), (4, 6))),
        Spoiled("integer", "page-text", "page_lists[3][1]", pages((0,), (1, 2), (3,), (4, "6"))),
        Spoiled("page_indptr", "not-from-0", "page_indptr", _indptr(1, 1, 3, 4, 6)),
        Spoiled("page_indptr", "falls", "page_indptr", _indptr(0, 3, 1, 4, 6)),
        Spoiled("page_indptr", "past-the-array", "page_indptr", _indptr(0, 1, 3, 4, 7)),
        Spoiled("page_indptr", "short-of-the-array", "page_indptr", _indptr(0, 1, 3, 4, 5)),
        Spoiled("page_indptr", "negative", "page_indptr", _indptr(0, -1, 3, 4, 6), _indptr(0, 1, 3, 4, 6)),
        Spoiled("slot_unique", "two-tokens", "page_indices of token 2", _clash, _padding_rows),
        Spoiled("slot_history", "two-tokens", "page_indices of token 0", pages((1,), (1, 2), (3,), (4, 6)), _prefix),
        Spoiled("slot_history", "of-a-later-token", "page_indices of token 2", pages((0,), (1, 2), (4,), (4, 6))),
        Spoiled("page_position", "two-tokens", "page_indices of token 3", pages((0,), (1, 2), (3,), (1, 6)), _prefix),
        Spoiled("page_unique", "page-twice", "page_indices of token 1", pages((0,), (1, 1), (3,), (4, 6))),
        Spoiled("page_unique", "page-of-history", "page_indices of token 3", _long_rows(4, 6, 4), _long_rows(4, 6, 5)),
        Spoiled(
            "padding_page", "among-own-pages", "page_indices of token 1", set_field("padding_page", 2), _padding_rows
        ),
        Spoiled("padding_page", "as-history", "page_indices of token 3", set_field("padding_page", 4), _padding_rows),
        Spoiled("page_id_range", "padding-negative", "padding_page", set_field("padding_page", -1)),
        Spoiled(
            "page_id_range", "padding-num_pages", "padding_page", set_field("padding_page", NUM_PAGES), _padding_rows
        ),
        Spoiled("fits_i32", "padding-wraps", "padding_page", set_field("padding_page", U32 + 5)),
        Spoiled("integer", "padding-text", "padding_page", set_field("padding_page", "5")),
        Spoiled("fits_i32", "indices-length", "page_indices length", _long_indices),
        Spoiled("q_len_one", "batch-of-a-plan", "plan", _batch_of_plan(2), _batch_of_plan(1)),
        Spoiled("argument_type", "batch-none", "batch", replaced("batch", None)),
        Spoiled("argument_type", "batch-dict", "batch", replaced("batch", {"positions": [0]})),
        Spoiled("argument_type", "positions-none", "positions", set_field("positions", None)),
        Spoiled("argument_type", "page_lists-number", "page_lists", set_field("page_lists", 4)),
        Spoiled("argument_type", "page_list-none", "page_lists[1]", pages((0,), None, (3,), (4, 6))),
        Spoiled("argument_type", "page_origins-text", "page_origins", set_field("page_origins", "0011")),
        Spoiled("argument_type", "device-none", "device", _batch_without_device),
        Spoiled("argument_type", "host-number", "batch.host", _batch_host(lambda host: 4)),
        Spoiled("host_copy", "three-arrays", "batch.host", _batch_host(lambda host: host[:3])),
        Spoiled("host_copy", "short", "batch.host[0]", _batch_host(lambda host: (host[0][:-1], *host[1:]))),
        Spoiled("host_copy", "lists", "batch.host[1]", _batch_host(lambda host: (host[0], [0], *host[2:]))),
    ]


def _row(ids: Any) -> Change:
    return set_field("page_ids", ids)


def _origin(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments["page_origin"] = value

    return change


def _shifted_row(draft: Draft) -> None:
    """The first page is released: the row begins with logical page 1."""
    draft.arguments |= {"page_origin": 1, "start_pos": 4}
    draft.page_ids = (6, 3)


def _one_token_over(draft: Draft) -> None:
    """Two pages hold positions 0..7; the last token has position 8."""
    draft.arguments["start_pos"] = 4


def _to_the_last_slot(draft: Draft) -> None:
    draft.arguments["start_pos"] = 3


def _unread_sentinels(draft: Draft) -> None:
    """Entries that the call does not use may hold anything."""
    draft.arguments["start_pos"] = 5
    draft.page_ids = (SENTINEL, 2, 6, -1)


def _longer_row(*ids: int) -> Change:
    """Positions 5..9: the first page holds history alone, and nothing is behind the third."""

    def change(draft: Draft) -> None:
        draft.arguments["start_pos"] = 5
        draft.page_ids = ids

    return change


def _numpy_row(draft: Draft) -> None:
    draft.page_ids = np.array(PAGE_ROW, np.uint8)


def _long_row(draft: Draft) -> None:
    draft.replaced["page_row"] = PageRow.from_device(draft.claimed((I32,), np.int32))


def _row_without_device(draft: Draft) -> None:
    draft.replaced["page_row"] = PageRow.from_host(None, PAGE_ROW)  # type: ignore[arg-type]


def _row_host(host: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.replaced["page_row"] = replace(draft.page_row(), host=host)

    return change


def _last_position(draft: Draft) -> None:
    draft.positions = (0, 5, TABLE_POSITIONS - 1, 9)
    draft.page_origins = (0, 0, 3, 1)


def _numpy_positions(draft: Draft) -> None:
    draft.positions = np.array(DECODE_POSITIONS, np.int64)


def _clash(draft: Draft) -> None:
    """Tokens 1 and 2 at position 5 of one page."""
    draft.positions = (0, 5, 5, 9)
    draft.page_lists = ((0,), (1, 2), (2,), (4, 6))


def _padding_rows(draft: Draft) -> None:
    """Tokens 1 and 2 at one slot of one page, where padding rows may be."""
    draft.positions = (0, 2, 2, 9)
    draft.page_lists = ((0,), (2,), (2,), (4, 6))
    draft.page_origins = (0, 0, 0, 1)
    draft.padding_page = 2
    draft.written_slots = 3


def _prefix(draft: Draft) -> None:
    """Tokens 1 and 3 share page 1, the logical page 1 of both, to which neither writes."""
    draft.positions = (0, 9, 7, 9)
    draft.page_lists = ((0,), (1, 2), (3,), (1, 6))
    draft.page_origins = (0, 1, 1, 1)


def _long_rows(*last: int) -> Change:
    """Token 3 with all three pages that it has keys in."""

    def change(draft: Draft) -> None:
        draft.page_lists = ((0,), (1, 2), (3,), last)
        draft.page_origins = (0, 0, 1, 0)

    return change


def _indptr(*values: int) -> Change:
    """A batch whose host copy and device array say this."""

    def change(draft: Draft) -> None:
        batch = draft.batch()
        host = np.array(values, np.int32)
        draft.device.write(batch.page_indptr, host)
        draft.replaced["batch"] = replace(batch, host=(*batch.host[:2], host, batch.host[3]))

    return change


def _batch_of_plan(last_q_len: int) -> Change:
    """The same tokens by a plan, the last request with so many new ones."""

    def change(draft: Draft) -> None:
        requests = [
            PlanRequest.of(kv_len=position + 1, pages=row, page_size=PAGE_SIZE)
            for position, row in zip(DECODE_POSITIONS, DECODE_PAGES, strict=True)
        ]
        requests[-1] = replace(requests[-1], q_len=last_q_len, start_pos=DECODE_POSITIONS[-1] + 1 - last_q_len)
        plan = draft.keep(PrefillPagedPlan.batch(draft.device, requests, shape=draft.shape))
        draft.replaced["batch"] = plan.decode_batch()

    return change


def _long_indices(draft: Draft) -> None:
    batch = draft.batch()
    draft.replaced["batch"] = PagedBatch.from_device(
        batch.positions, draft.claimed((I32,), np.int32), batch.page_indptr, batch.page_origins
    )


def _batch_without_device(draft: Draft) -> None:
    draft.replaced["batch"] = PagedBatch.from_host(None, positions=[0], page_lists=[[0]])  # type: ignore[arg-type]


def _batch_host(host: Any) -> Change:
    def change(draft: Draft) -> None:
        batch = draft.batch()
        draft.replaced["batch"] = replace(batch, host=host(batch.host))

    return change
