"""Modules of PTX and their kernels, which each emulator translates when it first needs to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .engine.library import Library, library
from .engine.operations import Lowered, NotLowered
from .engine.program import Program, lower
from .interpreter.emit import GRID_WORKSPACE
from .interpreter.translate import CompiledBlock, Translation, lay_out, note_extents, translate
from .mode import Mode, emulator_mode
from .ptx.flow import build_flow
from .ptx.link import link
from .ptx.parse import Parameter, ParsedKernel, ParsedModule, parse_module
from .ptx.parse_body import parse_kernel
from .ptx.sites import Site
from .ptx.validated import validated_loads
from .store import Store, packed, translation_key, unpacked

_WAIT, _LET_NEXT_BEGIN = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@dataclass(frozen=True, eq=False)
class Outline:
    """What a launch has to know of a kernel. ``shared_bytes`` counts static shared memory; dynamic memory begins at
    ``dynamic_shared_offset``.

    ``device_variables`` are the module variables that it names; their addresses are the symbols of a launch.
    ``cluster`` and ``grid_of_clusters``: see ParsedKernel.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    shared_bytes: int
    dynamic_shared_offset: int
    instruction_count: int
    max_threads: int
    device_variables: tuple[str, ...]
    cluster: tuple[int, int, int] | None
    grid_of_clusters: bool
    grid_control: tuple[str, ...]
    """Its griddepcontrol instructions, in the order of its text."""


@dataclass(frozen=True, eq=False)
class Kernel(Outline):
    """A kernel of a module. What a process before this one made of its body is taken over (``Module.kernel``); the body
    is then read only where more is asked of it."""

    module: Module

    @cached_property
    def has_problems(self) -> bool:
        """Whether something of its body was not understood."""
        return bool(self.parsed.problems)

    @cached_property
    def parsed(self) -> ParsedKernel:
        """Its body."""
        return self.module.parse_body(self.name)

    def shared_total(self, dynamic_shared_bytes: int) -> int:
        """Shared bytes of one block: static, padding, dynamic."""
        return self.dynamic_shared_offset + dynamic_shared_bytes if dynamic_shared_bytes else self.shared_bytes

    @cached_property
    def translation(self) -> Translation:
        """What the interpreter runs. Raises UnsupportedKernel with all that it does not know."""
        return translate(self.module.parsed, self.parsed)

    @cached_property
    def _bound(self) -> tuple[Program | None, tuple[str, ...]]:
        return self._lowered(False)

    @cached_property
    def _bound_in_order(self) -> tuple[Program | None, tuple[str, ...]]:
        return self._lowered(True)

    def _lowered(self, in_order: bool) -> tuple[Program | None, tuple[str, ...]]:
        engine = library()
        if engine is None:
            return None, ("there is no engine",)
        lowered, missing = self.lower(in_order)
        return (None, missing) if lowered is None else (Program(lowered, engine), ())

    def lower(self, in_order: bool = False) -> tuple[Lowered | None, tuple[str, ...]]:
        """Its body in operations of the engine; None where that lacks some, and what they are."""
        flow = build_flow(self.parsed, joins_multiplies=False)
        try:
            context = lay_out(self.module.parsed, self.parsed).context
            context.validated = validated_loads(self.parsed)
            note_extents(context, self.module.parsed, self.parsed)
            return lower(context, flow, in_order), ()
        except NotLowered as error:
            return None, error.args

    @property
    def program(self) -> Program | None:
        """What the engine runs; None if there is no engine, or it does not know the kernel completely."""
        first = self._bound[0]
        return self._bound_in_order[0] if first is not None and first.mixes_atomics else first

    @property
    def not_native_for(self) -> tuple[str, ...]:
        """What the engine does not know of the kernel, for which the interpreter runs it; empty if it has a program."""
        return self._bound[1]

    @cached_property
    def waits_for_the_one_in_front(self) -> bool:
        """Whether a thread of it can wait for the launch in front (griddepcontrol.wait)."""
        return _WAIT in self.grid_control

    @cached_property
    def lets_the_next_begin_early(self) -> bool:
        """Whether it lets the next launch begin before it has itself waited for the one in front, as its text goes."""
        return self.grid_control[:1] == (_LET_NEXT_BEGIN,)

    @property
    def synchronises_grid(self) -> bool:
        """Whether it has a barrier of all blocks, for which its launch has to be cooperative."""
        return GRID_WORKSPACE in self.device_variables

    @property
    def called_for(self) -> tuple[str, ...]:
        """Opcodes for which its program calls the interpreter's functions."""
        return tuple(call.opcode for call in self.program.calls) if self.program is not None else ()

    @cached_property
    def contracted(self) -> int:
        """Sums whose bits the PTX leaves open: ptxas takes a product into each, and so does the emulator."""
        return self.parsed.contracted

    @property
    def blocks(self) -> tuple[CompiledBlock, ...]:
        """The interpreter's blocks."""
        return self.translation.blocks

    @property
    def entry(self) -> int:
        """Number of the interpreter's first block."""
        return self.translation.entry

    @property
    def sites(self) -> tuple[Site, ...]:
        """Places that the interpreter's faults name."""
        return self.translation.sites

    @property
    def initial_registers(self) -> tuple[Any, ...]:
        """First values of the interpreter's registers."""
        return self.translation.initial_registers

    @property
    def parameter_loads(self) -> tuple[tuple[int, int, bool, int], ...]:
        """Parameters that the interpreter's blocks use: (offset, bytes, is signed, register bytes)."""
        return self.translation.parameter_loads

    @property
    def granule_shift(self) -> int:
        """Shared locations of 1 << this many bytes are told apart by the interpreter's race check."""
        return self.translation.granule_shift

    @property
    def local_bytes(self) -> int:
        """Local memory of a thread."""
        return self.translation.local_bytes

    @property
    def zeroed_shared(self) -> range:
        """Shared bytes that the system clears at the start of a block."""
        return self.translation.zeroed_shared

    @property
    def is_asynchronous(self) -> bool:
        """Whether it uses mbarriers, bulk copies or wgmma."""
        return self.translation.is_asynchronous


