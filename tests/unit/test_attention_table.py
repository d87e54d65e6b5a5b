"""The attention table: what it covers, that its requests are well formed, and what its inputs mean."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention import prepared as prepared_module
from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.golden import attention_golden_cases
from g4kv_cli.cases.attention.inputs import expected_attention, make_attention_inputs
from g4kv_cli.cases.attention.merge import partial_results
from g4kv_cli.cases.attention.pool import other_pages, places_of
from g4kv_cli.cases.attention.prepared import prepared
from g4kv_cli.cases.attention.table import GROUPS, PAGE_SIZES, SPLIT_SWEEP, attention_cases
from g4kv_cli.cases.gate import gate_cases, recorded_cases
from g4kv_cli.entries import table as table_module
from g4kv_cli.entries.contract import STRICT
from g4kv_cli.entries.table import entries_for
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import can_fold
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.prefill_plan import check_requests, lay_out
from g4kv_cli.oracle.attention import merge_states

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
ALL = [case for geometry in GEOMETRIES.values() for case in attention_cases(geometry, seed=1)]


def _named(text: str, cases: Sequence[AttentionCase] = ALL) -> list[AttentionCase]:
    return [case for case in cases if text in case.id]


def _one(identifier: str) -> AttentionCase:
    (case,) = [case for case in ALL if case.id == identifier]
    return case


def _check(case: AttentionCase) -> None:
    """A plan takes the requests, and no page is used twice."""
    used = [page for request in case.requests for page in request.pages if not request.is_padding]
    assert len(used) == len(set(used))
    assert all(0 <= page < case.num_pages for page in used)
    requests = [
        PlanRequest(r.start_pos, r.q_len, r.pages, r.kv_len - (r.origin + len(r.pages) - 1) * case.page_size, r.origin)
        for r in case.requests
    ]
    shape = PlanShape(case.geometry.num_qo_heads, case.geometry.num_kv_heads, case.geometry.head_dim, case.page_size,
                      case.window_left, case.sm_scale, case.cta_tile_q)  # fmt: skip
    assert lay_out(check_requests(requests, shape, padding_page=case.padding_page)).bounds.num_tokens == case.num_tokens


def test_every_case_has_an_id_of_its_own_and_requests_that_a_plan_takes() -> None:
    ids = [case.id for case in ALL]
    assert len(set(ids)) == len(ids)
    for case in ALL:
        _check(case)
        assert case.id.startswith(f"attention/{case.geometry.name}/{case.form}/")
        assert ("hd256" in case.entry) == (case.geometry.head_dim == 256)


@pytest.mark.parametrize("page_size", [1, 5, 256, 4096])
def test_any_page_size(page_size: int) -> None:
    for case in attention_cases(GEOMETRIES["e2b-local"], seed=1, page_size=page_size):
        _check(case)
        assert case.page_size == page_size


def test_the_gate_has_both_sides_the_serving_loop_and_traps_last() -> None:
    cases = gate_cases([GEOMETRIES["12b-local"], GEOMETRIES["12b-global"]])
    kinds = [case.id.split("/")[0] for case in cases]
    assert set(kinds) == {"prep", "attention", "serve", "trap"}
    assert kinds.index("trap") > max(index for index, kind in enumerate(kinds) if kind != "trap")
    with pytest.raises(UsageError, match="--page-size"):
        gate_cases([GEOMETRIES["12b-local"]], page_size=0)


def test_tables_are_made_once_for_the_entries_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids_and_first(**options: Any) -> tuple[set[str], Any]:
        cases = gate_cases([GEOMETRIES["12b-local"]], **options)
        return {case.id for case in cases}, next(case for case in cases if case.id.startswith("attention/"))

    all_ids, first = ids_and_first()
    assert ids_and_first()[1] is first
    assert ids_and_first(seed=2)[1] != first
    assert ids_and_first(page_size=3)[1] != first
    others = tuple(one for one in table_module.ENTRIES if (one.operation, one.form) != ("attention", "decode"))
    monkeypatch.setattr(table_module, "ENTRIES", others)
    fewer, _ = ids_and_first()
    assert fewer < all_ids
    assert not any(name.startswith("attention/12b-local/decode/") for name in fewer)


@pytest.mark.parametrize("name", [geometry for geometry in GEOMETRIES if geometry.endswith("local")])
@pytest.mark.parametrize("form", ["decode", "decode-split"])
def test_needles_meet_every_offset_of_the_tiles_and_the_lengths_around_the_window(name: str, form: str) -> None:
    window = GEOMETRIES[name].window
    assert window is not None
    small = _one(f"attention/{name}/{form}/needle/window40")
    oldest = {request.kv_len - 40 for request in small.requests if request.kv_len > 40}
    for tile in (16, 48, 64):
        assert {position % tile for position in oldest} == set(range(tile))
    for size in (40, 333, window):
        lengths = {request.kv_len for request in _one(f"attention/{name}/{form}/needle/window{size}").requests}
        assert {size - 1, size, size + 1, 2 * size} <= lengths
        assert {(length - size) % 16 for length in lengths if length > size} == set(range(16))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_warps_first_rows_have_both_edges_at_every_offset_of_the_prefill_tiles(name: str) -> None:
    case = _one(f"attention/{name}/prefill/large-tile/needle/every-offset")
    assert case.geometry.gqa_group == 1
    first_rows = [row for r in case.requests for row in range(r.start_pos, r.kv_len, 16)]
    for tile in (48, 64, 128):
        assert {row % tile for row in first_rows} == set(range(tile))
        if case.window_left >= 0:
            assert min(first_rows) > case.window_left
            assert {(row - case.window_left) % tile for row in first_rows} == set(range(tile))


def test_the_issues_of_such_kernels_are_all_there() -> None:
    sweeps = _named("kv-sweep")
    for case in sweeps:
        seen = sorted(length for r in case.requests for length in range(r.start_pos + 1, r.kv_len + 1))
        assert seen == list(range(1, 201))
    for head_dim in (256, 512):
        splits = {case.num_splits for case in sweeps if case.geometry.head_dim == head_dim and "splits" in case.id}
        assert splits == set(SPLIT_SWEEP)
    for geometry in GEOMETRIES:
        cases = _named(f"attention/{geometry}/")
        for form in ("decode", "decode-split", "prefill"):
            of_form = [case for case in cases if case.form == form]
            assert {case.geometry.gqa_group for case in of_form} >= set(GROUPS)
            assert {case.page_size for case in of_form} >= set(PAGE_SIZES)
            assert any(case.geometry.num_kv_heads == GEOMETRIES[geometry].num_kv_heads for case in of_form)
            assert {case.check for case in of_form} >= {"oracle", "alone", "permuted", "refill"}
            assert any(case.is_sparse and case.pool_bytes >= 2 << 31 for case in of_form)
        prefill = [case for case in cases if case.form == "prefill"]
        assert any(r.q_len == 0 for case in prefill for r in case.requests)
        assert {case.cta_tile_q for case in prefill} == {None, 16, 64}
        split = [case for case in cases if case.form == "decode-split"]
        assert any(case.num_splits > sum(len(r.pages) for r in case.requests) for case in split)
        assert {case.empty_splits for case in split if case.check == "merge"} == {
            (), (0, 1), (4, 5), (0, 1, 2, 4, 5)
        }  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_what_a_few_bits_or_splits_do_not_hold_is_run_in_every_form(geometry: str) -> None:
    cases = _named(f"attention/{geometry}/")
    for form in dict.fromkeys(case.form for case in cases):
        tiles = {case.cta_tile_q for case in cases if case.form == form}
        for tile in tiles - {None} or tiles:
            of_form = [case for case in cases if (case.form, case.cta_tile_q) == (form, tile)]
            requests = [(case, request) for case in of_form for request in case.requests]
            for bits in (15, 16):
                assert any(request.kv_len > 1 << bits for _, request in requests)
            assert any(page >= 1 << 16 for _, request in requests for page in request.pages)
            # Of the entries that a query needs, one is far into its row.
            read = [(r.start_pos - max(0, c.window_left)) // c.page_size - r.origin for c, r in requests if r.q_len]
            assert max(read) > 1023
            assert any(not case.wants_lse for case in of_form)
            rising = [r.kv_len - r.first_seen(c.window_left) for c, r in requests if c.kind == "rising"]
            assert min(rising) >= 512
            rows = [case for case in of_form if case.id.endswith("/rows/past-int32")]
            assert {case.check for case in rows} == {"ends"}
            assert min(c.num_tokens * c.geometry.num_qo_heads * c.geometry.head_dim for c in rows) > 1 << 31
            # Where the last request's row of pages begins, and its queries.
            assert max(sum(len(r.pages) for r in case.requests[:-1]) for case in of_form) >= 1 << 16
            if tile is not None:
                assert max(case.num_tokens - case.requests[-1].q_len for case in of_form) >= 1 << 16
            if tile == 16:
                assert max(request.q_len * case.geometry.gqa_group for case, request in requests) > 256 * tile
            if GEOMETRIES[geometry].window is not None:
                assert any(case.window_left == 0 for case in of_form)
    assert any(case.check == "merge" and case.num_splits > 128 for case in cases)
    split = [case for case in cases if case.num_splits == 128]
    assert {case.check for case in split} == {"oracle", "merge"}
    for case in split:
        keys = max(r.kv_len - r.first_seen(case.window_left) for r in case.requests)
        assert keys >= (128 if case.check == "merge" else 127 * 16 + 1)


def _forms_of(stem: str) -> set[str]:
    """The attention forms of a recording's geometry, which its file name begins with."""
    geometry = GEOMETRIES[stem.partition("_")[0]]
    return {entry.form for entry in entries_for(geometry, "attention")}


