"""What every kind of case has while it runs: a library, arrays to give back, findings; and how it ends."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.dump import CaseDump, DumpSettings, write_dump
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.contract import NO_PAGE_ORIGIN, Contract
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import CompileError, DeviceFault, DeviceUnavailable, G4kvError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.records.run import OF_SOME_BLOCKS, CaseResult, Mismatch, Status

Array = npt.NDArray[Any]

MAX_FAULT_LINES = 6


class Described(Protocol):
    """What a result says of its case."""

    @property
    def id(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...


class CalledCase(Described, Protocol):
    """A case of one entry over a pool."""

    @property
    def is_sparse(self) -> bool: ...
    @property
    def pool_bytes(self) -> int: ...


class Skip(Exception):
    """A case cannot run on this device; the message names the property that is lacking."""


@dataclass(slots=True)
class Session:
    """What one case holds on the device, and what it has found so far."""

    library: KernelLibrary
    arrays: list[DeviceArray] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)
    dump: CaseDump | None = None
    """Where arrays are noted, if they are to be written down."""
    left_out: dict[str, None] = field(default_factory=dict)
    """Why parts of the case are not covered, each reason once."""
    only_the_ends: bool = False
    """Whether the emulated device runs the blocks at both ends of the grid alone."""
    lacks_rows: bool = False
    """Whether, of the rows that are looked at, these blocks have left some out."""

    @property
    def device(self) -> Device:
        return self.library.device

    @property
    def output_digest(self) -> str:
        """Of the outputs. Which rows the ends of a grid make is known of the built-in kernels alone."""
        is_known = not self.lacks_rows and (not self.only_the_ends or self.library.provider is None)
        return f"{self.digest.hexdigest()}{'' if is_known else OF_SOME_BLOCKS}"

    def keep(self, array: DeviceArray) -> DeviceArray:
        """Have the array freed when the case ends."""
        self.arrays.append(array)
        return array

    def upload(self, values: Array, label: str) -> DeviceArray:
        """A device copy that is freed when the case ends."""
        array = self.keep(self.device.upload(values, label))
        if self.dump is not None:
            self.dump.uploaded(array, values)
        return array

    def poisoned(self, shape: tuple[int, ...], label: str, dtype: npt.DTypeLike = BF16) -> DeviceArray:
        """An array of which every byte is 0xff (a NaN in bf16 and in float32)."""
        array = self.keep(self.device.allocate(shape, np.dtype(dtype), label))
        if array.size:
            self.device.fill(array, POISON_BYTE)
        return array

    def served(self, forms: Sequence[Entry]) -> list[Entry]:
        """Those of an operation's forms that the kernels serve; why not the others is noted. NotCovered if none is."""
        found = []
        for form in forms:
            try:
                self.library.contract_of(form.name)
            except NotCovered as why:
                self.left_out[str(why)] = None
            else:
                found.append(form)
        if not found:
            raise NotCovered("; ".join(self.left_out))
        return found

    def promises(self, statement: str, rows: Sequence[Entry]) -> bool:
        """Whether the kernels of all these rows state it (a flag of Contract); if not, that is noted."""
        kept = all(getattr(self.library.contract_of(row.name), statement) for row in rows)
        if not kept:
            self.left_out[f"{statement} = false: those bits are not compared"] = None
        return kept

    def given(self, name: str, values: Array) -> None:
        """Note a logical tensor that lies on the device in another form, for a dump."""
        if self.dump is not None:
            self.dump.given(name, values)

    def compared(self, operation: str, got: Array, want: Array, limit: Array | None = None) -> None:
        """Note both sides of a comparison, for a dump."""
        if self.dump is not None:
            self.dump.compared(operation, got, want, limit)

    def found(self, mismatch: Mismatch | None) -> None:
        """Note a finding, if it is one."""
        if mismatch is not None:
            self.mismatches.append(mismatch)


def require_coverage(library: KernelLibrary, case: CalledCase, origins: Iterable[int]) -> Contract:
    """What the kernels of a case's entry promise, before anything is built for it.

    Raises Skip for a pool that the GPU has not the memory for, with both numbers, and NotCovered for kernels that do
    not serve the entry, or not pages that begin behind a request's first (``origins``).
    """
    device = library.device
    if device.info.kind == "cuda" and case.is_sparse and case.pool_bytes > device.limits.memory_bytes:
        have, need = device.limits.memory_bytes, case.pool_bytes
        raise Skip(f"the pool takes {need / 2**30:.1f} GiB, this GPU has {have / 2**30:.1f} GiB")
    contract = library.contract_of(case.entry)
    if not contract.page_origin and any(origins):
        raise NotCovered(NO_PAGE_ORIGIN)
    return contract


SessionT = TypeVar("SessionT", bound=Session)


def run_session(
    case: Described,
    rerun: str,
    library: KernelLibrary,
    make: Callable[[], SessionT],
    execute: Callable[[SessionT], None],
    *,
    lacking: Status = "error",
    dumps: DumpSettings | None = None,
) -> CaseResult:
    """Make a session and run a case in it. Wrong results and device faults are ``failed``, a refused or impossible
    request is ``error``, Skip is ``skipped``, NotCovered ``not covered``. ``lacking``: what it is if no kernel at hand
    takes the request. ``dumps``: where its arrays are written. CompileError is passed on."""
    begin = time.perf_counter()
    library.launched.clear()

    def result(status: Status, reason: str = "", mismatches: tuple[Mismatch, ...] = (), digest: str = "") -> CaseResult:
        seconds = time.perf_counter() - begin
        return CaseResult(
            case.id,
            case.entry,
            case.geometry.name,
            status,
            seconds,
            reason,
            mismatches,
            digest,
            rerun,
            tuple(library.launched),
            left_out=() if session is None or status == "not covered" else tuple(session.left_out),
        )

    session: SessionT | None = None

    def run() -> CaseResult:
        nonlocal session
        try:
            session = make()
            if dumps is not None:
                session.dump = CaseDump()
            execute(session)
        except DeviceFault as fault:
            return result("failed", _fault_text(fault), tuple(session.mismatches) if session else ())
        except Skip as why:
            return result("skipped", str(why))
        except NotCovered as why:
            # What was wrong before the part that is not covered is wrong all the same.
            if session is not None and session.mismatches:
                session.left_out[str(why)] = None
                return result("failed", "", tuple(session.mismatches), session.output_digest)
            return result("not covered", str(why))
        except CompileError:
            raise
        except DeviceUnavailable as why:
            return result(lacking, str(why))
        except G4kvError as error:
            return result("error", str(error))
        if session.mismatches:
            return result("failed", "", tuple(session.mismatches), session.output_digest)
        return result("passed", digest=session.output_digest)

    try:
        outcome = run()
        if dumps is None or session is None or session.dump is None or not dumps.wants(outcome):
            return outcome
        session.dump.gather(session.arrays)
        return write_dump(dumps, case, outcome, session.dump)
    finally:
        if session is not None:
            with suppress(G4kvError):  # after a fault the device is replaced, and its memory with it
                library.device.free_all(session.arrays)


def _fault_text(fault: DeviceFault) -> str:
    shown = list(fault.reports[:MAX_FAULT_LINES])
    left = len(fault.reports) - len(shown)
    return "\n".join([*shown, f"and {left} more of this launch"] if left else shown)
