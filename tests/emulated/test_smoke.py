"""``g4kv smoke`` end to end on the emulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from seeding import seed
from smoke_helper import chosen

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.entries.table import entries_for
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.run import OF_SOME_BLOCKS

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def _smoke(record: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = g4kv(["smoke", "--device", "emulated", "--json", str(record), *arguments])
    return code, json.loads(record.read_text())


def _digests(record: dict[str, Any]) -> dict[str, str]:
    return {case["id"]: case["output_digest"] for case in record["cases"]}


def _decode_forms(geometry: str) -> list[str]:
    """Forms with one token a request: those with a case of a replayed graph."""
    return [entry.form for entry in entries_for(GEOMETRIES[geometry], "attention") if entry.one_token_each]


@pytest.mark.parametrize("name", ["12b-local", "12b-global"])
def test_both_emulators_agree_on_every_portable_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch runs natively and interpreted; a byte or a count that differs would be an error of its case."""
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    cases = [f"prep/{name}/*/tokens5/*", f"attention/{name}/decode*/kv-len-one", f"attention/{name}/decode*/ragged",
             f"attention/{name}/prefill/*-tile/group/2"]  # fmt: skip
    code, record = _smoke(
        tmp_path / "run.json", "--geometry", name, *(word for case in cases for word in ("--case", case))
    )
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"])
    launched = {kernel for case in record["cases"] for kernel in case["kernels"]}
    assert {kernel.partition("_hd")[0] for kernel in launched} >= {
        "paged_decode", "paged_decode_split", "merge_splits", "batch_prefill_paged"
    }  # fmt: skip


def test_12b_local_is_green_and_only_graphs_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "run.xml"
    code, record = _smoke(tmp_path / "run.json", "--junit", str(junit))
    shown = capsys.readouterr().out
    assert code == 0, shown
    total = len(record["cases"])
    skipped = {case["id"]: case["reason"] for case in record["cases"] if case["status"] == "skipped"}
    assert skipped == {
        f"attention/12b-local/{form}/plan/graph-replay": "CUDA graphs need a CUDA device"
        for form in _decode_forms("12b-local")
    }
    passed = total - len(skipped)
    assert record["summary"] == {"passed": passed, "failed": 0, "error": 0, "skipped": len(skipped), "not_covered": 0}
    assert total >= 200
    assert {case["geometry"] for case in record["cases"]} == {"12b-local"}
    assert record["run"]["device"]["kind"] == "emulated"
    digests = {case["id"]: case["output_digest"] for case in record["cases"] if case["status"] == "passed"}
    assert {len(digest.removesuffix(OF_SOME_BLOCKS)) for digest in digests.values()} == {64}
    of_some = {case for case, digest in digests.items() if digest.endswith(OF_SOME_BLOCKS)}
    assert of_some
    assert all("/past-" in case for case in of_some)
    assert shown.splitlines()[0].startswith("device   emulated sm_90")
    assert f"{passed} passed, 0 failed, 0 error, {len(skipped)} skipped of {total} cases" in shown.splitlines()[-1]
    assert f'tests="{total}"' in junit.read_text()


def test_recorded_vectors_of_another_implementation(tmp_path: Path) -> None:
    code, record = _smoke(tmp_path / "run.json", "--golden", str(GOLDEN))
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"])
    files = {case["id"].split("/")[1] for case in record["cases"]}
    assert files == {path.stem for path in GOLDEN.glob("*.npz")}


@pytest.mark.parametrize("name", ["12b-global", "e2b-global", "31b-global"])
def test_the_global_family(tmp_path: Path, name: str) -> None:
    code, record = _smoke(tmp_path / "run.json", "--geometry", name, "--case", f"prep/{name}/*/closed-form",
                          "--case", f"prep/{name}/*/tokens5/*", "--case", f"prep/{name}/*/rotary*")  # fmt: skip
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) > 0


