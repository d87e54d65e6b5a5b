"""Independent ``mma.sync`` of a basic block as one instruction: an unrolled loop over columns has dozens of them.

An mma touches registers only, so its arithmetic may wait until something needs its result or changes what it reads;
those that wait together are computed together. That the warp is whole is checked where each of them stands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .instruction import Instruction, Operand, Register, Vector

BATCH_LIMIT = 32
WHOLE_WARP = "mma.whole_warp"
"""Stand-in where an mma.sync was: checks its warp, has no operands."""
CHECKED = "checked."
"""Prefix of an mma.sync, joined or not, whose warp was checked before."""
MULTIPLY = r"mma\.sync\.aligned\.m16n8k(16|8)\.row\.col\.f32\.(bf16|f16)\.\2\.f32"
_MULTIPLY = re.compile(MULTIPLY)
_ASYNCHRONOUS = "wgmma."


def batch_multiplies(body: Sequence[Instruction]) -> list[Instruction]:
    """The block's instructions with independent mma.sync of one opcode joined: operands are those of all in a row."""
    done: list[Instruction] = []
    waiting: list[Instruction] = []
    reads: set[Register] = set()
    writes: set[Register] = set()
    for instruction in body:
        can_wait = _is_plain_multiply(instruction)
        is_in_the_way = (
            not writes.isdisjoint((*instruction.reads, *instruction.writes))
            or not reads.isdisjoint(instruction.writes)
            # What an mma reads too early must stay too early: a wgmma's wait has no operands here.
            or instruction.opcode.startswith(_ASYNCHRONOUS)
        )
        other_kind = can_wait and bool(waiting) and instruction.opcode != waiting[0].opcode
        if waiting and (is_in_the_way or other_kind or (can_wait and len(waiting) == BATCH_LIMIT)):
            done.append(_joined(waiting))
            waiting = []
            reads.clear()
            writes.clear()
        if can_wait:
            done.append(replace(instruction, opcode=WHOLE_WARP, operands=()))
            waiting.append(instruction)
            reads.update(instruction.reads)
            writes.update(instruction.writes)
        else:
            done.append(instruction)
    return [*done, _joined(waiting)] if waiting else done


def _is_plain_multiply(instruction: Instruction) -> bool:
    """Without a guard, and with vectors as long as they should be: what else there is stays as it is."""
    found = _MULTIPLY.fullmatch(instruction.opcode)
    if found is None or instruction.guard is not None:
        return False
    k_halves = int(found.group(1)) // 8
    lengths = [len(operand.items) if isinstance(operand, Vector) else 0 for operand in instruction.operands]
    return lengths == [4, 2 * k_halves, k_halves, 4]


def _joined(multiplies: list[Instruction]) -> Instruction:
    operands: list[Operand | None] = []
    for position in range(4):
        vectors = [instruction.operands[position] for instruction in multiplies]
        operands.append(
            Vector(tuple(item for vector in vectors if isinstance(vector, Vector) for item in vector.items))
        )
    return replace(multiplies[0], opcode=CHECKED + multiplies[0].opcode, operands=tuple(operands))
