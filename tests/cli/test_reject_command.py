"""``g4kv reject`` as a CI job calls it: exit codes, what it writes, what it says."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.records.run import CaseResult, DeviceInfo, RunInfo
from g4kv_cli.report.reject import RejectConsole, rule_of

Run = Callable[..., subprocess.CompletedProcess[str]]

EMULATED = ("reject", "--device", "emulated")
DECODE = "qkv_norm_rope_paged_decode_hd256_plain_into"
TRAP = f"trap/{DECODE}/page_id_range/num_pages"
HOST = f"reject/{DECODE}/page_id_range/num_pages"


def test_help_tells_a_ci_author_what_to_paste(run_g4kv: Run) -> None:
    done = run_g4kv("reject", "--help")
    assert done.returncode == 0
    assert "g4kv reject --junit reject.xml" in done.stdout
    assert "g4kv reject --require-gpu --junit reject.xml --json reject.json" in done.stdout
    assert "Exit codes: 0" in done.stdout


def test_list_and_host_only(run_g4kv: Run) -> None:
    listed = run_g4kv("reject", "--list").stdout.splitlines()
    host = run_g4kv("reject", "--list", "--host-only").stdout.splitlines()
    traps = [case_id for case_id in listed if case_id.startswith("trap/")]
    assert [case_id for case_id in listed if case_id not in set(host)] == traps
    assert len(host) >= 150
    assert len(traps) >= 24
    assert {HOST, TRAP} <= set(listed)


def test_selected_cases_and_what_is_written(run_g4kv: Run, tmp_path: Path) -> None:
    record, junit = tmp_path / "reject.json", tmp_path / "reject.xml"
    glob = f"*/{DECODE}/page_id_range/*"
    done = run_g4kv(*EMULATED, "--case", glob, "--json", str(record), "--junit", str(junit))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("device   emulated sm_90")
    assert re.search(r"^page_id_range +4 +4$", done.stdout, re.MULTILINE)
    assert re.search(rf"^  ok    {DECODE}  12b-local +4 +4$", done.stdout, re.MULTILINE)
    assert re.search(r"^8 passed, 0 failed, 0 error, 0 skipped: 4 host rejections, 4 traps in ", done.stdout, re.M)
    written = json.loads(record.read_text())
    assert written["summary"] == {"passed": 8, "failed": 0, "error": 0, "skipped": 0, "not_covered": 0}
    assert written["run"]["device"]["kind"] == "emulated"
    ids = [case["id"] for case in written["cases"]]
    assert {HOST, TRAP} <= set(ids)
    assert {case["geometry"] for case in written["cases"]} == {"12b-local"}
    suites = ElementTree.parse(junit).getroot()
    assert suites.get("name") == "g4kv reject"
    assert [case.get("name") for case in suites.iter("testcase")] == ids
    assert list(suites.iter("failure")) == []


def test_quiet_is_two_lines(run_g4kv: Run) -> None:
    done = run_g4kv(*EMULATED, "-q", "--case", HOST)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("1 passed, 0 failed, 0 error, 0 skipped: 1 host rejection, 0 traps in ")


@pytest.fixture
def untrapped(tmp_path: Path) -> Path:
    """Kernels whose trap for page ids never fires."""
    directory = tmp_path / "kernels"
    directory.mkdir()
    text = (BUILT_IN_KERNELS_DIRECTORY / "prep_body.cuh").read_text()
    trap = "if (page < 0 || page >= p.num_pages) __trap();"
    assert text.count(trap) == 1
    (directory / "prep_body.cuh").write_text(text.replace(trap, f"if (p.eps < 0.0f) {trap}"))
    return directory


def test_a_kernel_that_does_not_trap_is_a_finding(run_g4kv: Run, untrapped: Path, tmp_path: Path) -> None:
    junit = tmp_path / "reject.xml"
    done = run_g4kv(*EMULATED, "--kernels", str(untrapped), "--case", TRAP, "--junit", str(junit))
    assert done.returncode == 1
    assert f"    FAILED  {TRAP}" in done.stdout
    assert "a fault of kind global_out_of_bounds came before the trap" in done.stdout
    again = re.search(r"^      again  (g4kv reject .*)$", done.stdout, re.MULTILINE)
    assert again is not None
    assert again[1].endswith(f"--kernels {untrapped} --case {TRAP}")
    assert re.search(rf"^  FAIL  {DECODE} .* 1 did not pass$", done.stdout, re.MULTILINE)
    assert len(list(ElementTree.parse(junit).getroot().iter("failure"))) == 1


def test_the_rerun_command_runs_again(run_g4kv: Run, untrapped: Path) -> None:
    first = run_g4kv(*EMULATED, "--kernels", str(untrapped), "--case", TRAP)
    again = re.search(r"again  g4kv (.*)$", first.stdout, re.MULTILINE)
    assert again is not None
    assert run_g4kv(*again[1].split()).returncode == 1


def test_no_isolate_runs_one_trap_here(run_g4kv: Run) -> None:
    assert run_g4kv(*EMULATED, "--no-isolate", "--case", TRAP).returncode == 0
    refused = run_g4kv(*EMULATED, "--no-isolate", "--case", f"trap/{DECODE}/*")
    assert refused.returncode == 2
    assert refused.stderr == "g4kv: error: --no-isolate runs one trap in this process: name it with --case\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "reject/nothing"), "no case 'reject/nothing'; .*g4kv reject --list shows all ids"),
        (("--case", TRAP, "--host-only"), f"no case '{TRAP}'"),
        (
            ("--json", "/no/such/directory/file.json", "--case", HOST),
            "--json /no/such/directory/file.json: cannot write",
        ),
        (("--device", "emulated", "--require-gpu"), "a GPU is required"),
        (("--device", "quantum"), "unknown device 'quantum'"),
    ],
)
def test_usage_errors(run_g4kv: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run_g4kv("reject", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr)


def test_a_kernel_that_does_not_compile_is_exit_2(run_g4kv: Run, tmp_path: Path) -> None:
    (tmp_path / "prep_body.cuh").write_text("#error broken on purpose\n")
    done = run_g4kv(*EMULATED, "--kernels", str(tmp_path), "--case", HOST)
    assert done.returncode == 2
    assert "broken on purpose" in done.stderr


RUN = RunInfo(DeviceInfo("emulated", "a device", "sm_90", "", "asked for"), "13.0", "0" * 64, "", "", {}, "", 0)


def result(number: int, status: str = "passed", kind: str = "reject") -> CaseResult:
    case_id = f"{kind}/an_entry/rule_{number % 50}/variant_{number}"
    return CaseResult(case_id, "an_entry", "12b-local", status, 0.0, rerun=f"again {number}")  # type: ignore[arg-type]


def test_the_summary_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """50 rules, as many entries as there are, in 40 lines of 100 columns."""
    console = RejectConsole()
    console.start(RUN)
    for number in range(500):
        console.add(result(number, kind="trap" if number % 3 else "reject"))
    console.finish()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 - 15
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("500 passed, 0 failed, 0 error, 0 skipped: 167 host rejections, 333 traps in ")


def test_many_failures_are_counted_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    console = RejectConsole(quiet=True)
    for number in range(60):
        console.add(result(number, "failed"))
    console.finish()
    text = capsys.readouterr().out
    assert text.count("    FAILED  ") == 20
    assert "and 40 cases more that did not pass: see --json or --junit" in text
    assert rule_of(result(7)) == "rule_7"
