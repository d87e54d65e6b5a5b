"""Emitters of atom and red."""

from __future__ import annotations

import re

from ..memory.atomics import Atomic, atomic, update_function
from ..ptx.instruction import Instruction, Operand, Register
from ..ptx.parse import REGISTER_KINDS, TYPE_BYTES
from .emit import BlockEmitter

ATOMIC = re.compile(
    r"(atom|red)(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"
    r"(?:\.(global|shared|shared::cta|shared::cluster))?\.(add|min|max|and|or|xor|exch|cas|inc|dec)(\.noftz)?(\.L2::cache_hint)?"
    r"(?:\.v([248]))?\.([usb](?:32|64)|b16|f32|f64|b?f16(?:x2)?)"
)
_WIDE = re.compile(
    r"atom(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"
    r"(?:\.(global|shared|shared::cta|shared::cluster))?\.(exch|cas)(\.L2::cache_hint)?\.b128"
)
_HALVES = frozenset({"f16", "bf16", "f16x2", "bf16x2"})
_LARGEST_VECTOR_BYTES = 16


def emit_atomic(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    if (wide := _WIDE.fullmatch(instruction.opcode)) is not None:
        _emit_wide(emitter, number, instruction, *wide.groups())
        return True
    found = ATOMIC.fullmatch(instruction.opcode)
    if found is None:
        return False
    word, space, operation, noftz, hint, vector, kind = found.groups()
    operands: list[Operand | None] = list(instruction.operands)
    if hint is not None:
        operands.pop()
    count, nbytes = int(vector or 1), TYPE_BYTES[kind]
    targets: list[Register | None] = []
    if word == "atom":
        targets = emitter.registers(instruction, operands.pop(0), count)
    if space == "shared::cta":
        space = "shared"
    is_shared = space in ("shared", "shared::cluster")
    wanted = 3 if operation == "cas" else 2
    is_known = update_function(operation, kind, is_shared, word == "red") is not None
    is_known &= (noftz is not None) == (kind in _HALVES) and (word == "atom" or operation not in ("exch", "cas"))
    if vector is not None:
        is_known &= space in ("global", None) and kind in (*_HALVES, "f32") and count * nbytes <= _LARGEST_VECTOR_BYTES
    if not is_known or len(operands) != wanted:
        raise emitter.unsupported(instruction)
    base, span, offset = emitter.address(operands[0], instruction)
    sources = [item for operand in operands[1:] for item in emitter.items(instruction, operand, count)]
    values = [emitter.source(item, REGISTER_KINDS.get(kind, "b16"), instruction) for item in sources]
    if space != "global":
        shift = nbytes.bit_length() - 1
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    emitter.context.is_asynchronous |= space == "shared::cluster"
    what = Atomic(operation, kind, nbytes, count, word == "red")
    function = atomic(emitter.site(instruction), space, offset, what)
    emitter.effect(number, instruction, targets, function, [base, *values], span)
    return True


def _emit_wide(
    emitter: BlockEmitter, number: int, instruction: Instruction, space: str | None, operation: str, hint: str | None
) -> None:
    """Of 128 bits, each operand two registers."""
    operands = list(instruction.operands)
    if hint is not None:
        operands.pop()
    if len(operands) != (4 if operation == "cas" else 3):
        raise emitter.unsupported(instruction, "wrong number of operands")
    targets = emitter.registers(instruction, operands[0], 2, "b64")
    base, span, offset = emitter.address(operands[1], instruction)
    items = [item for operand in operands[2:] for item in emitter.items(instruction, operand, 2)]
    values = [emitter.source(item, "b64", instruction) for item in items]
    space = "shared" if space == "shared::cta" else space
    if space != "global":
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, 4)
    emitter.context.is_asynchronous |= space == "shared::cluster"
    function = atomic(emitter.site(instruction), space, offset, Atomic(operation, "b128", 8, 2, False))
    emitter.effect(number, instruction, targets, function, [base, *values], span)
