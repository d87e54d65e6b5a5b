"""Independent ``mma.sync`` of a basic block as one instruction: an unrolled loop over columns has dozens of them.

An mma touches registers only, so it may wait until something needs its result or changes what it reads; the ones that
wait together are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .instruction import Instruction, Operand, Register, Vector

BATCH_LIMIT = 32
_PREFIX = "mma.sync."


def batch_multiplies(body: Sequence[Instruction]) -> list[Instruction]:
    """The block's instructions with independent mma.sync of one opcode joined: operands are those of all in a row."""
    done: list[Instruction] = []
    waiting: list[Instruction] = []
    reads: set[Register] = set()
    writes: set[Register] = set()
    for instruction in body:
        can_wait = _is_plain_multiply(instruction)
        is_in_the_way = not writes.isdisjoint((*instruction.reads, *instruction.writes)) or not reads.isdisjoint(
            instruction.writes
        )
        other_kind = can_wait and bool(waiting) and instruction.opcode != waiting[0].opcode
        if waiting and (is_in_the_way or other_kind or (can_wait and len(waiting) == BATCH_LIMIT)):
            done.append(_joined(waiting))
            waiting = []
            reads.clear()
            writes.clear()
        if can_wait:
            waiting.append(instruction)
            reads.update(instruction.reads)
            writes.update(instruction.writes)
        else:
            done.append(instruction)
    return [*done, _joined(waiting)] if waiting else done


def _is_plain_multiply(instruction: Instruction) -> bool:
    """Without a guard, and with four vectors: what else there is stays as it is."""
    return (
        instruction.opcode.startswith(_PREFIX)
        and instruction.guard is None
        and len(instruction.operands) == 4
        and all(isinstance(operand, Vector) for operand in instruction.operands)
    )


def _joined(multiplies: list[Instruction]) -> Instruction:
    if len(multiplies) == 1:
        return multiplies[0]
    operands: list[Operand | None] = []
    for position in range(4):
        vectors = [instruction.operands[position] for instruction in multiplies]
        operands.append(
            Vector(tuple(item for vector in vectors if isinstance(vector, Vector) for item in vector.items))
        )
    return replace(multiplies[0], operands=tuple(operands))
