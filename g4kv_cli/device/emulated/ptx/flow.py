"""Control flow of one kernel: basic blocks, the order in which they are scheduled, and register liveness."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..faults import UnsupportedOpcode
from .accumulators import name_accumulators
from .blocks import BasicBlock
from .contraction import contract
from .instruction import Instruction, Register, Symbol
from .mma_batches import batch_multiplies
from .ordering import MEETING, learns, meeting_before
from .parse import ParsedKernel

CONTRIBUTE = "cp.reduction.contribute"
READ_REDUCTION = "reduction.of."
"""Stand-ins for the two halves of a bar.red around its barrier; the first, like cp, has no result."""

READ_PHASE = "phase.of."
"""Stand-in for the second half of a try_wait: its result, read after the wait."""

EXITS = frozenset({"ret", "ret.uni", "exit"})
BRANCHES = frozenset({"bra", "bra.uni"})


@dataclass
class Flow:
    """Blocks in scheduling order: the scheduler always runs the lowest index that has lanes waiting."""

    blocks: list[BasicBlock]
    registers: list[Register] = field(default_factory=list)
    register_index: dict[Register, int] = field(default_factory=dict)
    entry: int = 0

    @property
    def reads(self) -> set[Register]:
        """Registers that any instruction reads."""
        found: set[Register] = set()
        for block in self.blocks:
            for instruction in (*block.body, *([block.final] if block.final is not None else [])):
                found.update(instruction.reads)
        return found


def is_barrier(opcode: str) -> bool:
    """Whether the opcode waits for other warps of the thread block (``bar.arrive`` and ``bar.warp.sync`` do not)."""
    if opcode.startswith(("bar.warp.", "bar.arrive", "barrier.arrive", "barrier.cta.arrive", "barrier.cluster")):
        return False
    return opcode.startswith(("bar.", "barrier."))


def is_reduction(opcode: str) -> bool:
    """Whether the barrier also combines a predicate of all its threads."""
    return opcode.startswith(("bar.red.", "bar.cta.red.", "barrier.red.", "barrier.cta.red."))


def is_phase_wait(opcode: str) -> bool:
    """Whether the opcode waits for a phase of an mbarrier. A test_wait may wait too: until nothing else can run."""
    return opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))


def is_cluster_wait(opcode: str) -> bool:
    """Whether the opcode waits for the other blocks of the cluster."""
    return opcode.startswith("barrier.cluster.wait")


TRAPS = frozenset({"trap", "brkpt"})
"""What ends a launch; a breakpoint does where no debugger is."""
WARP_BARRIER = "bar.warp.sync"


def _block_ends(instructions: Sequence[Instruction]) -> list[bool]:
    """Which instructions end a block. A bar.warp.sync does only where lanes of its warp may wait elsewhere."""
    opcodes = [instruction.opcode for instruction in instructions]
    others = {*BRANCHES, *EXITS, *TRAPS}
    if any(is_phase_wait(opcode) or opcode.startswith(MEETING) for opcode in opcodes):
        others.add(WARP_BARRIER)
    waits = (is_barrier, is_phase_wait, is_cluster_wait)
    return [opcode in others or opcode.startswith(MEETING) or any(one(opcode) for one in waits) for opcode in opcodes]


def _cut_phase_wait(block: BasicBlock, last: Instruction, extra: list[BasicBlock], total: int, following: int) -> None:
    """mbarrier.try_wait becomes: wait, read the result (in a block of its own)."""
    if last.guard is not None or len(last.operands) not in (3, 4):
        raise UnsupportedOpcode(last.opcode, last.ptx_line, "under a guard, or with these operands")
    result, address, parity = last.operands[:3]
    read = replace(last, opcode=READ_PHASE + last.opcode, operands=(result,))
    block.end, block.final = "phase", replace(last, operands=(address, parity))
    block.successors = (total + len(extra),)
    extra.append(BasicBlock([read], "jump", None, (following,)))


def _cut_reduction(block: BasicBlock, last: Instruction, extra: list[BasicBlock], total: int, following: int) -> None:
    """bar.red becomes: contribute the predicate, wait, read the result (in a block of its own)."""
    if last.guard is not None or len(last.operands) not in (3, 4):
        raise UnsupportedOpcode(last.opcode, last.ptx_line, "under a guard, or with these operands")
    result, number, *rest = last.operands
    contribute = replace(last, opcode=CONTRIBUTE, operands=(number, rest[-1]))
    wait = replace(last, operands=(number, *rest[:-1]))
    read = replace(last, opcode=READ_REDUCTION + last.opcode, operands=(result, number))
    block.body = [*block.body, contribute]
    block.end, block.final, block.successors = "barrier", wait, (total + len(extra),)
    extra.append(BasicBlock([read], "jump", None, (following,)))


def build_flow(kernel: ParsedKernel, joins_multiplies: bool = True) -> Flow:
    """Cut a kernel into blocks, order them, and compute liveness; ``joins_multiplies`` as in mma_batches.py."""
    blocks, entry = cut(kernel)
    if _note_waits(blocks, entry):
        blocks, entry = cut(_with_meetings(kernel))
        _note_waits(blocks, entry)
    _join_ways_back(blocks, entry)
    kernel.contracted = contract(blocks) if kernel.contracts else 0
    for block in blocks:
        is_stand_in = block.final is not None and block.final.opcode.startswith(MEETING)
        block.size = len(block.body) + (block.final is not None and not is_stand_in)
        block.meets = block.end in ("barrier", "phase", "warp", "cluster") or any(
            ".sync" in each.opcode for each in block.body
        )
        if joins_multiplies:
            block.body = batch_multiplies(block.body)
    order = _schedule_order(blocks, entry)
    position = {old: new for new, old in enumerate(order)}
    ordered = [blocks[old] for old in order]
    for block in ordered:
        block.successors = tuple(position[target] for target in block.successors)
    flow = Flow(ordered, entry=position[entry])
    compute_liveness(flow)
    if name_accumulators(ordered, flow.register_index):
        compute_liveness(flow)
    return flow


def cut(kernel: ParsedKernel) -> tuple[list[BasicBlock], int]:
    """The basic blocks in the order of the text, and the number of the first to run."""
    instructions = kernel.instructions
    starts = {0, *kernel.labels.values()}
    ends = _block_ends(instructions)
    for index, is_end in enumerate(ends):
        if is_end:
            starts.add(index + 1)
    bounds = sorted(starts)
    number_at = {start: number for number, start in enumerate(bounds)}
    blocks: list[BasicBlock] = []
    extra: list[BasicBlock] = []
    total = len(bounds)
    for number, start in enumerate(bounds):
        stop = bounds[number + 1] if number + 1 < total else len(instructions)
        body = instructions[start:stop]
        block = BasicBlock(body, successors=(number + 1,))
        blocks.append(block)
        if not body:
            if start >= len(instructions):
                block.end, block.successors = "exit", ()
            continue
        last = body[-1]
        opcode = last.opcode
        if not ends[stop - 1]:
            if number + 1 == total:
                block.end, block.successors = "exit", ()
            continue
        block.body = body[:-1]
        if opcode in BRANCHES:
            label = last.operands[0]
            if not isinstance(label, Symbol):
                raise UnsupportedOpcode(opcode, last.ptx_line, "branch target is no label")
            target = number_at[kernel.labels[label.name]]
            if last.guard is None:
                block.final, block.successors = last, (target,)
            else:
                block.end, block.final, block.successors = "branch", last, (target, number + 1)
            continue
        tail = block
        if last.guard is not None:
            # A guarded ret, trap or barrier becomes a branch around a block of its own.
            tail = BasicBlock([])
            block.end, block.final, block.successors = "branch", last, (total + len(extra), number + 1)
            extra.append(tail)
        tail.final = last
        if opcode in EXITS:
            tail.end, tail.successors = "exit", ()
        elif opcode in TRAPS:
            tail.end, tail.successors = "trap", ()
        elif opcode == WARP_BARRIER or opcode.startswith(MEETING):
            tail.end, tail.successors = "warp", (number + 1,)
        elif is_cluster_wait(opcode):
            tail.end, tail.successors = "cluster", (number + 1,)
        elif is_phase_wait(opcode):
            _cut_phase_wait(block, last, extra, total, number + 1)
        elif is_reduction(opcode):
            _cut_reduction(block, last, extra, total, number + 1)
        else:
            tail.end, tail.successors = "barrier", (number + 1,)
    return blocks + extra, 0


def _schedule_order(blocks: list[BasicBlock], entry: int) -> list[int]:
    """Reverse post-order with every loop contiguous, so that lowest-first reconverges at post-dominators.

    A loop's exits are visited before its body, which puts all that follows the loop behind all of the loop. Blocks
    that only trap come first: a trap is taken before any other lane goes on, as if it had been reached first. Then come
    those that only lead to the end (see ``_last_ways``): who leaves is gone before others wait for who is left.
    """
    exits = _loop_exits(blocks, entry)
    post_order: list[int] = []
    seen = {entry}
    stack: list[tuple[int, Iterator[int]]] = [(entry, iter((*exits.get(entry, ()), *blocks[entry].successors)))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter((*exits.get(child, ()), *blocks[child].successors))))
                break
        else:
            post_order.append(node)
            stack.pop()
    order = post_order[::-1]
    traps = [node for node in order if blocks[node].end == "trap"]
    leaving = _last_ways(blocks, order)
    first = traps + [node for node in order if node in leaving and blocks[node].end != "trap"]
    taken = set(first)
    return first + [node for node in order if node not in taken]


def _join_ways_back(blocks: list[BasicBlock], entry: int) -> None:
    """A loop with several ways back to its header gets one block that they all lead to.

    It is scheduled behind all else of the loop: lanes that go back at once wait there for those that have more to do in
    this turn, and all of them are together again at the header.
    """
    for header, body in _loop_bodies(blocks, entry).items():
        back = [block for node, block in enumerate(blocks) if body >> node & 1 and header in block.successors]
        if len(back) > 1:
            join = BasicBlock([], successors=(header,), in_wait=blocks[header].in_wait)
            for block in back:
                block.successors = tuple(len(blocks) if target == header else target for target in block.successors)
            blocks.append(join)


def _note_waits(blocks: list[BasicBlock], entry: int) -> bool:
    """Set ``in_wait`` and ``waits``; whether any loop may wait for other threads. One without an exit waits, too: the
    compiler may have taken what it waits for out of it, as something that is not volatile."""
    found = False
    for header, body in _loop_bodies(blocks, entry).items():
        members = [block for number, block in enumerate(blocks) if body >> number & 1]
        has_exit = any(not body >> target & 1 for block in members for target in block.successors)
        _look_again(members)
        blocks[header].waits = _waits_at(members) if has_exit else _waits_at(members) or members[-1].final
        if blocks[header].waits is not None:
            found = True
            for block in members:
                block.in_wait = True
    return found


_STACK = re.compile(r"(ld|st)(?:\.local)?(?:\.v[24])?\.(?:[bus]\d+|f\d+)")
"""What may go through a thread's own memory, as all variables do that --device-debug compiles."""


