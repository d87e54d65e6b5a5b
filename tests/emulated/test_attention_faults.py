"""The attention gates can fail: each fault, written into a copy of the sources, turns the named case red.

As in test_seeded_faults.py: exact replacements of text, run through ``g4kv smoke --kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from seeding import Edits, require_red
from smoke_helper import chosen, smoke

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY

TILE, DECODE, PREFILL, OFFSETS = "attention_tile.cuh", "decode_body.cuh", "prefill_body.cuh", "kv_offsets.cuh"
LOCAL, GLOBAL = "attention/e2b-local", "attention/12b-global"


@dataclass(frozen=True)
class Fault:
    """``edits`` are (source, text, replacement); each of ``cases`` goes red, and ``words`` stand in what is said."""

    name: str
    edits: Edits
    cases: tuple[str, ...]
    words: tuple[str, ...] = ("out",)


def _edit(source: str, old: str, new: str) -> Edits:
    return ((source, old, new),)


def _all_forms(case: str, geometry: str = LOCAL) -> tuple[str, ...]:
    forms = ("decode", "decode-split", "prefill/small-tile", "prefill/large-tile")
    return tuple(f"{geometry}/{form}/{case}" for form in forms)


_OLDEST = "return tile.window_left < 0 ? 0 : max(0, position - tile.window_left);"
_MASK = "score = key <= newest && key >= oldest ? score : minus_infinity();"
_KEY_RANGE = "if (key < begin || key >= end) return -1;"
_KV_LEN = "rows.kv_len = p.kv_lens[request];"
_NEW_MAX = "const float new_max = fmaxf(rows.max[half], tile_max);"
_HEAD = "const int head = tile.kv_head * tile.group + packed % tile.group;"
_KEY_PAGE = "p.page_indptr[tile.request] + logical_page - p.page_origins[tile.request]];"
_SPLIT_FACTOR = "const float factor = exp2_approx((split_max - max) * p.scale_log2);"
_GROUP_FACTOR = "exp2_approx((group_max[g * kRowsPerTile + row] - finite_max(max)) * p.scale_log2);"
_RESCALE = "rescale(out[0], factor0, factor1);"
_OFFSET = "return (long long)page * layout.page_stride + (long long)layer * layout.layer_stride;"
_LOG_SUM = "fmaf(max, scale_log2, log2_approx(sum)) * kLn2"

FAULTS = (
    Fault(
        "window one more",
        _edit(TILE, _OLDEST, "return tile.window_left < 0 ? 0 : max(0, position - tile.window_left - 1);"),
        (*_all_forms("needle/window40"), f"{LOCAL}/decode/needle/window333", f"{LOCAL}/decode-split/needle/window512"),
        ("that row equals the expected row with a window one key longer",),
    ),
    Fault(
        "window one less",
        _edit(TILE, _OLDEST, "return tile.window_left < 0 ? 0 : max(0, position - tile.window_left + 1);"),
        (*_all_forms("needle/window40"), f"{LOCAL}/decode/needle/window512", "serve/e2b-local/interleaved"),
    ),
    Fault("no window", _edit(TILE, _OLDEST, "return 0;"), _all_forms("needle/window40"), ("FAILED",)),
    Fault(
        "window only per tile",
        _edit(TILE, _MASK, "score = key <= newest ? score : minus_infinity();"),
        (*_all_forms("window40/spread"), f"{LOCAL}/prefill/large-tile/needle/window40"),
    ),
    Fault(
        "window edge of the first row for the whole tile",
        _edit(TILE, "position_of(tile, first_row + rows - 1));", "position_of(tile, first_row));"),
        (f"{LOCAL}/prefill/large-tile/needle/window333", f"{LOCAL}/prefill/large-tile/needle/window512"),
    ),
    Fault(
        "one key too many behind the query",
        _edit(TILE, _MASK, _MASK.replace("key <= newest", "key <= newest + 1")),
        (*_all_forms("window40/spread"), f"{LOCAL}/decode/kv-len-one", f"{GLOBAL}/prefill/large-tile/needle/causal",
         f"{GLOBAL}/prefill/small-tile/ragged"),
    ),
    Fault(
        "the query does not see itself",
        _edit(TILE, _MASK, _MASK.replace("key <= newest", "key < newest")),
        (*_all_forms("needle/window40"), *_all_forms("needle/causal", GLOBAL), f"{LOCAL}/decode/kv-len-one"),
    ),
    Fault(
        "a scale of 1 / sqrt(head_dim)",
        _edit(TILE, _NEW_MAX, f"scale_log2 *= 0.0625f;\n  {_NEW_MAX}"),
        (f"{LOCAL}/decode/ragged", f"{LOCAL}/decode-split/ragged", f"{LOCAL}/prefill/large-tile/ragged",
         f"{LOCAL}/prefill/sm-scale/0.0625"),
        ("out: ", "lse: "),
    ),
    Fault(
        "KV head by modulo",
        _edit(TILE, _HEAD, "const int head = tile.kv_head + packed % tile.group * p.num_kv_heads;"),
        (f"{LOCAL}/decode/group/8", f"{LOCAL}/decode-split/group/2", f"{LOCAL}/prefill/large-tile/ragged",
         "attention/12b-local/decode/ragged", "attention/12b-local/prefill/model-heads", "serve/12b-local/interleaved"),
    ),
    Fault(
        "last_page_len ignored: all slots of the last page count",
        _edit(TILE, _KV_LEN, "rows.kv_len = (p.kv_lens[request] + p.layout.page_size - 1) / "
              "p.layout.page_size * p.layout.page_size;"),
        (*_all_forms("ragged"), f"{LOCAL}/decode/page-size/256"),
    ),
    Fault(
        "keys behind the last one are read and multiplied by zero",
        _edit(TILE, _KEY_RANGE, "if (key < begin || key / 16 > (end - 1) / 16) return -1;"),
        (*_all_forms("ragged"), f"{LOCAL}/decode/kv-len-one", f"{GLOBAL}/decode/ragged"),
        ("non-finite", "computed as NaN"),
    ),
    Fault(
        "keys before the window are read and multiplied by zero",
        _edit(TILE, _KEY_RANGE, "if (key < begin / 16 * 16 || key >= end) return -1;"),
        _all_forms("window40/spread"),
        ("non-finite", "computed as NaN"),
    ),
    Fault(
        "no zeros for keys that are not there",
        _edit(TILE, "const int source_bytes = valid ? kChunkBytes : 0;", "const int source_bytes = kChunkBytes;"),
        _all_forms("ragged"),
        ("FAILED",),
    ),
    Fault(
        "page origin ignored",
        _edit(TILE, _KEY_PAGE, "p.page_indptr[tile.request] + logical_page];"),
        (*_all_forms("window40/spread"), "serve/e2b-local/interleaved"),
        ("FAILED",),
    ),
    Fault(
        "the pages of the first request for all",
        _edit(TILE, _KEY_PAGE, "logical_page - p.page_origins[tile.request]];"),
        _all_forms("ragged"),
        ("FAILED",),
    ),
    Fault(
        "the first layer for all",
        _edit(TILE, "kv_row_offset(p.layout, page, p.layer,", "kv_row_offset(p.layout, page, 0,"),
        _all_forms("ragged"),
        ("non-finite",),
    ),
    Fault(
        "splits merged without rescaling",
        _edit(DECODE, _SPLIT_FACTOR, "const float factor = 1.0f;"),
        (f"{LOCAL}/decode-split/kv-sweep/1-200/splits3", f"{LOCAL}/decode-split/merge/empty-none",
         f"{GLOBAL}/decode-split/scores/to-80"),
    ),
    Fault(
        "warps merged without rescaling",
        _edit(DECODE, _GROUP_FACTOR, "1.0f;"),
        (f"{LOCAL}/decode/needle/window40", f"{GLOBAL}/decode/needle/causal", f"{LOCAL}/prefill/small-tile/ragged"),
    ),
    Fault(
        "sums not rescaled at a new maximum",
        _edit(DECODE, _RESCALE, ""),
        (f"{LOCAL}/decode/needle/window333", f"{GLOBAL}/decode/scores/to-80"),
    ),
    Fault(
        "an empty split's garbage merged",
        _edit(DECODE, "if (!(weight.x < 0.0f)) {", "{"),
        tuple(f"{LOCAL}/decode-split/merge/empty-{which}" for which in ("first", "last", "all-but-one")),
        ("non-finite", "computed as NaN"),
    ),
    Fault(
        "an empty split leaves its scratch as it was, and the merge reads it",
        (
            (DECODE, "if (!(weight.x < 0.0f)) {", "{"),
            (DECODE, "*reinterpret_cast<float4*>(p.partial_out + partial * kHeadDim + quad * 4) = merged;",
             "if (max != minus_infinity()) *reinterpret_cast<float4*>(p.partial_out + partial * kHeadDim + quad * 4) "
             "= merged;"),
        ),
        (f"{LOCAL}/decode-split/splits/one-not-empty",),
        ("unwritten_output", "partial_out"),
    ),
    Fault(
        "merge with splits outermost",
        _edit(DECODE, "(row * p.num_splits + split) * kHeadDim", "(split * gridDim.x + row) * kHeadDim"),
        (f"{LOCAL}/decode-split/ragged", f"{GLOBAL}/decode-split/kv-len-one"),
    ),
    Fault(
        "a split's result under its neighbour's row",
        _edit(DECODE, "const long long partial = row_number * p.num_splits + blockIdx.y;",
              "const long long partial = row_number * (p.num_splits - 1) + blockIdx.y;"),
        (f"{LOCAL}/decode-split/ragged",),
        ("FAILED",),
    ),
    Fault(
        "queries used before they are there",
        _edit(DECODE, "__syncthreads();  // the queries are there for all warps", ""),
        (f"{LOCAL}/decode/ragged", f"{GLOBAL}/decode/ragged"),
        ("shared_race",),
    ),
    Fault(
        "a stage filled again while another warp reads it",
        _edit(DECODE, "sync_group<kHalves>(group);  // the stage may be filled again", ""),
        (f"{GLOBAL}/decode/needle/causal",),
        ("shared_race", "cp.async"),
    ),
    Fault(
        "a group's barrier counts one of its two warps",
        _edit(DECODE, '"n"(kHalves * kWarpSize) : "memory");', '"n"(kWarpSize) : "memory");'),
        (f"{GLOBAL}/decode/kv-len-one", f"{GLOBAL}/decode-split/ragged", f"{GLOBAL}/prefill/small-tile/ragged"),
        ("barrier_count", "counts 32 threads, but 64 meet there"),
    ),
    Fault(
        "no barrier before the warps' results are merged",
        _edit(DECODE, "__syncthreads();\n\n  constexpr int kQuads", "constexpr int kQuads"),
        (f"{LOCAL}/decode/ragged",),
        ("shared_race", DECODE),
    ),
    Fault(
        "keys used before their copy has arrived (decode)",
        _edit(DECODE, "wait_copies<kStages - 1>();", ""),
        (f"{LOCAL}/decode/ragged", f"{LOCAL}/prefill/small-tile/ragged", f"{GLOBAL}/decode-split/ragged"),
        ("FAILED",),
    ),
    Fault(
        "values used before their copy has arrived (prefill)",
        _edit(PREFILL, "wait_copies<1>();", ""),
        (f"{LOCAL}/prefill/large-tile/ragged", f"{GLOBAL}/prefill/large-tile/ragged"),
        ("FAILED",),
    ),
    Fault(
        "no barrier between the scores and the next keys (prefill)",
        _edit(PREFILL, "__syncthreads();  // K's memory is free, and the other parts' maxima are there", ""),
        (f"{LOCAL}/prefill/large-tile/needle/window40", f"{GLOBAL}/prefill/large-tile/ragged"),
        ("shared_race", PREFILL),
    ),
    Fault(
        "int32 page offset",
        _edit(OFFSETS, _OFFSET, f"return (int)({_OFFSET[7:-1]});"),
        (f"{LOCAL}/decode-split/pool/past-int32", f"{GLOBAL}/prefill/pool/past-int32"),
        ("FAILED",),
    ),
    Fault(
        "uint32 page offset",
        _edit(OFFSETS, _OFFSET, f"return (unsigned)({_OFFSET[7:-1]});"),
        (f"{LOCAL}/decode/pool/past-uint32", f"{GLOBAL}/decode/pool/past-uint32"),
        ("FAILED",),
    ),
    Fault(
        "K read for V",
        _edit(TILE, "Values::run(p.pool, place, p.layout.kv_block_len, to, warp, lane);",
              "Values::run(p.pool, place, 0, to, warp, lane);"),
        (f"{LOCAL}/decode/kv-len-one", f"{GLOBAL}/decode-split/kv-len-one"),
        ("that row equals the expected row with K in place of V",),
    ),
    Fault(
        "log-sum-exp in bits",
        _edit(TILE, _LOG_SUM, "fmaf(max, scale_log2, log2_approx(sum))"),
        _all_forms("ragged"),
        ("lse: ",),
    ),
)  # fmt: skip


def test_an_untouched_copy_is_green_on_these_cases(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for source in (TILE, DECODE, PREFILL, OFFSETS, "decode_hd256.cu", "prefill_hd256.cu"):
        (kernels / source).write_text((BUILT_IN_KERNELS_DIRECTORY / source).read_text())
    # The long ones are green in test_smoke.py.
    long = ("kv-sweep", "window333", "serve")
    cases = sorted({case for fault in FAULTS for case in fault.cases if not any(word in case for word in long)})
    code, record = smoke(tmp_path / "run.json", "--kernels", str(kernels), *chosen(cases))
    assert code == 0
    assert record["summary"] == {"passed": len(cases), "failed": 0, "error": 0, "skipped": 0, "not_covered": 0}


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_turns_its_cases_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_red(tmp_path, capsys, fault.edits, fault.cases, fault.words)
