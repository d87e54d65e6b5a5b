"""What requests of a batch share and must not feel: a bucket's padding page, and the pages of a common prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeding import seed

from g4kv_cli import (
    GEOMETRIES,
    Device,
    Geometry,
    KernelLibrary,
    PlanRequest,
    PlanShape,
    PoisonedPool,
    PrefillPagedPlan,
    RopeTables,
    entry_for,
    open_device,
    rope_rows,
)
from g4kv_cli.oracle.bfloat16 import BF16, bits

PAGE_SIZE, PADDING_PAGE, BUCKET = 4, 5, 16
REQUESTS = (
    PlanRequest.of(kv_len=6, pages=(2, 7), page_size=PAGE_SIZE),
    PlanRequest.of(kv_len=1, pages=(0,), page_size=PAGE_SIZE),
    PlanRequest.of(kv_len=12, pages=(3, 1, 6), page_size=PAGE_SIZE),
)
SLOTS = ([7, 0, 6], [1, 0, 3])
"""Page and slot of each new token."""
PADDING = (
    *[PlanRequest.padding(PADDING_PAGE)] * (BUCKET - len(REQUESTS) - 2),
    PlanRequest.of(kv_len=3, pages=(PADDING_PAGE,), page_size=PAGE_SIZE),
    PlanRequest.of(kv_len=6, pages=(PADDING_PAGE, PADDING_PAGE), page_size=PAGE_SIZE),
)
"""A graph for 16 rows that serves three: as an engine pads it, and two more at other slots of the one page."""


@dataclass
class Step:
    """One decode step of a geometry, prep and attention by one plan."""

    device: Device
    geometry: Geometry
    library: KernelLibrary

    def run(
        self, requests: tuple[PlanRequest, ...], *, prep: str, attention: str, seeds: tuple[int, ...] = (0, 1, 2)
    ) -> tuple[np.ndarray, np.ndarray]:
        """(attention of the real rows, the pool afterwards [page][layer][K, V][slot][head][dim]), as bits.

        ``seeds`` are of the histories of the first requests, the real ones.
        """
        device, geometry = self.device, self.geometry
        store = PoisonedPool(device, geometry, num_pages=8, page_size=PAGE_SIZE, num_layers=1)
        for request, history in zip(requests, seeds, strict=False):
            k, v = (self._rows(2 * history + kv, request.start_pos, geometry.num_kv_heads) for kv in (0, 1))
            store.fill(request, 0, 0, k, v)
        plan = PrefillPagedPlan.preallocated(device, max_tokens=80, max_requests=70, max_pages=90, max_tiles=90)
        plan.update(requests, shape=PlanShape.of(geometry, page_size=PAGE_SIZE), padding_page=PADDING_PAGE)
        rows = len(requests)
        cos, sin = (device.upload(table, "table") for table in rope_rows(geometry, np.arange(16), geometry.rotary_dim))
        weight = device.upload(np.full(geometry.head_dim, 0.5, BF16), "weight")
        q_out, out = (device.allocate((rows, geometry.num_qo_heads, geometry.head_dim), BF16, "out") for _ in range(2))
        arguments: dict[str, Any] = {
            "q": device.upload(self._rows(7, rows, geometry.num_qo_heads), "q"),
            "k": device.upload(self._rows(8, rows, geometry.num_kv_heads), "k"),
        }
        if not geometry.k_eq_v:
            arguments["v"] = device.upload(self._rows(9, rows, geometry.num_kv_heads), "v")
        entry_for(geometry, "prep", prep)(
            self.library,
            **arguments,
            **({"batch": plan.decode_batch()} if prep == "decode" else {"plan": plan}),
            q_norm_weight=weight, k_norm_weight=weight, rope=RopeTables(cos, sin), rotary_dim=geometry.rotary_dim,
            pool=store.pool, layer=0, q_out=q_out,
        )  # fmt: skip
        entry_for(geometry, "attention", attention)(self.library, q=q_out, plan=plan, pool=store.pool, layer=0, out=out)
        pool = bits(device.read(store.pool.data)).reshape(store.shape)
        return bits(device.read(out))[: len(seeds)], pool

    def _rows(self, seed: int, tokens: int, heads: int) -> np.ndarray:
        """The first rows are the same however many there are."""
        random = np.random.default_rng(seed)
        return random.standard_normal((tokens, heads, self.geometry.head_dim)).astype(BF16)

    def differs(self, prep: str, attention: str) -> list[str]:
        """What padding changes, of what it must not."""
        alone, pool = self.run(REQUESTS, prep=prep, attention=attention)
        padded, padded_pool = self.run((*REQUESTS, *PADDING), prep=prep, attention=attention)
        # Without padding nobody writes to the padding page, and each request writes its slot.
        assert (pool[PADDING_PAGE] == 0xFFFF).all()
        assert (pool[SLOTS[0], :, :, SLOTS[1]] != 0xFFFF).all()
        others = [page for page in range(8) if page != PADDING_PAGE]
        found = [] if (padded == alone).all() else ["attention"]
        return found if (padded_pool[others] == pool[others]).all() else [*found, "pool"]


@pytest.fixture
def device() -> Iterator[Device]:
    device = open_device("emulated")
    yield device
    device.close()


@pytest.mark.parametrize("geometry", ["e4b-local", "12b-global"])
@pytest.mark.parametrize(("prep", "attention"), [("decode", "decode"), ("batch_prefill", "prefill")])
def test_padding_changes_one_page_and_no_answer(geometry: str, prep: str, attention: str, device: Device) -> None:
    assert Step(device, GEOMETRIES[geometry], KernelLibrary(device)).differs(prep, attention) == []


@pytest.mark.parametrize(
    ("source", "right", "wrong", "what"),
    [
        (
            "prep_body.cuh",
            "if (takes_page) page = load_page<kForm, kEarly>(p, page_row, logical_page);",
            # A padding row that writes where nobody is.
            "if (takes_page) page = load_page<kForm, kEarly>(p, page_row, logical_page);"
            f" if (page == {PADDING_PAGE} && position == 2) page = 4;",
            ["pool"],
        ),
        (
            "attention_tile.cuh",
            "rows.kv_len = p.kv_lens[request];",
            # Bits that depend on how many requests the bucket has.
            "rows.kv_len = p.kv_lens[request] - (p.num_tiles > 8 && p.kv_lens[request] > 8);",
            ["attention"],
        ),
    ],
)
def test_a_kernel_that_padding_changes_is_seen(
    source: str, right: str, wrong: str, what: list[str], device: Device, tmp_path: Path
) -> None:
    launched = ("prep/e4b-local/decode/padding", "attention/e4b-local/decode/padding")
    library = KernelLibrary(device, seed(tmp_path, ((source, right, wrong),), launched))
    assert Step(device, GEOMETRIES["e4b-local"], library).differs("decode", "decode") == what


@pytest.mark.parametrize("geometry", ["e4b-local", "12b-global"])
@pytest.mark.parametrize(("prep", "attention"), [("decode", "decode"), ("batch_prefill", "prefill")])
def test_a_shared_prefix_gives_what_copies_of_it_give(geometry: str, prep: str, attention: str, device: Device) -> None:
    def request(kv_len: int, *pages: int) -> PlanRequest:
        return PlanRequest.of(kv_len=kv_len, pages=pages, page_size=PAGE_SIZE)

    step = Step(device, GEOMETRIES[geometry], KernelLibrary(device))
    seeds = (0, 0)  # the same tokens, of which the second request has more
    shared, pool = step.run((request(9, 2, 7, 3), request(12, 2, 7, 1)), prep=prep, attention=attention, seeds=seeds)
    copied, _ = step.run((request(9, 2, 7, 3), request(12, 0, 6, 1)), prep=prep, attention=attention, seeds=seeds)
    assert (shared == copied).all()
    assert (shared[0] != shared[1]).any()
    assert (pool[[0, 4, 6]] == 0xFFFF).all()
