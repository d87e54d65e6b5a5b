"""The names that a manifest's expressions see when an entry is called, and which they will be."""

from __future__ import annotations

import ctypes
import math
import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.attention_request import PARTIALS
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.prep_parameters import PrepParameters
from g4kv_cli.entries.provider import CheckedRequest, NotCovered, numbers_of
from g4kv_cli.model.kv_format import SPLIT, format_of
from g4kv_cli.model.pool_order import POOL_AXES, PoolOrder, PoolShape
from g4kv_cli.providers.pool_form import PoolForm, shared_strides

Array = npt.NDArray[Any]
BUILT_NAMES = frozenset(("built_threads", "built_shared"))
"""Numbers that a builder gives to the steps behind it."""
PARTIAL_ARRAYS = tuple(name.rpartition(".")[2] for name in PARTIALS)
STREAM = "stream"
"""The stream that everything is launched into, as an address."""
TOKEN_WORDS = ("token_positions", "token_slots")
"""Words of the prep entries that write a pool, whatever index arrays they take."""

_OF_ANY_ENTRY = frozenset(("tokens", "head_dim", "group", "k_eq_v", "has_lse", "multiprocessors", "arch", "inf"))
_OF_OWN_POOL = frozenset(("k_offset", "v_offset", *shared_strides(dict.fromkeys(POOL_AXES, 0))))
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


def input_arrays(entry: Entry) -> tuple[str, ...]:
    """Arrays of a call that may be read on the host, to be handed on in another form; ``v`` may not be there."""
    if entry.operation == "merge":
        return PARTIAL_ARRAYS
    return (*(name for name in _PREP_ARRAYS if name != "q_out"), "v") if entry.is_prep else ("q",)


def names_of(entry: Entry, form: PoolForm | None = None) -> tuple[frozenset[str], frozenset[str]]:
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
        of_pool, pools = (_OF_OWN_POOL, frozenset(("pool",))) if form is None else form.names()
        return numbers | of_pool | {"num_pages"}, arrays | pools
    return numbers, arrays | {"k_out"}


def scope_of(
    request: CheckedRequest, order: PoolOrder, wanted: frozenset[str] = frozenset(), form: PoolForm | None = None
) -> dict[str, Any]:
    """Numbers, host metadata, and what follows from both; see docs/providers.md for the list.

    ``wanted``: the names that are read; TOKEN_WORDS and copies of input arrays are made only where they are.
    Raises NotCovered where the call's index arrays contradict themselves, as trap cases hand them to a kernel: nothing
    follows from those.
    """
    numbers = dict(request.numbers)
    scope: dict[str, Any] = {**numbers, "head_dim": request.entry.head_dim}
    scope["group"] = int(numbers["num_qo_heads"]) // int(numbers["num_kv_heads"])
    scope["k_eq_v"] = request.entry.value_source == "raw_k"
    scope["has_lse"] = "lse" in request.arrays
    scope.update({name: np.asarray(values, np.int64) for name, values in request.metadata().items()})
    scope["inf"] = math.inf
    scope["multiprocessors"] = request.device.limits.multiprocessors
    scope["arch"] = int(re.sub(r"\D", "", request.device.info.arch))
    for name in wanted.intersection(input_arrays(request.entry), request.arrays) - scope.keys():
        scope[name] = request.device.read(request.arrays[name])
    shape, layer = pool_shape(request), int(numbers.get("layer", 0))
    if shape is not None:
        scope["num_pages"] = shape[0]
        scope.update(_own_pool(order, shape, layer) if form is None else form.numbers(shape, layer))
    elif is_folded(request):
        scope |= _folded_pool(request, layer)
    if "pool" in request.arrays and request.entry.is_prep and wanted.intersection(TOKEN_WORDS):
        try:
            scope.update(zip(TOKEN_WORDS, _token_words(scope), strict=True))
        except IndexError as error:
            raise NotCovered(f"no slots follow from index arrays that contradict themselves: {error}") from error
    return scope


def _own_pool(order: PoolOrder, shape: PoolShape, layer: int) -> dict[str, int]:
    """Where K and V of the layer begin in a pool of whole axes, and strides (elements)."""
    strides = order.strides_elems(shape)
    begin = layer * strides["layer"]
    return {**shared_strides(strides), "k_offset": begin, "v_offset": begin + strides["kv"]}


def _folded_pool(request: CheckedRequest, layer: int) -> dict[str, int]:
    """The same of a pool of folded rows, ``[page][layer]``: K ``[slot][head][k_dim]``, V ``[slot][head][head_dim]``.
    One stride of slots for both there is none."""
    page_size, heads, layers = (int(request.numbers[name]) for name in ("page_size", "num_kv_heads", "num_layers"))
    rows = {"k": int(request.numbers["k_dim"]), "v": request.entry.head_dim}
    found = {f"{side}_stride_head": columns for side, columns in rows.items()}
    found |= {f"{side}_stride_slot": heads * columns for side, columns in rows.items()}
    of_layer = page_size * heads * sum(rows.values())
    found |= shared_strides({"page": layers * of_layer, "layer": of_layer, "dim": 1})
    found["num_pages"] = request.arrays["pool"].size // found["stride_page"]
    found["k_offset"] = layer * found["stride_layer"]
    found["v_offset"] = found["k_offset"] + page_size * found["k_stride_slot"]
    return found


def page_pieces(request: CheckedRequest, order: PoolOrder, page: int) -> list[tuple[int, int]]:
    """(first element, number of elements) of each stretch of the call's pool that a page lies in."""
    shape = pool_shape(request)
    if shape is not None:
        return order.page_pieces(page, shape)
    size = _folded_pool(request, 0)["stride_page"]
    return [(page * size, size)]


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


def is_folded(request: CheckedRequest) -> bool:
    """Whether the call's pool has folded rows of K (model/kv_format.py)."""
    head_dim = request.entry.head_dim
    return "pool" in request.arrays and format_of(head_dim, int(request.numbers["k_dim"])) != SPLIT


def pool_shape(request: CheckedRequest) -> PoolShape | None:
    """The logical shape of the request's pool, None without one and where rows of K are shorter than those of V."""
    pool = request.arrays.get("pool")
    if pool is None or is_folded(request):
        return None
    numbers = {name: int(request.numbers[name]) for name in ("num_layers", "page_size", "num_kv_heads")}
    rest = (numbers["num_layers"], 2, numbers["page_size"], numbers["num_kv_heads"], request.entry.head_dim)
    return (pool.size // int(np.prod(rest, dtype=np.int64)), *rest)


def addresses_of(
    request: CheckedRequest, arrays_at: Mapping[str, DeviceArray], made: Mapping[str, int], scope: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The scope of pointers: an array's name is its address. ``arrays_at``: the call's, or what stands in for them."""
    arrays: MutableMapping[str, Any] = {name: array.address for name, array in arrays_at.items()}
    arrays[STREAM] = request.device.stream_handle
    nulls: MutableMapping[str, Any] = dict.fromkeys(optional_arrays(request.entry), 0)
    return ChainMap(dict(made), arrays, dict(scope), nulls)
