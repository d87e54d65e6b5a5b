"""What can go wrong in an emulated launch, and the words it is reported in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FATAL_KINDS = frozenset(
    {
        "trap",
        "global_out_of_bounds",
        "misaligned",
        "use_after_free",
        "shared_out_of_bounds",
        "local_out_of_bounds",
        "deadlock",
        "endless_wait",
        "watchdog",
        "illegal_instruction",
        "mbarrier_misuse",
    }
)
"""Kinds that stop the launch at once and poison the machine, as a sticky CUDA error does."""

UNDEFINED_KINDS = frozenset({"shared_uninitialised_read", "uninitialised_read"})
"""Reads of bytes that nobody wrote: rules that are broken if anything depends on those bytes."""
CHECKED_KINDS = UNDEFINED_KINDS | {
    "barrier_count",
    "block_write_conflict",
    "divergent_barrier",
    "ended_block_access",
    "exited_lane_shuffle",
    "foreign_local_access",
    "foreign_read",
    "global_race",
    "overlap_without_wait",
    "read_before_wait",
    "shared_race",
    "shared_variable_overrun",
    "unfinished_copy",
    "unfinished_product",
    "unwritten_output",
}
"""Kinds that hardware would not notice: the launch runs to its end and raises then."""
FAULT_KINDS = FATAL_KINDS | CHECKED_KINDS
RACED_READ = "raced_read"
"""A plain read beside atomics that nothing orders: a ``global_race`` if anything depends on its moment."""
NOTE_KINDS = frozenset({"equal_stores", "unused_undefined", "harmless_race"})
"""Kinds that do no harm and are counted: stores of one value to one place that nothing orders; bytes that nobody wrote
and that were read, but on which nothing depends; reads beside atomics, on whose moment nothing depends."""


class EmulatorError(Exception):
    """Base of every error of the emulator; ``str(error)`` is one readable line."""


class FreedMemory(EmulatorError):
    """The host reads or writes an allocation that was freed."""


class PtxSyntaxError(EmulatorError):
    """The PTX text could not be read."""


class UnsupportedOpcode(EmulatorError):
    """PTX uses an opcode, modifier or directive that the emulator does not know completely.

    ``opcode`` is the complete opcode string, ``ptx_line`` its 1-based line in the PTX text, ``reason`` what to know
    more. ``source_file`` and ``source_line`` come from ``-lineinfo`` and are None without it; ``call_line`` is the line
    that inlined code was inlined into.
    """

    def __init__(
        self,
        opcode: str,
        ptx_line: int,
        reason: str = "",
        source_file: str | None = None,
        source_line: int | None = None,
        call_line: int | None = None,
    ) -> None:
        self.opcode = opcode
        self.ptx_line = ptx_line
        self.reason = reason
        self.source_file = source_file
        self.source_line = source_line
        self.call_line = call_line
        detail = f": {reason}" if reason else ""
        super().__init__(f"the emulator does not support '{opcode}' ({self.place}){detail}")

    @property
    def place(self) -> str:
        """Where it stands, in words: the source line, else the PTX line."""
        if self.source_line is None:
            return f"PTX line {self.ptx_line}"
        inlined = f" inlined at line {self.call_line}" if self.call_line is not None else ""
        return f"{self.source_file or 'source'}:{self.source_line}{inlined}, PTX line {self.ptx_line}"


class UnsupportedKernel(UnsupportedOpcode):
    """All that the emulator does not support of one kernel, the first of it as an UnsupportedOpcode.

    ``problems`` are in the order of the PTX, one for each opcode, reason and source line.
    """

    def __init__(self, kernel: str, problems: Sequence[UnsupportedOpcode]) -> None:
        first = problems[0]
        super().__init__(
            first.opcode, first.ptx_line, first.reason, first.source_file, first.source_line, first.call_line
        )
        self.kernel = kernel
        self.problems = list(problems)
        if len(problems) > 1:
            each = "; ".join(
                f"'{one.opcode}' ({one.place})" + (f": {one.reason}" if one.reason else "") for one in problems
            )
            self.args = (f"the emulator does not support {len(problems)} things in kernel {kernel}: {each}",)


class LaunchConfigurationError(EmulatorError):
    """Grid, block, shared memory or arguments that hardware would refuse before running."""


class PoisonedMachine(EmulatorError):
    """A launch after a fatal fault; like a sticky CUDA error, only reads are still allowed."""


@dataclass(frozen=True)
class Standing:
    """Where a launch stood: what ran last. ``source_line`` and ``call_line`` as in Fault; ``block`` is (x, y, z)."""

    kernel: str
    source_file: str | None
    source_line: int | None
    call_line: int | None
    ptx_line: int
    block: tuple[int, int, int]
    warp: int

    def __str__(self) -> str:
        line = f"PTX line {self.ptx_line}"
        if self.source_line is not None:
            line = f"{self.source_file or 'source'}:{self.source_line}"
        inlined = f" (inlined at line {self.call_line})" if self.call_line is not None else ""
        return f"kernel {self.kernel} at {line}{inlined}, block {self.block}, warp {self.warp}"


class DeadlinePassed(EmulatorError):
    """The launch had not ended at its deadline. What it stored until then stays; the machine is poisoned."""

    def __init__(self, standing: Standing) -> None:
        super().__init__(f"the launch had not ended at its deadline; it stood at {standing}")
        self.standing = standing


class LaunchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a launch; the text says where it stood. The machine is poisoned."""

    def __init__(self, standing: Standing) -> None:
        super().__init__(str(standing))
        self.standing = standing


