"""Lowers a kernel's basic blocks to operations of the engine's handlers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ..arithmetic.opcodes import ELEMENTWISE
from ..arithmetic.operation import Op
from ..interpreter.emit import (
    ENVIRONMENT_HALVES,
    GRID_WORKSPACE,
    MULTIPROCESSORS,
    SPECIAL_REGISTERS,
    WINDOWS,
    KernelContext,
    real_bits,
)
from ..interpreter.emit_basic import CVTA, FENCES, NO_OPERATION, WAIT_FOR_FRONT
from ..ptx.accumulators import accumulator_registers
from ..ptx.blocks import BasicBlock
from ..ptx.flow import Flow
from ..ptx.instruction import (
    CARRY,
    WGMMA,
    WGMMA_WAIT,
    Address,
    Immediate,
    Instruction,
    Location,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Symbol,
    Vector,
)
from ..ptx.ordering import MEETING
from ..ptx.origins import Extent
from ..ptx.sites import Site
from ..warp.mbarriers import MBARRIER_SHIFT
from .callbacks import MOST_OPERANDS, MOST_RESULTS, Call
from .handlers import COMBINATIONS, HANDLERS
from .operations import SLOT_BYTES, SLOT_KIND, Constant, LoweredBlock, NotLowered, Operation, Slot, Variable

Family = Callable[["Lowering", Instruction], bool]
"""Lowers an instruction if it belongs to it, and says whether it did."""

_BITS = {"b16": 16, "b32": 32, "b64": 64}
_CUT = {("b64", "b32"): "cut_b32_b64", ("b64", "b16"): "cut_b16_b64", ("b32", "b16"): "cut_b16_b32"}
_WIDEN = {("b32", "b64"): "widen_b64_b32", ("b16", "b64"): "widen_b64_b32"}
_SIGN = {
    ("b16", "b32"): ("sign_b32_b16",),
    ("b16", "b64"): ("sign_b32_b16", "sign_b64_b32"),
    ("b32", "b64"): ("sign_b64_b32",),
}

LOGGED = ("store_global", "store_generic", "atomic_global", "atomic_generic")
"""Beginnings of the names of handlers that log stores: one a lane at most."""
BULK_ROWS = 64
"""Room for rows of bulk stores, for each lane, where their group is waited for; what has more is left to the
interpreter."""
WATCHED = ("load_global", "load_generic", "copy_async")
"""The same of those that log loads, where they are watched."""

_OF_CLUSTERS = ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
SPECIAL = {
    **{f"%tid.{axis}": number for number, axis in enumerate("xyz")},
    **{f"%ctaid.{axis}": 3 + number for number, axis in enumerate("xyz")},
    **{f"%ntid.{axis}": 6 + number for number, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": 9 + number for number, axis in enumerate("xyz")},
    **{
        name: 12 + number
        for number, name in enumerate(
            (
                *("%laneid", "%warpid", "%nwarpid", "%dynamic_smem_size", "%total_smem_size"),
                *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
                *("%cluster_ctarank", "%cluster_nctarank"),
                *(f"%{name}.{axis}" for name in _OF_CLUSTERS for axis in "xyz"),
                "%smid",
            )
        )
    },
}
"""Numbers of the special registers, as in ``c/warp.c``."""
_CLOCKS = {
    **dict.fromkeys(("%clock64", "%globaltimer"), ""),
    **dict.fromkeys(("%clock", "%globaltimer_lo"), "cut_b32_b64"),
    **dict.fromkeys(("%clock_hi", "%globaltimer_hi"), "high_b64"),
}
"""What is done to the 64 bits of the clock."""

_MOV = re.compile(r"mov\.(?:[bus](16|32|64)|f(16|32|64)|(pred))")
_COMPARE = re.compile(rf"(setp\.[a-z]+)\.({'|'.join(COMBINATIONS)})(\..+)")
_CARRIED = re.compile(r"(add|sub|mad)(c)?(\.lo|\.hi)?(\.cc)?\.([us])(32|64)")
_BARRIER = re.compile(r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.(?:sync(?:\.aligned)?|red\..*)")


class Lowering:
    """One kernel. Families of instructions use ``source``, ``target``, ``address``, ``site`` and ``emit``."""

    def __init__(self, context: KernelContext, flow: Flow) -> None:
        self.context = context
        self.flow = flow
        self.out: list[Operation] = []
        self.constants: dict[Slot, None] = {}
        self.after: list[Operation] = []
        self.site_count = 0
        self.sites: list[Site] = []
        """The instructions of sites."""
        self._in_wait = False
        self.within: dict[int, Extent] = {}
        """Where in shared memory accesses at some sites have to stay."""
        self._current: Instruction | None = None
        self.granule_shift = 4
        self.calls: dict[str, Call] = {}
        """Opcodes without a handler, in the order of their numbers."""
        self.atomic_forms: set[tuple[str, int]] = set()
        """(operation, bytes) of the atomics on global memory."""
        self.missing: dict[str, None] = {}
        """What the engine does not know of the kernel."""
        self.is_asynchronous = False
        """Whether the interpreter would say so of the kernel."""
        self.accumulators: set[Register] = accumulator_registers(each for block in flow.blocks for each in block.body)
        self.read = flow.reads
        """Registers that any instruction reads."""
        self.reads_clock = False
        """Whether it finds other numbers than on the interpreter."""
        self._fresh = 0
        self._slots: dict[Register, Slot] = {}

    # ---- operands ------------------------------------------------------------------------------------------------

    def fresh(self, kind: str) -> Slot:
        """A slot for a value inside a block."""
        self._fresh += 1
        return Slot(SLOT_KIND[kind], self._fresh)

    def register(self, register: Register) -> Slot:
        """The slot of a register."""
        found = self._slots.get(register)
        if found is None:
            found = self._slots[register] = Slot(SLOT_KIND[register.kind], register)
        return found

    def constant(self, bits: int, kind: str) -> Slot:
        """The slot of a value that all lanes have, of a kind of raw bits."""
        if kind == "pred":
            bits = 0xFFFFFFFF if bits else 0
        else:
            bits &= (1 << _BITS[kind]) - 1
        return self.filled(Slot(SLOT_KIND[kind], Constant(bits, SLOT_KIND[kind])))

    def filled(self, slot: Slot) -> Slot:
        """A slot that is filled before the launch."""
        self.constants[slot] = None
        return slot

    def emit(self, handler: str, *fields: int | Slot, outs: tuple[int, ...] = (0,)) -> None:
        """Append an operation."""
        self.out.append(Operation(handler, list(fields), outs))

    def source(self, operand: Operand | None, kind: str) -> Slot:
        """A slot that holds an operand, cut or zero-extended to a kind of raw bits."""
        if isinstance(operand, Register):
            return self._converted(self.register(operand), operand.kind, kind)
        if isinstance(operand, Negated):
            slot = self.fresh("pred")
            self.emit("not_pred", slot, self.register(operand.register))
            return slot
        if isinstance(operand, Immediate):
            bits = operand.bits if operand.real is None else real_bits(operand.real, kind)
            return self.constant(bits, kind)
        if isinstance(operand, Symbol):
            return self._symbol(operand, kind)
        raise NotLowered(f"operand {type(operand).__name__}")

    def _converted(self, slot: Slot, have: str, want: str) -> Slot:
        if have == want or (have, want) == ("b16", "b32"):
            return slot
        handler = _CUT.get((have, want)) or _WIDEN.get((have, want))
        if handler is None:
            raise NotLowered(f"a {have} register where {want} is needed")
        result = self.fresh(want)
        self.emit(handler, result, slot)
        return result

    def _symbol(self, symbol: Symbol, kind: str) -> Slot:
        name, context = symbol.name, self.context
        if name in SPECIAL and name in SPECIAL_REGISTERS:
            slot = self.fresh("b32")
            self.emit("special", slot, SPECIAL[name])
            return self._converted(slot, "b32", kind)
        if name in _CLOCKS:
            self.reads_clock = True
            ticks = self.fresh("b64")
            self.emit("clock", ticks)
            if not _CLOCKS[name]:
                return self._converted(ticks, "b64", kind)
            half = self.fresh("b32")
            self.emit(_CLOCKS[name], half, ticks)
            return self._converted(half, "b32", kind)
        if name in ("%nsmid", "%gridid"):
            return self.constant(MULTIPROCESSORS if name == "%nsmid" else 1, kind)
        if name in ENVIRONMENT_HALVES:
            number = context.device_variables.index(GRID_WORKSPACE)
            slot = self.fresh("b32")
            handler = "high_b64" if ENVIRONMENT_HALVES[name] else "cut_b32_b64"
            self.emit(handler, slot, self.filled(Slot("b64", Variable(number, 0))))
            return self._converted(slot, "b32", kind)
        if name == "WARP_SZ":
            return self.constant(32, kind)
        for offsets in (context.shared_offsets, context.local_offsets, context.parameter_offsets):
            if name in offsets:
                return self.constant(offsets[name] + symbol.offset, kind)
        if name in context.device_variables and kind == "b64":
            number = context.device_variables.index(name)
            return self.filled(Slot("b64", Variable(number, symbol.offset)))
        raise NotLowered(f"name {name}")

    def target(self, register: Register | None, kind: str, is_signed: bool = False) -> Slot:
        """The slot where a result of a kind goes on its way to a register; what is left to do comes ``after``."""
        if register is None:
            return self.fresh(kind)
        have, want = SLOT_KIND[kind], SLOT_KIND[register.kind]
        is_wider = have == want and _BITS.get(register.kind, 0) > _BITS.get(kind, 0)
        if kind == register.kind or (is_wider and not is_signed):
            return self.register(register)
        if "pred" in (kind, register.kind):
            raise NotLowered(f"a {register.kind} register where {kind} is produced")
        result = self.fresh(kind)
        narrow = _CUT.get((kind, register.kind))
        steps = (narrow,) if narrow else _SIGN[kind, register.kind] if is_signed else (_WIDEN[kind, register.kind],)
        last = result
        for number, step in enumerate(steps):
            final = number == len(steps) - 1
            following = self.register(register) if final else self.fresh("b32")
            self.after.append(Operation(step, [following, last]))
            last = following
        return result

    def call(self, call: Call, results: Sequence[Slot], sources: Sequence[Slot]) -> None:
        """Append a call of a function in Python."""
        missing = [MOST_RESULTS - len(results), MOST_OPERANDS - len(sources)]
        if min(missing) < 0:
            raise NotLowered(f"{call.opcode} with these operands")
        self.calls.setdefault(call.opcode, call)
        places: list[int | Slot] = [*results, *[0] * missing[0], *sources, *[0] * missing[1]]
        sizes = [SLOT_BYTES[place.kind] if isinstance(place, Slot) else 0 for place in places]
        number = list(self.calls).index(call.opcode)
        self.emit("call", *places, number, self.site(), *sizes, outs=tuple(range(len(results))))

    def finish(self) -> None:
        """Append what is left to do for targets."""
        self.out.extend(self.after)
        self.after = []

    def address(self, operand: Operand | None) -> tuple[Slot, int, int]:
        """(slot, whether it is 64 bits wide, constant offset) of an address operand."""
        if not isinstance(operand, Address):
            raise NotLowered("operand is no address")
        if operand.base is None:
            return self.constant(operand.offset, "b64"), 1, 0
        if isinstance(operand.base, Symbol):
            return self.source(operand.base, "b64"), 1, operand.offset
        return self.register(operand.base), int(operand.base.kind == "b64"), operand.offset

    def mbarrier_address(self, operand: Operand | None) -> tuple[Slot, int, int]:
        """The address of an mbarrier, whose kernel is asynchronous then."""
        self.is_asynchronous = True
        self.granule_shift = min(self.granule_shift, MBARRIER_SHIFT)
        return self.address(operand)

    def site(self) -> int:
        """A new number of a place where something can go wrong."""
        number, instruction = self.site_count, self._current
        self.site_count += 1
        name = self.context.sites.kernel
        if instruction is None:
            self.sites.append(Site(number, name, "", 0, Location()))
            return number
        key = instruction.ptx_line, instruction.opcode
        is_used, is_validated = not self.read.isdisjoint(instruction.writes), key in self.context.validated
        what = instruction.opcode, instruction.ptx_line, instruction.location
        extent = self.context.extents.get(key)
        self.sites.append(Site(number, name, *what, self._in_wait, is_used, is_validated, extent))
        if extent is not None:
            self.within[number] = extent
        return number

    # ---- blocks --------------------------------------------------------------------------------------------------

    def block(self, block: BasicBlock, families: Sequence[Family]) -> LoweredBlock:
        """Lower one basic block; what is not known goes to ``missing``."""
        self.out = []
        self._in_wait = block.in_wait
        for instruction in block.body:
            try:
                self._instruction(instruction, families)
            except NotLowered as error:
                self.missing.update(dict.fromkeys(error.args))
        try:
            return self._ended(block)
        except NotLowered as error:
            self.missing.update(dict.fromkeys(error.args))
            return LoweredBlock([], block.end, block.size, ())

    def _instruction(self, instruction: Instruction, families: Sequence[Family]) -> None:
        start = len(self.out)
        self._current = instruction
        if instruction.guard is not None:
            self.emit("guard", self.register(instruction.guard), int(instruction.guard_negated), 0, outs=())
        self._look_at_products(instruction)
        if not any(lower(self, instruction) for lower in families):
            raise NotLowered(instruction.opcode)
        self.finish()
        if instruction.guard is not None:
            self.close_guard(start)

    def _look_at_products(self, instruction: Instruction) -> None:
        """See ``check_products`` of the interpreter."""
        opcode = instruction.opcode
        held = [register for register in instruction.reads if register in self.accumulators]
        is_move = opcode.startswith("mov.") and all(isinstance(item, Register) for item in instruction.operands)
        if held and not is_move and not opcode.startswith((WGMMA, WGMMA_WAIT)):
            self.emit("wgmma_look", self.site(), len(held), *map(self.register, held), outs=())

    def _ended(self, block: BasicBlock) -> LoweredBlock:
        self._current = None
        successors = tuple(block.successors)
        lowered = LoweredBlock(self.out, block.end, block.size, successors)
        final = block.final
        lowered.stands_at = final or (block.body[0] if block.body else None)
        if block.end == "branch" and final is not None and final.guard is not None:
            lowered.guard = self.register(final.guard)
            if final.guard_negated:
                lowered.successors = (successors[1], successors[0])
        elif block.end == "barrier" and final is not None:
            lowered.barrier, lowered.threads = self._barrier(final)
        elif block.end == "phase" and final is not None:
            lowered.address = self.mbarrier_address(final.operands[0])
            lowered.threads = self.source(final.operands[1], "b32")
        elif block.end == "warp" and final is not None:
            lowered.barrier = self.source(final.operands[0], "b32")
            lowered.threads = int(not final.opcode.startswith(MEETING))
        elif block.end == "cluster":
            self.is_asynchronous = True
        elif block.end not in ("jump", "exit", "trap"):
            raise NotLowered(final.opcode if final is not None else block.end)
        if block.waits is not None:
            registers = self.flow.registers
            lowered.look = [self.register(registers[number]) for number in _numbers(block.live_in)]
        if block.end not in ("jump", "branch", "exit"):
            lowered.site = self.site()
        lowered.store_count = sum(operation.handler.startswith(LOGGED) for operation in self.out)
        lowered.store_count += BULK_ROWS * sum(operation.handler == "bulk_wait" for operation in self.out)
        lowered.load_count = sum(operation.handler.startswith(WATCHED) for operation in self.out)
        return lowered

    def close_guard(self, start: int) -> None:
        """Everything since the guard runs under its mask."""
        for operation in self.out[start + 1 :]:
            operation.is_guarded = True
        self.emit("unguard", outs=())

    def _barrier(self, final: Instruction) -> tuple[int | Slot, int | Slot]:
        """(number, thread count or 0 for all): literals, or slots."""
        if not _BARRIER.fullmatch(final.opcode) or len(final.operands) > 2:
            raise NotLowered(final.opcode)
        parts = [
            operand.bits if isinstance(operand, Immediate) else self.source(operand, "b32")
            for operand in (*final.operands, Immediate(0), Immediate(0))[:2]
        ]
        return parts[0], parts[1]


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def lower_basic(lowering: Lowering, instruction: Instruction) -> bool:
    """Elementwise opcodes, mov and cvta, and hints that do nothing."""
    opcode = instruction.opcode
    if _MOV.fullmatch(opcode):
        _lower_mov(lowering, instruction)
    elif (found := CVTA.fullmatch(opcode)) is not None:
        _lower_cvta(lowering, instruction, bool(found.group(1)), found.group(2))
    elif opcode in FENCES:
        lowering.emit("fence", lowering.site(), int(opcode.endswith((".cta", ".cluster"))), outs=())
    elif opcode == WAIT_FOR_FRONT:
        lowering.emit("wait_for_front", outs=())
    elif opcode in NO_OPERATION:
        target = instruction.operands[0] if instruction.operands else None
        if opcode.startswith("createpolicy") and isinstance(target, Register):
            lowering.emit("mov_b64", lowering.register(target), lowering.constant(0, "b64"))
    elif opcode in ELEMENTWISE:
        _lower_elementwise(lowering, instruction)
    else:
        return False
    return True


def _lower_elementwise(lowering: Lowering, instruction: Instruction) -> None:
    opcode, operands = instruction.opcode, instruction.operands
    combined = _COMPARE.fullmatch(opcode)
    plain = combined.group(1) + combined.group(3) if combined else opcode
    steps, operation = HANDLERS.get(plain), ELEMENTWISE[opcode]
    if "carry" in (*operation.results, *operation.operands):
        _lower_carried(lowering, instruction, operation)
        return
    if steps is None:
        _lower_call(lowering, instruction, operation)
        return
    targets = list(_targets(operands[0]))
    has_complement = len(targets) == 2 and opcode.startswith("setp.")
    if len(operands) - 1 != len(operation.operands) or (len(targets) != 1 and not has_complement):
        raise NotLowered(f"{opcode} with these operands")
    sources = [lowering.source(item, kind) for item, kind in zip(operands[1:], operation.operands, strict=True)]
    kind = operation.results[0]
    if combined is not None:
        compared, other = lowering.fresh("pred"), sources[2]
        lowering.emit(steps[0], compared, *sources[:2])
        if has_complement:
            other = lowering.fresh("pred")  # the first result may be the predicate that both combine with
            lowering.emit("mov_pred", other, sources[2])
        lowering.emit(f"{combined.group(2)}_pred", lowering.target(targets[0], "pred"), compared, other)
        if has_complement:
            lowering.emit("not_pred", compared, compared)
            lowering.emit(f"{combined.group(2)}_pred", lowering.target(targets[1], "pred"), compared, other)
        return
    result = lowering.target(targets[0], kind, operation.sign_extends)
    if has_complement:
        held = lowering.fresh("pred")
        lowering.emit(steps[0], held, *sources)
        lowering.emit("mov_pred", result, held)
        lowering.emit("not_pred", lowering.target(targets[1], "pred"), held)
        return
    for number, step in enumerate(steps):
        final = number == len(steps) - 1
        slot = result if final else lowering.fresh("b32")
        lowering.emit(step, slot, *sources)
        sources = [slot]


def _lower_carried(lowering: Lowering, instruction: Instruction, operation: Op) -> None:
    """add.cc, addc and their like: a sum, or that of a product and a third."""
    found, operands = _CARRIED.fullmatch(instruction.opcode), instruction.operands
    wanted = [kind for kind in operation.operands if kind != "carry"]
    target = operands[0]
    if found is None or not isinstance(target, Register) or len(operands) != 1 + len(wanted):
        raise NotLowered(f"{instruction.opcode} with these operands")
    verb, takes, part, gives, sign, width = found.groups()
    kind = f"b{width}"
    a, *others = (lowering.source(item, kind) for item in operands[1:])
    if verb == "mad":
        product = lowering.fresh(kind)
        handler = f"mul_lo_{kind}" if part == ".lo" else f"mul_hi_{sign}{width}"
        lowering.emit(handler, product, a, others[0])
        a, others = product, others[1:]
    is_difference = verb == "sub"
    carry = lowering.register(CARRY) if takes else lowering.constant(int(is_difference), "pred")
    after = lowering.register(CARRY) if gives else lowering.fresh("pred")
    result = lowering.target(target, kind, operation.sign_extends)
    lowering.emit(f"add_carry_{kind}", result, after, a, others[0], carry, int(is_difference), outs=(0, 1))


def _lower_call(lowering: Lowering, instruction: Instruction, operation: Op) -> None:
    """An opcode that has no handler: the table's function, in Python."""
    opcode, operands = instruction.opcode, instruction.operands
    targets = list(_targets(operands[0]))
    if len(targets) != len(operation.results) or len(operands) - 1 != len(operation.operands):
        raise NotLowered(f"{opcode} with these operands")
    sources = [lowering.source(item, kind) for item, kind in zip(operands[1:], operation.operands, strict=True)]
    results = [
        lowering.target(register, kind, operation.sign_extends)
        for register, kind in zip(targets, operation.results, strict=True)
    ]
    lowering.call(Call(opcode, operation.function, operation.results, operation.operands), results, sources)


