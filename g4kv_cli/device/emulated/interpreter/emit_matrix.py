"""Emitters of ``mma.sync`` of all types but those that emit_warp batches, and of ``wmma``."""

from __future__ import annotations

import re

from ..arithmetic.mma_forms import ELEMENT_BITS, Form
from ..ptx.instruction import Immediate, Instruction, Operand
from ..warp.fragments import Fragments, fragments_of
from ..warp.matrix_forms import load_fragment, multiply_form, store_fragment
from .emit import BlockEmitter

_MMA = re.compile(
    r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.row\.col(\.satfinite)?\.(f16|f32|f64|s32)\.(\w+)\.(\w+)\.(f16|f32|f64|s32)"
    r"(?:\.(and|xor)\.popc)?(\.rn)?"
)
_WMMA = re.compile(
    r"wmma\.mma(?:\.(and|xor)\.popc)?\.sync\.aligned\.(row|col)\.(row|col)\.m(\d+)n(\d+)k(\d+)\.(f16|f32|f64|s32)"
    r"(?:\.(\w+)\.(\w+))?\.(f16|f32|f64|s32)(\.satfinite)?(\.rn)?"
)
_MOVE = re.compile(
    r"wmma\.(load|store)\.([abcd])\.sync\.aligned\.(row|col)\.m(\d+)n(\d+)k(\d+)(?:\.(global|shared|shared::cta))?\."
    r"(f16|bf16|tf32|f32|f64|s8|u8|s4|u4|b1|s32)"
)
_HALF = ("f16", "bf16")
_EIGHT = ("s8", "u8")
_FOUR = ("s4", "u4")
_SMALL = ("e4m3", "e5m2")
_MMA_SHAPES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int, int], ...]], ...] = (
    (("f16",), ("f32", "f16"), ((16, 8, 8), (16, 8, 16))),
    (("bf16",), ("f32",), ((16, 8, 8), (16, 8, 16))),
    (("tf32",), ("f32",), ((16, 8, 4), (16, 8, 8))),
    (("f64",), ("f64",), ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16))),
    (_EIGHT, ("s32",), ((8, 8, 16), (16, 8, 16), (16, 8, 32))),
    (_FOUR, ("s32",), ((8, 8, 32), (16, 8, 32), (16, 8, 64))),
    (_SMALL, ("f32", "f16"), ((16, 8, 16), (16, 8, 32))),
    (("b1",), ("s32",), ((8, 8, 128), (16, 8, 128), (16, 8, 256))),
)
"""Element types of A and B, types of C and D, and shapes m, n, k, of mma.sync."""
_WMMA_SHAPES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int, int], ...]], ...] = (
    (("f16",), ("f32", "f16"), ((16, 16, 16), (8, 32, 16), (32, 8, 16))),
    (("bf16",), ("f32",), ((16, 16, 16), (8, 32, 16), (32, 8, 16))),
    (_EIGHT, ("s32",), ((16, 16, 16), (8, 32, 16), (32, 8, 16))),
    (("tf32",), ("f32",), ((16, 16, 8),)),
    (("f64",), ("f64",), ((8, 8, 4),)),
    (_FOUR, ("s32",), ((8, 8, 32),)),
    (("b1",), ("s32",), ((8, 8, 128),)),
)
_PARTS_OF_BYTES = (*_FOUR, "b1")
"""Elements of which wmma has A by rows and B by columns, as words of them lie in memory."""
_REPEATED = {"f16": 8}
"""Registers of A and B that wmma has for f16: more than there are different ones."""


def emit_matrix(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode = instruction.opcode
    if (found := _MMA.fullmatch(opcode)) is not None:
        *shape, saturates, d, a, b, c, combine, _ = found.groups()
        form = Form(a, b, c, saturates is not None, combine or "")
        _emit_product(emitter, number, instruction, tuple(map(int, shape)), form, d, _MMA_SHAPES, {})
    elif (found := _WMMA.fullmatch(opcode)) is not None:
        combine, layout_a, layout_b, *shape, d, a, b, c, saturates, _ = found.groups()
        if a in _PARTS_OF_BYTES and (layout_a, layout_b) != ("row", "col"):
            raise emitter.unsupported(instruction, "there is no such form")
        form = Form(a or "f16", b or "f16", c, saturates is not None, combine or "", 4 if a == "tf32" else 0)
        _emit_product(emitter, number, instruction, tuple(map(int, shape)), form, d, _WMMA_SHAPES, _REPEATED)
    elif (found := _MOVE.fullmatch(opcode)) is not None:
        _emit_move(emitter, number, instruction, found)
    else:
        return False
    return True


def _is_known(
    shape: tuple[int, ...],
    form: Form,
    shapes: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int, int], ...]], ...],
) -> bool:
    mixes = form.a in (*_EIGHT, *_FOUR, *_SMALL)
    return any(
        form.a in types and form.b in types and (mixes or form.a == form.b) and form.c in results and shape in known
        for types, results, known in shapes
    )


