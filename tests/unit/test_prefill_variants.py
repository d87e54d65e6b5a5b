"""Which kernel a prefill call gets: decided from device, page size and the library's variant, before any launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from g4kv_cli.device.interface import DeviceLimits
from g4kv_cli.entries.entry import Target, choose_variant
from g4kv_cli.entries.table import entry_named, kernel_variants, preferred_tiles
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat
from g4kv_cli.records.run import DeviceInfo

KIB = 1024
GLOBAL = entry_named("batch_prefill_paged_hd512_into")
LOCAL = entry_named("batch_prefill_paged_window_hd256_into")


@dataclass
class Card:
    """What the choice looks at."""

    info: DeviceInfo
    limits: DeviceLimits


def card(kind: Literal["cuda", "emulated"], arch: str, shared_kib: int) -> Any:
    limits = DeviceLimits(1024, (2**31 - 1, 65535, 65535), shared_kib * KIB, 132, 1 << 37)
    return Card(DeviceInfo(kind, "a card", arch), limits)


HOPPER, EMULATED = card("cuda", "sm_90a", 227), card("emulated", "sm_90", 227)
OTHERS = [card("cuda", arch, kib) for arch, kib in (("sm_80", 163), ("sm_100a", 227))]


def chosen(device: Any, page_size: int = 16, forced: str = "", kv_format: KvFormat = SPLIT) -> str:
    return choose_variant(GLOBAL, device, tile_rows=64, page_size=page_size, kv_format=kv_format, forced=forced).symbol


def cluster_tiles(device: Any, page_size: int = 16, forced: str = "") -> int:
    return kernel_variants()[chosen(device, page_size, forced)].cluster_tiles


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_a_hopper_card_takes_the_kernel_in_clusters_for_pages_of_whole_boxes(page_size: int) -> None:
    assert cluster_tiles(HOPPER, page_size) == 2
    assert cluster_tiles(HOPPER, page_size, "portable") == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 17, 100])
def test_other_pages_take_the_portable_kernel_or_are_refused_in_one_line(page_size: int) -> None:
    assert cluster_tiles(HOPPER, page_size) == 0
    assert cluster_tiles(HOPPER, page_size, "sm_90a,portable") == 0
    with pytest.raises(DeviceUnavailable, match=f"reads pages of a multiple of 16 tokens, not of {page_size}"):
        chosen(HOPPER, page_size, "sm_90a")


def test_the_emulated_device_has_no_clusters_and_runs_the_other_form_when_asked() -> None:
    assert cluster_tiles(EMULATED) == 0
    assert cluster_tiles(EMULATED, forced="sm_90a,portable") == 1
    with pytest.raises(DeviceUnavailable, match="cluster2 runs on cuda only"):
        chosen(EMULATED, forced="batch_prefill_paged_hd512_tile64_cluster2")


def test_windowed_layers_have_one_kernel_which_the_emulated_device_runs_when_asked() -> None:
    def resident_tiles(device: Any, page_size: int = 16, forced: str = "") -> int:
        return choose_variant(LOCAL, device, tile_rows=64, page_size=page_size, forced=forced).resident_tiles

    assert [resident_tiles(HOPPER, size) for size in (16, 64, 100)] == [2, 2, 0]
    assert resident_tiles(HOPPER, forced="portable") == 0
    assert resident_tiles(EMULATED) == 0
    assert resident_tiles(EMULATED, forced="sm_90a,portable") == 2


@pytest.mark.parametrize(("kv_format", "word"), [(SPLIT, ""), (FOLDED, "folded_")])
def test_either_format_has_its_kernels(kv_format: KvFormat, word: str) -> None:
    stem = f"batch_prefill_paged_{word}hd512_tile64"
    assert chosen(HOPPER, kv_format=kv_format) == f"{stem}_cluster2"
    assert chosen(HOPPER, 100, kv_format=kv_format) == stem
    assert chosen(EMULATED, kv_format=kv_format) == stem
    assert chosen(EMULATED, forced="sm_90a", kv_format=kv_format) == f"{stem}_cluster1"
    assert kernel_variants()[f"{stem}_cluster1"].same_bits_as == f"{stem}_cluster2"


def test_names_stand_in_the_order_of_preference() -> None:
    alone = "batch_prefill_paged_hd512_tile64_cluster1"
    assert chosen(HOPPER, forced=f"{alone},sm_90a") == alone
    assert cluster_tiles(HOPPER, forced=f"portable,{alone}") == 0


@pytest.mark.parametrize(
    ("device", "page_size", "tiles"),
    [
        (HOPPER, 16, (16, 64, 32)),
        (HOPPER, 48, (16, 64, 32)),
        (HOPPER, 100, (16, 32, 64)),
        (EMULATED, 16, (16, 32, 64)),
        (card("cuda", "sm_100a", 227), 16, (16, 32, 64)),
        (card("cuda", "sm_80", 163), 16, (16, 32, 64)),
    ],
)
def test_a_tile_that_a_larger_one_is_faster_than_is_tried_last(device: Any, page_size: int, tiles: Any) -> None:
    assert preferred_tiles(512, Target.of(device), page_size) == tiles
    assert preferred_tiles(256, Target.of(device), page_size) == (16, 64)


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.info.arch)
def test_no_other_card_gets_instructions_that_it_lacks(device: Any) -> None:
    assert cluster_tiles(device) == cluster_tiles(device, forced="sm_90a,portable") == 0
    with pytest.raises(DeviceUnavailable, match="is made for sm_90a, this device is"):
        chosen(device, forced="sm_90a")
