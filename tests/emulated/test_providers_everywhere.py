"""Other people's kernels beyond single cases: the serving loop, replayed models, the reject catalogue and its traps;
prep of one provider with attention of another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from provider_helper import Change, engine_in, prep_and_attention, run_these

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.e2e.every import end_to_end_cases
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import select_geometries

HND = "layer page head slot dim"
SERVING = "serve/12b-local/interleaved"
REPLAY = "e2e/12b_p7/first12"
DECODE = "qkv_norm_rope_paged_decode_hd256_plain_into"
ATTENTION = "batch_decode_paged_window_hd256_into"
MODELS = Path(__file__).resolve().parent.parent / "golden" / "greedy"


def _serving() -> list[Case]:
    return select_cases(gate_cases(select_geometries("12b-local", 1)), [SERVING])


def _replayed(steps: int = 2) -> list[Case]:
    return [dataclasses.replace(case, steps=steps) for case in end_to_end_cases(MODELS) if case.id == REPLAY]


def _reject(*ids: str) -> list[Case]:
    geometries = select_geometries("12b-local", 1)
    return select_cases([*reject_cases(geometries), *trap_cases(geometries)], ids)


def test_prep_of_one_provider_and_attention_of_another_serve_in_any_order_of_the_pool(tmp_path: Path) -> None:
    engine_in(tmp_path)
    (own,) = run_these(prep_and_attention(tmp_path), _replayed())
    parts = prep_and_attention(tmp_path, HND)
    parts[1].write_text(parts[1].read_text().replace("traps = false", "bits_with_released_pages = false"))
    other, serving = run_these(parts, [*_replayed(), *_serving()])
    assert [result.status for result in (own, other, serving)] == ["passed"] * 3, (own, other, serving)
    assert own.output_digest == other.output_digest
    assert (own.left_out, other.left_out) == ((), ())
    # The split form is nobody's: what was left out is said, and does not look as if it had passed.
    nobody = "engine-prep + engine-attention has no entry batch_decode_split_paged_window_hd256_into"
    assert serving.left_out == (nobody, "bits_with_released_pages = false: those bits are not compared")


def test_a_fault_is_found_while_serving_and_in_a_replay(tmp_path: Path) -> None:
    change = ("kernels.cu", "k_pool[place] = __float2bfloat16(turned)", "k_pool[place] = __float2bfloat16(row[dim])")
    serving, replayed = run_these(prep_and_attention(engine_in(tmp_path, change)), [*_serving(), *_replayed(1)])
    assert (serving.status, replayed.status) == ("failed", "failed")
    assert "K in the pool" in serving.mismatches[0].operation
    assert any("k is off: prep" in one.note for one in replayed.mismatches), replayed.mismatches


def test_without_a_decode_form_of_its_own_a_provider_does_not_cover_serving(tmp_path: Path) -> None:
    prep, _ = prep_and_attention(engine_in(tmp_path))
    results = run_these([prep], [*_serving(), *_replayed()])
    assert [(result.status, result.left_out) for result in results] == [("not covered", ())] * 2
    assert "has no entry batch_prefill_paged_window_hd256_into" in results[0].reason


def test_origins_that_are_not_promised_are_not_covered(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    manifest.write_text(manifest.read_text().replace("traps = false", "traps = false\npage_origin = false"))
    ids = [f"reject/{ATTENTION}/shape/out-one-row-less", f"reject/{DECODE}/page_id_range/num_pages"]
    for result in run_these([manifest], [*_reject(*ids), *_serving()]):
        assert result.status == "not covered", result
        assert result.reason.startswith("page_origin = false")


# --- reject --------------------------------------------------------------------------------------------------------

NO_PAGE: Change = ("kernels.cu", "  const int64_t slot = slots[token];",
                   "  const int64_t slot = slots[token];\n  if (slot < 0) __trap();  // no such page")  # fmt: skip
TRAPS = (f"trap/{DECODE}/page_id_range/negative", f"trap/{DECODE}/page_id_range/lowest-i32")


def test_requests_are_refused_before_a_providers_launch_and_their_twins_run(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    ids = [f"reject/{DECODE}/page_id_range/*", f"reject/{ATTENTION}/window_left/*", f"reject/{ATTENTION}/shape/*"]
    results = run_these([manifest], _reject(*ids, "reject/merge_splits_hd256_into/num_splits/*", TRAPS[0]))
    by_kind: dict[str, set[str]] = {}
    for result in results:
        by_kind.setdefault(result.id.split("/")[1] if result.id[0] == "r" else "trap", set()).add(result.status)
    assert by_kind == {
        DECODE: {"passed"}, ATTENTION: {"passed"}, "merge_splits_hd256_into": {"not covered"}, "trap": {"not covered"},
    }  # fmt: skip


def test_a_twin_that_a_provider_does_not_finish_is_red(tmp_path: Path) -> None:
    change = ("kernels.toml", '"num_qo_heads + (1 if k_eq_v else 2) * num_kv_heads"', '"num_qo_heads"')
    (result,) = run_these([engine_in(tmp_path, change) / "kernels.toml"], _reject(f"reject/{DECODE}/shape/q-flat"))
    assert result.status == "failed"
    assert "the in-range twin wrote" in result.reason


def test_traps_that_a_manifest_promises_are_held_to(tmp_path: Path) -> None:
    promise: Change = ("kernels.toml", "traps = false", "traps = true")
    (tmp_path / "good").mkdir()
    good = run_these([engine_in(tmp_path / "good", NO_PAGE, promise) / "kernels.toml"], _reject(*TRAPS))
    assert [result.status for result in good] == ["passed"] * 2, good
    (tmp_path / "bad").mkdir()
    bad = run_these([engine_in(tmp_path / "bad", promise) / "kernels.toml"], _reject(*TRAPS))
    assert [result.status for result in bad] == ["failed"] * 2, bad
    assert bad[0].reason.startswith("no fault: the kernel ran to its end, want a trap")


def test_the_commands_say_what_ran_and_what_was_not_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    waiver = '[[waive]]\nkind = "shared_race"\nwhere = "nowhere.cu"\nwhy = "a test"\n\n[image.'
    manifest.write_text(manifest.read_text().replace("[image.", waiver, 1))
    cases = [f"--case=reject/{DECODE}/eps/*", f"--case={TRAPS[0]}"]
    assert g4kv(["reject", "--device", "emulated", "--provider", str(manifest), *cases]) == 0
    shown = capsys.readouterr().out
    assert "kernels  example-kernels, manifests " in shown
    assert "declared example-kernels: traps = false" in shown
    assert "NOT COVERED  1 case: traps = false" in shown
    assert "unused   waiver that tolerated nothing in these cases: example-kernels: shared_race at nowhere.cu" in shown
    assert "1 not covered" in shown
    assert g4kv(["reject", "--device", "emulated", "--provider", str(manifest), "--case", TRAPS[0]]) == 1
    assert "cover none of these cases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("smoke", "--variant", "portable"), ("smoke", "--kernels", ""), ("reject", "--kernels", "")],
)
def test_a_choice_among_built_in_kernels_does_not_go_with_a_provider(
    command: str, option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "prep_hd256.cu").write_text("")
    given = [option, value or str(tmp_path / "own")]
    record = tmp_path / "record.json"
    assert g4kv([command, "--provider", str(manifest), *given, "--json", str(record)]) == 2
    assert f"{option} is about the built-in kernels" in capsys.readouterr().err
    assert not record.exists()
