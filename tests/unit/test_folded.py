"""Folded rows of K: the oracle's formulas against those of split rows, what the tables hold, who refuses them."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.golden import attention_golden_cases, check_recorded, recorded_tensors
from g4kv_cli.cases.attention.inputs import expected_attention, make_attention_inputs, stored_rows
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.cases.gate import FOLDED_SAMPLE, gate_cases
from g4kv_cli.cases.prep.closed_form import closed_form_expected
from g4kv_cli.cases.prep.golden import read_recording
from g4kv_cli.cases.prep.table import prep_cases
from g4kv_cli.cases.serve.table import serve_cases
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.entries.entry import choose_variant
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import CheckedRequest
from g4kv_cli.entries.table import ENTRIES, entry_for
from g4kv_cli.errors import DeviceUnavailable, UsageError
from g4kv_cli.inputs import make_inputs, turning_columns
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import can_fold
from g4kv_cli.model.pool_order import OWN_ORDER
from g4kv_cli.oracle.attention import attend
from g4kv_cli.oracle.bfloat16 import BF16, round_to_bf16
from g4kv_cli.oracle.compare import ROWS, Axes
from g4kv_cli.oracle.prep import rms_norm
from g4kv_cli.oracle.reference import expected_folded_query, expected_rotated, expected_value_rows
from g4kv_cli.oracle.tolerance import HALF_ULP_RELATIVE

FOLDING = tuple(name for name, geometry in GEOMETRIES.items() if can_fold(geometry))
GLOBAL = GEOMETRIES["12b-global"]


def _inputs(kind: str, positions: tuple[int, ...] = (3, 1, 2, 90)) -> Any:
    return make_inputs(
        GLOBAL, kind, seed=5, positions=positions, rotary_dim=512, table_positions=max(positions) + 1,  # type: ignore[arg-type]
        with_v=False, folded=True,
    )  # fmt: skip


def _turning() -> Any:
    return np.isin(np.arange(512), turning_columns(GLOBAL))


def _folded_query(inputs: Any) -> Any:
    turning = turning_columns(GLOBAL)
    return expected_folded_query(inputs.q, inputs.q_weight, inputs.k_weight, inputs.cos, inputs.sin, turning)


def test_the_geometries_that_fold() -> None:
    assert FOLDING == ("12b-global", "26b-a4b-global", "31b-global")


def test_folding_changes_no_score() -> None:
    """In float64, q K of split rows is q' K over the columns that turn and q' V over the others."""
    inputs = _inputs("random")
    q = expected_rotated(inputs.q, inputs.q_weight, inputs.cos, inputs.sin).value[:, 0]
    k = expected_rotated(inputs.k, inputs.k_weight, inputs.cos, inputs.sin).value[:, 0]
    v, turning = expected_value_rows(inputs.k).value[:, 0], _turning()
    folded = _folded_query(inputs).value[:, 0]
    scores = folded[:, turning] @ k[:, turning].T + folded[:, ~turning] @ v[:, ~turning].T
    np.testing.assert_allclose(scores, q @ k.T, rtol=1e-12, atol=1e-12)
    assert np.abs(scores).max() > 1


def test_a_folded_query_is_rounded_once() -> None:
    """The rounded value is within its limit; a kernel that rounds the query before it takes K's weight is not."""
    inputs = _inputs("random", tuple(range(40)))
    expected, still = _folded_query(inputs), ~_turning()
    rounded = round_to_bf16(expected.value).astype(np.float64)
    assert (np.abs(rounded - expected.value) <= expected.limit).all()
    first = round_to_bf16(rms_norm(inputs.q, inputs.q_weight)).astype(np.float64)
    twice = round_to_bf16(first * inputs.k_weight.astype(np.float64)).astype(np.float64)
    refused = np.abs(twice - expected.value)[..., still] > expected.limit[..., still]
    assert 0.2 < refused.mean() < 0.6


def test_folded_closed_form_agrees_with_the_oracle() -> None:
    inputs = _inputs("closed-form", (1, 2, 3, 9, 5))
    q, k, v = closed_form_expected(GLOBAL, inputs.positions, 512, False, folded=True)
    whole_k = expected_rotated(inputs.k, inputs.k_weight, inputs.cos, inputs.sin)
    oracle = (_folded_query(inputs), whole_k.columns(turning_columns(GLOBAL)), expected_value_rows(inputs.k))
    for written_down, computed in zip((q, k, v), oracle, strict=True):
        np.testing.assert_array_equal(round_to_bf16(computed.value), written_down.value)
    assert k.value.shape[-1] == 128


