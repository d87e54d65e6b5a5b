"""The stack of functions that may call themselves: frames in local memory, for what a call could overwrite."""

from __future__ import annotations

from collections.abc import Sequence

from .call_graph import CallGraph
from .instances import Instance, alive_after_calls
from .instruction import Address, Immediate, Register, Symbol
from .link_output import LinkedBody
from .parse import Variable

STACK_BYTES = 16384
"""Local memory of a thread for the frames of functions that recurse."""
_STACK = "%stack"


class Stack:
    """The stack of a kernel's threads; ``pointer`` holds where the frame of the running function begins."""

    def __init__(self, graph: CallGraph, out: LinkedBody) -> None:
        self.graph = graph
        self.out = out
        self.pointer = Register("%sp", "b64")
        self._alive_after: dict[str, dict[int, set[Register]]] = {}

    def begin(self, variables: dict[str, Variable]) -> None:
        """Give the threads a stack, and point to it."""
        variables[_STACK] = Variable(_STACK, "local", 16, STACK_BYTES)
        self.out.emit("mov.u64", self.pointer, Symbol(_STACK))

    def move(self, nbytes: int) -> None:
        """To the frame of a function that is called, and back."""
        if nbytes:
            self.out.emit("add.s64", self.pointer, self.pointer, Immediate(nbytes))

    def save(self, instance: Instance, index: int, callee: Instance) -> tuple[list[tuple[int, Register]], int]:
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
        if name not in self._alive_after:
            self._alive_after[name] = alive_after_calls(instance.body)
        alive = [instance.register(register) for register in self._alive_after[name].get(index, ())]
        formals = [held for one in instance.body.parameters for held in instance.pieces.get(one.name, {}).values()]
        number = [instance.return_number] if instance.return_number is not None else []
        return [*sorted(alive, key=lambda register: register.name), *formals, *number]

    def _spill(self, place: int, register: Register) -> None:
        value = register
        if register.kind == "pred":
            value = self.out.fresh("b32")
            self.out.emit("selp.b32", value, Immediate(1), Immediate(0), register)
        self.out.emit(f"st.local.{value.kind}", Address(self.pointer, place), value)

    def restore(self, saved: Sequence[tuple[int, Register]]) -> None:
        """Load it again behind the call."""
        for place, register in saved:
            if register.kind == "pred":
                value = self.out.fresh("b32")
                self.out.emit("ld.local.b32", value, Address(self.pointer, place))
                self.out.emit("setp.ne.b32", register, value, Immediate(0))
            else:
                self.out.emit(f"ld.local.{register.kind}", register, Address(self.pointer, place))
