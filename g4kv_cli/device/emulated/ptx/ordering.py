"""What loads, stores and atomics say about the order of memory; and which loops wait for other threads."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from .instruction import Immediate, Instruction, Operand

WEAK, VOLATILE, STRONG = 0, 1, 2
"""How an access may meet others: VOLATILE ones race with each other, unless one of them is STRONG."""
_WORDS = re.compile(r"\.(volatile|relaxed|acquire|release|acq_rel)\b")
MEETING = "bar.warp.meeting.before."
"""Stand-in before an instruction that lanes of a warp execute together, where some of them may wait in a loop."""
_ALL_LANES = 0xFFFFFFFF
_WITH_MASK = ("shfl.sync", "vote.sync", "match.", "redux.sync")


@dataclass(frozen=True)
class Manner:
    """What an opcode says about order."""

    strength: int
    acquires: bool
    releases: bool
    is_atomic: bool
    is_ordered: bool
    """Whether it is an atomic that says acquire or release."""
    in_block: bool
    """Whether its scope is the thread's own block (``.cta``): for other blocks it is like any plain access."""
    in_cluster: bool
    """Whether it is the thread's cluster."""

    def ends_at_block(self, cluster_blocks: int) -> bool:
        """Whether its scope ends with the thread's block, of clusters of so many blocks."""
        return self.in_block or (self.in_cluster and cluster_blocks == 1)


@lru_cache(maxsize=1024)
def manner(opcode: str, in_wait: bool) -> Manner:
    """Of a load, store or atomic. A volatile load waits if it is in a loop that may wait."""
    found = _WORDS.search(opcode)
    word = found.group(1) if found is not None else ""
    stem = opcode.split(".", 1)[0]
    is_atomic = stem in ("atom", "red")
    strength = WEAK
    if is_atomic or (word and word != "volatile") or (word and stem == "ld" and in_wait):
        strength = STRONG
    elif word:
        strength = VOLATILE
    is_ordered = is_atomic and word in ("acquire", "release", "acq_rel")
    acquires = stem == "atom" or (stem == "ld" and strength > WEAK)
    words = opcode.split(".") if stem in ("ld", "st", "atom", "red") else ()
    scopes = "cta" in words, "cluster" in words
    return Manner(strength, acquires, word in ("release", "acq_rel"), is_atomic, is_ordered, *scopes)


def learns(opcode: str) -> bool:
    """Whether a thread may learn of others by what the instruction finds: a loop around it may wait for them."""
    return opcode.startswith(("ld.", "atom.")) and manner(opcode, True).acquires


def meeting_before(instruction: Instruction) -> Instruction | None:
    """The stand-in for an instruction of a whole warp or of members of it; None for any other."""
    opcode, operands = instruction.opcode, instruction.operands
    is_barrier = opcode.startswith(("bar.sync", "bar.red", "bar.cta", "barrier.sync", "barrier.red", "barrier.cta"))
    mask: Operand | None = Immediate(_ALL_LANES)
    if opcode.startswith(_WITH_MASK):
        mask = operands[-1]
    elif opcode.startswith("elect.sync"):
        mask = operands[1]
    elif not is_barrier and ".sync.aligned" not in opcode:
        return None
    return replace(instruction, opcode=MEETING + opcode, operands=(mask,))
