"""Collects the faults of one launch: one for each kind and instruction, with the first lane and the count of lanes."""

from __future__ import annotations

from dataclasses import replace

from ..faults import FATAL_KINDS, NOTE_KINDS, RACED_READ, UNDEFINED_KINDS, Fault
from ..ptx.sites import Site
from .lanes import LaneSet


class LaunchStopped(Exception):
    """Ends the launch after a fatal fault; never leaves the emulator."""


class FaultCollector:
    """Faults in the order found."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._faults: dict[tuple[str, int], Fault] = {}
        self._notes: dict[tuple[str, int], Fault] = {}
        self.has_undefined = False
        """Whether bytes were read that nobody wrote."""
        self.stale_sites: frozenset[int] = frozenset()
        """Numbers of the sites of reads beside atomics."""

    @property
    def faults(self) -> list[Fault]:
        """The rules that were broken, but for undefined bytes and reads beside atomics."""
        return [fault for fault in self.found if fault.kind not in UNDEFINED_KINDS]

    @property
    def raced_reads(self) -> list[Fault]:
        """Conflicts of reads and atomics."""
        return [fault for fault in self._faults.values() if fault.kind == RACED_READ]

    @property
    def undefined_reads(self) -> list[Fault]:
        """What is of UNDEFINED_KINDS."""
        return [fault for fault in self.found if fault.kind in UNDEFINED_KINDS]

    @property
    def found(self) -> list[Fault]:
        """Both, in the order found."""
        return [fault for fault in self._faults.values() if fault.kind != RACED_READ]

    @property
    def notes(self) -> list[Fault]:
        """What is of NOTE_KINDS."""
        return list(self._notes.values())

    def add(
        self,
        kind: str,
        message: str,
        site: Site,
        lanes: LaneSet,
        position: int,
        count: int = 1,
        address: int | None = None,
        label: str | None = None,
        offset: int | None = None,
    ) -> None:
        """Record what ``count`` lanes did, the first at ``position`` of the set: a fault, an undefined read or a note,
        as its kind says (faults.py). A fatal fault raises LaunchStopped."""
        self.has_undefined |= kind in UNDEFINED_KINDS
        found = self._notes if kind in NOTE_KINDS else self._faults
        key = (kind, site.number)
        known = found.get(key)
        if known is not None:
            found[key] = replace(known, lanes=known.lanes + count)
        else:
            block, thread = lanes.chunk.coordinates(int(lanes.index[position]))
            location = site.location
            found[key] = Fault(
                kind=kind,
                message=message,
                kernel=self.kernel,
                source_file=location.file,
                source_line=location.line or None,
                call_file=location.call_file,
                call_line=location.call_line or None,
                ptx_line=site.ptx_line,
                opcode=site.opcode,
                block=block,
                thread=thread,
                address=address,
                label=label,
                offset=offset,
                lanes=count,
            )
        if kind in FATAL_KINDS:
            raise LaunchStopped

    def add_launch(self, kind: str, message: str, address: int, label: str | None, offset: int | None) -> None:
        """Record a fault that belongs to the launch as a whole."""
        number = -1 - len(self._faults)
        self._faults[(kind, number)] = Fault(kind, message, self.kernel, address=address, label=label, offset=offset)