_DOES_MORE = ("st.", "atom.", "red.", "call", "cp.", "bar.", "barrier.", "mbarrier.", "mma.", "wmma.", "wgmma.")
_CACHED = re.compile(r"\.(?:weak|ca|cg|cs|lu|cv|L[12]::\w+)(?=\.)")


def _look_again(members: list[BasicBlock]) -> None:
    """In a loop that does nothing but load from one place until it finds something else there, the load is volatile.

    It is there in each turn because of a fence or of ``asm volatile``: what it waits for is another thread.
    """
    every = [each for block in members for each in (*block.body, *([block.final] if block.final is not None else []))]
    if any(each.opcode.startswith(_DOES_MORE) and ".local" not in each.opcode for each in every):
        return
    written = {register for each in every for register in each.writes}
    loads = {
        id(each): _as_volatile(each)
        for each in every
        if each.opcode.startswith(("ld.global.", "ld.shared.", "ld.weak.", "ld.u", "ld.s", "ld.b"))
        and ".nc" not in each.opcode
    }
    again = {number: load for number, load in loads.items() if written.isdisjoint(load.reads)}
    depends = {register for load in again.values() for register in load.writes}
    size = -1
    while size != len(depends):
        size = len(depends)
        depends.update(register for each in every if not depends.isdisjoint(each.reads) for register in each.writes)
    if not any(block.end == "branch" and block.final is not None and block.final.guard in depends for block in members):
        return
    for block in members:
        block.body[:] = [again.get(id(each), each) for each in block.body]


