"""Emitters of what is left of calls after linking: printf, a failed assert, the heap, and a call of no function."""

from __future__ import annotations

from ..memory.device_heap import allocate_bytes, free_bytes
from ..memory.device_printf import call_nothing, fail_assert, print_text
from ..ptx.instruction import Instruction, Register
from ..ptx.link import ASSERT, FREE, MALLOC, PRINTF, WILD_CALL
from .emit import BlockEmitter


def emit_calls(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    site = emitter.site(instruction)
    if opcode == PRINTF:
        values = [emitter.source(operand, "b64", instruction) for operand in operands[1:]]
        target = operands[0] if isinstance(operands[0], Register) else None
        emitter.effect(number, instruction, [target], print_text(site), values)
    elif opcode == ASSERT:
        values = [
            emitter.source(operand, kind, instruction)
            for operand, kind in zip(operands, ("b64", "b64", "b32", "b64"), strict=True)
        ]
        emitter.effect(number, instruction, [], fail_assert(site), values)
    elif opcode == MALLOC:
        target = operands[0] if isinstance(operands[0], Register) else None
        values = [emitter.source(operand, "b64", instruction) for operand in operands[1:]]
        emitter.effect(number, instruction, [target], allocate_bytes(site), values)
    elif opcode == FREE:
        emitter.effect(number, instruction, [], free_bytes(site), [emitter.source(operands[0], "b64", instruction)])
    elif opcode == WILD_CALL:
        emitter.effect(number, instruction, [], call_nothing(site), [emitter.source(operands[0], "b64", instruction)])
    else:
        return False
    return True
