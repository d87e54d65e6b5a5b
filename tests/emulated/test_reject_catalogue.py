"""The whole catalogue and every trap on the emulated device; and what a kernel without its traps does to them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from g4kv_cli.cases import isolate
from g4kv_cli.cases.case import Case, OfOneEntry, RunContext
from g4kv_cli.cases.isolate import run_cases
from g4kv_cli.cases.reject.request import Draft
from g4kv_cli.cases.reject.run import RejectRunner, reject_cases
from g4kv_cli.cases.run import RunSettings
from g4kv_cli.cases.trap import check
from g4kv_cli.cases.trap.check import run_trap, trap_lines
from g4kv_cli.cases.trap.table import ORIGIN, TRAP_COMMENTS, TrapCase, trap_cases
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import DeviceFault
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.rules import RULES, Rule
from g4kv_cli.records.run import CaseResult

SPEC = "emulated:sm_90"
TRAP_SOURCE = "prep_body.cuh"
SOURCE = (BUILT_IN_KERNELS_DIRECTORY / TRAP_SOURCE).read_text(encoding="utf-8")
DECODE_ENTRY = "qkv_norm_rope_paged_decode_hd256_plain_into"
TRAPS = trap_cases()


def run(cases: Sequence[Case], directory: Path | None = None, limit_seconds: float = 20.0) -> list[CaseResult]:
    device = open_device(SPEC)
    try:
        return list(run_cases(cases, RunSettings(SPEC, directory, ("g4kv",), limit_seconds), device, 1))
    finally:
        device.close()


def spoiled(directory: Path, text: str, cases: Sequence[TrapCase]) -> Path:
    """A directory with this text of the traps' source, and of the kernels those of the cases."""
    from seeding import only_kernels  # not above: workers load this file, and have not the tests' helpers

    (directory / TRAP_SOURCE).write_text(text, encoding="utf-8")
    only_kernels(directory, [case.row for case in cases])
    return directory


def line_of(comment: str) -> int:
    """The line of a trap in the built-in source."""
    (place,) = trap_lines(["prep_hd256.cu"], None)[comment]
    file, _, number = place.partition(":")
    assert file == TRAP_SOURCE
    return int(number)


def some_of(entry: str, *rules_and_variants: str) -> list[TrapCase]:
    return [case for case in TRAPS if case.entry == entry and f"{case.rule}/{case.variant}" in rules_and_variants]


def test_the_whole_catalogue_is_green() -> None:
    cases = reject_cases()
    results = run(cases)
    assert [(result.id, result.reason) for result in results if result.status != "passed"] == []
    assert Counter(result.id.split("/")[2] for result in results) == Counter(case.rule for case in cases)
    assert set(RULES) == {case.rule for case in cases}


def test_every_trap_is_green() -> None:
    results = run(TRAPS)
    assert [(result.id, result.reason) for result in results if result.status != "passed"] == []
    assert sorted(result.id for result in results) == sorted(case.id for case in TRAPS)


def test_each_trap_has_a_line_of_its_own() -> None:
    """What reports are held against is read off the source, not off a report."""
    lines = trap_lines(["prep_hd256.cu"], None)
    assert sorted(lines) == sorted(TRAP_COMMENTS)
    assert all(len(numbers) == 1 for numbers in lines.values())
    assert SOURCE.count("__trap()") == len(TRAP_COMMENTS)


@pytest.mark.parametrize("comment", TRAP_COMMENTS)
def test_a_kernel_without_the_trap_turns_its_cases_red(comment: str, tmp_path: Path) -> None:
    lines = SOURCE.splitlines()
    number = line_of(comment)
    # The line still says so, but never does.
    lines[number - 1] = lines[number - 1].replace("__trap();", "if (p.eps < 0.0f) __trap();")
    cases = [case for case in TRAPS if case.comment == comment][:6]
    results = run(cases, spoiled(tmp_path, "\n".join(lines) + "\n", cases))
    assert [result.status for result in results] == ["failed"] * 6


def test_a_source_that_lost_a_trap_is_told_so(tmp_path: Path) -> None:
    lines = SOURCE.splitlines()
    del lines[line_of(ORIGIN) - 1]
    cases = some_of(DECODE_ENTRY, "page_origin/negative")
    # Another trap behind it happens to stop this one.
    (result,) = run(cases, spoiled(tmp_path, "\n".join(lines) + "\n", cases))
    assert result.status == "failed"
    assert f"prep_hd256.cu: no trap ends in '// {ORIGIN}'" in result.reason


def test_a_trap_after_the_store_turns_red(tmp_path: Path) -> None:
    """The block stores to the pool before it looks at the page id once more."""
    check = "  if (page < 0 || page >= p.num_pages) __trap();  // no such page in the pool"
    early = "  if (page >= p.num_pages) p.pool[lane_of_thread()] = 0;\n"
    helper = "__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % 32; }\n\n"
    place = "// The second layer of defence"
    assert SOURCE.count(check) == SOURCE.count(place) == 1
    text = SOURCE.replace(check, early + check).replace(place, helper + place)
    cases = some_of(DECODE_ENTRY, "page_id_range/num_pages")
    (result,) = run(cases, spoiled(tmp_path, text, cases))
    assert result.status == "failed"
    assert "were written before the trap, the first in page 0, layer 0, K, slot 0" in result.reason


def test_another_trap_than_the_one_that_is_due_turns_red(tmp_path: Path) -> None:
    before = "  const int logical_page = takes_page ? (int)((unsigned)position / (unsigned)p.layout.page_size) : 0;"
    assert SOURCE.count(before) == 1
    cases = some_of(DECODE_ENTRY, "page_origin/negative")
    (result,) = run(cases, spoiled(tmp_path, SOURCE.replace(before, f"  __trap();  // always\n{before}"), cases))
    assert result.status == "failed"
    assert "trapped elsewhere than prep_body.cuh:" in result.reason


