"""A table of cases in parts for machines that run side by side: which cases are whose follows from their ids alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from g4kv_cli.cases.case import Case
from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import ShardInfo

_TEXT = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")
_AnyCase = TypeVar("_AnyCase", bound=Case)


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``index``-th (from 1) of ``count`` parts."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``2/4``. Raises UsageError."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"--shard {text!r} must be I/N of at most 999999 parts, such as 2/4: the second of four")
        index, count = int(found[1]), int(found[2])
        if index > count:
            raise UsageError(f"--shard {text}: there is no part {index} of {count}; the first is 1/{count}")
        return cls(index, count)

    def of(self, cases: Sequence[_AnyCase]) -> tuple[list[_AnyCase], ShardInfo]:
        """This part's cases in the table's order, and what its record says of it. Raises UsageError for an empty part.

        The heaviest case first, each goes to the part that has the least to do so far. Cases of equal weight are taken
        in the order of a digest of their ids, so that those which stand together in the table, and cost alike, are
        spread.
        """
        if len(cases) < self.count:
            there = "is only 1 case" if len(cases) == 1 else f"are only {len(cases)} cases"
            raise UsageError(f"--shard {self.index}/{self.count}: there {there}; take at most as many parts")
        loads = [0.0] * self.count
        places: list[list[int]] = [[] for _ in loads]
        for place in sorted(range(len(cases)), key=lambda at: (-cases[at].weight, _digest([cases[at].id]))):
            lightest = min(range(self.count), key=lambda part: (loads[part], part))
            loads[lightest] += cases[place].weight
            places[lightest].append(place)
        mine = tuple(sorted(places[self.index - 1]))
        table = _digest([case.id for case in cases])
        return [cases[place] for place in mine], ShardInfo(self.index, self.count, len(cases), table, mine)


def _digest(ids: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
