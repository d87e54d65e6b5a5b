"""Gives every slot of a lowered kernel a place in the frame that each warp has one of.

First come the registers that carry values between blocks, those of disjoint lives in one place; then constants,
parameters and addresses; then what lives inside one block, shared by all blocks; at the end scratch for results on
their way under a partial mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ptx.instruction import Register
from .operations import SLOT_BYTES, SLOT_KIND, Lowered, LoweredBlock, Slot

_ALIGN = 64
SCRATCH_SLOTS = 8
"""Results of one operation that may be on their way at once."""
_KINDS = ("b64", "b32", "pred")


@dataclass(frozen=True)
class Frame:
    """Byte offsets in the frame. ``shared`` holds those of slots with one place, ``local`` those of each block."""

    shared: dict[Slot, int]
    local: list[dict[Slot, int]]
    image_bytes: int
    """Bytes from the start that hold crossing registers and constants."""
    scratch: int
    nbytes: int

    def place(self, block: int, slot: Slot) -> int:
        """Offset of a slot in a block."""
        found = self.local[block].get(slot)
        return self.shared[slot] if found is None else found


def lay_out(kernel: Lowered) -> Frame:
    """Places for all slots of a kernel."""
    shared, top = _crossing_places(kernel)
    for kind in _KINDS:
        for slot in kernel.constants:
            if slot.kind == kind:
                shared[slot] = top
                top += _rounded(SLOT_BYTES[kind])
    image_bytes = top
    local = []
    for block in kernel.blocks:
        places, reach = _local_places(block, shared, image_bytes)
        local.append(places)
        top = max(top, reach)
    return Frame(shared, local, image_bytes, top, top + SCRATCH_SLOTS * SLOT_BYTES["b64"])


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _crossing_places(kernel: Lowered) -> tuple[dict[Slot, int], int]:
    """Colours the registers whose values cross blocks: two that live in one block never share a place."""
    conflicts = dict.fromkeys(kernel.crossing.values(), 0)
    for members in kernel.sets:
        rest = members
        while rest:
            lowest = rest & -rest
            conflicts[lowest.bit_length() - 1] |= members
            rest ^= lowest
    places: dict[Slot, int] = {}
    top = 0
    for kind in _KINDS:
        colours: list[int] = []
        for register, number in _of_kind(kernel.crossing, kind):
            free = (colour for colour, members in enumerate(colours) if not members & conflicts[number])
            colour = next(free, len(colours))
            if colour == len(colours):
                colours.append(0)
            colours[colour] |= 1 << number
            places[Slot(kind, register)] = top + colour * _rounded(SLOT_BYTES[kind])
        top += len(colours) * _rounded(SLOT_BYTES[kind])
    return places, top


def _of_kind(crossing: dict[Register, int], kind: str) -> Iterable[tuple[Register, int]]:
    found = [item for item in crossing.items() if SLOT_KIND[item[0].kind] == kind]
    return sorted(found, key=lambda item: item[1])


def _local_places(block: LoweredBlock, shared: dict[Slot, int], base: int) -> tuple[dict[Slot, int], int]:
    """Places of the slots of one block from ``base`` up, each free again after its last use; and their end."""
    last: dict[Slot, int] = {}
    for number, operation in enumerate(block.operations):
        for slot in operation.fields:
            if isinstance(slot, Slot) and slot not in shared:
                last[slot] = number
    for operand in (block.barrier, block.threads, block.address[0] if block.address is not None else 0):
        if isinstance(operand, Slot) and operand not in shared:
            last[operand] = len(block.operations)
    free: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    places: dict[Slot, int] = {}
    top = base
    for number, operation in enumerate(block.operations):
        mine = {slot: None for slot in operation.fields if isinstance(slot, Slot) and slot not in shared}
        for slot in mine:
            if slot in places:
                continue
            if free[slot.kind]:
                places[slot] = free[slot.kind].pop()
            else:
                places[slot] = top
                top += _rounded(SLOT_BYTES[slot.kind])
        for slot in mine:
            if last[slot] == number:
                free[slot.kind].append(places[slot])
    return places, top
