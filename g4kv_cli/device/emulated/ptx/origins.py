"""In which shared variable an access has to stay: the one whose address its own is made of.

C++ lets a pointer reach no further than the array it was made of, but shared variables lie side by side, and what goes
past the end of one lands in the next. An address is followed from a variable's name through moves, conversions, sums
with what holds no such address, and bits that are set or cut. Whatever else is done with it, a second address that is
added to it, or one that comes out of memory: then nobody knows, and nothing is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .instruction import Address, Instruction, Operand, Register, Symbol, Vector
from .parse import ParsedKernel

_MOVED = re.compile(r"mov\.[bsu](?:32|64)|cvta(?:\.to)?\.shared\.u(?:32|64)|cvt\.[usb](?:32|64)\.[usb](?:32|64)")
_ADDED = re.compile(r"add\.[us](?:32|64)|(?:and|or|xor)\.b(?:32|64)")
_TAKEN = re.compile(r"sub\.[us](?:32|64)")
_MULTIPLIED = re.compile(r"mad\.(?:lo|wide)\.[us](?:16|32|64)")
_ACCESS = re.compile(r"(?:ld|st|atom|red)(?!matrix)\..*|(?:ld|st)matrix\..*|cp\.async\.c[ag]\..*")
_ELSEWHERE = re.compile(r"(?:ld|st|atom|red)\..*\b(?:global|local|param|const|cluster)\b.*")


@dataclass(frozen=True)
class Extent:
    """Bytes of shared memory from the first to the last variable that an access may be of; ``end`` None: to the end of
    what the launch has."""

    begin: int
    end: int | None
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(f"'{_plain(name)}'" for name in self.names)


_NUMBER = re.compile(r"\d+")


def _plain(name: str) -> str:
    """The name in the source of a variable of a function: the last piece of the mangled name, behind its length."""
    for found in _NUMBER.finditer(name) if name.startswith("_ZZ") else ():
        if int(found[0]) == len(name) - found.end() > 0:
            return name[found.end() :]
    return name


_NOTHING: frozenset[str] = frozenset()
_Origin = frozenset[str] | None
"""The variables whose address it may be: none of them; or None where nobody knows."""


def shared_extents(
    kernel: ParsedKernel, offsets: Mapping[str, int], sizes: Mapping[str, int | None]
) -> dict[tuple[int, str], Extent]:
    """(PTX line, opcode) -> where the accesses have to stay. ``sizes`` is None for what a launch sizes."""
    if not offsets:
        return {}
    origins = _origins(kernel, offsets)
    found: dict[tuple[int, str], _Origin] = {}
    for instruction in kernel.instructions:
        if not _ACCESS.fullmatch(instruction.opcode) or _ELSEWHERE.fullmatch(instruction.opcode):
            continue
        address = next((each for each in instruction.operands if isinstance(each, Address)), None)
        if address is None:
            continue
        key = instruction.ptx_line, instruction.opcode
        origin = _of(address.base, origins, offsets) if address.base is not None else None
        found[key] = _joined(found.get(key, origin), origin)
    return {key: _extent(origin, offsets, sizes) for key, origin in found.items() if origin}


def _extent(origin: frozenset[str], offsets: Mapping[str, int], sizes: Mapping[str, int | None]) -> Extent:
    names = sorted(origin, key=lambda name: offsets[name])
    ends = [offsets[name] + size if (size := sizes[name]) is not None else None for name in names]
    last = None if None in ends else max(end for end in ends if end is not None)
    return Extent(offsets[names[0]], last, tuple(names))


def _joined(one: _Origin, other: _Origin) -> _Origin:
    """What a register holds that gets its value in two places."""
    if one is None or other is None or bool(one) != bool(other):
        return None
    return one | other


def _origins(kernel: ParsedKernel, offsets: Mapping[str, int]) -> dict[Register, _Origin]:
    """Of each register that is written. Instructions are gone through until nothing changes."""
    found: dict[Register, _Origin] = {}
    changed = True
    while changed:
        changed = False
        for instruction in kernel.instructions:
            if not instruction.writes or not all(register in found for register in _sources(instruction)):
                continue
            held = _result(instruction, [_of(each, found, offsets) for each in instruction.operands[1:]])
            for register in instruction.writes:
                value = _joined(found.get(register, held), held)
                if register not in found or value != found[register]:
                    found[register] = value
                    changed = True
    return found


def _is_load(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("ld", "atom."))


def _sources(instruction: Instruction) -> list[Register]:
    """Registers of which a result is made; a load's is not made of its address."""
    if _is_load(instruction):
        return []
    parts: list[Operand | None] = []
    for operand in instruction.operands[1:]:
        parts.extend(operand.items if isinstance(operand, Vector) else [operand])
    return [each for each in parts if isinstance(each, Register) and each.kind in ("b32", "b64")]


def _of(operand: Operand | None, found: Mapping[Register, _Origin], offsets: Mapping[str, int]) -> _Origin:
    if isinstance(operand, Symbol):
        return frozenset({operand.name}) if operand.name in offsets else _NOTHING
    if isinstance(operand, Register):
        return found.get(operand, _NOTHING)
    if isinstance(operand, Vector) and any(_of(each, found, offsets) != _NOTHING for each in operand.items):
        return None
    return _NOTHING


def _result(instruction: Instruction, values: list[_Origin]) -> _Origin:
    opcode = instruction.opcode
    if _is_load(instruction) or all(value == _NOTHING for value in values):
        return _NOTHING
    if _MOVED.fullmatch(opcode):
        return values[0]
    if _ADDED.fullmatch(opcode) or _TAKEN.fullmatch(opcode):
        one, other = values
        if one is None or other is None or (other and (one or _TAKEN.fullmatch(opcode))):
            return None
        return one | other
    if _MULTIPLIED.fullmatch(opcode):
        return values[2] if values[:2] == [_NOTHING, _NOTHING] else None
    return _joined(values[0], values[1]) if opcode.startswith("selp.") else None
