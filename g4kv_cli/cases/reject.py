"""The reject catalogue: for every rule of the contract requests that break it, each with its in-range twin.

A case passes only if the request raises ContractError with the rule's code and the field's name, nothing was launched,
every array is bit-equal to what it was before, and the twin launches once and writes what it should.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from g4kv_cli.cases.reject_arrays import array_cases
from g4kv_cli.cases.reject_pages import page_cases
from g4kv_cli.cases.reject_plan import plan_cases
from g4kv_cli.cases.reject_pool import pool_cases
from g4kv_cli.cases.reject_request import GEOMETRY_OF_ENTRY, Draft, RejectBench, Spoiled
from g4kv_cli.cases.reject_values import value_cases
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import PREP_ENTRIES
from g4kv_cli.errors import CompileError, ContractError, DeviceFault
from g4kv_cli.records import CaseResult, Status


@dataclass(frozen=True, slots=True)
class RejectCase:
    """One contradictory request of one entry."""

    entry: str
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
    def geometry(self) -> str:
        """The head counts it is made with."""
        return GEOMETRY_OF_ENTRY[self.entry]


def reject_cases() -> list[RejectCase]:
    """The whole catalogue, entry by entry."""
    tables = (value_cases, array_cases, pool_cases, page_cases, plan_cases)
    return [
        RejectCase(name, spoiled)
        for name, entry in PREP_ENTRIES.items()
        for table in tables
        for spoiled in table(entry)
    ]


class RejectRunner:
    """Runs cases on one device; the arrays of an entry are made once and reused."""

    def __init__(self, library: KernelLibrary, foreign: Device, rerun: Callable[[str], str]) -> None:
        self._library = library
        self._foreign = foreign
        self._rerun = rerun
        self._bench: RejectBench | None = None
        self._unchanged_twin: str | None = None

    def run_all(self, cases: Iterable[RejectCase]) -> Iterator[CaseResult]:
        """Run the cases and yield their results in order. Cases of one entry should stand together."""
        try:
            for case in cases:
                yield self.run(case)
        finally:
            self.close()

    def run(self, case: RejectCase) -> CaseResult:
        """Run one case. CompileError is passed on: it is the run's failure, not the case's."""
        begin = time.perf_counter()
        bench = self._bench_of(case.entry)
        reasons = self.refuse(case, bench)
        fault = ""
        if not reasons:
            reasons, fault = self._accept_twin(case.spoiled, bench)
        if reasons:
            # Whatever the case left behind must not become the next one's.
            self.close(quietly=True)
        status: Status = "failed" if reasons else "passed"
        return CaseResult(
            case.id,
            case.entry,
            case.geometry,
            status,
            time.perf_counter() - begin,
            "\n".join([*reasons, *([fault] if fault else [])]),
            rerun=self._rerun(case.id),
        )

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
        except CompileError:
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

    def close(self, *, quietly: bool = False) -> None:
        """Free the arrays of the entry at hand."""
        bench, self._bench = self._bench, None
        if bench is None:
            return
        try:
            bench.close()
        except DeviceFault:
            if not quietly:
                raise

    def _bench_of(self, entry: str) -> RejectBench:
        if self._bench is None or self._bench.entry.name != entry:
            self.close()
            self._bench = RejectBench(self._library, entry, self._foreign)
            self._unchanged_twin = None
        return self._bench

    def _accept_twin(self, spoiled: Spoiled, bench: RejectBench) -> tuple[list[str], str]:
        """Launch the in-range twin; what is wrong with it, and the fault if there was one."""
        if spoiled.twin is None and self._unchanged_twin is not None:
            return ([], "") if not self._unchanged_twin else ([self._unchanged_twin], "")
        draft = bench.draft()
        reasons, fault = self._launch_twin(spoiled, draft)
        if spoiled.twin is None:
            self._unchanged_twin = "; ".join(reasons)
        return reasons, fault

    def _launch_twin(self, spoiled: Spoiled, draft: Draft) -> tuple[list[str], str]:
        bench, launches = draft.bench, draft.device.launch_count
        try:
            if spoiled.twin is not None:
                spoiled.twin(draft)
            draft.call()
            written = draft.written_elems()
        except ContractError as error:
            return [f"the in-range twin was refused: {error}"], ""
        except CompileError:
            raise
        except DeviceFault as error:
            return [f"the in-range twin faulted: {error}"], "\n".join(error.reports)
        except Exception as error:
            return [f"the in-range twin raised {type(error).__name__}: {error}"], ""
        reasons = []
        if bench.device.launch_count != launches + 1:
            reasons.append(f"the in-range twin made {bench.device.launch_count - launches} launches, want 1")
        expected = draft.expected_elems()
        if written != expected:
            reasons.append(f"the in-range twin wrote {written} elements, want {expected}")
        draft.release()
        bench.poison_outputs()
        return reasons, ""


def rules_of(cases: Sequence[RejectCase]) -> set[str]:
    """Codes of the rules that these cases break."""
    return {case.rule for case in cases}
