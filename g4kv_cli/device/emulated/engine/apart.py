"""Threads that run the blocks of one launch, each with an engine state of its own.

Blocks of a launch know of each other through global memory alone. Where none reads what another stores, no two store to
one place, and all atomics are of one kind that commutes and are read by nobody, each block does what it would do alone,
whoever comes first; so that one run on several threads in which that is seen to hold is as good as one in order. Any
other is taken back and run in order, on one thread (``EngineRun``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from .state import EngineState
from .structures import RUN_ENDED, RUN_FAULT

OVER = (RUN_ENDED, RUN_FAULT)
SECONDS_DEAF = 0.05
"""A signal may interrupt any thread; the caller's, which alone may heed it, looks that often."""


def blocks_left(state: EngineState) -> int:
    """Blocks of a launch, or clusters, that nobody has begun while one thread runs it."""
    launch = state.launch
    left: int = (launch.last - launch.next) // launch.step - 1
    return max(0, left)


def run_apart(first: EngineState, others: Sequence[EngineState], advance: Callable[[EngineState], int]) -> None:
    """Run what is left of the launch of ``first`` with all states, of which ``others`` were prepared for it.

    ``advance`` runs a state for a while and says why it stopped; what it raises ends all, and is raised. So does a
    fault, which a state's launch keeps.
    """
    cursor = np.array([first.launch.next + first.launch.step], np.int64)
    first.point("cursor", cursor)
    for state in others:
        state.follow(first, cursor)
    is_over = threading.Event()
    raised: list[Exception] = []

    def run(state: EngineState) -> None:
        while not is_over.is_set() and advance(state) not in OVER:
            pass
        if state.launch.fault_count:
            is_over.set()

    def run_beside(state: EngineState, has_ended: threading.Event) -> None:
        try:
            run(state)
        except Exception as error:
            raised.append(error)
            is_over.set()
        finally:
            has_ended.set()

    begun: list[tuple[threading.Thread, threading.Event]] = []
    mine = [first]
    try:
        for state in others:
            has_ended = threading.Event()
            thread = threading.Thread(target=run_beside, args=(state, has_ended), daemon=True)
            begun.append((thread, has_ended))
            try:
                thread.start()
            except RuntimeError:  # the system gives no more
                mine.append(state)
        for state in mine:
            run(state)
        _wait_for(begun)
    except BaseException:
        is_over.set()
        _wait_for(begun)
        raise
    if raised:
        raise raised[0]


def _wait_for(begun: Sequence[tuple[threading.Thread, threading.Event]]) -> None:
    """Not by ``Thread.join``, which takes a thread for ended when it is interrupted itself."""
    for thread, has_ended in begun:
        while thread.ident is not None and not has_ended.wait(SECONDS_DEAF):
            pass
