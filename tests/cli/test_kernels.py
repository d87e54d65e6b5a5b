"""``g4kv kernels``: rows, JSON, exit codes; no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from g4kv_cli import main
from g4kv_cli.commands.kernels import kernels

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
    assert invoke("--arch", "sm_86", "--json", str(path)).return_value == 0
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


def test_an_unknown_arch_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["kernels", "--arch", "sm_10"]) == 2
    error = capsys.readouterr().err
    assert "--arch sm_10: unknown; there are: all, sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120" in error
    assert error.count("\n") == 1
