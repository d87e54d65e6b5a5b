"""Cuts basic blocks so that the engine keeps the interpreter's order where it matters.

The interpreter executes an instruction for all lanes that are resident, the engine a basic block for one warp after
another. Where a kernel has accesses of which others see who came first, each becomes a basic block of its own: then all
warps have made one before any makes the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from ..ptx.blocks import BasicBlock
from ..ptx.flow import Flow, compute_liveness
from ..ptx.instruction import Instruction, Register
from ..ptx.link import PRINTF
from ..ptx.ordering import VOLATILE, WEAK, manner
from ..ptx.origins import Extent
from .lower_atomics import commutes, kind_of

_ACCESSES = ("ld", "st", "atom", "red")


def runs_together(flow: Flow) -> bool:
    """Whether the order matters in which warps and blocks make the kernel's accesses."""
    read = flow.reads
    return any(
        _is_strong(each, block) and not commutes(each, read) and not _is_unseen(each, block, read)
        for block in flow.blocks
        for each in block.body
    )


def mixes_in_shared(flow: Flow, extents: Mapping[tuple[int, str], Extent]) -> bool:
    """Whether atomics of several kinds may meet in shared memory, which show an order that each by itself does not
    have. Those on global memory are seen when they meet (launch.py)."""
    kinds: dict[tuple[str, int], list[Extent | None]] = {}
    for block in flow.blocks:
        for each in block.body:
            if (kind := kind_of(each)) is not None:
                kinds.setdefault(kind, []).append(extents.get((each.ptx_line, each.opcode)))
    return any(
        _overlap(one, other) for first, second in combinations(kinds.values(), 2) for one in first for other in second
    )


def _overlap(one: Extent | None, other: Extent | None) -> bool:
    if one is None or other is None:
        return True
    return (one.end is None or other.begin < one.end) and (other.end is None or one.begin < other.end)


def cut_pieces(flow: Flow) -> None:
    """Let each access that others may see, of a kernel that runs together, be a basic block of its own."""
    places: list[int] = []
    out: list[BasicBlock] = []
    for block in flow.blocks:
        places.append(len(out))
        out.extend(_pieces(block, len(out)))
    last: dict[int, BasicBlock] = {}
    for number, block in enumerate(flow.blocks):
        end = places[number + 1] if number + 1 < len(places) else len(out)
        last[number] = out[end - 1]
        last[number].successors = tuple(places[target] for target in block.successors)
    flow.blocks = out
    flow.entry = places[flow.entry]
    compute_liveness(flow)


def _is_strong(instruction: Instruction, block: BasicBlock) -> bool:
    """Whether it is an access by which threads may meet, or else shows who comes first."""
    opcode = instruction.opcode
    if opcode == PRINTF:  # whose texts have an order
        return True
    return opcode.split(".", 1)[0] in _ACCESSES and manner(opcode, block.in_wait).strength > WEAK


def _is_unseen(instruction: Instruction, block: BasicBlock, read: set[Register]) -> bool:
    """Whether it is a load of which nobody reads anything, or a volatile store, which races with others anyway."""
    word = instruction.opcode.split(".", 1)[0]
    if word == "st":
        return manner(instruction.opcode, block.in_wait).strength == VOLATILE
    return word == "ld" and read.isdisjoint(instruction.writes)


def _pieces(block: BasicBlock, begin: int) -> list[BasicBlock]:
    bodies: list[list[Instruction]] = [[]]
    for instruction in block.body:
        if _is_strong(instruction, block):
            bodies += [[instruction], []]
        else:
            bodies[-1].append(instruction)
    bodies = [body for place, body in enumerate(bodies) if body or place == len(bodies) - 1]
    pieces = []
    for place, body in enumerate(bodies):
        is_last = place == len(bodies) - 1
        piece = BasicBlock(body, "jump", None, (begin + place + 1,))
        if is_last:
            piece.end, piece.final = block.end, block.final
        piece.size = len(body) + (block.size - len(block.body) if is_last else 0)
        piece.in_wait, piece.meets = block.in_wait, block.meets
        if place == 0:
            piece.waits = block.waits
        pieces.append(piece)
    return pieces
