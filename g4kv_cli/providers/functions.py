"""The functions of manifest expressions: engine metadata out of the entry's own, with NumPy.

CSR is as in PrefillPagedPlan: ``indices`` of all rows one after another, ``indptr`` [rows + 1] where each begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def ceil_div(a: Any, b: Any) -> Any:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; 1 for n below 2."""
    return 1 << max(0, int(n - 1).bit_length())


def padded_rows(indices: Array, indptr: Array, fill: int = -1, width: int | None = None) -> Array:
    """CSR rows as an int64 matrix [rows, width]; the rest of each row is ``fill``.

    ``width`` is at least the longest row, and that by default (1 if all are empty).
    """
    lengths = np.diff(indptr)
    longest = int(lengths.max(initial=1))
    columns = longest if width is None else int(width)
    if columns < longest:
        raise ValueError(f"rows of {longest} pages do not fit a width of {columns}")
    table = np.full((len(lengths), columns), fill, np.int64)
    table[np.arange(columns) < lengths[:, None]] = indices[int(indptr[0]) : int(indptr[-1])]
    return table


def tile_requests(q_lens: Array, group: int, rows: int) -> Array:
    """The request of every tile of ``rows`` packed query rows (token, head of the group)."""
    repeated: Array = np.repeat(np.arange(len(q_lens)), ceil_div(np.asarray(q_lens) * group, rows))
    return repeated


def tile_indices(q_lens: Array, group: int, rows: int) -> Array:
    """The number of every such tile within its request."""
    return ramps(ceil_div(np.asarray(q_lens) * group, rows))


def ramps(counts: Array) -> Array:
    """0 .. n-1 for each n of ``counts``, one after another."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    numbers: Array = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return numbers


def running_total(counts: Array) -> Array:
    """An indptr [n + 1]: 0 and the running totals of ``counts``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def fastdiv(divisor: int, field: str) -> int:
    """One field of cuda::fast_mod_div<uint32_t>: ``divisor``, ``multiplier``, ``add`` or ``shift``.

    x / divisor is mulhi(x + add, multiplier) >> shift, or x >> shift with multiplier 0 for powers of two (libcu++,
    cuda/cmath).
    """
    d = int(divisor)
    if not 1 <= d < 1 << 32:
        raise ValueError(f"a divisor of {d}, must be 1 to 2^32 - 1")
    shift = d.bit_length() - 1
    multiplier = add = 0
    if d & (d - 1):
        quotient, rest = divmod(1 << (32 + shift), d)
        threshold = d - (1 << shift)
        multiplier, add = (quotient + (rest >= threshold)) & 0xFFFFFFFF, int(rest < threshold)
    fields = {"divisor": d, "multiplier": multiplier, "add": add, "shift": shift}
    if field not in fields:
        raise ValueError(f"no field {field!r}; it has {', '.join(fields)}")
    return fields[field]


def scatter(count: int, at: Any, values: Any, fill: Any = 0) -> Array:
    """``count`` elements that are ``fill``, but ``values`` at the places ``at``: a mask, say, or a table the other way
    round."""
    places = np.asarray(at, np.int64)
    if places.size and not 0 <= places.min() <= places.max() < count:
        raise ValueError(f"places from {places.min()} to {places.max()} are not all among {count} elements")
    made = np.full(int(count), fill, np.result_type(np.asarray(values), np.asarray(fill)))
    made[places] = values
    return made


def _reduced(function: Callable[..., Any], empty: Any) -> Callable[..., Any]:
    def reduce(*values: Any) -> Any:
        if len(values) > 1:
            return function([np.asarray(value).item() for value in values])
        array = np.asarray(values[0])
        return function(array).item() if array.size else empty

    return reduce


def _axis(array: Any, axis: int) -> int:
    return int(np.shape(array)[axis])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "all": lambda values: bool(np.all(values)),
    "any": lambda values: bool(np.any(values)),
    "arange": lambda *bounds: np.arange(*(int(bound) for bound in bounds), dtype=np.int64),
    "argsort": lambda values: np.argsort(np.asarray(values), kind="stable"),
    "ceil_div": ceil_div,
    "columns": lambda table: _axis(table, -1),
    "concatenate": lambda *parts, axis=0: np.concatenate([np.atleast_1d(part) for part in parts], axis),
    "diff": np.diff,
    "fastdiv": fastdiv,
    "full": lambda count, value: np.full(int(count), value),
    "int": lambda value: int(np.asarray(value).item()),
    "len": lambda array: _axis(array, 0),
    "log2": lambda value: math.log2(value),
    "max": _reduced(np.max, 0),
    "maximum": np.maximum,
    "min": _reduced(np.min, 0),
    "minimum": np.minimum,
    "next_power_of_2": next_power_of_2,
    "padded_rows": padded_rows,
    "ramps": ramps,
    "repeat": lambda values, counts: np.repeat(values, counts),
    "reshape": lambda values, *shape: np.reshape(values, [int(extent) for extent in shape]),
    "running_total": running_total,
    "scatter": scatter,
    "sqrt": lambda value: math.sqrt(value),
    "sum": _reduced(np.sum, 0),
    "tile_indices": tile_indices,
    "tile_requests": tile_requests,
    "transpose": lambda values, *axes: np.transpose(values, axes or None),
    "where": lambda condition, yes, no: np.where(condition, yes, no),
    "zeros": lambda count: np.zeros(int(count), np.int64),
}
"""By the name that a manifest calls."""
