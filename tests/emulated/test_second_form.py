"""A second decode form with a source of its own: a row of the table and a kernel file, and it is seen everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from g4kv_cli.bench.run import H200
from g4kv_cli.bench.verdict import decide_cell
from g4kv_cli.bench.workloads import decode_shape, variants_of
from g4kv_cli.cases.attention.golden import attention_golden_cases
from g4kv_cli.cases.e2e.batch import Settings
from g4kv_cli.cases.e2e.far import far_cases
from g4kv_cli.cases.e2e.table import replay_cases
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.reject.run import RejectRunner, reject_cases
from g4kv_cli.cases.run import CaseRunner, RunSettings, compile_for
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.cases.serve.table import ServeCase, ServeRequest, serve_cases
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.device.open import open_device
from g4kv_cli.entries import attention, prep, table
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import decode_entries, decode_entry, entry_named, sources_of
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.bench import BenchRecord, Measurement, Timing
from g4kv_cli.records.run import DeviceInfo, RunInfo
from g4kv_cli.report.bench_plots import lines_of_forms

ROOT = Path(__file__).resolve().parents[2]
L12 = GEOMETRIES["12b-local"]
SOURCE = "of_a_test.cu"
NAME = "batch_decode_of_a_test_paged_window_hd256_into"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """The decode kernel under another name, in a file of its own."""
    line = "G4KV_DECODE(of_a_test_hd256_groups4, 256, 4, 1, false, 2, 74240)\n"
    text = find_source("decode_hd256.cu").text
    macro = text[: text.index("G4KV_DECODE(paged_decode_hd256_groups4")]
    (tmp_path / SOURCE).write_text(macro + line, encoding="utf-8")
    return tmp_path


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The row, for the local family alone; preferred to none."""
    like = entry_named("batch_decode_paged_window_hd256_into")
    portable = next(kernel for kernel in like.kernels if not kernel.arch)
    kernel = replace(portable, symbol="of_a_test_hd256_groups4", source=SOURCE)
    row = replace(like, name=NAME, form="decode-of-a-test", label="d", preference=9, kernels=(kernel,), what="A twin.")
    monkeypatch.setattr(table, "ENTRIES", (*table.ENTRIES, row))
    return row


@pytest.fixture
def settings(kernels: Path) -> RunSettings:
    return RunSettings("emulated", kernels, ("g4kv", "smoke"))


@pytest.fixture
def runner(settings: RunSettings) -> Iterator[CaseRunner]:
    runner = CaseRunner(settings)
    yield runner
    runner.close()


def test_it_is_a_public_function(twin: Entry) -> None:
    function = getattr(attention, NAME)
    assert (function.__name__, function.__doc__.splitlines()[0]) == (NAME, twin.what)
    with pytest.raises(AttributeError):
        getattr(prep, NAME)


def test_smoke_runs_it(twin: Entry, runner: CaseRunner, kernels: Path) -> None:
    usual = {case.id for case in gate_cases([L12]) if f"/{twin.form}/" not in case.id}
    own = {case.id: case for case in gate_cases([L12]) if case.entry == NAME}
    like = {case_id for case_id in usual if case_id.startswith("attention/12b-local/decode/")}
    assert set(own) == {case_id.replace("/decode/", "/decode-of-a-test/") for case_id in like}
    device = open_device("emulated")
    compile_for(device, kernels, list(own.values()))
    device.close()
    for name in ("kv-len-one", "companions"):
        result = runner.run(own[f"attention/12b-local/decode-of-a-test/{name}"])
        assert (result.status, result.entry) == ("passed", NAME)


def test_a_wrong_one_is_seen_by_the_case_that_compares_forms(twin: Entry, runner: CaseRunner, kernels: Path) -> None:
    forms_agree = next(case for case in gate_cases([L12]) if case.id.endswith("/decode/forms-agree"))
    assert runner.run(forms_agree).status == "passed"
    body = find_source("decode_body.cuh").text.replace("1.0f / sum : 0.0f", "1.5f / sum : 0.0f")
    (kernels / "of_a_test_body.cuh").write_text(body, encoding="utf-8")
    text = (kernels / SOURCE).read_text(encoding="utf-8").replace('"decode_body.cuh"', '"of_a_test_body.cuh"')
    (kernels / SOURCE).write_text(text, encoding="utf-8")
    wrong = CaseRunner(runner.settings)
    result = wrong.run(forms_agree)
    wrong.close()
    assert result.status == "failed"
    assert any("decode-of-a-test" in mismatch.operation for mismatch in result.mismatches)


