"""Turns one basic block into the source of a Python function; families of instructions add their own emitters.

The function takes a Group and works on local variables, one for each live register; a variable is reused once its
register is dead. Objects that the source needs (constants, functions) are bound to global names.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..arithmetic.operation import EXPRESSION_NAMES
from ..faults import UnsupportedOpcode
from ..memory.access import KIND_BYTES, UNSIGNED, span_of
from ..ptx.blocks import BasicBlock
from ..ptx.instruction import Address, Immediate, Instruction, Negated, Operand, Register, Symbol, Vector
from ..ptx.origins import Extent
from ..ptx.sites import Site, SiteTable
from ..state.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW

DTYPES: dict[str, Any] = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "pred": np.bool_}
_DTYPE_NAMES = {"b16": "uint16", "b32": "uint32", "b64": "uint64", "pred": "bool_"}
_KIND_BITS = {"b16": 16, "b32": 32, "b64": 64}

MULTIPROCESSORS = 132
"""Of an H200; blocks are given to them in turn."""

SPECIAL_REGISTERS = {
    **{f"%tid.{axis}": f"L.tid[{number}]" for number, axis in enumerate("xyz")},
    **{f"%ctaid.{axis}": f"L.ctaid[{number}]" for number, axis in enumerate("xyz")},
    **{f"%ntid.{axis}": f"L.chunk.run.ntid[{number}]" for number, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": f"L.chunk.run.nctaid[{number}]" for number, axis in enumerate("xyz")},
    "%laneid": "L.laneid",
    "%warpid": "L.warpid",
    "%nwarpid": "L.chunk.run.nwarpid",
    "%dynamic_smem_size": "L.chunk.run.dynamic_shared",
    "%total_smem_size": "L.chunk.run.total_shared",
    "%cluster_ctarank": "L.cluster_rank",
    "%cluster_nctarank": "L.chunk.run.cluster_size",
    **{f"%cluster_ctaid.{axis}": f"L.cluster_ctaid[{number}]" for number, axis in enumerate("xyz")},
    **{f"%cluster_nctaid.{axis}": f"L.chunk.run.cluster_extents[{number}]" for number, axis in enumerate("xyz")},
    **{f"%clusterid.{axis}": f"L.clusterid[{number}]" for number, axis in enumerate("xyz")},
    **{f"%nclusterid.{axis}": f"L.chunk.run.nclusterid[{number}]" for number, axis in enumerate("xyz")},
    "%lanemask_eq": "ONE << L.laneid",
    "%lanemask_lt": "(ONE << L.laneid) - ONE",
    "%lanemask_le": "(TWO << L.laneid) - ONE",
    "%lanemask_gt": "~((TWO << L.laneid) - ONE)",
    "%lanemask_ge": "~((ONE << L.laneid) - ONE)",
    "%clock": "L.chunk.run.ticks().astype(uint32)",
    "%clock_hi": "(L.chunk.run.ticks() >> HALF).astype(uint32)",
    "%globaltimer_lo": "L.chunk.run.ticks().astype(uint32)",
    "%globaltimer_hi": "(L.chunk.run.ticks() >> HALF).astype(uint32)",
    "%smid": f"(L.linear_block % {MULTIPROCESSORS}).astype(uint32)",
    "%nsmid": f"(ONE * uint32({MULTIPROCESSORS}))",
}
GRID_WORKSPACE = "%grid_workspace"
"""A stand-in for a module's variable: what the driver gives the barrier of a grid, its address 0 if the launch is not
cooperative."""
RESERVED_SHARED, RESERVED_SHARED_BYTES = "%reserved_smem_offset_1", 288
"""Shared memory that the system keeps for cooperative groups of several warps; here it is behind the kernel's own."""
ENVIRONMENT_HALVES = {"%envreg1": 1, "%envreg2": 0}
"""Registers that hold its address: cooperative_groups/details/driver_abi.h."""

WIDE_SPECIAL_REGISTERS = {
    **dict.fromkeys(("%clock64", "%globaltimer"), "L.chunk.run.ticks()"),
    "%gridid": "ONE.astype(uint64)",
}
"""Of 64 bits. Clocks count what the emulated device has done, not time: each reading is larger than the one before."""


def real_bits(value: float, kind: str) -> int:
    """A decimal float literal as bits of the operand's width."""
    if kind == "b64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if kind == "b16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    return int(np.array(value, np.float32).view(np.uint32))


