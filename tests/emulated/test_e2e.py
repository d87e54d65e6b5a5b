"""Recorded tiny models replayed on the emulated device, and the long walks. What is slow is cut to a few steps here;
``g4kv smoke --case 'e2e/*'`` runs all of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from seeding import seed

from g4kv_cli.cases.e2e import replay
from g4kv_cli.cases.e2e.caches import as_split_rows
from g4kv_cli.cases.e2e.every import end_to_end_cases
from g4kv_cli.cases.e2e.execute import run_replay_case
from g4kv_cli.cases.e2e.far import FarCase, far_cases, run_far_case
from g4kv_cli.cases.e2e.localise import relative_rms
from g4kv_cli.cases.e2e.recorded_model import Float32
from g4kv_cli.cases.e2e.table import ReplayCase
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.inputs import make_inputs, turning_columns
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import round_to_bf16
from g4kv_cli.oracle.reference import expected_folded_query, expected_rotated, expected_value_rows
from g4kv_cli.records.run import CaseResult

MODELS = Path(__file__).resolve().parent.parent / "golden" / "greedy"
CASES = {case.id: case for case in end_to_end_cases(MODELS) if isinstance(case, ReplayCase)}
FAR = {case.id: case for case in far_cases()}
STEPS = 3
"""The prefill and two decode steps: every launch of a variant."""


@pytest.fixture
def library() -> Iterator[KernelLibrary]:
    device = open_device("emulated")
    yield KernelLibrary(device)
    device.close()


@pytest.mark.parametrize("name", ["12b_p7", "31b_p40", "e4b_p23"])
def test_a_model_gives_all_recorded_tokens_and_logits(name: str, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    code = g4kv(["smoke", "--device", "emulated", "--model-golden", str(MODELS / f"{name}.npz"),
                 "--case", "e2e/*/default", "--json", str(record)])  # fmt: skip
    (case,) = json.loads(record.read_text())["cases"]
    assert code == 0, case
    assert (case["id"], case["status"], case["geometry"]) == (f"e2e/{name}/default", "passed", name)
    assert len(case["output_digest"]) == 64


def _short(name: str, steps: int = STEPS) -> ReplayCase:
    return dataclasses.replace(CASES[name], steps=steps)


def _require_green(result: CaseResult) -> str:
    assert result.status == "passed", result
    return result.output_digest


def test_every_way_of_serving_gives_the_same_verdict(library: KernelLibrary) -> None:
    prefix = "e2e/e4b_p23/"
    digests = {
        case_id.removeprefix(prefix): _require_green(run_replay_case(_short(case_id), library, ""))
        for case_id, case in CASES.items()
        if case_id.startswith(prefix) and case.steps == 48
    }
    assert len(digests) == 11
    # Where pages lie changes no bit.
    assert digests["default"] == digests["page-size/1"] == digests["page-size/64"]
    # The prefill entry at one token a request runs the kernel of form (b).
    assert digests["default"] == digests["decode/prefill-entry"]
    # Chunks of one token are cut into other tiles: the bits show that this was another run.
    assert digests["default"] != digests["prefill/chunk1"]


def test_folded_pools_give_the_recorded_tokens(library: KernelLibrary) -> None:
    """The global layers' rows are folded, the local ones' split; the bits are those of another run."""
    digests = {}
    for name in ("default", "folded", "folded/mixed/page1-chunk5-splits2"):
        library.launched.clear()
        digests[name] = _require_green(run_replay_case(_short(f"e2e/12b_p7/{name}"), library, ""))
        folded = {symbol for symbol in library.launched if "folded" in symbol}
        assert bool(folded) == name.startswith("folded")
        assert not any("hd256" in symbol for symbol in folded)
    assert digests["default"] != digests["folded"]


def test_what_is_told_of_folded_rows_is_what_split_rows_would_be() -> None:
    geometry = GEOMETRIES["12b-global"]
    inputs = make_inputs(
        geometry, "random", seed=4, positions=range(5, 9), rotary_dim=512, table_positions=9, with_v=False, folded=True
    )
    turning = turning_columns(geometry)
    q, k = (
        expected_rotated(rows, weight, inputs.cos, inputs.sin).value
        for rows, weight in ((inputs.q, inputs.q_weight), (inputs.k, inputs.k_weight))
    )
    folded = expected_folded_query(inputs.q, inputs.q_weight, inputs.k_weight, inputs.cos, inputs.sin, turning)
    v = round_to_bf16(expected_value_rows(inputs.k).value)
    told = as_split_rows(geometry, inputs.k_weight, round_to_bf16(folded.value), round_to_bf16(k[..., turning]), v)
    for got, want in zip(told, (q, k), strict=True):
        assert relative_rms(got, want) < 0.005
    wrong = as_split_rows(geometry, inputs.k_weight, round_to_bf16(q), round_to_bf16(k[..., turning]), v)
    assert relative_rms(wrong[0], q) > 0.05


def test_companions_change_no_bit(library: KernelLibrary) -> None:
    _require_green(run_replay_case(_short("e2e/e4b_p23/batch/3-requests", 5), library, ""))


def test_models_take_turns(library: KernelLibrary) -> None:
    case = dataclasses.replace(CASES["e2e/turns/12b_p7+31b_p40"], paths=(MODELS / "12b_p7.npz", MODELS / "e4b_p23.npz"))
    _require_green(run_replay_case(dataclasses.replace(case, steps=STEPS), library, ""))


def test_a_bit_that_a_companion_changes_is_red(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the lone run can fail: here the first logit of an accompanied request is off by one unit."""
    decode = replay._Replay._decode

    def disturbed(self: replay._Replay) -> Float32:
        logits = decode(self)
        if self.guests:
            logits.view("u4")[0, 0] += 1
        return logits

    monkeypatch.setattr(replay._Replay, "_decode", disturbed)
    result = run_replay_case(_short("e2e/e4b_p23/batch/2-requests"), library, "")
    assert result.status == "failed"
    (found,) = result.mismatches
    assert found.operation == "logits of the same request, alone and accompanied"
    assert found.first == {"step": 1, "row": 0, "token_id": 0}


