"""What the lanes of an integer atomic find at the locations where several of them meet: worked out for all at once.

The arrays hold lanes that meet side by side, in the order in which they take turns; ``turn`` is the number of each
among those that meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Turns = npt.NDArray[np.int64]
Update = Callable[[Array, Array, Array], Array]
"""(old, b, c) -> new, all raw bits."""
Chain = Callable[[Array, Array, Array, Turns], Array | None]
"""(what was there, b, c, turn) -> what each finds; None if they have to take turns after all."""
_INTEGERS = frozenset(f"{sign}{width}" for sign in "bus" for width in (32, 64))


def chain_of(operation: str, kind: str, update: Update | None) -> Chain | None:
    """The chain of a form; None for those of floats, whose sums depend on each rounding."""
    if update is None or kind not in _INTEGERS:
        return None
    if operation == "cas":
        return _swapped
    if operation in ("inc", "dec"):
        return _counted_up if operation == "inc" else _counted_down
    return lambda old, b, c, turn: _accumulated(update, old, b, turn)


def _accumulated(update: Update, old: Array, b: Array, turn: Turns) -> Array:
    """Of an associative operation, by prefixes that double in length."""
    total = np.where(turn == 0, update(old, b, b), b)
    step, longest = 1, int(turn.max())
    while step <= longest:
        behind = np.flatnonzero(turn >= step)
        total[behind] = update(total[behind - step], total[behind], total[behind])
        step *= 2
    return _shifted(old, total, turn)


def _shifted(old: Array, after: Array, turn: Turns) -> Array:
    """What each finds, of what each leaves."""
    found = old.copy()
    later = np.flatnonzero(turn > 0)
    found[later] = after[later - 1]
    return found


def _swapped(old: Array, b: Array, c: Array, turn: Turns) -> Array:
    """Of compare-and-swap: from one that swaps to the next, at all locations together."""
    begins = np.flatnonzero(turn == 0)
    counts = np.diff(np.append(begins, turn.size))
    found, held, since = old.copy(), old[begins], np.zeros(begins.size, np.int64)
    while True:
        swaps = (b == np.repeat(held, counts)) & (turn >= np.repeat(since, counts))
        first = np.minimum.reduceat(np.where(swaps, turn, turn.size), begins)
        goes_on = first < counts
        if not goes_on.any():
            return found
        held = np.where(goes_on, c[begins + np.minimum(first, counts - 1)], held)
        since = np.where(goes_on, first + 1, counts)
        behind = turn >= np.repeat(since, counts)
        found[behind] = np.repeat(held, counts)[behind]


def _periods(old: Array, b: Array, turn: Turns) -> list[npt.NDArray[np.uint64]] | None:
    """(what was there, limit, turn) in 64 bits; None where those that meet have different limits."""
    if ((turn[1:] > 0) & (b[1:] != b[:-1])).any():
        return None
    return [value.astype(np.uint64) for value in (old, b, turn)]


_ONE = np.uint64(1)


def _counted_up(old: Array, b: Array, c: Array, turn: Turns) -> Array | None:
    """inc: behind its limit a counter begins at 0 again."""
    wide = _periods(old, b, turn)
    if wide is None:
        return None
    first, limit, count = wide
    # From above the limit the first turn leads to 0.
    reached = np.where(first > limit, count - _ONE, first + count) % (limit + _ONE)
    found: Array = np.where(turn == 0, old, reached.astype(np.uint32))
    return found


def _counted_down(old: Array, b: Array, c: Array, turn: Turns) -> Array | None:
    """dec: behind 0 a counter begins at its limit again, as from above it."""
    wide = _periods(old, b, turn)
    if wide is None:
        return None
    first, limit, count = wide
    period = limit + _ONE
    is_above = first > limit
    begin, steps = np.where(is_above, limit, first), np.where(is_above, count - _ONE, count)
    reached = (begin + (period - steps % period)) % period
    found: Array = np.where(turn == 0, old, reached.astype(np.uint32))
    return found