def _targets(operand: Operand | None) -> tuple[Register | None, ...]:
    if operand is None or isinstance(operand, Register):
        return (operand,)
    if isinstance(operand, PredicatePair):
        return operand.first, operand.second
    raise NotLowered("destination form")


def _lower_mov(lowering: Lowering, instruction: Instruction) -> None:
    target, value = instruction.operands
    width = instruction.opcode.rsplit(".", 1)[1]
    kind = "pred" if width == "pred" else f"b{width[1:]}"
    if isinstance(value, Vector):
        _lower_packing(lowering, target, value, kind)
    elif isinstance(target, Vector):
        _lower_unpacking(lowering, target, value, kind)
    elif isinstance(target, Register):
        handler = {"b16": "mov_b32", "b32": "mov_b32", "b64": "mov_b64", "pred": "mov_pred"}[kind]
        lowering.emit(handler, lowering.target(target, kind), lowering.source(value, kind))
    else:
        raise NotLowered(f"{instruction.opcode} with these operands")


_HALF = {"b64": "b32", "b32": "b16"}
_LOWER_HALF = {"b64": "cut_b32_b64", "b32": "cut_b16_b32"}


def _lower_packing(lowering: Lowering, target: Operand | None, vector: Vector, kind: str) -> None:
    if not isinstance(target, Register) or target.kind != kind:
        raise NotLowered("destination form")
    _pack(lowering, lowering.register(target), vector.items, kind)


