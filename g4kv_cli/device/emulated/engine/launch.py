"""Runs a launch on the engine, and can take it back."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import DeadlinePassed, LaunchInterrupted, Standing
from ..interpreter.run import by_cluster
from ..ptx.instruction import Location
from ..request import LaunchOutcome, LaunchRequest
from ..residency import chunk_blocks
from ..state.memory import GLOBAL_BASE, DeviceMemory
from ..state.store_log import Ranges, gaps, merge_ranges
from .apart import OVER, blocks_left, run_apart
from .callbacks import Caller
from .library import Library
from .order_trace import has_conflicts
from .printing import PRINT, print_to
from .program import Program
from .same_threads import reads_of_others
from .state import EngineState, agents_each
from .structures import FAULT_KINDS, MOST_AGENTS, RUN_CLOCKS_FULL, RUN_LOGS_FULL, RUN_SLICE_OVER

SLICE = 1 << 20
"""Instructions of warps between two returns to Python, where signals are handled: some 50 ms."""
FIRST_SLICE = 1 << 17
"""Those of a launch that is over before other threads have begun."""
BLOCK_STEPS = 20_000_000
"""Basic blocks that the warps of one thread block may run before it looks endless, where no deadline ends it."""
_NO_LIMIT = (1 << 63) - 1
_SEVERAL_USES = np.array([bits not in (0, 1, 2, 4) for bits in range(8)])
"""Which uses of an allocation need another look: all but reads alone, stores alone and atomics alone."""
_READ_AND_STORED = 3
GUESSES = frozenset(
    {"equal stores", "guessed race", "stores that meet", "reads and stores of one allocation", "uninitialised"}
    | {
        "atomics of several kinds",
        "shared uninitialised",
        "several spaces",
        "reads of what others store",
        "all wait",
        "copies full",
        "unsure",
        "accesses of the scope of a block",
    }
)
"""What is found that may be right after all: the interpreter decides."""
ORDERLESS = frozenset({"accesses without an order", "trace full"})
"""What that run may come to: then the interpreter decides about what was found before."""
GUESSED_RACE, BLOCK_SCOPE = "guessed race", "accesses of the scope of a block"
USED_TWICE = "reads and stores of one allocation"
SEVERAL_KINDS = "atomics of several kinds"
"""At one place, where the order shows that each by itself does not have."""
UNORDERED = frozenset({"stores that meet", USED_TWICE, "reads of what others store", GUESSED_RACE, BLOCK_SCOPE})
"""What may have an order, which another run writes down."""
_FRAME_ALIGN = 64
_MOST_RESIDENT_BYTES = 1 << 29
"""Host memory for the blocks that run together, beyond which the interpreter runs them."""


@dataclass(frozen=True)
class Detected:
    """Why a launch must be run again by the interpreter: the kind of the first thing found, in the engine's words."""

    kind: str
    site: int = -1
    block: int = -1
    warp: int = -1