def test_recorded_attention_of_every_file_that_has_it() -> None:
    cases = recorded_cases(GOLDEN)
    stems = {path.stem for path in GOLDEN.glob("*.npz")}
    attention = {case.id for case in cases if "/attention-" in case.id}
    assert attention == {
        f"golden/{stem}/{part}attention-{form}"
        for stem in stems
        if not stem.endswith("far")
        for form in _forms_of(stem)
        for part in ("", "folded/")
        if not part or can_fold(GEOMETRIES[stem.partition("_")[0]])
    }
    for case in attention_golden_cases(GOLDEN):
        _check(case)


def test_a_recording_whose_attention_is_not_as_described(tmp_path: Path) -> None:
    def written(edit: str, value: object) -> Path:
        with np.load(GOLDEN / "12b-local_decode.npz") as archive:
            arrays = dict(archive)
        if value is None:
            del arrays[edit]
        else:
            arrays[edit] = np.asarray(value)
        path = tmp_path / "12b-local_decode.npz"
        np.savez(path, **arrays)
        return path

    for edit, value, words in (
        ("v_cache", None, "has attention arrays, but no v_cache"),
        (
            "k_cache",
            np.zeros((3, 8, 256), np.uint16),
            r"k_cache must be uint16 \[41, 8, 256\], got uint16 \[3, 8, 256\]",
        ),
        ("attn_ref_f32", np.full((1, 16, 256), np.nan, np.float32), "attn_ref_f32 holds a value that is not finite"),
    ):
        with pytest.raises(UsageError, match=words):
            attention_golden_cases(written(edit, value))


