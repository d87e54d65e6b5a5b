"""Emitters of ld and st in every state space, with their vector forms and cache modifiers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from ..memory.access import Element, Loader, Storer, load_global, store_global
from ..memory.generic_memory import is_in_space, load_generic, store_generic
from ..memory.local_memory import load_local, load_parameter, store_local
from ..memory.shared_memory import load_shared, store_shared
from ..ptx.instruction import Address, Immediate, Instruction, Register, Symbol
from ..ptx.parse import TYPE_BYTES
from .emit import BlockEmitter, register_bytes

_EVICTION = r"(?:\.L1::(?:evict_normal|evict_unchanged|evict_first|evict_last|no_allocate))?"
_LEVEL2 = r"(?:\.L2::(?:evict_normal|evict_first|evict_last))?(\.L2::cache_hint)?"
_ORDER = r"(?:\.weak|\.volatile|\.mmio\.relaxed\.sys|\.(?:{})\.(?:cta|cluster|gpu|sys))?"
_TAIL = r"(?:\.v([248]))?\.([bus](?:8|16|32|64)|f32|f64)"
LOAD = re.compile(
    "ldu?"
    + _ORDER.format("relaxed|acquire")
    + r"(?:\.(global|shared|shared::cta|shared::cluster|local|param|const))?(?:\.(?:ca|cg|cs|lu|cv))?(?:\.nc)?"
    + _EVICTION
    + _LEVEL2
    + r"(?:\.L2::(?:64B|128B|256B))?"
    + _TAIL
)
STORE = re.compile(
    "st"
    + _ORDER.format("relaxed|release")
    + r"(?:\.(global|shared|shared::cta|shared::cluster|local))?(?:\.(?:wb|cg|cs|wt))?"
    + _EVICTION
    + _LEVEL2
    + _TAIL
)


IN_SPACE = re.compile(r"isspacep\.(global|shared|shared::cta|shared::cluster|local|param|const)")


def emit_memory(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    match = LOAD.fullmatch(instruction.opcode)
    if match is not None:
        _emit_load(emitter, number, instruction, *match.groups())
        return True
    match = STORE.fullmatch(instruction.opcode)
    if match is not None:
        _emit_store(emitter, number, instruction, *match.groups())
        return True
    match = IN_SPACE.fullmatch(instruction.opcode)
    if match is not None:
        _emit_in_space(emitter, number, instruction, match.group(1))
        return True
    return False


def _element(emitter: BlockEmitter, instruction: Instruction, vector: str | None, kind: str) -> Element:
    element = Element(TYPE_BYTES[kind], int(vector or 1), kind[0] == "s")
    if element.total_bytes > 32:
        raise emitter.unsupported(instruction, "vector access of more than 32 bytes")
    return element


def _emit_in_space(emitter: BlockEmitter, number: int, instruction: Instruction, space: str) -> None:
    if len(instruction.operands) != 2:
        raise emitter.unsupported(instruction, "wrong number of operands")
    target, address = instruction.operands
    if not isinstance(target, Register) or target.kind != "pred" or isinstance(address, Address):
        raise emitter.unsupported(instruction, "operand form not understood")
    function = is_in_space(space, tuple(emitter.context.constant_variables))
    emitter.effect(number, instruction, [target], function, [emitter.source(address, "b64", instruction)])


def _check_shared(emitter: BlockEmitter, instruction: Instruction, space: str | None, element: Element) -> None:
    """Note an access that may be of shared memory. Raises UnsupportedOpcode for one too wide."""
    if space not in ("shared", "shared::cluster", None):
        return
    context = emitter.context
    context.smallest_shared_shift = min(context.smallest_shared_shift, element.shift)
    context.is_asynchronous |= space == "shared::cluster"
    if element.total_bytes > 16:
        raise emitter.unsupported(instruction, "32-byte access outside global memory")


def _emit_load(
    emitter: BlockEmitter,
    number: int,
    instruction: Instruction,
    space: str | None,
    hint: str | None,
    vector: str | None,
    kind: str,
) -> None:
    if len(instruction.operands) != (3 if hint else 2):
        raise emitter.unsupported(instruction, "wrong number of operands")
    element = _element(emitter, instruction, vector, kind)
    targets = emitter.registers(instruction, instruction.operands[0], element.count)
    widths = tuple(register_bytes(register, element.element_bytes) for register in targets)
    address = instruction.operands[1]
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        _emit_parameter_load(emitter, number, instruction, address, element, targets, widths)
        return
    base, span, offset = emitter.address(address, instruction)
    site = emitter.site(instruction)
    if space == "shared::cta":
        space = "shared"
    _check_shared(emitter, instruction, space, element)
    loaders: dict[str | None, Callable[..., Loader]] = {
        "global": load_global,
        "const": load_global,
        "shared": load_shared,
        "shared::cluster": partial(load_shared, is_of_cluster=True),
        "local": load_local,
        "param": load_parameter,
        None: load_generic,
    }
    emitter.effect(number, instruction, targets, loaders[space](site, offset, element, widths), [base], span)


def _emit_parameter_load(
    emitter: BlockEmitter,
    number: int,
    instruction: Instruction,
    address: Address,
    element: Element,
    targets: list[Register | None],
    widths: tuple[int, ...],
) -> None:
    context = emitter.context
    name = address.base.name if isinstance(address.base, Symbol) else ""
    if name not in context.parameter_offsets:
        raise emitter.unsupported(instruction, f"unknown parameter {name}")
    begin = context.parameter_offsets[name] + address.offset
    pairs: list[tuple[Register | None, str]] = []
    expressions = []
    for place, (target, width) in enumerate(zip(targets, widths, strict=True)):
        load = (begin + place * element.element_bytes, element.element_bytes, element.is_signed, width)
        if load not in context.parameter_loads:
            context.parameter_loads.append(load)
        expressions.append(f"L.chunk.run.parameters[{context.parameter_loads.index(load)}]")
        pairs.append((target, "{}"))
    emitter.pure(number, instruction, pairs, ", ".join(expressions))


def _emit_store(
    emitter: BlockEmitter,
    number: int,
    instruction: Instruction,
    space: str | None,
    hint: str | None,
    vector: str | None,
    kind: str,
) -> None:
    if len(instruction.operands) != (3 if hint else 2):
        raise emitter.unsupported(instruction, "wrong number of operands")
    element = _element(emitter, instruction, vector, kind)
    base, span, offset = emitter.address(instruction.operands[0], instruction)
    values = []
    for item in emitter.items(instruction, instruction.operands[1], element.count):
        if isinstance(item, Register):
            if item.kind == "pred":
                raise emitter.unsupported(instruction, "a predicate cannot be stored")
            values.append(emitter.read(item))
        elif isinstance(item, Immediate):
            values.append(emitter.source(item, f"b{max(16, 8 * element.element_bytes)}", instruction))
        else:
            raise emitter.unsupported(instruction, "source form not understood")
    site = emitter.site(instruction)
    if space == "shared::cta":
        space = "shared"
    _check_shared(emitter, instruction, space, element)
    storers: dict[str | None, Callable[..., Storer]] = {
        "global": store_global,
        "shared": store_shared,
        "shared::cluster": partial(store_shared, is_of_cluster=True),
        "local": store_local,
        None: store_generic,
    }
    emitter.effect(number, instruction, [], storers[space](site, offset, element), [base, *values], span)
