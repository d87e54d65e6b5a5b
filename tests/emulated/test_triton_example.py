"""The Triton kernels of docs/examples/triton through smoke's cases, from what Triton made of them once; where Triton is
installed also from what it makes of them now, right and wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from provider_helper import run_cases_of

from g4kv_cli.errors import CompileError

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "triton"
HND = '[pool]\naxes = "layer page head slot dim"\n'
PREP = (
    "prep/12b-local/prefill/closed-form/rotary-partial", "prep/12b-local/decode/closed-form",
    "prep/12b-local/batch_prefill/closed-form",
)  # fmt: skip
ATTENTION = (
    "attention/12b-local/decode/needle/window333", "attention/12b-local/decode/pool/page-ids-past-16-bits",
    "attention/12b-local/decode/ragged", "attention/12b-local/decode/pages/permuted",
)  # fmt: skip
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")


@pytest.fixture(autouse=True)
def _own_cache(fresh_cache: Path) -> None:
    """What a builder makes is kept by its files: a test's own are not another's."""


def _manifest(folder: Path, *changes: tuple[str, str], recorded: bool = True, pool: str = "") -> Path:
    """The example in a folder of the test's own; each change is of kernels.py or of triton.toml."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    texts = {name: (folder / name).read_text() for name in ("kernels.py", "triton.toml")}
    for old, new in changes:
        (name,) = (name for name, text in texts.items() if old in text)
        texts[name] = texts[name].replace(old, new)
    words = f'"{sys.executable}", "kernels.py"' + (', "--recorded"' if recorded else "")
    texts["triton.toml"] = texts["triton.toml"].replace('"python", "kernels.py"', words)
    texts["triton.toml"] = texts["triton.toml"].replace("\n[image.prep]", f"\n{pool}[image.prep]")
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "triton.toml"


def test_they_pass_in_both_orders_of_the_pool_with_the_same_bits(tmp_path: Path) -> None:
    cases = [*PREP, *ATTENTION]
    own = run_cases_of([_manifest(tmp_path / "own")], cases)
    hnd = run_cases_of([_manifest(tmp_path / "hnd", pool=HND)], cases)
    assert [result.status for result in (*own, *hnd)] == ["passed"] * 2 * len(cases), (own, hnd)
    assert [result.output_digest for result in own] == [result.output_digest for result in hnd]


def test_head_dim_512_with_values_from_keys(tmp_path: Path) -> None:
    cases = ["prep/12b-global/decode/closed-form", "attention/12b-global/decode/pages/permuted"]
    results = run_cases_of([_manifest(tmp_path, pool=HND)], cases, "12b-global")
    assert [result.status for result in results] == ["passed"] * 2, results


def test_what_it_does_not_serve_is_not_covered(tmp_path: Path) -> None:
    cases = ["attention/12b-local/decode/lse/not-wanted", "attention/12b-local/decode-split/ragged"]
    results = run_cases_of([_manifest(tmp_path)], cases)
    # Without a log-sum-exp the kernel gets an array of the manifest's own for it.
    assert [result.status for result in results] == ["passed", "not covered"]
    assert results[1].reason == "triton-example has no entry batch_decode_split_paged_window_hd256_into"


@pytest.mark.parametrize(
    ("old", "new", "case", "says"),
    [
        ('"i32 window_left"', '"i32 window_left + 1"', ATTENTION[0], "out"),
        (
            'stride_head = "i64 stride_head"',
            'stride_head = "i64 stride_slot"',
            ATTENTION[2],
            "foreign_read: kernels.py:",
        ),
        ("fill=-1)", "fill=-1)[::-1]", ATTENTION[3], "out"),
        ('"i64 token_slots"', '"i64 token_slots ^ 1"', PREP[1], "K in the pool"),
        ('"i32 token_positions"', '"i32 token_positions + 1"', PREP[1], "q_out"),
        ('k_weight = "ptr k_norm_weight"', 'k_weight = "ptr q_norm_weight"', PREP[1], "K in the pool"),
    ],
)
def test_a_wrong_manifest_is_found(tmp_path: Path, old: str, new: str, case: str, says: str) -> None:
    (result,) = run_cases_of([_manifest(tmp_path, (old, new))], [case])
    assert result.status == "failed", result
    told = [result.reason, *(one.operation for one in result.mismatches)]
    assert any(says in text for text in told), told


def test_an_argument_without_a_name_and_a_builder_that_lacks_a_variant(tmp_path: Path) -> None:
    (result,) = run_cases_of(
        [_manifest(tmp_path / "a", ('lse = "ptr lse if has_lse else spare"\n', ""))], [ATTENTION[0]]
    )
    assert result.status == "error"
    assert "the kernel takes lse, which 'named' does not give" in result.reason
    with pytest.raises(CompileError, match=r"decode_D256_GROUP3\.ptx is not among what is recorded"):
        run_cases_of([_manifest(tmp_path / "b", ('GROUP = "group"', 'GROUP = "group + 1"'))], [ATTENTION[0]])


def test_what_is_recorded_is_what_the_builder_names() -> None:
    facts = {path.stem: json.loads(path.read_text()) for path in (EXAMPLE / "recorded").glob("*.json")}
    assert len(facts) == 4
    for stem, one in facts.items():
        ptx = (EXAMPLE / "recorded" / f"{stem}.ptx").read_text()
        assert f".entry {one['symbol']}(" in ptx
        assert ptx.count(".param .") == len(one["arguments"]) + one["null_pointers"]
        assert '"/' not in ptx, "no folder of the machine that recorded it"


@needs_triton
def test_what_triton_makes_of_them_now(tmp_path: Path) -> None:
    results = run_cases_of([_manifest(tmp_path, recorded=False)], [*PREP, *ATTENTION])
    assert {result.status for result in results} == {"passed"}, results


@needs_triton
@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("tl.maximum(kv_len - 1 - window_left, first)", "tl.maximum(kv_len - 2 - window_left, first)", ATTENTION[0]),
        ("seen = key < kv_len", "seen = key < kv_len + 1", ATTENTION[3]),
        ("values_sum * kept[:, None]", "values_sum", "attention/12b-local/decode/ragged"),
        ("tl.where(d < rotary // 2, -1.0, 1.0)", "tl.where(d < rotary // 2, 1.0, -1.0)", PREP[1]),
    ],
)
def test_a_fault_in_a_kernel_is_found(tmp_path: Path, old: str, new: str, case: str) -> None:
    (result,) = run_cases_of([_manifest(tmp_path, (old, new), recorded=False)], [case])
    assert result.status == "failed", result
