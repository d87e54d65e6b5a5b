"""The reject catalogue: for every rule of the contract requests that break it, each with its in-range twin.

A case passes only if the request raises ContractError with the rule's code and the field's name, nothing was launched,
every array is bit-equal to what it was before, and the twin launches once and writes what it should.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from g4kv_cli.cases.case import OfOneEntry, RunContext
from g4kv_cli.cases.dump import CaseDump, DumpSettings, write_dump
from g4kv_cli.cases.reject.arrays import array_cases
from g4kv_cli.cases.reject.attention import attention_cases
from g4kv_cli.cases.reject.entries import example_geometry
from g4kv_cli.cases.reject.pages import page_cases
from g4kv_cli.cases.reject.plan import plan_cases
from g4kv_cli.cases.reject.pool import pool_cases
from g4kv_cli.cases.reject.request import Draft, RejectBench, Spoiled
from g4kv_cli.cases.reject.values import value_cases
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.attention_request import RESULTS
from g4kv_cli.entries.contract import STRICT
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.entries.table import entries, entry_named, require_served
from g4kv_cli.errors import CaseTimeout, CompileError, ContractError, DeviceFault
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.records.run import CaseResult, Status

HOST_CASE_WEIGHT = 0.05
"""Most of them launch nothing."""

_TABLES: tuple[Callable[[Entry], list[Spoiled]], ...] = (
    value_cases, array_cases, pool_cases, page_cases, plan_cases, attention_cases,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RejectCase(OfOneEntry):
    """One contradictory request of one entry."""

    entry: str
    geometry: Geometry
    spoiled: Spoiled

    @property
    def id(self) -> str:
        """``reject/<entry>/<rule>/<variant>``."""
        return f"reject/{self.entry}/{self.spoiled.rule}/{self.spoiled.variant}"

    @property
    def rule(self) -> str:
        """Code of the rule that refuses it."""
        return self.spoiled.rule

    @property
    def weight(self) -> float:
        """See HOST_CASE_WEIGHT."""
        return HOST_CASE_WEIGHT

    def run(self, context: RunContext) -> CaseResult:
        """Run it on the arrays that cases of its entry share; see RejectRunner."""
        library = context.library
        # Memory of another device, whatever this one is.
        runner = context.kept(RejectRunner, lambda: RejectRunner(library, open_device("emulated")))
        return runner.run(self, context.rerun(self.id), context.dumps)

    def __reduce__(self) -> tuple[Callable[..., RejectCase], tuple[str, Geometry, str]]:
        """What is spoiled is a function of the table: another process takes it from there."""
        return _case_of, (self.entry, self.geometry, self.id)


def reject_cases(geometries: Sequence[Geometry] | None = None) -> list[RejectCase]:
    """The whole catalogue, entry by entry, each entry at one of the geometries that it serves. Raises UsageError for a
    geometry that no kernel serves."""
    for one in geometries or ():
        require_served(one)
    return [
        case
        for entry in entries()
        if (geometry := example_geometry(entry, geometries)) is not None
        for case in _cases_of(entry.name, geometry).values()
    ]


@cache
def _cases_of(name: str, geometry: Geometry) -> dict[str, RejectCase]:
    """The cases of an entry, by id: made once, so that those that share a twin go on sharing it."""
    entry = entry_named(name)
    cases = [RejectCase(name, geometry, spoiled) for table in _TABLES for spoiled in table(entry)]
    return {case.id: case for case in cases}


def _case_of(name: str, geometry: Geometry, case_id: str) -> RejectCase:
    return _cases_of(name, geometry)[case_id]


class RejectRunner:
    """Runs cases on one device; the arrays of an entry are made once and reused."""

    def __init__(self, library: KernelLibrary, foreign: Device) -> None:
        self._library = library
        self._foreign = foreign
        self._bench: RejectBench | None = None
        self._twins: dict[int, str] = {}
        self._contract = STRICT

    def run(self, case: RejectCase, rerun: str = "", dumps: DumpSettings | None = None) -> CaseResult:
        """Run one case. CompileError is passed on: it is the run's failure, not the case's."""
        begin = time.perf_counter()
        status: Status = "failed"
        try:
            self._contract = self._library.contract_of(case.entry)
            bench = self.bench_of(case)
            reasons = self.refuse(case, bench) or self._accept_twin(case.spoiled, bench)
        except CaseTimeout as error:
            status, reasons = "error", [str(error)]
        except NotCovered as why:
            status, reasons = "not covered", [str(why)]
        seconds = time.perf_counter() - begin
        dump = None if dumps is None else CaseDump()
        if dump is not None and self._bench is not None and (reasons or (dumps is not None and dumps.every)):
            dump.gather(self._bench.at_hand())
        if reasons:
            # Whatever the case left behind must not become the next one's: the run goes on with fresh arrays.
            self._bench = None
        else:
            status = "passed"
        reason = "\n".join(reasons)
        result = CaseResult(case.id, case.entry, case.geometry.name, status, seconds, reason, rerun=rerun)
        return result if dumps is None or dump is None else write_dump(dumps, case, result, dump)

    def refuse(self, case: RejectCase, bench: RejectBench) -> list[str]:
        """Make the spoiled call; what is wrong with the way it was refused, empty if nothing."""
        device = bench.device
        launches = device.launch_count
        draft = bench.draft()
        reasons: list[str] = []
        try:
            case.spoiled.change(draft)
            draft.call()
            reasons.append(f"was accepted; want {case.rule} for {case.spoiled.field}")
        except ContractError as error:
            if error.code != case.rule:
                reasons.append(f"refused by rule {error.code}, want {case.rule}: {error}")
            if error.field != case.spoiled.field:
                reasons.append(f"the error names {error.field!r}, want {case.spoiled.field!r}")
        except (CompileError, CaseTimeout):
            raise
        except Exception as error:  # whatever escapes here would escape into a serving process
            reasons.append(f"raised {type(error).__name__}, want ContractError {case.rule}: {error}")
        if device.launch_count != launches:
            reasons.append(f"{device.launch_count - launches} launches, want none")
        if reasons:
            return reasons
        changed = bench.changed_arrays()
        draft.release()
        return [f"{', '.join(changed)} changed: a refused request must write nothing"] if changed else []

    def close(self) -> None:
        """Free the arrays of the entry at hand, and close the other device."""
        self._drop()
        self._foreign.close()

    def _drop(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None and not self._library.device.is_lost:
            bench.close()

    def bench_of(self, case: RejectCase) -> RejectBench:
        """The arrays of a case's entry: those at hand, or new ones."""
        at_hand = self._bench
        if at_hand is None or (at_hand.entry.name, at_hand.geometry) != (case.entry, case.geometry):
            self._drop()
            self._bench = RejectBench(self._library, entry_named(case.entry), case.geometry, self._foreign)
            self._twins = {}
            return self._bench
        return at_hand

    def _accept_twin(self, spoiled: Spoiled, bench: RejectBench) -> list[str]:
        """Launch the in-range twin; what is wrong with it. A twin that several cases share is launched once."""
        key = 0 if spoiled.twin is None else id(spoiled.twin)
        if key not in self._twins:
            self._twins[key] = "\n".join(self._launch_twin(spoiled, bench.draft()))
        return self._twins[key].splitlines()

    def _launch_twin(self, spoiled: Spoiled, draft: Draft) -> list[str]:
        bench, launches = draft.bench, draft.device.launch_count
        try:
            if spoiled.twin is not None:
                spoiled.twin(draft)
            draft.call()
            written = draft.written_elems()
        except ContractError as error:
            return [f"the in-range twin was refused: {error}"]
        except (CompileError, CaseTimeout, NotCovered):
            raise
        except DeviceFault as error:
            return ["the in-range twin faulted:", *error.reports]
        except Exception as error:
            return [f"the in-range twin raised {type(error).__name__}: {error}"]
        reasons = []
        made, want = bench.device.launch_count - launches, bench.entry.launches
        if self._library.provider is not None:  # whose launches a call are its own affair
            want = (max(1, made),)
        if made not in want:
            reasons.append(f"the in-range twin made {made} launches, want {' or '.join(map(str, want))}")
        given = self._contract.outputs
        expected = {
            name: count for name, count in draft.expected_elems().items() if name not in RESULTS or name in given
        }
        written = {name: written[name] for name in expected}
        if written != expected:
            reasons.append(f"the in-range twin wrote {written} elements, want {expected}")
        draft.release()
        bench.restore_outputs()
        return reasons