def test_a_wrong_companion_is_red(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A companion is judged too: by the float32 formula, here for other tokens than it was fed."""
    reference = replay.reference_logits
    monkeypatch.setattr(replay, "reference_logits", lambda model, ids: reference(model, (ids + 1) % 128))
    result = run_replay_case(_short("e2e/e4b_p23/batch/2-requests"), library, "")
    assert result.status == "failed"
    assert result.mismatches[0].operation.startswith("logits of companion ")


def test_a_fault_of_the_device_names_step_and_layer(tmp_path: Path) -> None:
    trap = "if (page < 0 || page >= p.num_pages) __trap();"
    early = "if (kForm == Form::paged_decode && p.layout.head_dim == 512) __trap();"
    seed(tmp_path, (("prep_body.cuh", trap, early),), ("serve/e4b-local/replay", "serve/e4b-global/replay"))
    device = open_device("emulated")
    result = run_replay_case(_short("e2e/e4b_p23/default"), KernelLibrary(device, tmp_path), "")
    device.close()
    assert result.status == "failed"
    assert result.reason.startswith("step 1, layer 5: trap: prep_body.cuh:")


# --- the long walks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FAR))
def test_a_long_walk(name: str, library: KernelLibrary) -> None:
    _require_green(run_far_case(FAR[name], library, ""))


def test_the_walks_reach_the_real_window_and_the_last_position() -> None:
    for name, window, positions in (("12b-local", 1024, 262144), ("e4b-local", 512, 131072)):
        near, far = FAR[f"e2e/far/{name}/from-zero"], FAR[f"e2e/far/{name}/last-positions"]
        assert near.geometry.window == far.geometry.window == window
        # Attention begins with the whole past in sight and ends with pages released.
        assert near.walk.written < window < near.walk.written + near.walk.asked
        assert near.walk.end > window + 16
        assert far.walk.end == positions
        assert far.walk.written >= window
    assert FAR["e2e/far/12b-global/from-zero"].geometry.window is None
    assert FAR["e2e/far/12b-global/last-positions"].walk.end == 262144


def _red_walk(tmp_path: Path, source: str, old: str, new: str, case: FarCase) -> CaseResult:
    seed(tmp_path, ((source, old, new),), (f"serve/{case.geometry.name}/replay",))
    device = open_device("emulated")
    result = run_far_case(case, KernelLibrary(device, tmp_path), "")
    device.close()
    assert result.status == "failed", result
    return result


def test_a_window_of_one_key_more_is_seen_at_the_real_window(tmp_path: Path) -> None:
    result = _red_walk(tmp_path, "attention_tile.cuh", "position - tile.window_left);",
                       "position - tile.window_left - 1);", FAR["e2e/far/e4b-local/from-zero"])  # fmt: skip
    assert result.mismatches[0].operation.startswith("attention, ")
    assert result.mismatches[0].first["position"] >= 512


def test_a_position_cut_to_16_bits_is_seen_far_out(tmp_path: Path) -> None:
    edit = ("prep_body.cuh", "load_rotation<kHeadDim, kLanes>(p, position, lane);",
            "load_rotation<kHeadDim, kLanes>(p, position & 0xffff, lane);")  # fmt: skip
    result = _red_walk(tmp_path, *edit, FAR["e2e/far/e4b-global/last-positions"])
    assert "uninitialised" in result.reason
