"""One launch in execution: what all its chunks share, and the checks at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.owned_reads import OwnedReads
from ..faults import DeadlinePassed, EmulatorError, LaunchInterrupted, Standing
from ..memory.access import SIGNED, UNSIGNED, fresh_hints
from ..state.groups import Group
from ..state.lanes import WARP, KernelState
from ..state.memory import GLOBAL_BASE, DeviceMemory, Views
from ..state.reports import FaultCollector, LaunchStopped
from ..state.store_log import Ranges, StoreLog, empty_ranges, gaps
from .chunk import Chunk
from .translate import CompiledBlock

DEFAULT_BLOCK_STEPS = 20_000_000
"""Basic-block executions after which the watchdog ends a launch that sets no instruction limit."""


_TICKS_A_STEP = 64
"""Clock ticks, and nanoseconds of %globaltimer, that a basic block or a reading counts for."""
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
    ) -> None:
        self.memory = memory
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.collector = FaultCollector(kernel.name)
        self.hints = fresh_hints(len(kernel.sites))
        self.stores = StoreLog()
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
        threads = self.block[0] * self.block[1] * self.block[2]
        step = max(1, chunk_threads // (-(-threads // 32) * 32))
        if self.kernel.is_asynchronous:
            locations = (self.shared_bytes >> self.kernel.granule_shift) + 1
            step = max(1, min(step, _MAX_CLOCKED_LOCATIONS // locations))
        order = np.array(blocks)
        try:
            with np.errstate(all="ignore"):
                for start in range(0, len(order), step):
                    Chunk(self, order[start : start + step]).execute()
        except LaunchStopped:
            return False
        except KeyboardInterrupt as interrupt:
            raise LaunchInterrupted(self.standing()) from interrupt
        except ValueError as error:
            raise EmulatorError(f"kernel {self.kernel.name}: {error}") from error
        return True

    def finish(
        self, must_write: Sequence[tuple[int, int]], may_collide: Sequence[tuple[int, int]], reached_end: bool
    ) -> Ranges:
        """Check the stores of the whole launch; returns the arena ranges it stored to."""
        collide = [(address - GLOBAL_BASE, address - GLOBAL_BASE + nbytes) for address, nbytes in may_collide]
        ranges, conflicts = self.stores.finish(collide)
        for conflict in conflicts:
            address = conflict.arena_offset + GLOBAL_BASE
            label, offset, description = self.memory.describe(address)
            other = _coordinates(conflict.other_block, self.grid)
            lanes = conflict.entry.lanes
            self.collector.add(
                "block_write_conflict",
                f"block {other} stored to the same location: {description}",
                conflict.entry.site,
                lanes,
                conflict.lane,
                conflict.count,
                address,
                label,
                offset,
            )
        if reached_end:
            for address, nbytes in must_write:
                self._check_written(ranges, address, nbytes)
        return ranges

    def _check_written(self, ranges: Ranges, address: int, nbytes: int) -> None:
        begin = address - GLOBAL_BASE
        missing = gaps(ranges, begin, begin + nbytes) if nbytes else empty_ranges()
        if not missing.size:
            allocation = self.memory.find(address)
            if allocation is not None and nbytes and (allocation.begin, allocation.nbytes) == (address, nbytes):
                self.memory.mark_whole(allocation)
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


def _coordinates(number: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    return number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
