"""Records and what a person reads of them: the JSON schema, JUnit, the console's lines."""

from __future__ import annotations

import dataclasses
import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import CaseResult, DeviceInfo, Mismatch, RunInfo, to_json
from g4kv_cli.report.console import SmokeConsole, mismatch_lines
from g4kv_cli.report.format import count_text, seconds_text
from g4kv_cli.report.json import JsonRecord, read_record
from g4kv_cli.report.junit import run_properties, write_junit
from g4kv_cli.report.reject import RejectConsole

RUN = RunInfo(
    device=DeviceInfo("emulated", "an H200's arithmetic", "sm_90", "", "no CUDA driver"),
    nvrtc="13.5",
    kernels_digest="ab" * 32,
    kernels_directory="",
    git_commit="0123",
    versions={"numpy": "2.4.0"},
    date="2026-01-02T03:04:05+00:00",
    seed=7,
)
WRONG = Mismatch(
    operation="K in the pool",
    count=1200,
    total=8192,
    first={"layer": 1, "page": 7, "slot": 3, "token": 2, "head": 0, "dim": 5},
    first_got="1 (0x3f80)",
    first_want="2",
    worst={"layer": 1, "page": 7, "slot": 4, "token": 3, "head": 6, "dim": 9},
    worst_got="-1 (0xbf80)",
    worst_want="2",
    limit="exact (closed form): 0 at the worst",
)
PASSED = CaseResult("prep/a/one", "entry_one", "12b-local", "passed", 0.25, output_digest="cd" * 32, rerun="g4kv one")
FAILED = CaseResult("prep/a/two", "entry_one", "12b-local", "failed", 0.5, mismatches=(WRONG,), rerun="g4kv two")
FAULTED = CaseResult("prep/b/x", "entry_two", "12b-global", "failed", 0.5, "trap at prep.cu:3\nblock 1", rerun="g4kv x")
ERROR = CaseResult("prep/b/y", "entry_two", "12b-global", "error", 0.5, "no memory", rerun="g4kv y")
SKIPPED = CaseResult("prep/b/z", "entry_two", "12b-global", "skipped", 0.0, "needs 9 GiB", rerun="g4kv z")
EVERY = (PASSED, FAILED, FAULTED, ERROR, SKIPPED)


