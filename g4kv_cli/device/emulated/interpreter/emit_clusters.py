"""Emitters of thread block clusters: mapa, the cluster's barrier, and what reaches another block's shared memory."""

from __future__ import annotations

import re

from ..memory.access import Element
from ..memory.bulk_copy import load_tensor
from ..ptx.instruction import Address, Immediate, Instruction, Operand, Register
from ..ptx.parse import TYPE_BYTES
from ..warp.clusters import arrive_at_rank, arrive_cluster, map_shared, publish_mbarriers, push, rank_of
from ..warp.mbarriers import MBARRIER_SHIFT
from .emit import BlockEmitter
from .emit_hopper import tensor_operand
from .emit_warp import is_dead

ARRIVE_FORM = re.compile(r"barrier\.cluster\.arrive(?:\.(release|relaxed))?(?:\.aligned)?")
WAIT_FORM = re.compile(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
REMOTE_ARRIVE_FORM = re.compile(
    r"mbarrier\.(?:(arrive)(\.expect_tx)?(?:\.release\.cluster)?|(expect_tx)(?:\.relaxed\.cluster)?)"
    r"\.shared::cluster\.b64"
)
PUSH_FORM = re.compile(
    r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v([24]))?\.([bus](?:32|64)|f32|f64)"
)
MULTICAST_FORM = re.compile(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cluster\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    r"\.multicast::cluster(\.L2::cache_hint)?"
)
MAP_FORM = re.compile(r"(mapa|getctarank)(\.shared::cluster)?\.u(32|64)")
INIT_FENCE = "fence.mbarrier_init.release.cluster"


def emit_clusters(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode = instruction.opcode
    if (found := MAP_FORM.fullmatch(opcode)) is not None and (found.group(2) is None) == (found.group(3) == "64"):
        _emit_map(emitter, number, instruction, found.group(1) == "mapa", found.group(2) is None)
    elif opcode == INIT_FENCE:
        emitter.effect(number, instruction, [], publish_mbarriers(), [])
    elif (found := ARRIVE_FORM.fullmatch(opcode)) is not None:
        function = arrive_cluster(emitter.site(instruction), found.group(1) != "relaxed")
        emitter.effect(number, instruction, [], function, [])
    elif (found := REMOTE_ARRIVE_FORM.fullmatch(opcode)) is not None:
        _emit_arrive(emitter, number, instruction, found.group(1) is not None, found.groups()[1:] != (None, None))
    elif (found := PUSH_FORM.fullmatch(opcode)) is not None:
        _emit_push(emitter, number, instruction, int(found.group(1) or 1), found.group(2))
    elif (found := MULTICAST_FORM.fullmatch(opcode)) is not None:
        _emit_multicast(emitter, number, instruction, int(found.group(1)), found.group(2) is not None)
    else:
        return False
    emitter.context.is_asynchronous = True
    return True


def check_cluster_wait(emitter: BlockEmitter, instruction: Instruction) -> None:
    """Raises UnsupportedOpcode for a form of barrier.cluster.wait that is not known."""
    if WAIT_FORM.fullmatch(instruction.opcode) is None or instruction.operands:
        raise emitter.unsupported(instruction, "only barrier.cluster.wait{.acquire}{.aligned} is known")
    emitter.context.is_asynchronous = True


def _emit_map(emitter: BlockEmitter, number: int, instruction: Instruction, is_map: bool, is_generic: bool) -> None:
    """mapa: an address with a rank; getctarank: the rank of an address."""
    if len(instruction.operands) != 2 + is_map:
        raise emitter.unsupported(instruction, "wrong number of operands")
    target, address, *rank = instruction.operands
    kind = "b64" if is_map and is_generic else "b32"
    if isinstance(address, Address) or not isinstance(target, Register) or target.kind != kind:
        raise emitter.unsupported(instruction, "operand form not understood")
    arguments = [emitter.source(address, "b64" if is_generic else "b32", instruction)]
    arguments += [emitter.source(operand, "b32", instruction) for operand in rank]
    function = map_shared if is_map else rank_of
    emitter.effect(number, instruction, [target], function(emitter.site(instruction), is_generic), arguments)


def _note_shared(emitter: BlockEmitter, shift: int) -> None:
    context = emitter.context
    context.smallest_shared_shift = min(context.smallest_shared_shift, shift)


def _emit_arrive(emitter: BlockEmitter, number: int, instruction: Instruction, arrives: bool, expects: bool) -> None:
    operands = list(instruction.operands)
    state = operands.pop(0) if arrives else None
    if state is not None and not (isinstance(state, Register) and is_dead(emitter, number, state)):
        raise emitter.unsupported(instruction, "an arrival at another block's mbarrier returns no state")
    if len(operands) not in ((2,) if expects else (1, 2)):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_shared(emitter, MBARRIER_SHIFT)
    base, _, offset = emitter.address(operands[0], instruction)
    one: Operand = Immediate(1)
    value = emitter.source(operands[1] if len(operands) == 2 else one, "b32", instruction)
    arguments = [base, emitter.source(one, "b32", instruction), value] if expects else [base, value, value]
    function = arrive_at_rank(emitter.site(instruction), offset, arrives, expects)
    emitter.effect(number, instruction, [], function, arguments)


def _emit_push(emitter: BlockEmitter, number: int, instruction: Instruction, count: int, kind: str) -> None:
    operands = instruction.operands
    if len(operands) != 3:
        raise emitter.unsupported(instruction, "wrong number of operands")
    element = Element(TYPE_BYTES[kind], count, False)
    if element.total_bytes > 16:
        raise emitter.unsupported(instruction, "more than 16 bytes")
    items = emitter.items(instruction, operands[1], count)
    _note_shared(emitter, min(element.shift, MBARRIER_SHIFT))
    base, _, offset = emitter.address(operands[0], instruction)
    mbarrier, _, mbarrier_offset = emitter.address(operands[2], instruction)
    width = f"b{8 * element.element_bytes}"
    values = [emitter.source(item, width, instruction) for item in items]
    function = push(emitter.site(instruction), offset, mbarrier_offset, element)
    emitter.effect(number, instruction, [], function, [base, mbarrier, *values])


def _emit_multicast(emitter: BlockEmitter, number: int, instruction: Instruction, rank: int, has_hint: bool) -> None:
    operands = instruction.operands
    if len(operands) != (5 if has_hint else 4):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_shared(emitter, MBARRIER_SHIFT)
    shared, _, shared_offset = emitter.address(operands[0], instruction)
    tensor_map, map_offset, coordinates = tensor_operand(emitter, instruction, operands[1], rank)
    mbarrier, _, mbarrier_offset = emitter.address(operands[2], instruction)
    ranks = emitter.source(operands[3], "b16", instruction)
    site = emitter.site(instruction)
    function = load_tensor(site, shared_offset, map_offset, mbarrier_offset, is_multicast=True)
    emitter.effect(number, instruction, [], function, [shared, tensor_map, mbarrier, ranks, *coordinates])
