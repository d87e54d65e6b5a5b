"""Bytes, FLOPs and floors against numbers worked out by hand, and which configurations are tried."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from g4kv_cli.bench.peers import PEERS, PeerStatus, library_of, select_peers
from g4kv_cli.bench.roofline import floor_of, is_impossible
from g4kv_cli.bench.run import H200, Request, free_name, make_plan, record_directory
from g4kv_cli.bench.workloads import (
    MAX_PRESET_TOKENS,
    decode_shape,
    prefill_shape,
    prep_shape,
    shapes_of,
    splits_worth_trying,
    variants_of,
)
from g4kv_cli.entries.entry import Target
from g4kv_cli.entries.table import entries_for, entry_named
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES, select_geometries
from g4kv_cli.records.bench import Ceilings

pytestmark = pytest.mark.usefixtures("forms_a_b_c")

L12, G12, G31 = GEOMETRIES["12b-local"], GEOMETRIES["12b-global"], GEOMETRIES["31b-global"]
CEILINGS = Ceilings(4e12, 3e12, 500e12, 1e-6)


def test_a_windowed_decode_reads_the_window_only() -> None:
    # 12b-local: 8 KV heads of 256, window 1024. Two requests: 1024 keys x 8 x 256 x 2 bytes, K and V.
    shape = decode_shape(L12, 2, 8192)
    assert shape.visible_keys == 1024
    kv, rows = 2 * 2 * 1024 * 8 * 256 * 2, 2 * 16 * 256 * 2
    assert (shape.read_bytes, shape.write_bytes) == (kv + rows, rows)
    # Two products of 256 for each of 16 heads and 1024 keys.
    assert shape.flops == 2 * (2 * 256) * 16 * 1024 * 2


def test_a_global_decode_reads_every_key() -> None:
    shape = decode_shape(G12, 1, 131072)
    assert shape.read_bytes == 2 * 131072 * 1 * 512 * 2 + 16 * 512 * 2
    assert shape.flops == 4 * 512 * 16 * 131072


def test_a_folded_decode_reads_the_rotated_columns_of_k_and_all_of_v() -> None:
    split, folded = decode_shape(G31, 4, 8192), decode_shape(G31, 4, 8192, "folded")
    assert folded.id == "decode/31b-global-folded/batch4/kv8192"
    assert folded.read_bytes == 4 * 8192 * 4 * (128 + 512) * 2 + 4 * 32 * 512 * 2
    assert (folded.flops, folded.write_bytes) == (split.flops, split.write_bytes)
    assert prefill_shape(G31, 512, 512, "folded").read_bytes < prefill_shape(G31, 512, 512).read_bytes


@pytest.mark.parametrize(
    ("geometry", "chunk", "history", "pairs", "visible"),
    [
        # No window: each of the 4 tokens sees the history and itself and those before it.
        (G12, 4, 10, 11 + 12 + 13 + 14, 14),
        (G12, 3, 0, 1 + 2 + 3, 3),
        # Window 1024: from position 1023 on a token sees 1024 keys. 1022 is the last that sees fewer.
        (L12, 3, 1021, 1022 + 1023 + 1024, 1024),
        (L12, 3, 1022, 1023 + 1024 + 1024, 1025),
        (L12, 2, 5000, 2 * 1024, 1025),
        (L12, 2, 0, 1 + 2, 2),
    ],
)
def test_prefill_counts_the_pairs_that_are_visible(geometry, chunk, history, pairs, visible) -> None:  # type: ignore[no-untyped-def]
    shape = prefill_shape(geometry, chunk, history)
    assert shape.flops == 4 * geometry.head_dim * 16 * pairs
    assert shape.visible_keys == visible


def test_prep_reads_k_once_where_v_is_made_from_it() -> None:
    entry = entry_named("qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into")
    shape = prep_shape(G12, entry, 10)
    assert shape.read_bytes == 10 * (16 + 1) * 512 * 2
    assert shape.write_bytes == 10 * (16 + 2) * 512 * 2
    contiguous = entry_named("qk_norm_rope_prefill_hd256_plain_into")
    shape = prep_shape(L12, contiguous, 10)
    assert shape.read_bytes == shape.write_bytes == 10 * (16 + 8) * 256 * 2


def test_a_geometry_gets_the_entries_its_layers_call() -> None:
    assert {entry.head_dim for entry in entries_for(L12, "prep")} == {256}
    assert {entry.value_source for entry in entries_for(G12, "prep")} == {"raw_k"}
    assert {entry.value_source for entry in entries_for(GEOMETRIES["e2b-global"], "prep")} == {"raw_v"}


def test_the_floor_is_the_largest_term() -> None:
    decode = decode_shape(L12, 64, 1024)
    assert floor_of(decode, CEILINGS).bound == "read"
    assert floor_of(decode, CEILINGS).seconds == pytest.approx((decode.read_bytes + decode.write_bytes) / 4e12)
    assert floor_of(decode_shape(L12, 1, 16), CEILINGS).bound == "launch"
    prefill = prefill_shape(G12, 8192, 0)
    assert floor_of(prefill, CEILINGS).bound == "compute"
    assert floor_of(prefill, Ceilings(4e12, 3e12)).bound == "read"
    prep = prep_shape(L12, entries_for(L12, "prep")[1], 8192)
    assert floor_of(prep, CEILINGS).bound == "copy"
    assert floor_of(prep, CEILINGS).seconds == pytest.approx((prep.read_bytes + prep.write_bytes) / 3e12)


def test_impossible_allows_for_what_the_cache_may_hold() -> None:
    decode = decode_shape(L12, 64, 1024)
    floor = (decode.read_bytes + decode.write_bytes) / 4e12
    assert is_impossible(0.94 * floor, decode, CEILINGS, 0)
    assert not is_impossible(0.96 * floor, decode, CEILINGS, 0)
    assert not is_impossible(0.94 * floor, decode, CEILINGS, decode.read_bytes // 10)


@pytest.mark.parametrize(
    ("geometry", "batch", "kv_len", "splits"),
    [
        # 8 KV heads: two splits give 16 blocks, 64 give 512; 1024 keys in splits of 16 at least.
        (L12, 1, 1024, (2, 4, 6, 8, 16, 32, 64)),
        (L12, 16, 1024, (2, 4)),
        (L12, 256, 1024, ()),
        (L12, 1, 100, (2, 4, 6)),
        # 1 KV head: 16 splits for 16 blocks, fewer where they have 32 keys each at most.
        (G12, 1, 2048, (16, 32, 64, 112, 128)),
        (G12, 1, 128, (4, 6, 8)),
        (G12, 1, 15, ()),
        (G12, 16, 131072, (2, 4, 6, 8, 16, 32)),
    ],
)
def test_splits_that_are_worth_a_try(geometry, batch, kv_len, splits) -> None:  # type: ignore[no-untyped-def]
    assert splits_worth_trying(decode_shape(geometry, batch, kv_len)) == splits


def test_configurations() -> None:
    shape = decode_shape(L12, 1, 256)
    assert [one.name for one in variants_of(shape, L12, H200)] == ["a", "b", "c2", "c4", "c6", "c8", "c16"]
    assert [one.name for one in variants_of(shape, L12, H200, (3,))] == ["a", "b", "c3"]
    # A card with less shared memory has a smaller tile at head_dim 512.
    prefill = prefill_shape(G12, 512, 0)
    assert [one.name for one in variants_of(prefill, G12, Target("cuda", "sm_86", 99 * 1024))] == ["tile32"]
    # A plan for an H200 takes no tile of 32 rows there (where pages are of whole 16 tokens).
    assert [one.name for one in variants_of(prefill, G12, H200)] == ["tile64"]
    assert [one.name for one in variants_of(replace(prefill, page_size=8), G12, H200)] == ["tile32", "tile64"]


def test_presets_stay_inside_the_memory() -> None:
    shapes = shapes_of("decode", G31, "full")
    assert max(shape.batch * shape.kv_len for shape in shapes) == MAX_PRESET_TOKENS
    assert {shape.batch for shape in shapes} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {shape.kv_len for shape in shapes} >= {128, 131072}


def test_a_plan_with_a_baseline_has_everything_twice() -> None:
    request = Request("decode", (L12,), "quick", batches=(1,), kv_lens=(128,), with_baseline=True)
    assert [cell.configuration for cell in make_plan(request).cells] == [
        one for name in ("a", "b", "c2", "c4", "c6", "c8") for one in (name, f"{name}@baseline")
    ]  # fmt: skip


def test_overrides_belong_to_decode() -> None:
    with pytest.raises(UsageError, match="--batch, --kv-len and --splits go with g4kv bench decode alone"):
        make_plan(Request("prep", (L12,), "quick", batches=(1,)))


def test_pdl_is_for_the_decode_kernels_that_a_call_can_ask_it_of() -> None:
    for enable_pdl in (False, True):
        request = Request("decode", (L12, G12), "quick", batches=(1,), kv_lens=(128,), enable_pdl=enable_pdl)
        plan = make_plan(request)
        for variants in plan.variants.values():
            assert {one.form for one in variants.values() if one.enable_pdl} == ({"b", "c"} if enable_pdl else set())
    for workload in ("prep", "prefill", "all"):
        with pytest.raises(UsageError, match="--pdl goes with g4kv bench decode alone"):
            make_plan(Request(workload, (L12,), "quick", enable_pdl=True))


def test_a_plan_of_both_formats_has_the_folded_shapes_of_what_folds() -> None:
    request = Request("decode", (L12, G12), "quick", batches=(2,), kv_lens=(64,), kv_formats=("split", "folded"))
    plan = make_plan(request)
    assert [shape.pool for shape in plan.shapes] == ["12b-local", "12b-global", "12b-global-folded"]
    names = [[cell.configuration for cell in plan.cells if cell.shape == shape.id] for shape in plan.shapes[1:]]
    assert names[0] == names[1]
    alone = make_plan(Request("all", (L12, G12), "quick", kv_formats=("folded",)))
    assert {(shape.kind, shape.pool) for shape in alone.shapes} == {
        (kind, "12b-global-folded") for kind in ("decode", "prefill", "prep")
    }
    split, folded = (
        {shape.id.split("/", 2)[2]: shape for shape in shapes_of("prep", G12, "quick", kv_format)}
        for kv_format in ("split", "folded")
    )
    for name, shape in folded.items():
        assert split[name].read_bytes == shape.read_bytes
        # One KV head: a row of K is 128 columns of 512.
        assert split[name].write_bytes - shape.write_bytes == shape.tokens * 384 * 2
    assert folded.keys() == split.keys()


def test_what_has_no_folded_shapes_is_said() -> None:
    with pytest.raises(UsageError, match="12b-local has no folded format of K and V: its V is not made of raw K"):
        make_plan(Request("decode", (L12,), "quick", kv_formats=("folded",)))
    with pytest.raises(UsageError, match="12b-local has no folded format"):
        make_plan(Request("prep", (L12,), "quick", kv_formats=("folded",)))
    peers = select_peers(("torch",))
    with pytest.raises(UsageError, match="--peer reads whole rows of K: say --kv-format both"):
        make_plan(Request("decode", (G12,), "quick", peers=peers, kv_formats=("folded",)))
    both = make_plan(Request("decode", (G12,), "quick", (1,), (64,), peers=peers, kv_formats=("split", "folded")))
    assert {cell.shape for cell in both.cells if cell.form == "peer"} == {"decode/12b-global/batch1/kv64"}


def test_one_override_keeps_the_preset_s_other_axis() -> None:
    plan = make_plan(Request("decode", select_geometries("12b-local"), "quick", batches=(2,)))
    assert [(shape.batch, shape.kv_len) for shape in plan.shapes] == [(2, 128), (2, 1024)]


def test_pages_of_another_size() -> None:
    request = Request("all", (GEOMETRIES["12b-local"],), "quick", page_size=64)
    usual = make_plan(replace(request, page_size=16))
    plan = make_plan(request)
    assert [shape.id for shape in plan.shapes] == [f"{shape.id}/page64" for shape in usual.shapes]
    assert {shape.page_size for shape in plan.shapes} == {64}
    assert {one.page_size for one in plan.asked.values()} == {64}
    assert [shape.flops for shape in plan.shapes] == [shape.flops for shape in usual.shapes]
    assert not any("page" in shape.id.rpartition("/")[2] for shape in usual.shapes)


def test_prefill_has_chunks_beside_requests_that_decode() -> None:
    plan = make_plan(Request("prefill", (L12, G12), "decode-forms"))
    mixed = [shape for shape in plan.shapes if shape.requests]
    assert {shape.tokens for shape in mixed} == {2, 16, 64, 256}
    for shape in mixed:
        assert shape.requests == ((8192 + shape.tokens, shape.tokens), *[(8193, 1)] * 32)
        assert plan.asked[shape.id].num_pages >= 33 * (64 if shape.geometry == "12b-local" else 512)
        # Decode's tile is tried too: most of the rows may be its.
        assert "tile16" in plan.variants[shape.id]
    # A token of the window sees 1024 keys; without one the chunk's i-th sees 8192 + i, and the others 8193.
    pairs = {shape.geometry: shape.flops for shape in mixed if shape.tokens == 16}
    assert pairs["12b-local"] == 4 * 256 * 16 * (16 + 32) * 1024
    assert pairs["12b-global"] == 4 * 512 * 16 * (16 * 8192 + 136 + 32 * 8193)
    assert len({shape.id for shape in plan.shapes}) == len(plan.shapes)
    assert not [shape for shape in make_plan(Request("decode", (L12,), "quick")).shapes if shape.requests]


def test_where_records_go(tmp_path) -> None:  # type: ignore[no-untyped-def]
    directory = record_directory(tmp_path, "NVIDIA H200", "2026-11-29T18:50:00+00:00", "a1b2c3d4e5f6-dirty")
    assert directory == tmp_path / "nvidia-h200" / "2026-11-29-a1b2c3d-dirty"
    assert record_directory(tmp_path, "NVIDIA H200", "2026-11-29", "").name == "2026-11-29-no-commit"
    assert free_name(tmp_path, "bench").name == "bench.json"
    (tmp_path / "bench.json").touch()
    (tmp_path / "bench-2.json").touch()
    assert free_name(tmp_path, "bench").name == "bench-3.json"


def test_what_lies_under_a_peers_package_is_asked_where_the_peer_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("g4kv_cli.bench.peers.cudnn_peers")
    module.library = lambda: "cuDNN 9.19.0"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = {peer.name: library_of(PeerStatus(peer, "1.32.0", "")) for peer in PEERS}
    assert {name: words for name, words in found.items() if words} == {"cudnn-sdpa": "cuDNN 9.19.0"}
    cudnn = next(peer for peer in PEERS if peer.library)
    assert library_of(PeerStatus(cudnn, "", "cudnn is not installed")) == ""
    monkeypatch.setitem(sys.modules, module.__name__, None)  # an import that fails
    assert library_of(PeerStatus(cudnn, "1.32.0", "")) == ""
