"""Cases in processes of their own: several at once on the emulated device, and after a fault on a GPU.

A context that has faulted is lost for its process, and a crash must cost one case, not the run. A kernel on a GPU
that does not end can only be ended with its process: with a time limit every case runs in a worker there. Results come
in the order of the cases.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.standing import answer_requests, ask
from g4kv_cli.cases.timeout import Patience
from g4kv_cli.device.interface import Device
from g4kv_cli.records.run import CaseResult

MIN_CASES_PER_JOB = 60
"""Fewer are run in this process: a worker takes longer to start than they take to run."""
SECONDS_TO_END = 5
SECONDS_TO_START_AND_ANSWER = 120.0
"""A worker that ends its case in time says so; past its time and this it is taken for stuck in the driver."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""

_runner: CaseRunner | None = None
"""The runner of a worker process."""


def run_cases(cases: Sequence[Case], settings: RunSettings, device: Device, jobs: int) -> Iterator[CaseResult]:
    """Run all cases and yield their results in order. ``device`` is open and serves this process.

    ``jobs``: worker processes on the emulated device; on a GPU traps at once, which mostly wait for a context.
    """
    if device.info.kind == "emulated" and jobs > 1 and sum(case.weight for case in cases) >= jobs * MIN_CASES_PER_JOB:
        yield from _in_workers(cases, settings, jobs)
        return
    if device.info.kind == "cuda" and math.isfinite(settings.case_timeout_seconds):
        yield from _in_lanes(cases, settings, jobs)
        return
    runner = CaseRunner(settings, device)
    try:
        for index, case in enumerate(cases):
            yield runner.run(case)
            if runner.poisoned:
                yield from _in_lanes(cases[index + 1 :], settings, jobs)
                return
    finally:
        runner.close()


def run_here(cases: Sequence[Case], settings: RunSettings, device: Device) -> Iterator[CaseResult]:
    """Run cases in this process, whatever it costs, for a debugger. On a GPU the first that faults ends it."""
    runner = CaseRunner(settings, device)
    try:
        for case in cases:
            yield runner.run(case)
            if runner.poisoned:
                return
    finally:
        runner.close()


def _in_workers(cases: Sequence[Case], settings: RunSettings, jobs: int) -> Iterator[CaseResult]:
    done = 0
    pool = _Pool(settings, jobs)
    with _interrupts_ignored():  # as the workers do from their first moment on: they inherit it
        futures: deque[Future[tuple[CaseResult, bool]]] = deque(pool.submit(case) for case in cases)
    try:
        while futures:
            result, _ = futures.popleft().result()
            done += 1
            yield result
        pool.shutdown()
        return
    except BrokenProcessPool:
        pool.shutdown()
    except BaseException as error:
        pool.abandon_for(error)
    # Which case killed the worker is unknown: run the rest alone, one worker at a time.
    yield from _in_lanes(cases[done:], settings, 1)


def _in_lanes(cases: Sequence[Case], settings: RunSettings, jobs: int) -> Iterator[CaseResult]:
    """Cases one after another in a worker, a new one after each fault, crash or kernel that did not end. Those that
    trap, and so end their worker, go side by side."""
    for traps, group in itertools.groupby(cases, key=lambda case: case.traps):
        yield from _Lanes(settings, jobs if traps else 1).run(list(group))


@dataclass(slots=True, eq=False)
class _Running:
    """A case in a worker of its own, and when it is given up."""

    index: int
    case: Case
    pool: _Pool
    until: float


