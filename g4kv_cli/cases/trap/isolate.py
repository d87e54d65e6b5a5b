"""Trap cases, each in a child process of its own with a time limit: a trap ends a CUDA context, and a kernel that
neither traps nor ends must cost one case, not the run."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from g4kv_cli.cases.reject.request import RejectBench
from g4kv_cli.cases.standing import answer_requests, ask, words_of
from g4kv_cli.cases.timeout import Patience
from g4kv_cli.cases.trap.check import run_trap
from g4kv_cli.cases.trap.table import TrapCase, trap_cases
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import CaseTimeout, G4kvError
from g4kv_cli.records.run import CaseResult, Status

SECONDS_TO_START_AND_ANSWER = 30.0
"""A child that ends its case in time says so; past its time and this it is taken for stuck in the driver."""

Outcome = tuple[Status, str]

_warm: KernelLibrary | None = None
"""In a forked child: the parent's emulated device, its kernels translated already."""


@dataclass(frozen=True, slots=True)
class TrapSettings:
    """What a child needs: picklable. ``device_spec`` is explicit (``cuda:0``, ``emulated:sm_90``)."""

    device_spec: str
    kernels_directory: Path | None
    limit_seconds: float

    @property
    def is_emulated(self) -> bool:
        """Whether children run the interpreter."""
        return self.device_spec.startswith("emulated")


@dataclass(slots=True)
class _Child:
    case: TrapCase
    process: BaseProcess
    connection: Connection
    begin: float


def run_traps(
    cases: Sequence[TrapCase], settings: TrapSettings, jobs: int, rerun: Callable[[str], str]
) -> Iterator[CaseResult]:
    """Run each case in its own process, up to ``jobs`` at once; results come as they are done."""
    global _warm
    forks = settings.is_emulated and "fork" in multiprocessing.get_all_start_methods()
    if forks and cases:
        _warm = _translated(cases, settings)
    # A CUDA context does not survive a fork; the interpreter does, and a fork spares it the start.
    context = multiprocessing.get_context("fork" if forks else "spawn")
    waiting = list(reversed(cases))
    patience = Patience()
    running: list[_Child] = []
    ending: list[BaseProcess] = []
    try:
        while waiting or running:
            # A GPU takes its time to take a faulted context down: nobody waits for that, but it is not let pile up.
            ending = [process for process in ending if process.exitcode is None]
            while waiting and len(running) + max(0, len(ending) - jobs) < jobs:
                case = waiting.pop()
                refusal = patience.refusal(case.entry)
                if refusal:
                    yield _result(case, ("error", refusal), 0.0, rerun)
                    continue
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(case.id, settings, sender), daemon=True)  # type: ignore[attr-defined]
                process.start()
                sender.close()
                running.append(_Child(case, process, receiver, time.perf_counter()))
            wait([child.connection for child in running], timeout=0.25)
            for child in list(running):
                outcome = _outcome_of(child, settings.limit_seconds)
                if outcome is not None:
                    running.remove(child)
                    child.process.kill()
                    ending.append(child.process)
                    seconds = time.perf_counter() - child.begin
                    if seconds >= settings.limit_seconds:
                        patience.note(child.case.entry)
                    yield _result(child.case, outcome, seconds, rerun)
    except KeyboardInterrupt as interrupt:
        where = ask([child.process.pid for child in running], [child.connection for child in running])
        raise KeyboardInterrupt("; ".join(where)) from interrupt
    finally:
        for child in running:
            child.process.kill()
        for process in [*ending, *(child.process for child in running)]:
            process.join()
        _warm = None


def run_here(cases: Sequence[TrapCase], settings: TrapSettings, rerun: Callable[[str], str]) -> Iterator[CaseResult]:
    """Run cases in this process, for a debugger. On a GPU only the first can be run: its context is lost then."""
    for case in cases:
        begin = time.perf_counter()
        outcome = _run_once(case, settings)
        yield _result(case, outcome, time.perf_counter() - begin, rerun)


def _translated(cases: Sequence[TrapCase], settings: TrapSettings) -> KernelLibrary:
    """A library with every kernel that the cases need, each translated by an ordinary launch."""
    library = KernelLibrary(open_device(settings.device_spec), settings.kernels_directory)
    for name, geometry in dict.fromkeys((case.entry, case.geometry) for case in cases):
        library.device.limit_time(settings.limit_seconds)
        bench = RejectBench(library, entry_named(name), geometry, library.device)
        try:
            bench.draft().call()
        except G4kvError:
            # The smoke and reject cases tell what is wrong with it; here a fresh device starts over.
            library = KernelLibrary(open_device(settings.device_spec), settings.kernels_directory)
        else:
            bench.close()
    return library


def _run_once(case: TrapCase, settings: TrapSettings) -> Outcome:
    try:
        library = _warm or KernelLibrary(open_device(settings.device_spec), settings.kernels_directory)
        library.device.limit_time(settings.limit_seconds)
        reasons = run_trap(case, library)
    except CaseTimeout as error:
        return "failed", f"hung, want a trap ({case.comment}): {error}"
    except G4kvError as error:
        return "error", str(error)
    except Exception as error:  # a child's last words; the parent would see only that it died
        return "error", f"unexpected {type(error).__name__}: {error}"
    return ("failed", "\n".join(reasons)) if reasons else ("passed", "")


def _child(case_id: str, settings: TrapSettings, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children when the user interrupts
    case = next(case for case in trap_cases() if case.id == case_id)
    answer_requests(connection, lambda: words_of(case_id, None if _warm is None else _warm.device))
    connection.send(_run_once(case, settings))
    connection.close()


def _outcome_of(child: _Child, limit_seconds: float) -> Outcome | None:
    """What a child has said, or that it died or ran past its time; None while it runs."""
    if child.connection.poll():
        try:
            outcome: Outcome = child.connection.recv()
        except EOFError:
            child.process.join()
            return "failed", f"the child process died (exit code {child.process.exitcode}) without a fault reported"
        return outcome
    if time.perf_counter() - child.begin > limit_seconds + SECONDS_TO_START_AND_ANSWER:
        return "failed", f"hung: neither a fault nor an end within {limit_seconds:g} s"
    return None


def _result(case: TrapCase, outcome: Outcome, seconds: float, rerun: Callable[[str], str]) -> CaseResult:
    status, reason = outcome
    return CaseResult(case.id, case.entry, case.geometry.name, status, seconds, reason, rerun=rerun(case.id))
