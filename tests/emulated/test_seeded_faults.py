"""The gates can fail: each fault, written into a copy of the kernel sources, turns the named case red.

A fault is an exact replacement of text in one source; a text that is no longer there fails the test, so a fault can
never be seeded in vain. The copy runs through ``g4kv smoke --kernels``, as a user's own sources would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeding import Edits, require_red
from smoke_helper import chosen, smoke

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

BODY, OFFSETS = "prep_body.cuh", "kv_offsets.cuh"
LOCAL, GLOBAL, OWN_V = "prep/12b-local", "prep/12b-global", "prep/e2b-global"


@dataclass(frozen=True)
class Fault:
    """``edits`` are (source, text, replacement); ``words`` all stand in what is said of the case that goes red."""

    name: str
    edits: Edits
    case: str
    words: tuple[str, ...]


def _edit(old: str, new: str, source: str = BODY) -> Edits:
    return ((source, old, new),)


_STORE_V = "store_value_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step], inv_rms, lane);"
_STORE_V_EQ_K = (
    "if (writes_v) store_value_row<kHeadDim, kLanes>(value_out + r * kHeadDim, raw_rows[step], inv_rms, lane);"
)
_OFFSET = "return (long long)page * layout.page_stride + (long long)layer * layout.layer_stride;"
_STORE_ROW = "reinterpret_cast<uint4*>(row)[chunk * kLanes + lane] = pack8(y[chunk]);"
_PAGE_TRAP = "if (page < 0 || page >= p.num_pages) __trap();"
_POSITION_TRAP = "if (position < 0 || position >= p.cos_max_pos) __trap();"
_LATE_TRAP = (
    "if (kForm != Form::contiguous && group == 0 && lane == 0) p.pool[0] = 0; "
    "if (p.page_row_len == 2 && p.page_indices[1] < 0) __trap();"
)
_POSITION = "load_number<kEarly>(p.positions + token) : p.start_pos + token;"

FAULTS = (
    Fault(
        "norm weight 1 + w",
        _edit("y[i] = (y[i] * inv_rms) * weight[i];", "y[i] = (y[i] * inv_rms) * (1.0f + weight[i]);"),
        f"{LOCAL}/prefill/closed-form",
        ("q_out: 163,840 of 163,840 elements", "K in the pool: 81,920 of 81,920", "row normed with 1 + weight"),
    ),
    Fault(
        "swapped norm weights",
        _edit("is_q ? p.q_weight : p.k_weight;", "is_q ? p.k_weight : p.q_weight;"),
        f"{LOCAL}/prefill/closed-form",
        ("q_out: 163,840 of 163,840 elements", "K in the pool: 81,920 of 81,920", "normed with the weight of K"),
    ),
    Fault(
        "V rotated",
        _edit(
            _STORE_V,
            """{
          float y[Row<kHeadDim, kLanes>::kChunks][8];
          for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c) {
            unpack8(raw_rows[step].packed[c], y[c]);
            for (int i = 0; i < 8; ++i) y[c][i] *= inv_rms;
          }
          rotate_whole_head<kHeadDim, kLanes>(load_rotation<kHeadDim, kLanes>(p, position, lane), lane, y);
          store_row<kHeadDim, kLanes>(out + r * kHeadDim, y, lane);
        }""",
        ),
        f"{LOCAL}/prefill/closed-form",
        ("V in the pool: ", "the expected row and rotated"),
    ),
    Fault(
        "V normed with the K weight",
        _edit(
            _STORE_V,
            """{
          float y[Row<kHeadDim, kLanes>::kChunks][8];
          const Row<kHeadDim, kLanes> w = load_row<kHeadDim, kLanes>(p.k_weight, lane);
          for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c)
            normed8(raw_rows[step].packed[c], inv_rms, w.packed[c], y[c]);
          store_row<kHeadDim, kLanes>(out + r * kHeadDim, y, lane);
        }""",
        ),
        f"{OWN_V}/decode/closed-form",
        ("V in the pool: ", "the expected row normed with the weight of K"),
    ),
    Fault(
        "V taken after k_norm",
        _edit(
            _STORE_V_EQ_K,
            """if (writes_v) {
          float y[Row<kHeadDim, kLanes>::kChunks][8], sum = 0.0f;
          for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c) {
            normed8(raw_rows[step].packed[c], inv_rms, packed_weight.packed[c], y[c]);
            for (int i = 0; i < 8; ++i) sum = fmaf(y[c][i], y[c][i], sum);
          }
          const float s = rsqrtf(lane_sum<kLanes>(sum) * (1.0f / kHeadDim) + p.eps);
          for (int c = 0; c < Row<kHeadDim, kLanes>::kChunks; ++c)
            for (int i = 0; i < 8; ++i) y[c][i] *= s;
          store_row<kHeadDim, kLanes>(value_out + r * kHeadDim, y, lane);
        }""",
        ),
        f"{GLOBAL}/prefill/closed-form",
        ("V in the pool: ", "the expected row made of K after its norm"),
    ),
    Fault(
        "V from the raw K where it has an input of its own",
        _edit("is_q ? p.q : is_v ? p.v : p.k;", "is_q ? p.q : p.k;"),
        f"{LOCAL}/decode/closed-form",
        ("V in the pool: 14,336 of 14,336 elements", "the expected row made of raw K"),
    ),
    Fault(
        "missing eps",
        _edit("* (1.0f / kHeadDim) + eps);", "* (1.0f / kHeadDim));"),
        f"{LOCAL}/prefill/near-eps/tokens5",
        ("q_out: ", "V in the pool: "),
    ),
    Fault(
        "pairs (d, d + 64) at head_dim 512",
        (
            (BODY, "if (p.rotary_dim != kHeadDim) {", "if (true) {"),
            (BODY, "const int half = p.rotary_dim / 2;", "const int half = 64;"),
            (BODY, "if (column < p.rotary_dim) {", "if (column < 128) {"),
        ),
        f"{GLOBAL}/prefill/random/seed3/tokens5/page16",
        ("q_out: ", "K in the pool: "),
    ),
    Fault(
        "RoPE at position + 1",
        _edit("load_rotation<kHeadDim, kLanes>(p, position, lane);",
              "load_rotation<kHeadDim, kLanes>(p, position + 1, lane);"),
        f"{LOCAL}/prefill/closed-form",
        ("q_out: ",),
    ),
    Fault(
        "position + 1",
        _edit(_POSITION, f"1 + {_POSITION.replace(': p', ': 1 + p')}"),
        f"{LOCAL}/decode/position/first-and-last-of-table",
        ("trap: ", BODY),
    ),
    Fault(
        "page size off by one",
        _edit("(unsigned)p.layout.page_size) : 0;", "((unsigned)p.layout.page_size + 1)) : 0;"),
        f"{LOCAL}/prefill/page-size/16",
        ("global_out_of_bounds: ", "'pool'"),
    ),
    Fault(
        "page origin ignored",
        _edit("row.origin = load_number<kEarly>(p.page_origins + request);", "row.origin = 0;"),
        f"{LOCAL}/decode/origins/different",
        ("trap: ", BODY),
    ),
    Fault(
        "layer offset dropped",
        _edit(_OFFSET, "return (long long)page * layout.page_stride;", OFFSETS),
        f"{LOCAL}/prefill/serving/untouched",
        ("K in the pool, outside the call's slots: ", "must not touch was written", "layer 0"),
    ),
    Fault(
        "K and V blocks exchanged",
        _edit("is_v ? kv_layer_v_offset", "!is_v ? kv_layer_v_offset", OFFSETS),
        f"{LOCAL}/prefill/closed-form",
        ("K in the pool: ", "V in the pool: "),
    ),
    Fault(
        "int32 offset",
        _edit(_OFFSET, f"return (int)({_OFFSET[7:-1]});", OFFSETS),
        f"{LOCAL}/prefill/pool/past-int32",
        ("global_out_of_bounds: ",),
    ),
    Fault(
        "uint32 offset",
        _edit(_OFFSET, f"return (unsigned)({_OFFSET[7:-1]});", OFFSETS),
        f"{GLOBAL}/decode/pool/past-uint32",
        ("never written", "K in the pool, outside the call's slots: ", "page 0, slot 0"),
    ),
    Fault(
        "Q's head stride used for K",
        _edit("((long long)token * num_heads + first_head)", "((long long)token * p.num_qo_heads + first_head)"),
        f"{LOCAL}/prefill/random/seed2/tokens2/page16",
        ("global_out_of_bounds: ",),
    ),
    Fault(
        "one unwritten column",
        _edit(
            _STORE_ROW,
            """const uint4 packed = pack8(y[chunk]);
    if ((chunk * kLanes + lane + 1) * 8 == kHeadDim) {
      for (int i = 0; i < 7; ++i) row[kHeadDim - 8 + i] = reinterpret_cast<const bf16_bits*>(&packed)[i];
    } else {
      reinterpret_cast<uint4*>(row)[chunk * kLanes + lane] = packed;
    }""",
        ),
        f"{LOCAL}/contiguous/closed-form",
        ("unwritten_output: ", "q_out"),
    ),
    Fault(
        "the K columns of one lane unwritten in the pool",
        _edit(
            "store_rotated_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step]",
            "if (is_q || lane != 31) store_rotated_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step]",
        ),
        f"{GLOBAL}/decode/closed-form",
        ("K in the pool: non-finite results", "never written", "dim 248"),
    ),
    Fault(
        "half a warp without a row stores K's next one",
        _edit("if (!kOneRow && r >= rows) continue;  // half a warp", ""),
        f"{LOCAL}/prefill/kv-heads5/many-tokens",
        ("write_conflict: ",),
    ),
    Fault(
        "half a warp without a row stores V's next one",
        _edit(f"if (r < rows) {_STORE_V}", _STORE_V),
        f"{LOCAL}/batch_prefill/kv-heads5/many-tokens",
        ("write_conflict: ",),
    ),
    Fault(
        "half a warp norms by half the row",
        _edit("kSums == 1 ? sums[0] : sums[0] + sums[kSums - 1]", "sums[0]"),
        f"{LOCAL}/decode/kv-heads5/many-tokens",
        ("q_out: ",),
    ),
    Fault(
        "a turn the other way within a lane",
        _edit("cos[1][i], sin[1][i], false);", "cos[1][i], sin[1][i], kHeadDim == 256);"),
        f"{LOCAL}/decode/kv-heads5/many-tokens",
        ("q_out: ", "K in the pool"),
    ),
    Fault(
        "a lane missing in the shuffle mask",
        _edit("kAllLanes = 0xffffffffu;", "kAllLanes = 0x7fffffffu;", "warp.cuh"),
        f"{LOCAL}/contiguous/random/seed1/tokens1",
        ("shuffle",),
    ),
    Fault(
        "a lane that has left before the shuffle",
        _edit("float sums[kSums] = {};\n",
              "float sums[kSums] = {};\n  if (threadIdx.x % kWarpSize == 31) return 0.0f;\n"),
        f"{LOCAL}/contiguous/random/seed1/tokens1",
        ("shuffle",),
    ),
    Fault(
        "missing trap: page id",
        _edit(_PAGE_TRAP, ""),
        "trap/12b-local/prefill/page-id-past-pool",
        ("a fault of kind global_out_of_bounds came before the trap: ",),
    ),
    Fault(
        "missing trap: page origin",
        _edit("if (row.origin < 0 || logical_page < row.origin) __trap();", "if (logical_page < row.origin) __trap();"),
        "trap/12b-local/decode/origin-negative",
        ("trapped elsewhere than prep_body.cuh:",),
    ),
    Fault(
        "missing trap: row too short",
        _edit("if (logical_page - row.origin >= row.end - row.begin) __trap();", ""),
        "trap/12b-global/decode/row-too-short",
        ("the kernel ran to its end, want a trap",),
    ),
    Fault(
        "missing trap: request",
        _edit("if (request < 0 || request >= p.num_requests) __trap();", "if (request < 0) __trap();"),
        "trap/e2b-global/batch_prefill/request-past-the-batch",
        ("a fault of kind global_out_of_bounds came before the trap: ",),
    ),
    Fault(
        "missing trap: position",
        _edit(_POSITION_TRAP, "if (position < 0) __trap();"),
        "trap/e2b-global/decode/position-past-table",
        ("a fault of kind global_out_of_bounds came before the trap: ",),
    ),
    Fault(
        "a trap after the first store",
        (
            (BODY, _PAGE_TRAP, ""),
            (BODY, "  if (is_v) {\n#pragma unroll", f"  {_LATE_TRAP}\n  if (is_v) {{\n#pragma unroll"),
        ),
        "trap/12b-local/prefill/page-id-negative",
        ("written before the trap",),
    ),
)  # fmt: skip


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_turns_its_case_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_red(tmp_path, capsys, fault.edits, (fault.case,), (fault.case, *fault.words))


def test_an_untouched_copy_is_green_on_all_of_these_cases(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for source in BUILT_IN_KERNELS_DIRECTORY.glob("prep*"):
        (kernels / source.name).write_text(source.read_text())
    cases = {fault.case for fault in FAULTS}
    code, record = smoke(tmp_path / "run.json", "--kernels", str(kernels), *chosen(sorted(cases)))
    assert code == 0
    assert record["summary"] == {"passed": len(cases), "failed": 0, "error": 0, "skipped": 0, "not_covered": 0}


# --- faults of the caller's tables: only another implementation's vectors can see them ---------------------------


def _golden_with(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    with np.load(GOLDEN / "12b-global_short.npz") as archive:
        arrays = dict(archive)
    edit(arrays)
    path = tmp_path / "12b-global_short.npz"
    np.savez(path, **arrays)
    return path


def _tables_from(frequencies: Any) -> Callable[[dict[str, Any]], None]:
    def edit(arrays: dict[str, Any]) -> None:
        angles = arrays["positions"].astype(np.float32)[:, None] * frequencies[None, :]
        for name, values in (("cos_bf16", np.cos(angles)), ("sin_bf16", np.sin(angles))):
            arrays[name] = (values.astype(np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)

    return edit


def _frequencies(denominator: int) -> Any:
    pair = np.arange(256)
    return np.where(pair < 64, 1e6 ** (-2 * pair / denominator), 0).astype(np.float32)


def test_exponent_over_the_rotated_span_is_seen_by_the_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = _golden_with(tmp_path, _tables_from(_frequencies(512)))
    assert smoke(tmp_path / "right.json", "--golden", str(right))[0] == 0
    wrong = _golden_with(tmp_path, _tables_from(_frequencies(128)))
    capsys.readouterr()
    code, record = smoke(tmp_path / "wrong.json", "--golden", str(wrong))
    assert code == 1
    failed = [case["id"] for case in record["cases"] if case["status"] != "passed"]
    assert failed == ["golden/12b-global_short/prefill", "golden/12b-global_short/folded/prefill"]
    shown = capsys.readouterr().out
    assert "q_out: " in shown
    assert "of the rotated pair's magnitude" in shown