def _pack(lowering: Lowering, result: Slot, items: Sequence[Operand | None], kind: str) -> None:
    """Join parts, the lowest first: halves of halves, down to bytes in pairs."""
    half, count = _HALF.get(kind, "b16"), len(items)
    if count not in (2, 4, 8):
        raise NotLowered(f"mov of {count} parts")
    if kind == "b16":
        low, high = (lowering.source(item, "b16") for item in items)
        byte, raised = lowering.fresh("b32"), lowering.fresh("b32")
        lowering.emit("cut_b8", byte, low)
        lowering.emit("shl_b16", raised, high, lowering.constant(8, "b32"))
        lowering.emit("or_b32", result, byte, raised)
        return
    parts = []
    for chosen in (items[: count // 2], items[count // 2 :]):
        if count == 2:
            parts.append(lowering.source(chosen[0], half))
        else:
            parts.append(lowering.fresh(half))
            _pack(lowering, parts[-1], chosen, half)
    lowering.emit(f"join_{kind}", result, *parts)


def _lower_unpacking(lowering: Lowering, vector: Vector, value: Operand | None, kind: str) -> None:
    whole = lowering.source(value, kind)
    if kind == "b16":  # of which a byte may be
        held, whole = whole, lowering.fresh("b16")
        lowering.emit("mov_b32", whole, held)
    _unpack(lowering, vector.items, whole, kind)
    lowering.finish()


def _unpack(lowering: Lowering, items: Sequence[Operand | None], whole: Slot, kind: str) -> None:
    """Take parts apart, as ``_pack`` joins them."""
    count = len(items)
    if count not in (2, 4, 8):
        raise NotLowered(f"mov of {count} parts")
    for number, chosen in enumerate((items[: count // 2], items[count // 2 :])):
        if count > 2:
            part = lowering.fresh(_HALF[kind])
            lowering.emit(f"high_{kind}" if number else _LOWER_HALF[kind], part, whole)
            _unpack(lowering, chosen, part, _HALF[kind])
            continue
        item = chosen[0]
        if item is not None and not isinstance(item, Register):
            raise NotLowered("destination form")
        if kind != "b16":
            handler = f"high_{kind}" if number else _LOWER_HALF[kind]
            lowering.emit(handler, lowering.target(item, _HALF[kind]), whole)
        elif number:
            lowering.emit("shr_u16", lowering.target(item, "b16"), whole, lowering.constant(8, "b32"))
        else:
            lowering.emit("cut_b8", lowering.target(item, "b16"), whole)


def _lower_cvta(lowering: Lowering, instruction: Instruction, to_space: bool, space: str) -> None:
    target, value = instruction.operands
    if not isinstance(target, Register) or target.kind != "b64":
        raise NotLowered("destination form")
    source = lowering.source(value, "b64")
    window = WINDOWS[space.partition(":")[0]]
    if space == "local":
        lowering.emit("from_local_window" if to_space else "to_local_window", lowering.register(target), source)
    elif window:
        handler = "sub_b64" if to_space else "add_b64"
        lowering.emit(handler, lowering.register(target), source, lowering.constant(window, "b64"))
    else:
        lowering.emit("mov_b64", lowering.register(target), source)
