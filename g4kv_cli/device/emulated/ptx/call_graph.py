"""Which functions a kernel reaches, directly or through pointers, and which of them may call themselves."""

from __future__ import annotations

from collections.abc import Iterator

from ..faults import UnsupportedOpcode
from .instruction import Address, Call, Instruction, Operand, Symbol, Vector
from .parse import ParsedKernel, ParsedModule
from .parse_body import parse_function

CALLS = frozenset({"call", "call.uni"})


def calls_of(body: ParsedKernel) -> Iterator[Call]:
    """The calls of a body."""
    for instruction in body.instructions:
        if instruction.opcode in CALLS and isinstance(instruction.operands[0], Call):
            yield instruction.operands[0]


def _symbols(operand: Operand | None) -> Iterator[str]:
    if isinstance(operand, Symbol):
        yield operand.name
    elif isinstance(operand, Address) and isinstance(operand.base, Symbol):
        yield operand.base.name
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from _symbols(item)


class CallGraph:
    """Of one kernel. ``bodies`` are the functions that it may reach; ``recursive`` those that may call themselves."""

    def __init__(self, module: ParsedModule, kernel: ParsedKernel, source_name: str | None) -> None:
        self.module = module
        self.bodies: dict[str, ParsedKernel] = {}
        self.problems: list[UnsupportedOpcode] = []
        self.pointed_at: list[str] = []
        """Functions whose address the kernel may get hold of."""
        self._variables: set[str] = set()
        self._targets: dict[str, set[str]] = {}
        self._reach(kernel, source_name)
        self.recursive = {name for name in self.bodies if self.returns_to(name, name)}
        self._through_pointers = {
            name for body in (kernel, *self.bodies.values()) for call in calls_of(body)
            if not isinstance(call.target, Symbol) for name in self.candidates(call)
        }  # fmt: skip

    def _reach(self, kernel: ParsedKernel, source_name: str | None) -> None:
        bodies = [kernel]
        while True:
            for body in bodies:
                for instruction in body.instructions:
                    self._note_symbols(instruction)
            wanted = [name for body in bodies for call in calls_of(body) for name in self._named(call)]
            fresh = [name for name in dict.fromkeys(wanted) if name not in self.bodies and self._is_defined(name)]
            if not fresh:
                break
            for name in fresh:
                self.bodies[name] = parse_function(self.module, name, source_name)
                self.problems.extend(self.bodies[name].problems)
            bodies = [kernel, *self.bodies.values()]
        for name, body in self.bodies.items():
            self._targets[name] = {other for call in calls_of(body) for other in self._named(call)}

    def _is_defined(self, name: str) -> bool:
        function = self.module.functions.get(name)
        return function is not None and function.body is not None

    def _note_symbols(self, instruction: Instruction) -> None:
        """Functions are pointed at by instructions, and by module variables that instructions name."""
        for operand in instruction.operands:
            for name in _symbols(operand):
                self._note(name)

    def _note(self, name: str) -> None:
        if self._is_defined(name):
            if name not in self.pointed_at:
                self.pointed_at.append(name)
            return
        variable = self.module.variables.get(name)
        if variable is None or name in self._variables:
            return
        self._variables.add(name)
        for _, value in variable.initial:
            if isinstance(value, Symbol):
                self._note(value.name)

    def _named(self, call: Call) -> list[str]:
        return [call.target.name] if isinstance(call.target, Symbol) else self.candidates(call)

    def candidates(self, call: Call) -> list[str]:
        """Functions that a call through a pointer may mean: those with as many parameters and results."""
        found = []
        for name in self.pointed_at:
            text = self.module.functions[name]
            counts = len(_listed(text.parameter_text)), len(_listed(text.result_text))
            if counts == (len(call.arguments), len(call.results)):
                found.append(name)
        return found

    def is_shared(self, name: str) -> bool:
        """Whether a kernel has one copy of the function for all its calls."""
        return name in self.recursive or name in self._through_pointers

    def returns_to(self, name: str, other: str) -> bool:
        """Whether a call of the function may lead to a call of the other."""
        seen: set[str] = set()
        work = [name]
        while work:
            for target in self._targets.get(work.pop(), ()):
                if target == other:
                    return True
                if target not in seen:
                    seen.add(target)
                    work.append(target)
        return False


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]
