"""Reject cases of what attention alone asks for: the group, the scale, one token a request, splits and workspace."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_SPLITS, PLAN_REQUESTS
from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.plan_request import PlanRequest

U32 = 2**32
MAX_GROUP = 16


def attention_cases(entry: Entry) -> list[Spoiled]:
    """Cases of the attention forms and of the merge; none elsewhere."""
    if entry.is_prep:
        return []
    if entry.operation == "merge":
        return [*_split_cases(), *_merge_scale_cases()]
    cases = [
        Spoiled("gqa_group", "one-more", "q heads", _heads_a_kv_head(MAX_GROUP + 1)),
        Spoiled("kv_heads", "plan-of-other-heads", "layout.num_kv_heads", _other_kv_heads),
    ]
    if entry.one_token_each:
        cases += [
            Spoiled("q_len_one", "two-tokens", "plan", _requests(*PLAN_REQUESTS[:1])),
            Spoiled("q_len_one", "no-token", "plan", _one_without_a_token),
            Spoiled("argument_type", "pdl-number", "enable_pdl", _given("enable_pdl", 1), _given("enable_pdl", True)),
            Spoiled("argument_type", "pdl-none", "enable_pdl", _given("enable_pdl", None)),
        ]
    if entry.takes_splits:
        cases += _split_cases()
    return cases


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _given(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments[name] = value

    return change


def _merge_scale_cases() -> list[Spoiled]:
    return [
        Spoiled("sm_scale", "zero", "sm_scale", _given("sm_scale", 0.0), _given("sm_scale", 1e-30)),
        Spoiled("sm_scale", "negative", "sm_scale", _given("sm_scale", -1.0)),
        Spoiled("sm_scale", "infinite-in-base-2", "sm_scale", _given("sm_scale", 3e38)),
        Spoiled("sm_scale", "none", "sm_scale", _given("sm_scale", None)),
    ]


def _split_cases() -> list[Spoiled]:
    def workspace(variant: str, name: str, shape: Any, twin: Any = None) -> Spoiled:
        in_range = None if twin is None else _scratch(name, twin)
        return Spoiled("workspace", f"{name}-{variant}", f"workspace.{name}", _scratch(name, shape), in_range)

    return [
        Spoiled("num_splits", "zero", "num_splits", _splits(0), _splits(1)),
        Spoiled("num_splits", "negative", "num_splits", _splits(-1)),
        Spoiled("num_splits", "past-the-grid", "num_splits", _splits(65536)),
        Spoiled("fits_i32", "splits-wrap", "num_splits", _splits(U32 + NUM_SPLITS)),
        Spoiled("integer", "splits-float", "num_splits", _splits(2.0)),
        Spoiled("integer", "splits-none", "num_splits", _splits(None)),
        Spoiled("workspace", "one-split-more", "workspace.partial_out", _splits(NUM_SPLITS + 1), _splits(1)),
        workspace("one-row-less", "partial_out", lambda r, *rest: (r - 1, *rest), lambda r, *rest: (r + 1, *rest)),
        workspace("half-the-columns", "partial_out", lambda r, h, s, d: (r, h, s, d // 2)),
        workspace("one-head-less", "partial_max", lambda r, h, s: (r, h - 1, s)),
        workspace("one-row-less", "partial_max", lambda r, h, s: (r - 1, h, s)),
        workspace("one-split-less", "partial_sum", lambda r, h, s: (r, h, s - 1), lambda r, h, s: (r, h, s + 1)),
        Spoiled("argument_type", "workspace-none", "workspace", _workspace(None)),
        Spoiled("argument_type", "workspace-dict", "workspace", _workspace({"partial_out": 1})),
    ]


def _heads_a_kv_head(group: int) -> Change:
    """That many query heads for each KV head, in q and in the plan alike."""

    def change(draft: Draft) -> None:
        heads = group * draft.shape.num_kv_heads
        rows, _, head_dim = draft.arguments["q"].shape
        draft.shape = replace(draft.shape, num_qo_heads=heads)
        draft.arguments["q"] = draft.fresh((rows, heads, head_dim))

    return change


def _other_kv_heads(draft: Draft) -> None:
    draft.shape = replace(draft.shape, num_kv_heads=draft.shape.num_qo_heads)


def _requests(*requests: PlanRequest) -> Change:
    def change(draft: Draft) -> None:
        draft.requests = requests

    return change


def _one_without_a_token(draft: Draft) -> None:
    first = draft.requests[0]
    draft.requests = (replace(first, start_pos=first.start_pos + 1, q_len=0), *draft.requests[1:])


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _splits(value: Any) -> Change:
    """Another number of splits, the same workspace."""

    def change(draft: Draft) -> None:
        draft.arguments["num_splits"] = value

    return change


def _scratch(name: str, shape: Any) -> Change:
    """Another workspace array; ``shape`` makes its extents of the right ones."""

    def change(draft: Draft) -> None:
        extents = shape(*getattr(draft.workspace, name).shape)
        draft.workspace = replace(draft.workspace, **{name: draft.fresh(extents, np.float32)})

    return change


def _workspace(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.workspace = value

    return change
