"""Lowers what is left of calls after linking: printf, a failed assert, and a call of no function."""

from __future__ import annotations

from ..ptx.instruction import Instruction, Register
from ..ptx.link import ASSERT, PRINTF, WILD_CALL
from .lower import Lowering
from .printing import PRINT


def lower_calls(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == PRINTF:
        target = operands[0] if isinstance(operands[0], Register) else None
        sources = [lowering.source(operand, "b64") for operand in operands[1:]]
        memory, window = lowering.fresh("b64"), lowering.fresh("b64")
        lowering.emit("local_memory", memory)
        lowering.emit("to_local_window", window, lowering.constant(0, "b64"))
        lowering.call(PRINT, [lowering.target(target, "b32")], [*sources, memory, window])
    elif opcode in (ASSERT, WILD_CALL):
        lowering.emit("fail", lowering.site(), outs=())
    else:
        return False
    return True