# --- inputs -------------------------------------------------------------------------------------------------------


def test_inputs_are_repeatable_and_differ_between_requests_heads_and_seeds() -> None:
    case = _one("attention/12b-local/decode/ragged")
    first, second = make_attention_inputs(case), make_attention_inputs(case)
    assert first.q.tobytes() == second.q.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first.k, second.k, strict=True))
    other = make_attention_inputs(dataclasses.replace(case, seed=2))
    assert first.q.tobytes() != other.q.tobytes()
    for rows in (first.k, first.v):
        assert len(np.unique(rows[-1].reshape(-1, 256).view(np.uint16), axis=0)) == rows[-1].shape[0] * 8
        for one, other_rows in itertools.combinations(rows, 2):
            shared = min(len(one), len(other_rows))
            assert not (one[:shared] == other_rows[:shared]).all(axis=-1).any()


def test_what_is_kept_for_the_next_cases_is_what_each_would_make() -> None:
    sweep = [case for case in _named("decode-split/kv-sweep/1-200") if "12b-local" in case.id]
    assert len({case.num_splits for case in sweep}) == len(sweep) > 2
    assert len({case.requests for case in sweep}) == len(sweep)  # other pages each time
    first = prepared(sweep[0], STRICT)
    assert all(prepared(case, STRICT) is first for case in sweep[1:])
    tensors = make_attention_inputs(sweep[-1])
    for kept, made in zip((first[0].q, *first[0].k, *first[0].v), (tensors.q, *tensors.k, *tensors.v), strict=True):
        assert kept.tobytes() == made.tobytes()
    assert first[0].first_keys == tensors.first_keys
    expected = expected_attention(sweep[-1], tensors)
    assert first[1].value.tobytes() == expected.value.tobytes()
    assert first[1].rounding.limit.tobytes() == expected.rounding.limit.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        first[0].q[0, 0, 0] = 0


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"kind": "equal"}, {"window_left": 3}, {"sm_scale": 0.5}, {"geometry": "31b-local"}]
)
def test_nothing_is_kept_for_a_case_that_asks_for_something_else(change: dict[str, Any]) -> None:
    case = _one("attention/12b-local/decode/ragged")
    other = dataclasses.replace(case, **{name: GEOMETRIES.get(value, value) for name, value in change.items()})
    tensors, expected = prepared(other, STRICT)
    assert tensors is not prepared(case, STRICT)[0]
    made = make_attention_inputs(other)
    assert tensors.q.tobytes() == made.q.tobytes()
    assert expected.value.tobytes() == expected_attention(other, made).value.tobytes()
    promised = prepared(case, dataclasses.replace(STRICT, lse_weights="bf16"))[1]
    assert (promised.lse_limit > prepared(case, STRICT)[1].lse_limit).all()


