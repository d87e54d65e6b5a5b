"""Decode in thread block clusters on the host: which kernel is chosen, what is launched, what the copies see."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import DeviceArray, Launch, LoadedKernel, PagedReads
from g4kv_cli.entries import clusters
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.clusters import cluster_blocks, kv_maps, launch_in_clusters, suggested_splits
from g4kv_cli.entries.entry import KernelVariant, choose_variant
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, entry_named
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.records.bench import read_bench_record

RECORD = Path(__file__).resolve().parents[2] / "results" / "nvidia-h200" / "2026-11-30-fb1ee45" / "bench.json"
DECODE = tuple(
    entry.name
    for entry in entries("attention")
    if entry.one_token_each and any(kernel.arch for kernel in entry.kernels)
)
FOLDED_DECODE = tuple((name, FOLDED) for name in DECODE if entry_named(name).head_dim == 512)
LAYOUT = KvLayout.derive(page_size=48, num_layers=3, num_kv_heads=4, head_dim=512)
FOLDED_LAYOUT = KvLayout.derive(page_size=48, num_layers=3, num_kv_heads=4, head_dim=512, k_dim=128)


class _Recorder(EmulatedDevice):
    """An emulated device's memory that says it is a GPU; launches and tensor maps are written down, not made."""

    def __init__(self, arch: str = "sm_90") -> None:
        super().__init__(arch)
        self.info = replace(self.info, kind="cuda")
        self.made: list[tuple[str, Launch]] = []
        self.maps: list[tuple[DeviceArray, TensorMapShape]] = []

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.made.append((kernel.name, launch))

    def tensor_map(self, array: DeviceArray, shape: TensorMapShape) -> Argument:
        self.maps.append((array, shape))
        return Argument("tensor_map", bytes(128))


class _NoKernels(KernelLibrary):
    """Kernels that are named and never compiled."""

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        return LoadedKernel(symbol, image=None, handle=None)  # type: ignore[arg-type]


def _device(arch: str, kind: str) -> Any:
    limits = SimpleNamespace(max_shared_bytes_per_block=232448, multiprocessors=132, max_grid=(2**31 - 1, 65535, 65535))
    info = SimpleNamespace(arch=arch, kind=kind)
    return SimpleNamespace(info=info, limits=limits, keep_translations=lambda store: None)


def _chosen(
    name: str, arch: str = "sm_90", kind: str = "cuda", page_size: int = 16, group: int = 2, **rest: Any
) -> Any:
    return choose_variant(
        entry_named(name), _device(arch, kind), tile_rows=16, page_size=page_size, group=group, **rest
    )


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODE)
def test_clusters_run_on_the_architecture_they_are_made_for_and_on_pages_that_copies_can_read(name: str) -> None:
    for page_size in (16, 48, 64, 256):
        assert _chosen(name, page_size=page_size).path == "sm_90a"
    for page_size in (1, 8, 24, 100):
        assert _chosen(name, page_size=page_size).path == "portable"
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert _chosen(name, arch).path == "portable"
    assert _chosen(name, kind="emulated").path == "portable"


@pytest.mark.parametrize(("name", "kv_format"), [*((name, SPLIT) for name in DECODE), *FOLDED_DECODE])
def test_every_group_has_a_kernel_with_columns_for_it(name: str, kv_format: KvFormat) -> None:
    for group in range(1, 17):
        kernel = _chosen(name, group=group, kv_format=kv_format)
        assert kernel.max_cluster_blocks
        assert kernel.max_group >= group
        assert ("folded" in kernel.symbol) == (kv_format == FOLDED)


@pytest.mark.parametrize("name", DECODE)
def test_a_path_can_be_forced_and_says_why_it_cannot_run(name: str) -> None:
    assert _chosen(name, forced="portable").path == "portable"
    assert _chosen(name, forced="sm_90a").max_cluster_blocks
    with pytest.raises(DeviceUnavailable, match="reads pages of a multiple of 16 tokens, not of 100"):
        _chosen(name, page_size=100, forced="sm_90a")
    most = 8 if entry_named(name).takes_splits else 1
    assert _chosen(name, kind="emulated", forced="sm_90a").max_cluster_blocks == most


