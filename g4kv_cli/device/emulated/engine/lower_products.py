"""Lowers mma.sync and wmma: products become those of 16 rows and 8 columns, a fragment's elements loads and stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..arithmetic.mma_forms import Form
from ..interpreter.emit_matrix import Move, Product, move_of, product_of, stride_of
from ..ptx.instruction import Instruction, Operand, Register, Vector
from .lower import Lowering
from .lower_memory import SPACES
from .operations import NotLowered, Slot

_ELEMENTS = ("f16", "tf32", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1")
_SUMS = ("f32", "f16", "s32")
_SATURATES, _COMBINES_BY_XOR, _OF_WARPGROUP, _TWO_STEPS = 1, 2, 4, 8
"""As in ``c/products.h``."""
_OF_SIXTEEN_BITS = {"bf16": "mma_m16n8k16_bf16", "f16": "mma_m16n8k16_f16"}
_STEP_BYTES = 16
"""Of k, which a register of each lane of a group holds."""


def form_field(form: Form) -> int:
    """A form as the engine's handlers read it."""
    flags = _SATURATES * form.saturates + _COMBINES_BY_XOR * (form.combine == "xor")
    flags += _OF_WARPGROUP * form.is_warpgroup + _TWO_STEPS * (form.step == 4)
    a, b = (_ELEMENTS.index(kind) for kind in (form.a, form.b))
    return a | b << 4 | _SUMS.index(form.c) << 8 | flags << 10