def constant_array(bits: int, kind: str) -> Any:
    """A uniform value: one read-only element."""
    value = bits != 0 if kind == "pred" else bits & ((1 << _KIND_BITS[kind]) - 1)
    array = np.array([value], DTYPES[kind])
    array.setflags(write=False)
    return array


class KernelContext:
    """What the blocks of a kernel share: bound objects, sites, variables and parameters."""

    def __init__(self, kernel: str) -> None:
        self.sites = SiteTable(kernel)
        self.namespace: dict[str, Any] = {
            **EXPRESSION_NAMES,
            "span_of": span_of,
            "select": select,
            "ONE": np.array([1], np.uint32),
            "TWO": np.array([2], np.uint32),
            "HALF": np.uint64(32),
        }
        for name in _DTYPE_NAMES.values():
            self.namespace[name] = getattr(np, name)
        self.constants: dict[tuple[int, str], str] = {}
        self.shared_offsets: dict[str, int] = {}
        self.local_offsets: dict[str, int] = {}
        self.parameter_offsets: dict[str, int] = {}
        self.device_variables: list[str] = []
        self.constant_variables: list[tuple[int, int]] = []
        """(number, bytes) of those that are constants."""
        self.parameter_loads: list[tuple[int, int, bool, int]] = []
        self.refused: dict[str, UnsupportedOpcode] = {}
        self.read: set[Register] = set()
        """Registers that any instruction reads."""
        self.validated: frozenset[tuple[int, str]] = frozenset()
        """Loads of which a compare-and-swap makes sure (ptx/validated.py)."""
        self.extents: dict[tuple[int, str], Extent] = {}
        """Where in shared memory accesses have to stay (ptx/origins.py)."""
        self.accumulators: set[Register] = set()
        """Registers that may hold results of wgmma that are still being computed (ptx/accumulators.py)."""
        self.smallest_shared_shift = 4
        self.local_bytes = 0
        self.is_asynchronous = False

    def bind(self, value: Any, prefix: str) -> str:
        """A global name for an object."""
        name = f"{prefix}{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def constant(self, bits: int, kind: str) -> str:
        """The name of a uniform value."""
        key = (bits, kind)
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = self.bind(constant_array(bits, kind), "K")
        return name


def select(guard: Any, negated: bool, new: Any, old: Any) -> Any:
    """``new`` where the guard holds, else ``old``."""
    if guard.shape[0] == 1:
        return new if bool(guard[0]) != negated else old
    return np.where(guard, old, new) if negated else np.where(guard, new, old)


