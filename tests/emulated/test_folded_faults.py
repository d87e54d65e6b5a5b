"""The gates of folded rows can fail: each fault, written into a copy of the sources, turns the named case red.

As in test_seeded_faults.py: exact replacements of text, run through ``g4kv smoke --kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from seeding import Edits, require_red
from smoke_helper import chosen, smoke

PREP, TILE, DECODE, PREFILL = "prep_body.cuh", "attention_tile.cuh", "decode_body.cuh", "prefill_body.cuh"
PREP_CASES = "prep/26b-a4b-global"
ATTENTION = "attention/12b-global"
FORMS = ("decode/folded/ragged", "decode-split/folded/ragged", "prefill/folded/large-tile/ragged")


@dataclass(frozen=True)
class Fault:
    """``edits`` are (source, text, replacement); each of ``cases`` goes red, and ``words`` stand in what is said."""

    name: str
    edits: Edits
    cases: tuple[str, ...]
    words: tuple[str, ...]


_STORE = "reinterpret_cast<uint4*>(out)[chunk * kTurningLanes<kKeyDim> + lane] = pack8(y[chunk]);"
_FOLD = "rotation.cos = load_row<kHeadDim, kLanes>(p.k_weight, lane);"
_TURN_ENDS = "  } else if (is_q) {\n    rotation.cos"
_WEIGHTED_TURN = """
    const Row<kHeadDim, kLanes> weights = load_row<kHeadDim, kLanes>(p.k_weight, lane);
    for (int chunk = 0; is_q && chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
      float factor[8], cos[8], sin[8];
      unpack8(weights.packed[chunk], factor);
      unpack8(rotation.cos.packed[chunk], cos);
      unpack8(rotation.sin.packed[chunk], sin);
      for (int i = 0; i < 8; ++i) {
        cos[i] *= factor[i];
        sin[i] *= factor[i];
      }
      rotation.cos.packed[chunk] = pack8(cos);
      rotation.sin.packed[chunk] = pack8(sin);
    }
"""
_VALUES = "Values::run(p.pool, folded_offset(p, place, true), 0, to, warp, lane);"
_BEHIND = "folded_offset(p, place, false), place.page < 0 ? 0 : p.layout.kv_block_len,"
_SCORES = "score_tile<kHeadDim, kKeyDim>(scores, queries, keys, values, lane);"

FAULTS = (
    Fault(
        "K's rotated columns in the wrong order",
        ((PREP, _STORE, _STORE.replace("chunk * k", "(1 - chunk) * k")),),
        (f"{PREP_CASES}/prefill/folded/closed-form", f"{PREP_CASES}/batch_prefill/folded/random/seed1"),
        ("K in the pool: ", "that row equals the expected row with its two halves exchanged"),
    ),
    Fault(
        "K's first columns in place of those that turn",
        ((PREP, "if (lane >= kTurningLanes<kKeyDim>) return;", "if (lane >= 16) return;"),
         (PREP, _STORE, "if (chunk == 0) reinterpret_cast<uint4*>(out)[lane] = pack8(y[0]);")),
        (f"{PREP_CASES}/decode/folded/closed-form",),
        ("K in the pool: ",),
    ),
    Fault(
        "the weight of K is not folded into the query",
        ((PREP, _FOLD, "for (uint4& ones : rotation.cos.packed) ones.x = ones.y = ones.z = ones.w = 0x3f803f80u;"),),
        (f"{PREP_CASES}/decode/folded/closed-form", f"{PREP_CASES}/prefill/folded/random/seed3/tokens5/page16"),
        ("q_out: ", "that row equals the expected row of split rows, without the weight of K"),
    ),
    Fault(
        "the weight of K in the columns that turn, too",
        ((PREP, _TURN_ENDS, _WEIGHTED_TURN + _TURN_ENDS),),
        (f"{PREP_CASES}/prefill/folded/closed-form",),
        ("q_out: ", "that row equals the expected row with the weight of K in the columns that turn, too"),
    ),
    Fault(
        "rows of V as far apart as those of K",
        ((PREP, "value_out + r * kHeadDim, raw_rows[step]", "value_out + r * kKeyDim, raw_rows[step]"),),
        (f"{PREP_CASES}/decode/folded/kv-heads5/many-tokens",),
        ("global_race", PREP),
    ),
    Fault(
        "scores take K from the wrong columns of V",
        ((TILE, "load_k<kHeadDim>(fragment, values, first_key, column16, lane);",
          "load_k<kHeadDim>(fragment, values, first_key, column16 - 1, lane);"),),
        tuple(f"{ATTENTION}/{form}" for form in FORMS),
        ("out: ", "lse: "),
    ),
    Fault(
        "V behind K as in split rows",
        ((TILE, _VALUES, _VALUES.replace("folded_offset(p, place, true), 0,", _BEHIND)),),
        tuple(f"{ATTENTION}/{form}" for form in FORMS),
        ("out: ",),
    ),
    Fault(
        "scores take K from the V of another stage",
        ((DECODE, _SCORES, _SCORES.replace("values", "stage_keys(kStages - 1 - stage) + Shape::kKeyBytes")),),
        (f"{ATTENTION}/decode/folded/long-history", f"{ATTENTION}/decode-split/folded/long-history"),
        ("FAILED",),
    ),
    Fault(
        "the next V goes over the one in use",
        ((PREFILL, "Copy::values(p, place, next_values, warp, lane);", "Copy::values(p, place, values, warp, lane);"),),
        (f"{ATTENTION}/prefill/folded/large-tile/needle/causal",),
        ("unfinished_copy", "its group was not waited for"),
    ),
    Fault(
        "split rows take K from V",
        ((TILE, "load_k<kHeadDim>(fragment, keys, first_key, column16, lane);",
          "load_k<kHeadDim>(fragment, values, first_key, column16, lane);"),),
        (f"{ATTENTION}/decode/ragged",),
        ("that row equals the expected row with V in place of K",),
    ),
)  # fmt: skip


def test_folded_and_split_are_green_on_these_cases(tmp_path: Path) -> None:
    cases = sorted({case for fault in FAULTS for case in fault.cases})
    code, record = smoke(tmp_path / "run.json", *chosen(cases))
    assert code == 0
    assert record["summary"]["passed"] == len(cases)
    by_form = {case["id"]: case["kernels"] for case in record["cases"]}
    assert all(("folded" in case) == any("folded" in symbol for symbol in used) for case, used in by_form.items())


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_turns_its_cases_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_red(tmp_path, capsys, fault.edits, fault.cases, fault.words)
