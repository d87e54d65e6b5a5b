"""A kernel that does not end costs its case the time limit, not the run, and the report says where it stood."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_helper import int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel, line_of
from seeding import only_kernels

from g4kv_cli.cases import isolate
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.isolate import run_cases
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.cases.run import RunSettings
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.timeout import MAX_TIMEOUTS_AN_ENTRY, Patience
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.emulated import DeadlinePassed, LaunchFault, LaunchInterrupted, Machine, PoisonedMachine
from g4kv_cli.device.emulated.engine import launch as engine_launch
from g4kv_cli.device.emulated.state import store_log
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.table import entry_for
from g4kv_cli.errors import CaseTimeout
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD, ENDLESS = "prep/e2b-local/contiguous/closed-form", "prep/e2b-local/prefill/start/zero"
FORMS = ("contiguous", "prefill", "decode")
PREP, TOKEN = "prep_body.cuh", "const int token = blockIdx.x;"

SPIN = """
extern "C" __global__ void kernel(volatile int* flag, int* out) {
  out[blockIdx.x * 64 + threadIdx.x] = 7;
  const int ends = *flag;
  if (blockIdx.x == 1 && threadIdx.x >= 32)
    for (unsigned i = ends; i != 1; i += 2) asm volatile("" : "+r"(i));  // MARK: loop
}
"""


def _endless_prep(directory: Path, condition: str, *forms: str, threads: str = "threadIdx.x >= 32") -> tuple[Path, int]:
    """A copy of e2b's prep kernels of these forms in which threads of some blocks spin; and the line where they do."""
    directory.mkdir()
    text = (BUILT_IN_KERNELS_DIRECTORY / PREP).read_text()
    assert text.count(TOKEN) == 1
    loop = f'{TOKEN}  if ({condition} && {threads}) for (unsigned i = 0; i != 1; i += 2) asm volatile("" : "+r"(i));'
    text = text.replace(TOKEN, loop)
    (directory / PREP).write_text(text)
    only_kernels(directory, [entry_for(GEOMETRIES["e2b-local"], "prep", form) for form in forms])
    return directory, line_of(text, loop)