def _as_volatile(load: Instruction) -> Instruction:
    """A plain load as a volatile one, of which no cache is told anything."""
    opcode = "ld.volatile" + _CACHED.sub("", load.opcode.removeprefix("ld"))
    return replace(load, opcode=opcode, operands=load.operands[:2])


def _waits_at(members: list[BasicBlock]) -> Instruction | None:
    """The load or atomic on whose result a branch in a loop depends: others may change what it finds."""
    sources = [each for block in members for each in block.body if learns(each.opcode)]
    if not sources:
        return None
    depends = {register for each in sources for register in each.writes}
    size, on_stack = -1, False
    while size != len(depends) + on_stack:
        size = len(depends) + on_stack
        for block in members:
            for each in block.body:
                of_stack = _STACK.fullmatch(each.opcode)
                if any(register in depends for register in each.reads):
                    depends.update(each.writes)
                    on_stack |= of_stack is not None and of_stack.group(1) == "st"
                elif on_stack and of_stack is not None and of_stack.group(1) == "ld":
                    depends.update(each.writes)
    branches = (block.final.guard for block in members if block.end == "branch" and block.final is not None)
    return sources[0] if any(guard in depends for guard in branches) else None


def _with_meetings(kernel: ParsedKernel) -> ParsedKernel:
    """The kernel with a stand-in before each instruction that lanes of a warp execute together."""
    instructions: list[Instruction] = []
    place: list[int] = []
    for instruction in kernel.instructions:
        place.append(len(instructions))
        meeting = meeting_before(instruction)
        instructions.extend([instruction] if meeting is None else [meeting, instruction])
    place.append(len(instructions))
    labels = {name: place[index] for name, index in kernel.labels.items()}
    return replace(kernel, instructions=instructions, labels=labels)


