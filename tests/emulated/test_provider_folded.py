"""Another's kernels over pools of folded rows of K: stated in the manifest, found by strides of K's and V's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from provider_helper import engine_in, run_these

from g4kv_cli.commands.asked import Asked
from g4kv_cli.commands.smoke import Request, cases_of
from g4kv_cli.records.run import CaseResult

SMALL = "kv=10 heads=2/1 head_dim=512 page=8 batch=2 padding=2"


def _results(manifest: Path, kv_format: str, *words: str) -> dict[str, CaseResult]:
    """Of the request's cases of decode, those whose id has one of the words, by their last part."""
    cases = cases_of(Request(asked=Asked(None, SMALL, None), kv_format=kv_format))  # type: ignore[arg-type]
    chosen = [case for case in cases if "/decode/" in case.id and any(word in case.id for word in words)]
    return {result.id.rpartition("/")[2]: result for result in run_these([manifest], chosen)}


def test_right_kernels_pass_and_split_rows_are_not_theirs(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "folded.toml"
    found = _results(manifest, "folded", "/")
    assert {name: result.status for name, result in found.items()} == {
        "closed-form": "passed", "random": "passed", "spread": "passed", "needles": "passed",
        "forms-agree": "not covered",
    }, found  # fmt: skip
    found = _results(manifest, "split", "closed-form", "spread")
    reason = "folded-rows: its kernels take folded rows of K and V, not split ones"
    assert {(result.status, result.reason) for result in found.values()} == {("not covered", reason)}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('kv_formats = ["folded"]\n', "", "its kernels take split rows of K and V, not folded ones"),
        ("[image.", '[pool]\naxes = "layer page head slot dim"\n\n[image.',
         "a pool of folded rows has the built-in order of axes, not that of [pool]"),
    ],
)  # fmt: skip
def test_folded_rows_are_not_covered_unless_they_are_stated_and_lie_as_built_in(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    (result,) = _results(engine_in(tmp_path, ("folded.toml", old, new)) / "folded.toml", "folded", "spread").values()
    assert result.status == "not covered"
    assert says in result.reason


def test_one_stride_of_slots_for_k_and_v_there_is_none(tmp_path: Path) -> None:
    folder = engine_in(tmp_path, ("folded.toml", '"i64 k_stride_slot"', '"i64 stride_slot"'))
    (result,) = _results(folder / "folded.toml", "folded", "spread").values()
    assert result.status == "error"
    assert "no name 'stride_slot' here; nearest: " in result.reason
    assert "k_stride_slot" in result.reason


FAULTS = (
    ("folded.toml", '"i64 k_stride_slot"', '"i64 v_stride_slot"', "random", "K in the pool"),
    ("folded.toml", '"ptr pool + 2 * v_offset"', '"ptr pool + 2 * k_offset"', "random", "V in the pool"),
    ("folded.cu", "value *= __bfloat162float(k_weight[dim]);", ";", "random", "q_out"),
    ("folded.cu", "__float2bfloat16(normed)", "__float2bfloat16(row[dim])", "random", "V in the pool"),
    ("folded.cu", "dim / kHalf * pairs + inside] = ", "inside * 2 + dim / kHalf] = ", "closed-form",
     "K in the pool"),
    ("folded.cu", "inside < pairs ? ", "dim < k_dim ? ", "spread", "out"),
    ("folded.cu", "fade + weight * v;", "fade + weight * k;", "spread", "out"),
)  # fmt: skip
"""A file, text in it, what stands in its place, the case that goes red, and what it says."""


@pytest.mark.seeded_faults
@pytest.mark.parametrize(("file", "old", "new", "case", "says"), FAULTS)
def test_a_fault_of_folded_rows_turns_its_case_red(
    tmp_path: Path, file: str, old: str, new: str, case: str, says: str
) -> None:
    (result,) = _results(engine_in(tmp_path, (file, old, new)) / "folded.toml", "folded", case).values()
    assert result.status == "failed", result
    assert any(says in one.operation for one in result.mismatches), result
