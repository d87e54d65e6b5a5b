"""``g4kv kernels``: rows, JSON, exit codes; no GPU."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from g4kv_cli import main
from g4kv_cli.commands.kernels import kernels
from g4kv_cli.errors import CompileError, UsageError
from g4kv_cli.report.kernels import while_compiling

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) many_values(float* data) {
  float held[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) data[i * 1024 + threadIdx.x] = held[i] * held[(i * 7 + 3) % 64];
}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(kernels, arguments, standalone_mode=False, catch_exceptions=False)


def test_a_row_for_each_kernel(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = invoke("--arch", "sm_90a", "--json", str(path))
    assert result.return_value == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["kernel"]: row for row in record["kernels"]}
    assert result.stdout.splitlines()[-1].strip() == f"{len(rows)} kernels on 1 arch, none spills"
    decode = rows["paged_decode_hd512_groups4"]
    # entries/table.py: 256 threads and 147968 bytes: one block of the 227 KiB that an SM has.
    assert (decode["threads"], decode["dynamic_shared_bytes"], decode["blocks_per_sm"]) == (256, 147968, 1)
    assert decode["occupancy"] == pytest.approx(8 / 64)
    assert decode["registers"] > 100
    assert decode["cubin_bytes"] > 1000
    assert rows["ceiling_empty"]["occupancy"] == pytest.approx(1.0)
    assert "paged_decode_hd512_groups4" in result.stdout


@pytest.mark.parametrize(("asked", "want"), [("sm_90", ["sm_90a"]), ("sm_90a,sm_80,sm_90", ["sm_90a", "sm_80"])])
def test_an_arch_may_be_written_with_or_without_its_suffix(asked: str, want: list[str], tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert invoke("--arch", asked, "--json", str(path)).return_value == 0
    archs = dict.fromkeys(row["arch"] for row in json.loads(path.read_text(encoding="utf-8"))["kernels"])
    assert list(archs) == want


def test_a_kernel_that_does_not_fit_a_card_says_so(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert invoke("--arch", "sm_120", "--json", str(path)).return_value == 0
    rows = {row["kernel"]: row for row in json.loads(path.read_text(encoding="utf-8"))["kernels"]}
    assert rows["paged_decode_hd512_groups4"]["bound"] == "does not fit"
    assert rows["paged_decode_hd256_groups4"]["blocks_per_sm"] == 1


def test_spills_are_findings(tmp_path: Path) -> None:
    (tmp_path / "spilling.cu").write_text(SPILLING, encoding="utf-8")
    path = tmp_path / "kernels.json"
    result = invoke("--arch", "sm_80", "--kernels", str(tmp_path), "--json", str(path))
    assert result.return_value == 1
    assert result.stdout.splitlines()[-1].strip().endswith("on 1 arch, 1 spill")
    row = next(row for row in json.loads(path.read_text(encoding="utf-8"))["kernels"] if row["kernel"] == "many_values")
    assert row["spill_bytes"] > 0
    # 2 blocks of 1024 threads leave 32 registers a thread.
    assert row["registers"] == 32


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_sees_how_far_compiling_is(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Errors(io.StringIO):
        def isatty(self) -> bool:
            return on_terminal

    monkeypatch.setattr(sys, "stderr", Errors())
    assert list(while_compiling([("a.cu", "sm_80"), ("b.cu", "sm_80")])) == [("a.cu", "sm_80"), ("b.cu", "sm_80")]
    assert ("compiling" in sys.stderr.getvalue()) == on_terminal  # type: ignore[attr-defined]


def test_an_unknown_arch_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["kernels", "--arch", "sm_10"]) == 2
    error = capsys.readouterr().err
    assert "--arch sm_10: unknown; there are: all, sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120" in error
    assert error.count("\n") == 1


CHECKED = """
#include <mma.h>
#include <cstdio>
#include "own.h"
extern "C" __global__ void fine(int* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void textured(float* out, unsigned long long handle) {
  out[threadIdx.x] = tex1Dfetch<float>(handle, threadIdx.x);  // MARK: texture
  asm volatile("pmevent 1;");  // MARK: stop
}
"""


def test_check_lists_all_that_is_not_emulated_by_source_line(tmp_path: Path) -> None:
    source, record = tmp_path / "mine.cu", tmp_path / "check.json"
    source.write_text(CHECKED)
    lines = [number for number, line in enumerate(CHECKED.split("\n"), 1) if "MARK" in line]
    (tmp_path / "own.h").write_text("#pragma once\n")
    result = invoke("--check", str(source), "--json", str(record))
    assert result.return_value == 1
    shown = result.stdout.splitlines()
    assert shown[0].split() == ["ok", "fine"]
    assert shown[1].split() == ["no", "textured"]
    assert "tex.1d.v4.f32.s32" in shown[2]
    assert "textures" in shown[2]
    assert shown[3].split() == [f"mine.cu:{lines[1]}", "pmevent"]
    assert shown[4] == "mine.cu: 2 kernels, 1 cannot run on the emulated device"
    kernels = json.loads(record.read_text())["kernels"]
    assert [(one["kernel"], len(one["unsupported"])) for one in kernels] == [("fine", 0), ("textured", 2)]
    assert kernels[1]["unsupported"][1]["source_line"] == lines[1]


def test_check_says_for_what_the_interpreter_runs_a_kernel(tmp_path: Path) -> None:
    head = ".version 8.0\n.target sm_90\n.address_size 64\n"
    body = ".reg .b32 %r<3>;\n.reg .b64 %d<2>;\n{}ret;\n"
    called = "mul24.hi.u32 %r2, %r1, %r1;\n"
    slow = "mov.b32 %r2, 0;\nld.shared::cluster.u32 %r1, [%r2];\nld.shared::cluster.u32 %r1, [%r2+4];\n"
    texts = {"fast": "", "slow": f"{slow}{called}", "called": f"mov.b32 %r1, 3;\n{called}"}
    ptx, record = tmp_path / "three.ptx", tmp_path / "check.json"
    ptx.write_text(
        head + "".join(f".visible .entry {name}()\n{{\n{body.format(text)}}}\n" for name, text in texts.items())
    )
    result = invoke("--check", str(ptx), "--json", str(record))
    assert result.return_value == 0
    assert [line.strip() for line in result.stdout.splitlines()] == [
        *("ok    fast", "ok    slow", "interpreted, which is slower, for ld.shared::cluster.u32"),
        *("ok    called", "large launches are interpreted for mul24.hi.u32"),
        "three.ptx: 3 kernels, the emulated device can run all of them",
    ]
    kernels = json.loads(record.read_text())["kernels"]
    assert [one["interpreted_for"] for one in kernels] == [[], ["ld.shared::cluster.u32"], []]
    assert [one["called_for"] for one in kernels] == [[], [], ["mul24.hi.u32"]]


def test_check_of_ptx_and_what_is_none(tmp_path: Path) -> None:
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry one()\n{\nret;\n}\n"
    ptx = tmp_path / "one.ptx"
    ptx.write_text(text)
    result = invoke("--check", str(ptx))
    assert result.return_value == 0
    assert result.stdout.splitlines()[-1] == "one.ptx: 1 kernel, the emulated device can run all of them"
    ptx.write_text(text.replace("ret;", "pmevent 1;\nret;"))
    result = invoke("--check", str(ptx))
    assert result.return_value == 1
    assert "PTX line 6  pmevent" in result.stdout
    ptx.write_text("no PTX at all")
    with pytest.raises(CompileError, match="not PTX text"):
        invoke("--check", str(ptx))
    ptx.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read as text"):
        invoke("--check", str(ptx))
    with pytest.raises(UsageError, match="leave --arch out"):
        invoke("--check", str(ptx), "--arch", "sm_80")
    (tmp_path / "own.cu").write_text("")
    with pytest.raises(UsageError, match="give one of them"):
        invoke("--check", str(ptx), "--kernels", str(tmp_path))
