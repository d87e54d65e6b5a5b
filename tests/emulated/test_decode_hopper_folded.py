"""Decode for sm_90 over folded pools, on the emulated device: rows of K hold the rotated columns, V has the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.arguments import PagedPool
from g4kv_cli.entries.clusters import WHOLE_CARD_SPLITS
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import entry_named
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.oracle.attention import attend
from g4kv_cli.oracle.bfloat16 import BF16

HEAD_DIM, K_DIM, LAYERS, LAYER = 512, 128, 2, 1
ROTATED = [*range(64), *range(256, 320)]
KERNELS = "paged_decode_hopper_folded_"


class _Batch:
    """Requests of these lengths on permuted pages; NaN in all other slots, in the other layer and in unused pages."""

    def __init__(self, lengths: tuple[int, ...], heads: int, kv_heads: int, page_size: int) -> None:
        random = np.random.default_rng([len(lengths), heads, page_size])
        self.device = EmulatedDevice("sm_90")
        self.library = KernelLibrary(self.device, variant="sm_90a")
        counts = [-(-length // page_size) for length in lengths]
        pages = random.permutation(sum(counts) + 2)
        layout = KvLayout.derive(
            page_size=page_size, num_layers=LAYERS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, k_dim=K_DIM
        )
        flat = np.full(layout.pool_elems(len(pages)), np.nan, BF16)
        k_blocks, v_blocks = PoolImage.of(layout, len(pages)).blocks(flat)
        q = random.standard_normal((len(lengths), heads, HEAD_DIM)).astype(np.float32) * np.float32(0.2)
        self.q = q.astype(BF16)
        self.want, requests, begin = [], [], 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = pages[begin : begin + count]
            begin += count
            k_rows = random.standard_normal((length, kv_heads, K_DIM)).astype(BF16)
            v = random.standard_normal((length, kv_heads, HEAD_DIM)).astype(BF16)
            for position in range(length):
                place = (own[position // page_size], LAYER, position % page_size)
                k_blocks[place], v_blocks[place] = k_rows[position], v[position]
            k = v.copy()
            k[..., ROTATED] = k_rows
            self.want.append(attend(self.q[row : row + 1], k, v, first_key=0, window_left=-1, sm_scale=1.0))
            requests.append(PlanRequest.of(kv_len=length, pages=own.tolist(), page_size=page_size))
        self.pool = PagedPool(layout, self.device.upload(flat, "pool"))
        shape = PlanShape(heads, kv_heads, HEAD_DIM, page_size, -1, 1.0)
        self.plan = PrefillPagedPlan.batch(self.device, requests, shape=shape)

    def call(self, form: str, num_splits: int = 0) -> npt.NDArray[Any]:
        """What the entry gives, float64 [requests, heads, head_dim], checked against the oracle's limits."""
        out = self.device.allocate(self.q.shape, BF16, "out")
        lse = self.device.allocate(self.q.shape[:2], np.dtype(np.float32), "lse")
        arguments: dict[str, Any] = {"q": self.device.upload(self.q, "q"), "plan": self.plan, "pool": self.pool}
        if num_splits:
            arguments["num_splits"] = num_splits
            arguments["workspace"] = SplitWorkspace.allocate(
                self.device, tokens=len(self.q), num_qo_heads=self.q.shape[1], num_splits=num_splits, head_dim=HEAD_DIM
            )
        entry_named(f"batch_{form}_paged_hd512_into")(self.library, layer=LAYER, out=out, lse=lse, **arguments)
        got, got_lse = self.device.read(out).astype(np.float64), self.device.read(lse).astype(np.float64)
        for row, want in enumerate(self.want):
            assert (np.abs(got[row] - want.value[0]) <= want.rounding.limit[0]).all()
            assert (np.abs(got_lse[row] - want.lse[0]) <= want.lse_limit[0]).all()
        return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "symbol"),
    [
        (16, 1, 16, "hd512_heads16"),
        (16, 2, 48, "hd512_heads8"),
        (5, 1, 64, "hd512_heads8"),
        (9, 1, 16, "hd512_heads16"),
    ],
)
def test_any_split_of_ragged_requests_is_right(heads: int, kv_heads: int, page_size: int, symbol: str) -> None:
    batch = _Batch((1, 64, 133), heads, kv_heads, page_size)
    batch.call("decode")
    assert list(batch.library.launched) == [KERNELS + symbol]
    batch.library.launched.clear()
    for num_splits in (2, 9):
        batch.call("decode_split", num_splits)
    assert list(batch.library.launched) == [f"{KERNELS}split_{symbol}", "merge_splits_after_hd512"]


def test_several_clusters_of_a_request_leave_partial_results_to_the_merge() -> None:
    """14 clusters of 8 blocks with two teams each, and keys for the first ten."""
    batch = _Batch((29 * 16 - 3,), 2, 1, 16)
    batch.call("decode_split", WHOLE_CARD_SPLITS)
    assert list(batch.library.launched) == [f"{KERNELS}split_hd512_heads8", "merge_splits_after_hd512"]


def test_pages_that_a_copy_does_not_divide_are_not_covered() -> None:
    with pytest.raises(DeviceUnavailable, match="reads pages of a multiple of 16 tokens, not of 24"):
        _Batch((5,), 8, 1, 24).call("decode")
