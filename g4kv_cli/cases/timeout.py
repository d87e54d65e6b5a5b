"""How long a case may take, and how often that is waited for."""

from __future__ import annotations

from collections import Counter

DEFAULT_CASE_TIMEOUT_SECONDS = 60.0
"""No case of the built-in kernels comes near it; an endless kernel is told from a slow one soon enough."""
MAX_TIME_LIMITS = 10
"""A case that is many in one, such as an end-to-end one, has the time of up to that many."""

MAX_TIMEOUTS_AN_ENTRY = 3


class Patience:
    """Counts the cases of each entry that ran out of time; after a few of them its others are not tried.

    A kernel that never ends would otherwise take the time of hundreds of cases.
    """

    def __init__(self) -> None:
        self._late: Counter[str] = Counter()

    def note(self, entry: str) -> None:
        """One more case of the entry ran out of time."""
        self._late[entry] += 1

    def refusal(self, entry: str) -> str:
        """Why another case of the entry is not tried; empty if it is."""
        if self._late[entry] < MAX_TIMEOUTS_AN_ENTRY:
            return ""
        return f"not run: {MAX_TIMEOUTS_AN_ENTRY} cases of this entry have run out of time"
