"""``g4kv merge``: parts of a run are one record again, or it is said why not."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli.main import run as g4kv

SMOKE = ("smoke", "--device", "emulated", "--case", "prep/12b-local/*/closed-form*", "-q")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole.json, and its three parts."""
    folder = tmp_path_factory.mktemp("parts")
    assert g4kv([*SMOKE, "--json", str(folder / "whole.json")]) == 0
    for index in (1, 2, 3):
        assert g4kv([*SMOKE, "--shard", f"{index}/3", "--json", str(folder / f"{index}.json")]) == 0
    return folder


@pytest.fixture
def parts(records: Path, tmp_path: Path) -> list[Path]:
    """Copies of the parts."""
    for index in (1, 2, 3):
        (tmp_path / f"{index}.json").write_bytes((records / f"{index}.json").read_bytes())
    return [tmp_path / f"{index}.json" for index in (1, 2, 3)]


def _merge(parts: list[Path], *more: str) -> int:
    return g4kv(["merge", *map(str, parts), *more])


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_parts_in_any_order_are_the_whole_run(records: Path, parts: list[Path], tmp_path: Path) -> None:
    out, xml = tmp_path / "out.json", tmp_path / "out.xml"
    assert _merge(list(reversed(parts)), "--json", str(out), "--junit", str(xml)) == 0
    whole, merged = json.loads((records / "whole.json").read_text()), json.loads(out.read_text())
    for record in (whole, merged):
        del record["run"]["date"]
        for case in record["cases"]:
            del case["seconds"]
    assert len(whole["cases"]) >= 4
    assert merged == whole
    root = ElementTree.parse(xml).getroot()
    assert (root.get("tests"), root.get("errors")) == (str(len(whole["cases"])), "0")


def test_a_merged_record_compares_as_any_other(parts: list[Path], tmp_path: Path) -> None:
    assert _merge(parts, "--json", str(tmp_path / "out.json"), "-q") == 0
    assert g4kv([*SMOKE, "--same-bits-as", str(tmp_path / "out.json")]) == 0


