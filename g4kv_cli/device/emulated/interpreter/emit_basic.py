"""Emitters of elementwise opcodes (from the table), mov, cvta, and the fencing or hinting opcodes that do nothing."""

from __future__ import annotations

import re

from ..arithmetic.opcodes import ELEMENTWISE
from ..checks.early_reads import wait_for_the_one_in_front
from ..checks.order import fence
from ..ptx.instruction import CARRY, Immediate, Instruction, Operand, PredicatePair, Register, Symbol, Vector
from .emit import WINDOWS, BlockEmitter

_MOV = re.compile(r"mov\.(?:b16|b32|b64|u16|u32|u64|s16|s32|s64|f16|f32|f64|pred)")
_MOV_KIND = {"16": "b16", "32": "b32", "64": "b64"}
CVTA = re.compile(r"cvta(\.to)?\.(global|shared(?:::cta|::cluster)?|local|const|param)\.u64")
COMPARE = re.compile(r"setp\.[a-z]+(?:\.ftz)?\.[a-z]+\d+")
"""setp without a combining predicate: a second result is the complement of the first."""
COMBINED_COMPARE = re.compile(r"(setp\.[a-z]+)\.(and|or|xor)((?:\.ftz)?\.[a-z]+\d+)")
"""setp with one, which a second result combines with the complement."""
COMBINE = {"and": "&", "or": "|", "xor": "^"}
_BITS = {"b16": 16, "b32": 32, "b64": 64}

_SCOPES = ("cta", "cluster", "gpu", "sys")
FENCES = frozenset(
    {
        *(f"membar.{scope}" for scope in ("cta", "gl", "sys")),
        *(f"fence.{scope}" for scope in _SCOPES),
        *(f"fence.{order}.{scope}" for order in ("sc", "acq_rel", "acquire", "release") for scope in _SCOPES),
    }
)
"""In lockstep every access is already visible to all: they only say what comes before what (checks/order.py)."""
WAIT_FOR_FRONT = "griddepcontrol.wait"
NO_OPERATION = frozenset(
    {
        *(f"prefetch.global.{level}" for level in ("L1", "L2", "L2::evict_last", "L2::evict_normal")),
        *("prefetch.local.L1", "prefetch.local.L2"),
        *(f"prefetch.{level}" for level in ("L1", "L2")),
        "prefetchu.L1",
        "applypriority.global.L2::evict_normal",
        "applypriority.L2::evict_normal",
        "nanosleep.u32",
        "griddepcontrol.launch_dependents",
        "createpolicy.cvt.L2.b64",
        *(
            f"createpolicy.{word}.L2::{policy}{second}.b64"
            for word in ("fractional", "range", "range.global")
            for policy in ("evict_last", "evict_first", "evict_normal", "evict_unchanged")
            for second in ("", ".L2::evict_first", ".L2::evict_unchanged")
        ),
    }
)
"""Cache hints, and waits for what is there already."""