@pytest.mark.parametrize(
    ("files", "path"),
    [
        (("decode_body.cuh",), "portable"),
        (("attention_tile.cuh",), "portable"),
        (("prep_hd256.cu",), "portable"),
        (("decode_hopper_body.cuh",), "sm_90a"),
        (("decode_hopper_hd256.cu", "decode_hopper_hd512.cu", "decode_body.cuh"), "sm_90a"),
    ],
)
def test_a_directory_that_replaces_portable_kernels_runs_them(
    files: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    """Else a changed decode_body.cuh would pass on a GPU that never launched it."""
    for name in files:
        (tmp_path / name).write_text("// mine\n", encoding="utf-8")
    library = KernelLibrary(_device("sm_90", "cuda"), tmp_path)
    for name in DECODE:
        assert _chosen(name, replaced=library.replaced_files).path == path
        assert _chosen(name, replaced=library.replaced_files, forced="sm_90a").path == "sm_90a"


# --- the launches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [*range(1, 70), 96, 104, 112, 120, 128, 224, 65535])
def test_splits_are_one_cluster_or_blocks_alone_and_of_one_count_several_clusters(num_splits: int) -> None:
    """Whether several clusters a request fit on the card at once hangs on the request's companions."""
    for most in (1, 6, 8):
        several = most == 8 and num_splits == 112
        assert cluster_blocks(num_splits, most) == (8 if several else num_splits if num_splits <= most else 1)


def _launched(
    num_splits: int, num_requests: int, name: str = "batch_decode_split_paged_hd512_into", *, overlap: bool = False
) -> _Recorder:
    device = _Recorder()
    entry = entry_named(name)
    kernel = choose_variant(entry, device, tile_rows=16, page_size=48, group=2)
    pool = device.allocate((2 * LAYOUT.page_stride,), BF16, "pool")
    parameters = AttentionParameters(
        q=2**40, out=2**41, pool=pool.address, page_indptr=2**42, page_origins=2**43, kv_lens=2**44,
        page_indices=2**45, partial_out=2**46, partial_max=2**47, partial_sum=2**48, num_qo_heads=8, num_kv_heads=4,
        num_splits=num_splits, layout=LAYOUT.parameters(),
    )  # fmt: skip
    no_pages = PagedReads(pool, LAYOUT.page_bytes, np.zeros(0, np.int32), np.zeros(1, np.int32), True, str, str)
    launch_in_clusters(
        _NoKernels(device), kernel, entry.merge_kernels, parameters, num_requests=num_requests, pool=pool,
        layout=LAYOUT, must_write=(), paged_reads=no_pages, overlap=overlap,
    )  # fmt: skip
    device.close()
    return device


def _parameters(launch: Launch) -> AttentionParameters:
    return AttentionParameters.from_buffer_copy(launch.arguments[0].data)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("num_splits", "blocks", "shares"), [(1, 1, 1), (3, 3, 1), (8, 8, 1), (9, 1, 9), (16, 1, 16), (112, 8, 14)]
)
def test_one_cluster_needs_one_launch_and_several_or_blocks_alone_a_merge_that_overlaps(
    num_splits: int, blocks: int, shares: int, overlap: bool
) -> None:
    made = _launched(num_splits, num_requests=5, overlap=overlap).made
    name, first = made[0]
    assert first.grid == (blocks, 4, 5 * shares)
    assert first.cluster == (blocks, 1, 1)
    assert first.overlap is overlap
    assert _parameters(first).num_splits == shares
    if shares == 1:
        assert len(made) == 1
        return
    merge, second = made[1]
    assert merge != name
    assert len(made) == 2
    assert second.overlap
    assert second.grid[0] == 5 * 8
    assert _parameters(second).num_splits == shares


