"""Lowers instructions across the lanes of a warp: shuffles, votes, reductions, matrices, mma, barrier reductions."""

from __future__ import annotations

from ..interpreter.emit_warp import MATCH, MATRIX, REDUCTION, REDUX, SHUFFLE, SIGNAL, VOTE
from ..ptx.flow import CONTRIBUTE, READ_REDUCTION
from ..ptx.instruction import Instruction, Operand, PredicatePair, Register, Vector
from .lower import Lowering
from .operations import NotLowered

_SHUFFLE_MODES = ("bfly", "idx", "up", "down")
_VOTE_MODES = ("all", "any", "uni")
_REDUCTIONS = ("add", "minu", "maxu", "mins", "maxs", "and", "or", "xor")


def lower_warp(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    if (found := SHUFFLE.fullmatch(opcode)) is not None and len(operands) == 5:
        value, flag = _pair(operands[0])
        sources = [lowering.source(operand, "b32") for operand in operands[1:]]
        results = lowering.target(value, "b32"), lowering.target(flag, "pred")
        mode = _SHUFFLE_MODES.index(found.group(1))
        lowering.emit("shuffle", *results, *sources, mode, lowering.site(), outs=(0, 1))
    elif (found := VOTE.fullmatch(opcode)) is not None:
        predicate, members = lowering.source(operands[1], "pred"), lowering.source(operands[2], "b32")
        if found.group(2):
            result = lowering.target(_register(operands[0]), "b32")
            lowering.emit("ballot", result, predicate, members, 0, lowering.site())
        else:
            result = lowering.target(_register(operands[0]), "pred")
            mode = _VOTE_MODES.index(found.group(1))
            lowering.emit("vote", result, predicate, members, mode, lowering.site())
    elif (found := REDUX.fullmatch(opcode)) is not None:
        reduced, members = (lowering.source(operand, "b32") for operand in operands[1:])
        name = found.group(3) or (found.group(1) if found.group(1) == "add" else found.group(1) + found.group(2))
        result = lowering.target(_register(operands[0]), "b32")
        lowering.emit("reduce", result, reduced, members, _REDUCTIONS.index(name), lowering.site())
    elif opcode == "elect.sync":
        leader, flag = _pair(operands[0])
        results = lowering.target(leader, "b32"), lowering.target(flag, "pred")
        lowering.emit("elect", *results, lowering.source(operands[1], "b32"), lowering.site(), outs=(0, 1))
    elif (found := MATCH.fullmatch(opcode)) is not None:
        is_all, is_wide = found.group(1) == "all", found.group(2) == "64"
        alike, flag = _pair(operands[0])
        results = lowering.target(alike, "b32"), lowering.target(flag if is_all else None, "pred")
        sources = [lowering.source(operands[1], f"b{found.group(2)}"), lowering.source(operands[2], "b32")]
        lowering.emit("match", *results, *sources, int(is_all), int(is_wide), lowering.site(), outs=(0, 1))
    elif opcode == "activemask.b32":
        lowering.emit("active_mask", lowering.target(_register(operands[0]), "b32"))
    elif opcode == "bar.warp.sync":
        lowering.emit("warp_barrier", lowering.source(operands[0], "b32"), lowering.site(), outs=())
    elif SIGNAL.fullmatch(opcode) is not None and len(operands) == 2:
        numbers = [lowering.source(item, "b32") for item in operands]
        lowering.emit("barrier_signal", *numbers, lowering.site(), outs=())
    elif (found := MATRIX.fullmatch(opcode)) is not None:
        _lower_matrix(lowering, instruction, found.group(1) == "ld", int(found.group(2)), found.group(3) is not None)
    elif opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
        matrix = lowering.source(operands[1], "b32")
        lowering.emit("turn_matrix", lowering.target(_register(operands[0]), "b32"), matrix, lowering.site())
    elif opcode == CONTRIBUTE:
        number, predicate = lowering.source(operands[0], "b32"), lowering.source(operands[1], "pred")
        lowering.emit("barrier_contribute", number, predicate, lowering.site(), outs=())
    elif opcode.startswith(READ_REDUCTION) and (found := REDUCTION.fullmatch(opcode[len(READ_REDUCTION) :])):
        number = lowering.source(operands[1], "b32")
        if found.group(1):
            result = lowering.target(_register(operands[0]), "b32")
            lowering.emit("barrier_count", result, number, lowering.site())
        else:
            result = lowering.target(_register(operands[0]), "pred")
            lowering.emit("barrier_vote", result, number, lowering.site(), ("and", "or").index(found.group(2)))
    else:
        return False
    return True


def _pair(operand: Operand | None) -> tuple[Register | None, Register | None]:
    if isinstance(operand, PredicatePair):
        return operand.first, operand.second
    return _register(operand), None


def _register(operand: Operand | None) -> Register | None:
    if operand is None or isinstance(operand, Register):
        return operand
    raise NotLowered("destination form")


def _lower_matrix(
    lowering: Lowering, instruction: Instruction, is_load: bool, matrices: int, is_transposed: bool
) -> None:
    held, address = instruction.operands if is_load else instruction.operands[::-1]
    items = held.items if isinstance(held, Vector) else (held,)
    if len(items) != matrices:
        raise NotLowered(f"expected {matrices} registers")
    base, is_wide, offset = lowering.address(address)
    fields = (base, offset, lowering.site(), is_wide, int(is_transposed), matrices)
    if is_load:
        targets = [lowering.target(_register(item), "b32") for item in items]
        lowering.emit("load_matrix", *fields, *targets, outs=tuple(range(6, 6 + matrices)))
    else:
        lowering.emit("store_matrix", *fields, *(lowering.source(item, "b32") for item in items), outs=())