def _last_ways(blocks: list[BasicBlock], order: list[int]) -> set[int]:
    """Blocks of lanes that leave early: all there is to come is the end, and who has met others never comes there.

    An end with nothing before it is one for all lanes.
    """
    parents: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for child in blocks[node].successors:
            parents[child].append(node)
    meetings = [node for node in order if blocks[node].meets]
    leads_to_meeting = _reached(meetings, parents)
    after_meeting = _reached(meetings, {node: blocks[node].successors for node in order})
    ends = {node for node in order if blocks[node].end == "exit" and not blocks[node].body}
    return ends if not meetings else ends | (set(order) - leads_to_meeting - after_meeting)


def _reached(begin: Sequence[int], following: Mapping[int, Sequence[int]]) -> set[int]:
    """All nodes on ways from some, these included."""
    found = set(begin)
    work = list(begin)
    while work:
        for node in following[work.pop()]:
            if node not in found:
                found.add(node)
                work.append(node)
    return found


def _loop_exits(blocks: list[BasicBlock], entry: int) -> dict[int, list[int]]:
    """Loop header -> targets of the edges that leave the loop."""
    return {
        header: [
            target
            for node, block in enumerate(blocks)
            if body >> node & 1
            for target in block.successors
            if not body >> target & 1
        ]
        for header, body in _loop_bodies(blocks, entry).items()
    }


def _loop_bodies(blocks: list[BasicBlock], entry: int) -> dict[int, int]:
    """Loop header -> the blocks of the loop as bits (natural loops, merged by header)."""
    predecessors: dict[int, list[int]] = {}
    reachable = [entry]
    seen = {entry}
    for node in reachable:
        for child in blocks[node].successors:
            predecessors.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                reachable.append(child)
    everything = sum(1 << node for node in reachable)
    dominators = dict.fromkeys(reachable, everything)
    dominators[entry] = 1 << entry
    changed = True
    while changed:
        changed = False
        for node in reachable:
            if node == entry:
                continue
            common = everything
            for parent in predecessors[node]:
                common &= dominators[parent]
            common |= 1 << node
            if common != dominators[node]:
                dominators[node] = common
                changed = True
    bodies: dict[int, int] = {}
    for node in reachable:
        for header in blocks[node].successors:
            if dominators[node] >> header & 1:
                body = bodies.get(header, 0) | 1 << header
                work = [node]
                while work:
                    member = work.pop()
                    if not body >> member & 1:
                        body |= 1 << member
                        work.extend(predecessors.get(member, ()))
                bodies[header] = body
    return bodies


def compute_liveness(flow: Flow) -> None:
    """Number the registers, and set which of them live into and out of each block."""
    index = flow.register_index
    upward: list[int] = []
    for block in flow.blocks:
        used = 0
        defined = 0
        instructions = [*block.body]
        if block.final is not None:
            instructions.append(block.final)
        for instruction in instructions:
            for register in instruction.reads:
                bit = 1 << index.setdefault(register, len(index))
                if not defined & bit:
                    used |= bit
            for register in instruction.writes:
                defined |= 1 << index.setdefault(register, len(index))
        upward.append(used)
        block.defined = defined
        block.live_in, block.live_out = used, 0
    flow.registers = list(index)
    changed = True
    while changed:
        changed = False
        for block, used in zip(reversed(flow.blocks), reversed(upward), strict=True):
            out = 0
            for target in block.successors:
                out |= flow.blocks[target].live_in
            live_in = used | (out & ~block.defined)
            if out != block.live_out or live_in != block.live_in:
                block.live_out, block.live_in = out, live_in
                changed = True
