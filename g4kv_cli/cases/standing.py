"""Which case a process is at, and where its kernel stands: said when the user interrupts, asked of other processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from g4kv_cli.device.interface import Device

ANSWER_SECONDS = 1.0
"""How long an interrupted run waits for its processes to say where they are."""

_REQUEST: Any = getattr(signal, "SIGUSR1", None)  # not on Windows


def words_of(case_id: str, device: Device | None) -> str:
    """``<case>: kernel ... at ...``, or just the case while no kernel runs."""
    standing = "" if device is None else device.standing()
    return f"{case_id}: {standing}" if standing else case_id


@contextmanager
def naming(case_id: str) -> Iterator[None]:
    """A KeyboardInterrupt in the body leaves it with the case's id before what it says already."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"{case_id}: {interrupt}" if str(interrupt) else case_id) from interrupt


def answer_requests(connection: Connection, words: Callable[[], str]) -> None:
    """From now on this process sends ``words()`` whenever its parent asks where it is."""

    def answer(_number: int, _frame: object) -> None:
        with suppress(OSError):  # the parent has gone
            connection.send(words())

    if _REQUEST is not None:
        signal.signal(_REQUEST, answer)


def ask(processes: Iterable[int | None], connections: Iterable[Connection]) -> list[str]:
    """What each of these processes answers within a second; one that does not answer is left out."""
    asked = 0
    for process in processes:
        if process is not None and _REQUEST is not None:
            with suppress(ProcessLookupError):
                os.kill(process, _REQUEST)
                asked += 1
    until = time.monotonic() + ANSWER_SECONDS
    answers: list[str] = []
    waiting = list(connections)
    while len(answers) < asked and waiting:
        ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            if isinstance(connection, Connection):
                try:
                    answers.append(str(connection.recv()))
                except (EOFError, OSError):
                    waiting.remove(connection)
    return [answer for answer in answers if answer]
