"""Standard output that may be lost on the way: the reader of a pipe leaves (``| head -1``), the disk under it is full.

``g4kv_cli.main`` puts a StandardStream in place of ``sys.stdout``. What a command prints goes through it, and a loss
ends the command, unless files were asked for: those are finished without a console. Rich would turn a closed pipe
into exit code 1, which means findings here, so no closed pipe may get as far as Rich.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from g4kv_cli.errors import EXIT_FAILURE

EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell reports a tool whose reader has left."""


class OutputLost(Exception):
    """Nobody gets what is printed from here on, and nothing else was asked for."""


class StandardStream:
    """A text stream that remembers the error that lost it, and swallows whatever comes after.

    With ``outlived`` False the loss itself raises OutputLost, so that the command ends there.
    """

    def __init__(self, stream: TextIO | None, *, outlived: bool = False) -> None:
        self._stream = stream
        self.outlived = outlived
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's, with escapes for what its encoding has not, a name that is no UTF-8 say; after a loss,
        nothing."""
        if self.lost is None:
            try:
                if self._stream is None:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                try:
                    return self._stream.write(text)
                except UnicodeEncodeError as error:
                    return self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """As the stream's; after a loss, nothing."""
        if self.lost is None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def isatty(self) -> bool:
        """False for a stream that is closed."""
        return self._stream is not None and self._stream.isatty()

    def _lose(self, error: OSError) -> None:
        self.lost = error
        # What is still buffered goes nowhere, or the interpreter complains when it flushes at exit.
        with suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if not self.outlived:
            raise OutputLost


def outlive_reader(*paths: object) -> None:
    """Where any of ``paths`` is a file to write, a lost standard output no longer ends the command."""
    if isinstance(sys.stdout, StandardStream) and any(path is not None for path in paths):
        sys.stdout.outlived = True


def lost_output_text(error: OSError) -> str:
    """The error line for a standard output that cannot be written."""
    what = error.strerror or type(error).__name__
    todo = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "send it to a file or a pipe"
    return f"cannot write to standard output: {what}; {todo}"


def exit_code_of(code: int, output: StandardStream) -> int:
    """The command's exit code, or that of a standard output that was lost."""
    if output.lost is None:
        return code
    return EXIT_BROKEN_PIPE if output.lost.errno == errno.EPIPE else EXIT_FAILURE