@pytest.mark.parametrize("kind", ["spread", "needles", "large", "equal", "rising", "low", "zero"])
def test_attention_over_what_a_folded_pool_holds(kind: str) -> None:
    """What is stored gives the scores that the oracle takes K for: V's columns where a row of K has none."""
    case = next(
        one for one in attention_cases(GLOBAL, seed=3, kv_format="folded") if one.kind == kind and one.check == "oracle"
    )
    tensors = make_attention_inputs(case)
    split = make_attention_inputs(_split(case))
    for k, v, of_split in zip(tensors.k, tensors.v, split.k, strict=True):
        np.testing.assert_array_equal(k, of_split)  # planted scores are those of split rows
        stored_k, stored_v = stored_rows(case, k, v)
        whole = stored_v.copy()
        whole[..., turning_columns(case.geometry)] = stored_k
        np.testing.assert_array_equal(whole, k)
        assert stored_k.shape[-1] == 128
        assert (stored_v[..., :64] != k[..., :64]).any()  # V has its own columns where K turns


def _split(case: AttentionCase) -> AttentionCase:
    (found,) = (one for one in attention_cases(GLOBAL, seed=3) if one.id == case.id.replace("/folded/", "/"))
    return found


def test_folding_moves_attention_by_no_more_than_the_roundings_of_its_queries_and_keys() -> None:
    """Rows of either format against attention without a rounding: h each of q and K (split), of q' and V (folded)."""
    inputs = _inputs("random", tuple(range(64)))
    weight = (inputs.k_weight.astype(np.float32) * 0.05).astype(BF16)  # a softmax of many keys
    turning = turning_columns(GLOBAL)
    exact_q = expected_rotated(inputs.q, inputs.q_weight, inputs.cos, inputs.sin).value
    exact_k = expected_rotated(inputs.k, weight, inputs.cos, inputs.sin).value
    v = round_to_bf16(expected_value_rows(inputs.k).value)
    folded = expected_folded_query(inputs.q, inputs.q_weight, weight, inputs.cos, inputs.sin, turning).value
    folded_k = v.copy()
    folded_k[..., turning] = round_to_bf16(exact_k)[..., turning]

    def out(q: Any, k: Any) -> Any:
        return attend(q[-1:], k, v, first_key=0, window_left=-1, sm_scale=1.0).value

    exact = out(exact_q, exact_k)
    moved = {
        "split": out(round_to_bf16(exact_q), round_to_bf16(exact_k)),
        "folded": out(round_to_bf16(folded), folded_k),
    }
    off = {name: float(np.sqrt(np.mean(np.square(value - exact)))) for name, value in moved.items()}
    size = float(np.sqrt(np.mean(np.square(exact))))
    # sum_d |q_d k_d| (h + h), h = 2^-8, bounds what the roundings do to a score, and e^it - 1 what they do to a weight.
    most = np.expm1((np.abs(exact_q[-1]) @ np.abs(exact_k[:, 0]).T).max() * 2 * 2.0**-8)
    assert 0 < off["folded"] < most * float(np.abs(v.astype(np.float64)).max())
    assert off["folded"] < 1.5 * off["split"] < 0.1 * size


def test_a_default_run_has_some_of_the_folded_cases_of_each_form() -> None:
    whole = [
        case
        for name in FOLDING
        for table in (prep_cases, attention_cases, serve_cases)
        for case in table(GEOMETRIES[name], seed=1, kv_format="folded")  # type: ignore[operator]
    ]
    sample = [case for case in gate_cases([GEOMETRIES[name] for name in FOLDING]) if "/folded/" in case.id]
    assert {case.id for case in sample} < {case.id for case in whole}
    for pattern in FOLDED_SAMPLE:
        assert any(fnmatch.fnmatchcase(case.id, f"*/folded/{pattern}") for case in sample), pattern
    for name in FOLDING:
        forms = {tuple(case.id.split("/")[:3]) for case in sample if case.geometry.name == name}
        paged = [entry for entry in ENTRIES if entry.has_pool and entry.serves(GEOMETRIES[name])]
        assert forms == {(entry.operation, name, entry.form) for entry in paged} | {("serve", name, "folded")}
    assert not any("folded" in case.id for case in gate_cases([GEOMETRIES["12b-local"], GEOMETRIES["e2b-global"]]))


