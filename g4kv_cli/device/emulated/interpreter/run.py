"""One launch in execution: what all its chunks share, and the checks at its end."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.global_races import GlobalLog
from ..checks.order import Order
from ..checks.owned_reads import OwnedReads
from ..checks.undefined import FILLS, Fill
from ..faults import DeadlinePassed, EmulatorError, LaunchInterrupted, Standing
from ..memory.access import SIGNED, UNSIGNED, fresh_hints
from ..ptx.flow import BRANCHES
from ..ptx.ordering import learns
from ..ptx.sites import Site
from ..residency import chunk_blocks
from ..state.groups import Group
from ..state.heap import Heap
from ..state.lanes import WARP, KernelState, LaneSet
from ..state.memory import GLOBAL_BASE, DeviceMemory, Views
from ..state.reports import FaultCollector, LaunchStopped
from ..state.store_log import NO_RANGES, Ranges, StoreLog, empty_ranges, gaps
from ..state.undo import UndoLog
from .chunk import Chunk
from .translate import CompiledBlock

DEFAULT_BLOCK_STEPS = 20_000_000
"""Basic-block executions after which the watchdog ends a launch that sets no instruction limit."""


_TICKS_A_STEP = 64
"""Clock ticks, and nanoseconds of %globaltimer, that a basic block or a reading counts for."""
_IDLE_TURNS = 100_000
"""Turns of loops that wait, in which nothing else can run and nothing changes memory, before they look endless."""
_MAX_CLOCKED_LOCATIONS = 1 << 20
"""Shared locations of the blocks executed together where each has clocks (see clock_races.py)."""


class Run:
    """State of one launch."""

    def __init__(
        self,
        memory: DeviceMemory,
        kernel: KernelState,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: bytes,
        dynamic_shared_bytes: int,
        symbols: list[npt.NDArray[np.uint64]],
        max_instructions: int | None,
        deadline: float | None = None,
        owned_reads: Sequence[OwnedReads] = (),
        resident_blocks: int = 1,
        fill: Fill = FILLS[0],
        cluster: tuple[int, int, int] = (1, 1, 1),
        heap: Heap | None = None,
        stale_sites: frozenset[int] = frozenset(),
        in_front: Ranges = NO_RANGES,
    ) -> None:
        self.stale_sites = stale_sites
        self.memory = memory
        self.heap = Heap(memory) if heap is None else heap
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.resident_blocks = resident_blocks
        self.fill = fill
        self.undo = UndoLog(memory)
        self.trace = 0
        self.cluster = cluster
        self.cluster_blocks = cluster[0] * cluster[1] * cluster[2]
        self.cluster_size = np.array([self.cluster_blocks], np.uint32)
        self.cluster_extents = [np.array([extent], np.uint32) for extent in cluster]
        self.nclusterid = [np.array([most // one], np.uint32) for most, one in zip(grid, cluster, strict=True)]
        self.collector = FaultCollector(kernel.name)
        self.hints = fresh_hints(len(kernel.sites))
        self.stores = StoreLog()
        self.order = Order(block[0] * block[1] * block[2])
        self.accesses = GlobalLog(self.order, memory)
        waits = [site for site in kernel.sites if site.in_wait and learns(site.opcode)]
        self.waits_on_shared = any(".global" not in site.opcode for site in waits)
        self.watches_changes = bool(waits)
        learners = [site for site in kernel.sites if site.is_used and learns(site.opcode)]
        self.learns_of = {
            False: any(".shared" not in site.opcode for site in learners),
            True: any(".global" not in site.opcode for site in learners),
        }
        """Whether threads learn of others by what they find in global memory, and in shared memory (True)."""
        self.changes = 0
        self.symbols = symbols
        self.shared_bytes = kernel.shared_total(dynamic_shared_bytes)
        self.ntid = [np.array([extent], np.uint32) for extent in block]
        self.nctaid = [np.array([extent], np.uint32) for extent in grid]
        self.nwarpid = np.array([-(-block[0] * block[1] * block[2] // 32)], np.uint32)
        self.dynamic_shared = np.array([dynamic_shared_bytes], np.uint32)
        self.total_shared = np.array([self.shared_bytes], np.uint32)
        self.parameter_bytes = len(parameters)
        padded = np.zeros(-(-len(parameters) // 16) * 16 + 16, np.uint8)
        padded[: len(parameters)] = np.frombuffer(parameters, np.uint8)
        self.parameter_views = Views(padded)
        self.parameters = [self._parameter(*load) for load in kernel.parameter_loads]
        self.printed: list[str] = []
        self.thread_instructions = 0
        self.block_steps = 0
        self._ticks = 0
        self.max_instructions = max_instructions
        self.deadline = deadline
        self.owned_reads = owned_reads
        self.in_front = in_front
        self.latest: tuple[CompiledBlock, Group] | None = None

    def _parameter(self, offset: int, nbytes: int, is_signed: bool, register_bytes: int) -> npt.NDArray[Any]:
        raw = self.parameter_views.of[0][offset : offset + nbytes].view(UNSIGNED[nbytes])
        if is_signed and register_bytes > nbytes:
            return raw.view(SIGNED[nbytes]).astype(SIGNED[register_bytes]).view(UNSIGNED[register_bytes])
        return raw.astype(UNSIGNED[register_bytes])

    def count_instructions(self, block: CompiledBlock, lanes: int, group: Group) -> None:
        """Count a block's instructions, and end the launch when it has run for too long."""
        self.latest = block, group
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlinePassed(self.standing())
        self.thread_instructions += lanes * block.size
        self.block_steps += 1
        limit = self.max_instructions
        if self.block_steps <= DEFAULT_BLOCK_STEPS and (limit is None or self.thread_instructions <= limit):
            return
        words = f"more than {limit} thread instructions" if limit is not None else "more steps than any real kernel"
        site = block.site or self.kernel.sites[0]
        self.collector.add("watchdog", f"the launch ran {words}; it looks endless", site, group.lanes, 0, lanes)

    def ticks(self) -> npt.NDArray[np.uint64]:
        """A clock: later readings are larger, and a wait for a time to pass ends."""
        self._ticks = max(self._ticks, self.block_steps * _TICKS_A_STEP) + _TICKS_A_STEP
        return np.array([self._ticks], np.uint64)

    def note_addresses(self, units: npt.NDArray[np.int64]) -> None:
        """Once undefined bytes were read, all addresses are compared between the two runs."""
        if self.collector.has_undefined:
            self.trace = zlib.crc32(units.tobytes(), self.trace)

    def changed(self) -> None:
        """Memory has other bytes than before: who waits may go on."""
        self.changes += 1

    def standing(self) -> Standing:
        """The basic block that ran last, and the first lane that ran it."""
        site, block, thread = self.kernel.sites[0], (0, 0, 0), 0
        if self.latest is not None:
            compiled, group = self.latest
            lanes = group.lanes
            site = compiled.site or site
            block, thread = lanes.chunk.coordinates(int(lanes.index[0]))[0], int(lanes.thread[0])
        where = site.location
        return Standing(
            self.kernel.name,
            where.file,
            where.line or None,
            where.call_line or None,
            site.ptx_line,
            block,
            thread // WARP,
        )

    def execute(self, chunk_threads: int, blocks: range) -> bool:
        """Run these blocks; True if the launch reached its end, False if a fatal fault stopped it."""
        step = chunk_blocks(self.block[0] * self.block[1] * self.block[2], chunk_threads)
        if self.kernel.is_asynchronous:
            locations = (self.shared_bytes >> self.kernel.granule_shift) + 1
            step = max(1, min(step, _MAX_CLOCKED_LOCATIONS // locations))
        step = -(-step // self.cluster_blocks) * self.cluster_blocks
        try:
            with np.errstate(all="ignore"):
                self._run_chunks(by_cluster(np.array(blocks), self.grid, self.cluster), step)
        except LaunchStopped:
            return False
        except KeyboardInterrupt as interrupt:
            raise LaunchInterrupted(self.standing()) from interrupt
        except ValueError as error:
            raise EmulatorError(f"kernel {self.kernel.name}: {error}") from error
        return True

    def _run_chunks(self, order: npt.NDArray[np.int64], step: int) -> None:
        """Chunk by chunk; while one waits for others, as many blocks beside it as the card holds at a time."""
        live: list[Chunk] = []
        begin = turns = 0
        while live or begin < order.size:
            has_moved = False
            for chunk in list(live):
                changes = self.changes
                if chunk.proceed():
                    live.remove(chunk)
                    has_moved = True
                has_moved |= self.changes != changes
            turns = 0 if has_moved else turns + 1
            room = min(self.resident_blocks - sum(chunk.live_blocks for chunk in live), step)
            room = max(room // self.cluster_blocks, not live) * self.cluster_blocks
            if begin < order.size and room > 0 and not (has_moved and live):
                live.append(Chunk(self, order[begin : begin + room]))
                live[-1].start()
                begin += room
            elif live and not has_moved and (turns > _IDLE_TURNS or sum(chunk.spins.again() for chunk in live) == 0):
                self._report_endless(live)

    def _report_endless(self, live: list[Chunk]) -> None:
        """Everybody waits, and nothing changes: raise that as a fault that names all places."""
        places: dict[int, tuple[Site, LaneSet, int]] = {}
        for chunk in live:
            for site, lanes in chunk.spins.places():
                first = places.get(site.number, (site, lanes, 0))
                places[site.number] = (*first[:2], first[2] + lanes.count)
        others = [f"{count} at line {_line(site)}" for site, _, count in list(places.values())[1:]]
        for chunk in live:
            others.extend(chunk.barriers.places())
        site, lanes, count = next(iter(places.values()))
        words = f"{count} threads wait here for what no thread does any more"
        if site.opcode in BRANCHES:
            words = f"{count} threads go round a loop without an exit; was what it waits for to be volatile?"
        if others:
            words += f"; besides wait {', '.join(dict.fromkeys(others))}"
        self.collector.add("endless_wait", words, site, lanes, 0, count)

    def finish(
        self, must_write: Sequence[tuple[int, int]], may_collide: Sequence[tuple[int, int]], reached_end: bool
    ) -> Ranges:
        """Check the stores of the whole launch; returns the arena ranges it stored to."""
        collide = [(address - GLOBAL_BASE, address - GLOBAL_BASE + nbytes) for address, nbytes in may_collide]
        ranges = self.stores.finish()
        self.accesses.check(collide, self.collector)
        if reached_end:
            for address, nbytes in must_write:
                self._check_written(ranges, address, nbytes)
        return ranges

    def _check_written(self, ranges: Ranges, address: int, nbytes: int) -> None:
        begin = address - GLOBAL_BASE
        missing = gaps(ranges, begin, begin + nbytes) if nbytes else empty_ranges()
        if not missing.size:
            return
        first = int(missing[0, 0]) + GLOBAL_BASE
        total = int((missing[:, 1] - missing[:, 0]).sum())
        label, offset, description = self.memory.describe(first)
        self.collector.add_launch(
            "unwritten_output",
            f"{total} of {nbytes} bytes of '{label}' were not stored by the launch, the first at {description}",
            first,
            label,
            offset,
        )


def _line(site: Site) -> int:
    return site.location.line or site.ptx_line


def by_cluster(
    blocks: npt.NDArray[np.int64], grid: tuple[int, int, int], cluster: tuple[int, int, int]
) -> npt.NDArray[np.int64]:
    """Block numbers with those of a cluster side by side by rank, clusters in the order of their first. Raises
    EmulatorError where a cluster is not whole."""
    size = cluster[0] * cluster[1] * cluster[2]
    if size == 1:
        return blocks
    at = (blocks % grid[0], blocks // grid[0] % grid[1], blocks // (grid[0] * grid[1]))
    of = [place // extent for place, extent in zip(at, cluster, strict=True)]
    inside = [place % extent for place, extent in zip(at, cluster, strict=True)]
    number = of[0] + (grid[0] // cluster[0]) * (of[1] + (grid[1] // cluster[1]) * of[2])
    rank = inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2])
    _, first, position, count = np.unique(number, return_index=True, return_inverse=True, return_counts=True)
    if (count != size).any():
        raise EmulatorError("only some blocks of a cluster are to run")
    ordered: npt.NDArray[np.int64] = blocks[np.lexsort((rank, first[position]))]
    return ordered
