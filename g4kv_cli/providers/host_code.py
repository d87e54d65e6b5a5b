"""Which of a provider's host functions runs now: a function that does not end can only be ended with its process, and
one that crashes ends it; who sees that has to say which it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_BYTES = 400
"""Of the words that another process sees."""
_running: list[str] = []
_shown: Any = None


def show_to(memory: Any) -> None:
    """Keep the words in memory that another process reads, a ``multiprocessing.RawArray("c", MOST_BYTES)``."""
    global _shown
    _shown = memory


@contextmanager
def running(words: str) -> Iterator[None]:
    """Meanwhile host code runs, named by these words: ``engine_prep of libengine.so``."""
    _running.append(words)
    _show()
    try:
        yield
    finally:
        _running.pop()
        _show()


def _show() -> None:
    if _shown is not None:
        _shown.value = now_running().encode()[: MOST_BYTES - 1]


def now_running() -> str:
    """The words of what runs, from any thread; empty for nothing."""
    return _running[-1] if _running else ""