def test_one_format_alone() -> None:
    both = {case.id for case in gate_cases([GLOBAL], whole=True)}
    split, folded = ({case.id for case in gate_cases([GLOBAL], kv_format=one)} for one in ("split", "folded"))
    assert split | folded == both
    assert not split & folded
    assert all("/folded/" in name for name in folded)
    assert len(folded) > 200
    with pytest.raises(UsageError, match="12b-local has no folded format of K and V"):
        gate_cases([GEOMETRIES["12b-local"]], kv_format="folded")


def test_every_entry_with_folded_rows_has_a_portable_kernel_for_them() -> None:
    for entry in ENTRIES:
        portable = [kernel for kernel in entry.kernels if not kernel.arch and "folded" in kernel.kv_formats]
        assert bool(portable) == ("folded" in entry.kv_formats), entry.name
        shapes = {(kernel.tile_rows, kernel.rows_per_warp) for kernel in portable}
        split = {(k.tile_rows, k.rows_per_warp) for k in entry.kernels if not k.arch and "split" in k.kv_formats}
        assert not portable or shapes == split, entry.name


def test_kernels_are_taken_by_the_format_of_the_pool_and_others_say_why_not() -> None:
    entry, device = entry_for(GLOBAL, "attention", "prefill"), EmulatedDevice("sm_90")
    taken = {
        kv_format: choose_variant(entry, device, tile_rows=64, kv_format=kv_format).symbol  # type: ignore[arg-type]
        for kv_format in ("split", "folded")
    }
    assert taken == {
        "split": "batch_prefill_paged_hd512_tile64",
        "folded": "batch_prefill_paged_folded_hd512_tile64",
    }
    alone = "batch_prefill_paged_hd512_tile64_cluster1"
    with pytest.raises(DeviceUnavailable, match="tile64_cluster1 takes split rows of K and V, not folded ones"):
        choose_variant(entry, device, tile_rows=64, kv_format="folded", forced=alone)


class _Spy:
    name, pool_order = "theirs", OWN_ORDER

    def contract_of(self, entry: str) -> Contract:
        return STRICT

    def launch(self, request: CheckedRequest) -> None:
        raise AssertionError("a folded request reached a provider")


@pytest.mark.parametrize("table", [prep_cases, attention_cases])
def test_another_s_kernels_do_not_cover_folded_rows(table: Any) -> None:
    from g4kv_cli.cases.case import RunContext

    case = next(one for one in table(GLOBAL, seed=1, kv_format="folded") if "random" in one.id or "ragged" in one.id)
    library = KernelLibrary(EmulatedDevice("sm_90"), provider=_Spy())
    result = case.run(RunContext(library))
    assert (result.status, result.reason) == (
        "not covered", "theirs: its kernels take split rows of K and V, not folded ones",
    )  # fmt: skip


GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.mark.parametrize("stem", ["12b-global_short", "31b-global_offset"])
def test_recorded_rows_are_what_the_fold_s_limit_takes_them_for(stem: str) -> None:
    """In the columns that do not turn recorded q and K are the exact ones rounded once, as FOLD_SHARE says."""
    recording = read_recording(GOLDEN / f"{stem}.npz")
    still = ~_turning()
    for x, weight, recorded in (
        (recording.q, recording.q_weight, recording.q_expect), (recording.k, recording.k_weight, recording.k_expect),
    ):  # fmt: skip
        exact, got = rms_norm(x, weight)[..., still], recorded[..., still].astype(np.float64)
        assert (np.abs(got - exact) <= HALF_ULP_RELATIVE * np.abs(exact) * (1 + 1e-3)).all()


def test_recorded_attention_refuses_a_query_without_the_weight_of_k() -> None:
    case = next(one for one in attention_golden_cases(GOLDEN / "12b-global_short.npz") if one.kv_format == "folded")
    tensors, recording = recorded_tensors(case), read_recording(GOLDEN / "12b-global_short.npz")
    expected = expected_attention(case, tensors)

    def findings(q: Any) -> list[Any]:
        got = expected_attention(case, dataclasses.replace(tensors, q=q)).value.astype(BF16)
        return list(check_recorded(case, tensors, expected, got, Axes(ROWS)))

    assert findings(tensors.q) == []
    assert len(findings(recording.q_expect)) == 2