def _emit_product(
    emitter: BlockEmitter,
    number: int,
    instruction: Instruction,
    shape: tuple[int, ...],
    form: Form,
    d: str,
    shapes: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int, int], ...]], ...],
    repeated: dict[str, int],
) -> None:
    is_binary = form.a == "b1"
    if d != form.c or not _is_known(shape, form, shapes) or is_binary != bool(form.combine):
        raise emitter.unsupported(instruction, "no matrix product of this shape and these types is emulated")
    if form.saturates and form.c != "s32":
        raise emitter.unsupported(instruction)
    m, n, k = shape
    fragments = fragments_of((m, n, k), ELEMENT_BITS[form.a], ELEMENT_BITS[form.c])
    parts = (fragments.a, fragments.b)
    counts = tuple(repeated.get(form.a, part.registers) for part in parts)
    c_count = fragments.c.registers
    operands = instruction.operands
    if len(operands) != 4:
        raise emitter.unsupported(instruction, "wrong number of operands")
    targets = emitter.registers(instruction, operands[0], c_count, f"b{fragments.c.register_bits}")
    arguments = [
        emitter.source(item, f"b{part.register_bits}", instruction)
        for operand, count, part in zip(operands[1:], (*counts, c_count), (*parts, fragments.c), strict=True)
        for item in emitter.items(instruction, operand, count)
    ]
    function = multiply_form(emitter.site(instruction), form, fragments, (counts[0], counts[1], c_count))
    emitter.effect(number, instruction, targets, function, arguments)


def _emit_move(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    direction, role, layout, m, n, k, space, kind = found.groups()
    shape = int(m), int(n), int(k)
    is_accumulator = role in "cd"
    if (direction == "store") != (role == "d"):
        raise emitter.unsupported(instruction)
    is_known = any(
        shape in known and kind in (results if is_accumulator else types) for types, results, known in _WMMA_SHAPES
    )
    if kind in _PARTS_OF_BYTES and layout != ("row" if role == "a" else "col"):
        is_known = False
    if not is_known:
        raise emitter.unsupported(instruction, "no fragment of this shape and type is emulated")
    bits = ELEMENT_BITS[kind]
    fragments: Fragments = fragments_of(shape, bits, bits)
    fragment = {"a": fragments.a, "b": fragments.b}.get(role, fragments.c)
    count = fragment.registers if is_accumulator else _REPEATED.get(kind, fragment.registers)
    space = "shared" if space == "shared::cta" else space
    operands: list[Operand | None] = list(instruction.operands)
    registers = operands.pop(0 if direction == "load" else 1)
    default = Immediate(fragment.shape[1] if layout == "row" else fragment.shape[0])
    if len(operands) not in (1, 2):
        raise emitter.unsupported(instruction, "wrong number of operands")
    base, _, offset = emitter.address(operands[0], instruction)
    stride = emitter.source(operands[1] if len(operands) == 2 else default, "b32", instruction)
    if space != "global":
        shift = (bits // 8 or 4).bit_length() - 1
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    site = emitter.site(instruction)
    if direction == "load":
        targets = emitter.registers(instruction, registers, count, f"b{fragment.register_bits}")
        function = load_fragment(site, space, offset, fragment, layout == "row", count)
        emitter.effect(number, instruction, targets, function, [base, stride])
        return
    values = [
        emitter.source(item, f"b{fragment.register_bits}", instruction)
        for item in emitter.items(instruction, registers, count)
    ]
    emitter.effect(
        number, instruction, [], store_fragment(site, space, offset, fragment, layout == "row"), [base, stride, *values]
    )
