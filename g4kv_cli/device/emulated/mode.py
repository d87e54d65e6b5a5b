"""Which emulator runs kernels: the environment variable G4KV_EMULATOR."""

from __future__ import annotations

import os
from enum import Enum

from .faults import EmulatorError

VARIABLE = "G4KV_EMULATOR"


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
