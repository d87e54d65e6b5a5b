"""A kernel and the functions that it calls as one body of plain instructions, in which a call is a jump.

A function that neither recurses nor is called through a pointer is copied to each of its calls. Others exist once in a
kernel: a call says in a register where to return to, and ``ret`` branches by it. Arguments and results travel in
registers, one for each piece of a ``.param`` variable that is stored or loaded. Functions that may call themselves keep
what a call could overwrite on a stack in local memory, and their local variables too.

Indexed branches become chains of comparisons here, and printf and assert instructions of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..faults import UnsupportedOpcode
from .call_graph import CallGraph
from .instances import PARAMETER_ACCESS, Instance, Piece, alive_after_calls, kind_of, moving_opcode, overlap, pieces_of
from .instruction import (
    Address,
    Call,
    Immediate,
    Instruction,
    Location,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Symbol,
    TensorAddress,
    Vector,
)
from .parse import ParsedKernel, ParsedModule, Variable
from .parse_body import located

STACK_BYTES = 16384
"""Local memory of a thread for the frames of functions that recurse."""
MOST_INSTRUCTIONS = 200_000
"""Of a kernel with all copies of the functions that it calls."""

PRINTF, ASSERT, WILD_CALL = "vprintf", "assertfail", "wild_call"
"""Stand-ins for calls of ``vprintf`` and ``__assertfail``, and for a call of an address that is no function's."""

_STACK = "%stack"
_HEAP = frozenset({"malloc", "free"})
_MOVES = {"b16": "mov.b16", "b32": "mov.b32", "b64": "mov.b64"}


def link(module: ParsedModule, kernel: ParsedKernel, source_name: str | None) -> ParsedKernel:
    """The kernel without calls and indexed branches; what of them cannot be emulated is added to its ``problems``."""
    if not any(instruction.opcode.startswith(("call", "brx")) for instruction in kernel.instructions) and not any(
        isinstance(operand, Symbol) and operand.name in module.functions
        for instruction in kernel.instructions
        for operand in instruction.operands
    ):
        return kernel
    return _Linker(module, kernel, source_name).run()


