"""What every kind of case has in common: a name, what it calls, what it costs, and how it is run.

A case is data and picklable, so that a worker process can run it. Smoke and reject run any kinds in one loop.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, entry_named, sources_of
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.records.run import CaseResult

MAX_SPAN = 256
"""Lengths of requests follow the page size up to here, and pools of many pages have pages up to this size."""


class Closing(Protocol):
    """Something that holds device memory."""

    def close(self) -> None:
        """Give it back."""


_Kept = TypeVar("_Kept", bound=Closing)


class RunContext:
    """What a case runs with: the kernels on an open device, and what cases of a kind keep on it between them."""

    def __init__(self, library: KernelLibrary, rerun: tuple[str, ...] = (), dumps: DumpSettings | None = None) -> None:
        """``rerun``: the command line up to ``--case``. ``dumps``: where arrays of cases are written, if they are."""
        self.library = library
        self.dumps = dumps
        self._rerun = rerun
        self._kept: dict[type[Any], Closing] = {}

    def rerun(self, case_id: str) -> str:
        """The exact command line that runs just this case again."""
        return shlex.join([*self._rerun, "--case", case_id])

    def kept(self, kind: type[_Kept], make: Callable[[], _Kept]) -> _Kept:
        """The one of this kind that lives as long as the device; made when it is first asked for."""
        if kind not in self._kept:
            self._kept[kind] = make()
        return self._kept[kind]  # type: ignore[return-value]

    def close(self) -> None:
        """Close what was kept, and the device."""
        kept, self._kept = self._kept, {}
        for one in kept.values():
            one.close()
        self.library.device.close()


class Case(Protocol):
    """One thing to check. ``entry`` names what results are shown under: a row of the table, or a whole run."""

    @property
    def id(self) -> str:
        """Names the case whatever else is registered; ``--case ID`` runs it."""

    @property
    def entry(self) -> str: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """The translation units that it may launch from."""

    @property
    def traps(self) -> bool:
        """True if it passes only where its kernel traps: its device is lost then, on a GPU with the process."""

    @property
    def weight(self) -> float:
        """How long it takes, in usual cases."""

    def run(self, context: RunContext) -> CaseResult:
        """Run it and say how it went; what is wrong with the kernel or the request is a result, not an exception.

        CompileError is raised: it is the run's failure, not the case's.
        """


class OfOneEntry:
    """What cases say that call one row of the table."""

    __slots__ = ()

    entry: str

    @property
    def row(self) -> Entry:
        """The entry's row of the table."""
        return entry_named(self.entry)

    @property
    def sources(self) -> tuple[str, ...]:
        """Those of the entry."""
        return self.row.sources

    @property
    def traps(self) -> bool:
        """Not unless it says so."""
        return False

    @property
    def weight(self) -> float:
        """A usual case."""
        return 1.0


class OfManyEntries:
    """What cases say that run prep and attention through their forms."""

    __slots__ = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """All of the table's."""
        return sources_of(entries())

    @property
    def traps(self) -> bool:
        """Not unless it says so."""
        return False

    @property
    def weight(self) -> float:
        """A usual case."""
        return 1.0
