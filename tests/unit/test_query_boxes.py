"""Tensor maps of queries, and when keys of short requests are shared out: what the host says at a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.attention_request import _cluster, _grid, _may_split
from g4kv_cli.entries.kv_boxes import query_box_map
from g4kv_cli.entries.table import kernel_variants

PAIRS = kernel_variants()["batch_prefill_paged_hd256_tile64_pairs"]


def asked(heads: int, kv_heads: int) -> TensorMapShape:
    made: list[TensorMapShape] = []

    def tensor_map(_array: Any, shape: TensorMapShape) -> Argument:
        made.append(shape)
        return Argument("tensor_map", b"")

    q: Any = SimpleNamespace(
        shape=(90, heads, 256), dtype=np.dtype(np.uint16), device=SimpleNamespace(tensor_map=tensor_map)
    )
    query_box_map(q, AttentionParameters(num_kv_heads=kv_heads), tokens=70, rows=64)
    return made[0]


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_a_box_is_a_tile_and_nothing_behind_the_plans_tokens_is_read(group: int) -> None:
    shape = asked(2 * group, 2)
    assert shape.box == (64, group, 64 // group, 4)
    assert shape.extents == (64, 2 * group, 70, 4)
    assert shape.strides_bytes == (512, 2 * group * 512, 128)


@pytest.mark.parametrize("group", [3, 5, 7])
def test_a_group_that_does_not_divide_a_tile_has_no_box(group: int) -> None:
    assert asked(group, 1).box == (64, 1, 1, 1)


@pytest.mark.parametrize(
    ("min_q_len", "kv_heads", "splits"),
    [(512, 8, True), (513, 8, False), (512, 16, False), (128, 16, True), (0, 16, True)],
)
def test_keys_may_be_shared_out_if_the_shortest_request_leaves_blocks_idle(
    min_q_len: int, kv_heads: int, splits: bool
) -> None:
    shape = SimpleNamespace(num_qo_heads=2 * kv_heads, num_kv_heads=kv_heads)
    bounds: Any = SimpleNamespace(shape=shape, min_q_len=min_q_len)
    assert _may_split(PAIRS, bounds) is splits


@pytest.mark.parametrize(
    ("multiprocessors", "tiles", "split_tiles", "blocks"),
    [
        (132, 16, 128, 128),
        (132, 16, 0, 64),
        (132, 17, 0, 72),
        (132, 400, 128, 132),
        (67, 400, 128, 66),
        (67, 400, 0, 67),
    ],
)
def test_blocks_that_stay_are_no_more_than_their_units_and_multiprocessors_in_whole_clusters(
    multiprocessors: int, tiles: int, split_tiles: int, blocks: int
) -> None:
    library: Any = SimpleNamespace(device=SimpleNamespace(limits=SimpleNamespace(multiprocessors=multiprocessors)))
    parameters = AttentionParameters(num_kv_heads=8, num_splits=split_tiles)
    assert _grid(library, PAIRS, tiles, parameters) == (blocks, 1, 1)
    assert _cluster(PAIRS, parameters) == (2 if split_tiles else 1)