class _Linker:
    def __init__(self, module: ParsedModule, kernel: ParsedKernel, source_name: str | None) -> None:
        self.module = module
        self.kernel = kernel
        self.graph = CallGraph(module, kernel, source_name)
        self.out: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.variables: dict[str, Variable] = dict(kernel.variables)
        self.problems: list[UnsupportedOpcode] = list(kernel.problems)
        self.shared: dict[str, Instance] = {}
        self.pending: list[Instance] = []
        self.stack_pointer = Register("%sp", "b64")
        self.copies = 0
        self.alive_after: dict[str, dict[int, set[Register]]] = {}
        self.at: Instruction | None = None
        self.instance: Instance | None = None

    def run(self) -> ParsedKernel:
        self.problems.extend(self.graph.problems)
        recursive = self.graph.recursive
        if recursive:
            self.variables[_STACK] = Variable(_STACK, "local", 16, STACK_BYTES)
        main = Instance(self.kernel, "", "")
        if recursive and self.kernel.instructions:
            self.at, self.instance = self.kernel.instructions[0], main
            self.emit("mov.u64", self.stack_pointer, Symbol(_STACK))
        self.expand(main)
        if self.pending:
            self.emit("exit")
        while self.pending:
            instance = self.pending.pop()
            self.label(instance.body.name + instance.suffix)
            self.expand(instance)
            self.emit("bra", Symbol(instance.leave))
        for instance in self.shared.values():  # only now are all its callers known
            self.label(instance.leave)
            self._return(instance)
        registers = {register for instruction in self.out for register in (*instruction.reads, *instruction.writes)}
        return replace(
            self.kernel,
            instructions=self.out,
            labels=self.labels,
            variables=self.variables,
            registers=registers,
            problems=self.problems,
        )

    # ---- output --------------------------------------------------------------------------------------------------

    def emit(
        self, opcode: str, *operands: Operand | None, guard: Register | None = None, negated: bool = False
    ) -> None:
        """Append an instruction that stands where the current one does."""
        at = self.at
        if at is None:
            raise AssertionError("nothing is being expanded")  # run sets it first
        self.out.append(Instruction(opcode, operands, guard, negated, at.ptx_line, self._location(at)))

    def _location(self, at: Instruction) -> Location:
        call = self.instance.call_location if self.instance is not None else None
        if call is None or at.location.call_line or not call.line:
            return at.location
        return Location(at.location.file, at.location.line, call.file, call.line)

    def label(self, name: str) -> None:
        """Put a label at the end of the output."""
        self.labels[name] = len(self.out)

    def fresh(self, kind: str) -> Register:
        """A register of the linker's own."""
        self.copies += 1
        return Register(f"%link{self.copies}", kind)

    def fresh_label(self) -> str:
        """A label of the linker's own."""
        self.copies += 1
        return f"$link{self.copies}"

    def refuse(self, reason: str, opcode: str | None = None) -> None:
        """Note that the current instruction cannot be emulated."""
        at = self.at
        if at is not None:
            self.problems.append(located(UnsupportedOpcode(opcode or at.opcode, at.ptx_line, reason), at.location))

    # ---- bodies --------------------------------------------------------------------------------------------------

    def expand(self, instance: Instance) -> None:
        """Append a body with the registers, labels and pieces of one copy."""
        body = instance.body
        at_index: dict[int, list[str]] = {}
        for name, index in body.labels.items():
            at_index.setdefault(index, []).append(name)
        for variable in body.variables.values():
            if instance.suffix and variable.space == "local":
                if variable.name not in instance.frame:
                    self._place_local(instance, variable)
            elif instance.suffix:
                self.variables[variable.name] = variable
        for index, instruction in enumerate(body.instructions):
            for name in at_index.get(index, ()):
                self.label(name + instance.suffix)
            self.at, self.instance = instruction, instance
            if len(self.out) > MOST_INSTRUCTIONS:
                self.refuse(f"the kernel and what it calls have more than {MOST_INSTRUCTIONS} instructions")
                return
            self._expand_one(instance, index, instruction)
        for name in at_index.get(len(body.instructions), ()):
            self.label(name + instance.suffix)

    def _place_local(self, instance: Instance, variable: Variable) -> None:
        if instance.recursive is instance:
            begin = -(-instance.frame_bytes // variable.align) * variable.align
            instance.frame[variable.name] = begin
            instance.frame_bytes = begin + variable.nbytes
        else:
            name = variable.name + instance.suffix
            self.variables[name] = replace(variable, name=name)

    def _expand_one(self, instance: Instance, index: int, instruction: Instruction) -> None:
        opcode = instruction.opcode
        access = PARAMETER_ACCESS.fullmatch(opcode)
        if access is not None and self._is_call_parameter(instance, instruction, access.group(1) == "ld"):
            self._move_pieces(instance, instruction, access)
        elif opcode in ("call", "call.uni"):
            self._guarded(instance, instruction, lambda: self._call(instance, index, instruction))
        elif opcode in ("brx.idx", "brx.idx.uni"):
            self._guarded(instance, instruction, lambda: self._indexed_branch(instance, instruction))
        elif opcode in ("ret", "ret.uni") and instance.leave:
            if instruction.guard is None and index + 1 == len(instance.body.instructions):
                return  # where it goes stands next
            guard = instance.register(instruction.guard) if instruction.guard is not None else None
            self.emit("bra", Symbol(instance.leave), guard=guard, negated=instruction.guard_negated)
        else:
            operands = tuple(self._operand(instance, operand) for operand in instruction.operands)
            guard = instance.register(instruction.guard) if instruction.guard is not None else None
            first = operands[1] if len(operands) == 2 else None
            if opcode in ("mov.u64", "mov.b64") and isinstance(first, Address):
                # The address of a local variable in a frame.
                self.emit("add.s64", operands[0], first.base if isinstance(first.base, Register) else None,
                          Immediate(first.offset), guard=guard, negated=instruction.guard_negated)  # fmt: skip
                return
            self.emit(opcode, *operands, guard=guard, negated=instruction.guard_negated)

    def _guarded(self, instance: Instance, instruction: Instruction, expand: Callable[[], None]) -> None:
        """Expand an instruction of several; under a guard the others jump over them."""
        guard, over = instruction.guard, self.fresh_label()
        if guard is not None:
            self.emit("bra", Symbol(over), guard=instance.register(guard), negated=not instruction.guard_negated)
        expand()
        if guard is not None:
            self.label(over)

    def _operand(self, instance: Instance, operand: Operand | None) -> Operand | None:
        if isinstance(operand, Register):
            return instance.register(operand)
        if isinstance(operand, Negated):
            return Negated(instance.register(operand.register))
        if isinstance(operand, PredicatePair):
            first, second = (
                None if half is None else instance.register(half) for half in (operand.first, operand.second)
            )
            return PredicatePair(first, second)
        if isinstance(operand, Vector):
            return Vector(tuple(self._operand(instance, item) for item in operand.items))
        if isinstance(operand, TensorAddress):
            address, coordinates = (
                self._operand(instance, operand.address),
                self._operand(instance, operand.coordinates),
            )
            if isinstance(address, Address) and isinstance(coordinates, Vector):
                return TensorAddress(address, coordinates)
        if isinstance(operand, Address):
            base = operand.base
            if isinstance(base, Register):
                return Address(instance.register(base), operand.offset)
            if isinstance(base, Symbol):
                found = self._symbol(instance, base)
                if isinstance(found, Address):
                    return Address(found.base, found.offset + operand.offset)
                if isinstance(found, Symbol):
                    return Address(found, operand.offset)
        if isinstance(operand, Symbol):
            return self._symbol(instance, operand)
        return operand

    def _symbol(self, instance: Instance, symbol: Symbol) -> Operand:
        """A label, a function or a variable as this copy knows it; a variable in a frame as an address."""
        name = symbol.name
        if name in instance.frame:
            return Address(self.stack_pointer, instance.frame[name] + symbol.offset)
        if name in instance.body.labels:
            return Symbol(name + instance.suffix, symbol.offset)
        if name in self.module.functions:
            return Immediate(self.module.function_address(name))
        variable = instance.body.variables.get(name)
        if instance.suffix and variable is not None and variable.space == "local":
            return Symbol(name + instance.suffix, symbol.offset)
        return symbol

    # ---- arguments and results -----------------------------------------------------------------------------------

    def _is_call_parameter(self, instance: Instance, instruction: Instruction, is_load: bool) -> bool:
        address = instruction.operands[is_load]
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            return False
        return bool(instance.suffix) or address.base.name not in {one.name for one in self.kernel.parameters}

    def _move_pieces(self, instance: Instance, instruction: Instruction, access: re.Match[str]) -> None:
        is_load, letter, nbytes = access.group(1) == "ld", access.group(3), int(access.group(4)) // 8
        address, value = instruction.operands[is_load], instruction.operands[not is_load]
        items = value.items if isinstance(value, Vector) else (value,)
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            return
        for number, item in enumerate(items):
            held = instance.piece(address.base.name, (address.offset + number * nbytes, nbytes))
            mapped = self._operand(instance, item)
            guard = instance.register(instruction.guard) if instruction.guard is not None else None
            target, source = (mapped, held) if is_load else (held, mapped)
            if item is not None or not is_load:
                opcode = moving_opcode(target, source, letter, nbytes)
                self.emit(opcode, target, source, guard=guard, negated=instruction.guard_negated)

    def _pass(self, pairs: Iterable[tuple[dict[Piece, Register], str, Instance, set[Piece]]]) -> None:
        """Copy pieces (source pieces, target variable, target instance, pieces wanted)."""
        for source, variable, instance, wanted in pairs:
            for piece in sorted(wanted):
                held = self._part_of(source, piece) or self._joined(source, piece)
                if held is None and any(overlap(piece, other) for other in source):
                    self.refuse("an argument or result that is passed in pieces of unlike places")
                    continue
                target = instance.piece(variable, piece)
                self.emit(_MOVES[target.kind], target, held if held is not None else Immediate(0))

    def _part_of(self, source: dict[Piece, Register], piece: Piece) -> Register | None:
        """A piece that was passed, alone or as part of a larger one."""
        begin, nbytes = piece
        if piece in source or nbytes == 8:
            return source.get(piece)
        first = begin - begin % (2 * nbytes)
        whole = self._part_of(source, (first, 2 * nbytes))
        if whole is None:
            return None
        part = self.fresh(kind_of(nbytes))
        if nbytes == 1:
            self.emit("shr.u16", part, whole, Immediate(8 * (begin - first)))
            return part
        self.emit(f"mov.b{16 * nbytes}", Vector((part, None) if begin == first else (None, part)), whole)
        return part

    def _joined(self, source: dict[Piece, Register], piece: Piece) -> Register | None:
        """A piece that was passed in halves, or halves of these."""
        begin, nbytes = piece
        if piece in source or nbytes == 1:
            return source.get(piece)
        half = nbytes // 2
        low, high = self._joined(source, (begin, half)), self._joined(source, (begin + half, half))
        if low is None and high is None:
            return None
        whole = self.fresh(kind_of(nbytes))
        if nbytes > 2:
            zero = Immediate(0)
            self.emit(f"mov.b{8 * nbytes}", whole, Vector((low or zero, high or zero)))
            return whole
        parts = [self.fresh("b16"), self.fresh("b16")]
        self.emit("cvt.u16.u8", parts[0], low or Immediate(0))
        self.emit("shl.b16", parts[1], high or Immediate(0), Immediate(8))
        self.emit("or.b16", whole, *parts)
        return whole

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _call(self, instance: Instance, index: int, instruction: Instruction) -> None:
        (call,) = instruction.operands
        if not isinstance(call, Call):
            return
        if isinstance(call.target, Symbol):
            self._call_function(instance, index, call, call.target.name)
            return
        end = self.fresh_label()
        candidates = self.graph.candidates(call)
        pointer = instance.register(call.target)
        names = [(name, self.fresh_label()) for name in candidates]
        for name, label in names:
            is_it = self.fresh("pred")
            self.emit("setp.eq.b64", is_it, pointer, Immediate(self.module.function_address(name)))
            self.emit("bra", Symbol(label), guard=is_it)
        self.emit(WILD_CALL, pointer)
        self.emit("exit")
        for name, label in names:
            self.label(label)
            self._call_function(instance, index, call, name)
            self.emit("bra", Symbol(end))
        self.label(end)

    def _call_function(self, instance: Instance, index: int, call: Call, name: str) -> None:
        if name in ("vprintf", "__assertfail"):
            self._report(instance, call, name)
            return
        function = self.module.functions.get(name)
        if function is None or function.body is None:
            words = "the device's heap (malloc, free, new) is not emulated" if name in _HEAP else (
                f"function {name} is not defined in this module"
            )  # fmt: skip
            self.refuse(words, f"call {name}")
            return
        body = self.graph.bodies[name]
        if len(call.arguments) != len(body.parameters) or len(call.results) != len(body.results):
            self.refuse(f"{name} has {len(body.parameters)} parameters and {len(body.results)} results")
            return
        back = self.fresh_label()
        callee = self._instance_of(instance, body, back)
        arguments = list(zip(call.arguments, (one.name for one in body.parameters), strict=True))
        held = [instance.pieces.get(argument, {}) for argument, _ in arguments]
        saved, bytes_up = self._save(instance, index, callee)
        self._pass(
            (pieces, formal, callee, pieces_of(body, formal, "ld"))
            for pieces, (_, formal) in zip(held, arguments, strict=True)
        )
        if bytes_up:
            self.emit("add.s64", self.stack_pointer, self.stack_pointer, Immediate(bytes_up))
        if callee.return_number is not None:
            self.emit("mov.u32", callee.return_number, Immediate(len(callee.returns)))
            callee.returns.append(back)
            self.emit("bra", Symbol(body.name + callee.suffix))
        else:
            at = self.at
            self.expand(callee)
            self.at, self.instance = at, instance
        self.label(back)
        if bytes_up:
            self.emit("add.s64", self.stack_pointer, self.stack_pointer, Immediate(-bytes_up))
        self._restore(saved)
        for result, formal in zip(call.results, (one.name for one in body.results), strict=True):
            source = {piece: callee.piece(formal, piece) for piece in pieces_of(body, formal, "st")}
            self._pass([(source, result, instance, pieces_of(instance.body, result, "ld"))])

    def _instance_of(self, caller: Instance, body: ParsedKernel, back: str) -> Instance:
        """The copy of a function that a call runs."""
        name = body.name
        at = self.at
        if not self.graph.is_shared(name):
            self.copies += 1
            location = at.location if at is not None else None
            if caller.call_location is not None and location is not None and location.call_line == 0:
                location = caller.call_location if not location.line else location
            return Instance(body, f"@{self.copies}", back, location, caller.recursive)
        found = self.shared.get(name)
        if found is None:
            found = self.shared[name] = Instance(body, f"@{name}", f"$leave@{name}")
            found.return_number = Register(f"%return@{name}", "b32")
            if name in self.graph.recursive:
                found.recursive = found
                for variable in body.variables.values():
                    if variable.space == "local":
                        self._place_local(found, variable)
                found.frame_bytes = -(-found.frame_bytes // 16) * 16
            self.pending.append(found)
        return found

    def _return(self, instance: Instance) -> None:
        """What ``ret`` of a function with several callers does."""
        number = instance.return_number
        for place, back in enumerate(instance.returns[:-1]):
            is_it = self.fresh("pred")
            self.emit("setp.eq.u32", is_it, number, Immediate(place))
            self.emit("bra", Symbol(back), guard=is_it)
        self.emit("bra", Symbol(instance.returns[-1]))

    def _report(self, instance: Instance, call: Call, name: str) -> None:
        """printf, or what a failed assert calls."""
        sources = [next(iter(instance.pieces.get(argument, {}).values()), None) for argument in call.arguments]
        if name == "vprintf" and len(sources) == 2 and len(call.results) == 1:
            self.emit(PRINTF, instance.piece(call.results[0], (0, 4)), *sources)
        elif name == "__assertfail" and len(sources) == 5:
            self.emit(ASSERT, *sources[:4])
        else:
            self.refuse(f"{name} with these operands")

    def _indexed_branch(self, instance: Instance, instruction: Instruction) -> None:
        index, table = instruction.operands
        labels = instance.body.branch_tables.get(table.name if isinstance(table, Symbol) else "")
        if labels is None or not isinstance(index, Register):
            self.refuse("the list of its targets is not known")
            return
        for number, label in enumerate(labels[:-1]):
            is_it = self.fresh("pred")
            self.emit("setp.eq.u32", is_it, instance.register(index), Immediate(number))
            self.emit("bra", Symbol(label + instance.suffix), guard=is_it)
        self.emit("bra", Symbol(labels[-1] + instance.suffix))

    # ---- the stack of functions that recurse ---------------------------------------------------------------------

    def _save(self, instance: Instance, index: int, callee: Instance) -> tuple[list[tuple[int, Register]], int]:
        """Store what a call may overwrite; (what was stored where, how far the stack pointer moves)."""
        owner = instance.recursive
        if owner is None or callee.return_number is None:
            return [], 0
        saved: list[tuple[int, Register]] = []
        place = owner.frame_bytes
        if instance is owner and self.graph.returns_to(callee.body.name, owner.body.name):
            for register in self._alive(instance, index):
                saved.append((place, register))
                self._spill(place, register)
                place += 8
        return saved, -(-place // 16) * 16

    def _alive(self, instance: Instance, index: int) -> list[Register]:
        name = instance.body.name
        if name not in self.alive_after:
            self.alive_after[name] = alive_after_calls(instance.body)
        alive = [instance.register(register) for register in self.alive_after[name].get(index, ())]
        formals = [held for one in instance.body.parameters for held in instance.pieces.get(one.name, {}).values()]
        number = [instance.return_number] if instance.return_number is not None else []
        return [*sorted(alive, key=lambda register: register.name), *formals, *number]

    def _spill(self, place: int, register: Register) -> None:
        value = register
        if register.kind == "pred":
            value = self.fresh("b32")
            self.emit("selp.b32", value, Immediate(1), Immediate(0), register)
        self.emit(f"st.local.{value.kind}", Address(self.stack_pointer, place), value)

    def _restore(self, saved: Sequence[tuple[int, Register]]) -> None:
        for place, register in saved:
            if register.kind == "pred":
                value = self.fresh("b32")
                self.emit("ld.local.b32", value, Address(self.stack_pointer, place))
                self.emit("setp.ne.b32", register, value, Immediate(0))
            else:
                self.emit(f"ld.local.{register.kind}", register, Address(self.stack_pointer, place))
