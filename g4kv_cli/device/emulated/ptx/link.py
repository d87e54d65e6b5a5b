"""A kernel and the functions that it calls as one body of plain instructions, in which a call is a jump.

A function that neither recurses nor is called through a pointer is copied to each of its calls. Others exist once in a
kernel: a call says in a register where to return to, and ``ret`` branches by it. Arguments and results travel in
registers, one for each piece of a ``.param`` variable that is stored or loaded. Functions that may call themselves keep
what a call could overwrite on a stack in local memory, and their local variables too.

Indexed branches become chains of comparisons here; printf, assert, malloc and free instructions of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from .call_graph import CallGraph
from .instances import PARAMETER_ACCESS, Instance, moving_opcode, pieces_of
from .instruction import (
    Address,
    Call,
    Immediate,
    Instruction,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Symbol,
    TensorAddress,
    Vector,
)
from .link_output import LinkedBody
from .parse import ParsedKernel, ParsedModule, Variable
from .passing import pass_pieces
from .stack import Stack

MOST_INSTRUCTIONS = 200_000
"""Of a kernel with all copies of the functions that it calls."""

PRINTF, ASSERT, WILD_CALL = "vprintf", "assertfail", "wild_call"
"""Stand-ins for calls of ``vprintf`` and ``__assertfail``, and for a call of an address that is no function's."""