class BlockEmitter:
    """Emits one block. Family emitters use ``source``, ``span``, ``pure`` and ``effect``."""

    def __init__(self, context: KernelContext, block: BasicBlock, index: dict[Register, int]) -> None:
        self.context = context
        self.block = block
        self.index = index
        self.lines: list[str] = []
        self.names: dict[Register, str] = {}
        self.free: list[str] = []
        self.slots = 0
        self.spans: dict[Register, str] = {}
        self.last_use = self._last_uses()
        self.temporaries = 0

    def _last_uses(self) -> dict[Register, int]:
        last: dict[Register, int] = {}
        for number, instruction in enumerate(self.block.body):
            for register in instruction.reads:
                last[register] = number
            for register in instruction.writes:
                last[register] = max(last.get(register, number), number)
        if self.block.final is not None:
            for register in self.block.final.reads:
                last[register] = len(self.block.body)
        return last

    def emit(self, text: str) -> None:
        """Append one line of source."""
        self.lines.append(text)

    def temporary(self) -> str:
        """A fresh local name."""
        self.temporaries += 1
        return f"t{self.temporaries}"

    def _slot(self) -> str:
        if self.free:
            return self.free.pop()
        self.slots += 1
        return f"v{self.slots}"

    def read(self, register: Register) -> str:
        """The local variable that holds a register."""
        name = self.names.get(register)
        if name is None:
            name = self.names[register] = self._slot()
            number = self.index[register]
            self.emit(f"{name} = R[{number}]")
            self.emit(f"if {name} is None: {name} = G.pull({number})")
        return name

    def finish(self, number: int, instruction: Instruction, results: dict[Register, str]) -> None:
        """Install the results and free the variables of registers that die here."""
        for register, name in results.items():
            old = self.names.get(register)
            if old is not None:
                self.free.append(old)
            self.names[register] = name
            self.spans.pop(register, None)
        for register in {*instruction.reads, *results}:
            if self.last_use.get(register) == number and not self.block.live_out >> self.index[register] & 1:
                name = self.names.pop(register, "")
                if name:
                    self.free.append(name)
                self.spans.pop(register, None)

    def slot_for(self) -> str:
        """A variable for a result; never one that an operand of the same instruction still uses."""
        return self._slot()

    def source(self, operand: Operand | None, kind: str, instruction: Instruction) -> str:
        """A Python expression for a source operand, converted to a kind of raw bits."""
        if isinstance(operand, Register):
            return self.convert(self.read(operand), operand.kind, kind, instruction)
        if isinstance(operand, Negated):
            if kind != "pred":
                raise self.unsupported(instruction, "negated operand that is no predicate")
            return f"(~{self.read(operand.register)})"
        if isinstance(operand, Immediate):
            bits = operand.bits if operand.real is None else real_bits(operand.real, kind)
            return self.context.constant(bits, kind)
        if isinstance(operand, Symbol):
            return self.symbol(operand, kind, instruction)
        raise self.unsupported(instruction, "operand form not understood")

    def convert(self, name: str, have: str, want: str, instruction: Instruction) -> str:
        """Cut or zero-extend raw bits."""
        if have == want:
            return name
        if "pred" in (have, want):
            raise self.unsupported(instruction, f"a {have} register where {want} is needed")
        return f"{name}.astype({_DTYPE_NAMES[want]})"

    def symbol(self, symbol: Symbol, kind: str, instruction: Instruction) -> str:
        """A special register or the address of a variable in its own state space."""
        context = self.context
        name = symbol.name
        special = SPECIAL_REGISTERS.get(name)
        if special is not None:
            return self.convert(f"({special})", "b32", kind, instruction)
        wide = WIDE_SPECIAL_REGISTERS.get(name)
        if wide is not None:
            return self.convert(f"({wide})", "b64", kind, instruction)
        if name in ENVIRONMENT_HALVES:
            workspace = f"L.chunk.run.symbols[{context.device_variables.index(GRID_WORKSPACE)}]"
            half = f"({workspace} >> HALF)" if ENVIRONMENT_HALVES[name] else workspace
            return self.convert(f"{half}.astype(uint32)", "b32", kind, instruction)
        if name == "WARP_SZ":
            return context.constant(32, kind)
        for offsets in (context.shared_offsets, context.local_offsets, context.parameter_offsets):
            if name in offsets:
                return context.constant(offsets[name] + symbol.offset, kind)
        if name in context.device_variables and kind == "b64":
            number = context.device_variables.index(name)
            text = f"L.chunk.run.symbols[{number}]"
            return f"({text} + {context.constant(symbol.offset, 'b64')})" if symbol.offset else text
        refused = context.refused.get(name)
        if refused is not None:
            raise refused
        raise self.unsupported(instruction, f"unknown name {name}")

    def address(self, address: Operand | None, instruction: Instruction) -> tuple[str, str, int]:
        """(base expression, span expression, constant offset) of an address operand."""
        if not isinstance(address, Address):
            raise self.unsupported(instruction, "operand is no address")
        if address.base is None:
            base = self.context.constant(address.offset, "b64")
            return base, f"span_of({base})", 0
        if isinstance(address.base, Symbol):
            base = self.symbol(address.base, "b64", instruction)
            return base, f"span_of({base})", address.offset
        base = self.read(address.base)
        if instruction.guard is not None:
            return base, "", address.offset
        span = self.spans.get(address.base)
        if span is None:
            span = self.spans[address.base] = self.temporary()
            self.emit(f"{span} = span_of({base})")
        return base, span, address.offset

    def site(self, instruction: Instruction) -> Site:
        """A new site."""
        is_used = not self.context.read.isdisjoint(instruction.writes)
        key = instruction.ptx_line, instruction.opcode
        is_validated, within = key in self.context.validated, self.context.extents.get(key)
        return self.context.sites.add(instruction, self.block.in_wait, is_used, is_validated, within)

    def items(self, instruction: Instruction, operand: Operand | None, count: int) -> tuple[Operand | None, ...]:
        """The ``count`` items of a vector, or of one operand. Raises UnsupportedOpcode if there are others."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            raise self.unsupported(instruction, f"expected {count} operands in braces")
        return items

    def registers(
        self, instruction: Instruction, operand: Operand | None, count: int, kind: str | None = None
    ) -> list[Register | None]:
        """The ``count`` registers that take results, None for a sink: all of a kind, or any but predicates. Raises
        UnsupportedOpcode for anything else."""
        found: list[Register | None] = []
        for item in self.items(instruction, operand, count):
            if item is not None and not isinstance(item, Register):
                raise self.unsupported(instruction, "destination form not understood")
            if item is not None and (item.kind == "pred" if kind is None else item.kind != kind):
                wanted = kind or "b16, b32 or b64"
                raise self.unsupported(instruction, f"{item.name} is of kind {item.kind}, the result of {wanted}")
            found.append(item)
        return found

    def unsupported(self, instruction: Instruction, reason: str = "") -> UnsupportedOpcode:
        """The error for an instruction that cannot be emulated."""
        return UnsupportedOpcode(instruction.opcode, instruction.ptx_line, reason)

    def pure(
        self, number: int, instruction: Instruction, targets: list[tuple[Register | None, str]], expression: str
    ) -> None:
        """Results of an expression without side effects; ``targets`` pair a register with its Python expression
        of ``expression``'s value, named ``{}`` (identity for one result)."""
        results: dict[Register, str] = {}
        first = targets[0][0]
        if len(targets) == 1 and first is not None:
            results[first] = self._guarded(instruction, first, targets[0][1].format(expression))
        else:
            raw = [self.temporary() for _ in targets]
            self.emit(f"{', '.join(raw)} = {expression}")
            for name, (register, form) in zip(raw, targets, strict=True):
                if register is not None:
                    results[register] = self._guarded(instruction, register, form.format(name))
        self.finish(number, instruction, results)

    def _guarded(self, instruction: Instruction, register: Register, value: str) -> str:
        if instruction.guard is None:
            name = self.slot_for()
            self.emit(f"{name} = {value}")
            return name
        guard, old = self.read(instruction.guard), self.read(register)
        name = self.slot_for()
        self.emit(f"{name} = select({guard}, {instruction.guard_negated}, {value}, {old})")
        return name

    def effect(
        self,
        number: int,
        instruction: Instruction,
        results: list[Register | None],
        function: Any,
        arguments: list[str],
        span: str | None = None,
    ) -> None:
        """Call ``function(lanes, *arguments)`` for the lanes whose guard holds.

        With ``span`` not None the first argument is an address base, followed by its span in the call.
        """
        callee = self.context.bind(function, "F")
        if instruction.guard is None:
            names = [self.slot_for() if register is not None else "_" for register in results]
            parts = list(arguments)
            if span is not None:
                parts.insert(1, span)
            call = f"{callee}(L, {', '.join(parts)})" if parts else f"{callee}(L)"
            self.emit(f"{', '.join(names)} = {call}" if names else call)
            found = {register: name for register, name in zip(results, names, strict=True) if register is not None}
            self.finish(number, instruction, found)
            return
        guard = self.read(instruction.guard)
        olds = [self.read(register) if register is not None else "" for register in results]
        names = [self.slot_for() if register is not None else "_" for register in results]
        mask = self.temporary()
        self.emit(f"{mask} = L.sub({guard}, {instruction.guard_negated})")
        parts = [f"{mask}.cut({argument})" for argument in arguments]
        if span is not None:
            cut = self.temporary()
            parts[0] = f"({cut} := {parts[0]})"
            parts.insert(1, f"span_of({cut})")
        call = f"{callee}({', '.join([f'{mask}.lanes', *parts])})"
        if not names:
            self.emit(f"if {mask} is not None: {call}")
        else:
            raw = [self.temporary() for _ in names]
            self.emit(f"if {mask} is not None:")
            self.emit(f"    {', '.join(raw)} = {call}")
            for name, value, old in zip(names, raw, olds, strict=True):
                if name != "_":
                    self.emit(f"    {name} = {mask}.merge({value}, {old}, L.count)")
            copies = [f"{name} = {old}" for name, old in zip(names, olds, strict=True) if name != "_"]
            if copies:
                self.emit(f"else: {'; '.join(copies)}")
        found = {register: name for register, name in zip(results, names, strict=True) if register is not None}
        self.finish(number, instruction, found)

    def write_back(self) -> None:
        """Store the registers that later blocks read."""
        for register, name in self.names.items():
            number = self.index[register]
            if self.block.defined >> number & 1 and self.block.live_out >> number & 1:
                self.emit(f"R[{number}] = {name}")


WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW, "global": 0, "const": 0}
"""What ``cvta`` adds to an address of a state space to make it generic."""


def register_bytes(register: Register | None, element_bytes: int) -> int:
    """Bytes of a destination register; a sink takes the element's own size."""
    return KIND_BYTES[register.kind] if register is not None else max(element_bytes, 2)


__all__ = [
    "DTYPES",
    "SPECIAL_REGISTERS",
    "UNSIGNED",
    "WINDOWS",
    "BlockEmitter",
    "KernelContext",
    "constant_array",
    "register_bytes",
    "select",
]
