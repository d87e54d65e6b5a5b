"""Reject cases of the plan: the shape it is made with, types, and all others (plan_requests.py, plan_use.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from g4kv_cli.cases.reject.changes import no_window, own_tile, replaced, request_with, set_field, shape_with
from g4kv_cli.cases.reject.plan_requests import made_request_cases, padding_cases, request_cases, shared_page_cases
from g4kv_cli.cases.reject.plan_use import capacity_cases, use_cases
from g4kv_cli.cases.reject.request import Draft, Spoiled
from g4kv_cli.cases.reject.valid import PAGE_SIZE, WINDOW_LEFT
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.model.checked import F32_MAX
from g4kv_cli.model.plan_request import F32_MIN, LOG2_E

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
        *request_cases(),
        *made_request_cases(),
        *shared_page_cases(entry),
        *padding_cases(entry),
        *capacity_cases(),
        *use_cases(entry),
        *_type_cases(),
    ]


def _shape_cases(entry: Entry) -> list[Spoiled]:
    def shape(rule: str, variant: str, field: str, value: Any, twin: Any = ...) -> Spoiled:
        in_range = None if twin is ... else shape_with(**{field: twin})
        return Spoiled(rule, f"plan-{field}-{variant}", field, shape_with(**{field: value}), in_range)

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
        Spoiled("window_left", "minus-two", "window_left", shape_with(window_left=-2), no_window),
        shape("window_left", "lowest", "window_left", -I32),
        Spoiled("cta_tile_q", "plan-cta_tile_q-zero", "cta_tile_q", shape_with(cta_tile_q=0), own_tile),
        Spoiled("cta_tile_q", "plan-cta_tile_q-48", "cta_tile_q", shape_with(cta_tile_q=48), own_tile),
        Spoiled("cta_tile_q", "plan-cta_tile_q-negative", "cta_tile_q", shape_with(cta_tile_q=-16), own_tile),
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


def _type_cases() -> list[Spoiled]:
    return [
        Spoiled("argument_type", "plan-none", "plan", replaced("plan", None)),
        Spoiled("argument_type", "plan-list", "plan", replaced("plan", [1, 2])),
        Spoiled("argument_type", "requests-none", "requests", set_field("requests", None)),
        Spoiled("argument_type", "requests-text", "requests", set_field("requests", "123")),
        Spoiled("argument_type", "request-tuple", "requests[0]", set_field("requests", ((3, 2, (5, 2), 1),))),
        Spoiled("argument_type", "shape-none", "shape", set_field("shape", None)),
        Spoiled("argument_type", "pages-none", "requests[0].page_indices", request_with(0, page_indices=None)),
        Spoiled("argument_type", "pages-number", "requests[0].page_indices", request_with(0, page_indices=5)),
        Spoiled("argument_type", "device-none", "device", _plan_without_device),
        Spoiled("argument_type", "preallocated-device-none", "device", _preallocated_without_device),
        Spoiled("argument_type", "capacity-none", "capacity", _plan_without_capacity),
    ]


def _one_head_less(draft: Draft) -> None:
    kv_heads = max(2, draft.shape.num_kv_heads)
    draft.shape = replace(draft.shape, num_qo_heads=draft.shape.num_qo_heads - 1, num_kv_heads=kv_heads)


def _plan_without_device(draft: Draft) -> None:
    PrefillPagedPlan.batch(None, draft.requests, shape=draft.shape)  # type: ignore[arg-type]


def _preallocated_without_device(draft: Draft) -> None:
    PrefillPagedPlan.preallocated(None, max_tokens=1, max_requests=1, max_pages=1, max_tiles=1)  # type: ignore[arg-type]


def _plan_without_capacity(draft: Draft) -> None:
    PrefillPagedPlan(draft.device, None)  # type: ignore[arg-type]
