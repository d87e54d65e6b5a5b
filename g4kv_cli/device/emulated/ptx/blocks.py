"""A basic block of a kernel: what flow.py cuts, and what both emulators translate."""

from __future__ import annotations

from dataclasses import dataclass

from .instruction import Instruction


@dataclass
class BasicBlock:
    """Straight-line code. ``end`` is jump, branch, exit, trap, barrier, phase, warp or cluster; ``successors`` number
    blocks.

    A branch has the successors (taken, not taken); a jump, a barrier, a phase (the wait for an mbarrier), a warp
    (bar.warp.sync) or a cluster (barrier.cluster.wait) one; exit and trap none. ``size`` counts the instructions before
    multiplies were joined; ``meets``: threads wait for others in it; ``in_wait``: it is in a loop that may wait for
    other threads; ``waits``: where, if that loop begins here.
    """

    body: list[Instruction]
    end: str = "jump"
    final: Instruction | None = None
    successors: tuple[int, ...] = ()
    live_in: int = 0
    live_out: int = 0
    defined: int = 0
    size: int = 0
    meets: bool = False
    in_wait: bool = False
    waits: Instruction | None = None