def emit_basic(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode = instruction.opcode
    if _MOV.fullmatch(opcode):
        _emit_mov(emitter, number, instruction)
        return True
    match = CVTA.fullmatch(opcode)
    if match is not None:
        _emit_cvta(emitter, number, instruction, bool(match.group(1)), match.group(2))
        return True
    if opcode in FENCES:
        emitter.effect(number, instruction, [], fence(opcode), [])
        return True
    if opcode == WAIT_FOR_FRONT:
        emitter.effect(number, instruction, [], wait_for_the_one_in_front, [])
        return True
    if opcode in NO_OPERATION:
        target = instruction.operands[0] if instruction.operands else None
        if opcode.startswith("createpolicy") and isinstance(target, Register):
            emitter.pure(number, instruction, [(target, "{}")], emitter.context.constant(0, target.kind))
        else:
            emitter.finish(number, instruction, {})
        return True
    if opcode in ELEMENTWISE:
        _emit_elementwise(emitter, number, instruction)
        return True
    return False


def _targets(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None) -> list[Register | None]:
    if operand is None or isinstance(operand, Register):
        return [operand]
    if isinstance(operand, PredicatePair):
        return [operand.first, operand.second]
    raise emitter.unsupported(instruction, "destination form not understood")


def _emit_elementwise(emitter: BlockEmitter, number: int, instruction: Instruction) -> None:
    operation = ELEMENTWISE[instruction.opcode]
    operands = instruction.operands
    results = [kind for kind in operation.results if kind != "carry"]
    sources = [kind for kind in operation.operands if kind != "carry"]
    targets = _targets(emitter, instruction, operands[0]) if operands else []
    has_complement = len(targets) == 2 and COMPARE.fullmatch(instruction.opcode) is not None
    combined = COMBINED_COMPARE.fullmatch(instruction.opcode) if len(targets) == 2 else None
    if has_complement or combined:
        results = ["pred", "pred"]
    if len(targets) != len(results) or len(operands) - 1 != len(sources):
        raise emitter.unsupported(instruction, f"expected {len(results)} results and {len(sources)} operands")
    arguments = [
        emitter.source(operand, kind, instruction) for operand, kind in zip(operands[1:], sources, strict=True)
    ]
    if "carry" in operation.operands:
        arguments.append(emitter.read(CARRY))
    forms = [
        _result_form(emitter, instruction, register, kind, operation.sign_extends)
        for register, kind in zip(targets, results, strict=True)
    ]
    if "carry" in operation.results:
        targets.append(CARRY)
        forms.append("{}")
    if operation.expression is not None:
        expression = operation.expression.format(*arguments)
    else:
        expression = f"{emitter.context.bind(operation.function, 'E')}({', '.join(arguments)})"
    held = emitter.temporary() if has_complement or combined else ""
    if has_complement:
        expression = f"({held} := {expression}), ~{held}"
    elif combined:
        compared = ELEMENTWISE[combined.group(1) + combined.group(3)]
        compare = f"{emitter.context.bind(compared.function, 'E')}({', '.join(arguments[:2])})"
        sign = COMBINE[combined.group(2)]
        expression = f"({held} := {compare}) {sign} {arguments[2]}, ~{held} {sign} {arguments[2]}"
    emitter.pure(number, instruction, list(zip(targets, forms, strict=True)), expression)


def _result_form(
    emitter: BlockEmitter, instruction: Instruction, register: Register | None, kind: str, is_signed: bool
) -> str:
    if register is None or register.kind == kind:
        return "{}"
    if "pred" in (register.kind, kind):
        raise emitter.unsupported(instruction, f"a {register.kind} register where {kind} is produced")
    have, want = _BITS[kind], _BITS[register.kind]
    if want > have and is_signed:
        return f"{{}}.view(np.int{have}).astype(np.int{want}).view(np.uint{want})"
    return f"{{}}.astype(np.uint{want})"


def _emit_mov(emitter: BlockEmitter, number: int, instruction: Instruction) -> None:
    if len(instruction.operands) != 2:
        raise emitter.unsupported(instruction, "mov takes two operands")
    target, value = instruction.operands
    width = instruction.opcode.rsplit(".", 1)[1]
    kind = "pred" if width == "pred" else _MOV_KIND[width[1:]]
    if isinstance(value, Vector):
        _emit_packing(emitter, number, instruction, target, value, kind)
    elif isinstance(target, Vector):
        _emit_unpacking(emitter, number, instruction, target, value, kind)
    elif isinstance(target, Register):
        form = _result_form(emitter, instruction, target, kind, False)
        if isinstance(value, Register | Symbol | Immediate):
            emitter.pure(number, instruction, [(target, form)], emitter.source(value, kind, instruction))
        else:
            raise emitter.unsupported(instruction, "operand form not understood")
    else:
        raise emitter.unsupported(instruction, "destination form not understood")


def _part_kind(emitter: BlockEmitter, instruction: Instruction, vector: Vector, kind: str) -> tuple[str, int]:
    """The kind that holds one part, and the bits of a part: a byte lies in a register of 16 bits."""
    bits = _BITS.get(kind, 0) // len(vector.items)
    if bits not in (8, 16, 32) or bits * len(vector.items) != _BITS[kind]:
        raise emitter.unsupported(instruction, "vector parts of this width")
    return f"b{max(bits, 16)}", bits


def _emit_packing(
    emitter: BlockEmitter, number: int, instruction: Instruction, target: Operand | None, vector: Vector, kind: str
) -> None:
    if not isinstance(target, Register) or target.kind != kind:
        raise emitter.unsupported(instruction, "destination form not understood")
    part, bits = _part_kind(emitter, instruction, vector, kind)
    terms = []
    for place, item in enumerate(vector.items):
        text = f"{emitter.source(item, part, instruction)}.astype(np.uint{bits}).astype(np.uint{_BITS[kind]})"
        terms.append(f"({text} << np.uint{_BITS[kind]}({bits * place}))" if place else text)
    emitter.pure(number, instruction, [(target, "{}")], f"({' | '.join(terms)})")


def _emit_unpacking(
    emitter: BlockEmitter,
    number: int,
    instruction: Instruction,
    vector: Vector,
    value: Operand | None,
    kind: str,
) -> None:
    part, bits = _part_kind(emitter, instruction, vector, kind)
    name = emitter.source(value, kind, instruction)
    targets: list[tuple[Register | None, str]] = []
    expressions = []
    for place, item in enumerate(vector.items):
        if item is not None and not isinstance(item, Register):
            raise emitter.unsupported(instruction, "destination form not understood")
        shifted = f"({name} >> np.uint{_BITS[kind]}({bits * place}))" if place else name
        expressions.append(f"{shifted}.astype(np.uint{bits}){'.astype(np.uint16)' if bits == 8 else ''}")
        targets.append((item, _result_form(emitter, instruction, item, part, False)))
    emitter.pure(number, instruction, targets, ", ".join(expressions))


def _emit_cvta(emitter: BlockEmitter, number: int, instruction: Instruction, to_space: bool, space: str) -> None:
    target, value = instruction.operands
    if not isinstance(target, Register) or target.kind != "b64":
        raise emitter.unsupported(instruction, "destination form not understood")
    expression = emitter.source(value, "b64", instruction)
    window = WINDOWS[space.partition(":")[0]]
    sign = "-" if to_space else "+"
    if space == "local":
        expression = f"({expression} {sign} L.local_window)"
    elif window:
        expression = f"({expression} {sign} {emitter.context.constant(window, 'b64')})"
    emitter.pure(number, instruction, [(target, "{}")], expression)