class Module:
    """PTX text of a compiler. ``source_name`` is the first source file's in messages, where the PTX names none.

    Kernels are translated when first asked for and kept. Raises PtxSyntaxError or UnsupportedOpcode.
    ``contracts``: products and sums that PTX leaves open are fused as ptxas does it; else each is rounded by itself.
    """

    def __init__(self, ptx_text: str, source_name: str | None = None, contracts: bool = True) -> None:
        self.text = ptx_text
        self.parsed: ParsedModule = parse_module(ptx_text)
        self.contracts = contracts
        self.source_name = source_name
        self._kernels: dict[str, Kernel] = {}

    @property
    def kernel_names(self) -> list[str]:
        """Names of all kernels in the text."""
        return list(self.parsed.bodies)

    def kernel(self, name: str, store: Store | None = None) -> Kernel:
        """The kernel of this name, translated for the emulator that will run it first. What the engine runs is kept in
        a store, if one is given, for the processes that come after this one."""
        found = self._kernels.get(name)
        if found is None:
            is_native = emulator_mode() is Mode.NATIVE
            engine = library() if is_native else None
            found = self._parse(name) if store is None or engine is None else self._from_store(name, store, engine)
            if not is_native or found.has_problems or found.program is None:
                _ = found.translation
            self._kernels[name] = found
        return found

    def _from_store(self, name: str, store: Store, engine: Library) -> Kernel:
        """A kernel out of the store; or one that is put there, if the engine knows it completely."""
        key = translation_key(self.text, name, self.source_name or "", str(self.contracts))
        kept = unpacked(store.read(key) or b"")
        if kept is not None:
            outline, contracted, lowered = kept
            found = Kernel(**vars(outline), module=self)
            vars(found).update(contracted=contracted, has_problems=False, _bound=(Program(lowered, engine), ()))
            return found
        found = self._parse(name)
        if found.has_problems:
            return found
        lowered, missing = found.lower()
        if lowered is None:
            vars(found)["_bound"] = None, missing
            return found
        outline = Outline(*(getattr(found, each.name) for each in fields(Outline)))
        data = packed((outline, found.contracted, lowered))
        if data is not None:
            store.write(key, data)
        vars(found)["_bound"] = Program(lowered, engine), ()
        return found

    def parse_body(self, name: str) -> ParsedKernel:
        """The body of a kernel, with those of the functions that it calls."""
        kernel = parse_kernel(self.parsed, name, self.source_name)
        kernel.contracts = self.contracts
        return link(self.parsed, kernel, self.source_name)

    def _parse(self, name: str) -> Kernel:
        parsed = self.parse_body(name)
        layout = lay_out(self.parsed, parsed)
        last = parsed.parameters[-1] if parsed.parameters else None
        found = Kernel(
            name,
            tuple(parsed.parameters),
            last.offset + last.nbytes if last is not None else 0,
            layout.static_bytes,
            layout.dynamic_offset,
            len(parsed.instructions),
            parsed.max_threads,
            tuple(layout.context.device_variables),
            parsed.cluster,
            parsed.grid_of_clusters,
            tuple(one.opcode for one in parsed.instructions if one.opcode in (_WAIT, _LET_NEXT_BEGIN)),
            self,
        )
        vars(found)["parsed"] = parsed
        return found
