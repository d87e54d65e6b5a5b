# ruff: noqa: E501
"""Other people's kernels through smoke's cases: right ones pass, wrong manifests turn the right case red, and what a
provider does not do is counted apart. test_provider_faults.py plants faults in the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from provider_helper import Change, compile_engine, engine_in, run_cases_of

from g4kv_cli.errors import CompileError, UsageError

PREP = ("prep/12b-local/prefill/closed-form", "prep/12b-local/decode/closed-form")
ATTENTION = ("attention/12b-local/decode/ragged",)


def test_right_kernels_pass_and_the_rest_is_not_covered(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    results = run_cases_of([manifest], [*PREP, *ATTENTION, "prep/12b-local/contiguous/closed-form",
                                        "trap/12b-local/decode/page-id-negative"])  # fmt: skip
    by_id = {result.id: result for result in results}
    for case in (*PREP, *ATTENTION):
        assert by_id[case].status == "passed", by_id[case]
    assert by_id["prep/12b-local/contiguous/closed-form"].status == "not covered"
    assert "has no entry" in by_id["prep/12b-local/contiguous/closed-form"].reason
    trap = by_id["trap/12b-local/decode/page-id-negative"]
    assert (trap.status, "traps = false" in trap.reason) == ("not covered", True)


def test_a_pool_of_another_order_gives_the_same_bits(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    other = tmp_path / "hnd.toml"
    other.write_text(manifest.read_text().replace("[image.", '[pool]\naxes = "layer page head slot dim"\n\n[image.', 1))
    cases = [*PREP, *ATTENTION, "prep/12b-local/decode/padding/shared-page"]
    own, apart = (run_cases_of([file], cases) for file in (manifest, other))
    assert [result.status for result in apart] == ["passed"] * len(cases), apart
    assert [result.output_digest for result in own] == [result.output_digest for result in apart]


@pytest.mark.parametrize(
    ("change", "case", "says"),
    [
        (("kernels.toml", '"ptr pool + 2 * k_offset", "ptr pool + 2 * v_offset"',
          '"ptr pool + 2 * v_offset", "ptr pool + 2 * k_offset"'), "prep/12b-local/decode/closed-form", "V in the pool"),
        (("kernels.toml", '"ptr cos", "ptr sin"', '"ptr sin", "ptr cos"'), "prep/12b-local/decode/closed-form", "q_out"),
        (("kernels.toml", "num_qo_heads + (1 if k_eq_v else 2) * num_kv_heads",
          "num_qo_heads + (1 if k_eq_v else 2) * num_kv_heads - 1"), "prep/12b-local/decode/closed-form", "V in the pool"),
        (("kernels.toml", '"i64 stride_page"', '"i64 stride_page + 1"'), "prep/12b-local/decode/closed-form", "K in the pool"),
        (("kernels.toml", "page_row[position // page_size - page_origin]", "page_row[position // page_size]"),
         "prep/12b-local/prefill/page-origin/*", "out of bounds"),
    ],
)  # fmt: skip
def test_a_manifest_that_says_something_else_is_found(tmp_path: Path, change: Change, case: str, says: str) -> None:
    results = run_cases_of([engine_in(tmp_path, change) / "kernels.toml"], [case])
    bad = [result for result in results if result.status in ("failed", "error")]
    assert bad, f"nothing was found: {[result.status for result in results]}"
    told = [text for result in bad for text in (result.reason, *(one.operation for one in result.mismatches))]
    assert any(says in text for text in told), told


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("kernels.toml", '"f32 eps", "i64', '"i32 1", "i64'), r"argument 15: .*got i32, want \.f32"),
        (("kernels.toml", '"i32 page_size"]', '"i64 page_size"]'), r"argument 19: .*got i64 of 8 bytes, want 4 bytes"),
        (
            ("kernels.toml", '"ptr q", "ptr k", "ptr v"', '"ptr q", "ptr k"'),
            r"number of arguments: differs from what the kernel declares",
        ),
        (("kernels.toml", 'block = ["head_dim"]', 'block = ["head_dim * 8"]'), r"block: does not fit the device"),
        (("kernels.toml", '"i32 rotary_dim"', '"i32 rotary_dims"'), r"kernels\.toml:\d+: .*no name 'rotary_dims' here"),
        (("kernels.toml", 'writes = ["q_out"]', 'writes = ["q_uot"]'), r"kernels\.toml:\d+: writes 'q_uot'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_an_error_that_says_where(tmp_path: Path, change: Change, says: str) -> None:
    import re

    (result,) = run_cases_of([engine_in(tmp_path, change) / "kernels.toml"], ["prep/12b-local/decode/closed-form"])
    assert result.status == "error", result
    assert re.search(says, result.reason), result.reason


def test_rounding_after_the_norm_has_to_be_stated(tmp_path: Path) -> None:
    rounds: Change = (
        "kernels.cu",
        "row[dim] = x * scale * __bfloat162float((is_q ? q_weight : k_weight)[dim]);",
        "row[dim] = __bfloat162float(__float2bfloat16(x * scale * __bfloat162float((is_q ? q_weight : k_weight)[dim])));",
    )
    cases = ["prep/12b-local/decode/random/*"]
    manifest = engine_in(tmp_path, rounds) / "kernels.toml"
    assert {result.status for result in run_cases_of([manifest], cases)} == {"failed"}
    manifest.write_text(manifest.read_text().replace("traps = false", 'traps = false\nrounds_to_bf16_after = ["norm"]'))
    assert {result.status for result in run_cases_of([manifest], cases)} == {"passed"}


def test_a_waiver_tolerates_its_report_alone(tmp_path: Path) -> None:
    # The last barrier before the merge is missing: warps read what others still write.
    races: Change = ("kernels.cu", "    sums[warp] = total;\n  }\n  __syncthreads();", "    sums[warp] = total;\n  }")
    manifest = engine_in(tmp_path, races) / "kernels.toml"
    (found,) = run_cases_of([manifest], ATTENTION)
    assert found.status == "failed"
    assert "shared_race" in found.reason
    waiver = '[[waive]]\nkind = "{}"\nwhere = "kernels.cu"\nwhy = "a test"\n\n[image.'
    text = manifest.read_text()
    manifest.write_text(text.replace("[image.", waiver.format("uninitialised_read"), 1))
    (other,) = run_cases_of([manifest], ATTENTION)
    assert (other.status, other.waived) == ("failed", ())


def test_an_engines_own_launchers_run_as_they_are(tmp_path: Path) -> None:
    manifest = compile_engine(engine_in(tmp_path))
    results = run_cases_of([manifest], [*PREP, *ATTENTION])
    assert [result.status for result in results] == ["passed"] * len(results), results


def test_a_fault_in_an_engines_library_is_found(tmp_path: Path) -> None:
    wrong: Change = ("engine.cu", "num_qo_heads / num_kv_heads, scale", "num_qo_heads, scale")
    (result,) = run_cases_of([compile_engine(engine_in(tmp_path, wrong))], ATTENTION)
    assert result.status == "failed"
    refuses: Change = ("engine.cu", "if (head_dim == 256)", "if (head_dim == 255)")
    other = tmp_path / "other"
    other.mkdir()
    (result,) = run_cases_of([compile_engine(engine_in(other, refuses))], [PREP[1]])
    assert result.status == "error"
    assert "engine_prep returned 1: head_dim must be 256 or 512" in result.reason


def test_a_builder_is_run_once_for_its_constants_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G4KV_CACHE_DIR", str(tmp_path / "cache"))
    engine_in(tmp_path)
    builder = tmp_path / "builder.py"
    builder.write_text(
        "import json, re, sys\n"
        "from pathlib import Path\n"
        "from g4kv_cli.compiler import compile_image\n"
        "from g4kv_cli.compiler.sources import find_source\n"
        "target, constants = Path(sys.argv[1]), json.loads(sys.argv[2])\n"
        "image = compile_image(find_source('kernels.cu', Path('.')), arch='sm_90', kind='ptx')\n"
        "target.write_bytes(image.data)\n"
        "names = 'q k_pool v_pool out lse table width positions requests origins heads group scale window page slot head size'\n"
        "entries = re.findall(r'[.]entry (\\w+)', image.data.decode())\n"
        "symbol = next(name for name in entries if f'attentionILi{constants[\"D\"]}E' in name)\n"
        "facts = {'threads': 256, 'shared': 0, 'arguments': names.split(), 'symbol': symbol}\n"
        "target.with_suffix('.json').write_text(json.dumps(facts))\n"
        "Path('runs').open('a').write('x')\n"
    )
    manifest = tmp_path / "built.toml"
    manifest.write_text(
        'provider = "built"\n[image.a]\n'
        f'builder = ["{_python()}", "builder.py"]\nconstants = {{ D = "head_dim" }}\n'
        '[[entry]]\nname = "batch_*"\n[entry.arrays]\ntable = "i32 padded_rows(page_indices, page_indptr)"\n'
        '[[entry.launch]]\nimage = "a"\nsymbol = "."\ngrid = ["tokens", "num_qo_heads"]\nwrites = ["out", "lse"]\n'
        '[entry.launch.named]\nq = "ptr q"\nk_pool = "ptr pool + 2 * k_offset"\nv_pool = "ptr pool + 2 * v_offset"\n'
        'out = "ptr out"\nlse = "ptr lse"\ntable = "ptr table"\nwidth = "i32 columns(table)"\npositions = "ptr positions"\n'
        'requests = "ptr token_requests"\norigins = "ptr page_origins"\nheads = "i32 num_qo_heads"\ngroup = "i32 group"\n'
        'scale = "f32 sm_scale"\nwindow = "i32 window_left"\npage = "i64 stride_page"\nslot = "i64 stride_slot"\n'
        'head = "i64 stride_head"\nsize = "i32 page_size"\n'
    )
    for _ in range(2):
        (result,) = run_cases_of([manifest], ATTENTION)
        assert result.status == "passed", result
    assert (tmp_path / "runs").read_text() == "x"
    builder.write_text("raise SystemExit('no such kernel here')")
    with pytest.raises(CompileError, match="builder of image a failed with 1: no such kernel here"):
        run_cases_of([manifest], ATTENTION)


def test_a_missing_manifest_and_one_without_its_library(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        run_cases_of([tmp_path / "none.toml"], ATTENTION)
    engine_in(tmp_path)
    with pytest.raises(UsageError, match=r"engine\.toml:\d+: image\.engine\.library: there is no file"):
        run_cases_of([tmp_path / "engine.toml"], ATTENTION)


def _python() -> str:
    import sys

    return sys.executable


def test_a_kernel_that_is_not_there_for_any_number_is_a_mistake(tmp_path: Path) -> None:
    """For the numbers at hand alone it is one that was not compiled, and so not covered."""
    case = "attention/12b-local/decode/kv-len-one"
    (tmp_path / "other").mkdir()
    wrong = engine_in(tmp_path, ("kernels.toml", 'symbol = "attentionILi{', 'symbol = "attention_Li{')) / "kernels.toml"
    (result,) = run_cases_of([wrong], [case])
    line = wrong.read_text().splitlines().index('symbol = "attention_Li{head_dim}E"') - 1
    says = f"{wrong}:{line}: image kernels has no kernel that matches 'attention_Li{{head_dim}}E'; it has _Z"
    assert (result.status, result.reason[: len(says)]) == ("error", says)
    rest = engine_in(tmp_path / "other", ("kernels.cu", "ATTENTION(256);", "")) / "kernels.toml"
    (result,) = run_cases_of([rest], [case])
    assert (result.status, result.reason) == (
        "not covered", "image kernels has no kernel that matches 'attentionILi256E'",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"i32 num_qo_heads", "i32 group",', '"i32 num_qo_heads",', "number of arguments: differs from what the kernel declares (got 17, want 18)"),
        ('"i32 group",', '"f32 group",', "(got f32, want .u32) [launch_parameters]: the manifest gives 'f32 group'"),
        ('"i32 group",', '["i32 group", "ptr lse"],', "the manifest gives '[i32 group, ptr lse]'"),
        ("block = [256]", "block = [2048]", "block: does not fit the device (got (2048, 1, 1), want 1 to 1024 threads)"),
    ],
)  # fmt: skip
def test_a_launch_that_does_not_fit_its_kernel_names_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    manifest = engine_in(tmp_path, ("kernels.toml", old, new)) / "kernels.toml"
    (result,) = run_cases_of([manifest], ["attention/12b-local/decode/pages/permuted"])
    line = manifest.read_text().splitlines().index('symbol = "attentionILi{head_dim}E"') - 1
    assert result.status == "error"
    assert result.reason.startswith(f"{manifest}:{line}: "), result.reason
    assert says in result.reason
