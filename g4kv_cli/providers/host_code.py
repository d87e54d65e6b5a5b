"""Which of a provider's host functions runs now: a function that does not end can only be ended with its process, and
who does that has to say which it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running: list[str] = []


@contextmanager
def running(words: str) -> Iterator[None]:
    """Meanwhile host code runs, named by these words: ``engine_prep of libengine.so``."""
    _running.append(words)
    try:
        yield
    finally:
        _running.pop()


def now_running() -> str:
    """The words of what runs, from any thread; empty for nothing."""
    return _running[-1] if _running else ""
