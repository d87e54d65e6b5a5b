"""What a launch is asked for, and what came of it: common to both emulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .checks.owned_reads import OwnedReads
from .faults import Fault
from .state.lanes import KernelState
from .state.store_log import Ranges


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
