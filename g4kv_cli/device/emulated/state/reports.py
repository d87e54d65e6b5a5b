"""Collects the faults of one launch: one for each kind and instruction, with the first lane and the count of lanes."""

from __future__ import annotations

from dataclasses import replace

from ..faults import FATAL_KINDS, Fault
from ..ptx.sites import Site
from .lanes import LaneSet


class LaunchStopped(Exception):
    """Ends the launch after a fatal fault; never leaves the emulator."""


class FaultCollector:
    """Faults in the order found."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._faults: dict[tuple[str, int], Fault] = {}
        self._undefined: set[tuple[str, int]] = set()
        self._notes: dict[tuple[str, int], Fault] = {}

    @property
    def faults(self) -> list[Fault]:
        """The rules that were broken, but for undefined bytes."""
        return [fault for key, fault in self._faults.items() if key not in self._undefined]

    @property
    def undefined_reads(self) -> list[Fault]:
        """Reads of bytes that nobody wrote: rules that are broken if anything depends on them."""
        return [fault for key, fault in self._faults.items() if key in self._undefined]

    @property
    def has_undefined(self) -> bool:
        """Whether there are any."""
        return bool(self._undefined)

    @property
    def found(self) -> list[Fault]:
        """Both, in the order found."""
        return list(self._faults.values())

    @property
    def notes(self) -> list[Fault]:
        """What looks like a broken rule and does no harm."""
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
        """Record a fault of ``count`` lanes, the first at ``position`` of the set; a fatal one raises LaunchStopped."""
        self._count(self._faults, kind, message, site, lanes, position, count, address, label, offset)
        if kind in FATAL_KINDS:
            raise LaunchStopped

    def undefined(
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
        """Record a read of bytes that nobody wrote, as ``add`` does a fault."""
        self._undefined.add((kind, site.number))
        self._count(self._faults, kind, message, site, lanes, position, count, address, label, offset)

    def note(
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
        """Count something of NOTE_KINDS, as ``add`` does a fault."""
        self._count(self._notes, kind, message, site, lanes, position, count, address, label, offset)

    def _count(
        self,
        found: dict[tuple[str, int], Fault],
        kind: str,
        message: str,
        site: Site,
        lanes: LaneSet,
        position: int,
        count: int,
        address: int | None,
        label: str | None,
        offset: int | None,
    ) -> None:
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

    def add_launch(self, kind: str, message: str, address: int, label: str | None, offset: int | None) -> None:
        """Record a fault that belongs to the launch as a whole."""
        number = -1 - len(self._faults)
        self._faults[(kind, number)] = Fault(kind, message, self.kernel, address=address, label=label, offset=offset)