def lower_products(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    try:
        product, move = product_of(instruction.opcode), move_of(instruction.opcode)
    except ValueError as error:
        raise NotLowered(instruction.opcode) from error
    if product is not None:
        _lower_product(lowering, instruction, product)
    elif move is not None:
        _lower_move(lowering, instruction, move)
    else:
        return False
    return True


def _items(instruction: Instruction, operand: Operand | None, count: int) -> list[Operand | None]:
    items: list[Operand | None] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise NotLowered(f"{instruction.opcode} with these operands")
    return items


def _targets(instruction: Instruction, operand: Operand | None, count: int, kind: str) -> list[Register | None]:
    found: list[Register | None] = []
    for item in _items(instruction, operand, count):
        if item is not None and (not isinstance(item, Register) or item.kind != kind):
            raise NotLowered(f"{instruction.opcode} with these operands")
        found.append(item)
    return found


def _lower_product(lowering: Lowering, instruction: Instruction, product: Product) -> None:
    form, (m, n, _), operands = product.form, product.shape, instruction.operands
    if len(operands) != 4:
        raise NotLowered(instruction.opcode)
    items = [_items(instruction, *each) for each in zip(operands[1:], product.counts, strict=True)]
    if form.a == "f64":
        _lower_doubles(lowering, instruction, product, items)
        return
    targets = _targets(instruction, operands[0], product.counts[2], "b32")
    a, b, c = ([lowering.source(item, "b32") for item in each] for each in items)
    if (m, n) == (8, 32):  # the turned product: B is by columns what A is by rows
        a, b, m, n = b, a, n, m
    tiles = list(_tiles(m, n, len(c) * (2 if form.c == "f16" else 1), form.c == "f16"))
    meets = not set(targets).isdisjoint(item for each in items[:2] for item in each if item is not None)
    meets |= targets != items[2] and not set(targets).isdisjoint(item for item in items[2] if item is not None)
    ends = [lowering.target(target, "b32") for target in targets]
    d = [lowering.fresh("b32") for _ in targets] if meets and len(tiles) > 1 else ends
    halves, steps = min(m // 8, 2), _steps(product)
    zero = lowering.constant(0, "b32")
    for row, column, sums in tiles:
        of_a = [zero] * 4
        for step in range(steps):
            for half in range(halves):
                of_a[2 * step + half] = a[(row * steps + step) * halves + half]
        of_b = [*b[column * steps : (column + 1) * steps], zero][:2]
        results = [d[number] for number in sums]
        results += [lowering.fresh("b32") for _ in range(4 - len(results))]
        addends = [*(c[number] for number in sums), *[zero] * (4 - len(sums))]
        fields: list[int | Slot] = [*results, *of_a, *of_b, *addends, lowering.site()]
        handler = _OF_SIXTEEN_BITS.get(form.a, "") if form.c == "f32" else ""
        if not handler:
            handler = "mma_form"
            fields.append(form_field(form))
        lowering.emit(handler, *fields, outs=(0, 1, 2, 3))
    if d is not ends:
        for end, result in zip(ends, d, strict=True):
            lowering.emit("mov_b32", end, result)


def _lower_doubles(
    lowering: Lowering, instruction: Instruction, product: Product, items: Sequence[Sequence[Operand | None]]
) -> None:
    """Of at most 16 rows and 8 columns, four k to a register."""
    m, _, k = product.shape
    halves, steps, zero = min(m // 8, 2), k // 4, lowering.constant(0, "b64")
    a, b, c = ([lowering.source(item, "b64") for item in each] for each in items)
    targets = _targets(instruction, instruction.operands[0], product.counts[2], "b64")
    d = [lowering.target(target, "b64") for target in targets]
    d += [lowering.fresh("b64") for _ in range(4 - len(d))]
    of_a = [a[halves * step + half] if half < halves and step < steps else zero for step in range(4) for half in (0, 1)]
    fields = *d, *of_a, *b, *[zero] * (4 - steps), *c, *[zero] * (4 - len(c))
    lowering.emit("mma_f64", *fields, lowering.site(), steps | halves << 4, outs=(0, 1, 2, 3))


def _steps(product: Product) -> int:
    """Registers that hold the k of a row."""
    return product.shape[2] * product.fragments.a.element_bits // (8 * _STEP_BYTES)


def _tiles(m: int, n: int, elements: int, is_half: bool) -> Iterator[tuple[int, int, Sequence[int]]]:
    """(number of the rows, of the columns, registers of C) of each tile of a product."""
    rows, columns = max(m // 16, 1), n // 8
    each = elements // (rows * columns) // (2 if is_half else 1)
    for tile in range(rows * columns):
        yield tile % rows, tile // rows, range(tile * each, (tile + 1) * each)


def _lower_move(lowering: Lowering, instruction: Instruction, move: Move) -> None:
    fragment, operands = move.fragment, instruction.operands
    if len(operands) not in (2, 3):
        raise NotLowered(f"{instruction.opcode} with these operands")
    registers, address = operands[:2] if move.is_load else operands[1::-1]
    base, is_wide, offset = lowering.address(address)
    where = SPACES[move.space]
    if where != "shared" and not is_wide:
        raise NotLowered(f"{instruction.opcode} with a 32-bit address")
    stride = lowering.source(stride_of(instruction, move), "b32")
    nbytes = fragment.element_bits // 8 or 4
    if where != "global":
        lowering.granule_shift = min(lowering.granule_shift, nbytes.bit_length() - 1)
    lowering.emit("whole_warp", lowering.site(), outs=())
    kind = f"b{fragment.register_bits}"
    parts = fragment.row.shape[2] if fragment.element_bits >= 8 else 1  # a register is a word of memory then

    def place(number: int, part: int) -> list[int | Slot]:
        at = lowering.fresh("b64" if is_wide else "b32")
        lane = [table[number, (0, 4, 1), part].tolist() for table in (fragment.row, fragment.column)]
        affine = [value for first, group, within in lane for value in (first, group - first, within - first)]
        lowering.emit("matrix_place", at, base, stride, is_wide, *affine, int(move.by_rows), fragment.element_bits)
        site = lowering.site()
        if where != "generic":
            return [at, offset, site, is_wide]
        inside = lowering.fresh("b64")
        lowering.emit("generic_space", inside, at, offset, site)
        return [inside, 0, site, is_wide]

    if move.is_load:
        targets = _targets(instruction, registers, move.count, kind)
        found: list[Slot] = []
        for number in range(fragment.registers):
            for part in range(parts):
                value = lowering.fresh(kind)
                lowering.emit(f"load_{where}_v1_{8 * nbytes}", *place(number, part), value, outs=(4,))
                if not part:
                    found.append(value)
                    continue
                shifted, both = lowering.fresh(kind), lowering.fresh(kind)
                lowering.emit("shl_b32", shifted, value, lowering.constant(part * fragment.element_bits, "b32"))
                lowering.emit("or_b32", both, found[number], shifted)
                found[number] = both
        for number, target in enumerate(targets):
            lowering.emit(
                "mov_b64" if kind == "b64" else "mov_b32", lowering.target(target, kind), found[number % len(found)]
            )
        return
    values = [lowering.source(item, kind) for item in _items(instruction, registers, move.count)]
    for number in range(fragment.registers):
        for part in range(parts):
            value = values[number]
            if part:
                value = lowering.fresh(kind)
                lowering.emit("shr_u32", value, values[number], lowering.constant(part * fragment.element_bits, "b32"))
            lowering.emit(f"store_{where}_v1_{8 * nbytes}", *place(number, part), value, outs=())
