"""The names that a manifest's expressions see when an entry is called, and which they will be."""

from __future__ import annotations

import ctypes
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.attention_request import PARTIALS
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.prep_parameters import PrepParameters
from g4kv_cli.entries.provider import CheckedRequest, NotCovered, numbers_of
from g4kv_cli.model.pool_order import PoolOrder, PoolShape

Array = npt.NDArray[Any]
BUILT_NAMES = frozenset(("built_threads", "built_shared"))
"""Numbers that a builder gives to the steps behind it."""
PARTIAL_ARRAYS = tuple(name.rpartition(".")[2] for name in PARTIALS)
STREAM = "stream"
"""The stream that everything is launched into, as an address."""
TOKEN_WORDS = ("token_positions", "token_slots")
"""Words of the prep entries that write a pool, whatever index arrays they take."""

_OF_ANY_ENTRY = frozenset(("tokens", "head_dim", "group", "k_eq_v", "has_lse"))
_OF_A_POOL = frozenset(
    ("num_pages", "k_offset", "v_offset", *(f"stride_{axis}" for axis in ("page", "layer", "kv", "slot", "head")))
)
_OF_A_MERGE = frozenset(("num_qo_heads", "num_kv_heads", "num_splits", "sm_scale", "scale_log2"))
_ROWS = ("page_indices", "page_indptr", "page_origins")
_PLAN = ("kv_lens", "last_page_len", "q_indptr", "positions", "token_requests", *_ROWS)
_METADATA: dict[str, tuple[str, ...]] = {
    "none": (),
    "page_row": ("page_row",),
    "batch": ("positions", *_ROWS),
    "plan": _PLAN,
}
_PREP_ARRAYS = ("q", "k", "q_norm_weight", "k_norm_weight", "cos", "sin", "q_out")


def optional_arrays(entry: Entry) -> tuple[str, ...]:
    """Arrays that a call of the entry may not have: their pointer is then null."""
    return ("v",) if entry.is_prep else ("lse",)


def names_of(entry: Entry) -> tuple[frozenset[str], frozenset[str]]:
    """What expressions of this entry may use: (numbers and host arrays, device arrays), as ``scope_of`` and
    ``addresses_of`` will have them, the optional ones among the latter."""
    metadata = frozenset(_METADATA[entry.metadata])
    if entry.operation == "merge":
        return _OF_ANY_ENTRY | _OF_A_MERGE, frozenset(("out", "lse", *PARTIAL_ARRAYS, STREAM))
    structure: ctypes.Structure = PrepParameters() if entry.is_prep else AttentionParameters()
    numbers = frozenset(numbers_of(structure)) | _OF_ANY_ENTRY | metadata | {"requests"}
    arrays = metadata | {*optional_arrays(entry), STREAM}
    arrays |= frozenset(_PREP_ARRAYS) if entry.is_prep else frozenset(("q", "out"))
    if not entry.is_prep:
        numbers |= {"sm_scale", "cta_tile_q"}
    if entry.takes_plan:
        arrays |= {"tile_requests", "tile_indices"}
    if entry.takes_splits:
        arrays |= frozenset(PARTIAL_ARRAYS)
    if entry.writes_pool:
        numbers |= frozenset(TOKEN_WORDS)
    if entry.has_pool:
        return numbers | _OF_A_POOL, arrays | {"pool"}
    return numbers, arrays | {"k_out"}


def scope_of(request: CheckedRequest, order: PoolOrder, wanted: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Numbers, host metadata, and what follows from both; see docs/providers.md for the list.

    ``wanted``: the names that are read; TOKEN_WORDS are made only where they are. Raises NotCovered where the call's
    index arrays contradict themselves, as trap cases hand them to a kernel: nothing follows from those.
    """
    numbers = dict(request.numbers)
    scope: dict[str, Any] = {**numbers, "head_dim": request.entry.head_dim}
    scope["group"] = int(numbers["num_qo_heads"]) // int(numbers["num_kv_heads"])
    scope["k_eq_v"] = request.entry.value_source == "raw_k"
    scope["has_lse"] = "lse" in request.arrays
    scope.update({name: np.asarray(values, np.int64) for name, values in request.metadata().items()})
    shape = pool_shape(request)
    if shape is not None:
        strides = order.strides_elems(shape)
        scope["num_pages"] = shape[0]
        scope.update({f"stride_{axis}": stride for axis, stride in strides.items() if axis != "dim"})
        scope["k_offset"] = int(numbers["layer"]) * strides["layer"]
        scope["v_offset"] = scope["k_offset"] + strides["kv"]
    if shape is not None and request.entry.is_prep and wanted.intersection(TOKEN_WORDS):
        try:
            scope.update(zip(TOKEN_WORDS, _token_words(scope), strict=True))
        except IndexError as error:
            raise NotCovered(f"no slots follow from index arrays that contradict themselves: {error}") from error
    return scope


def _token_words(scope: Mapping[str, Any]) -> tuple[Array, Array]:
    """Of every token of a prep call: its position, and the slot that it takes, ``page * page_size + slot in it``."""
    tokens, page_size = int(scope["tokens"]), int(scope["page_size"])
    if "page_row" in scope:
        positions = np.arange(tokens) + int(scope["start_pos"])
        pages = scope["page_row"][positions // page_size - int(scope["page_origin"])]
    else:
        requests, positions = scope.get("token_requests", np.arange(tokens)), scope["positions"]
        at = scope["page_indptr"][requests] + positions // page_size - scope["page_origins"][requests]
        pages = scope["page_indices"][at]
    return positions, pages * page_size + positions % page_size


def pool_shape(request: CheckedRequest) -> PoolShape | None:
    """The logical shape of the request's pool, None without one."""
    pool = request.arrays.get("pool")
    if pool is None:
        return None
    numbers = {name: int(request.numbers[name]) for name in ("num_layers", "page_size", "num_kv_heads")}
    rest = (numbers["num_layers"], 2, numbers["page_size"], numbers["num_kv_heads"], request.entry.head_dim)
    return (pool.size // int(np.prod(rest, dtype=np.int64)), *rest)


def addresses_of(request: CheckedRequest, made: Mapping[str, int], scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scope of pointers: an array's name is its address."""
    arrays: MutableMapping[str, Any] = {name: array.address for name, array in request.arrays.items()}
    arrays[STREAM] = request.device.stream_handle
    nulls: MutableMapping[str, Any] = dict.fromkeys(optional_arrays(request.entry), 0)
    return ChainMap(dict(made), arrays, dict(scope), nulls)