class Engine:
    """The engine of a process; one launch at a time."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.state = EngineState()
        self._others: list[EngineState] = []
        self.caller = Caller()
        self.state.point("called", self.caller.places)
        self.state.launch.call = ctypes.cast(self.caller.entry, ctypes.c_void_p).value

    def exchange(self) -> None:
        """Take the last launch back; or, called again, do it once more."""
        self.library.exchange(ctypes.addressof(self.state.launch))

    def settle(self, state: EngineState) -> None:
        """Later launches begin behind all marks of a block that did not end."""
        self.library.settle(ctypes.addressof(state.launch))

    def others(self, count: int) -> list[EngineState]:
        """States for more threads."""
        self._others += [EngineState() for _ in range(count - len(self._others))]
        return self._others[:count]


class EngineRun:
    """One launch on the engine; ``watched`` are addresses of which it also sees which thread reads what, ``threads``
    those that may run it."""

    def __init__(
        self,
        engine: Engine,
        memory: DeviceMemory,
        program: Program,
        request: LaunchRequest,
        watched: tuple[int, int] | None = None,
        traced: tuple[int, int] | None = None,
        traces_shared: bool = False,
        threads: int = 1,
    ) -> None:
        self.traces_shared = traces_shared
        self.threads = threads if program.runs_apart and traced is None else 1
        self.watched = watched
        self.traced = traced
        self.engine = engine
        self.memory = memory
        self.program = program
        self.request = request
        self._states = [engine.state]
        self.printed: list[str] = []

    def execute(self) -> LaunchOutcome | Detected:
        """Run the launch. If a rule was broken, or is not known to the engine, memory is as it was before.

        Raises DeadlinePassed, and LaunchInterrupted where it meets a KeyboardInterrupt.
        """
        found = self._execute()
        if len(self._states) > 1 and isinstance(found, Detected) and not self._may_be_in_place(found):
            self.program.runs_apart &= found.kind not in UNORDERED
            self.threads = 1
            found = self._execute()
        return found

    def _may_be_in_place(self, found: Detected) -> bool:
        """Whether the launch is run again, watched, before anybody knows what is wrong with it."""
        is_first = self.watched is None and not self.program.shares
        return found.kind == USED_TWICE and is_first and self.engine.state.used_twice() is not None

    def _execute(self) -> LaunchOutcome | Detected:
        self._states = [self.engine.state]
        try:
            self._prepare(self.engine.state)
            self._run()
            found = self._judge()
        except KeyboardInterrupt as interrupt:
            raise LaunchInterrupted(self.standing()) from interrupt
        finally:
            for state in self._states:
                self.engine.settle(state)
        if isinstance(found, Detected):
            self.engine.exchange()
        return found

    def standing(self, state: EngineState | None = None) -> Standing:
        """The basic block and warp that ran last, on the caller's thread or that of a state."""
        launch, where = (state or self.engine.state).launch, self.program.stands_at
        instruction = where[launch.at_block] if 0 <= launch.at_block < len(where) else None
        location = instruction.location if instruction is not None else Location()
        x, y, z = launch.coordinates
        return Standing(
            self.program.name,
            location.file,
            location.line or None,
            location.call_line or None,
            instruction.ptx_line if instruction is not None else 0,
            (x, y, z),
            launch.at_warp,
        )

    def stored(self) -> Ranges:
        """Ranges of the arena that it has stored to."""
        return stored_ranges(self.engine.state.stores, ())[0]

    def _prepare(self, state: EngineState) -> None:
        memory, program, request = self.memory, self.program, self.request
        library, launch = self.engine.library, state.launch
        shared_bytes = request.kernel.shared_total(request.dynamic_shared_bytes)
        state.set_memory(memory, program.site_count)
        launch.base = GLOBAL_BASE
        ranks = request.cluster[0] * request.cluster[1] * request.cluster[2]
        together = program.runs_together or self.traced is not None
        residents = blocks_together(request) if together else ranks
        state.set_shared(shared_bytes, -(-request.threads // 32), program, residents, ranks)
        state.set_within(program.site_count, program.within)
        launch.together, launch.loops, launch.changes, launch.ticks = int(together), program.loops, 0, 0
        state.set_trace(program.trace_flags, self.traced, self.traces_shared)
        launch.local_bytes, launch.local_stride = program.local_bytes, -(-program.local_bytes // 16) * 16
        launch.always_guesses = int(program.learns)
        state.set_logs(self._most_logged)
        launch.watch_begin, launch.watch_end = self.watched or (0, 0)
        state.set_owned(request.owned_reads)
        state.set_in_front(request.in_front)
        parameters = state.buffers.get("parameters", len(request.parameters) + 16)
        parameters[: len(request.parameters)] = np.frombuffer(request.parameters, np.uint8)
        state.point("parameters", parameters)
        launch.parameter_bytes = len(request.parameters)
        state.point("blocks", program.blocks)
        launch.block_count, launch.entry = len(program.blocks), program.entry
        state.point("image", program.image(request.parameters, request.symbols))
        launch.image_bytes, launch.frame_bytes = program.image_bytes, program.frame_bytes
        launch.copies_each, launch.clear_frames = program.copies_each, int(program.clears_frames)
        launch.grid[:], launch.extent[:], launch.cluster[:] = request.grid, request.block, request.cluster
        launch.threads = request.threads
        launch.dynamic_shared_bytes, launch.total_shared_bytes = request.dynamic_shared_bytes, shared_bytes
        order = request.order
        launch.next, launch.last, launch.step = order.start, order.start + len(order) * order.step, order.step
        launch.order = launch.cursor = None
        if ranks > 1:
            in_clusters = by_cluster(np.array(order), request.grid, request.cluster)
            kept = state.buffers.get("order", in_clusters.size, np.int64)
            kept[: in_clusters.size] = in_clusters
            state.point("order", kept)
            launch.next, launch.last, launch.step = 0, in_clusters.size, ranks
        state.point("pool", program.pool)
        limit = request.max_instructions
        launch.instructions, launch.instruction_limit = 0, _NO_LIMIT if limit is None else limit
        launch.step_limit, launch.slice = BLOCK_STEPS if request.deadline is None else _NO_LIMIT, SLICE
        launch.is_running = launch.stop = launch.at_warp = launch.at_block = 0
        address = ctypes.addressof(launch)
        scratch = state.buffers.get("scratch", library.scratch_bytes(address) + _FRAME_ALIGN)
        begin = scratch.ctypes.data
        library.begin(address, begin + -begin % _FRAME_ALIGN)

    @property
    def _most_logged(self) -> int:
        return self.program.most_stores if self.watched is None else self.program.most_accesses

    def _run(self) -> None:
        state = self.engine.state
        prints = print_to(self.printed, self.memory, self.program.local_bytes)
        calls = self.program.calls
        self.engine.caller.calls = [replace(call, function=prints) if call is PRINT else call for call in calls]
        if self.threads > 1:
            state.launch.slice = FIRST_SLICE
        while (why := self._advance(state)) not in OVER:
            if self.threads > 1 and why == RUN_SLICE_OVER:
                state.launch.slice = SLICE
                self._run_apart(state)
                return

    def _run_apart(self, state: EngineState) -> None:
        others = self.engine.others(min(self.threads - 1, blocks_left(state)))
        for other in others:
            self._prepare(other)
        self._states += others
        try:
            run_apart(state, others, self._advance)
        except DeadlinePassed as passed:  # of the blocks that have not ended the first, as in order
            sign = 1 if state.launch.step > 0 else -1
            unfinished = [each for each in self._states if each.launch.is_running]
            first = min(unfinished, key=lambda each: sign * each.launch.next, default=state)
            raise DeadlinePassed(self.standing(first)) from passed
        for other in others:
            state.absorb(other)

    def _advance(self, state: EngineState) -> int:
        """Run for a while: why it stopped."""
        caller, deadline = self.engine.caller, self.request.deadline
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlinePassed(self.standing(state))
        with np.errstate(all="ignore"):
            why: int = self.engine.library.run(ctypes.addressof(state.launch))  # Python handles signals between two
        caller.settle()
        if why == RUN_LOGS_FULL:
            state.grow_logs(self._most_logged)
        elif why == RUN_CLOCKS_FULL:
            state.forget_marks()
        return why

    def _judge(self) -> LaunchOutcome | Detected:
        state, request = self.engine.state, self.request
        for each in self._states:
            if each.launch.fault_count:
                first = each.faults[0]
                return Detected(FAULT_KINDS[first["kind"]], int(first["site"]), int(first["block"]), int(first["warp"]))
        is_in_order = len(self._states) == 1
        cluster_blocks = request.cluster[0] * request.cluster[1] * request.cluster[2]
        stores = state.stores
        ranges, has_conflict = stored_ranges(stores, request.may_collide if is_in_order else ())
        instructions = state.launch.instructions
        if instructions > state.launch.instruction_limit:  # of all threads together
            return Detected("watchdog")
        if self.program.may_mix_atomics and meets_other_kind(stores):
            return Detected(SEVERAL_KINDS)
        if self.traced is not None:
            if has_conflicts(state.trace, self.program.sites, request, self.memory):
                return Detected("accesses without an order")
        elif has_conflict:
            return Detected("stores that meet")
        elif self.program.scope_may_end(cluster_blocks) and request.blocks > 1:
            return Detected(BLOCK_SCOPE)
        elif _SEVERAL_USES[state.used].any():
            if self.watched is None or self.watched != state.used_twice():
                return Detected(USED_TWICE)
            begin, end = (address - GLOBAL_BASE for address in self.watched)
            inside = stores[(stores["begin"] < end) & (stores["begin"] + stores["bytes"] > begin)]
            uses = state.used[_SEVERAL_USES[state.used]]
            if (uses != _READ_AND_STORED).any() or reads_of_others(state.loads, inside):
                self.program.shares = True
                return Detected("reads of what others store")
        for address, nbytes in request.must_write:
            begin = address - GLOBAL_BASE
            if nbytes and gaps(ranges, begin, begin + nbytes).size:
                return Detected("unwritten output")
        return LaunchOutcome(ranges, instructions, [], "".join(self.printed))


def blocks_together(request: LaunchRequest) -> int:
    """How many blocks run together where their order matters: those that the interpreter would."""
    step = chunk_blocks(request.threads, request.chunk_threads)
    return max(1, min(step, request.resident_blocks, len(request.order)))


def can_run(program: Program, request: LaunchRequest) -> bool:
    """Whether the engine can run a launch: in the interpreter's order, where that matters, and with a name for each
    agent of a cluster."""
    if program.runs_together:
        return can_run_together(program, request)
    x, y, z = request.cluster
    return x * y * z * agents_each(program, -(-request.threads // 32)) <= MOST_AGENTS


def can_run_together(program: Program, request: LaunchRequest) -> bool:
    """Whether it can run all blocks together that the interpreter would."""
    residents, warps = blocks_together(request), -(-request.threads // 32)
    if (program.loops and residents < len(request.order)) or request.cluster != (1, 1, 1):
        return False
    shared = request.kernel.shared_total(request.dynamic_shared_bytes)
    marks = 4 * (2 + 2 * -(-warps // 8) * 8) * (1 + (16 >> program.granule_shift)) // 16
    each = warps * (program.frame_bytes + 64 * program.local_bytes) + shared * (2 + marks)
    return residents * each <= _MOST_RESIDENT_BYTES


def stored_ranges(stores: npt.NDArray[Any], may_collide: Sequence[tuple[int, int]]) -> tuple[Ranges, bool]:
    """(ranges stored to, whether two stores met at one place that may not collide).

    A run of stores that overlaps another has, in the order of their begins, a neighbour that reaches over its begin.
    """
    if not stores.size:
        return np.empty((0, 2), np.int64), False
    by_atomics = stores["each"] == 0
    if by_atomics.any():  # they meet nothing else, or the allocation is looked at again
        plain, has_conflict = stored_ranges(stores[~by_atomics], may_collide)
        changed = stores[by_atomics]
        begins = np.concatenate([plain[:, 0], changed["begin"]])
        ends = np.concatenate([plain[:, 1], changed["begin"] + changed["bytes"]])
        order = np.argsort(begins, kind="stable")
        return merge_ranges(begins[order], ends[order]), has_conflict
    begins = stores["begin"]
    if stores.size > 1:
        stores = stores[np.argsort(begins, kind="stable")]
        begins = stores["begin"]
    ends = begins + stores["bytes"]
    reach = np.maximum.accumulate(ends)
    clash = begins[1:] < reach[:-1]
    if clash.any():
        clash &= ~_is_by_same_threads(stores) | (reach[:-1] > ends[:-1])
        for address, nbytes in may_collide:
            begin = address - GLOBAL_BASE
            clash &= (begins[1:] < begin) | (ends[1:] > begin + nbytes)
    return merge_ranges(begins, ends), bool(clash.any())


def meets_other_kind(stores: npt.NDArray[Any]) -> bool:
    """Whether atomics of a log of stores met atomics of another operation or size at one place."""
    atomics = stores[stores["each"] == 0]
    kinds = atomics["first"].astype(np.int64) << 8 | atomics["bytes"]
    if not atomics.size or (kinds == kinds[0]).all():
        return False
    order = np.lexsort((kinds, atomics["begin"]))
    begins, kinds = atomics["begin"][order], kinds[order]
    reach = np.maximum.accumulate(begins + atomics["bytes"][order])
    return bool(((kinds[1:] != kinds[:-1]) & (begins[1:] < reach[:-1])).any())


def _is_by_same_threads(stores: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each store but the first, whether the same threads stored to the same bytes as in the one before it."""
    same = np.ones(stores.size - 1, np.bool_)
    for name in ("begin", "bytes", "block", "first", "each"):
        same &= stores[name][1:] == stores[name][:-1]
    return same


def mark_written(memory: DeviceMemory, must_write: Sequence[tuple[int, int]]) -> None:
    """Allocations of which a launch stored every byte are initialised as a whole."""
    for address, nbytes in must_write:
        allocation = memory.find(address)
        if allocation is not None and nbytes and (allocation.begin, allocation.nbytes) == (address, nbytes):
            memory.mark_whole(allocation)
