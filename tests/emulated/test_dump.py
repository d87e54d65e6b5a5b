"""``--dump DIR``: what a failing case had and what came out, whole files or none, enough to look at it elsewhere."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from seeding import seed

import g4kv_cli
from g4kv_cli.cases import dump as cases_dump
from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.errors import UsageError
from g4kv_cli.main import run as g4kv
from g4kv_cli.records import files
from g4kv_cli.records.dump import dump_bytes, load_dump
from g4kv_cli.records.run import CaseResult, Status

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "dump.md"
LINE = ("--shape", "kv=70 window=40 heads=6/2 splits=4")
NEEDLES = "attention/hd256-q6-kv2-w40/decode/kv70-splits4/needles"
EMULATED = ("smoke", "--device", "emulated", "--jobs", "1")
DECODE = ("batch_decode_paged_window_hd256_into",)


@pytest.fixture
def longer_window(tmp_path: Path) -> tuple[str, str]:
    """Kernels that see a key too many."""
    right = "max(0, position - tile.window_left)"
    edits = (("attention_tile.cuh", right, right.replace("left)", "left - 1)")),)
    kernels = seed(tmp_path / "kernels", edits, entries=DECODE)
    return "--kernels", str(kernels)


def test_a_failing_case_is_written_whole(
    tmp_path: Path, longer_window: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    where, record = tmp_path / "failures", tmp_path / "run.json"
    code = g4kv([*EMULATED, *LINE, *longer_window, "--seed", "5", "--dump", str(where), "--json", str(record),
                 "--case", NEEDLES, "--case", "prep/*"])  # fmt: skip
    assert code == 1
    (path,) = where.iterdir()  # prep has passed
    assert path.name == NEEDLES.replace("/", "__") + ".npz"
    assert f"dumped {path}" in capsys.readouterr().out
    cases = json.loads(record.read_text())["cases"]
    assert [case["dump"] for case in cases if "dump" in case] == [str(path)]
    dump = g4kv_cli.load_dump(path)
    about = dump.about
    assert (about["case"], about["status"], about["seed"]) == (NEEDLES, "failed", 5)
    assert (about["geometry"]["num_qo_heads"], about["geometry"]["window"]) == (6, 40)
    assert about["parameters"]["requests"][0]["kv_len"] == 70
    assert about["run"]["device"]["kind"] == "emulated"
    assert about["run"]["kernels_digest"] == json.loads(record.read_text())["run"]["kernels_digest"]
    assert about["kernels"] == ["paged_decode_hd256_groups4"]
    assert f"--case {NEEDLES}" in about["rerun"]
    # The mismatch that the screen shows is in the arrays.
    got, want, limit = (dump[f"{kind}.out"] for kind in ("got", "want", "limit"))
    wrong = np.abs(got.astype(np.float64) - want) > limit
    assert np.count_nonzero(wrong) == about["mismatches"][0]["count"] > 0
    assert dump["device.out"].tobytes() == got.tobytes()
    # And the inputs are enough to have it again: attention of the logical rows is what was wanted.
    q, k, v = dump["input.q"], dump["input.k[0]"], dump["input.v[0]"]
    assert q.dtype == ml_dtypes.bfloat16
    again = g4kv_cli.attend(q, k, v, first_key=int(dump["input.first_keys"][0]), window=40)
    assert np.allclose(again.value, want)
    # With one key more it is what came out; metadata says where the keys lie in the pool.
    assert dump["device.plan.kv_lens"].tolist() == [70]
    row = about["parameters"]["requests"][0]
    pool = dump["device.pool"].reshape(about["parameters"]["num_pages"], 2, 2, 16, 2, 256)
    last = pool[row["pages"][-1], about["parameters"]["layer"], 0, 69 % 16]
    assert last.tobytes() == k[-1].tobytes()
    assert dump["device.plan.page_indices"].tolist() == row["pages"]


def test_the_guides_loader(tmp_path: Path, longer_window: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ("--geometry", "e2b-local", "--case", "attention/e2b-local/decode/needle/window40", *longer_window)
    assert g4kv([*EMULATED, *chosen, "--dump", "failures"]) == 1
    text = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert text is not None
    assert len([line for line in text[1].splitlines() if line]) == 5
    scope: dict[str, Any] = {}
    name = "attention__e2b-local__decode__needle__window40"
    exec(text[1].replace("attention__12b-local__decode__ragged", name), scope)
    dump = load_dump(Path("failures") / f"{name}.npz")
    assert scope["about"] == dump.about
    assert {key: value.tobytes() for key, value in scope["arrays"].items() if key != "about"} == {
        key: value.tobytes() for key, value in dump.arrays.items()
    }
    assert scope["arrays"]["input.q"].dtype == dump["input.q"].dtype == ml_dtypes.bfloat16


def test_all_cases_of_every_kind(tmp_path: Path) -> None:
    where = tmp_path / "all"
    ids = ("prep/e2b-local/prefill/serving/untouched", "prep/e2b-local/decode/closed-form",
           "attention/e2b-local/decode-split/ragged", "attention/e2b-local/decode/companions",
           "trap/e2b-local/decode/page-id-negative", "serve/e2b-local/interleaved")  # fmt: skip
    cases = [word for one in ids for word in ("--case", one)]
    assert g4kv([*EMULATED, "--geometry", "e2b-local", *cases, "--dump", str(where), "--dump-all"]) == 0
    dumps = {dump.about["case"]: dump for dump in map(load_dump, where.iterdir())}
    assert set(dumps) == set(ids)
    assert {dump.about["status"] for dump in dumps.values()} == {"passed"}
    prep = dumps[ids[0]]
    assert {"got.K_in_the_pool", "want.V_in_the_pool", "limit.q_out", "input.q_norm_weight", "input.cos"} <= set(
        prep.arrays
    )
    assert "got.q_out_against_the_contiguous_form" in prep.arrays
    assert "limit.q_out_against_the_contiguous_form" not in prep.arrays
    assert {"device.plan.token_requests", "device.partial_max", "got.lse"} <= set(dumps[ids[2]].arrays)
    assert "got.out_of_request_0_alone" in dumps[ids[3]].arrays
    assert dumps[ids[4]].arrays["device.page_indices"].min() == -1  # what the kernel trapped on
    assert any(name.startswith("got.step_") for name in dumps[ids[5]].arrays)


def test_a_fault_leaves_what_was_given(tmp_path: Path) -> None:
    old = "kv_row_offset(p.layout, page, p.layer, false, slot, tile.kv_head)"
    seed(tmp_path, (("attention_tile.cuh", old, old.replace("page,", "page + 1000000,")),), entries=DECODE)
    code = g4kv([*EMULATED, *LINE, "--kernels", str(tmp_path), "--dump", str(tmp_path / "d"), "--case", NEEDLES])
    assert code == 1
    (path,) = (tmp_path / "d").iterdir()
    dump = load_dump(path)
    assert "global_out_of_bounds" in dump.about["reason"]
    assert {"input.q", "input.k[0]", "device.plan.page_indices"} <= set(dump.arrays)
    assert "got.out" not in dump.arrays


def test_a_contradiction_that_was_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from g4kv_cli.cases.reject.run import RejectRunner

    monkeypatch.setattr(RejectRunner, "refuse", lambda _self, _case, bench: bench.draft() and ["was accepted"])
    case = "reject/batch_decode_paged_hd512_into/sm_scale/zero"
    code = g4kv(["reject", "--device", "emulated", "--case", "reject/batch_decode_paged_hd512_into/sm_scale/*",
                 "--dump", str(tmp_path / "d")])  # fmt: skip
    assert code == 1
    dumps = [load_dump(path) for path in (tmp_path / "d").iterdir()]
    assert {dump.about["case"].rpartition("/")[0] for dump in dumps} == {case.rpartition("/")[0]}
    assert {"device.q", "device.pool", "device.lse"} <= set(dumps[0].arrays)


def test_a_directory_with_other_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "more.txt").write_text("mine")
    assert g4kv([*EMULATED, *LINE, "--dump", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert f"--dump {tmp_path}: the directory holds mine.txt and 1 more; name a new or an empty one" in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.txt", "more.txt"]
    assert g4kv([*EMULATED, *LINE, "--dump", str(tmp_path / "mine.txt" / "d")]) == 2
    assert "cannot write: Not a directory" in capsys.readouterr().err
    assert g4kv([*EMULATED, *LINE, "--dump", str(tmp_path / "missing" / "d")]) == 2
    assert "cannot write: No such file or directory; name one in a directory that exists" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()
    assert g4kv([*EMULATED, *LINE, "--dump-all"]) == 2
    assert "--dump-all needs a directory: give --dump DIR too" in capsys.readouterr().err


def test_nothing_to_dump_leaves_no_directory(tmp_path: Path) -> None:
    assert g4kv([*EMULATED, *LINE, "--case", NEEDLES, "--dump", str(tmp_path / "d")]) == 0
    assert not (tmp_path / "d").exists()


def test_a_full_disk_costs_the_dump_and_not_the_run(
    tmp_path: Path, longer_window: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, replace = tmp_path / "d", os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".npz"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", full)
    record = tmp_path / "run.json"
    code = g4kv([*EMULATED, *LINE, *longer_window, "--dump", str(where), "--json", str(record),
                 "--case", "*/decode/*/needles", "--case", "*/small-tile/needles"])  # fmt: skip
    shown = capsys.readouterr()
    assert code == 2
    assert "No space left on device; free some space there, or name a file elsewhere (and 1 more cases)" in shown.err
    assert shown.err.count("\n") == 1
    assert "2 failed" in shown.out.splitlines()[-1]
    assert [case["status"] for case in json.loads(record.read_text())["cases"]] == ["failed", "failed"]
    assert not where.exists()  # nothing half-written, and so nothing


def test_large_arrays_are_left_out_and_named(
    tmp_path: Path, longer_window: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases_dump, "MAX_ARRAY_BYTES", 30_000)
    assert g4kv([*EMULATED, *LINE, *longer_window, "--case", NEEDLES, "--dump", str(tmp_path / "d")]) == 1
    dump = load_dump(next((tmp_path / "d").iterdir()))
    assert "device.pool" not in dump.arrays
    assert set(dump.about["left_out"]) >= {"device.pool", "input.k[0]"}
    assert dump.about["left_out"]["device.pool"].endswith(" bytes")


def test_long_runs_keep_their_last_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_dump, "MAX_BYTES", 100)
    dump = cases_dump.CaseDump()
    for value in range(5):
        dump.given("x", np.full(10, value, np.int32))
    assert [name for name in dump.arrays] == ["input.x.4", "input.x.5"]  # noqa: C416 in this order
    assert dump.left_out == {"earlier": "3 arrays"}


@pytest.mark.parametrize("case_id", ["attention/a/b", "attention/" + "p" * 300, "attention/" + "p" * 299 + "q"])
def test_names_of_files(tmp_path: Path, case_id: str) -> None:
    stem = cases_dump._file_stem(case_id)
    assert "/" not in stem
    (tmp_path / f".{stem}.npz.12345678.tmp").write_text("fits")
    assert (stem == "attention__a__b") == (len(case_id) < 20)


def test_two_long_names_differ() -> None:
    assert cases_dump._file_stem("a/" + "p" * 300) != cases_dump._file_stem("a/" + "p" * 299 + "q")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; name an .npz file that g4kv smoke --dump wrote"),
        (b"text", "is no .npz file"),
        (dump_bytes({"format": 2}, {}), "format 2, this g4kv reads 1"),
    ],
)
def test_files_that_are_no_dump(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "x.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load_dump(path)
    np.savez(tmp_path / "other.npz", q=np.zeros(3))
    with pytest.raises(UsageError, match="it lacks 'about'"):
        load_dump(tmp_path / "other.npz")


@pytest.mark.parametrize("every", [False, True])
def test_which_cases_are_written(every: bool) -> None:
    settings = DumpSettings(Path("d"), every)
    wanted = [status for status in get_args(Status) if settings.wants(CaseResult("a", "e", "g", status, 0.0))]
    assert wanted == [*(["passed"] if every else []), "failed", "error"]
