"""Whose value a wrong row is: what a (token, head) row equals within its limit, where it equals something.

Looked for only after a mismatch. The rows of other heads and tokens are at hand; prep_suspects.py and
attention_suspects.py make the rows of the usual mistakes (another window, V in place of K, no rotation, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

MAX_NAMED = 3
"""More things that a row equals are not listed: then they equal each other."""
_FIRST_COLUMNS = 16
_MAX_COMPARED = 1 << 27
_COMPARED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A row that another computation gives. ``of(columns)`` makes value and limit, both float64, of some of its
    [head_dim] columns. ``words`` end the sentence "the row equals the expected row ..."."""

    words: str
    of: Callable[[slice], tuple[Float64, Float64]]

    @staticmethod
    def row(words: str, value: Float64, limit: Float64) -> Suspect:
        """One that is at hand whole."""
        return Suspect(words, lambda columns: (value[columns], limit[columns]))

    def equals(self, found: Float64) -> bool:
        """Whether the row ``found`` is this one. Most are not in the first columns already, so the rest is not made."""
        for columns in (slice(0, _FIRST_COLUMNS), slice(_FIRST_COLUMNS, None)):
            value, limit = self.of(columns)
            if not (np.abs(found[columns] - value) <= limit).all():
                return False
        return True


Suspects = Callable[[int, int], Iterable[Suspect]]
"""The suspects of the row at (token, head), both as the compared arrays count them."""


def identify(
    got: Array, value: Float64, limit: Float64, row: tuple[int, int], name: Callable[[int, int], str],
    suspects: Suspects | None,
) -> str:  # fmt: skip
    """What the wrong row (token, head) of ``got`` [tokens, heads, head_dim] equals, empty if nothing known.

    ``value`` and ``limit`` are what is expected of all rows; ``name(token, head)`` says in words which row it is.
    """
    found = np.asarray(got[row], np.float64)
    if not np.isfinite(found).all():
        return ""
    if not found.any():
        return "zero in every column"
    made = () if suspects is None else suspects(*row)
    equal = (suspect.words for suspect in made if suspect.equals(found))
    others = (f"of {name(*other)}" for other in _equal_rows(found, value, limit, row))
    words = list(islice(chain(equal, others), MAX_NAMED))
    return f"the expected row {', or '.join(words)}" if words else ""


def _equal_rows(found: Float64, value: Float64, limit: Float64, row: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Other (token, head) whose expected row this is: of the same token first, then of the tokens around it."""
    tokens, heads, head_dim = value.shape
    order = np.argsort(np.abs(np.arange(tokens) - row[0]), kind="stable")[: max(1, _MAX_COMPARED // (heads * head_dim))]
    step = max(1, _COMPARED_AT_ONCE // (heads * head_dim))
    for begin in range(0, order.size, step):
        some = order[begin : begin + step]
        equal = (np.abs(value[some] - found) <= limit[some]).all(axis=-1)
        for at, head in np.argwhere(equal):
            if (int(some[at]), int(head)) != row:
                yield int(some[at]), int(head)