def test_a_rank_of_several(tmp_path: Path) -> None:
    code, record = _smoke(tmp_path / "run.json", "--geometry", "12b-global", "--tp", "2", "--case", "*/closed-form")
    assert code == 0
    assert {case["geometry"] for case in record["cases"]} == {"12b-global@tp2"}
    assert all("--tp 2" in case["rerun"] for case in record["cases"])


@pytest.mark.parametrize("page_size", ["1", "4", "256"])
def test_another_page_size(tmp_path: Path, page_size: str) -> None:
    code, record = _smoke(tmp_path / "run.json", "--page-size", page_size, "--geometry", "e4b-local", "--jobs", "1",
                          "--case", "*/closed-form", "--case", "*/page-size/*", "--case", "*/padding/*",
                          "--case", "*/page-origin/*", "--case", "trap/*/page-id*")  # fmt: skip
    assert code == 0
    assert f"prep/e4b-local/prefill/page-size/{page_size}" in _digests(record)


def test_workers_give_the_bits_of_one_process(tmp_path: Path) -> None:
    chosen = (
        "--case",
        "prep/12b-local/*/closed-form",
        "--case",
        "prep/12b-local/*/tokens5/*",
        "--case",
        "trap/12b-local/*",
    )
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    first_code, first = _smoke(one, *chosen, "--jobs", "1")
    second_code, second = _smoke(two, *chosen, "--jobs", "2", "--same-bits-as", str(one))
    assert (first_code, second_code) == (0, 0)
    assert list(_digests(first).items()) == list(_digests(second).items())


def test_other_bits_than_the_record_are_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    chosen = ("--jobs", "1", "--case", "prep/12b-local/*/closed-form")
    code, record = _smoke(path, *chosen)
    assert code == 0
    record["cases"][1]["output_digest"] = "00" * 32
    del record["cases"][2]
    path.write_text(json.dumps(record))
    code, again = _smoke(tmp_path / "two.json", *chosen, "--same-bits-as", str(path))
    assert code == 1
    assert [case["status"] for case in again["cases"]] == ["passed", "failed", "failed", "passed"]
    assert "the outputs differ in bits from" in again["cases"][1]["reason"]
    assert "has no output digest of this case" in again["cases"][2]["reason"]
    # The command that shows it again compares again.
    assert again["cases"][1]["rerun"].endswith(f"--same-bits-as {path} --case {again['cases'][1]['id']}")
    assert "2 failed" in capsys.readouterr().out.splitlines()[-1]


def test_bits_of_other_kernels_than_the_records_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    cases = ("attention/12b-local/decode/kv-len-one", "prep/12b-local/contiguous/closed-form")
    chosen = ("--jobs", "1", *(word for case in cases for word in ("--case", case)))
    code, _ = _smoke(path, *chosen, "--variant", "portable")
    assert code == 0
    code, again = _smoke(tmp_path / "two.json", *chosen, "--variant", "sm_90a,portable", "--same-bits-as", str(path))
    assert code == 0
    results = {case["id"]: case for case in again["cases"]}
    assert [results[case]["status"] for case in cases] == ["skipped", "passed"]
    words = "no bits to compare: paged_decode_hopper_hd256_heads8 ran here, paged_decode_hd256_groups4 there"
    assert words in results[cases[0]]["reason"]


def test_rows_that_only_a_gpu_computes_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    case = "attention/12b-local/prefill/small-tile/rows/past-int32"
    chosen = ("--case", "prep/12b-local/contiguous/closed-form", "--case", case)
    code, record = _smoke(path, *chosen)
    assert code == 0
    same, again = _smoke(tmp_path / "two.json", *chosen, "--same-bits-as", str(path))
    assert (same, again["cases"][1]["status"]) == (0, "passed")
    record["cases"][1]["output_digest"] = "0" * 64  # a GPU's, of all rows
    path.write_text(json.dumps(record))
    code, compared = _smoke(tmp_path / "three.json", *chosen, "--same-bits-as", str(path))
    assert (code, compared["cases"][1]["status"]) == (0, "skipped")
    assert "no bits to compare: of so many rows the emulated device runs" in compared["cases"][1]["reason"]


