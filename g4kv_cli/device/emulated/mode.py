"""Which emulator runs kernels, and on how many threads: the environment's G4KV_EMULATOR and G4KV_EMULATOR_THREADS."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum

from .faults import EmulatorError

VARIABLE = "G4KV_EMULATOR"
THREADS_VARIABLE = "G4KV_EMULATOR_THREADS"
MOST_THREADS, MOST_DEFAULT_THREADS = 1024, 16
"""Of a launch: asked for, and by default, for each takes up to a millisecond before any of them begins."""


class Mode(Enum):
    """``native``: the engine, and the interpreter for what it does not know and for reports. ``both``: one after the
    other, and their results compared."""

    NATIVE = "native"
    INTERPRETER = "interpreter"
    BOTH = "both"


def emulator_mode() -> Mode:
    """The mode asked for, native by default. Raises EmulatorError for an unknown word."""
    word = os.environ.get(VARIABLE, "") or Mode.NATIVE.value
    try:
        return Mode(word)
    except ValueError:
        known = ", ".join(mode.value for mode in Mode)
        raise EmulatorError(f"{VARIABLE} is {word!r}; it can be {known}") from None


def emulator_threads() -> int:
    """Threads that may run the blocks of a launch: as many as asked for, else one a core of this process, at most
    ``MOST_DEFAULT_THREADS``.

    Raises EmulatorError for what is no number of threads.
    """
    word = os.environ.get(THREADS_VARIABLE, "")
    if not word:
        cores = os.cpu_count() or 1
        with suppress(AttributeError):  # not on macOS
            cores = len(os.sched_getaffinity(0))
        return min(cores, MOST_DEFAULT_THREADS)
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= MOST_THREADS:
        raise EmulatorError(f"{THREADS_VARIABLE} is {word!r}; it can be 1 to {MOST_THREADS}")
    return int(word)
