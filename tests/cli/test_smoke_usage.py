"""``g4kv smoke`` with a wrong request: one clear line, exit 2, no half-written file, no case run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli import main
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.select import select_cases
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.entries.table import kernel_variants
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.records.run import OF_SOME_BLOCKS, CaseResult
from g4kv_cli.report.json import EarlierRun

smoke = importlib.import_module("g4kv_cli.commands.smoke")  # the package's attribute of this name is the command

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
EMULATED = ("--device", "emulated")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--geometry", "12b-locl"), "did you mean 12b-local? known are"),
        (("--page-size", "0"), "--page-size must be from 1"),
        (("--tp", "3"), "--tp 3 does not divide the 16 query heads of 12b-local"),
        (("--kv-format", "folded"), "12b-local has no folded format of K and V: its V is not made of raw K; it is for"),
        (("--kv-format", "both"), "both"),
        (("--golden", str(GOLDEN), "--kv-format", "folded"), "--kv-format chooses among the cases of geometries"),
        (("--case", "prep/12b-local/prefill/closed"), "nearest: prep/12b-local/prefill/closed-form"),
        (("--case", "prep/12b-local/nothing*"), "no case 'prep/12b-local/nothing*'"),
        (("--geometry", "12b-local", "--case", "prep/31b-local/prefill/closed-form"), "no case 'prep/31b-local"),
        (("--golden", "nowhere.npz"), "--golden nowhere.npz: no such file"),
        (("--golden", str(GOLDEN), "--geometry", "26b-a4b-local", "--case", "golden/x"), "no case 'golden/x'"),
        (("--golden", str(GOLDEN), "--seed", "3"), "--seed does not apply to --golden"),
        (("--golden", str(GOLDEN), "--tp", "2"), "--tp does not apply to --golden"),
        (("--golden", str(GOLDEN / "README.md")), "is no .npz file; name one that numpy.savez wrote"),
        (("--same-bits-as", str(GOLDEN / "README.md")), "not JSON"),
        (("--dump", str(GOLDEN / "README.md")), "cannot write: File exists; a file is in the way: name another"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--device", "cuda:99"), "--device cuda:99 cannot be used"),
        (("--kernels", "nowhere"), "nowhere"),
        (("--variant", "portable,hopper"), "no kernel is of 'hopper'; write portable or sm_90a, or a name that"),
        (("--variant", "portable,"), "no kernel is of ''"),
        (("--jobs", "0"), "--jobs"),
        (("--case-timeout", "nan"), "nan is no number of seconds; 0 means never"),
        (("--case-timeout", "inf"), "inf is no number of seconds; 0 means never"),
        (
            ("--same-bits-as", "nowhere.json"),
            "--same-bits-as nowhere.json: cannot read: No such file or directory; give",
        ),
        ((*EMULATED, "--json", "nowhere/run.json"), "--json nowhere/run.json: cannot write"),
        ((*EMULATED, "--junit", "nowhere/run.xml"), "--junit nowhere/run.xml: cannot write"),
    ],
)
def test_one_line_and_exit_2(run_g4kv, arguments, words) -> None:
    done = run_g4kv("smoke", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.startswith("g4kv: error: ")
    assert done.stderr.count("\n") == 1


def test_a_broken_kernel_source_is_an_error_of_the_run(run_g4kv, tmp_path: Path) -> None:
    (tmp_path / "prep_hd256.cu").write_text("__global__ void broken( {\n")
    record = tmp_path / "run.json"
    done = run_g4kv("smoke", *EMULATED, "--kernels", str(tmp_path), "--json", str(record))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "prep_hd256.cu" in done.stderr
    assert not record.exists()


def test_require_gpu_refuses_the_emulated_device(run_g4kv) -> None:
    done = run_g4kv("smoke", *EMULATED, "--require-gpu")
    assert done.returncode == 2
    assert "a GPU is required" in done.stderr


def test_list_is_the_table_and_runs_nothing(run_g4kv) -> None:
    done = run_g4kv("smoke", "--list", "--device", "cuda:99")
    assert done.returncode == 0
    ids = done.stdout.splitlines()
    assert len(set(ids)) == len(ids) > 50
    assert {line.split("/")[1] for line in ids} == {"12b-local"}
    assert "prep/12b-local/prefill/closed-form" in ids


@pytest.mark.parametrize("command", ["smoke", "reject"])
def test_a_list_takes_no_manifest_that_a_run_would_not_take(command: str, run_g4kv, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("provider = 7\n", encoding="utf-8")
    chosen = [command, "--list", "--provider", str(tmp_path / "mine.toml")]
    done = run_g4kv(*chosen)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'mine.toml'}:1: " in done.stderr
    done = run_g4kv(*chosen, "--kernels", str(BUILT_IN_KERNELS_DIRECTORY))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kernels is about the built-in kernels" in done.stderr


def test_bits_are_those_of_a_kernels_twin_and_no_other_kernels_are_asked_for_theirs() -> None:
    kernel = next(one for one in kernel_variants().values() if one.same_bits_as)
    other = next(one for one in kernel_variants().values() if one.source != kernel.source)
    result = CaseResult("a/case", "entry", "12b-local", "passed", 0.0, output_digest="aa", kernels=(kernel.symbol,))
    for there, digest, status in (
        (kernel.symbol, "aa", "passed"),
        (kernel.symbol, "bb", "failed"),
        (kernel.same_bits_as, "bb", "failed"),
        (other.symbol, "bb", "skipped"),
        (other.symbol, f"bb{OF_SOME_BLOCKS}", "skipped"),
        (kernel.symbol, "", "failed"),
    ):
        earlier = EarlierRun(Path("r.json"), "", 1, "a GPU", {"a/case": digest}, {"a/case": (there,)})
        assert smoke._judge_bits(result, earlier).status == status, (there, digest)
    assert smoke._judge_bits(dataclasses.replace(result, status="failed"), earlier).status == "failed"


@pytest.mark.parametrize("command", ["smoke", "reject"])
def test_kernels_are_built_in_or_a_manifests(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is opened, as with --list."""
    (tmp_path / "mine.toml").write_text('provider = "mine"\n')
    both = ["--provider", str(tmp_path / "mine.toml"), "--kernels", str(BUILT_IN_KERNELS_DIRECTORY)]
    assert main.run([command, *both]) == 2
    shown = capsys.readouterr()
    assert (shown.out, "--kernels is about the built-in kernels" in shown.err) == ("", True)


