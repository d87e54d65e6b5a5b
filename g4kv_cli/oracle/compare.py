"""Got against want, element by element: what is wrong, how often, where first and where worst.

Non-finite results are looked at before any number is compared. A mean or a cosine is never the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.reference import PIECE_ELEMS, Expected
from g4kv_cli.oracle.suspects import Suspects, identify
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]
Index = tuple[int, ...]

POISON_BYTE = 0xFF
"""Every output is filled with this byte before a run: bf16 0xffff, a NaN that no kernel computes (theirs is 0x7fff)."""
POISON_BITS = np.uint16(0xFFFF)
_FOUR_POISONS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

NEVER_WRITTEN = "these elements still hold the poison: never written"

_ORDER = ("layer", "page", "slot", "token", "position", "head", "dim")


@dataclass(frozen=True, slots=True)
class Axes:
    """How an index of an array reads in logical terms.

    ``names`` label the axes; ``constants`` hold for all elements; ``per_token`` gives further coordinates of each
    token (page, slot, position), by the index along the axis called ``token``.
    """

    names: tuple[str, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    per_token: Mapping[str, Sequence[int] | Array] = field(default_factory=dict)

    def coordinate(self, index: Index) -> dict[str, int]:
        """The logical coordinates of one index, in the usual order."""
        found = dict(self.constants) | {name: int(at) for name, at in zip(self.names, index, strict=True)}
        if "token" in found:
            found |= {name: int(values[found["token"]]) for name, values in self.per_token.items()}
        order = {name: place for place, name in enumerate(_ORDER)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


ROWS = ("token", "head", "dim")


def compare_values(
    operation: str, got: Array, expected: Expected, axes: Axes, suspects: Suspects | None = None
) -> Mismatch | None:
    """Compare bf16 results with float64 expectations of the same shape; None if every element is within its limit.

    A wrong row is held against the other rows, and against ``suspects`` of its (token, head).
    """
    if expected.rms_limit is None and got.shape == expected.value.shape and _is_within(got, expected):
        return None
    got64 = got.astype(np.float32).astype(np.float64)
    non_finite = ~np.isfinite(got64)
    if non_finite.any():
        return _non_finite(operation, got, expected, axes, non_finite)
    error = np.abs(got64 - expected.value)
    wrong = error > expected.limit
    if not wrong.any():
        return _compare_rms(operation, got, error, expected, axes)
    # The worst is the one that exceeds its own limit by the most, not the one with the largest number in it.
    excess = np.where(wrong, error - expected.limit, -1.0)
    first, worst = _first(wrong), _unravel(int(np.argmax(excess)), excess.shape)
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(wrong)),
        total=wrong.size,
        first=axes.coordinate(first),
        first_got=_text(got[first]),
        first_want=_number(expected.value[first]),
        worst=axes.coordinate(worst),
        worst_got=_text(got[worst]),
        worst_want=_number(expected.value[worst]),
        limit=f"{expected.limit_text}: {expected.limit[worst]:.3g} at the worst",
        first_row_equals=_equals(got, expected, axes, first, suspects),
        worst_row_equals="" if worst[:-1] == first[:-1] else _equals(got, expected, axes, worst, suspects),
    )


def _is_within(got: Array, expected: Expected) -> bool:
    """Whether each element is finite and within its limit; some rows at a time, which stay in a core's cache."""
    step = max(1, PIECE_ELEMS * len(got) // max(got.size, 1))
    for begin in range(0, len(got), step):
        some = slice(begin, begin + step)
        got64 = got[some].astype(np.float32).astype(np.float64)
        # Of what is not finite the error is infinite or not a number.
        if not (np.abs(got64 - expected.value[some]) <= expected.limit[some]).all():
            return False
    return True


def _equals(got: Array, expected: Expected, axes: Axes, index: Index, suspects: Suspects | None) -> str:
    """What the row of a wrong element equals."""
    if axes.names != ROWS:
        return ""
    own = axes.coordinate(index)

    def name(token: int, head: int) -> str:
        other = axes.coordinate((token, head, index[2]))
        return ", ".join(f"{key} {value}" for key, value in other.items() if own[key] != value)

    return identify(got, expected.value, expected.limit, (index[0], index[1]), name, suspects)


def compare_bits(operation: str, got: Array, want: Array, axes: Axes, note: str = "") -> Mismatch | None:
    """Compare two bf16 arrays bit for bit (a NaN equals only the same NaN, +0 differs from -0)."""
    wrong = bits(got) != bits(want)
    if not wrong.any():
        return None
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    # A difference that is not a number (poison, overflow) counts as the largest.
    error = np.where(wrong, np.nan_to_num(error, nan=np.inf), -1.0)
    first, worst = _first(wrong), _unravel(int(np.argmax(error)), error.shape)
    unwritten = bool((bits(got)[wrong] == POISON_BITS).all())
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(wrong)),
        total=wrong.size,
        first=axes.coordinate(first),
        first_got=_text(got[first]),
        first_want=_text(want[first]),
        worst=axes.coordinate(worst),
        worst_got=_text(got[worst]),
        worst_want=_text(want[worst]),
        limit="bit-equal",
        note=NEVER_WRITTEN if unwritten else note,
    )


