"""Worker processes that run cases, and the pipe on which they say where they are."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.standing import answer_requests, ask
from g4kv_cli.providers.host_code import MOST_BYTES, now_running, show_to
from g4kv_cli.records.run import CaseResult

THREADS_VARIABLE = "G4KV_EMULATOR_THREADS"
SECONDS_TO_END = 5
SECONDS_OVERDUE = 5.0
"""How long behind a case's time a provider's host function may still be at work before its process is ended."""
_SECONDS_BETWEEN_LOOKS = 0.5
_OVERDUE = 75
"""The exit code of a process that has ended itself for that."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""
_runner: CaseRunner | None = None
"""The runner of a worker process."""


class WorkerPool:
    """Worker processes, and the pipe on which they say where they are.

    ``may_fork``: where that is safe they begin as copies of this process, with all that it has imported. Else, and in a
    process that has threads, they are spawned: these and a CUDA context do not survive a fork, nor do macOS's own
    libraries.
    """

    def __init__(self, settings: RunSettings, workers: int, *, may_fork: bool = False) -> None:
        forks = may_fork and sys.platform == "linux" and threading.active_count() == 1
        context = multiprocessing.get_context("fork" if forks else "spawn")
        self._answers, sender = context.Pipe(duplex=False)
        self._host_code: Any = context.RawArray("c", MOST_BYTES)
        self._executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(settings, sender, self._host_code)
        )

    def submit(self, case: Case) -> Future[tuple[CaseResult, bool]]:
        """Queue a case: its result, and whether its worker can run no more."""
        return self._executor.submit(_run_in_worker, case)

    def standing(self) -> list[str]:
        """Where each worker is."""
        return ask(list(self._executor._processes or {}), [self._answers])

    def death(self) -> str:
        """What a worker died of: a signal's name or an exit code, empty if it is not known."""
        until = time.monotonic() + SECONDS_TO_END
        for worker in list((self._executor._processes or {}).values()):
            while worker.exitcode is None and time.monotonic() < until:
                time.sleep(0.01)  # the executor waits for it too, in a thread of its own
            code = worker.exitcode
            if code and code != -signal.SIGTERM:  # with which the executor ends those that are left
                return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ""

    def last_words(self) -> str:
        """What a worker said before it ended itself; empty if it said nothing."""
        with suppress(EOFError, OSError):
            if self._answers.poll():
                return str(self._answers.recv())
        return ""

    def host_code(self) -> str:
        """The host function of a provider in which its one worker is, or was when it died; empty for none."""
        return bytes(self._host_code.value).decode(errors="replace")

    def shutdown(self) -> None:
        """Wait for the workers to end."""
        self._executor.shutdown()

    def abandon(self) -> None:
        """End the workers where they are; a second Ctrl-C must not find this process waiting for them."""
        with interrupts_ignored():
            for worker in self.kill():
                worker.join(SECONDS_TO_END)

    def kill(self) -> list[BaseProcess]:
        """Kill the workers; they are given back, for they may take their time to end."""
        workers: list[BaseProcess] = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        return workers

    def abandon_for(self, error: BaseException) -> NoReturn:
        """End the workers and pass the error on, an interrupt with where they were."""
        where: list[str] = []
        if isinstance(error, KeyboardInterrupt):
            with interrupts_ignored():
                where = self.standing()
        self.abandon()
        if where:
            raise KeyboardInterrupt("; ".join(where)) from error
        raise error


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile (in the main thread, which alone may say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _start_worker(settings: RunSettings, answers: Connection, host_code: Any) -> None:
    global _runner
    show_to(host_code)
    os.environ.setdefault(THREADS_VARIABLE, "1")  # the other cores have workers of their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool when the user interrupts
    _end_with_parent()
    if settings.calls_host_code:
        os.dup2(2, 1)  # what that prints is no part of the run's output
    _runner = CaseRunner(settings)
    answer_requests(answers, _runner.standing)
    threading.Thread(target=_watch, args=(_runner, answers), daemon=True).start()


def _watch(runner: CaseRunner, answers: Connection) -> None:
    """End this process where a provider's host function is past its case's time: nothing else ends it."""
    while True:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        words, limit = now_running(), runner.time_limit
        if words and limit is not None and time.monotonic() > limit.deadline + SECONDS_OVERDUE:
            with suppress(OSError):
                answers.send(f"not finished after {limit.seconds:g} s: {words} does not end")
            os._exit(_OVERDUE)


def _end_with_parent() -> None:
    """A parent that was terminated has no time to end its workers; Linux does it then."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_in_worker(case: Case) -> tuple[CaseResult, bool]:
    if _runner is None:
        raise RuntimeError("the worker was not started with settings")
    return _runner.run(case), _runner.poisoned
