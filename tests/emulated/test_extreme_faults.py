"""The extreme cases can fail: faults that show only far out (many splits, long rows, high positions and page ids).

As in test_attention_faults.py: exact replacements of text, run through ``g4kv smoke --kernels``. None of these faults
turned a case red that is not extreme.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from seeding import Edits, require_red
from smoke_helper import chosen, smoke

TILE, DECODE, PREFILL, PREP = "attention_tile.cuh", "decode_body.cuh", "prefill_body.cuh", "prep_body.cuh"
OFFSETS = "kv_offsets.cuh"
LOCAL, GLOBAL = "attention/e2b-local", "attention/12b-global"
FORMS = ("decode", "decode-split", "prefill/small-tile", "prefill/large-tile")
PREP_FORMS = ("prefill", "decode", "batch_prefill")

_MERGED = "split_max != minus_infinity() ? factor"
_FIRST_TILE = "first_tile += blockIdx.y * per_split;"
_OLDEST = "return tile.window_left < 0 ? 0 : max(0, position - tile.window_left);"
_RESCALED = "factor0 != 1.0f || factor1 != 1.0f"
_KEY_PAGE = "logical_page - p.page_origins[tile.request]];"
_KEY_PAGE_ROW = "p.page_indptr[tile.request]"
_FIRST_TOKEN = "p.q_indptr[request]"
_TILE_INDEX = "p.tile_indices[tile_number]"
_PREP_PAGE_ROW = "row.begin = load_number<kEarly>(p.page_indptr + request);"
_KV_LEN = "rows.kv_len = p.kv_lens[request];"
_KEY_ROW = "kv_row_offset(p.layout, page, p.layer, false, slot, tile.kv_head)"
_DECODE_LSE = "if (p.lse != nullptr && quad == 0)"
_MERGE_LSE = "if (p.lse != nullptr && column == 0)"
_PREFILL_LSE = "if (p.lse != nullptr && part == 0"
_ROW = "return ((long long)token * p.num_qo_heads + head) * kHeadDim;"
_PARTIAL = "*reinterpret_cast<float4*>(p.partial_out + partial * kHeadDim + quad * 4) = merged;"
_MERGE_PART = "(row * p.num_splits + split) * kHeadDim"
_RAW_ROW = "const long long rows_offset = ((long long)token * num_heads + first_head) * kHeadDim;"
_PREP_PAGE = "p.page_indices + (row.begin + (logical_page - row.origin))"
_PREP_SLOT = "const int slot = position - logical_page * p.layout.page_size;"
_TABLE_ROW = "const long long first = (long long)position * kHeadDim;"
_VALUE_ROW = "store_value_row<kHeadDim, kLanes>(value_out + r * kHeadDim, raw_rows[step], inv_rms, lane);"
_VALUE_PLACE = "value_out = p.pool + kv_row_offset(p.layout, 0, p.layer, true, slot, first_head);"


@dataclass(frozen=True)
class Fault:
    """``edits`` are (source, text, replacement); each of ``cases`` goes red, and ``words`` stand in what is said."""

    name: str
    edits: Edits
    cases: tuple[str, ...]
    words: tuple[str, ...] = ("FAILED",)


def _both(case: str, forms: tuple[str, ...] = FORMS) -> tuple[str, ...]:
    """The case in each of these forms, every other one in the global family."""
    return tuple(f"{(LOCAL, GLOBAL)[number % 2]}/{form}/{case}" for number, form in enumerate(forms))


def _prep(case: str, forms: tuple[str, ...] = PREP_FORMS) -> tuple[str, ...]:
    return tuple(f"prep/{('e2b-local', '12b-global')[number % 2]}/{form}/{case}" for number, form in enumerate(forms))


SPLIT = ("decode-split", "decode-split")
FAULTS = (
    *(
        Fault(
            f"the merge reads the first {count} splits",
            ((DECODE, _MERGED, _MERGED.replace("?", f"&& first + threadIdx.x < {count} ?")),),
            (*_both("splits/128-not-empty", SPLIT), *_both("merge/128-not-empty", SPLIT)),
            ("out: ",),
        )
        for count in (16, 32, 64)
    ),
    Fault(
        "the merge reads the first 128 splits",
        ((DECODE, _MERGED, _MERGED.replace("?", "&& first + threadIdx.x < 128 ?")),),
        _both("merge/200-not-empty", SPLIT),
        ("out: ",),
    ),
    Fault(
        "splits from the 64th on read other splits' keys",
        ((DECODE, _FIRST_TILE, _FIRST_TILE.replace("blockIdx.y", "(blockIdx.y & 63)")),),
        _both("splits/128-not-empty", SPLIT),
        ("out: ",),
    ),
    Fault(
        "a window of one key is none",
        ((TILE, _OLDEST, _OLDEST.replace("< 0", "<= 0")),),
        tuple(f"{LOCAL}/{form}/window1/needle" for form in FORMS),
    ),
    Fault(
        "sums rescaled only by factors below 0.99",
        ((TILE, _RESCALED, "factor0 < 0.99f || factor1 < 0.99f"),),
        _both("scores/rising"),
        ("out: ",),
    ),
    *(
        Fault(
            f"page entries from {mask + 1} on wrap",
            ((TILE, _KEY_PAGE, f"((logical_page - p.page_origins[tile.request]) & {mask})];"),),
            _both("kv-len/past-15-bits/long-row"),
        )
        for mask in (63, 1023)
    ),
    Fault(
        "page ids of 16 bits (attention)",
        ((TILE, _KEY_ROW, _KEY_ROW.replace("page,", "page & 0xffff,")),),
        _both("pool/page-ids-past-16-bits"),
    ),
    Fault(
        "rows of pages that begin in the first 65536 entries (attention)",
        ((TILE, _KEY_PAGE_ROW, f"({_KEY_PAGE_ROW} & 0xffff)"),),
        _both("page-rows/past-16-bits"),
    ),
    Fault(
        "rows of pages that begin in the first 65536 entries (prep)",
        ((PREP, _PREP_PAGE_ROW, _PREP_PAGE_ROW.replace(";", " & 0xffff;")),),
        _prep("page-rows/past-16-bits", ("decode", "batch_prefill")),
    ),
    Fault(
        "query tokens of 16 bits",
        ((TILE, _FIRST_TOKEN, f"({_FIRST_TOKEN} & 0xffff)"),),
        _both("tokens/past-16-bits", ("prefill/small-tile", "prefill/large-tile")),
    ),
    Fault(
        "a request's tiles counted in 8 bits",
        ((TILE, _TILE_INDEX, f"({_TILE_INDEX} & 255)"),),
        (f"{LOCAL}/prefill/small-tile/tiles/past-8-bits",),
    ),
    Fault(
        "kv_len of 15 bits",
        ((TILE, _KV_LEN, _KV_LEN.replace("];", "] & 32767;")),),
        (*_both("kv-len/past-15-bits/long-row"), *_both("kv-len/past-16-bits")),
    ),
    Fault(
        "kv_len of 16 bits",
        ((TILE, _KV_LEN, _KV_LEN.replace("];", "] & 65535;")),),
        _both("kv-len/past-16-bits"),
    ),
    Fault(
        "int32 offsets of q and out",
        ((TILE, _ROW, "return (token * p.num_qo_heads + head) * kHeadDim;"),),
        _both("rows/past-int32"),
    ),
    Fault(
        "int32 offsets of partial results",
        ((DECODE, _PARTIAL, _PARTIAL.replace("partial * kHeadDim", "(int)(partial * kHeadDim)")),),
        _both("rows/past-int32", SPLIT),
    ),
    Fault(
        "uint32 offsets of partial results in the merge",
        ((DECODE, _MERGE_PART, f"(unsigned)({_MERGE_PART})"),),
        _both("rows/past-int32", SPLIT),
    ),
    Fault(
        "int32 offsets of out in the merge",
        ((DECODE, "(p.out + row * kHeadDim + column)", "(p.out + (int)(row * kHeadDim) + column)"),),
        _both("rows/past-int32", SPLIT),
    ),
    Fault(
        "lse written where it is not wanted",
        (
            (DECODE, _DECODE_LSE, "if (quad == 0)"),
            (DECODE, _MERGE_LSE, "if (column == 0)"),
            (PREFILL, _PREFILL_LSE, "if (part == 0"),
        ),
        (*_both("lse/not-wanted"), *_both("merge/lse-not-wanted", SPLIT)),
        ("out_of_bounds",),
    ),
    Fault(
        "a split's sum is left out where lse is not wanted",
        ((DECODE, "p.partial_sum[partial] = sum;", "if (p.lse != nullptr) p.partial_sum[partial] = sum;"),),
        _both("lse/not-wanted", SPLIT),
        ("unwritten_output", "partial_sum"),
    ),
    *(
        Fault(
            f"page entries from {mask + 1} on wrap (prep)",
            ((PREP, _PREP_PAGE, f"p.page_indices + (row.begin + ((logical_page - row.origin) & {mask}))"),),
            _prep("long-row"),
        )
        for mask in (63, 255)
    ),
    Fault(
        "page ids of 16 bits (prep)",
        (
            (PREP, " out += kv_layer_k_offset(p.layout, page,", " out += kv_layer_k_offset(p.layout, page & 0xffff,"),
            (PREP, "value_out += kv_layer_k_offset(p.layout, page,",
             "value_out += kv_layer_k_offset(p.layout, page & 0xffff,"),
        ),
        _prep("pool/page-ids-past-16-bits"),
        ("in the pool",),
    ),
    Fault(
        "int32 offsets of raw rows and q_out",
        ((PREP, _RAW_ROW, "const long long rows_offset = (token * num_heads + first_head) * kHeadDim;"),),
        (*_prep("rows/past-int32"), "prep/e2b-local/contiguous/rows/past-int32"),
    ),
    Fault(
        "RoPE rows end at 4095",
        ((PREP, _TABLE_ROW, _TABLE_ROW.replace("position *", "min(position, 4095) *")),),
        (*_prep("position/past-16-bits"), "prep/12b-global/prefill/position/past-12-bits",
         "prep/e2b-local/contiguous/position/past-12-bits"),
        ("FAILED",),
    ),
    Fault(
        "positions of 15 bits",
        ((PREP, _TABLE_ROW, _TABLE_ROW.replace("position *", "(position & 32767) *")),),
        (*_prep("position/past-16-bits"), "prep/e2b-local/contiguous/position/past-15-bits"),
    ),
    Fault(
        "slots by mask",
        ((PREP, _PREP_SLOT, "const int slot = position & (p.layout.page_size - 1);"),),
        tuple(case for size in (3, 48, 100) for case in _prep(f"page-size/{size}")),
    ),
    Fault(
        "V's heads in reverse at K=V",
        ((PREP, _VALUE_ROW, _VALUE_ROW.replace("value_out + r *", "value_out + (rows - 1 - r) *")),),
        tuple(f"prep/12b-global/{form}/kv-heads5/many-tokens" for form in PREP_FORMS),
        ("V in the pool",),
    ),
    Fault(
        "V's heads in reverse at K=V, one head a warp",
        ((PREP, _VALUE_PLACE, _VALUE_PLACE.replace(
            "first_head);", "p.num_kv_heads % 4 != 0 ? p.num_kv_heads - 1 - first_head : first_head);")),),
        tuple(f"prep/12b-global/{form}/kv-heads5/few-tokens" for form in PREP_FORMS),
        ("V in the pool",),
    ),
    Fault(
        "an eps of its own",
        ((PREP, "(1.0f / kHeadDim) + eps", "(1.0f / kHeadDim) + 1e-6f"),),
        (*_prep("eps/another"), "prep/e2b-local/contiguous/eps/another"),
        ("q_out",),
    ),
    Fault(
        "slots of 8 bits",
        ((OFFSETS, "((long long)slot * layout", "((long long)(slot & 255) * layout"),),
        (*_both("page-size/4096", ("decode", "decode-split", "prefill")), *_prep("page-size/4096")),
    ),
    Fault(
        "tile indices of 4 bits",
        ((TILE, "0 : p.tile_indices[tile_number];", "0 : p.tile_indices[tile_number] & 15;"),),
        (f"{LOCAL}/prefill/small-tile/tiles/past-64", f"{GLOBAL}/prefill/large-tile/tiles/past-64"),
    ),
    Fault(
        "keys that the first rows of a warp see are seen by all",
        ((PREFILL, "common_keys(tile, first_row, Shape::kGroupRows);", "common_keys(tile, first_row, kRowsPerTile);"),),
        (f"{GLOBAL}/prefill/large-tile/tiles/past-64",),
        ("with a window one key longer",),
    ),
    Fault(
        "a split without a key has a largest score of 0",
        ((DECODE, "p.partial_max[partial] = max;", "p.partial_max[partial] = finite_max(max);"),),
        _both("scores/far-below-zero", SPLIT),
        ("out: ",),
    ),
    Fault(
        "the largest score of all warps but the last",
        ((DECODE, "g < kGroups; ++g) max = fmaxf(max,", "g < kGroups - 1; ++g) max = fmaxf(max,"),),
        (f"{LOCAL}/decode/scores/far-below-zero",),
    ),
    Fault(
        "log(2) of five digits",
        ((TILE, "0.693147180559945309f", "0.69314f"),),
        _both("scores/zero-queries", ("decode", "decode-split", "prefill")),
        ("lse: ",),
    ),
    Fault(
        "V of all heads in the first one's row, K = V and a head that turns in part",
        ((PREP, "store_value_row<kHeadDim, kWarpSize>(value_out + r * kHeadDim, row, inv_rms, warp_lane);",
          "store_value_row<kHeadDim, kWarpSize>(value_out, row, inv_rms, warp_lane);"),),
        ("prep/12b-global/prefill/kv-heads5/many-tokens/rotary-partial",),
        ("V in the pool",),
    ),
)  # fmt: skip


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_far_out_turns_its_cases_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_red(tmp_path, capsys, fault.edits, fault.cases, fault.words)


def test_right_kernels_are_green_on_these_cases(tmp_path: Path) -> None:
    cases = sorted({case for fault in FAULTS for case in fault.cases})
    code, record = smoke(tmp_path / "run.json", *chosen(cases))
    assert code == 0, [case for case in record["cases"] if case["status"] != "passed"]
    assert record["summary"]["passed"] == len(cases)