def compare_untouched(operation: str, got: Array, touched: Any, axes: Axes) -> Mismatch | None:
    """Every element of a bf16 array must still be the poison, except those at the NumPy index ``touched``."""
    if _is_untouched(got, touched):
        return None
    changed = bits(got) != POISON_BITS
    changed[touched] = False
    if not changed.any():
        return None
    first = _first(changed)
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(changed)),
        total=changed.size,
        first=axes.coordinate(first),
        first_got=_text(got[first]),
        first_want="poison (0xffff)",
        worst=axes.coordinate(first),
        worst_got=_text(got[first]),
        worst_want="poison (0xffff)",
        limit="bit-equal",
        note="a region that this call must not touch was written",
    )


def _is_untouched(got: Array, touched: Any) -> bool:
    """The same for whole rows that are touched, four elements at a time; False for other indices, and if not."""
    items = touched if isinstance(touched, tuple) else (touched,)
    are_rows = len(items) < got.ndim and all(
        isinstance(item, int | slice) or (isinstance(item, np.ndarray) and item.dtype.kind == "i") for item in items
    )
    if not are_rows or got.shape[-1] % 4 or got.strides[-1] != got.itemsize:
        return False
    changed = got.view(np.uint64) != _FOUR_POISONS
    changed[touched] = False
    return not changed.any()


def _compare_rms(operation: str, got: Array, error: Array, expected: Expected, axes: Axes) -> Mismatch | None:
    """The second line behind the element-wise limits: many small errors that no single element shows."""
    if expected.rms_limit is None or expected.magnitude is None:
        return None
    relative = error / np.maximum(expected.magnitude, np.finfo(np.float64).tiny)
    rms = float(np.sqrt(np.mean(np.square(relative))))
    if rms <= expected.rms_limit:
        return None
    worst = _unravel(int(np.argmax(relative)), relative.shape)
    return Mismatch(
        operation=operation,
        count=relative.size,
        total=relative.size,
        first=axes.coordinate(worst),
        first_got=_text(got[worst]),
        first_want=_number(expected.value[worst]),
        worst=axes.coordinate(worst),
        worst_got=_text(got[worst]),
        worst_want=_number(expected.value[worst]),
        limit=f"root mean square of error / pair magnitude <= {expected.rms_limit}",
        note=f"the root mean square is {rms:.3g}",
    )


def _non_finite(operation: str, got: Array, expected: Expected, axes: Axes, where: Array) -> Mismatch:
    first = _first(where)
    unwritten = bool((bits(got)[where] == POISON_BITS).all())
    return Mismatch(
        operation=f"{operation}: non-finite results",
        count=int(np.count_nonzero(where)),
        total=where.size,
        first=axes.coordinate(first),
        first_got=_text(got[first]),
        first_want=_number(expected.value[first]),
        worst=axes.coordinate(first),
        worst_got=_text(got[first]),
        worst_want=_number(expected.value[first]),
        limit="finite",
        note=NEVER_WRITTEN if unwritten else "computed as NaN or infinity",
    )


def _first(where: Array) -> Index:
    return _unravel(int(np.argmax(where)), where.shape)


def _unravel(flat: int, shape: Index) -> Index:
    return tuple(int(at) for at in np.unravel_index(flat, shape))


def _text(value: Any) -> str:
    pattern = int(np.asarray(value, dtype=BF16).view(np.uint16))
    return f"{float(value):.6g} (0x{pattern:04x})"


def _number(value: Any) -> str:
    return f"{float(value):.7g}"
