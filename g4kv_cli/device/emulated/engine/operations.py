"""What a kernel is lowered to: operations of handlers on slots, in basic blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..ptx.instruction import Instruction, Register
from ..ptx.origins import Extent
from ..ptx.sites import Site
from .callbacks import Call

SLOT_BYTES = {"b32": 128, "b64": 256, "pred": 4}
"""Bytes of a slot in the frame: a value for each of 32 lanes, or one bit."""

SLOT_KIND = {"b16": "b32", "b32": "b32", "b64": "b64", "pred": "pred"}
"""Where a register of each kind lies."""


class NotLowered(Exception):
    """The engine does not know the kernel completely; each of ``args`` names something that is missing."""


class Slot(NamedTuple):
    """A place in the frame. ``key`` is a Register, a Constant, a Parameter, a Variable or a number of its own."""

    kind: str
    key: Hashable


@dataclass(frozen=True)
class Constant:
    """One value in all lanes."""

    bits: int
    kind: str


@dataclass(frozen=True)
class Parameter:
    """Bytes of a kernel parameter, extended to a slot."""

    begin: int
    nbytes: int
    is_signed: bool
    kind: str


@dataclass(frozen=True)
class Variable:
    """The address of a module's variable, plus an offset; ``number`` counts the kernel's device variables."""

    number: int
    offset: int


@dataclass
class Operation:
    """One call of a handler; ``outs`` are the indices of the fields that it writes for the lanes that execute it, those
    of whole warps left aside.

    ``is_guarded``: only some of the lanes here execute it, and the others keep what they have.
    """

    handler: str
    fields: list[int | Slot]
    outs: tuple[int, ...] = (0,)
    is_guarded: bool = False


@dataclass
class LoweredBlock:
    """One basic block: its operations and how it ends (see ptx/flow.py). ``barrier`` is its number and
    ``threads`` how many it counts (0: all); where lanes of a warp meet, the members' mask and whether it is a
    bar.warp.sync; for a phase ``threads`` is the parity and ``address`` (slot, whether it has 64 bits, offset) that of
    its mbarrier. ``look``: the registers that live here, if a loop begins that may wait for other threads.
    ``stands_at``: the instruction that names the block to a reader."""

    operations: list[Operation]
    end: str
    size: int
    successors: tuple[int, ...]
    guard: Slot | None = None
    site: int = -1
    barrier: int | Slot = 0
    threads: int | Slot = 0
    address: tuple[Slot, int, int] | None = None
    store_count: int = 0
    load_count: int = 0
    look: Sequence[Slot] | None = None
    stands_at: Instruction | None = None


@dataclass
class Lowered:
    """A kernel in operations, before its registers have places."""

    name: str
    blocks: list[LoweredBlock]
    entry: int
    crossing: dict[Register, int]
    """Registers that carry values from block to block, and their number in the sets below."""
    sets: list[int]
    """For each block the crossing registers that live in it or are written by it, as bits."""
    reads_unset_registers: bool
    """Whether the entry reads registers that nothing has set; they are zero then."""
    site_count: int
    sites: list[Site]
    """Their instructions."""
    within: dict[int, Extent]
    """Where in shared memory accesses at some sites have to stay."""
    granule_shift: int
    uses_copies: bool
    has_shared_atomics: bool
    uses_wgmma: bool
    uses_bulk_stores: bool
    is_asynchronous: bool
    """Whether it uses mbarriers, bulk copies, wgmma or clusters."""
    learns: bool
    """Whether threads may learn of others by what they find in memory, which the engine does not follow."""
    runs_together: bool
    """Whether the order matters in which warps and blocks make its accesses."""
    local_bytes: int
    calls: list[Call]
    """Opcodes that have no handler."""
    atomic_forms: set[tuple[str, int]]
    """(operation, bytes) of the atomics on global memory."""
    reads_clock: bool
    """Whether it finds other numbers than on the interpreter."""
    constants: dict[Slot, None] = field(default_factory=dict)
    """Slots filled before the launch: constants, parameters and addresses of variables."""