def _smoke(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    record, junit = tmp_path / "run.json", tmp_path / "run.xml"
    words = ["smoke", "--device", "emulated", "--json", str(record), "--junit", str(junit), *arguments]
    return g4kv(words), json.loads(record.read_text()), junit.read_text()


def test_a_launch_past_its_deadline_says_where_it_stood() -> None:
    machine = Machine()
    flag, out = upload(machine, np.zeros(1, np.int32), "flag"), upload(machine, np.zeros(128, np.int32), "out")
    kernel = compile_kernel(SPIN)
    ends = upload(machine, np.ones(1, np.int32), "ends")
    launch_on(machine, kernel, pointer(ends), pointer(out), grid=2, block=64)  # it is translated then
    with pytest.raises(DeadlinePassed) as caught:
        launch_on(machine, kernel, pointer(flag), pointer(out), grid=2, block=64, deadline=time.monotonic() + 0.3)
    standing = caught.value.standing
    assert (standing.kernel, standing.block, standing.warp) == ("kernel", (1, 0, 0), 1)
    assert standing.source_line == line_of(SPIN, "MARK: loop")
    assert str(standing) == f"kernel kernel at test.cu:{standing.source_line}, block (1, 0, 0), warp 1"
    assert (read_as(machine, out, 128, np.int32) == 7).all()  # what was stored stays
    assert machine.standing() is None
    with pytest.raises(PoisonedMachine):
        launch_on(machine, kernel, pointer(flag), pointer(out))


def test_the_engine_itself_ends_an_endless_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its deadline, however many steps that takes; without one by its steps. The interpreter is never asked."""
    monkeypatch.setattr(engine_launch, "BLOCK_STEPS", 100_000)
    kernel = compile_kernel(SPIN)
    words = f"test.cu:{line_of(SPIN, 'MARK: loop')}, block (1, 0, 0), "
    for seconds in (1.0, None):
        machine = Machine()
        flag, out = upload(machine, np.zeros(1, np.int32), "flag"), upload(machine, np.zeros(128, np.int32), "out")
        deadline = None if seconds is None else time.monotonic() + seconds
        with pytest.raises(LaunchFault if seconds is None else DeadlinePassed) as caught:
            launch_on(machine, kernel, pointer(flag), pointer(out), grid=2, block=64, deadline=deadline)
        assert words in str(caught.value)
        assert machine.counts.replayed == {}
        assert machine.counts.interpreted == 0
        assert (read_as(machine, out, 128, np.int32) == 7).all()
        assert machine.written_ranges(out).tolist() == ([[0, 512]] if seconds is None else [])
        if isinstance(caught.value, LaunchFault):
            (fault,) = caught.value.faults
            assert (fault.kind, fault.thread, fault.is_fatal) == ("watchdog", (32, 0, 0), True)


def test_a_launch_that_ends_in_time_is_not_disturbed() -> None:
    machine = Machine()
    flag, out = upload(machine, np.ones(1, np.int32), "flag"), upload(machine, np.zeros(128, np.int32), "out")
    deadline = time.monotonic() + 600
    launch_on(machine, compile_kernel(SPIN), pointer(flag), pointer(out), grid=2, block=64, deadline=deadline)
    assert (read_as(machine, out, 128, np.int32) == 7).all()


def test_an_interrupted_launch_says_where_it_stood() -> None:
    machine = Machine()
    flag, out = upload(machine, np.zeros(1, np.int32), "flag"), upload(machine, np.zeros(128, np.int32), "out")
    seen: list[str] = []

    def look(_number: int, _frame: object) -> None:
        seen.append(str(machine.standing()))
        raise KeyboardInterrupt

    kernel = compile_kernel(SPIN)
    deadline = time.monotonic() + 600  # so that it is not ended as endless before
    before = signal.signal(signal.SIGALRM, look)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(LaunchInterrupted) as caught:
            launch_on(machine, kernel, pointer(flag), pointer(out), grid=2, block=64, deadline=deadline)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    words = f"kernel kernel at test.cu:{line_of(SPIN, 'MARK: loop')}, block (1, 0, 0), warp 1"
    assert str(caught.value) == words
    assert seen == [words]


REPEATED_STORE = """
extern "C" __global__ void kernel(int* out, int times) {
  out[128 + WHERE] = 7;
  for (int i = 0; i < times; ++i) ((volatile int*)out)[WHERE] = i;
}
"""


def test_a_loop_of_stores_to_one_place_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "interpreter")
    monkeypatch.setattr(store_log, "_COMPACT_AT_LANES", 4096)
    kept: list[int] = []
    finish = store_log.StoreLog.finish

    def counting(log: store_log.StoreLog) -> Any:
        kept.append(len(log.entries))
        return finish(log)

    monkeypatch.setattr(store_log.StoreLog, "finish", counting)
    machine = Machine()
    out = machine.allocate(1024, "out")
    source = REPEATED_STORE.replace("WHERE", "blockIdx.x * 64 + threadIdx.x")
    launch_on(machine, compile_kernel(source), pointer(out), int32(1000), grid=2, block=64)
    assert kept[0] < 100
    assert machine.written_ranges(out).tolist() == [[0, 1024]]
    # Two blocks at one place are still told apart after that.
    clash = compile_kernel(REPEATED_STORE.replace("WHERE", "threadIdx.x"))
    with pytest.raises(Exception, match="block_write_conflict"):
        launch_on(machine, clash, pointer(out), int32(1000), grid=2, block=64)
    assert kept[1] < 100


def _require_timeout(case: dict[str, Any], seconds: float, line: int, block: str, warp: int = 1) -> None:
    assert case["status"] == "error"
    assert f"not finished after {seconds:g} s" in case["reason"]
    assert re.search(rf"kernel \w+ at {re.escape(PREP)}:{line}\b", case["reason"]), case["reason"]
    assert f"block {block}, warp {warp}" in case["reason"]


def test_smoke_ends_an_endless_case_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels, line = _endless_prep(tmp_path / "kernels", "kForm == Form::paged_prefill && token == 2", *FORMS)
    chosen = ["--case", GOOD, "--case", ENDLESS, "--case", "prep/e2b-local/decode/closed-form"]
    code, record, junit = _smoke(tmp_path, "--kernels", str(kernels), "--jobs", "1", "--case-timeout", "2", *chosen)
    shown = capsys.readouterr().out
    assert code == 2
    statuses = {case["id"]: case["status"] for case in record["cases"]}
    assert statuses == {GOOD: "passed", ENDLESS: "error", "prep/e2b-local/decode/closed-form": "passed"}
    (late,) = (case for case in record["cases"] if case["id"] == ENDLESS)
    _require_timeout(late, 2, line, "(2, 0, 0)")
    assert late["rerun"].endswith(f"--case-timeout 2 --case {ENDLESS}")
    for text in (shown, junit):
        assert f"{PREP}:{line}" in text
        assert "block (2, 0, 0), warp 1" in text
    (error,) = ElementTree.fromstring(junit).iter("error")
    assert "not finished after 2 s" in (error.get("message") or "")


def test_workers_end_their_cases_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "MIN_CASES_PER_JOB", 1)
    kernels, line = _endless_prep(tmp_path / "kernels", "kForm == Form::paged_prefill && token == 2", *FORMS)
    chosen = ["--case", ENDLESS, "--case", GOOD]
    code, record, _ = _smoke(tmp_path, "--kernels", str(kernels), "--jobs", "2", "--case-timeout", "2", *chosen)
    assert code == 2
    by_id = {case["id"]: case for case in record["cases"]}
    assert by_id[GOOD]["status"] == "passed"
    _require_timeout(by_id[ENDLESS], 2, line, "(2, 0, 0)")


def test_a_case_without_a_limit_and_one_with_time_enough_are_the_same(tmp_path: Path) -> None:
    digests = []
    for seconds in ("0", "600"):
        code, record, _ = _smoke(tmp_path, "--case", GOOD, "--case-timeout", seconds)
        assert code == 0
        digests.append([case["output_digest"] for case in record["cases"]])
    assert digests[0] == digests[1]


def test_a_worker_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose driver call does not come back. The worker's own limit is lifted: it never speaks."""
    monkeypatch.setattr(isolate, "SECONDS_TO_START_AND_ANSWER", 0.0)
    cases = select_cases(gate_cases([GEOMETRIES["e2b-local"]]), (GOOD,))
    settings = RunSettings("emulated", None, ("g4kv", "smoke"), case_timeout_seconds=0.01)
    begin = time.monotonic()
    (result,) = isolate._in_lanes(cases, settings, 1)
    assert result.status == "error"
    assert "does not answer" in result.reason
    assert time.monotonic() - begin < 30


def test_with_a_limit_a_gpu_runs_every_case_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("emulated")
    monkeypatch.setattr(device, "info", type(device.info)("cuda", "stand-in", "sm_90a"))
    calls: list[int] = []

    def in_worker(cases: Any, _settings: RunSettings, _jobs: int) -> Any:
        calls.append(len(cases))
        return iter(())

    monkeypatch.setattr(isolate, "_in_lanes", in_worker)
    cases = select_cases(gate_cases([GEOMETRIES["e2b-local"]]), (GOOD,))
    assert list(run_cases(cases, RunSettings("cuda:0", None, ("g4kv",), 5.0), device, 1)) == []
    assert calls == [1]
    unlimited = RunSettings("emulated", None, ("g4kv",), float("inf"))
    assert [result.status for result in run_cases(cases, unlimited, device, 1)] == ["passed"]
    assert calls == [1]


def test_an_entry_that_never_ends_is_not_waited_for_again_and_again(tmp_path: Path) -> None:
    kernels, _ = _endless_prep(tmp_path / "kernels", "kForm == Form::paged_prefill", "prefill", "contiguous")
    arguments = ["--kernels", str(kernels), "--jobs", "1", "--case-timeout", "0.3"]
    code, record, _ = _smoke(tmp_path, *arguments, "--case", "prep/e2b-local/prefill/*")
    assert code == 2
    late = [case for case in record["cases"] if "not finished after" in case["reason"]]
    rest = [case for case in record["cases"] if "not run" in case["reason"]]
    assert len(late) == MAX_TIMEOUTS_AN_ENTRY
    assert len(late) + len(rest) == len(record["cases"]) > MAX_TIMEOUTS_AN_ENTRY
    patience = Patience()
    for _ in range(MAX_TIMEOUTS_AN_ENTRY):
        assert not patience.refusal("one")
        patience.note("one")
    assert patience.refusal("one")
    assert not patience.refusal("another")


def test_reject_ends_an_endless_twin_and_an_endless_trap(tmp_path: Path) -> None:
    kernels, line = _endless_prep(tmp_path / "kernels", "kForm == Form::paged_decode", *FORMS, threads="true")
    record = tmp_path / "reject.json"
    decode = "qkv_norm_rope_paged_decode_hd256_plain_into"
    host = next(case.id for case in reject_cases() if case.entry == decode and case.rule == "eps")
    other = next(case.id for case in reject_cases() if "prefill_hd256" in case.entry and case.rule == "eps")
    trap = next(case.id for case in trap_cases() if case.entry == decode)
    words = ["reject", "--device", "emulated", "--kernels", str(kernels), "--json", str(record), "--case-timeout", "2"]
    code = g4kv([*words, "--case", host, "--case", other, "--case", trap])
    by_id = {case["id"]: case for case in json.loads(record.read_text())["cases"]}
    assert code == 1  # the trap was not met; an endless twin alone would be 2
    _require_timeout(by_id[host], 2, line, "(0, 0, 0)", 0)
    assert by_id[other]["status"] == "passed"
    assert by_id[trap]["status"] == "failed"
    assert by_id[trap]["reason"].startswith("hung, want a trap")
    assert f"{PREP}:{line}" in by_id[trap]["reason"]


def test_a_device_past_its_time_is_lost() -> None:
    error = CaseTimeout(3.0, "kernel k at f.cu:1, block (0, 0, 0), warp 0")
    again = error.__reduce__()
    assert str(again[0](*again[1])) == str(error)
    device = open_device("emulated")
    device.limit_time(float("inf"))
    assert device.time_limit is None
    device.limit_time(5.0)
    assert device.time_limit is not None
    assert not device.is_lost
    device.limit_time(None)
    assert device.time_limit is None
    assert device.standing() == ""


# A process started in the background may ignore the signal, and its children with it: as at a terminal instead. Workers
# run this too. Each process leaves a file when it launches a kernel.
_HEED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from g4kv_cli.cases import isolate
from g4kv_cli.device.emulated import Machine
isolate.MIN_CASES_PER_JOB = 1
launch = Machine.launch
def noted(machine, *arguments, **options):
    open(os.path.join(sys.path[0], f"launched-{os.getpid()}"), "w").close()
    return launch(machine, *arguments, **options)
Machine.launch = noted
from g4kv_cli.main import main
if __name__ == "__main__": main()
"""


SECONDS_TO_THE_LOOP = 0.75
"""Processor time from the launch on, in which the kernel is translated and reaches its loop."""


def _cpu_seconds(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.parametrize("command", ["smoke, 1 job", "smoke, 2 jobs", "reject"])
def test_ctrl_c_names_the_case_and_where_its_kernel_stands(command: str, tmp_path: Path) -> None:
    kernels, line = _endless_prep(tmp_path / "kernels", "kForm == Form::paged_decode", "decode")
    script = tmp_path / "run.py"
    script.write_text(_HEED, encoding="utf-8")
    name, _, jobs = command.partition(", ")
    cases = ["prep/e2b-local/decode/closed-form", "prep/e2b-local/decode/rotary64"]
    if name == "reject":
        cases = [case.id for case in reject_cases() if case.entry == "qkv_norm_rope_paged_decode_hd256_plain_into"][:1]
    words = [name, "--device", "emulated", "--kernels", str(kernels), "--case-timeout", "200"]
    words += ["--jobs", jobs[0]] if jobs else []
    record, junit = tmp_path / "run.json", tmp_path / "run.xml"
    words += ["--json", str(record), "--junit", str(junit)]
    spinning = 2 if jobs.startswith("2") else 1
    process = subprocess.Popen(
        [sys.executable, str(script), *words, *(word for case in cases for word in ("--case", case))],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 100
        begun: dict[str, float] = {}
        while len(begun) < spinning or any(_cpu_seconds(pid) < at + SECONDS_TO_THE_LOOP for pid, at in begun.items()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
            for path in tmp_path.glob("launched-*"):
                pid = path.name.rpartition("-")[2]
                begun.setdefault(pid, _cpu_seconds(pid))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.startswith("g4kv: interrupted at ")
    for case in cases[:spinning]:
        where = rf"{re.escape(case)}: kernel \w+ at {re.escape(PREP)}:{line}\b[^;]*, block \(0, 0, 0\), warp 1"
        assert re.search(where, errors), errors
        assert re.search(where, json.loads(record.read_text())["ended"])
        assert re.search(where, html.unescape(junit.read_text()))
