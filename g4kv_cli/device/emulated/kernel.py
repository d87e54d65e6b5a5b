"""Modules of PTX and their kernels, which each emulator translates when it first needs to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .engine.library import library
from .engine.operations import NotLowered
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

_WAIT, _LET_NEXT_BEGIN = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel. ``shared_bytes`` counts static shared memory; dynamic memory begins at ``dynamic_shared_offset``.

    ``device_variables`` are the module variables that it names; their addresses are the symbols of a launch.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    shared_bytes: int
    dynamic_shared_offset: int
    module: Module
    instruction_count: int
    max_threads: int
    device_variables: tuple[str, ...]
    parsed: ParsedKernel

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
        flow = build_flow(self.parsed, joins_multiplies=False)
        try:
            context = lay_out(self.module.parsed, self.parsed).context
            context.validated = validated_loads(self.parsed)
            note_extents(context, self.module.parsed, self.parsed)
            return Program(lower(context, flow, in_order), engine), ()
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
        return _WAIT in self._grid_control

    @cached_property
    def lets_the_next_begin_early(self) -> bool:
        """Whether it lets the next launch begin before it has itself waited for the one in front, as its text goes."""
        return self._grid_control[:1] == [_LET_NEXT_BEGIN]

    @cached_property
    def _grid_control(self) -> list[str]:
        return [one.opcode for one in self.parsed.instructions if one.opcode in (_WAIT, _LET_NEXT_BEGIN)]

    @property
    def synchronises_grid(self) -> bool:
        """Whether it has a barrier of all blocks, for which its launch has to be cooperative."""
        return GRID_WORKSPACE in self.device_variables

    @property
    def called_for(self) -> tuple[str, ...]:
        """Opcodes for which its program calls the interpreter's functions."""
        return tuple(call.opcode for call in self.program.calls) if self.program is not None else ()

    @property
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
        self.parsed: ParsedModule = parse_module(ptx_text)
        self.contracts = contracts
        self.source_name = source_name
        self._kernels: dict[str, Kernel] = {}

    @property
    def kernel_names(self) -> list[str]:
        """Names of all kernels in the text."""
        return list(self.parsed.bodies)

    def kernel(self, name: str) -> Kernel:
        """The kernel of this name, translated for the emulator that will run it first."""
        found = self._kernels.get(name)
        if found is None:
            found = self._parse(name)
            if emulator_mode() is not Mode.NATIVE or found.parsed.problems or found.program is None:
                _ = found.translation
            self._kernels[name] = found
        return found

    def _parse(self, name: str) -> Kernel:
        kernel = parse_kernel(self.parsed, name, self.source_name)
        kernel.contracts = self.contracts
        parsed = link(self.parsed, kernel, self.source_name)
        layout = lay_out(self.parsed, parsed)
        last = parsed.parameters[-1] if parsed.parameters else None
        return Kernel(
            name,
            tuple(parsed.parameters),
            last.offset + last.nbytes if last is not None else 0,
            layout.static_bytes,
            layout.dynamic_offset,
            self,
            len(parsed.instructions),
            parsed.max_threads,
            tuple(layout.context.device_variables),
            parsed,
        )
