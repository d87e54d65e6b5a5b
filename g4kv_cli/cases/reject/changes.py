"""Changes of a draft that the cases of several subjects make."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from g4kv_cli.cases.reject.request import Change, Draft
from g4kv_cli.entries.plan import plan_tiles
from g4kv_cli.model.prefill_plan import check_requests


def set_field(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        setattr(draft, name, value)

    return change


def replaced(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.replaced[name] = value

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def shape_with(**fields: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.shape = replace(draft.shape, **fields)

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def request_with(number: int, **fields: Any) -> Change:
    def change(draft: Draft) -> None:
        requests = list(draft.requests)
        requests[number] = replace(requests[number], **fields)
        draft.requests = tuple(requests)

    return change


def no_window(draft: Draft) -> None:
    """Without a window every page is resident."""
    shape_with(window_left=-1)(draft)
    request_with(2, page_origin=0, page_indices=(0, 3, 6))(draft)


def derived_tile(draft: Draft) -> int:
    return check_requests(draft.requests, draft.shape, plan_tiles(draft.device, draft.shape)).bounds.cta_tile_q


def own_tile(draft: Draft) -> None:
    """An override that is what would be derived."""
    draft.shape = replace(draft.shape, cta_tile_q=derived_tile(draft))


def rope_positions(rows: int) -> Change:
    def change(draft: Draft) -> None:
        draft.rope = replace(draft.rope, cos_max_pos=rows)

    return change