def test_the_trap_of_another_block_turns_red() -> None:
    (case,) = some_of(DECODE_ENTRY, "page_origin/negative")
    assert run_trap(case, KernelLibrary(open_device(SPEC))) == []
    # Token 3 is the one with the negative origin.
    (reason,) = run_trap(replace(case, tokens=(0,)), KernelLibrary(open_device(SPEC)))
    assert reason.startswith("block 3 trapped, want one of [0]")


def test_a_fault_before_the_trap_or_a_launch_before_it_turns_red(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = some_of(DECODE_ENTRY, "page_origin/negative")
    call = Draft.call

    def behind_another(draft: Draft) -> None:
        call(draft.bench.draft())
        call(draft)

    with monkeypatch.context() as launched_before:
        launched_before.setattr(Draft, "call", behind_another)
        assert "it was not launched once" in run_trap(case, KernelLibrary(open_device(SPEC)))
    report = f"trap: {TRAP_SOURCE}:{line_of(ORIGIN)}: block (3, 0, 0) thread (0, 0, 0)"
    library = KernelLibrary(open_device(SPEC))
    assert check._judge_report(case, DeviceFault([report], ["trap"]), library) == []
    before = DeviceFault(["global_out_of_bounds: x", report], ["global_out_of_bounds", "trap"])
    (reason,) = check._judge_report(case, before, library)
    assert reason.startswith("a fault of kind global_out_of_bounds came before the trap")


@dataclass(frozen=True)
class Spoiling(OfOneEntry):
    """A case that takes its worker with it."""

    id: str
    entry: str
    geometry: Geometry
    how: str

    @property
    def traps(self) -> bool:
        return True

    @property
    def weight(self) -> float:
        """The others have time to start on a machine that does much else."""
        return 1.0 if self.how == "hangs" else 20.0

    def run(self, context: RunContext) -> CaseResult:
        if self.how == "dies":
            os._exit(3)
        if self.how == "hangs":
            time.sleep(3600)
        return CaseResult(self.id, self.entry, self.geometry.name, "passed", 0.0)


def test_workers_that_die_or_hang_cost_their_cases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As traps on a GPU run: side by side, in order, each in a worker that is not used again."""
    monkeypatch.setattr(isolate, "SECONDS_TO_START_AND_ANSWER", 2.0)
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", root)  # the workers load the cases of this file
    monkeypatch.syspath_prepend(root)
    how = ("well", "dies", "hangs", "well", "dies", "well")
    cases = [Spoiling(f"case/{number}", DECODE_ENTRY, GEOMETRIES["12b-local"], one) for number, one in enumerate(how)]
    results = list(isolate._in_lanes(cases, RunSettings(SPEC, None, ("g4kv",), 1.0), 3))
    assert [result.id for result in results] == [case.id for case in cases]
    statuses = {"well": "passed", "dies": "error", "hangs": "error"}
    assert [result.status for result in results] == [statuses[one] for one in how]
    assert "the worker process died" in results[1].reason
    assert "the worker process does not answer: 1 s are over" in results[2].reason


def test_each_part_of_the_verdict_on_a_host_case_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in reject_cases() if case.entry == DECODE_ENTRY and case.rule == "page_origin")
    change = case.spoiled.change

    def launched_before(draft: Draft) -> None:
        draft.bench.draft().call()
        change(draft)

    def stored_before(draft: Draft) -> None:
        draft.device.fill(draft.array("q_out"), 0)
        change(draft)

    spoilt = case.spoiled
    runner = RejectRunner(KernelLibrary(open_device(SPEC)), open_device("emulated"))
    for other, words in (
        (spoilt, ""),
        (replace(spoilt, rule="eps"), "refused by rule page_origin, want eps"),
        (replace(spoilt, field="q"), f"the error names '{spoilt.field}', want 'q'"),
        (replace(spoilt, change=lambda draft: None), "was accepted; want page_origin"),
        (replace(spoilt, change=launched_before), "1 launches, want none"),
        (replace(spoilt, change=stored_before), "q_out changed: a refused request must write nothing"),
        (replace(spoilt, twin=change), "the in-range twin was refused"),
        (replace(spoilt, twin=lambda draft: draft.call()), "the in-range twin made 2 launches, want 1"),
        (spoilt, ""),
    ):
        result = runner.run(replace(case, spoiled=other))
        assert (result.status, words in result.reason) == ("failed" if words else "passed", True), result.reason
    monkeypatch.setattr(Draft, "written_elems", lambda draft: draft.expected_elems() | {"q_out": 1})
    result = runner.run(replace(case, spoiled=replace(spoilt, twin=lambda draft: None)))
    assert "the in-range twin wrote {" in result.reason
    runner.close()


def test_a_rule_that_is_gone_turns_cases_red_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    require = Rule.require

    def without(self: Rule, holds: bool, field: str, got: object, want: object) -> None:
        if self.code != "page_id_range":
            require(self, holds, field, got, want)

    monkeypatch.setattr(Rule, "require", without)
    cases = [
        case
        for case in reject_cases()
        if case.entry == DECODE_ENTRY and case.rule in ("page_id_range", "page_origin", "eps")
    ]
    results = run(cases)
    by_rule: dict[str, set[str]] = {}
    for case, result in zip(cases, results, strict=True):
        by_rule.setdefault(case.rule, set()).add(result.status)
    assert by_rule == {"page_id_range": {"failed"}, "page_origin": {"passed"}, "eps": {"passed"}}
    assert any("DeviceFault" in result.reason and "trap" in result.reason for result in results)
