"""What a launch is asked for, and what came of it: common to both emulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .checks.owned_reads import OwnedReads
from .faults import Fault
from .state.lanes import KernelState
from .state.store_log import Ranges, empty_ranges
from .state.undo import Changes


@dataclass(frozen=True)
class LaunchRequest:
    """A launch that was checked; the fields are those of ``Machine.launch``. ``parameters`` are packed as PTX lays them
    out, ``symbols`` the addresses of the kernel's device variables."""

    kernel: KernelState
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    dynamic_shared_bytes: int
    symbols: Sequence[int]
    must_write: Sequence[tuple[int, int]]
    may_collide: Sequence[tuple[int, int]]
    reverse_blocks: bool
    chunk_threads: int
    max_instructions: int | None
    deadline: float | None
    owned_reads: Sequence[OwnedReads] = ()
    chosen: range | None = None
    resident_blocks: int = 1
    fill: int = 0
    """Which of ``FILLS`` is found where nobody wrote (checks/undefined.py)."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    in_front: Ranges = field(default_factory=empty_ranges)
    """Ranges of the arena that launches wrote which may not have ended when this one begins."""
    stale_sites: frozenset[int] = frozenset()
    """Numbers of sites whose loads find what was there before the launch."""
    keeps_changes: bool = False
    """Whether the outcome says what the launch changed, so that it can be taken back."""

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def order(self) -> range:
        """The blocks that run, in their order."""
        chosen = range(self.blocks) if self.chosen is None else self.chosen
        return chosen[::-1] if self.reverse_blocks else chosen


@dataclass(frozen=True)
class LaunchOutcome:
    """``ranges`` of the arena that the launch stored to, and the rules that it broke."""

    ranges: Ranges
    thread_instructions: int
    faults: list[Fault]
    printed: str = ""
    notes: tuple[Fault, ...] = ()
    undefined: tuple[Fault, ...] = ()
    """Reads of bytes that nobody wrote."""
    found: tuple[Fault, ...] = ()
    """Those and ``faults``, in the order found."""
    trace: int = 0
    """A digest of the addresses of all accesses since the first such read."""
    changes: Changes | None = None
    raced: tuple[Fault, ...] = ()
    """Reads beside atomics, with the sites of the reads."""
    stale_sites: frozenset[int] = frozenset()

    def ends_like(self, other: LaunchOutcome) -> bool:
        """Whether two runs went to the same places and found the same; what they stored is compared elsewhere."""
        places = [[(fault.kind, fault.ptx_line, fault.lanes) for fault in each.faults] for each in (self, other)]
        return (
            places[0] == places[1]
            and self.trace == other.trace
            and self.printed == other.printed
            and np.array_equal(self.ranges, other.ranges)
        )
