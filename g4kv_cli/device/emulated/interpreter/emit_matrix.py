"""Emitters of ``mma.sync`` of all types but those that emit_warp batches, and of ``wmma``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ..arithmetic.mma_forms import ELEMENT_BITS, Form
from ..ptx.instruction import Immediate, Instruction, Operand
from ..warp.fragments import Fragment, Fragments, fragments_of
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


@dataclass(frozen=True)
class Product:
    """A matrix product: its shape (m, n, k), types, fragments, and how many registers of A, B and C it names."""

    shape: tuple[int, int, int]
    form: Form
    fragments: Fragments
    counts: tuple[int, int, int]


@lru_cache(maxsize=256)
def product_of(opcode: str) -> Product | None:
    """The product that an opcode of ``mma.sync`` or ``wmma.mma`` is; None for any other. Raises ValueError with the
    reason, if there is one, for what is not emulated."""
    if (found := _MMA.fullmatch(opcode)) is not None:
        m, n, k, saturates, d, a, b, c, combine, _ = found.groups()
        form, shapes, repeated = Form(a, b, c, saturates is not None, combine or ""), _MMA_SHAPES, 0
    elif (found := _WMMA.fullmatch(opcode)) is not None:
        combine, layout_a, layout_b, m, n, k, d, a, b, c, saturates, _ = found.groups()
        if a in _PARTS_OF_BYTES and (layout_a, layout_b) != ("row", "col"):
            raise ValueError("there is no such form")
        form = Form(a or "f16", b or "f16", c, saturates is not None, combine or "", 4 if a == "tf32" else 0)
        shapes, repeated = _WMMA_SHAPES, _REPEATED.get(form.a, 0)
    else:
        return None
    shape = int(m), int(n), int(k)
    if d != form.c or not _is_known(shape, form, shapes) or (form.a == "b1") != bool(form.combine):
        raise ValueError("no matrix product of this shape and these types is emulated")
    if form.saturates and form.c != "s32":
        raise ValueError("")
    fragments = fragments_of(shape, ELEMENT_BITS[form.a], ELEMENT_BITS[form.c])
    counts = repeated or fragments.a.registers, repeated or fragments.b.registers, fragments.c.registers
    return Product(shape, form, fragments, counts)


@dataclass(frozen=True)
class Move:
    """A load or store of a fragment by ``wmma``: of ``count`` registers, by rows or columns of the matrix in a state
    space."""

    is_load: bool
    fragment: Fragment
    count: int
    by_rows: bool
    space: str | None


@lru_cache(maxsize=256)
def move_of(opcode: str) -> Move | None:
    """The move that an opcode of ``wmma.load`` or ``wmma.store`` is; None for any other. Raises ValueError with the
    reason, if there is one, for what is not emulated."""
    found = _MOVE.fullmatch(opcode)
    if found is None:
        return None
    direction, role, layout, m, n, k, space, kind = found.groups()
    shape = int(m), int(n), int(k)
    is_accumulator = role in "cd"
    if (direction == "store") != (role == "d"):
        raise ValueError("")
    is_known = any(
        shape in known and kind in (results if is_accumulator else types) for types, results, known in _WMMA_SHAPES
    )
    if kind in _PARTS_OF_BYTES and layout != ("row" if role == "a" else "col"):
        is_known = False
    if not is_known:
        raise ValueError("no fragment of this shape and type is emulated")
    fragments: Fragments = fragments_of(shape, ELEMENT_BITS[kind], ELEMENT_BITS[kind])
    fragment = {"a": fragments.a, "b": fragments.b}.get(role, fragments.c)
    count = fragment.registers if is_accumulator else _REPEATED.get(kind, fragment.registers)
    return Move(direction == "load", fragment, count, layout == "row", "shared" if space == "shared::cta" else space)


def emit_matrix(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    try:
        product, move = product_of(instruction.opcode), move_of(instruction.opcode)
    except ValueError as error:
        raise emitter.unsupported(instruction, str(error)) from error
    if product is not None:
        _emit_product(emitter, number, instruction, product)
    elif move is not None:
        _emit_move(emitter, number, instruction, move)
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


def _emit_product(emitter: BlockEmitter, number: int, instruction: Instruction, product: Product) -> None:
    fragments, counts, operands = product.fragments, product.counts, instruction.operands
    if len(operands) != 4:
        raise emitter.unsupported(instruction, "wrong number of operands")
    targets = emitter.registers(instruction, operands[0], counts[2], f"b{fragments.c.register_bits}")
    arguments = [
        emitter.source(item, f"b{part.register_bits}", instruction)
        for operand, count, part in zip(operands[1:], counts, (fragments.a, fragments.b, fragments.c), strict=True)
        for item in emitter.items(instruction, operand, count)
    ]
    function = multiply_form(emitter.site(instruction), product.form, fragments, counts)
    emitter.effect(number, instruction, targets, function, arguments)


def stride_of(instruction: Instruction, move: Move) -> Operand | None:
    """Elements from one row or column to the next; a matrix lies without gaps if the instruction does not say."""
    if len(instruction.operands) == 3:
        return instruction.operands[2]
    return Immediate(move.fragment.shape[1] if move.by_rows else move.fragment.shape[0])


def _emit_move(emitter: BlockEmitter, number: int, instruction: Instruction, move: Move) -> None:
    fragment, space = move.fragment, move.space
    if len(instruction.operands) not in (2, 3):
        raise emitter.unsupported(instruction, "wrong number of operands")
    registers, address = instruction.operands[:2] if move.is_load else instruction.operands[1::-1]
    base, _, offset = emitter.address(address, instruction)
    stride = emitter.source(stride_of(instruction, move), "b32", instruction)
    if space != "global":
        shift = (fragment.element_bits // 8 or 4).bit_length() - 1
        emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    site = emitter.site(instruction)
    if move.is_load:
        targets = emitter.registers(instruction, registers, move.count, f"b{fragment.register_bits}")
        function = load_fragment(site, space, offset, fragment, move.by_rows, move.count)
        emitter.effect(number, instruction, targets, function, [base, stride])
        return
    values = [
        emitter.source(item, f"b{fragment.register_bits}", instruction)
        for item in emitter.items(instruction, registers, move.count)
    ]
    emitter.effect(
        number, instruction, [], store_fragment(site, space, offset, fragment, move.by_rows), [base, stride, *values]
    )