def test_a_missing_part_is_a_finding_and_the_files_say_so(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, xml = tmp_path / "out.json", tmp_path / "out.xml"
    assert _merge([parts[0], parts[2]], "--json", str(out), "--junit", str(xml)) == 1
    total = json.loads(parts[0].read_text())["shard"]["total"]
    left = len(json.loads(parts[1].read_text())["cases"])
    line = f"part 2 of 3 is missing, and {left} of {total} cases with it"
    assert capsys.readouterr().err == f"g4kv: error: {line}\n"
    merged = json.loads(out.read_text())
    assert (merged["planned"], len(merged["cases"]), merged["ended"]) == (total, total - left, f"ended early: {line}")
    error = ElementTree.parse(xml).getroot().find(".//testcase[@name='the whole run']/error")
    assert error is not None
    assert line in str(error.get("message"))


def test_a_part_that_lacks_a_case_is_a_finding_whatever_it_says_of_its_end(
    parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _change(parts[1], lambda record: record["cases"].pop())
    assert _merge(parts, "-q") == 1
    planned = json.loads(parts[1].read_text())["planned"]
    assert f"part 2 of 3 has {planned - 1} of its {planned} cases: finished" in capsys.readouterr().err


def test_a_case_that_two_parts_have_is_refused(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    theirs = json.loads(parts[0].read_text())["shard"]["places"][0]
    _change(parts[1], lambda record: record["shard"]["places"].__setitem__(0, theirs))
    assert _merge(parts) == 2
    assert f"{parts[1]}: case prep/12b-local/" in (told := capsys.readouterr().err)
    assert "is in another part too; run all parts with one g4kv" in told


def test_the_date_is_that_of_the_first_part_that_began(parts: list[Path], tmp_path: Path) -> None:
    _change(parts[1], lambda record: record["run"].update(date="2001-02-03T04:05:06+00:00"))
    assert _merge(parts, "-q", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text())["run"]["date"] == "2001-02-03T04:05:06+00:00"


def test_a_part_that_was_killed_is_a_finding(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(record: dict[str, Any]) -> None:
        record["cases"].pop()
        record["ended"] = "still running, or killed"

    _change(parts[1], kill)
    out = tmp_path / "out.json"
    assert _merge(parts, "-q", "--json", str(out)) == 1
    planned = json.loads(parts[1].read_text())["planned"]
    said = f"part 2 of 3 has {planned - 1} of its {planned} cases: still running, or killed"
    assert capsys.readouterr().err == f"g4kv: error: {parts[1]}: {said}\n"
    assert json.loads(out.read_text())["ended"] == f"ended early: {said}"


def test_a_failure_in_a_part_is_the_whole_runs(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    _change(parts[2], lambda record: record["cases"][0].update(status="failed", reason="it was wrong"))
    assert _merge(parts) == 1
    assert "it was wrong" in capsys.readouterr().out


def test_parts_of_reject_are_shown_as_reject_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"{index}.json") for index in (1, 2)]
    for index, name in enumerate(names, start=1):
        case = ("--case", "reject/*/gqa_group/*")
        assert g4kv(["reject", "--device", "emulated", *case, "--shard", f"{index}/2", "--json", name]) == 0
    capsys.readouterr()
    assert g4kv(["merge", *names]) == 0
    assert "host rejections, 0 traps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda record: record["run"].update(kernels_digest="ef" * 32), "kernels digest efefefefefef and "),
        (lambda record: record["run"]["device"].update(arch="sm_80"), "device emulated sm_90 (H200 limits) sm_80 and "),
        (lambda record: record["run"].update(seed=5), "seed 5 and 1"),
        (lambda record: record["run"]["versions"].update(numpy="1.0"), "versions g4kv "),
        (lambda record: record["run"]["device"].update(driver="580.1"), "driver 580.1 and none"),
        (lambda record: record["run"].update(nvrtc="12.0"), "NVRTC 12.0 and "),
        (lambda record: record["run"].update(git_commit="0123"), "commit 0123 and "),
        (lambda record: record["run"].update(declared=["lse = log2"]), "declared lse = log2 and none"),
        (lambda record: record["run"].update(waivers=["a race"]), "waivers a race and none"),
        (lambda record: record["shard"].update(count=4), "number of parts 4 and 3"),
        (lambda record: record["run"].update(provider="theirs"), "provider theirs and none"),
        (lambda record: record["settings"].update(page_size=32), "settings page_size 32 and page_size None"),
        (lambda record: record["shard"].update(table="00" * 32), "table of cases 000000000000, "),
        (lambda record: record.update(command="reject"), "command reject and smoke"),
        (lambda record: record["shard"].update(index=1), "are both part 1 of 3: give one of them"),
        (lambda record: record["shard"].update(index=4), "contradicts itself"),
        (lambda record: record["shard"]["places"].pop(), "contradicts itself"),
        (lambda record: record["shard"]["places"].__setitem__(0, record["shard"]["places"][1]), "contradicts itself"),
        (lambda record: record["shard"].update(places=["x"]), "shard.places[0] must be an integer"),
        (lambda record: record.pop("shard"), "is a whole run, not a part of one: merge records made with --shard I/N"),
        (lambda record: record["cases"][0].update(status="fine"), "cases[0].status must be one of passed, "),
    ],
)
def test_what_is_no_part_of_the_run_is_refused_in_one_line(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, says: str
) -> None:
    _change(parts[1], change)
    assert _merge(parts, "--json", str(tmp_path / "out.json")) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert str(parts[1]) in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_wrong_files(parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(parts[0].read_text()[:400])
    for files, more, says in (
        ([tmp_path / "none.json"], (), "cannot read: No such file"),
        ([cut], (), "not JSON"),
        ([parts[0], parts[0]], (), "is given twice"),
        ([], (), "RECORD.json"),
        (parts, ("--json", str(parts[0])), "is one of the records"),
        (parts, ("--json", str(tmp_path / "a"), "--junit", str(tmp_path / "a")), "--json and --junit both name"),
    ):
        assert _merge(files, *more) == 2
        assert says in capsys.readouterr().err


def test_a_shard_that_is_none(run_g4kv) -> None:
    for command in ("smoke", "reject"):
        done = run_g4kv(command, "--shard", "5/4")
        assert (done.returncode, done.stdout) == (2, "")
        assert "there is no part 5 of 4" in done.stderr
