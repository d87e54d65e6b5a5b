"""Emitters of what changes tensor maps: tensormap.replace, and the copy and the fences that make it known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..checks.order import fence
from ..memory.tensor_map import ELEMENTS, FIELDS, SWIZZLE_MODES, Field, element_code
from ..memory.tensor_map_edits import copy_map, replace_field, require_one
from ..ptx.instruction import Immediate, Instruction, Operand, Register
from .emit import BlockEmitter

_REPLACE = re.compile(
    r"tensormap\.replace\.tile\.(\w+?)(?:\.(global|shared::cta))?\.b1024\.b(32|64)",
)
COPY_MAP = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
MAP_FENCE = re.compile(r"fence\.proxy\.tensormap::generic\.(acquire|release)\.(cta|cluster|gpu|sys)")
_ALWAYS = {"interleave_layout": 0, "fill_mode": 0, "element_stride": 1}
"""What only has one value here: no interleaved layout, zeros outside, and no element left out."""


@dataclass(frozen=True)
class Replacement:
    """A tensormap.replace: the address operand, and what is put where. Without a field nothing is; a value has to be 1
    then."""

    address: Operand | None
    space: str | None
    field: Field | None
    at: int
    value: Operand | None


def replacement_of(instruction: Instruction) -> Replacement | None:
    """The replacement that an instruction is; None for any other. Raises ValueError for what is not emulated."""
    found = _REPLACE.fullmatch(instruction.opcode)
    if found is None:
        return None
    name, space, bits = found.groups()
    operands = instruction.operands
    space = "shared" if space == "shared::cta" else space
    is_each = name in ("element_stride", "box_dim", "global_dim", "global_stride")
    if len(operands) != 2 + is_each or (bits == "64") != (name in ("global_address", "global_stride")):
        raise ValueError("wrong number of operands, or type")
    value, number = operands[-1], operands[1] if is_each else Immediate(0)
    field = FIELDS.get(name)
    if name == "element_stride" and isinstance(value, Register):
        return Replacement(operands[0], space, None, 0, value)
    if field is None or name in ("elemtype", "swizzle_mode"):
        if not isinstance(value, Immediate):
            raise ValueError("the new value has to be a number")
        if field is None:
            if name not in _ALWAYS or value.bits != _ALWAYS[name]:
                raise ValueError("this field has one value here")
            return Replacement(operands[0], space, None, 0, None)
        table = [element_code(kind) for kind in ELEMENTS] if name == "elemtype" else SWIZZLE_MODES
        if not 0 <= value.bits < len(table):
            raise ValueError("there is no such value")
        value = Immediate(table[value.bits])
    if not isinstance(number, Immediate) or not 0 <= number.bits < (4 if name == "global_stride" else 5):
        raise ValueError("there is no such dimension")
    return Replacement(operands[0], space, field, field.offset + number.bits * field.nbytes, value)


def emit_tensor_maps(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    try:
        what = replacement_of(instruction)
    except ValueError as error:
        raise emitter.unsupported(instruction, str(error)) from error
    if what is not None:
        _emit_replacement(emitter, number, instruction, what)
    elif opcode == COPY_MAP and len(operands) == 3 and operands[2] == Immediate(128):
        target, _, target_offset = emitter.address(operands[0], instruction)
        source, _, source_offset = emitter.address(operands[1], instruction)
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, 4)
        function = copy_map(emitter.site(instruction), target_offset, source_offset)
        emitter.effect(number, instruction, [], function, [target, source])
    elif MAP_FENCE.fullmatch(opcode) is not None:
        emitter.effect(number, instruction, [], fence(opcode), [])
    else:
        return False
    return True


def _emit_replacement(emitter: BlockEmitter, number: int, instruction: Instruction, what: Replacement) -> None:
    base, _, offset = emitter.address(what.address, instruction)
    if what.field is None:
        if what.value is None:
            emitter.finish(number, instruction, {})
        else:
            value = emitter.source(what.value, "b32", instruction)
            emitter.effect(number, instruction, [], require_one(emitter.site(instruction)), [value])
        return
    if what.space != "global":
        shift = what.field.nbytes.bit_length() - 1
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    value = emitter.source(what.value, "b64" if what.field.nbytes == 8 else "b32", instruction)
    site = emitter.site(instruction)
    function = replace_field(site, what.space, offset, what.at, what.field.nbytes, what.field.plus)
    emitter.effect(number, instruction, [], function, [base, value])
