"""The end-to-end gate can fail: classic mistakes, seeded one by one, turn a replay red, at the right step and layer.

A kernel's mistake is an exact replacement of text in a copy of its source, run as ``--kernels`` runs it; a text that is
no longer there fails the test. ``step`` is the first step outside the limits when the same mistakes were made in an
independent NumPy reader of these recordings (tests/golden/greedy/README.md): the gate has to be red by then. Mistakes
of the caller (pages, plan, tables) are seeded in doubles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from seeding import Edits, seed

from g4kv_cli.cases.e2e import family_launches
from g4kv_cli.cases.e2e.caches import FamilyCache, PageList
from g4kv_cli.cases.e2e.execute import run_replay_case
from g4kv_cli.cases.e2e.family_launches import FamilyLaunches
from g4kv_cli.cases.e2e.table import ReplayCase, replay_cases
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.arguments import PagedBatch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.inputs import BF16
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.records.run import CaseResult

MODELS = Path(__file__).resolve().parent.parent / "golden" / "greedy"

E4B, E12B = "e4b_p23", "12b_p7"
PREP, TILE = "prep_body.cuh", "attention_tile.cuh"
LOCAL_LAYER, GLOBAL_LAYER = 0, 5
"""The first layer that a mistake of both families, or of the local one, can show in; the only global one."""

PREP_IS_OFF, ATTENTION_IS_OFF = "is off: prep", "attention is off"
Q, K, V = (f"{part} {PREP_IS_OFF}" for part in "qkv")

BOTH_FAMILIES = {
    model: tuple(f"serve/{size}-{family}/replay" for family in ("local", "global"))
    for model, size in ((E4B, "e4b"), (E12B, "12b"))
}
"""What a replay launches is what serving both families of the model launches."""


@dataclass(frozen=True)
class Fault:
    """``edits`` are (source, text, replacement). ``says`` stands in the localisation, besides ``layer``."""

    name: str
    edits: Edits
    step: int
    layer: int
    says: str
    model: str = E4B


def _edit(old: str, new: str, source: str = PREP) -> Edits:
    return ((source, old, new),)


_VALUE = "y[chunk][i] *= inv_rms;"
_ROTATE = "  rotate_whole_head<kHeadDim, kLanes>(rotation, lane, y);\n  store_row"
_FIRST_VISIBLE = "return tile.window_left < 0 ? 0 : max(0, position - tile.window_left);"
_STORE_V_EQ_K = (
    "if (writes_v) store_value_row<kHeadDim, kLanes>(value_out + r * kHeadDim, raw_rows[step], inv_rms, lane);"
)
_HEAD = "const int head = tile.kv_head * tile.group + packed % tile.group;"
_SEEN = "score = key <= newest && key >= oldest ? score"
_SLOT = "const int slot = key - logical_page * p.layout.page_size;"
_SOFTMAX = "  const float new_max = fmaxf(rows.max[half], tile_max);"


def _rows_of_v(body: str) -> str:
    """V rows of a K=V layer, made in another way from y (the normed, weighted K)."""
    return f"""if (writes_v) {{
          float y[Row<kHeadDim, kLanes>::kChunks][8], sum = 0.0f;
          for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c) {{
            normed8(raw_rows[step].packed[c], inv_rms, packed_weight.packed[c], y[c]);
            for (int i = 0; i < 8; ++i) sum = fmaf(y[c][i], y[c][i], sum);
          }}
          const float s = rsqrtf(lane_sum<kLanes>(sum) * (1.0f / kHeadDim) + p.eps);
          {body}
          store_row<kHeadDim, kLanes>(value_out + r * kHeadDim, y, lane);
        }}"""


_WEIGHTED_V = (
    "{ const Row<kHeadDim, kLanes> w = load_row<kHeadDim, kLanes>(p.k_weight, lane);\n"
    "        float y[Row<kHeadDim, kLanes>::kChunks][8];\n"
    "        for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c)\n"
    "          normed8(raw_rows[step].packed[c], inv_rms, w.packed[c], y[c]);\n"
    "        store_row<kHeadDim, kLanes>(out + r * kHeadDim, y, lane); }"
)
_STORE_V = "store_value_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step], inv_rms, lane);"
_SCALE_Y = "for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c) for (int i = 0; i < 8; ++i) y[c][i]"

PREP_FAULTS = (
    Fault("v_from_normed_k", _edit(_STORE_V_EQ_K, _rows_of_v(f"{_SCALE_Y} *= s;")), 0, GLOBAL_LAYER, V, E12B),
    Fault("v_is_k", _edit(_STORE_V_EQ_K, _rows_of_v("rotate_whole_head<kHeadDim, kLanes>(rotation, lane, y);")),
          0, GLOBAL_LAYER, V, E12B),
    Fault("v_roped", _edit(_STORE_V_EQ_K, _rows_of_v(
        "for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c) unpack8(raw_rows[step].packed[c], y[c]);"
        f"{_SCALE_Y} *= inv_rms; rotate_whole_head<kHeadDim, kLanes>(rotation, lane, y);")), 0, GLOBAL_LAYER, V, E12B),
    Fault("v_weighted", _edit(_STORE_V, _WEIGHTED_V), 0, LOCAL_LAYER, V),
    Fault("missing_v_norm", _edit(_VALUE, "y[chunk][i] *= 1.0f;"), 0, LOCAL_LAYER, V),
    Fault("missing_v_norm_global", _edit(_VALUE, "y[chunk][i] *= kHeadDim == 512 ? 1.0f : inv_rms;"),
          0, GLOBAL_LAYER, V),
    Fault("missing_v_norm_global, V from K", _edit(_VALUE, "y[chunk][i] *= kHeadDim == 512 ? 1.0f : inv_rms;"),
          0, GLOBAL_LAYER, V, E12B),
    Fault("rope_pairs_d_d64", (
        (PREP, "if (p.rotary_dim != kHeadDim) {", "if (p.rotary_dim == 512) {"),
        (PREP, "const int half = p.rotary_dim / 2;", "const int half = 64;"),
        (PREP, "if (column < p.rotary_dim) {", "if (column < 128) {")), 0, GLOBAL_LAYER, Q),
    Fault("rope_interleaved", _edit(
        "const float partner = __shfl_xor_sync(kAllLanes, y[0][i], kWarpSize / 2);\n"
        "      y[0][i] = rotate(y[0][i], partner, cos[0][i], sin[0][i], lane < kWarpSize / 2);",
        "const float partner = y[0][i ^ 1], own = y[0][i];\n"
        "      if (i % 2 == 0) y[0][i] = rotate(own, partner, cos[0][i], sin[0][i], true);\n"
        "      if (i % 2 == 0) y[0][i + 1] = rotate(partner, own, cos[0][i], sin[0][i], false);"),
        0, LOCAL_LAYER, Q),
    Fault("rope_sign", _edit("first_half ? -cross : cross", "first_half ? cross : -cross"), 0, LOCAL_LAYER, Q),
    Fault("no_rope_global", _edit(_ROTATE, f"  if (kHeadDim == 256){_ROTATE}"), 0, GLOBAL_LAYER, Q),
    Fault("no_rope_local", _edit(_ROTATE, f"  if (kHeadDim == 512){_ROTATE}"), 0, LOCAL_LAYER, Q),
    Fault("norm_1_plus_w", _edit("(y[i] * inv_rms) * weight[i];", "(y[i] * inv_rms) * (1.0f + weight[i]);"),
          0, LOCAL_LAYER, Q),
    Fault("norm_weights_swapped", _edit("is_q ? p.q_weight : p.k_weight;", "is_q ? p.k_weight : p.q_weight;"),
          0, LOCAL_LAYER, Q),
    Fault("position_plus_1_decode", _edit(
        "load_rotation<kHeadDim, kLanes>(p, position, lane);",
        "load_rotation<kHeadDim, kLanes>(p, position + (kForm == Form::paged_decode ? 1 : 0), lane);"),
        1, LOCAL_LAYER, Q),
)  # fmt: skip

ATTENTION_FAULTS = (
    Fault("window_plus_1", _edit(_FIRST_VISIBLE, _FIRST_VISIBLE.replace("left);", "left - 1);"), TILE),
          0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("window_plus_1, met in decode", _edit(_FIRST_VISIBLE, _FIRST_VISIBLE.replace("left);", "left - 1);"), TILE),
          10, LOCAL_LAYER, ATTENTION_IS_OFF, E12B),
    Fault("window_minus_1", _edit(_FIRST_VISIBLE, _FIRST_VISIBLE.replace("left);", "left + 1);"), TILE),
          0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("window_none", _edit(_FIRST_VISIBLE, "return 0;", TILE), 0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("window_on_global", _edit(_FIRST_VISIBLE, _FIRST_VISIBLE.replace("? 0", "? max(0, position - 20)"), TILE),
          0, GLOBAL_LAYER, ATTENTION_IS_OFF),
    Fault("first_key_dropped_global", _edit(_FIRST_VISIBLE, _FIRST_VISIBLE.replace("? 0", "? min(1, position)"), TILE),
          0, GLOBAL_LAYER, ATTENTION_IS_OFF),
    Fault("causal_plus_1", _edit(_SEEN, _SEEN.replace("newest", "newest + 1"), TILE), 0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("causal_minus_1", _edit(_SEEN, _SEEN.replace("<=", "<"), TILE), 0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("scale_rsqrt_d", _edit(_SOFTMAX, f"  scale_log2 *= 0.0625f;\n{_SOFTMAX}", TILE),
          0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("kv_head_modulo", _edit(_HEAD, "const int head = packed % tile.group * p.num_kv_heads + tile.kv_head;", TILE),
          0, LOCAL_LAYER, ATTENTION_IS_OFF),
    Fault("kv_head_modulo_global", _edit(
        _HEAD, _HEAD.replace("=", "= kHeadDim == 512 ? packed % tile.group * p.num_kv_heads + tile.kv_head :"),
        TILE), 0, GLOBAL_LAYER, ATTENTION_IS_OFF),
    Fault("page_first_slot_lost", _edit(
        _SLOT, f"{_SLOT}\n  if (slot == 0 && logical_page > 0) return -1;", TILE), 0, LOCAL_LAYER, ATTENTION_IS_OFF),
)  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> dict[str, ReplayCase]:
    return {case.id: case for case in replay_cases(MODELS)}


@pytest.fixture
def library() -> Iterator[KernelLibrary]:
    device = open_device("emulated")
    yield KernelLibrary(device)
    device.close()


def _require_red(result: CaseResult, step: int, layer: int, says: str) -> None:
    assert result.status == "failed", result
    assert result.reason == "", result.reason
    *judged, place = result.mismatches
    assert judged[0].first["step"] <= step, judged
    assert f"layer {layer}, token " in place.operation, place
    assert place.first["layer"] == layer
    assert place.first_want == "<= 0.06"
    assert says in place.note, place.note


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", [*PREP_FAULTS, *ATTENTION_FAULTS], ids=lambda fault: fault.name)
def test_a_mistake_of_a_kernel(fault: Fault, cases: dict[str, ReplayCase], tmp_path: Path) -> None:
    seed(tmp_path, fault.edits, BOTH_FAMILIES[fault.model])
    device = open_device("emulated")
    result = run_replay_case(cases[f"e2e/{fault.model}/first12"], KernelLibrary(device, tmp_path), "")
    device.close()
    _require_red(result, fault.step, fault.layer, fault.says)


def test_the_command_names_the_place_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed(tmp_path, _edit(_VALUE, "y[chunk][i] *= kHeadDim == 512 ? 1.0f : inv_rms;"), BOTH_FAMILIES[E4B])
    case = "e2e/e4b_p23/first12"
    code = g4kv(["smoke", "--device", "emulated", "--kernels", str(tmp_path), "--model-golden",
                 str(MODELS / "e4b_p23.npz"), "--case", case])  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 1, shown
    assert len(shown.splitlines()) <= 24, shown
    for words in (
        f"FAILED  {case}",
        "logits of the prompt: ",
        "step 0",
        "first residual row off with recorded tokens fed: layer 5, token ",
        "recorded trace of layer 5, step 0: q_raw 0.",
        "recomputed from its inputs, token ",
        "v is off: prep (norm, source or slot of V)",
        f"again  g4kv smoke --device emulated:sm_90 --kernels {tmp_path} --model-golden {MODELS / 'e4b_p23.npz'}",
    ):
        assert words in shown, shown


# --- mistakes of the caller ------------------------------------------------------------------------------------------


class ReleasesEarly(FamilyCache):
    """Gives a page to the next one as soon as its first key is out of the window, its other keys are still seen."""

    def release_front(self, held: PageList, frontier: int) -> None:
        super().release_front(held, frontier)
        window = self.geometry.window
        if window is not None and held.pages and held.origin * self.page_size + window <= frontier:
            self.poison(held.pages[0])


class KeepsWholePages(FamilyLaunches):
    """Lets a local query see all that is resident."""

    def plan_shape(self, requests: Sequence[PlanRequest]) -> PlanShape:
        shape = super().plan_shape(requests)
        if shape.window_left < 0:
            return shape
        seen = max(one.start_pos + one.q_len - 1 - one.page_origin * shape.page_size for one in requests)
        return dataclasses.replace(shape, window_left=max(shape.window_left, seen))


class DecodesOnePositionLate(FamilyLaunches):
    """Tells prep the next position in decode."""

    def decode_batch(self) -> PagedBatch:
        batch = super().decode_batch()
        assert batch.host is not None
        late = batch.host[0] + 1
        positions = self.library.device.upload(late, "late positions")
        return dataclasses.replace(batch, positions=positions, host=(late, *batch.host[1:]))


def test_a_page_released_early(cases: dict[str, ReplayCase], library: KernelLibrary) -> None:
    result = run_replay_case(cases["e2e/12b_p7/first12"], library, "", make_cache=ReleasesEarly)
    _require_red(result, 10, LOCAL_LAYER, ATTENTION_IS_OFF)
    assert result.mismatches[0].first["step"] == 10


def test_a_page_released_early_between_chunks(cases: dict[str, ReplayCase], library: KernelLibrary) -> None:
    case = dataclasses.replace(cases["e2e/31b_p40/prefill/chunk16"], steps=1)
    _require_red(run_replay_case(case, library, "", make_cache=ReleasesEarly), 0, LOCAL_LAYER, ATTENTION_IS_OFF)


def test_whole_pages_kept_in_place_of_the_window(cases: dict[str, ReplayCase], library: KernelLibrary) -> None:
    result = run_replay_case(cases["e2e/e4b_p23/first12"], library, "", make_launches=KeepsWholePages)
    _require_red(result, 0, LOCAL_LAYER, ATTENTION_IS_OFF)


def test_a_wrong_position_in_decode(cases: dict[str, ReplayCase], library: KernelLibrary) -> None:
    result = run_replay_case(cases["e2e/e4b_p23/first12"], library, "", make_launches=DecodesOnePositionLate)
    _require_red(result, 1, LOCAL_LAYER, Q)


_PAIRS = {256: np.arange(128), 512: np.arange(256)}


def _frequencies(head_dim: int, theta: float, denominator: int, pairs: int) -> np.ndarray:
    return np.where(_PAIRS[head_dim] < pairs, theta ** (-2 * _PAIRS[head_dim] / denominator), 0).astype(np.float32)


@pytest.mark.parametrize(
    ("step", "layer", "local", "global_"),
    [
        pytest.param(0, GLOBAL_LAYER, (1e4, 256, 128), (1e6, 128, 64), id="rope_exponent_over_128"),
        pytest.param(5, GLOBAL_LAYER, (1e4, 256, 128), (1e6, 512, 256), id="rope_all_pairs_global"),
        pytest.param(0, LOCAL_LAYER, (1e6, 256, 128), (1e4, 512, 64), id="rope_theta_swapped"),
    ],
)
def test_wrong_rope_tables(
    step: int,
    layer: int,
    local: tuple[float, int, int],
    global_: tuple[float, int, int],
    cases: dict[str, ReplayCase],
    library: KernelLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tables(geometry, positions, rotary_dim):  # type: ignore[no-untyped-def]
        angles = positions[:, None] * _frequencies(rotary_dim, *(local if rotary_dim == 256 else global_))
        wide = np.concatenate([angles, angles], axis=1)
        return np.cos(wide).astype(BF16), np.sin(wide).astype(BF16)

    monkeypatch.setattr(family_launches, "rope_rows", tables)
    _require_red(run_replay_case(cases["e2e/e4b_p23/first12"], library, ""), step, layer, Q)