class _Lanes:
    """Workers of one process each, up to ``count`` at work at a time."""

    def __init__(self, settings: RunSettings, count: int) -> None:
        self._settings, self._count = settings, count
        self._patience = Patience()
        self._idle: list[_Pool] = []
        self._running: dict[Future[tuple[CaseResult, bool]], _Running] = {}
        self._done: dict[int, CaseResult] = {}

    def run(self, cases: Sequence[Case]) -> Iterator[CaseResult]:
        """The results in order."""
        waiting = deque(enumerate(cases))
        given = 0
        try:
            while given < len(cases):
                while waiting and len(self._running) < self._count:
                    self._start(*waiting.popleft())
                if self._running:
                    soonest = min(running.until for running in self._running.values())
                    timeout = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
                    wait(self._running, timeout, FIRST_COMPLETED)
                for future in list(self._running):
                    self._end(future)
                while given in self._done:
                    yield self._done.pop(given)
                    given += 1
        except BaseException as error:
            self._abandon_all(error)
        for pool in self._idle:
            pool.shutdown()

    def _start(self, index: int, case: Case) -> None:
        refusal = self._patience.refusal(case.entry)
        if refusal:
            self._done[index] = self._settings.without_result(case, refusal)
            return
        pool = self._idle.pop() if self._idle else _Pool(self._settings, 1)
        limit = self._settings.limit_seconds(case) + SECONDS_TO_START_AND_ANSWER
        with _interrupts_ignored():
            self._running[pool.submit(case)] = _Running(index, case, pool, time.monotonic() + limit)

    def _end(self, future: Future[tuple[CaseResult, bool]]) -> None:
        """Note the result, if the case is over or given up."""
        running = self._running[future]
        case, limit = running.case, self._settings.limit_seconds(running.case)
        if future.done():
            try:
                result, is_lost = future.result()
            except BrokenProcessPool:
                reason = "the worker process died (out of memory, or a crash in the driver)"
                result, is_lost = self._settings.without_result(case, reason), True
        elif time.monotonic() >= running.until:
            reason = f"the worker process does not answer: {limit:g} s are over, and {SECONDS_TO_START_AND_ANSWER:g} s"
            result, is_lost = self._settings.without_result(case, reason), True
        else:
            return
        del self._running[future]
        self._done[running.index] = result
        if is_lost:
            if result.status == "error" or result.seconds >= limit:
                self._patience.note(case.entry)
            running.pool.abandon()
        else:
            self._idle.append(running.pool)

    def _abandon_all(self, error: BaseException) -> NoReturn:
        """End every worker and pass the error on, an interrupt with where they were."""
        where = []
        if isinstance(error, KeyboardInterrupt):
            with _interrupts_ignored():
                where = [place for running in self._running.values() for place in running.pool.standing()]
        for pool in [*(running.pool for running in self._running.values()), *self._idle]:
            pool.abandon()
        if where:
            raise KeyboardInterrupt("; ".join(where)) from error
        raise error


class _Pool:
    """Worker processes, and the pipe on which they say where they are."""

    def __init__(self, settings: RunSettings, workers: int) -> None:
        # Spawned, not forked: a CUDA context and the threads of a progress bar do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._answers, sender = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(settings, sender)
        )

    def submit(self, case: Case) -> Future[tuple[CaseResult, bool]]:
        """Queue a case: its result, and whether its worker can run no more."""
        return self._executor.submit(_run_in_worker, case)

    def standing(self) -> list[str]:
        """Where each worker is."""
        return ask(list(self._executor._processes or {}), [self._answers])

    def shutdown(self) -> None:
        """Wait for the workers to end."""
        self._executor.shutdown()

    def abandon(self) -> None:
        """End the workers where they are; a second Ctrl-C must not find this process waiting for them."""
        with _interrupts_ignored():
            workers = list((self._executor._processes or {}).values())
            self._executor.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(SECONDS_TO_END)

    def abandon_for(self, error: BaseException) -> NoReturn:
        """End the workers and pass the error on, an interrupt with where they were."""
        where: list[str] = []
        if isinstance(error, KeyboardInterrupt):
            with _interrupts_ignored():
                where = self.standing()
        self.abandon()
        if where:
            raise KeyboardInterrupt("; ".join(where)) from error
        raise error


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile (in the main thread, which alone may say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _start_worker(settings: RunSettings, answers: Connection) -> None:
    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool when the user interrupts
    _end_with_parent()
    _runner = CaseRunner(settings)
    answer_requests(answers, _runner.standing)


def _end_with_parent() -> None:
    """A parent that was terminated has no time to end its workers; Linux does it then."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_in_worker(case: Case) -> tuple[CaseResult, bool]:
    if _runner is None:
        raise RuntimeError("the worker was not started with settings")
    return _runner.run(case), _runner.poisoned
