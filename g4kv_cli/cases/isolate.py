"""Cases in processes of their own: several at once on the emulated device, where a provider's host code runs, and after
a fault on a GPU.

A context that has faulted is lost for its process, and a crash must cost one case, not the run. A kernel on a GPU or
host code that does not end can only be ended with its process: with a time limit every case runs in a worker there.
Results come in the order of the cases.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Literal, NoReturn

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.timeout import Patience
from g4kv_cli.cases.workers import SECONDS_TO_END, WorkerPool, interrupts_ignored
from g4kv_cli.device.interface import Device
from g4kv_cli.records.run import CaseResult

WORKER_DIED = "the worker process died"
WHY_IT_DIES = "(out of memory, or a crash in the driver or in a provider's host code)"
MIN_CASES_PER_JOB = 60
"""Fewer are run in this process: a worker takes longer to start than they take to run."""
SECONDS_TO_START_AND_ANSWER = 120.0
"""A worker that ends its case in time says so; past its time and this it is taken for stuck in the driver."""


def run_cases(cases: Sequence[Case], settings: RunSettings, device: Device, jobs: int) -> Iterator[CaseResult]:
    """Run all cases; their results in order. ``device`` is open and serves this process.

    ``jobs``: worker processes on the emulated device; on a GPU traps at once, which mostly wait for a context. Workers
    that are forked are so here, before the caller has threads that would not be in them.
    """
    is_long = sum(case.weight for case in cases) >= jobs * MIN_CASES_PER_JOB
    if device.info.kind == "emulated" and settings.calls_host_code:
        return _Lanes(settings, jobs if is_long else 1).run(cases)
    if device.info.kind == "emulated" and jobs > 1 and is_long:
        started = _in_workers(cases, settings, jobs)
        next(started)
        return (result for result in started if result is not None)
    if device.info.kind == "cuda" and math.isfinite(settings.case_timeout_seconds):
        return _in_lanes(cases, settings, jobs)
    return _in_this_process(cases, settings, device, jobs)


def _in_this_process(cases: Sequence[Case], settings: RunSettings, device: Device, jobs: int) -> Iterator[CaseResult]:
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


class OneByOne:
    """Cases as somebody else's loop asks for them: on the emulated device in this process, on a GPU and with a
    provider's host code in a worker, a new one after each fault, crash or kernel that did not end."""

    def __init__(self, settings: RunSettings, kind: Literal["cuda", "emulated"]) -> None:
        self._settings = settings
        self._in_worker = kind == "cuda" or settings.calls_host_code
        self._runner: CaseRunner | None = None
        self._pool: WorkerPool | None = None

    def run(self, case: Case) -> CaseResult:
        """Run it and say how it went. Raises CompileError."""
        if not self._in_worker:
            self._runner = self._runner or CaseRunner(self._settings)
            return self._runner.run(case)
        self._pool = self._pool or WorkerPool(self._settings, 1)
        limit = self._settings.limit_seconds(case)
        try:
            patience = None if limit == math.inf else limit + SECONDS_TO_START_AND_ANSWER
            result, is_lost = self._pool.submit(case).result(patience)
        except BrokenProcessPool:
            result, is_lost = _died(self._settings, case, self._pool), True
        except TimeoutError:
            result, is_lost = self._settings.without_result(case, f"{limit:g} s are over, and it does not answer"), True
        if is_lost:
            self._end_worker()
        return result

    def close(self) -> None:
        """Close the device, or end the worker."""
        if self._runner is not None:
            self._runner.close()
        if self._pool is not None:
            self._end_worker()

    def _end_worker(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.abandon()


def _died(settings: RunSettings, case: Case, pool: WorkerPool) -> CaseResult:
    words = pool.last_words()
    if words:
        return settings.without_result(case, words)
    death, function = pool.death(), pool.host_code()
    died = f"{WORKER_DIED}{f' of {death}' if death else ''}"
    is_of_function = function and death != "SIGKILL"  # with which Linux ends what takes its memory
    why = f"in {function}: a fault of its own, or arguments that are not those it takes"
    return settings.without_result(case, f"{died} {why if is_of_function else WHY_IT_DIES}")


def _in_workers(cases: Sequence[Case], settings: RunSettings, jobs: int) -> Iterator[CaseResult | None]:
    """None once the workers are at work, and the results."""
    done = 0
    pool = WorkerPool(settings, jobs, may_fork=True)
    with interrupts_ignored():  # as the workers do from their first moment on: they inherit it
        futures: deque[Future[tuple[CaseResult, bool]]] = deque(pool.submit(case) for case in cases)
    try:
        yield None
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
    pool: WorkerPool
    until: float


class _Lanes:
    """Workers of one process each, up to ``count`` at work at a time."""

    def __init__(self, settings: RunSettings, count: int) -> None:
        self._settings, self._count = settings, count
        self._patience = Patience()
        self._idle: list[WorkerPool] = []
        self._running: dict[Future[tuple[CaseResult, bool]], _Running] = {}
        self._done: dict[int, CaseResult] = {}
        self._ending: list[BaseProcess] = []
        """Killed, and not waited for unless they pile up: a GPU takes its time to take a faulted context down."""

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
        self._await_ending(0)

    def _await_ending(self, most: int) -> None:
        """Wait until no more than that many killed workers are still there."""
        self._ending = [process for process in self._ending if process.exitcode is None]
        while len(self._ending) > most:
            self._ending.pop(0).join(SECONDS_TO_END)

    def _start(self, index: int, case: Case) -> None:
        refusal = self._patience.refusal(case.entry)
        if refusal:
            self._done[index] = self._settings.without_result(case, refusal)
            return
        self._await_ending(self._count)
        pool = self._idle.pop() if self._idle else WorkerPool(self._settings, 1)
        limit = self._settings.limit_seconds(case) + SECONDS_TO_START_AND_ANSWER
        with interrupts_ignored():
            self._running[pool.submit(case)] = _Running(index, case, pool, time.monotonic() + limit)

    def _end(self, future: Future[tuple[CaseResult, bool]]) -> None:
        """Note the result, if the case is over or given up."""
        running = self._running[future]
        case, limit = running.case, self._settings.limit_seconds(running.case)
        if future.done():
            try:
                result, is_lost = future.result()
            except BrokenProcessPool:
                result, is_lost = _died(self._settings, case, running.pool), True
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
            with interrupts_ignored():
                self._ending += running.pool.kill()
        else:
            self._idle.append(running.pool)

    def _abandon_all(self, error: BaseException) -> NoReturn:
        """End every worker and pass the error on, an interrupt with where they were."""
        where = []
        if isinstance(error, KeyboardInterrupt):
            with interrupts_ignored():
                where = [place for running in self._running.values() for place in running.pool.standing()]
        for pool in [*(running.pool for running in self._running.values()), *self._idle]:
            pool.abandon()
        if where:
            raise KeyboardInterrupt("; ".join(where)) from error
        raise error
