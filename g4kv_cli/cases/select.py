"""Which cases a request means."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Protocol, TypeVar

from g4kv_cli.errors import UsageError

_GLOB = "*?["


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_AnyCase = TypeVar("_AnyCase", bound=_Named)


def select_cases(
    cases: Sequence[_AnyCase],
    wanted: Sequence[str],
    listing: str = "g4kv smoke --list shows the ids of a geometry",
) -> list[_AnyCase]:
    """The cases whose id is wanted, in the table's order; all of them if nothing is. A glob matches whole ids.

    Raises UsageError if an id or glob matches nothing (with the nearest ids), or if there is no case at all.
    """
    if not cases:
        raise UsageError("no case is selected; a run without cases would prove nothing")
    if not wanted:
        return list(cases)
    ids = [case.id for case in cases]
    chosen: set[str] = set()
    for text in wanted:
        is_glob = any(character in text for character in _GLOB)
        found = fnmatch.filter(ids, text) if is_glob else [text] if text in ids else []
        if not found:
            raise UsageError(_unknown(text, ids, listing))
        chosen.update(found)
    return [case for case in cases if case.id in chosen]


def _unknown(text: str, ids: Sequence[str], listing: str) -> str:
    near = difflib.get_close_matches(text, ids, n=3, cutoff=0.3)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    return f"no case {text!r}; {hint}{listing}"
