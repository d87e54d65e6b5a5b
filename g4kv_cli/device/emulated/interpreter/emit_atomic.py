"""Emitters of atom and red."""

from __future__ import annotations

import re

from ..memory.atomics import atomic, update_function
from ..ptx.instruction import Instruction, Operand, Register
from .emit import BlockEmitter

_ATOMIC = re.compile(
    r"(atom|red)(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"
    r"(?:\.(global|shared|shared::cta))?\.(add|min|max|and|or|xor|exch|cas|inc|dec)(\.L2::cache_hint)?\."
    r"([usb](?:32|64)|f32)"
)


def emit_atomic(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    found = _ATOMIC.fullmatch(instruction.opcode)
    if found is None:
        return False
    word, space, operation, hint, kind = found.groups()
    operands: list[Operand | None] = list(instruction.operands)
    if hint is not None:
        operands.pop()
    targets: list[Register | None] = []
    if word == "atom":
        target = operands.pop(0)
        if target is not None and not isinstance(target, Register):
            raise emitter.unsupported(instruction, "destination form not understood")
        targets = [target]
    is_shared = space in ("shared", "shared::cta")
    wanted = 3 if operation == "cas" else 2
    known = update_function(operation, kind, is_shared) is not None
    if not known or len(operands) != wanted or (word == "red" and operation in ("exch", "cas")):
        raise emitter.unsupported(instruction)
    base, span, offset = emitter.address(operands[0], instruction)
    values = [emitter.source(operand, f"b{kind[1:]}", instruction) for operand in operands[1:]]
    if space != "global":
        shift = 2 if kind[1:] == "32" else 3
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    function = atomic(
        emitter.site(instruction), "shared" if is_shared else space, offset, operation, kind, word == "atom"
    )
    emitter.effect(number, instruction, targets, function, [base, *values], span)
    return True
