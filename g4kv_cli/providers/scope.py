"""The names that a manifest's expressions see when an entry is called."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from g4kv_cli.entries.provider import CheckedRequest
from g4kv_cli.model.pool_order import PoolOrder, PoolShape

OPTIONAL_ARRAYS = ("lse", "v")
"""Arrays that a call may not have: their pointer is then null."""


def scope_of(request: CheckedRequest, order: PoolOrder) -> dict[str, Any]:
    """Numbers, host metadata, and what follows from both; see docs/providers.md for the list."""
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
    return scope


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
    arrays["stream"] = request.device.stream_handle
    nulls: MutableMapping[str, Any] = dict.fromkeys(OPTIONAL_ARRAYS, 0)
    return ChainMap(dict(made), arrays, dict(scope), nulls)
