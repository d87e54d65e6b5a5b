"""Cases in processes of their own: several at once on the emulated device, and after a fault on a GPU.

A context that has faulted is lost for its process, and a crash must cost one case, not the run. A kernel on a GPU
that does not end can only be ended with its process: with a time limit every case runs in a worker there. Results come
in the order of the cases.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from g4kv_cli.cases.any_case import SmokeCase
from g4kv_cli.cases.e2e.any_case import is_end_to_end
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.standing import answer_requests, ask
from g4kv_cli.cases.timeout import Patience
from g4kv_cli.device.interface import Device
from g4kv_cli.records.run import CaseResult

MIN_CASES_PER_JOB = 60
"""Fewer are run in this process: a worker takes longer to start than they take to run."""
END_TO_END_WEIGHT = MIN_CASES_PER_JOB
"""An end-to-end case takes as long as that many others."""

SECONDS_TO_END = 5
SECONDS_TO_START_AND_ANSWER = 120.0
"""A worker that ends its case in time says so; past its time and this it is taken for stuck in the driver."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""

_runner: CaseRunner | None = None
"""The runner of a worker process."""


def run_cases(cases: Sequence[SmokeCase], settings: RunSettings, device: Device, jobs: int) -> Iterator[CaseResult]:
    """Run all cases and yield their results in order. ``device`` is open and serves this process."""
    if device.info.kind == "emulated" and jobs > 1 and _weight(cases) >= jobs * MIN_CASES_PER_JOB:
        yield from _in_workers(cases, settings, jobs)
        return
    if device.info.kind == "cuda" and math.isfinite(settings.case_timeout_seconds):
        yield from _one_worker_each_fault(cases, settings)
        return
    runner = CaseRunner(settings, device)
    try:
        for index, case in enumerate(cases):
            yield runner.run(case)
            if runner.poisoned:
                yield from _one_worker_each_fault(cases[index + 1 :], settings)
                return
    finally:
        runner.close()


def _weight(cases: Sequence[SmokeCase]) -> int:
    return sum(END_TO_END_WEIGHT if is_end_to_end(case.id) else 1 for case in cases)


def _in_workers(cases: Sequence[SmokeCase], settings: RunSettings, jobs: int) -> Iterator[CaseResult]:
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
    yield from _one_worker_each_fault(cases[done:], settings)


def _one_worker_each_fault(cases: Sequence[SmokeCase], settings: RunSettings) -> Iterator[CaseResult]:
    """One worker process; a new one after each fault, crash or kernel that did not end."""
    pool: _Pool | None = None
    patience = Patience()
    try:
        for case in cases:
            refusal = patience.refusal(case.entry)
            if refusal:
                yield settings.without_result(case, refusal)
                continue
            pool = pool or _Pool(settings, 1)
            limit = settings.limit_seconds(case)
            longest = limit + SECONDS_TO_START_AND_ANSWER if math.isfinite(limit) else None
            try:
                with _interrupts_ignored():
                    future = pool.submit(case)
                result, is_lost = future.result(longest)
            except BrokenProcessPool:
                reason = "the worker process died (out of memory, or a crash in the driver)"
                result, is_lost = settings.without_result(case, reason), True
            except FutureTimeout:
                reason = (
                    f"the worker process does not answer: {limit:g} s are over, and {SECONDS_TO_START_AND_ANSWER:g} s"
                )
                result, is_lost = settings.without_result(case, reason), True
            yield result
            if is_lost:
                if result.status == "error":
                    patience.note(case.entry)
                pool.abandon()
                pool = None
    except BaseException as error:
        if pool is None:
            raise
        pool.abandon_for(error)
    if pool is not None:
        pool.shutdown()


class _Pool:
    """Worker processes, and the pipe on which they say where they are."""

    def __init__(self, settings: RunSettings, workers: int) -> None:
        # Spawned, not forked: a CUDA context and the threads of a progress bar do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._answers, sender = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(settings, sender)
        )

    def submit(self, case: SmokeCase) -> Future[tuple[CaseResult, bool]]:
        """Queue a case: its result, and whether its worker can run no more."""
        return self._executor.submit(_run_in_worker, case)

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
                where = ask(list(self._executor._processes or {}), [self._answers])
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


def _run_in_worker(case: SmokeCase) -> tuple[CaseResult, bool]:
    if _runner is None:
        raise RuntimeError("the worker was not started with settings")
    return _runner.run(case), _runner.poisoned
