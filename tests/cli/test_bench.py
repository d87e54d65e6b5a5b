"""``g4kv bench`` without a GPU: what works, what says in one line that it does not, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from g4kv_cli import main
from g4kv_cli.commands.bench import bench
from g4kv_cli.device.cuda_driver import count_gpus
from g4kv_cli.errors import DeviceUnavailable

pytestmark = pytest.mark.usefixtures("forms_a_b_c")

DATA = Path(__file__).resolve().parents[1] / "data" / "bench"
RECORDS = DATA.parents[2] / "results" / "nvidia-h200" / "2026-11-29-fea666b"
SAMPLE, LATER = str(DATA / "sample.json"), str(DATA / "later.json")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, standalone_mode=False, catch_exceptions=False)


def _has_gpu() -> bool:
    try:
        return count_gpus() > 0
    except DeviceUnavailable:
        return False


@pytest.mark.skipif(_has_gpu(), reason="this machine has a GPU, so bench would run")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_without_a_gpu_it_says_so_in_one_line(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "--device", device]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("g4kv: error: g4kv bench times kernels, and timing needs a CUDA GPU: ")
    assert shown.err.endswith("; without one there are --dry-run, --compare and --from RECORD.json\n")
    assert shown.err.count("\n") == 1


def test_the_emulated_device_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "--device", "emulated"]) == 2
    assert "timing needs a CUDA GPU: chosen with --device emulated; " in capsys.readouterr().err


def test_dry_run_shows_cells_with_bytes_flops_and_floors() -> None:
    result = invoke("--dry-run", "--geometry", "12b-local", "--batch", "32", "--kv-len", "1024", "--peer", "torch")
    assert result.return_value == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    # 269 MB: 32 x 1024 keys x 8 heads x 256 x 2 bytes x (K, V), and Q and the output; 57.23 us at 4.70 TB/s.
    assert lines[-2] == [
        "decode/12b-local/batch32/kv1024", "269", "MB", "536.9", "MFLOP", "57.23", "us", "read",
        "a", "b", "c2", "peer:torch-sdpa", "peer:torch-bmm",
    ]  # fmt: skip
    assert result.stdout.splitlines()[-1].strip() == "1 shape, 5 cells"


def test_dry_run_of_everything() -> None:
    result = invoke("all", "--dry-run", "--geometry", "all", "--preset", "full")
    assert result.return_value == 0
    for words in ("prep/e2b-global/", "prefill/31b-global/chunk8192/history32768", "decode/26b-a4b-local/batch256/kv"):
        assert words in result.stdout


def test_compare_exits_1_on_a_regression_and_0_without() -> None:
    assert invoke("--compare", SAMPLE, SAMPLE).return_value == 0
    slower = invoke("--compare", SAMPLE, LATER)
    assert slower.return_value == 1
    summary = "29 cells: 1 slower, 1 broken, 1 faster, 22 same, 1 undecided, 1 only in A, 2 no time (threshold 5 %)"
    assert slower.stdout.splitlines()[-1] == summary


@pytest.mark.parametrize("threshold", ["12%", "0.12"])
def test_the_threshold_is_a_share_or_a_percentage(threshold: str) -> None:
    result = invoke("--compare", SAMPLE, LATER, "--threshold", threshold)
    assert " slower" not in result.stdout.splitlines()[-1]
    assert result.stdout.splitlines()[-1].endswith("(threshold 12 %)")
    # A kernel that became wrong is a regression at any threshold.
    assert result.return_value == 1


def test_a_record_is_reported_again_with_its_exit_code(tmp_path: Path) -> None:
    html, dispatch, plots = tmp_path / "page.html", tmp_path / "dispatch.json", tmp_path / "plots"
    result = invoke("--from", SAMPLE, "--html", str(html), "--dispatch", str(dispatch), "--plots", str(plots))
    # The sample has a kernel that was wrong.
    assert result.return_value == 1
    assert "12b-local: which decode form" in result.stdout
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(dispatch.read_text(encoding="utf-8"))["gpu"] == "NVIDIA H200"
    assert sorted(path.name for path in plots.iterdir()) == [
        "12b-local-time.png",
        "12b-local-winners.png",
        "roofline.png",
    ]


def test_a_record_that_alternated_with_other_kernels_is_held_against_them_again() -> None:
    """Recorded on an H200: decode kernels that wait for 3 us first, 8 % of the unsplit forms' time."""
    record = str(RECORDS / "bench_slowed.json")
    result = invoke("--from", record)
    assert result.return_value == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["A", "built-in", "(baseline)"] in lines
    changes = {line[0].rsplit("/", 1)[1]: line[5:8] for line in lines if line and line[0].startswith("decode/")}
    assert changes["a"] == ["+8.0", "%", "slower"]
    assert changes["b"] == ["+8.1", "%", "slower"]
    assert lines[-1] == ["5", "cells:", "5", "slower", "(threshold", "5", "%)"]
    # 8 % is none of a regression where 30 % are allowed.
    assert invoke("--from", record, "--threshold", "30%").return_value == 0


