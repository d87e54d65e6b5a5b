"""The Numba-CUDA prep of docs/examples/numba through smoke's cases, from what Numba made of it once; where Numba is
installed also from what it makes of it now."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from provider_helper import run_cases_of

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "numba"
CASES = (
    "prep/12b-local/prefill/closed-form/rotary-partial", "prep/12b-local/decode/closed-form",
    "prep/12b-local/batch_prefill/closed-form", "prep/12b-local/decode/random/seed2/tokens2/page16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(fresh_cache: Path) -> None:
    """What a builder makes is kept by its files: a test's own are not another's."""


def _manifest(folder: Path, *changes: tuple[str, str], recorded: bool = True) -> Path:
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    manifest = folder / "numba.toml"
    words = f'"{sys.executable}", "kernels.py"' + (', "--recorded"' if recorded else "")
    text = manifest.read_text()
    for old, new in (('"python", "kernels.py"', words), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    manifest.write_text(text)
    return manifest


def test_it_passes_in_both_orders_of_the_pool_with_the_same_bits(tmp_path: Path) -> None:
    hnd = ("[image.prep]", '[pool]\naxes = "layer page head slot dim"\n\n[image.prep]')
    own, other = (
        run_cases_of([_manifest(tmp_path / str(at), *change)], CASES) for at, change in enumerate(((), (hnd,)))
    )
    assert [result.status for result in (*own, *other)] == ["passed"] * 2 * len(CASES), (own, other)
    assert [result.output_digest for result in own] == [result.output_digest for result in other]


@pytest.mark.parametrize(
    ("change", "case", "says"),
    [
        (('cos = "ptr cos"', 'cos = "ptr sin"'), CASES[1], "q_out"),
        (('"ptr pool + 2 * v_offset"', '"ptr pool + 2 * k_offset"'), CASES[1], "block_write_conflict"),
        (('eps = "f32 eps"', 'eps = "i32 1"'), CASES[1], "the manifest gives 'i32 1'"),
        (('items = "i64 1 << 40"   ', 'item = "i64 1 << 40"   '), CASES[1], "the kernel takes items"),
    ],
)
def test_a_manifest_that_says_something_else_is_found(
    tmp_path: Path, change: tuple[str, str], case: str, says: str
) -> None:
    (result,) = run_cases_of([_manifest(tmp_path, change)], [case])
    assert result.status in ("failed", "error")
    told = [result.reason, *(one.operation for one in result.mismatches)]
    assert any(says in text for text in told), told


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs Numba: pip install 'numba-cuda[cu13]'")
def test_what_numba_makes_now_passes(tmp_path: Path) -> None:
    results = run_cases_of([_manifest(tmp_path, recorded=False)], CASES)
    assert {result.status for result in results} == {"passed"}, results
