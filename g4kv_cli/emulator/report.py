"""What a launch did, and what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4kv_cli.device.emulated import Fault, LaunchReport
from g4kv_cli.device.emulated_device import report_line

Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Report:
    """A launch. ``str(report)`` is a line of counts and one for each finding.

    findings: rules that the kernel broke, one for each kind and instruction: ``kind``, ``message``, ``source_file``,
        ``source_line``, ``block`` and ``thread`` (x, y, z) of the first lane, ``lanes``; without those ignored.
    ignored: how many findings of each kind the policy ignored.
    ended_by: the finding that stopped the launch before its end, or None.
    counts: what the emulated device counted (thread instructions, stored bytes, shared bytes of a block).
    stored: of each array argument from the host, by its name, how many bytes the kernel stored to.
    """

    kernel: str
    grid: Extent
    block: Extent
    findings: tuple[Fault, ...]
    ignored: Mapping[str, int]
    ended_by: Fault | None
    counts: LaunchReport
    stored: Mapping[str, int]

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found; what was ignored is not looked at."""
        return not self.findings

    @property
    def kinds(self) -> list[str]:
        """Kinds of the findings, in their order."""
        return [fault.kind for fault in self.findings]

    @property
    def notes(self) -> tuple[Fault, ...]:
        """What looks like a broken rule and does no harm: kinds ``equal_stores``, ``unused_undefined`` and
        ``harmless_race``."""
        return self.counts.notes

    @property
    def printed(self) -> str:
        """What the kernel's printf wrote."""
        return self.counts.printed

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "thread_instructions": self.counts.thread_instructions,
            "stored_bytes": self.counts.stored_bytes,
            "stored_bytes_by_argument": dict(self.stored),
            "shared_bytes_per_block": self.counts.shared_bytes,
            "reached_end": self.ended_by is None,
            "findings": [finding_json(fault) for fault in self.findings],
            "notes": [finding_json(note) for note in self.notes],
            "ignored": dict(self.ignored),
            "printed": self.printed,
            "contracted": self.counts.contracted,
        }

    def __str__(self) -> str:
        counts = self.counts
        words = f"{self.kernel}: {counts.blocks} blocks of {counts.threads_per_block} threads, "
        words += f"{counts.thread_instructions} thread instructions, {counts.stored_bytes} bytes stored"
        if self.ended_by is not None:
            words += f", ended by {self.ended_by.kind}"
        ignored = [f"no finding: {line}" for line in _by_source_line(self.notes)]
        ignored += [f"ignored: {count} of kind {kind}" for kind, count in self.ignored.items()]
        if counts.contracted:
            ignored.append(
                f"not in the PTX: whether products fuse with {counts.contracted} sums; they do here, as ptxas does"
            )
        return "\n".join([words, *(report_line(fault) for fault in self.findings), *ignored])


def _by_source_line(notes: Sequence[Fault]) -> Iterator[str]:
    """Notes in words, those of one kind at one line of source as one: a loop that was unrolled has many."""
    found: dict[tuple[Any, ...], list[Fault]] = {}
    for note in notes:
        place = note.source_file, note.source_line, note.call_file, note.call_line
        found.setdefault((note.kind, *(place if note.source_line is not None else (note.ptx_line,))), []).append(note)
    for first, *more in found.values():
        yield report_line(first) + (f" (and {len(more)} more at this line)" if more else "")


def finding_json(fault: Fault) -> dict[str, Any]:
    """A finding as plain JSON values; what is not known is left out."""
    found: dict[str, Any] = {"kind": fault.kind, "message": fault.message, "lanes": fault.lanes}
    for name in ("source_file", "source_line", "call_file", "call_line", "ptx_line", "opcode", "block", "thread"):
        value = getattr(fault, name)
        if value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    found["text"] = report_line(fault)
    return found
