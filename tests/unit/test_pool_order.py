"""Orders of a pool's axes: offsets by hand, and that every way of looking at a pool agrees."""

from __future__ import annotations

import numpy as np
import pytest

from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.pool_order import OWN_ORDER, POOL_AXES, PoolOrder, PoolShape

SHAPE: PoolShape = (5, 2, 2, 4, 3, 8)


@pytest.mark.parametrize(
    ("axes", "want"),
    [
        # K and V apart, layer first, heads outside slots: kv * (2*5*3*4*8) + layer * (5*3*4*8) + page * (3*4*8) + ...
        ("layer page head slot dim", 1 * 960 + 1 * 480 + 3 * 96 + 2 * 32 + 1 * 8 + 7),
        ("page layer kv slot head dim", 3 * 384 + 1 * 192 + 1 * 96 + 1 * 24 + 2 * 8 + 7),
        ("kv page slot layer head dim", 1 * 960 + 3 * 192 + 1 * 48 + 1 * 24 + 2 * 8 + 7),
    ],
)
def test_offsets_by_hand(axes: str, want: int) -> None:
    order = PoolOrder.parse(axes)
    # page 3, layer 1, V, slot 1, head 2, dim 7
    assert int(order.offsets((3, 1, 1, 1, 2, 7), SHAPE)) == want
    assert [int(at) for at in order.coordinates(want, SHAPE)] == [3, 1, 1, 1, 2, 7]


def test_the_built_in_order_is_the_layouts() -> None:
    layout = KvLayout.derive(page_size=4, num_layers=2, num_kv_heads=3, head_dim=8)
    assert OWN_ORDER.is_own
    assert int(OWN_ORDER.offsets((3, 1, 1, 1, 2, 7), SHAPE)) == layout.element_offset(3, 1, "v", 1, 2, 7)


@pytest.mark.parametrize(
    "axes", ["layer page head slot dim", "page kv layer head slot dim", "slot kv page head layer dim"]
)
def test_the_logical_view_and_the_pieces_of_a_page(axes: str) -> None:
    order = PoolOrder.parse(axes)
    flat = np.arange(int(np.prod(SHAPE)))
    logical = order.logical(flat, SHAPE)
    assert logical.shape == SHAPE
    assert logical[3, 1, 0, 2, 1, 5] == int(order.offsets((3, 1, 0, 2, 1, 5), SHAPE))
    pieces = np.concatenate([np.arange(begin, begin + count) for begin, count in order.page_pieces(3, SHAPE)])
    assert sorted(pieces) == sorted(logical[3].reshape(-1))
    of_layer = [np.arange(begin, begin + count) for begin, count in order.page_pieces(3, SHAPE, layer=1)]
    assert sorted(np.concatenate(of_layer)) == sorted(logical[3, 1].reshape(-1))
    logical[3] = -1
    assert (flat == -1).sum() == pieces.size


@pytest.mark.parametrize("axes", ["", "page", "page layer kv slot dim head", " ".join((*POOL_AXES, "page"))])
def test_what_is_no_order(axes: str) -> None:
    with pytest.raises(UsageError, match="axes"):
        PoolOrder.parse(axes)
