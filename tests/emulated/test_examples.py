"""The programs of docs/examples run as they stand, and see a kernel that is wrong."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def _output(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_the_race_of_the_reduction_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    without, right = _output(EXAMPLES / "reduction_race.py", capsys)
    text = (EXAMPLES / "reduction_race.py").read_text()
    source = text[text.index('"""\nextern') + 3 :].split("\n")
    line = next(number for number, each in enumerate(source, 1) if "part[threadIdx.x + half]" in each)
    assert without.startswith(f"without the barrier: shared_race at line {line}, block (0, 0, 0): ")
    assert right == "with the barrier: 0 findings, sums right: True"


def test_the_softmax_is_within_its_limit_and_a_wrong_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, error = _output(EXAMPLES / "softmax.py", capsys)
    assert report.startswith("softmax_rows<256>(const __nv_bfloat16*, float*, int): 10 blocks of 128 threads")
    assert 0 < _number(error) < 1
    text = (EXAMPLES / "softmax.py").read_text()
    assert text.count("sum += values[k] = expf(") == 1
    (tmp_path / "wrong.py").write_text(
        text.replace("sum += values[k] = expf(", "sum += values[k] = 1.00001f * expf(1e-5f + ")
    )
    assert _number(_output(tmp_path / "wrong.py", capsys)[1]) < 1  # the factor cancels
    (tmp_path / "wrong.py").write_text(text.replace("/ sum;", "/ (sum + 1e-4f);"))
    assert _number(_output(tmp_path / "wrong.py", capsys)[1]) > 1


def test_the_triton_kernel_runs_from_its_ptx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, *notes, error = _output(EXAMPLES / "triton_softmax.py", capsys)
    assert report.startswith("softmax_rows: 6 blocks of 128 threads")
    # The lanes of a warp store what they all have.
    assert all(note.startswith("no finding: equal_stores: ") for note in notes)
    assert 0 < _number(error) < 1e-6
    text = (EXAMPLES / "triton_softmax.ptx").read_text()
    assert text.count("div.full.f32 \t%r4, %r39") == 1
    (tmp_path / "triton_softmax.ptx").write_text(text.replace("div.full.f32 \t%r4, %r39", "div.full.f32 \t%r4, %r41"))
    (tmp_path / "triton_softmax.py").write_text((EXAMPLES / "triton_softmax.py").read_text())
    assert _number(_output(tmp_path / "triton_softmax.py", capsys)[-1]) > 1e-3


def _number(line: str) -> float:
    return float(re.search(r"error: (\S+)", line)[1])  # type: ignore[index]
