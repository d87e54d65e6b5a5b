"""The warpgroup kernels of prefill on the emulated device, whole and with one fault each.

At head_dim 512 what runs here is the form whose blocks stand alone; the one in clusters has the same source and runs on
a GPU (tests/gpu), and one of its cases in test_engine_hopper.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from seeding import Edits, require_red, seed
from smoke_helper import chosen, smoke

from g4kv_cli.cases.attention.build import CaseBuilder
from g4kv_cli.cases.attention.run import run_attention_case
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entry_named, kernel_variants
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.run import CaseResult

VARIANT = "sm_90a,portable"
BODY, BOXES = "prefill_hopper_[bls]*.cuh", "page_boxes.cuh"
FOLDED_LOOPS, PAIRS = "prefill_hopper_folded_*.cuh", "prefill_hopper_hd256_*.cuh"
GLOBAL, LOCAL = "attention/31b-global/prefill", "attention/31b-local/prefill"
FOLDED = f"{GLOBAL}/folded"
KERNEL_OF = {
    GLOBAL: "batch_prefill_paged_hd512_tile64_cluster1",
    FOLDED: "batch_prefill_paged_folded_hd512_tile64_cluster1",
    LOCAL: "batch_prefill_paged_hd256_tile64_pairs",
}
FAMILY_OF = {FOLDED_LOOPS: FOLDED, PAIRS: LOCAL}


def _smoke(directory: Path, family: str, *cases: str) -> tuple[int, dict[str, Any]]:
    kv_format = ("--kv-format", "folded") if family == FOLDED else ()
    return smoke(
        directory / "run.json", "--variant", VARIANT, *kv_format, *chosen(f"{family}/{case}" for case in cases)
    )


WHOLE = (
    "large-tile/needle/causal",
    "large-tile/companions",
    "large-tile/group/5",
    "large-tile/group/16",
    "scores/to-80/long",
    "page-size/48",
)


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        (GLOBAL, WHOLE),
        (FOLDED, ("large-tile/group/5", "page-size/64")),
        (LOCAL, (*WHOLE[1:4], "large-tile/needle/window1024", "large-tile/chunk-past-the-window", "page-size/64")),
    ],
)
def test_the_cases_of_the_portable_kernel_are_green(family: str, cases: tuple[str, ...], tmp_path: Path) -> None:
    code, record = _smoke(tmp_path, family, *cases)
    assert code == 0
    assert {case["id"]: case["kernels"] for case in record["cases"]} == {
        f"{family}/{case}": [KERNEL_OF[family]] for case in cases
    }


def test_blocks_that_go_from_tile_to_tile_need_a_gpu_where_only_the_ends_of_the_rows_run(tmp_path: Path) -> None:
    code, record = _smoke(tmp_path, LOCAL, "large-tile/tokens/past-16-bits", "page-size/1")
    assert code == 0
    case, other = sorted(record["cases"], key=lambda case: case["id"])
    assert other["status"] == "passed"
    assert case["status"] == "skipped"
    assert "this case needs a GPU" in case["reason"]


@pytest.mark.parametrize("family", [GLOBAL, LOCAL])
@pytest.mark.parametrize("page_size", [1, 100])
def test_pages_that_a_box_does_not_divide_take_the_portable_kernel(family: str, page_size: int, tmp_path: Path) -> None:
    code, record = _smoke(tmp_path, family, f"page-size/{page_size}")
    assert code == 0
    (case,) = record["cases"]
    assert case["kernels"]
    assert KERNEL_OF[family] not in case["kernels"]


def edits_of(old: str, new: str, pattern: str) -> Edits:
    """The replacement in the one kernel file of this name that holds the text."""
    (found,) = [path.name for path in BUILT_IN_KERNELS_DIRECTORY.glob(pattern) if old in path.read_text()]
    return ((found, old, new),)


@dataclass(frozen=True)
class Fault:
    """One replacement of text in a file of ``source``; ``case`` goes red and ``words`` stand in what is said."""

    name: str
    source: str
    old: str
    new: str
    case: str
    words: str = "out"

    @property
    def family(self) -> str:
        return FAMILY_OF.get(self.source, GLOBAL)

    @property
    def edits(self) -> Edits:
        return edits_of(self.old, self.new, self.source)


_KEYS_WAIT = "barrier_wait(shared + Shape::kKeysThere + ring.stage * 8, ring.parity);"
_VALUES_WAIT = "barrier_wait(shared + Shape::kValuesThere + stage * 8, half);"
_WEIGHTS_WAIT = "barrier_wait(shared + Shape::kWeightsThere + half * 8, block & 1);"
_USED_WAIT = "barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);"

FAULTS = (
    Fault("K not waited for", BODY, _KEYS_WAIT, "", "large-tile/group/2", "FAILED"),
    Fault("V not waited for", BODY, _VALUES_WAIT, "", "page-size/64", "FAILED"),
    Fault("weights not waited for", BODY, _WEIGHTS_WAIT, "", "large-tile/group/2", "FAILED"),
    Fault("a stage filled before it was used", BODY, _USED_WAIT, "", "page-size/64", "FAILED"),
    Fault("K's bytes expected by half", BODY, "if (lane == 0) barrier_expect(there, Shape::kStageBytes);",
          "if (lane == 0) barrier_expect(there, Shape::kStageBytes / 2);", "large-tile/group/2", "FAILED"),
    Fault("queries not waited for", BODY, "      wait_copies<0>();\n      fence_async_copies();\n",
          "      fence_async_copies();\n", "large-tile/group/2", "FAILED"),
    Fault("queries not fenced", BODY, "      wait_copies<0>();\n      fence_async_copies();\n",
          "      wait_copies<0>();\n", "large-tile/group/2", "FAILED"),
    Fault("queries of the warp's first row for all", BODY, "p.q + __shfl_sync(kAllLanes, offset_of_lane, i);",
          "p.q + __shfl_sync(kAllLanes, offset_of_lane, 0);", "large-tile/group/2"),
    Fault("output rows one on", BODY, "offset = __shfl_sync(kAllLanes, offset_of_lane, i);",
          "offset = __shfl_sync(kAllLanes, offset_of_lane, (i + 1) % kRowsPerTile);", "large-tile/group/2"),
    Fault("the tile not written down", BODY,
          "*reinterpret_cast<TileGeometry*>(memory + Shape::kTile) = t.tile;", ";", "large-tile/group/2", "FAILED"),
    Fault("one key too many behind the query", BODY, "newest[i]), newest[i], first_key",
          "newest[i]), newest[i] + 1, first_key", "large-tile/needle/causal"),
    Fault("one key too few", BODY, "newest[i]), newest[i], first_key", "newest[i]), newest[i] - 1, first_key",
          "large-tile/needle/causal"),
    Fault("no mask in a block whose last key all rows but the first see", BODY,
          "|| first_key + Shape::kKeys - 1 > common.newest", "|| first_key + Shape::kKeys - 2 > common.newest",
          "large-tile/needle/causal"),
    Fault("V behind the last key kept", BODY, "|| first_key + Shape::kHalfKeys > t.tile.end) {", ") {",
          "large-tile/group/2"),
    Fault("V cleared too soon", BODY, "if (key >= t.tile.begin && key < t.tile.end) continue;",
          "if (key >= t.tile.begin && key < t.tile.end - 1) continue;", "large-tile/needle/causal"),
    Fault("pages of the block before", BODY, "    place = next;\n  }\n  wait_until_used(shared + Shape::kKeysUsed",
          "  }\n  wait_until_used(shared + Shape::kKeysUsed", "page-size/64"),
    Fault("the page after", BOXES, "place.page = pages[logical_page];",
          "place.page = pages[logical_page == last_key / p.layout.page_size ? logical_page : logical_page + 1];",
          "large-tile/ragged"),
    Fault("half of the output not rescaled", BODY, "rescale(out[1], factor0, factor1);", "", "page-size/64"),
    Fault("a lane's maximum for its row's", BODY, "block_max = row_max(lane_maxima[i]);", "block_max = lane_maxima[i];",
          "page-size/64"),
    Fault("sums not rescaled", BODY, "sum[i] *= factor[i];", "", "page-size/64"),
    Fault("descriptor steps of 48 bytes", BODY, "multiply_rows_128<32, 32, true>", "multiply_rows_128<48, 48, true>",
          "large-tile/group/2"),
    Fault("column blocks of V one apart", BODY, "matrix_descriptor(values + stage * Shape::kStageBytes, "
          "Shape::kColumnBlockBytes);", "matrix_descriptor(values + stage * Shape::kStageBytes, "
          "2 * Shape::kColumnBlockBytes);", "large-tile/group/2"),
    Fault("another swizzle of Q", BODY, "swizzled<kBlockColumns>(row, chunk % 8)",
          "swizzled<kBlockColumns>(row + 1, chunk % 8) - 128", "large-tile/group/2"),
    Fault("rows behind the last stored", BODY, "    if (row < tile.num_rows) {\n      const uint4 packed",
          "    if (true) {\n      const uint4 packed", "large-tile/group/5", "FAILED"),
    Fault("log-sum-exp of the first row for both", BODY, "log_sum_exp(max[i], sum[i], p.scale_log2);",
          "log_sum_exp(max[0], sum[0], p.scale_log2);", "large-tile/group/2", "lse"),
    Fault("folded: K not waited for", FOLDED_LOOPS, "barrier_wait(shared + Shape::kKeysThere, block & 1);", "",
          "large-tile/group/2", "FAILED"),
    Fault("folded: columns of both not waited for", FOLDED_LOOPS,
          "    barrier_wait(shared + Shape::kValuesThere + ring.stage * 8, ring.parity);\n    fence_wgmma();\n"
          "    const unsigned columns", "    fence_wgmma();\n    const unsigned columns", "large-tile/group/2",
          "FAILED"),
    Fault("folded: V where K turns not waited for", FOLDED_LOOPS,
          "        barrier_wait(shared + Shape::kTurnedThere, block & 1);\n", "", "page-size/64", "FAILED"),
    Fault("folded: a stage filled before it was used", FOLDED_LOOPS, "  barrier_wait(used, parity ^ 1);\n", "",
          "page-size/64", "FAILED"),
    Fault("folded: a stage let go before the scores are done", FOLDED_LOOPS,
          "      wait_wgmma<1>();\n      release(Shape::kKeysUsed);", "      release(Shape::kKeysUsed);",
          "page-size/64", "FAILED"),
    Fault("folded: a stage let go before the sums are done", FOLDED_LOOPS,
          "        wait_wgmma<1>();\n        release(Shape::kValuesUsed + previous * 8);\n",
          "        release(Shape::kValuesUsed + previous * 8);\n", "scores/to-80/long", "FAILED"),
    Fault("folded: bytes expected by half", FOLDED_LOOPS, "barrier_expect(there, Shape::kStageBytes);",
          "barrier_expect(there, Shape::kStageBytes / 2);", "large-tile/group/2", "FAILED"),
    Fault("folded: weights not waited for", FOLDED_LOOPS,
          "barrier_wait(shared + Shape::weights_there(place, group), parity);", "", "large-tile/group/2", "FAILED"),
    Fault("folded: weights handed over to one warpgroup alone", FOLDED_LOOPS,
          "      if (step == kSecondHandOver) hand_over(1);\n", "", "page-size/64", "FAILED"),
    Fault("folded: weights of the other place", FOLDED_LOOPS,
          "load_a<Shape::kHalfKeys>(weights[key16], shared + Shape::kWeights + place * Shape::kWeightBytes, first_row",
          "load_a<Shape::kHalfKeys>(weights[key16], shared + Shape::kWeights, first_row", "page-size/64", "FAILED"),
    Fault("folded: factors of the other place", FOLDED_LOOPS, "factors + place * Shape::kRows + first_row;",
          "factors + first_row;", "page-size/64", "FAILED"),
    Fault("folded: scores take the columns that turn from V", FOLDED_LOOPS,
          "keys = shared + Shape::kKeyRing;", "keys = shared + Shape::kTurnedRing;",
          "large-tile/needle/causal", "FAILED"),
    Fault("folded: K's first half for both", FOLDED_LOOPS, "kHalf, keys + Shape::kGroupBytes);", "kHalf, keys);",
          "large-tile/group/2"),
    Fault("folded: columns of the first half for both of held queries", FOLDED_LOOPS,
          "kFirst = kHalf * Shape::kGroupBytes;", "kFirst = 0;", "large-tile/group/2"),
    Fault("folded: queries of the first half for both", FOLDED_LOOPS, "query_block(half * kHalf + kFirstHeld + held)",
          "query_block(kFirstHeld + held)", "large-tile/group/2"),
    Fault("folded: held queries of the columns before", FOLDED_LOOPS, "queries[held][1], matrix_descriptor",
          "queries[0][1], matrix_descriptor", "large-tile/group/2"),
    Fault("folded: scores on top of the block before", FOLDED_LOOPS,
          "multiply_column_block<Shape, false>(scores, shared, 0, keys);",
          "multiply_column_block<Shape, true>(scores, shared, 0, keys);", "page-size/64"),
    Fault("folded: V over queries that are still read", FOLDED_LOOPS,
          "group < Shape::kOutputWarpgroups; ++group) release(Shape::kValuesUsed);",
          "group < Shape::kOutputWarpgroups; ++group) if (warp == 0) release(Shape::kValuesUsed), "
          "release(Shape::kValuesUsed), release(Shape::kValuesUsed), release(Shape::kValuesUsed);",
          "page-size/64", "FAILED"),
    Fault("folded: V's first half for both in the scores", FOLDED_LOOPS,
          "kHalf + column_block, columns + Shape::kGroupBytes);", "kHalf + column_block, columns);",
          "large-tile/group/2"),
    Fault("folded: columns of both from where K turns on", FOLDED_LOOPS, "Shape::kValuesUsed, turned + 1, first,",
          "Shape::kValuesUsed, turned, first,", "large-tile/group/2"),
    Fault("folded: column blocks of the output exchanged", FOLDED_LOOPS, "multiply_weights(out[(step + 1) % kHalf],",
          "multiply_weights(out[kHalf - 1 - step],", "large-tile/group/2"),
    Fault("folded: 16 keys twice, the next never", FOLDED_LOOPS, "multiply_columns_64<4096>(sum, weights[2], b);",
          "multiply_columns_64<2048>(sum, weights[2], b);",
          "large-tile/needle/causal"),
    Fault("folded: one key too many behind the query", FOLDED_LOOPS, "newest), newest, first_key",
          "newest), newest + 1, first_key", "large-tile/needle/causal"),
    Fault("folded: no mask in a block whose last key all rows but the first see", FOLDED_LOOPS,
          "|| first_key + Shape::kKeys - 1 > common.newest", "|| first_key + Shape::kKeys - 2 > common.newest",
          "large-tile/needle/causal"),
    Fault("folded: V behind the last key kept", FOLDED_LOOPS, "|| first_key + Shape::kKeys > t.tile.end) {", ") {",
          "large-tile/group/2"),
    Fault("folded: V where K turns kept behind the last key", FOLDED_LOOPS,
          "      clear_unseen_columns<Shape>(t, turned, shared + Shape::kTurnedThere, block & 1, first_key, thread);\n",
          "", "large-tile/group/2"),
    Fault("folded: zeros not fenced", FOLDED_LOOPS, "      fence_async_copies();\n      synchronize",
          "      synchronize", "large-tile/group/2", "FAILED"),
    Fault("folded: the first row's factor for both", FOLDED_LOOPS, "i * 8] = factor[i];", "i * 8] = factor[0];",
          "page-size/64"),
    Fault("folded: a column block not rescaled", FOLDED_LOOPS, "i < kHalf; ++i) rescale(",
          "i < kHalf - 1; ++i) rescale(", "page-size/64"),
    Fault("folded: pages of the block before", FOLDED_LOOPS, "    place = next;\n", "", "page-size/64"),
    Fault("pairs: K not waited for", PAIRS, "  barrier_wait(shared + Shape::kKeysThere + rings.keys.stage * 8, "
          "rings.keys.parity);\n  fence_wgmma();", "  fence_wgmma();", "large-tile/group/2", "FAILED"),
    Fault("pairs: V not waited for", PAIRS, "  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, "
          "rings.values.parity);\n  fence_wgmma();", "  fence_wgmma();", "large-tile/group/2", "FAILED"),
    Fault("pairs: queries' bytes expected by half", PAIRS, "barrier_expect_more(there, PairPrefill::kQueryBytes);",
          "barrier_expect_more(there, PairPrefill::kQueryBytes / 2);", "large-tile/group/2", "FAILED"),
    Fault("pairs: queries of the token after", PAIRS, "tile.first_token + tile.first_row / tile.group, 0);",
          "tile.first_token + tile.first_row / tile.group + 1, 0);", "large-tile/group/2"),
    Fault("pairs: queries row by row not fenced", PAIRS, "  wait_copies<0>();\n  fence_async_copies();\n",
          "  wait_copies<0>();\n", "large-tile/group/5", "FAILED"),
    Fault("pairs: window one more", PAIRS, "rows.newest[i] - p.window_left);", "rows.newest[i] - p.window_left - 1);",
          "large-tile/chunk-past-the-window"),
    Fault("pairs: one key too many behind the query", PAIRS, "oldest, rows.newest[i], first_key",
          "oldest, rows.newest[i] + 1, first_key", "large-tile/group/2"),
    Fault("pairs: blocks at the window's edge not masked", PAIRS, "task.oldest_whole = first_visible(tile, "
          "position_of(tile, Shape::kRows - 1));", "task.oldest_whole = 0;", "large-tile/needle/window333"),
    Fault("pairs: the last row's newest key for the whole tile", PAIRS, "same_in_warp(task.newest_whole);",
          "same_in_warp(task.newest_whole + task.newer[Shape::kRows - 1]);", "large-tile/needle/window333"),
    Fault("pairs: V of nobody kept", PAIRS, "if (key >= walk.oldest && key < walk.kv_len) continue;", "continue;",
          "large-tile/group/2"),
    Fault("pairs: V at the window's edge kept", PAIRS, "const bool is_whole = first_key >= walk.oldest && first_key",
          "const bool is_whole = first_key", "large-tile/chunk-past-the-window"),
    Fault("pairs: pages of the block before", PAIRS, "row.place_of(p, first_key + box * kBoxKeys);",
          "row.place_of(p, first_key - Shape::kKeys + box * kBoxKeys);", "page-size/64"),
    Fault("pairs: output not rescaled", PAIRS, "  if (raised) scale_rows(out, factor[0], factor[1]);\n", "",
          "large-tile/chunk-past-the-window"),
    Fault("pairs: sums not rescaled", PAIRS, "        rows.sum[i] *= factor[i];\n", "",
          "large-tile/chunk-past-the-window"),
    Fault("pairs: one lane's maximum for the row", PAIRS, "const float block_max = row_max(lane_max[i]);",
          "const float block_max = lane_max[i];", "large-tile/chunk-past-the-window"),
    Fault("pairs: words of a quad not exchanged", PAIRS, "      transpose_quad(words, lane);\n", "",
          "large-tile/group/2"),
    Fault("pairs: rows behind the last stored", PAIRS, "      if (out_rows[i] >= 0) {", "      {", "large-tile/group/5",
          "FAILED"),
)  # fmt: skip


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_turns_its_case_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_red(tmp_path, capsys, fault.edits, (f"{fault.family}/{fault.case}",), (fault.words,), VARIANT)


# --- blocks that stay and take pair after pair, and keys that consumers share out -----------------------------------


@dataclass(frozen=True)
class Batch:
    """(kv_len, q_len) of requests with one KV head, for two blocks. Of those of 2 to ``split_tiles`` tiles whose first
    token sees 512 keys the blocks, a cluster then, have half of the keys each."""

    chunks: tuple[tuple[int, int], ...]
    window: int
    split_tiles: int = 0
    check: Literal["oracle", "alone"] = "oracle"


PAIR_AFTER_PAIR = Batch(((353, 20), (383, 35), (666, 35)), window=333)
"""Five tiles of three requests, so three pairs, the first and the second of different requests."""
SHARED_OUT = Batch(((600, 80), (260, 100), (641, 33)), window=1024, split_tiles=3, check="alone")
"""Nine tiles: three of a request that is split, four of one that is not, two of one that is, so that two pairs are of
both kinds; each request once more alone, to the same bits."""
ALL_SHARED_OUT = Batch(((800, 80), (560, 33)), window=845, split_tiles=3)
"""Three and two tiles of requests that are split: three pairs for the cluster, one of them of two requests."""


def _run_on_two_multiprocessors(kernels: Path | None, batch: Batch) -> CaseResult:
    builder = CaseBuilder(GEOMETRIES["31b-local"], seed=1, page_size=16)
    entry = entry_named("batch_prefill_paged_window_hd256_into")
    case = builder.case(entry, "batch", batch.chunks, geometry=builder.one_head, window=batch.window, tile=64,
                        kind="needles" if batch.check == "oracle" else "spread", check=batch.check)  # fmt: skip
    device = EmulatedDevice("sm_90")
    device.limits = replace(device.limits, multiprocessors=2)
    kernel = kernel_variants()[KERNEL_OF[LOCAL]]
    before = kernel.split_tiles
    object.__setattr__(kernel, "split_tiles", batch.split_tiles)
    try:
        result = run_attention_case(case, KernelLibrary(device, kernels, "sm_90a,portable"), "")
    finally:
        object.__setattr__(kernel, "split_tiles", before)
        device.close()
    assert result.kernels == (KERNEL_OF[LOCAL],), result
    return result


def test_a_block_takes_pair_after_pair() -> None:
    assert _run_on_two_multiprocessors(None, PAIR_AFTER_PAIR).status == "passed"


@pytest.mark.parametrize("batch", [SHARED_OUT, ALL_SHARED_OUT])
def test_two_blocks_share_out_the_keys_of_a_short_request_whatever_its_companions(batch: Batch) -> None:
    assert _run_on_two_multiprocessors(None, batch).status == "passed"


FAULTS_BETWEEN_PAIRS = (
    pytest.param(
        PAIR_AFTER_PAIR,
        "  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, rings.values.parity);\n  if",
        "  if",
        id="a block released that was not waited for",
    ),
    pytest.param(
        PAIR_AFTER_PAIR,
        "task.skip_behind = blocks_behind;",
        "task.skip_behind = 0;",
        id="the second tile's blocks not skipped by the first",
    ),
    pytest.param(
        PAIR_AFTER_PAIR,
        "task.skip_before = which == 1 && unit.has[0] ? walk.blocks() : 0;",
        "task.skip_before = 0;",
        id="the first tile's blocks not skipped by the second",
    ),
    pytest.param(
        PAIR_AFTER_PAIR,
        "  barrier_wait(shared + Shape::kQueriesUsed + which * 8, slots.other_parity ^ 1);\n",
        "",
        id="queries copied over those in use",
    ),
    pytest.param(
        SHARED_OUT,
        "tile[0] = tile[0] * own_factor[0] + found.x * other_factor[0];",
        "tile[0] = tile[0] * own_factor[0] + found.x;",
        id="shared out: the other's sums relative to its own maximum",
    ),
    pytest.param(
        SHARED_OUT,
        "tile[3] = tile[3] * own_factor[1] + found.w * other_factor[1];",
        "tile[3] = tile[3] * own_factor[1];",
        id="shared out: a part of the other's sums not added",
    ),
    pytest.param(
        SHARED_OUT,
        "total[i] * own_factor[i] + other_total[i] * other_factor[i];",
        "total[i] * own_factor[i];",
        id="shared out: the other's weights not added",
    ),
    pytest.param(
        SHARED_OUT,
        "  peer.wait_for_sums(parity);\n",
        "",
        id="shared out: the other's sums not waited for",
    ),
    pytest.param(
        SHARED_OUT,
        "  peer.wait_until_ready(parity);\n",
        "",
        id="shared out: stored over queries in use",
    ),
    pytest.param(
        SHARED_OUT,
        "  if (p.num_splits > 0) cluster_wait();  // from here on the other block may be stored to\n",
        "",
        id="shared out: the other block's barriers used before they are there",
    ),
    pytest.param(
        SHARED_OUT,
        "PairPrefill::kHeadDim / 2 * 4 + PairPrefill::kStateBytes;",
        "PairPrefill::kHeadDim / 2 * 4;",
        id="shared out: maxima not counted",
    ),
    pytest.param(
        SHARED_OUT,
        "peer.store_tile(n, out[kOthers + n], thread);",
        "peer.store_tile(n, out[kOwn + n], thread);",
        id="shared out: the wrong half of the columns",
    ),
    pytest.param(
        SHARED_OUT,
        "begin_ = max(begin_, middle);",
        "begin_ = max(begin_, middle - PairPrefill::kKeys);",
        id="shared out: keys of the middle counted twice",
    ),
    pytest.param(
        SHARED_OUT,
        "tiles > 1 && tiles * p.num_kv_heads <= p.num_splits &&",
        "tiles > 1 && p.num_tiles * p.num_kv_heads <= p.num_splits &&",
        id="shared out: by all tiles of the batch",
    ),
    pytest.param(
        SHARED_OUT,
        "of_pair ? index_ | 1 : index_",
        "of_pair ? index_ | lane % 2 : index_",
        id="shared out: at the middle of a pair of the batch",
    ),
    pytest.param(
        ALL_SHARED_OUT,
        "  fence_async_copies();  // before queries are copied there again\n",
        "",
        id="what the other block stored not shown before queries are copied there",
    ),
)


@pytest.mark.seeded_faults
@pytest.mark.parametrize(("batch", "old", "new"), FAULTS_BETWEEN_PAIRS)
def test_a_seeded_fault_between_pairs_is_seen(batch: Batch, old: str, new: str, tmp_path: Path) -> None:
    kernels = seed(tmp_path / "kernels", edits_of(old, new, PAIRS), (f"{LOCAL}/companions",), VARIANT)
    assert _run_on_two_multiprocessors(kernels, batch).status == "failed"
