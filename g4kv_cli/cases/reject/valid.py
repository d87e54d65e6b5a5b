"""The valid request that reject and trap cases start from, in numbers: small, and at a model's real head counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from g4kv_cli.entries.arguments import BF16, FLOAT32, INT32
from g4kv_cli.entries.attention_request import PARTIALS
from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest

PAGE_SIZE = 4
NUM_PAGES = 7
NUM_LAYERS = 2
LAYER = 1
TABLE_POSITIONS = 16
WINDOW_LEFT = 3
SEED = 3

START_POS = 3
PREFILL_TOKENS = 5
"""Positions 3..7: slot 3 of the first page, then a whole page."""
PAGE_ROW = (2, 6)

DECODE_POSITIONS = (0, 5, 7, 9)
DECODE_PAGES = ((0,), (1, 2), (3,), (4, 6))
DECODE_ORIGINS = (0, 0, 1, 1)

PLAN_REQUESTS = (
    PlanRequest(start_pos=3, q_len=2, page_indices=(5, 2), last_page_len=1),
    PlanRequest(start_pos=0, q_len=3, page_indices=(1,), last_page_len=3),
    PlanRequest(start_pos=9, q_len=1, page_indices=(3, 6), last_page_len=2, page_origin=1),
)
"""A chunk over a page boundary, a fresh prompt, and a windowed request whose first page is released."""
DECODE_PLAN_REQUESTS = (
    PlanRequest(start_pos=4, q_len=1, page_indices=(5, 2), last_page_len=1),
    PlanRequest(start_pos=2, q_len=1, page_indices=(1,), last_page_len=3),
    PlanRequest(start_pos=9, q_len=1, page_indices=(3, 6), last_page_len=2, page_origin=1),
)
"""The same pages where every request has one new token."""
NUM_SPLITS = 2


def plan_requests(entry: Entry) -> tuple[PlanRequest, ...]:
    """The valid requests of an entry that takes a plan."""
    return DECODE_PLAN_REQUESTS if entry.one_token_each else PLAN_REQUESTS


def plan_positions(requests: Sequence[PlanRequest]) -> tuple[int, ...]:
    """Position of each token of a plan."""
    return tuple(request.start_pos + token for request in requests for token in range(request.q_len))


def reject_layout(geometry: Geometry) -> KvLayout:
    """The pool's layout of all reject and trap cases of a geometry."""
    return KvLayout.derive(
        page_size=PAGE_SIZE,
        num_layers=NUM_LAYERS,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
    )


def array_names(entry: Entry) -> tuple[str, ...]:
    """The array arguments of an entry, by the names that errors give them."""
    if not entry.is_prep:
        read = ("q", "pool") if entry.has_pool else ()
        return (*read, "out", "lse", *(PARTIALS if entry.takes_splits else ()))
    names = ["q", "k", *(["v"] if entry.has_v_input else [])]
    names += ["q_norm_weight", "k_norm_weight", "rope.cos", "rope.sin", "q_out"]
    names += {
        "none": ["k_out"],
        "page_row": ["pool", "page_row"],
        "batch": ["pool", "positions", "page_indices", "page_indptr", "page_origins"],
        "plan": ["pool"],
    }[entry.metadata]
    return tuple(names)


def dtype_of(name: str) -> np.dtype[Any]:
    """The element type of an array argument."""
    if name in ("page_row", "positions", "page_indices", "page_indptr", "page_origins"):
        return INT32
    return FLOAT32 if name == "lse" or name.startswith("workspace.") else BF16