def test_json_schema(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record = JsonRecord(path, RUN, len(EVERY))
    for result in EVERY:
        record.add(result)
    written = json.loads(path.read_text())
    assert written["schema_version"] == 1
    assert written["summary"] == {"passed": 1, "failed": 2, "error": 1, "skipped": 1, "not_covered": 0}
    assert written["run"]["device"]["kind"] == "emulated"
    assert written["run"]["kernels_digest"] == "ab" * 32
    assert [case["status"] for case in written["cases"]] == ["passed", "failed", "failed", "error", "skipped"]
    assert written["cases"][0] == {
        "id": "prep/a/one",
        "entry": "entry_one",
        "geometry": "12b-local",
        "status": "passed",
        "seconds": 0.25,
        "output_digest": "cd" * 32,
        "rerun": "g4kv one",
    }
    assert written["cases"][1]["mismatches"][0]["first"]["page"] == 7
    assert written["cases"][3]["reason"] == "no memory"


def test_json_is_whole_after_every_case(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record = JsonRecord(path, RUN, len(EVERY))
    for done in range(len(EVERY)):
        written = json.loads(path.read_text())
        assert len(written["cases"]) == done == sum(written["summary"].values())
        record.add(EVERY[done])
        assert (written["planned"], written["ended"]) == (len(EVERY), "still running, or killed")
    record.finish("ended early")
    assert json.loads(path.read_text())["ended"] == "ended early"
    record.finish()
    assert json.loads(path.read_text())["ended"] == "finished"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_link_stays_one_and_a_device_is_no_file(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to("target.json")
    JsonRecord(link, RUN, 0)
    assert link.is_symlink()
    assert json.loads(target.read_text())["planned"] == 0
    for place in ("/dev/stdout", "/dev/null", "/proc/self/fd/1"):
        with pytest.raises(UsageError, match=f"--json {place}: not a file"):
            JsonRecord(Path(place), RUN, 0)


def test_others_may_read_a_record_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        JsonRecord(tmp_path / "run.json", RUN, 0)
    finally:
        os.umask(before)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o640


def test_json_needs_a_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--json .*missing/run\.json: cannot write: No such file"):
        JsonRecord(tmp_path / "missing" / "run.json", RUN, 0)
    with pytest.raises(UsageError, match="not a file"):
        JsonRecord(tmp_path, RUN, 0)


def test_reading_a_record_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record = JsonRecord(path, RUN, len(EVERY))
    record.add(PASSED)
    record.add(FAILED)
    earlier = read_record(path, "--same-bits-as")
    assert earlier.digests == {"prep/a/one": "cd" * 32, "prep/a/two": ""}
    assert (earlier.seed, earlier.kernels_digest) == (7, "ab" * 32)
    record.add(dataclasses.replace(PASSED, id="prep/a/three", kernels=("one", "two")))
    assert read_record(path, "--same-bits-as").kernels == {"prep/a/three": ("one", "two")}


def test_a_record_of_before_all_its_fields_were_written_down_can_be_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    older = {"schema_version": 1, "run": to_json(RUN), "cases": [to_json(PASSED)]}
    path.write_text(json.dumps(older))
    earlier = read_record(path, "--same-bits-as")
    assert (earlier.digests, earlier.knows_page_size) == ({"prep/a/one": "cd" * 32}, False)


def _record_with(**fields: Any) -> str:
    record = {"schema_version": 1, "run": to_json(RUN), "settings": {}, "cases": [], "planned": 0, "ended": "finished"}
    return json.dumps({**record, **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a record of schema version 1"),
        ('{"schema_version": 99}', "not a record of schema version 1"),
        ('{"schema_version": 1, "cases": []}', "run is missing"),
        (_record_with(cases=[{}]), "cases[0].status is missing"),
        (_record_with(cases="x"), 'cases must be a list, not "x"'),
        (_record_with(cases=[3]), "cases[0] must be an object, not 3"),
        (_record_with(cases=[{**to_json(PASSED), "status": "great"}]), "cases[0].status must be one of passed, failed"),
        (
            _record_with(cases=[{**to_json(PASSED), "seconds": float("nan")}]),
            "cases[0].seconds must be a finite number",
        ),
        (_record_with(run={**to_json(RUN), "seed": True}), "run.seed must be an integer, not true"),
        (_record_with(run=None), "run must be an object, not null"),
        (_record_with(settings={"page_size": "16"}), "settings.page_size must be an integer or null"),
        (_record_with(other=1), "other is no field of a record"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="--same-bits-as") as raised:
        read_record(path, "--same-bits-as")
    assert words in str(raised.value)


def test_junit(tmp_path: Path) -> None:
    path = tmp_path / "run.xml"
    uncovered = replace(SKIPPED, id="prep/b/u", status="not covered", reason="no such entry")
    write_junit(path, RUN, [*EVERY, uncovered], len(EVERY) + 1)
    root = ElementTree.parse(path).getroot()
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6",
        "failures": "2",
        "errors": "1",
        "skipped": "2",
    }
    skips = [skip.get("message") for skip in root.iter("skipped")]
    assert skips == ["needs 9 GiB", "not covered: no such entry"]
    assert [suite.get("name") for suite in root] == ["12b-local", "12b-global"]
    failure = root.find(".//testcase[@name='prep/a/two']/failure")
    assert failure is not None
    assert "K in the pool: 1,200 of 8,192 elements" in str(failure.get("message"))
    assert "again: g4kv two" in str(failure.text)


def test_every_suite_of_a_junit_file_says_what_ran_where(tmp_path: Path) -> None:
    path = tmp_path / "run.xml"
    write_junit(path, RUN, [PASSED, ERROR], 3)
    suites = list(ElementTree.parse(path).getroot())
    assert [suite.get("name") for suite in suites] == ["12b-local", "12b-global", "g4kv smoke"]
    for suite in suites:
        assert [child.tag for child in suite][:2] == ["properties", "testcase"]
        held = {one.get("name"): one.get("value") for one in suite.iter("property")}
        assert held["device"] == RUN.device.name
        assert held["arch"] == RUN.device.arch
        assert held["kernels_digest"] == RUN.kernels_digest
        assert held["seed"] == str(RUN.seed)
        for package, version in RUN.versions.items():
            assert held[f"version_{package}"] == version
        assert "driver" not in held
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in run_properties(RUN) if not name.startswith("version_"))


def test_the_properties_name_the_kernels_that_ran() -> None:
    assert run_properties(RUN)["kernels"] == "built in"
    assert run_properties(replace(RUN, kernels_directory="mine/"))["kernels"] == "mine/"
    assert run_properties(replace(RUN, provider="my-engine"))["kernels"] == "my-engine"


def test_junit_of_half_a_run_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.xml"
    write_junit(path, RUN, [PASSED], 3)
    root = ElementTree.parse(path).getroot()
    assert (root.get("tests"), root.get("errors")) == ("2", "1")
    error = root.find(".//testcase[@name='the whole run']/error")
    assert error is not None
    assert error.get("message") == "the run ended after 1 of 3 cases"


def test_mismatch_in_words() -> None:
    assert mismatch_lines(WRONG) == [
        "K in the pool: 1,200 of 8,192 elements",
        "  first  layer 1, page 7, slot 3, token 2, head 0, dim 5: got 1 (0x3f80), want 2",
        "  worst  layer 1, page 7, slot 4, token 3, head 6, dim 9: got -1 (0xbf80), want 2",
        "  limit  exact (closed form): 0 at the worst",
    ]


@pytest.mark.parametrize("quiet", [False, True])
def test_console(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    console = SmokeConsole(len(EVERY), quiet=quiet)
    console.start(RUN)
    for result in EVERY:
        console.add(result)
    console.finish()
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "device   emulated, an H200's arithmetic, sm_90, NVRTC 13.5, no CUDA driver"
    assert lines[-1].startswith("1 passed, 2 failed, 1 error, 1 skipped of 5 cases in ")
    assert "    FAILED  prep/a/two" in lines
    assert "      again  g4kv two" in lines
    assert "      trap at prep.cu:3" in lines
    assert "    SKIPPED  prep/b/z" in lines
    assert "      needs 9 GiB" in lines
    groups = [line for line in lines if line.startswith(("  ok", "  FAIL"))]
    assert len(groups) == (0 if quiet else 2)
    if not quiet:
        assert groups[0].split() == ["FAIL", "entry_one", "1", "passed,", "1", "failed,", "0.75", "s"]
        assert lines[1] == "kernels  built in, sources abababababab, seed 7"
    assert shown.err == ""


@pytest.mark.parametrize("command", ["smoke", "reject"])
def test_an_error_that_many_cases_have_is_told_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = SmokeConsole(7, quiet=True) if command == "smoke" else RejectConsole(quiet=True)
    errors = [replace(ERROR, id=f"reject/b/rule/{number}", rerun="") for number in range(4)]
    console.start(RUN)
    for result in (*errors, replace(errors[0], id="reject/b/rule/other", reason="no disk"), FAILED, FAILED):
        console.add(result)
    console.finish()
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line for line in lines if line.startswith("    ERROR  reject")] == [
        "    ERROR  reject/b/rule/0",
        "    ERROR  reject/b/rule/other",
    ]
    assert lines.count("    FAILED  prep/a/two") == 2
    words = {"smoke": "ERROR  the same in 3 cases more", "reject": "and 3 cases more that did not pass"}
    assert f"    {words[command]}: see --json or --junit" in lines


def test_a_run_of_recordings_is_told_by_file(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = {"golden/a_short/prefill": "one", "golden/a_short/attention-decode": "two", "golden/b_far/decode": "two"}
    replayed = ("m_p7/default", "m_p7/prefill/chunk1", "m_p7/prefill/chunk5", "turns/m_p7+n_p9")
    results = [replace(PASSED, id=name, entry=entry) for name, entry in recorded.items()]
    results += [replace(PASSED, id=f"e2e/{name}", geometry="m_p7") for name in replayed]
    console = SmokeConsole(len(results), recorded=Path("vectors"))
    console.start(RUN)
    for result in results:
        console.add(result)
    console.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["kernels  built in, sources abababababab", "recorded vectors"]
    shown = [line if line[0] != " " else " ".join(line.split()[1:-4]) for line in lines[3:-1]]
    assert shown == [
        "a_short.npz, 12b-local", "one", "two", "b_far.npz, 12b-local", "two",
        "m_p7.npz", "replayed, default", "replayed, prefill", "m_p7.npz, n_p9.npz", "replayed, in turns",
    ]  # fmt: skip
    assert " of 7 cases from 4 files in " in lines[-1]


def test_words() -> None:
    assert [seconds_text(value) for value in (0.123, 12.34, 125)] == ["0.12 s", "12.3 s", "2 min 5 s"]
    assert [count_text(value, "case") for value in (1, 0, 1200)] == ["1 case", "0 cases", "1,200 cases"]