def test_a_record_of_none_of_the_cases_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    _smoke(path, "--case", "prep/12b-local/contiguous/closed-form")
    other = ("--case", "prep/31b-local/contiguous/closed-form", "--same-bits-as", str(path))
    assert g4kv(["smoke", "--device", "emulated", *other]) == 2
    assert f"--same-bits-as {path}: it has outputs of none of these cases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "run", "words"),
    [
        (("--page-size", "64"), (), "made with --page-size 64; run it with --page-size 64"),
        ((), ("--page-size", "64"), "made without --page-size; run it without --page-size"),
        (("--page-size", "1"), ("--page-size", "64"), "made with --page-size 1; run it with --page-size 1"),
        (("--seed", "2"), (), "made with --seed 2; run with that seed"),
        (("--page-size", "64"), ("--page-size", "64"), ""),
    ],
)
def test_a_record_of_other_inputs_cannot_be_compared(
    made: tuple[str, ...], run: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bits differ, and no kernel is wrong."""
    path = tmp_path / "one.json"
    chosen = ("--jobs", "1", "--case", "prep/12b-local/prefill/closed-form")
    assert _smoke(path, *chosen, *made)[0] == 0
    capsys.readouterr()
    code = g4kv(["smoke", "--device", "emulated", *chosen, *run, "--same-bits-as", str(path)])
    shown = capsys.readouterr()
    if words:
        assert (code, shown.out, shown.err) == (2, "", f"g4kv: error: --same-bits-as {path}: {words}\n")
    else:
        assert (code, shown.err) == (0, "")


def test_a_record_of_other_sources_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    chosen = ("--jobs", "1", "--case", "prep/12b-local/contiguous/closed-form")
    _smoke(path, *chosen)
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    source = BUILT_IN_KERNELS_DIRECTORY / "bf16.cuh"
    (kernels / source.name).write_text(f"{source.read_text()}// another digest\n")
    target = tmp_path / "two.json"
    for words, more in (
        ("other kernel sources", ("--kernels", str(kernels))),
        ("made with --seed 1", ("--seed", "2")),
    ):
        code = g4kv(
            [
                "smoke",
                "--device",
                "emulated",
                *chosen,
                *more,
                "--same-bits-as",
                str(path),
                "--json",
                str(target),
            ]
        )
        assert code == 2
        assert words in capsys.readouterr().err
    assert not target.exists()


def test_a_faulted_case_costs_only_itself(tmp_path: Path) -> None:
    """The device is replaced after a fault: the cases behind a trap, and behind a wild store, run as if alone."""
    text = "return (long long)page * layout.page_stride"
    edits = (("kv_offsets.cuh", text, "return (page == 7 ? -999 : page) * layout.page_stride"),)
    cases = [
        f"prep/12b-local/{name}" for name in ("contiguous/closed-form", "prefill/closed-form", "prefill/start/zero")
    ]
    kernels = seed(tmp_path / "kernels", edits, cases)
    code, record = _smoke(tmp_path / "run.json", "--jobs", "1", "--kernels", str(kernels), *chosen(cases))
    assert code == 1
    assert [case["status"] for case in record["cases"]] == ["passed", "failed", "passed"]
    assert "global_out_of_bounds" in record["cases"][1]["reason"]
    assert "kv_offsets.cuh" in record["cases"][1]["reason"] or "prep_body.cuh" in record["cases"][1]["reason"]


def test_rerun_command_runs_just_that_case(tmp_path: Path) -> None:
    wanted = "prep/12b-local/prefill/random/seed9/tokens1/page16"
    _, record = _smoke(tmp_path / "run.json", "--seed", "9", "--case", wanted)
    words = record["cases"][0]["rerun"].split()
    assert words[:2] == ["g4kv", "smoke"]
    code = g4kv([*words[1:], "--json", str(tmp_path / "again.json"), "--same-bits-as", str(tmp_path / "run.json")])
    assert code == 0
    assert [case["id"] for case in json.loads((tmp_path / "again.json").read_text())["cases"]] == [wanted]