@pytest.mark.parametrize("option", ["--json", "--junit", "--dump"])
def test_a_list_writes_no_file_that_was_asked_for(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--list", "--case", "prep/12b-local/prefill/closed-form"]
    assert main.run(["smoke", *chosen, option, str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{option} does not apply to --list, which runs nothing" in shown.err
    monkeypatch.setenv(f"G4KV_SMOKE_{option[2:].upper()}", str(tmp_path / "out"))
    assert main.run(["smoke", *chosen]) == 0
    assert not list(tmp_path.iterdir())


def test_list_of_all_geometries_and_ranks(run_g4kv) -> None:
    done = run_g4kv("smoke", "--list", "--geometry", "all", "--tp", "2", "--case", "*/prefill/closed-form")
    assert done.returncode == 0
    names = [line.split("/")[1] for line in done.stdout.splitlines()]
    assert names == [f"{name}@tp2" for name in GEOMETRIES]


def test_help_names_the_default_and_the_exit_codes(run_g4kv) -> None:
    done = run_g4kv("smoke", "--help")
    assert done.returncode == 0
    assert "Default: 12b-local" in " ".join(done.stdout.split())
    assert "Exit codes: 0 all passed; 1 a kernel is wrong; 2" in " ".join(done.stdout.split())


@cache
def _everything() -> list[Case]:
    return gate_cases(tuple(GEOMETRIES.values()), every_trap=True)


@pytest.mark.parametrize(
    ("wanted", "made_of"),
    [
        (("attention/31b-local/decode/ragged", "prep/12b-local/*/closed-form"), {"12b-local", "31b-local"}),
        (("trap/12b-global/decode/*",), {"12b-global"}),
        (("attention/12b*/decode/ragged",), set(GEOMETRIES)),
        (("*closed-form", "prep/12b-local/decode/closed-form"), set(GEOMETRIES)),
    ],
)
def test_ids_that_name_their_geometries_need_no_other_table(
    wanted: tuple[str, ...], made_of: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: set[str] = set()

    def watched(geometries: Sequence[Geometry], **options: Any) -> list[Case]:
        made.update(geometry.name for geometry in geometries)
        return gate_cases(geometries, **options)

    monkeypatch.setattr(smoke, "gate_cases", watched)
    chosen = [case.id for case in smoke.cases_of(smoke.Request(case=wanted))]
    assert made == made_of
    assert chosen == [case.id for case in select_cases(_everything(), wanted)]
