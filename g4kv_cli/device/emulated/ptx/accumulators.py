"""Which registers may hold results of wgmma that are still being computed, and where they become real.

wgmma.mma_async leaves placeholders in its destination registers (see wgmma.py). PTX may move those to other registers
before the wait. So every wgmma.wait_group is given, as operands that it reads and writes, the registers alive at it
that a result may have reached through moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .blocks import BasicBlock
from .instruction import WGMMA, WGMMA_WAIT, Instruction, Register, Vector


def accumulator_registers(instructions: Iterable[Instruction]) -> set[Register]:
    """Destinations of wgmma, and every register that a chain of moves can copy one of them to."""
    found: set[Register] = set()
    copies: dict[Register, list[Register]] = {}
    for instruction in instructions:
        if instruction.opcode.startswith(WGMMA):
            found.update(instruction.writes)
        elif instruction.opcode.startswith("mov.") and len(instruction.operands) == 2:
            target, source = instruction.operands
            if isinstance(target, Register) and isinstance(source, Register):
                copies.setdefault(source, []).append(target)
    work = list(found)
    while work:
        for target in copies.get(work.pop(), ()):
            if target not in found:
                found.add(target)
                work.append(target)
    return found


def name_accumulators(blocks: Sequence[BasicBlock], index: dict[Register, int]) -> bool:
    """Give every wait the accumulators that are alive behind it; True if there is a wait. Needs liveness."""
    everything = [instruction for block in blocks for instruction in block.body]
    if not any(instruction.opcode == WGMMA_WAIT for instruction in everything):
        return False
    accumulators = accumulator_registers(everything)
    for block in blocks:
        if not any(instruction.opcode == WGMMA_WAIT for instruction in block.body):
            continue
        alive = {register for register in accumulators if block.live_out >> index[register] & 1}
        if block.final is not None:
            alive.update(accumulators.intersection(block.final.reads))
        body: list[Instruction] = []
        for instruction in reversed(block.body):
            if instruction.opcode == WGMMA_WAIT:
                ordered = tuple(sorted(alive, key=index.__getitem__))
                body.append(replace(instruction, operands=(Vector(ordered), *instruction.operands)))
                continue
            alive.difference_update(instruction.writes)
            alive.update(accumulators.intersection(instruction.reads))
            body.append(instruction)
        block.body = body[::-1]
    return True
