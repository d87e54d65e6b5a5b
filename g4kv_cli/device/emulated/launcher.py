"""Decides which emulator runs a launch, and compares the two where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from .checks.undefined import FILLS, differing
from .engine.launch import (
    GUESSED_RACE,
    GUESSES,
    ORDERLESS,
    SEVERAL_KINDS,
    UNORDERED,
    USED_TWICE,
    Detected,
    Engine,
    EngineRun,
    can_run,
    can_run_together,
    mark_written,
)
from .engine.library import library, missing_reason
from .engine.program import Program
from .faults import EmulatorError, Fault, Standing
from .interpreter.chunk import unravel
from .interpreter.run import Run
from .mode import Mode, emulator_mode, emulator_threads
from .request import LaunchOutcome, LaunchRequest
from .state.heap import Heap, Mark
from .state.lanes import WARP
from .state.memory import GLOBAL_BASE, DeviceMemory
from .state.store_log import merge_ranges
from .state.undo import PAGE_BYTES, Changes


class EmulatorsDiffer(EmulatorError):
    """Engine and interpreter do not agree about a launch: a defect of one of them."""


@dataclass
class LaunchCounts:
    """How many launches of a machine ran where. ``replayed``: found faulty by the engine and run again by the
    interpreter, by what the engine found; ``cleared``: those of them in which the interpreter found nothing."""

    native: int = 0
    interpreted: int = 0
    compared: int = 0
    replayed: dict[str, int] = field(default_factory=dict)
    cleared: int = 0


def emulator_words() -> str:
    """How launches run, where that is not the usual way, the engine alone. Raises EmulatorError (see mode.py)."""
    mode = emulator_mode()
    emulator_threads()
    if mode is Mode.INTERPRETER:
        return "interpreted"
    if library() is None:
        return f"interpreted, for there is no native engine: {missing_reason()}"
    return "engine and interpreter compared" if mode is Mode.BOTH else ""


@cache
def _engine() -> Engine | None:
    found = library()
    return Engine(found) if found is not None else None


class Launcher:
    """Runs the launches of one device memory."""

    def __init__(self, memory: DeviceMemory, mode: Mode, threads: int = 1) -> None:
        self.counts = LaunchCounts()
        self._memory = memory
        self._heap = Heap(memory)
        self._mode = mode
        self._threads = threads
        self._active: Run | EngineRun | None = None

    def standing(self) -> Standing | None:
        """Where the launch in progress stands, for a signal handler; None where there is none."""
        return None if self._active is None else self._active.standing()

    def run(self, request: LaunchRequest) -> LaunchOutcome:
        """Run a launch. Raises DeadlinePassed, LaunchInterrupted and EmulatorsDiffer."""
        try:
            return self._run(request)
        finally:
            self._active = None

    def _run(self, request: LaunchRequest) -> LaunchOutcome:
        counts = self.counts
        engine = _engine() if self._mode is not Mode.INTERPRETER else None
        program: Program | None = request.kernel.program if engine is not None else None
        warps = request.blocks * -(-request.threads // WARP)
        if program is not None and program.reads_clock and self._mode is Mode.BOTH:
            program = None  # the two have clocks of their own
        if engine is None or program is None or not program.pays(warps) or not can_run(program, request):
            counts.interpreted += 1
            return self._interpret(request)
        self._active = run = EngineRun(engine, self._memory, program, request, threads=self._threads)
        found = run.execute()
        if isinstance(found, Detected) and found.kind == SEVERAL_KINDS:
            program.mixes_atomics = True
            return self._run(request)
        if isinstance(found, Detected) and found.kind == USED_TWICE and not program.shares:
            watched = engine.state.used_twice()
            if watched is not None:  # each thread its own, perhaps: kernels work in place
                self._active = run = EngineRun(engine, self._memory, program, request, watched, threads=self._threads)
                found = run.execute()
        traced = None
        if isinstance(found, Detected) and found.kind in UNORDERED and not program.writes_too_much:
            traced = engine.state.changed() or (0, 0)
        if traced is not None and not program.is_asynchronous and can_run_together(program, request):
            is_shared = isinstance(found, Detected) and found.kind == GUESSED_RACE
            self._active = run = EngineRun(engine, self._memory, program, request, None, traced, is_shared)
            again = run.execute()
            program.writes_too_much |= isinstance(again, Detected) and again.kind == "trace full"
            if not isinstance(again, Detected) or again.kind not in ORDERLESS:
                found = again
        if isinstance(found, Detected):
            if found.kind == "watchdog" and request.max_instructions is None:
                return self._endless(engine, run)
            counts.replayed[found.kind] = counts.replayed.get(found.kind, 0) + 1
            outcome = self._interpret(request)
            if not outcome.faults:
                counts.cleared += 1
                if self._mode is Mode.BOTH and found.kind not in GUESSES:
                    raise _differ(request, f"the engine found '{found.kind}', the interpreter nothing")
            return outcome
        if self._mode is Mode.BOTH:
            counts.compared += 1
            found = self._compared(engine, request, found)
        else:
            counts.native += 1
            mark_written(self._memory, request.must_write)
        engine.state.release_logs()
        return found

    def _endless(self, engine: Engine, run: EngineRun) -> LaunchOutcome:
        """What the engine saw of a launch that looks endless: the interpreter would take hours to come as far."""
        engine.exchange()  # what it stored stays, as after any fatal fault
        self.counts.native += 1
        at = run.standing()
        thread = at.warp * WARP
        fault = Fault(
            "watchdog",
            "the launch ran more steps than any real kernel; it looks endless",
            at.kernel,
            at.source_file,
            at.source_line,
            call_line=at.call_line,
            ptx_line=at.ptx_line,
            block=at.block,
            thread=unravel(thread, run.request.block),
            lanes=WARP,
        )
        outcome = LaunchOutcome(run.stored(), engine.state.launch.instructions, [fault], "".join(run.printed))
        engine.state.release_logs()
        return outcome

    def _interpret(self, request: LaunchRequest) -> LaunchOutcome:
        """What the interpreter makes of a launch; run four times if it reads bytes that nobody wrote."""
        memory, heap = self._memory, self._heap.mark()
        first = self._interpret_once(request)
        if first.raced:
            first = self._judge_raced(request, first, heap)
        if not first.undefined:
            if not first.faults:
                mark_written(memory, request.must_write)
            return first
        if any(fault.is_fatal for fault in first.faults):
            return replace(first, faults=list(first.found))  # nobody knows what would have come of them
        one = _changes(first)
        one.exchange(memory)  # memory is as before
        begins = [(address - GLOBAL_BASE, address - GLOBAL_BASE + nbytes) for address, nbytes in request.must_write]
        is_alike, copied = True, np.zeros(0, np.int64)
        for fill in range(1, len(FILLS)):
            self._heap.rewind(heap)
            again = self._interpret_once(replace(request, fill=fill, keeps_changes=True))
            other = _changes(again)
            other.exchange(memory)
            differs, found = differing(memory, one, other, first.ranges, begins, fill)
            copied = found if fill == 1 else copied
            is_alike = not differs and first.ends_like(again) and bool(np.isin(found, copied).all())
            if not is_alike:
                break
        one.exchange(memory)
        if not is_alike:
            return replace(first, faults=list(first.found))
        memory.state.of[0][copied] = 0
        notes = [replace(each, kind="unused_undefined", message=_UNUSED + each.message) for each in first.undefined]
        return replace(first, notes=(*first.notes, *notes))

    def _judge_raced(self, request: LaunchRequest, first: LaunchOutcome, heap: Mark) -> LaunchOutcome:
        """The launch again, in which the reads beside atomics find what was there before it, as they might; and both
        ways block by block. Where each time the same comes of it, their moment does not matter."""
        raced = [replace(each, kind="global_race") for each in first.raced]
        if first.undefined or any(fault.is_fatal for fault in first.faults):
            return replace(first, faults=[*first.faults, *raced], found=(*first.found, *raced))
        most = _LONGER * first.thread_instructions + request.threads * request.blocks
        stale = replace(request, stale_sites=first.stale_sites, max_instructions=most, keeps_changes=True)
        kept, has_allocated = _changes(first), self._heap.mark() != heap
        kept.exchange(self._memory)  # memory is as before
        self._heap.rewind(heap)
        is_harmless = self._ends_alike(stale, first, kept, heap)
        if is_harmless and request.blocks > 1:
            one_by_one = replace(request, chunk_threads=1, keeps_changes=True)
            apart = self._tried(one_by_one, heap)
            again = replace(stale, chunk_threads=1)
            is_harmless = not apart.faults and self._ends_alike(again, apart, _changes(apart), heap)
        if has_allocated:
            self._interpret_once(request)  # as before, with what it takes of the heap
        else:
            kept.exchange(self._memory)
        if not is_harmless:
            return replace(first, faults=[*first.faults, *raced])
        notes = [replace(each, kind="harmless_race", message=_MOMENT + each.message) for each in first.raced]
        return replace(first, notes=(*first.notes, *notes))

    def _ends_alike(self, request: LaunchRequest, other: LaunchOutcome, changes: Changes, heap: Mark) -> bool:
        """Whether the same comes of a launch as of another, which left these changes; memory is as before it."""
        found = self._tried(request, heap)
        both = np.concatenate([found.ranges, other.ranges])
        ranges = merge_ranges(*both[np.argsort(both[:, 0], kind="stable")].T)
        differs, _ = differing(self._memory, _changes(found), changes, ranges, [(0, self._memory.used_bytes)])
        return not differs and not found.faults and found.printed == other.printed

    def _tried(self, request: LaunchRequest, heap: Mark) -> LaunchOutcome:
        """What comes of a launch, which is taken back."""
        found = self._interpret_once(request)
        if found.changes is not None:
            found.changes.exchange(self._memory)
            self._heap.rewind(heap)
        return found

    def _interpret_once(self, request: LaunchRequest) -> LaunchOutcome:
        self._active = run = Run(
            self._memory,
            request.kernel,
            request.grid,
            request.block,
            request.parameters,
            request.dynamic_shared_bytes,
            [np.array([address], np.uint64) for address in request.symbols],
            request.max_instructions,
            request.deadline,
            request.owned_reads,
            request.resident_blocks,
            FILLS[request.fill],
            request.cluster,
            self._heap,
            request.stale_sites,
            request.in_front,
        )
        reached_end = run.execute(request.chunk_threads, request.order)
        ranges = run.finish(request.must_write, request.may_collide, reached_end)
        collector, printed = run.collector, "".join(run.printed)
        return LaunchOutcome(
            ranges,
            run.thread_instructions,
            collector.faults,
            printed,
            tuple(collector.notes),
            tuple(collector.undefined_reads),
            tuple(collector.found),
            run.trace,
            run.undo.changes() if collector.has_undefined or collector.stale_sites or request.keeps_changes else None,
            tuple(collector.raced_reads),
            collector.stale_sites,
        )

    def _compared(self, engine: Engine, request: LaunchRequest, native: LaunchOutcome) -> LaunchOutcome:
        """The interpreter's outcome of the same launch, if all that was stored and counted is equal."""
        memory = self._memory
        engine.exchange()  # memory is as before; the saved pages hold what the engine made of it
        outcome = self._interpret(request)
        if outcome.faults:
            raise _differ(request, f"the interpreter found {outcome.faults[0]}, the engine nothing")
        if outcome.thread_instructions != native.thread_instructions:
            counted = f"{native.thread_instructions} and {outcome.thread_instructions}"
            raise _differ(request, f"{counted} thread instructions (engine, interpreter)")
        if outcome.printed != native.printed:
            raise _differ(request, "other texts were printed")
        if not np.array_equal(outcome.ranges, native.ranges):
            raise _differ(request, "other bytes were stored to")
        pages, saved = engine.state.saved_pages()
        for number, (data, state) in zip(pages.tolist(), saved, strict=True):
            begin = number * PAGE_BYTES
            part = slice(begin, begin + PAGE_BYTES)
            _compare(memory, request, begin, data != memory.data.of[0][part], "byte")
            # Where an allocation is initialised as a whole nobody looks at its state bytes.
            wrong = state != memory.state.of[0][part]
            if wrong.any():
                addresses = np.arange(begin, begin + PAGE_BYTES, dtype=np.uint64) + np.uint64(GLOBAL_BASE)
                _compare(memory, request, begin, wrong & (memory.classify(addresses, 1) != 3), "initialisation")
        return outcome


_UNUSED = "nothing depends on a "
_MOMENT = "nothing depends on the moment of a read: "
_LONGER = 4
"""Times the instructions of a launch that it may take where reads find what is older."""


def _changes(outcome: LaunchOutcome) -> Changes:
    if outcome.changes is None:
        raise AssertionError("a launch that may be run again keeps what it changed")
    return outcome.changes


def _differ(request: LaunchRequest, words: str) -> EmulatorsDiffer:
    shape = f"grid {request.grid}, block {request.block}"
    return EmulatorsDiffer(f"the two emulators differ about {request.kernel.name} ({shape}): {words}")


def _compare(memory: DeviceMemory, request: LaunchRequest, begin: int, wrong: npt.NDArray[np.bool_], name: str) -> None:
    """Raise EmulatorsDiffer if any of the bytes of the arena from ``begin`` is wrong."""
    if wrong.any():
        _, _, where = memory.describe(GLOBAL_BASE + begin + int(np.flatnonzero(wrong)[0]))
        raise _differ(request, f"the {name} at {where}")
