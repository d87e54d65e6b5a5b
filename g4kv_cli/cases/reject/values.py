"""Reject cases of the numbers that every form takes: heads, rotation, tables, positions, eps, and the library."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import PREFILL_TOKENS, TABLE_POSITIONS
from g4kv_cli.entries.entry import Entry

I32 = 2**31
U32 = 2**32


def value_cases(entry: Entry) -> list[Spoiled]:
    """Cases of all forms; those of start_pos where the form has one."""
    if entry.operation == "merge":
        return [
            *_library_cases(),
            Spoiled("fits_i32", "out-tokens", "out tokens", _claim("out", 0, I32)),
            Spoiled("fits_i32", "out-heads", "out heads", _claim("out", 1, I32)),
        ]
    if not entry.is_prep:
        return _attention_value_cases()
    head_dim = entry.head_dim
    no_eps = _argument("eps", 0.0)
    cases = [
        *_library_cases(),
        Spoiled("argument_type", "rope-none", "rope", _rope(None)),
        Spoiled("argument_type", "rope-tuple", "rope", _rope_tuple),
        Spoiled("fits_i32", "q-tokens", "q tokens", _claim("q", 0, I32)),
        Spoiled("fits_i32", "q-heads", "q heads", _claim("q", 1, I32)),
        Spoiled("fits_i32", "k-heads", "k heads", _claim("k", 1, I32)),
        Spoiled("extent_positive", "no-k-heads", "k heads", _empty_heads("k")),
        Spoiled("q_heads_multiple", "no-q-heads", "q heads", _empty_heads("q")),
        Spoiled("q_heads_multiple", "more-k-heads", "q heads", _more_k_heads),
        Spoiled("rotary_dim", "zero", "rotary_dim", _argument("rotary_dim", 0), _rotary(2)),
        Spoiled("rotary_dim", "odd", "rotary_dim", _argument("rotary_dim", head_dim - 1)),
        Spoiled("rotary_dim", "past-head_dim", "rotary_dim", _argument("rotary_dim", head_dim + 2)),
        Spoiled("rotary_dim", "negative", "rotary_dim", _argument("rotary_dim", -2)),
        Spoiled("fits_i32", "rotary_dim-wraps", "rotary_dim", _argument("rotary_dim", U32 + head_dim)),
        Spoiled("integer", "rotary_dim-float", "rotary_dim", _argument("rotary_dim", float(head_dim))),
        Spoiled("rope_table", "cos-one-row-short", "rope.cos", _rope_rows(TABLE_POSITIONS - 1, TABLE_POSITIONS)),
        Spoiled(
            "rope_table",
            "sin-one-row-short",
            "rope.sin",
            _rope_rows(TABLE_POSITIONS, TABLE_POSITIONS - 1),
            _rope_rows(TABLE_POSITIONS, TABLE_POSITIONS),
        ),
        Spoiled("extent_positive", "no-positions", "rope.cos_max_pos", _rope_field(cos_max_pos=0)),
        Spoiled("extent_positive", "negative-positions", "rope.cos_max_pos", _rope_field(cos_max_pos=-1)),
        Spoiled("fits_i32", "positions-wrap", "rope.cos_max_pos", _rope_field(cos_max_pos=U32 + TABLE_POSITIONS)),
        Spoiled("integer", "positions-float", "rope.cos_max_pos", _rope_field(cos_max_pos=16.0)),
    ]
    for name, value in (
        ("nan", math.nan),
        ("inf", math.inf),
        ("negative", -1e-6),
        ("past-float32", 1e39),
        ("none", None),
        ("text", "1e-6"),
        ("digits", 10**400),
    ):
        cases.append(Spoiled("eps", name, "eps", _argument("eps", value), no_eps))
    if entry.metadata in ("none", "page_row"):
        cases += _start_cases()
    return cases


def _library_cases() -> list[Spoiled]:
    return [
        Spoiled("argument_type", "library-none", "library", _library(None)),
        Spoiled("argument_type", "library-device", "library", _library_is_device),
    ]


def _attention_value_cases() -> list[Spoiled]:
    """KV heads come with the plan, so only those of q are left."""
    return [
        *_library_cases(),
        Spoiled("fits_i32", "q-heads", "num_qo_heads", _claim("q", 1, I32)),
        Spoiled("q_heads_multiple", "no-q-heads", "num_qo_heads", _empty_heads("q")),
    ]


def _start_cases() -> list[Spoiled]:
    last = TABLE_POSITIONS - PREFILL_TOKENS
    return [
        Spoiled("start_pos", "negative", "start_pos", _start(-1), _start(0)),
        Spoiled("start_pos", "lowest", "start_pos", _start(-I32)),
        Spoiled("position_range", "one-past-the-tables", "start_pos", _start(last + 1), _start(last)),
        Spoiled("position_range", "largest-i32", "start_pos", _start(I32 - 1)),
        Spoiled("position_range", "tables-one-short", "start_pos", _tables_one_short, _tables_exact),
        Spoiled("fits_i32", "start_pos-2^31", "start_pos", _start(I32)),
        Spoiled("fits_i32", "start_pos-wraps", "start_pos", _start(U32 + 3)),
        Spoiled("integer", "start_pos-float", "start_pos", _start(3.0), _start(np.int32(3))),
        Spoiled("integer", "start_pos-text", "start_pos", _start("3")),
        Spoiled("integer", "start_pos-none", "start_pos", _start(None)),
        Spoiled("integer", "start_pos-bool", "start_pos", _start(True)),
    ]


def _argument(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments[name] = value

    return change


def _library(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.library = value

    return change


def _library_is_device(draft: Draft) -> None:
    draft.library = draft.device


def _rope(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.rope = value

    return change


def _rope_tuple(draft: Draft) -> None:
    draft.rope = (draft.rope.cos, draft.rope.sin)


def _rope_field(**fields: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.rope = replace(draft.rope, **fields)

    return change


def _rope_rows(cos_rows: int, sin_rows: int) -> Change:
    """Tables of so many rows, said to have all positions."""

    def change(draft: Draft) -> None:
        width = draft.rope.cos.shape[1]
        cos, sin = draft.rope.cos.view((cos_rows, width)), draft.rope.sin.view((sin_rows, width))
        draft.rope = replace(draft.rope, cos=cos, sin=sin, cos_max_pos=TABLE_POSITIONS)

    return change


def _rotary(rotary_dim: int) -> Change:
    """A rotation of that many columns, and tables for it."""

    def change(draft: Draft) -> None:
        shape = (TABLE_POSITIONS, rotary_dim)
        draft.arguments["rotary_dim"] = rotary_dim
        draft.rope = replace(draft.rope, cos=draft.rope.cos.view(shape), sin=draft.rope.sin.view(shape))

    return change


def _claim(name: str, axis: int, extent: int) -> Change:
    def change(draft: Draft) -> None:
        shape = list(draft.arguments[name].shape)
        shape[axis] = extent
        draft.arguments[name] = draft.claimed(tuple(shape))

    return change


def _empty_heads(name: str) -> Change:
    def change(draft: Draft) -> None:
        rows, _, head_dim = draft.arguments[name].shape
        draft.arguments[name] = draft.arguments[name].view((rows, 0, head_dim))

    return change


def _more_k_heads(draft: Draft) -> None:
    """One KV head more than there are query heads."""
    rows, heads, head_dim = draft.arguments["q"].shape
    draft.arguments["k"] = draft.fresh((rows, heads + 1, head_dim))


def _start(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments["start_pos"] = value
        # Pages for every position of the tables: where the request starts is the only thing wrong.
        draft.page_ids = (2, 6, 0, 5)

    return change


def _tables_one_short(draft: Draft) -> None:
    last = draft.arguments["start_pos"] + PREFILL_TOKENS - 1
    draft.rope = replace(draft.rope, cos_max_pos=last)


def _tables_exact(draft: Draft) -> None:
    last = draft.arguments["start_pos"] + PREFILL_TOKENS - 1
    draft.rope = replace(draft.rope, cos_max_pos=last + 1)
