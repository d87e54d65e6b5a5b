"""Plain loads of which a compare-and-swap at the same place makes sure: a stale value only costs another turn.

As in ``old = *p; do { seen = old; old = atomicCAS(p, seen, f(seen)); } while (old != seen);``.
"""

from __future__ import annotations

import re

from .instruction import Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from .parse import ParsedKernel

_SWAP = re.compile(r"atom\..*\bcas\..*")
_LOAD = re.compile(r"ld(?:\.(?:global|shared|shared::cta))?\.(?:[bus](?:16|32|64)|f32|f64)")
_MOVE = re.compile(r"mov\..*|selp\..*|cvta\..*")
_Definitions = dict[Register, list[Instruction]]


def validated_loads(kernel: ParsedKernel) -> frozenset[tuple[int, str]]:
    """(PTX line, opcode) of every such load."""
    swaps = [each for each in kernel.instructions if _SWAP.fullmatch(each.opcode) and len(each.operands) == 4]
    if not swaps:
        return frozenset()
    definitions: _Definitions = {}
    for instruction in kernel.instructions:
        for register in instruction.writes:
            definitions.setdefault(register, []).append(instruction)
    found = set()
    for swap in swaps:
        place = _root(swap.operands[1], definitions)
        for load in _loads_of(swap.operands[2], definitions):
            if place is not None and _root(load.operands[1], definitions) == place:
                found.add((load.ptx_line, load.opcode))
    return frozenset(found)


def _loads_of(operand: Operand | None, definitions: _Definitions) -> list[Instruction]:
    """Loads whose result, moved about, may be the operand."""
    loads, seen, left = [], set[Register](), [operand]
    while left:
        each = left.pop()
        if isinstance(each, Vector):
            left.extend(each.items)
        if not isinstance(each, Register) or each in seen:
            continue
        seen.add(each)
        for instruction in definitions.get(each, ()):
            if _LOAD.fullmatch(instruction.opcode):
                loads.append(instruction)
            elif _MOVE.fullmatch(instruction.opcode):
                left.extend(instruction.operands[1:3])
    return loads


def _root(address: Operand | None, definitions: _Definitions) -> tuple[Register | Symbol | None, int] | None:
    """What an address is an offset from, and the offset; alike for copies of one pointer."""
    if not isinstance(address, Address):
        return None
    base, offset = address.base, address.offset
    while isinstance(base, Register):
        sources = definitions.get(base, [])
        if len(sources) != 1:
            break
        opcode, operands = sources[0].opcode, sources[0].operands
        if opcode.startswith(("mov.", "cvta.")) and isinstance(operands[1], Register | Symbol):
            base = operands[1]
        elif opcode.startswith("add.") and isinstance(operands[2], Immediate) and isinstance(operands[1], Register):
            base, offset = operands[1], offset + operands[2].bits
        else:
            break
    return base, offset