class CountingDevice(EmulatedDevice):
    """A launch is counted and nothing else."""

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.launch_count += 1


def test_reject_refuses_at_it(twin: Entry, kernels: Path) -> None:
    cases = [case for case in reject_cases() if case.entry == NAME]
    like = [case for case in reject_cases() if case.entry == "batch_decode_paged_window_hd256_into"]
    assert [(case.rule, case.spoiled.variant) for case in cases] == [(case.rule, case.spoiled.variant) for case in like]
    device, foreign = CountingDevice(), EmulatedDevice()
    runner = RejectRunner(KernelLibrary(device, kernels), foreign)
    assert [case.id for case in cases if runner.refuse(case, runner.bench_of(case))] == []
    runner.close()
    device.close()
    foreign.close()


def test_serving_takes_turns_with_it(twin: Entry, runner: CaseRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def noted(entry: Entry, *arguments: object, **named: object) -> None:
        called.append(entry.name)
        twin.function(entry, *arguments, **named)

    monkeypatch.setattr(table, "ENTRIES", (*table.ENTRIES[:-1], replace(twin, function=noted)))
    like = next(iter(serve_cases(L12, seed=1)))
    heads = replace(like.geometry, num_qo_heads=like.geometry.gqa_group, num_kv_heads=1)
    short = ServeCase(like.id, like.entry, heads, 1, (ServeRequest(0, 5, 5),), 8, 5)
    assert runner.run(short).status == "passed"
    assert NAME in called


def test_end_to_end_decodes_with_it(twin: Entry) -> None:
    cases = {case.id: case for case in replay_cases(ROOT / "tests" / "golden" / "greedy")}
    own = [case for case_id, case in cases.items() if case_id.endswith("/decode/decode-of-a-test")]
    assert own
    assert {case.settings.decode_form for case in own} == {twin.label}
    # The family that has no such form decodes with its preferred one.
    assert decode_entry(L12, twin.label).name == NAME
    usual = Settings().decode_form
    assert decode_entry(GEOMETRIES["12b-global"], twin.label) is decode_entry(GEOMETRIES["12b-global"], usual)
    for case in far_cases():
        assert case.walk.decoded == len(decode_entries(case.geometry))
        assert (twin in decode_entries(case.geometry)) == (case.geometry.family == "local")


def test_recorded_attention_is_held_against_it(twin: Entry) -> None:
    forms = {case.form for case in attention_golden_cases(ROOT / "tests" / "golden") if case.geometry.head_dim == 256}
    assert twin.form in forms


def test_bench_times_it_and_the_verdict_ranks_it(twin: Entry) -> None:
    shape = decode_shape(L12, 1, 1024)
    assert {one.name: one.entry for one in variants_of(shape, L12, H200)}["d"] == NAME
    global_ = GEOMETRIES["12b-global"]
    assert "d" not in {one.name for one in variants_of(decode_shape(global_, 1, 1024), global_, H200)}

    def measured(name: str, seconds: float) -> Measurement:
        timing = Timing(seconds, seconds, seconds, seconds, seconds, count=3)
        return Measurement(f"{shape.id}/{name}", shape.id, name, name, "measured", "", 1, graph=timing)

    run = RunInfo(DeviceInfo("cuda", "", ""), "", "", "", "", {}, "", 0)
    for b_seconds, chosen in ((1.001e-6, "b"), (1.5e-6, "d")):
        record = BenchRecord(run, {}, None, (shape,), (measured("d", 1e-6), measured("b", b_seconds)))
        verdict = decide_cell(record, shape)
        assert verdict is not None
        assert (verdict.configuration, verdict.is_split) == (chosen, False)


def test_plots_and_records_know_it(twin: Entry, kernels: Path) -> None:
    lines = lines_of_forms()
    assert lines["d"].label == "d, decode-of-a-test"
    assert len({(line.color, line.style) for line in lines.values()}) == len(lines)
    assert SOURCE in sources_of(table.entries())
    device = open_device("emulated")
    with_twin = collect_run_info(device, kernels, 1).kernels_digest
    (kernels / SOURCE).write_text((kernels / SOURCE).read_text(encoding="utf-8") + "// more\n", encoding="utf-8")
    assert collect_run_info(device, kernels, 1).kernels_digest != with_twin
    device.close()