def test_quiet_leaves_the_verdict() -> None:
    result = invoke("--from", SAMPLE, "--quiet")
    assert "which decode form" in result.stdout
    assert "x floor" not in result.stdout


@pytest.mark.parametrize("ended", ["interrupted", "still running, or killed"])
def test_a_record_whose_run_did_not_end_is_shown_and_exits_2(
    ended: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only an interrupt of this process is 130."""
    values = json.loads(Path(SAMPLE).read_text(encoding="utf-8"))
    for item in values["measurements"]:
        if item["status"] == "wrong":
            item |= {"status": "missing", "reason": "the run ended before it"}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(values | {"ended": ended}), encoding="utf-8")
    assert main.run(["bench", "--from", str(path), "--quiet"]) == 2
    shown = capsys.readouterr()
    assert "which decode form" in shown.out
    assert shown.err.startswith(f"g4kv: error: --from {path}: the run did not get to its end ({ended}); ")
    assert shown.err.count("\n") == 1
    path.write_text(json.dumps(values | {"ended": "the device faulted: a trap"}), encoding="utf-8")
    assert main.run(["bench", "--from", str(path), "--quiet"]) == 1


def test_a_page_without_matplotlib_has_no_plots_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = tmp_path / "page.html"
    assert main.run(["bench", "--from", SAMPLE, "--html", str(html)]) == 1
    shown = capsys.readouterr()
    assert f"page     {html}, without plots: plots need matplotlib; install it with: python -m pip" in shown.out
    assert shown.err == ""
    text = html.read_text(encoding="utf-8")
    assert "matplotlib is not installed, so it has no plots" in text
    assert "<svg" not in text
    assert "All measurements" in text
    # A directory of plots without plots would be nothing: refused before the first table.
    assert main.run(["bench", "--from", SAMPLE, "--plots", str(tmp_path / "plots")]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert "plots need matplotlib; install it with: " in refused.err


def test_peers_are_listed_with_how_to_get_them() -> None:
    result = invoke("--list-peers")
    assert result.return_value == 0
    for name in ("torch-sdpa", "flashinfer-tc", "flash-attn-3", "vllm-triton"):
        assert name in result.stdout


def test_launches_that_overlap_are_held_against_their_like_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlapping = tmp_path / "pdl.json"
    record = json.loads(Path(SAMPLE).read_text(encoding="utf-8"))
    record["settings"]["enable_pdl"] = True
    overlapping.write_text(json.dumps(record), encoding="utf-8")
    assert main.run(["bench", "--compare", str(overlapping), str(overlapping)]) == 0
    capsys.readouterr()
    assert main.run(["bench", "--compare", SAMPLE, str(overlapping)]) == 2
    assert "launches overlap in one of them alone (--pdl); compare like runs" in capsys.readouterr().err
    for baseline, words in ((SAMPLE, ["--pdl"]), (str(overlapping), [])):
        assert main.run(["bench", "--dry-run", "--baseline", baseline, *words]) == 2
        told = capsys.readouterr().err
        assert f"--baseline {baseline}: launches overlap in one run alone (--pdl); compare like runs" in told
    assert main.run(["bench", "--dry-run", "--baseline", str(overlapping), "--pdl", "--preset", "quick"]) == 0
    capsys.readouterr()
    table = tmp_path / "table.json"
    assert main.run(["bench", "--from", str(overlapping), "--dispatch", str(table)]) == 2
    assert "its launches overlap (--pdl); --dispatch takes a record of those that do not" in capsys.readouterr().err
    assert not table.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "cudnnx"], "--peer cudnnx: unknown; there are: all, none, torch-sdpa"),
        (["prep", "--batch", "3", "--dry-run"], "--batch, --kv-len and --splits go with g4kv bench decode alone"),
        (["prefill", "--pdl", "--dry-run"], "--pdl goes with g4kv bench decode alone"),
        (["--pdl", "--dispatch", "table.json"], "--pdl does not apply to --dispatch"),
        (["--pdl", "--variant", "portable"], "--pdl does not apply to --variant portable"),
        (["--threshold", "much"], "'much' is no share between 0 and 100 %; write 5% or 0.05"),
        (["--threshold", "0"], "'0' is no share"),
        (["--batch", "1,x"], "'1,x' is no list of counts from 1 to 2147483647; write 1,16,64"),
        (["--splits", "0"], "'0' is no list of counts from 1 to 65535"),
        (["--splits", "4,65536", "--dry-run"], "'4,65536' is no list of counts from 1 to 65535"),
        (["--batch", str(2**31)], f"'{2**31}' is no list of counts"),
        (
            ["--kv-len", "999999", "--dry-run"],
            "--kv-len 999999 is past the 262144 positions of 12b-local",
        ),
        (["--compare", SAMPLE], "'--compare' requires 2 arguments; see g4kv bench --help"),
        (["--compare", SAMPLE, "nowhere.json"], "--compare nowhere.json: cannot read"),
        (["--from", str(DATA / "tables.txt")], "not JSON"),
        (["--baseline", "nowhere"], "--baseline nowhere: neither a directory of kernels nor a record"),
        (["--dry-run", "--baseline", str(DATA / "tables.txt")], "not JSON"),
        (["--from", SAMPLE, "--html", "/nowhere/page.html"], "--html /nowhere/page.html: cannot write"),
        (["--geometry", "13b-local", "--dry-run"], "unknown geometry '13b-local'"),
    ],
)
def test_wrong_requests_end_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_help_imports_no_torch_and_no_matplotlib() -> None:
    script = (
        "import sys; from g4kv_cli import main; code = main.run(['bench', '--list-peers']); "
        "bad = {'torch', 'matplotlib', 'flashinfer', 'cuda.bench'} & set(sys.modules); "
        "sys.exit(f'{code} {bad}' if bad else code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run", "--html", "x.html"], "--html does not apply to --dry-run"),
        (["--dry-run", "--json", "x.json"], "--json does not apply to --dry-run"),
        (["--compare", SAMPLE, LATER, "--dispatch", "x.json"], "--dispatch does not apply to --compare"),
        (["--compare", SAMPLE, LATER, "--from", SAMPLE], "--from does not apply to --compare"),
        (["--from", SAMPLE, "--geometry", "12b-local"], "--geometry does not apply to --from"),
        (["--list-peers", "--peer", "torch"], "--peer does not apply to --list-peers"),
        (["--dry-run", "--baseline", "/nowhere"], "--baseline /nowhere: neither a directory of kernels nor a record"),
        (["--round-ms", "nan"], "nan is no time"),
        (["--bursts", "3"], "--bursts: these cells have no bursts; give the rest before each too (--rest 0.2)"),
        (["prep", "--bursts", "3"], "--bursts: these cells have no bursts"),
        (["prefill", "--rest", "0", "--bursts", "3"], "--bursts: these cells have no bursts"),
        (["--shape", "kv=9 q=1", "--rest", "0", "--bursts", "3"], "--bursts: these cells have no bursts"),
        (["--shape", "kv=9 q=1", "--bursts", "3"], "--bursts: these cells have no bursts"),
        (["--shape", "kv=9 q=4", "--rest", "0", "--bursts", "3"], "--bursts: these cells have no bursts"),
    ],
)
def test_what_would_not_be_heeded_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not Path("x.html").exists()


@pytest.mark.parametrize("option", ["--json", "--html", "--dispatch", "--plots"])
def test_a_place_that_is_not_there_is_told_before_a_device_is_opened(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "missing" / "it"
    assert main.run(["bench", "--device", "cuda:0", option, str(place)]) == 2
    shown = capsys.readouterr()
    words = "cannot write: No such file or directory; name one in a directory that exists"
    assert f"{option} {place}: {words}" in shown.err
    assert (shown.out, shown.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


def test_a_count_given_twice_counts_once() -> None:
    once = invoke("--dry-run", "--batch", "4", "--kv-len", "128", "--splits", "2")
    twice = invoke("--dry-run", "--batch", "4,4", "--kv-len", "128,128", "--splits", "2,2")
    assert twice.stdout == once.stdout


def test_records_that_share_no_time_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(Path(SAMPLE).read_text(encoding="utf-8"))
    values["measurements"] = []
    (tmp_path / "empty.json").write_text(json.dumps(values), encoding="utf-8")
    assert main.run(["bench", "--compare", SAMPLE, str(tmp_path / "empty.json")]) == 2
    assert "no cell has a time in both" in capsys.readouterr().err


def test_half_a_run_that_is_not_slower_is_no_success(tmp_path: Path) -> None:
    values = json.loads(Path(SAMPLE).read_text(encoding="utf-8"))
    values["ended"] = "interrupted"
    for item in values["measurements"][3:]:
        item.update(status="missing", reason="the run ended before it", graph=None, cold=None, warm_seconds=None,
                    burst=None, burst_calls=0)  # fmt: skip
    (tmp_path / "half.json").write_text(json.dumps(values), encoding="utf-8")
    result = invoke("--compare", SAMPLE, str(tmp_path / "half.json"))
    assert "B did not finish: interrupted" in result.stdout
    assert result.return_value == 1


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000])
def test_json_that_python_cannot_read_is_told_by_name(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="utf-8")
    assert main.run(["bench", "--from", str(tmp_path / "odd.json")]) == 2
    assert f"--from {tmp_path / 'odd.json'}: not" in capsys.readouterr().err