MALLOC, FREE = "malloc", "free"
"""The device's heap, where the module does not define them."""
ALIGNED_MALLOC = "__cuda_syscall_aligned_malloc"
"""What ``new`` of an over-aligned type calls: malloc with an alignment."""


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
        self.out = LinkedBody(list(kernel.problems))
        self.stack = Stack(self.graph, self.out)
        self.variables: dict[str, Variable] = dict(kernel.variables)
        self.shared: dict[str, Instance] = {}
        self.pending: list[Instance] = []

    def run(self) -> ParsedKernel:
        self.out.problems.extend(self.graph.problems)
        main = Instance(self.kernel, "", "")
        if self.graph.recursive and self.kernel.instructions:
            self.out.at, self.out.instance = self.kernel.instructions[0], main
            self.stack.begin(self.variables)
        self.expand(main)
        if self.pending:
            self.out.emit("exit")
        while self.pending:
            instance = self.pending.pop()
            self.out.label(instance.body.name + instance.suffix)
            self.expand(instance)
            self.out.emit("bra", Symbol(instance.leave))
        for instance in self.shared.values():  # only now are all its callers known
            self.out.label(instance.leave)
            self._return(instance)
        registers = {
            register for instruction in self.out.instructions for register in (*instruction.reads, *instruction.writes)
        }
        return replace(
            self.kernel,
            instructions=self.out.instructions,
            labels=self.out.labels,
            variables=self.variables,
            registers=registers,
            problems=self.out.problems,
        )

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
                self.out.label(name + instance.suffix)
            self.out.at, self.out.instance = instruction, instance
            if len(self.out.instructions) > MOST_INSTRUCTIONS:
                self.out.refuse(f"the kernel and what it calls have more than {MOST_INSTRUCTIONS} instructions")
                return
            self._expand_one(instance, index, instruction)
        for name in at_index.get(len(body.instructions), ()):
            self.out.label(name + instance.suffix)

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
            self.out.emit("bra", Symbol(instance.leave), guard=guard, negated=instruction.guard_negated)
        else:
            operands = tuple(self._operand(instance, operand) for operand in instruction.operands)
            guard = instance.register(instruction.guard) if instruction.guard is not None else None
            first = operands[1] if len(operands) == 2 else None
            if opcode in ("mov.u64", "mov.b64") and isinstance(first, Address):
                # The address of a local variable in a frame.
                self.out.emit("add.s64", operands[0], first.base if isinstance(first.base, Register) else None,
                          Immediate(first.offset), guard=guard, negated=instruction.guard_negated)  # fmt: skip
                return
            self.out.emit(opcode, *operands, guard=guard, negated=instruction.guard_negated)

    def _guarded(self, instance: Instance, instruction: Instruction, expand: Callable[[], None]) -> None:
        """Expand an instruction of several; under a guard the others jump over them."""
        guard, over = instruction.guard, self.out.fresh_label()
        if guard is not None:
            self.out.emit("bra", Symbol(over), guard=instance.register(guard), negated=not instruction.guard_negated)
        expand()
        if guard is not None:
            self.out.label(over)

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
            return Address(self.stack.pointer, instance.frame[name] + symbol.offset)
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
                self.out.emit(opcode, target, source, guard=guard, negated=instruction.guard_negated)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _call(self, instance: Instance, index: int, instruction: Instruction) -> None:
        (call,) = instruction.operands
        if not isinstance(call, Call):
            return
        if isinstance(call.target, Symbol):
            self._call_function(instance, index, call, call.target.name)
            return
        end = self.out.fresh_label()
        candidates = self.graph.candidates(call)
        pointer = instance.register(call.target)
        names = [(name, self.out.fresh_label()) for name in candidates]
        for name, label in names:
            is_it = self.out.fresh("pred")
            self.out.emit("setp.eq.b64", is_it, pointer, Immediate(self.module.function_address(name)))
            self.out.emit("bra", Symbol(label), guard=is_it)
        self.out.emit(WILD_CALL, pointer)
        self.out.emit("exit")
        for name, label in names:
            self.out.label(label)
            self._call_function(instance, index, call, name)
            self.out.emit("bra", Symbol(end))
        self.out.label(end)

    def _call_function(self, instance: Instance, index: int, call: Call, name: str) -> None:
        if name in ("vprintf", "__assertfail"):
            self._report(instance, call, name)
            return
        function = self.module.functions.get(name)
        if function is None or function.body is None:
            if name in (MALLOC, FREE, ALIGNED_MALLOC):
                self._use_heap(instance, call, name)
            else:
                self.out.refuse(f"function {name} is not defined in this module", f"call {name}")
            return
        body = self.graph.bodies[name]
        if len(call.arguments) != len(body.parameters) or len(call.results) != len(body.results):
            self.out.refuse(f"{name} has {len(body.parameters)} parameters and {len(body.results)} results")
            return
        back = self.out.fresh_label()
        callee = self._instance_of(instance, body, back)
        arguments = list(zip(call.arguments, (one.name for one in body.parameters), strict=True))
        held = [instance.pieces.get(argument, {}) for argument, _ in arguments]
        saved, bytes_up = self.stack.save(instance, index, callee)
        pairs = zip(held, arguments, strict=True)
        pass_pieces(
            self.out, ((pieces, formal, callee, pieces_of(body, formal, "ld")) for pieces, (_, formal) in pairs)
        )
        self.stack.move(bytes_up)
        if callee.return_number is not None:
            self.out.emit("mov.u32", callee.return_number, Immediate(len(callee.returns)))
            callee.returns.append(back)
            self.out.emit("bra", Symbol(body.name + callee.suffix))
        else:
            at = self.out.at
            self.expand(callee)
            self.out.at, self.out.instance = at, instance
        self.out.label(back)
        self.stack.move(-bytes_up)
        self.stack.restore(saved)
        for result, formal in zip(call.results, (one.name for one in body.results), strict=True):
            source = {piece: callee.piece(formal, piece) for piece in pieces_of(body, formal, "st")}
            pass_pieces(self.out, [(source, result, instance, pieces_of(instance.body, result, "ld"))])

    def _instance_of(self, caller: Instance, body: ParsedKernel, back: str) -> Instance:
        """The copy of a function that a call runs."""
        name = body.name
        at = self.out.at
        if not self.graph.is_shared(name):
            location = at.location if at is not None else None
            if caller.call_location is not None and location is not None and location.call_line == 0:
                location = caller.call_location if not location.line else location
            return Instance(body, f"@{self.out.number()}", back, location, caller.recursive)
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
            is_it = self.out.fresh("pred")
            self.out.emit("setp.eq.u32", is_it, number, Immediate(place))
            self.out.emit("bra", Symbol(back), guard=is_it)
        self.out.emit("bra", Symbol(instance.returns[-1]))

    def _report(self, instance: Instance, call: Call, name: str) -> None:
        """printf, or what a failed assert calls."""
        sources = [next(iter(instance.pieces.get(argument, {}).values()), None) for argument in call.arguments]
        if name == "vprintf" and len(sources) == 2 and len(call.results) == 1:
            self.out.emit(PRINTF, instance.piece(call.results[0], (0, 4)), *sources)
        elif name == "__assertfail" and len(sources) == 5:
            self.out.emit(ASSERT, *sources[:4])
        else:
            self.out.refuse(f"{name} with these operands")

    def _use_heap(self, instance: Instance, call: Call, name: str) -> None:
        sources = [next(iter(instance.pieces.get(argument, {}).values()), None) for argument in call.arguments]
        takes = 2 if name == ALIGNED_MALLOC else 1
        name = MALLOC if takes == 2 else name
        if len(sources) != takes or len(call.results) != (name == MALLOC):
            self.out.refuse(f"{name} with these operands")
            return
        self.out.emit(name, *(instance.piece(result, (0, 8)) for result in call.results), *sources)

    def _indexed_branch(self, instance: Instance, instruction: Instruction) -> None:
        index, table = instruction.operands
        labels = instance.body.branch_tables.get(table.name if isinstance(table, Symbol) else "")
        if labels is None or not isinstance(index, Register):
            self.out.refuse("the list of its targets is not known")
            return
        for number, label in enumerate(labels[:-1]):
            is_it = self.out.fresh("pred")
            self.out.emit("setp.eq.u32", is_it, instance.register(index), Immediate(number))
            self.out.emit("bra", Symbol(label + instance.suffix), guard=is_it)
        self.out.emit("bra", Symbol(labels[-1] + instance.suffix))