@dataclass(frozen=True)
class Fault:
    """One broken rule, where it was first seen.

    ``kind`` is one of FATAL_KINDS or CHECKED_KINDS.

    ``source_line`` is the innermost line of inlined code and ``call_line`` the line that it was inlined into;
    both come from ``-lineinfo`` and are None without it. ``block`` and ``thread`` are (x, y, z) of the first lane;
    they are None where the fault belongs to no thread (``unwritten_output``). ``address`` is a device address, or a
    byte offset for shared and local memory. ``lanes`` counts the lanes that broke the rule at this instruction.
    """

    kind: str
    message: str
    kernel: str
    source_file: str | None = None
    source_line: int | None = None
    call_file: str | None = None
    call_line: int | None = None
    ptx_line: int | None = None
    opcode: str | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    address: int | None = None
    label: str | None = None
    offset: int | None = None
    lanes: int = 0

    @property
    def is_fatal(self) -> bool:
        """Whether hardware too would have ended the launch (or hung)."""
        return self.kind in FATAL_KINDS

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.message}"]
        where = f"kernel {self.kernel}"
        if self.source_line is not None:
            where += f", {self.source_file or 'source'}:{self.source_line}"
            if self.call_line is not None:
                where += f" (inlined at line {self.call_line})"
        if self.block is not None and self.thread is not None:
            where += f", block {self.block}, thread {self.thread}"
        parts.append(where)
        if self.opcode is not None:
            parts.append(f"{self.opcode} at PTX line {self.ptx_line}, {self.lanes} lane(s)")
        return "; ".join(parts)


class LaunchFault(EmulatorError):
    """A launch broke one or more rules.

    ``faults`` are in the order found, one for each kind and instruction; ``fatal`` is the one that stopped the
    launch, or None when it ran to its end. ``report`` says what the launch did until then.
    """

    def __init__(self, faults: Sequence[Fault], report: LaunchReport) -> None:
        self.faults = list(faults)
        self.report = report
        self.fatal = next((fault for fault in self.faults if fault.is_fatal), None)
        shown = self.fatal or self.faults[0]
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        super().__init__(f"{shown}{more}")

    @property
    def kinds(self) -> list[str]:
        """Kinds of all faults, in order."""
        return [fault.kind for fault in self.faults]


@dataclass(frozen=True)
class LaunchReport:
    """What a launch did. ``thread_instructions`` counts PTX instructions times active threads."""

    kernel: str
    blocks: int
    threads_per_block: int
    thread_instructions: int
    stored_bytes: int
    shared_bytes: int
    """Static plus dynamic shared memory of one block."""
    printed: str = ""
    """What the kernel's printf wrote: warps in the order in which the emulator ran them, lanes ascending."""
    contracted: int = 0
    """Sums of the kernel whose bits the PTX leaves open: a product is fused into each, as ptxas does it."""
    notes: tuple[Fault, ...] = ()
    """What is of NOTE_KINDS, one for each kind and instruction, with the count of lanes."""