def test_tensors_too_large_to_keep_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _one("attention/12b-local/decode/ragged")
    monkeypatch.setattr(prepared_module, "_kept", OrderedDict())
    monkeypatch.setattr(prepared_module, "KEPT_BYTES", 1000)
    assert prepared(case, STRICT)[0] is not prepared(case, STRICT)[0]


def test_a_needle_that_is_seen_outweighs_the_rest_and_one_that_is_not_would_outweigh_it() -> None:
    case = _one("attention/12b-local/decode/needle/window1024")
    tensors = make_attention_inputs(case)
    index = next(i for i, request in enumerate(case.requests) if request.kv_len == 1030)
    q, k = tensors.q[index, 0].astype(np.float64), tensors.k[index][:, 0].astype(np.float64)
    assert (tensors.first_keys[index], len(k)) == (5, 1025)  # positions 5 .. 1029: 5 is at distance 1024
    scores = k @ q
    seen = np.exp(scores[1:])
    assert (seen[0] + seen[-1]) / seen.sum() > 0.8
    assert np.exp(scores[0]) / (np.exp(scores[0]) + seen.sum()) > 0.9


def test_scores_that_rise_slowly_have_a_new_maximum_in_every_tile_and_factors_near_one() -> None:
    case = _one("attention/12b-global/decode/scores/rising")
    tensors = make_attention_inputs(case)
    scores = tensors.k[0][:, 0].astype(np.float64) @ tensors.q[0].astype(np.float64).T
    assert (np.diff(scores, axis=0) > 0).all()
    for tile in (16, 48, 64):
        maxima = scores[: len(scores) // tile * tile].reshape(-1, tile, scores.shape[1]).max(axis=1)
        factors = np.exp(-np.diff(maxima, axis=0))
        assert (factors > 0.99).all()
        assert (factors < 1 - 2**-12).all()


def test_scores_of_80_and_keys_that_are_all_equal() -> None:
    large = _one("attention/12b-local/decode/scores/to-80")
    tensors = make_attention_inputs(large)
    scores = np.einsum("hd,kd->hk", tensors.q[0].astype(np.float64), tensors.k[0][:, 0].astype(np.float64))
    assert 75 < scores.max() < 85
    assert -85 < scores.min() < -75
    equal = _one("attention/12b-local/decode/scores/all-equal")
    tensors = make_attention_inputs(equal)
    assert all((k == k[0]).all() for k in tensors.k)
    value = expected_attention(equal, tensors).value[0, 0]
    np.testing.assert_allclose(value, tensors.v[0][:, 0].astype(np.float64).mean(axis=0), rtol=1e-9)


def test_places_follow_the_row_of_pages_from_its_origin() -> None:
    request = KvRequest(kv_len=23, q_len=1, origin=2, pages=(9, 4, 7))  # pages of 8: logical pages 2, 3, 4 hold 16 ..
    pages, slots = places_of(KvRequest(39, 1, 2, (9, 4, 7)), 22, 8)
    assert pages.tolist() == [9] * 2 + [4] * 8 + [7] * 7
    assert slots.tolist() == [6, 7, *range(8), *range(7)]
    pages, slots = places_of(request, 16, 8)
    assert pages.tolist() == [9] * 7
    assert slots.tolist() == list(range(7))


def test_permuted_pages_all_move_and_stay_apart() -> None:
    for case in _named("permuted"):
        moved = other_pages(case)
        before = [page for request in case.requests for page in request.pages]
        after = [page for request in moved.requests for page in request.pages]
        assert len(set(after)) == len(after)
        assert all(0 <= page < case.num_pages for page in after)
        assert all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("which", ["none", "first", "last", "all-but-one"])
def test_partial_results_merge_to_the_whole_whichever_split_is_empty(which: str) -> None:
    case = _one(f"attention/12b-local/decode-split/merge/empty-{which}")
    tensors = make_attention_inputs(case)
    outs, maxima, sums = (part.astype(np.float64) for part in partial_results(case, tensors))
    empty = np.isneginf(maxima)
    assert empty[:, :, list(case.empty_splits)].all()
    assert np.isnan(outs[empty]).all()
    assert (sums[empty] == 0).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        out, lse = merge_states(outs / sums[..., None], case.sm_scale * maxima + np.log(sums))
    expected = expected_attention(case, tensors)
    np.testing.assert_allclose(out, expected.value, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-6)
