"""Ctrl-C while modules are imported: the process ends there, without a word, as the signal does by default.

Python's own handler would raise KeyboardInterrupt in the middle of an import: before there is anybody to catch it, or
inside NumPy's, which makes it an ImportError with a traceback of its own.
"""

from __future__ import annotations

import signal


class InterruptEndsProcess:
    """A context in which Ctrl-C has its default action, where Python's handler is in place (so not in a background job
    that ignores it, nor in a thread beside the main one, which may not say so)."""

    def __init__(self) -> None:
        self._changed = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            except ValueError:
                return
            self._changed = True

    def __exit__(self, *_error: object) -> None:
        if self._changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