def test_a_block_alone_asks_for_no_memory_to_receive_in() -> None:
    alone, several = _launched(1, 2).made[0][1], _launched(2, 2).made[0][1]
    assert alone.dynamic_shared_bytes < several.dynamic_shared_bytes


def test_more_requests_than_a_grid_holds_go_in_shares_that_begin_where_the_last_ended() -> None:
    whole = _launched(16, num_requests=65535 // 16).made
    assert [launch.grid[2] for _, launch in whole[:-1]] == [65535 // 16 * 16]
    shares = _launched(16, num_requests=9000).made
    requests = [launch.grid[2] // 16 for _, launch in shares[:-1]]
    assert len(requests) > 1
    assert sum(requests) == 9000
    assert all(launch.grid[2] <= 65535 for _, launch in shares[:-1])
    begin = 0
    row = 8 * 512 * 2  # q[request][8 heads][512] bf16
    for count, (_, launch) in zip(requests, shares[:-1], strict=True):
        parameters = _parameters(launch)
        assert parameters.q == 2**40 + begin * row
        assert parameters.out == 2**41 + begin * row
        assert parameters.lse == 0
        assert (parameters.page_indptr, parameters.page_origins, parameters.kv_lens) == tuple(
            2**power + begin * 4 for power in (42, 43, 44)
        )
        assert (parameters.page_indices, parameters.pool) == (2**45, _parameters(shares[0][1]).pool)
        # partial_out[request][8 heads][16 splits][512] float32
        assert parameters.partial_out == 2**46 + begin * 8 * 16 * 512 * 4
        assert parameters.partial_max == 2**47 + begin * 8 * 16 * 4
        begin += count
    assert _parameters(shares[-1][1]).partial_out == 2**46


@pytest.mark.parametrize("layout", [LAYOUT, FOLDED_LAYOUT], ids=["split", "folded"])
def test_maps_have_every_row_where_the_layout_has_it(layout: KvLayout) -> None:
    device = _Recorder()
    pages = 5
    pool = device.allocate((pages * layout.page_stride,), BF16, "pool")
    assert len(kv_maps(pool, layout)) == len(device.maps) == (1 if layout is LAYOUT else 2)
    random = np.random.default_rng(3)
    assert sum(math.prod(shape.extents) for _, shape in device.maps) == pool.size
    for _, shape in device.maps:
        assert shape.l2_bytes == 128  # a row of the box
        assert shape.extents[4] == pages
    for _ in range(200):
        page, layer, kv, slot, head = (int(random.integers(n)) for n in (pages, 3, 2, 48, 4))
        columns = 512 if kv else layout.k_dim
        dim = int(random.integers(columns))
        array, shape = device.maps[kv % len(device.maps)]
        assert shape.box == (64, 16, columns // 64, 1, 1)
        column_block, column = divmod(dim, shape.box[0])
        block = layer * 2 + kv if layout is LAYOUT else layer
        at = (slot, head * (columns // shape.box[0]) + column_block, block, page)
        got = array.address - pool.address + column * 2
        got += sum(place * stride for place, stride in zip(at, shape.strides_bytes, strict=True))
        assert all(place < extent for place, extent in zip((column, *at), shape.extents, strict=True))
        # pool[page][layer][K, V][slot][head][dim]
        want = page * layout.page_stride + layer * layout.layer_stride + kv * layout.kv_block_len
        assert got == 2 * (want + (slot * 4 + head) * columns + dim)
    device.close()


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [2, 8, 16])
def test_suggested_splits_fill_half_the_card_and_where_blocks_compute_all_of_it(group: int) -> None:
    device = _device("sm_90", "cuda")
    for requests in (1, 2, 3, 4, 12, 16, 24, 64, 256, 1000):
        for heads in (1, 2, 4, 8, 16):
            for keys in (1, 16, 17, 128, 1024, 131072):
                splits = suggested_splits(
                    device, num_requests=requests, num_qo_heads=group * heads, num_kv_heads=heads, head_dim=512,
                    visible_keys=keys,
                )  # fmt: skip
                assert splits <= 8 or splits & (splits - 1) == 0 or splits == 112
                assert splits == 1 or (splits - 1) * clusters.TILE_KEYS < keys
                units = requests * heads
                if units > 66:
                    assert splits == (2 if group == 16 and units <= 132 and keys >= 512 else 1)
                elif keys == 131072 and group == 16:
                    assert splits == 2 or 8 * units <= 132 < 9 * units or units * splits * 2 > 132 * 9 // 10
                elif keys == 131072:
                    assert splits == 2 or 33 < units * splits <= 73
                elif keys == 1024:
                    assert splits in (2, 8) or units * splits > 33
    assert (
        suggested_splits(device, num_requests=0, num_qo_heads=group, num_kv_heads=1, head_dim=256, visible_keys=0) == 1
    )


@pytest.mark.parametrize(
    ("requests", "heads", "group", "head_dim", "keys", "splits"),
    [
        # One KV head and 16 query heads: 73 blocks, and none alone with fewer keys than there are blocks.
        (1, 1, 16, 512, 128, 8), (4, 1, 16, 512, 128, 8),
        # Blocks alone for every tile, or every two of them; for every four where they replace a cluster or are many.
        (1, 1, 16, 512, 512, 32), (1, 1, 16, 512, 300, 16), (4, 1, 16, 512, 512, 16), (4, 1, 16, 512, 1024, 32),
        (4, 1, 16, 512, 1008, 16), (2, 1, 16, 512, 2048, 64), (2, 1, 16, 512, 2032, 32), (1, 1, 16, 512, 8192, 128),
        (1, 1, 16, 512, 8176, 64), (8, 1, 16, 512, 1024, 16), (8, 1, 16, 512, 1008, 8),
        (16, 1, 16, 512, 128, 4), (64, 1, 16, 512, 128, 2), (64, 1, 16, 512, 1024, 2), (66, 1, 16, 512, 1024, 2),
        (66, 1, 8, 512, 131072, 2),
        # Two one after the other, until there are as many requests as multiprocessors.
        (67, 1, 16, 512, 131072, 2), (132, 1, 16, 512, 512, 2), (132, 1, 16, 512, 511, 1), (133, 1, 16, 512, 131072, 1),
        (67, 1, 8, 512, 131072, 1),
        # 256 keys of 512 elements a split: all of the card, as far as clusters fit at once.
        (4, 1, 16, 512, 8192, 32), (16, 1, 16, 512, 1024, 6), (8, 1, 16, 512, 8192, 16), (32, 1, 16, 512, 8192, 3),
        (1, 1, 16, 512, 32768, 128),
        # Six splits leave more than a quarter over: two blocks a multiprocessor for the longest. 8 or 10 do not.
        (16, 1, 16, 512, 16384, 6), (16, 1, 16, 512, 32768, 16), (12, 1, 16, 512, 32768, 8),
        (32, 1, 16, 512, 131072, 3), (8, 1, 16, 512, 131072, 16),
        # Up to 8 query heads a KV head: half the card, however long, and blocks alone from twice as many keys on.
        (1, 4, 8, 512, 1024, 8), (1, 4, 8, 512, 2048, 16), (1, 4, 8, 512, 131072, 16), (3, 4, 8, 512, 8192, 6),
        (4, 4, 8, 512, 131072, 4), (6, 4, 8, 512, 1024, 3), (8, 4, 8, 512, 128, 2), (16, 4, 8, 512, 128, 1),
        (16, 4, 8, 512, 256, 2),
        # 1024 visible keys of 8 and 16 KV heads.
        (1, 8, 2, 256, 1024, 8), (4, 8, 2, 256, 1024, 2), (16, 8, 2, 256, 1024, 1), (1, 16, 2, 256, 1024, 4),
        (4, 16, 2, 256, 128, 1), (4, 16, 2, 256, 512, 2),
    ],
)  # fmt: skip
def test_suggested_splits(requests: int, heads: int, group: int, head_dim: int, keys: int, splits: int) -> None:
    device = _device("sm_90", "cuda")
    assert splits == suggested_splits(
        device, num_requests=requests, num_qo_heads=group * heads, num_kv_heads=heads, head_dim=head_dim,
        visible_keys=keys,
    )  # fmt: skip


def test_what_the_rule_loses_in_the_record() -> None:
    """Against the best of the counts that were measured; the numbers stand at suggested_splits."""
    device, record = _device("sm_90", "cuda"), read_bench_record(RECORD, "")
    losses = []
    clustered = [one for one in record.measurements if one.form in ("b", "c")]
    for shape in (one for one in record.shapes if one.kind == "decode"):
        times = {one.num_splits: one.seconds for one in clustered if one.shape == shape.id}
        splits = suggested_splits(
            device, num_requests=shape.batch, num_qo_heads=shape.num_qo_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, visible_keys=shape.visible_keys, k_dim=128 if shape.kv_format else None,
        )  # fmt: skip
        known = [seconds for seconds in times.values() if seconds is not None]
        if known:
            losses.append((times[splits] or math.inf) / min(known))
    assert len(losses) == 136
    assert max(losses) < 1.0295
    assert sum(loss > 1.0285 for loss in losses) == 1


@pytest.mark.parametrize(
    ("requests", "heads", "keys", "splits"),
    [
        (1, 1, 8192, 64),
        (1, 1, 32768, 112),
        (4, 1, 8192, 32),
        (16, 1, 8192, 6),
        (8, 1, 2048, 8),
        (64, 1, 32768, 2),
        (96, 1, 8192, 1),
    ],
)
def test_folded_rows_are_read_sooner_so_more_keys_make_a_long_split(
    requests: int, heads: int, keys: int, splits: int
) -> None:
    device = _device("sm_90", "cuda")
    where = {"num_requests": requests, "num_qo_heads": 16 * heads, "num_kv_heads": heads, "head_dim": 512}
    assert splits == suggested_splits(device, **where, visible_keys=keys, k_dim=128)
    assert suggested_splits(device, **where, visible_keys=keys) == suggested_splits(
        device, **where, visible_keys=keys, k_dim=512
    )


def test_a_split_is_long_by_what_its_rows_hold() -> None:
    """4096 keys in 16 splits of one KV head and 4 requests: 2^18 elements each if split, 5 / 8 of them if folded."""
    device = _device("sm_90", "cuda")
    where = {"num_requests": 4, "num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 512}
    assert suggested_splits(device, **where, visible_keys=4096) == 32
    assert suggested_splits(device, **where, visible_keys=4096, k_dim=128) == 16


@pytest.mark.parametrize("group", [8, 16])
def test_suggested_clusters_start_together(group: int) -> None:
    """What starts at once on 132 multiprocessors where a block has one to itself; on an H200 16 clusters of 7 or 8 and
    24 of 5 did not."""
    device, fit = _device("sm_90", "cuda"), {2: 66, 3: 44, 4: 30, 5: 23, 6: 21, 7: 15, 8: 15}
    for requests in range(1, 140):
        for keys in (64, 512, 2048, 131072):
            splits = suggested_splits(
                device, num_requests=requests, num_qo_heads=group, num_kv_heads=1, head_dim=512, visible_keys=keys
            )
            assert requests <= fit.get(splits, 10**6) or (splits == 2 and group == 16 and requests <= 132)


def test_only_blocks_in_clusters_have_memory_to_receive_in() -> None:
    kernels: list[KernelVariant] = [kernel for name in DECODE for kernel in entry_named(name).kernels]
    made = {kernel.symbol: kernel for kernel in kernels if kernel.max_cluster_blocks}
    for kernel in made.values():
        assert (kernel.alone_shared_bytes < kernel.shared_bytes) == (kernel.max_cluster_blocks > 1)
    assert all(kernel.page_multiple == clusters.TILE_KEYS for kernel in made.values())
