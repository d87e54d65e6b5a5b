"""The names that programs import, what they cost until used, and a pool read back by request and position."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import g4kv_cli
from g4kv_cli import GEOMETRIES, ContractError, Device, PlanRequest, PlanShape, PoisonedPool, PrefillPagedPlan, api
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.model.pool_order import PoolOrder
from g4kv_cli.oracle.bfloat16 import BF16, bits

GEOMETRY = GEOMETRIES["e4b-local"]
PAGE_SIZE = 4


@pytest.fixture
def device() -> Iterator[Device]:
    device = EmulatedDevice()
    yield device
    device.close()


def refusal(call: object, *arguments: object, **named: object) -> tuple[str, str]:
    with pytest.raises(ContractError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    return caught.value.code, caught.value.field


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_package_gives_what_the_api_exports() -> None:
    assert set(g4kv_cli.API_NAMES) == set(api.__all__)
    assert set(api.__all__) <= set(dir(g4kv_cli))
    for name in api.__all__:
        assert getattr(g4kv_cli, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = g4kv_cli.nonsense


def test_the_package_loads_nothing_before_a_name_is_used() -> None:
    script = (
        "import sys, g4kv_cli, g4kv_cli.errors\n"
        "heavy = ('numpy', 'ml_dtypes', 'cuda', 'g4kv_cli.api')\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
        "from g4kv_cli import PlanRequest\n"
        "assert 'numpy' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_rule_is_known_where_the_api_is() -> None:
    script = "from g4kv_cli import RULES; print(*RULES)"
    known = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert sorted(known) == sorted(api.RULES)


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_len", "q_len", "pages", "window", "want"),
    [
        # pages hold 4 tokens; (start_pos, pages, last_page_len, page_origin)
        (1, 1, (7,), None, (0, (7,), 1, 0)),
        (4, 1, (7,), None, (3, (7,), 4, 0)),
        (5, 5, (7, 2), None, (0, (7, 2), 1, 0)),
        (10, 1, (2, 9), None, (9, (2, 9), 2, 1)),
        # The query at 9 sees keys 8 and 9, or 7 to 9: slot 3 of page 1 as well.
        (10, 1, (7, 2, 9), 2, (9, (9,), 2, 2)),
        (10, 1, (7, 2, 9), 3, (9, (2, 9), 2, 1)),
        # The oldest of three queries, at 7, sees 6 and 7.
        (10, 3, (7, 2, 9), 2, (7, (2, 9), 2, 1)),
        (8, 0, (7, 2), 1, (8, (2,), 4, 1)),
    ],
)
def test_a_request_derives_what_is_filled_and_what_is_gone(
    kv_len: int, q_len: int, pages: tuple[int, ...], window: int | None, want: tuple[object, ...]
) -> None:
    made = PlanRequest.of(kv_len=kv_len, q_len=q_len, pages=pages, page_size=4, window=window)
    assert (made.start_pos, made.page_indices, made.last_page_len, made.page_origin) == want
    assert made.q_len == q_len


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 100, None])
@pytest.mark.parametrize("q_len", [0, 1, 3, 9])
def test_a_request_keeps_the_pages_of_every_key_that_it_sees(window: int | None, q_len: int) -> None:
    for kv_len in range(max(1, q_len), 30):
        pages = list(range(100, 100 + -(-kv_len // 4)))
        made = PlanRequest.of(kv_len=kv_len, q_len=q_len, pages=pages, page_size=4, window=window)
        queries = range(kv_len - q_len, kv_len)
        seen = {key for query in queries for key in range(query + 1) if window is None or query - key < window}
        assert {pages[key // 4] for key in seen} <= set(made.page_indices)
        # No page more than that, and never none.
        assert not seen or made.page_indices[0] == pages[min(seen) // 4]
        assert list(made.page_indices) == pages[made.page_origin :]


# --- the pool -------------------------------------------------------------------------------------------------------


def rows(tokens: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.standard_normal((tokens, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)).astype(BF16)


def test_what_was_filled_is_read_and_all_else_is_poison(device: Device) -> None:
    store = PoisonedPool(device, GEOMETRY, num_pages=5, page_size=PAGE_SIZE, num_layers=2)
    # Positions 4 .. 13, of which 5 .. 11 are written, over three pages in no order.
    request = PlanRequest.of(kv_len=14, q_len=3, pages=(3, 0, 4), page_size=PAGE_SIZE)
    assert request.page_origin == 1
    k, v = rows(7, 1), rows(7, 2)
    store.fill(request, 1, 5, k, v)
    read_k, read_v = store.read(request, 1)
    for read, written in ((read_k, k), (read_v, v)):
        assert len(read) == 10
        assert (bits(read)[1:8] == bits(written)).all()
        assert (bits(read)[[0, 8, 9]] == 0xFFFF).all()
    part, _ = store.read(request, 1, range(7, 9))
    assert (bits(part) == bits(k)[2:4]).all()
    # By the layout's own shape: page 0 holds positions 8 .. 11 in its slots 0 .. 3, layer 1, K then V.
    image = bits(device.read(store.pool.data)).reshape(store.shape)
    assert (image[0, 1, 0] == bits(k)[3:7]).all()
    assert (image[3, 1, 1, 1:4] == bits(v)[:3]).all()
    assert np.count_nonzero(image != 0xFFFF) <= 2 * k.size
    store.poison(0)
    assert (bits(store.read(request, 1, range(8, 12))[0]) == 0xFFFF).all()
    assert (bits(store.read(request, 1, range(5, 8))[0]) == bits(k)[:3]).all()


@pytest.mark.parametrize(
    "axes", ["page layer kv head slot dim", "layer page head slot dim", "kv head slot page layer dim"]
)
def test_a_pool_of_other_axes_holds_the_same_rows_elsewhere(device: Device, axes: str) -> None:
    order = PoolOrder.parse(axes)
    store = PoisonedPool(device, GEOMETRY, num_pages=5, page_size=PAGE_SIZE, num_layers=2, order=order)
    own = PoisonedPool(device, GEOMETRY, num_pages=5, page_size=PAGE_SIZE, num_layers=2)
    request = PlanRequest.of(kv_len=14, q_len=3, pages=(3, 0, 4), page_size=PAGE_SIZE)
    k, v = rows(7, 1), rows(7, 2)
    for each in (store, own):
        each.fill(request, 1, 5, k, v)
    for read, want in zip(store.read(request, 1), own.read(request, 1), strict=True):
        assert (bits(read) == bits(want)).all()
    in_memory, want = bits(device.read(store.pool.data)), bits(device.read(own.pool.data)).reshape(own.shape)
    assert (order.logical(in_memory, store.shape) == want).all()
    assert (in_memory != want.reshape(-1)).any()
    store.poison(0)
    changed = order.logical(bits(device.read(store.pool.data)), store.shape) != want
    assert changed[0].any()
    assert not changed[1:].any()


def test_a_folded_pool_holds_rows_of_both_lengths(device: Device) -> None:
    geometry = GEOMETRIES["31b-global"]
    store = PoisonedPool(device, geometry, num_pages=4, page_size=PAGE_SIZE, num_layers=2, kv_format="folded")
    request = PlanRequest.of(kv_len=14, q_len=3, pages=(3, 0, 2, 1), page_size=PAGE_SIZE)
    random = np.random.default_rng(3)
    k, v = (random.standard_normal((7, 4, columns)).astype(BF16) for columns in (128, 512))
    store.fill(request, 1, 5, k, v)
    for read, written in zip(store.read(request, 1, range(5, 12)), (k, v), strict=True):
        assert (bits(read) == bits(written)).all()
    flat = bits(device.read(store.pool.data))
    assert flat.size == store.pool.layout.pool_elems(4)
    assert np.count_nonzero(flat != 0xFFFF) == k.size + v.size
    # Position 8 is slot 0 of its third page, 2: layer 1 begins with the K block, 4 slots of 4 heads of 128.
    begin = (2 * 2 + 1) * 4 * 4 * 640
    assert (flat[begin : begin + 128] == bits(k)[3, 0]).all()
    assert (flat[begin + 4 * 4 * 128 :][:512] == bits(v)[3, 0]).all()
    assert refusal(store.fill, request, 1, 5, v, v) == ("shape", "k")
    store.poison(2)
    assert (bits(store.read(request, 1, range(8, 12))[1]) == 0xFFFF).all()


def test_a_pool_refuses_what_it_does_not_hold(device: Device) -> None:
    store = PoisonedPool(device, GEOMETRY, num_pages=3, page_size=PAGE_SIZE, num_layers=1)
    request = PlanRequest.of(kv_len=10, pages=(1, 2), page_size=PAGE_SIZE)
    before = device.read(store.pool.data).tobytes()
    k = rows(2, 1)
    assert refusal(store.read, request, 0, range(3, 5)) == ("page_coverage", "positions")
    assert refusal(store.read, request, 0, range(11, 13)) == ("page_coverage", "positions")
    assert refusal(store.read, request, 0, range(4, 9, 2)) == ("page_coverage", "positions")
    assert refusal(store.read, request, 1) == ("layer_range", "layer")
    assert refusal(store.read, request, -1) == ("layer_range", "layer")
    assert refusal(store.fill, request, 0, 11, k, k) == ("page_coverage", "positions")
    assert refusal(store.fill, request, 0, 4, k, k[:1]) == ("shape", "v")
    assert refusal(store.fill, request, 0, 4, k.astype(np.float32), k) == ("dtype", "k")
    assert refusal(store.fill, request, 0, 4, None, k) == ("argument_type", "k")
    elsewhere = PlanRequest.of(kv_len=10, pages=(1, 3), page_size=PAGE_SIZE)
    assert refusal(store.fill, elsewhere, 0, 6, rows(4, 1), rows(4, 1)) == ("page_id_range", "page_indices")
    assert refusal(store.poison, 3) == ("page_id_range", "page")
    assert refusal(PoisonedPool, device, GEOMETRY, num_pages=0) == ("extent_positive", "num_pages")
    assert device.read(store.pool.data).tobytes() == before
    empty, _ = store.read(request, 0, range(6, 6))
    assert empty.shape == (0, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)


# --- one plan for prep and attention ----------------------------------------------------------------------------------


def test_a_decode_batch_is_a_view_of_its_plan(device: Device) -> None:
    shape = PlanShape.of(GEOMETRY, page_size=PAGE_SIZE)
    requests = [PlanRequest.of(kv_len=6, pages=(3, 1), page_size=PAGE_SIZE), PlanRequest.padding(0)]
    plan = PrefillPagedPlan.preallocated(device, max_tokens=9, max_requests=9, max_pages=9, max_tiles=9)
    plan.update([*requests, PlanRequest.padding(0)], shape=shape, padding_page=0)
    batch = plan.decode_batch()
    assert batch.padding_page == 0
    assert batch.host is not None
    arrays = (batch.positions, batch.page_indices, batch.page_indptr, batch.page_origins)
    for array, host, want in zip(arrays, batch.host, ([5, 0, 0], [3, 1, 0, 0], [0, 2, 3, 4], [0, 0, 0]), strict=True):
        assert device.read(array).tolist() == host.tolist() == want
    assert batch.positions.allocation is plan.buffers.positions.allocation
