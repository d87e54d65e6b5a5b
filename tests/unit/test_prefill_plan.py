"""PrefillPagedPlan: arrays by hand, edges of every equation, and updates that succeed as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles, require_plan
from g4kv_cli.errors import ContractError
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.prefill_plan import check_requests, derive_cta_tile_q, lay_out

SHAPE = PlanShape(num_qo_heads=16, num_kv_heads=8, head_dim=256, page_size=4, window_left=3)
REQUESTS = (
    PlanRequest(start_pos=3, q_len=2, page_indices=(5, 2), last_page_len=1),
    PlanRequest(start_pos=8, q_len=0, page_indices=(9, 0), last_page_len=4),
    PlanRequest(start_pos=9, q_len=3, page_indices=(3, 6), last_page_len=4, page_origin=1),
)
OTHERS = (PlanRequest(start_pos=0, q_len=1, page_indices=(7,), last_page_len=1),)
ROOM = {"max_tokens": 6, "max_requests": 4, "max_pages": 8, "max_tiles": 4}
ARRAYS = 10
"""Device arrays of a plan, hence writes of an update."""


class FailingDevice(EmulatedDevice):
    """Raises at one write, or at every write from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.fail_at = -1
        self.for_good = False
        self.error: BaseException = RuntimeError("the bus is gone")

    def write(self, array: DeviceArray, values: npt.NDArray[Any]) -> None:
        self.writes += 1
        if self.writes == self.fail_at or (self.for_good and self.writes > self.fail_at > 0):
            # As much as half of the copy may have arrived.
            half = array.view((array.size // 2,))
            super().write(half, values[: array.size // 2])
            raise self.error
        super().write(array, values)

    def fail_from_now(self, write: int, *, for_good: bool = False) -> None:
        self.fail_at = self.writes + write
        self.for_good = for_good


@pytest.fixture
def device() -> Iterator[FailingDevice]:
    device = FailingDevice()
    yield device
    device.close()


def contents(plan: PrefillPagedPlan) -> dict[str, list[int]]:
    return {name: plan.device.read(array).tolist() for name, array in plan.buffers.by_name().items()}


def refusal(call: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(ContractError) as caught:
        call(*arguments, **named)
    return caught.value.code, caught.value.field


def plan_of(*requests: PlanRequest, **shape: Any) -> Any:
    return lay_out(check_requests(requests, replace(SHAPE, **shape)))


def test_arrays_by_hand() -> None:
    arrays = plan_of(*REQUESTS)
    assert {name: values.tolist() for name, values in arrays.by_name().items()} == {
        "page_indices": [5, 2, 9, 0, 3, 6],
        "page_indptr": [0, 2, 4, 6],
        "page_origins": [0, 0, 1],
        "last_page_len": [1, 4, 4],
        "kv_lens": [5, 8, 12],
        "q_indptr": [0, 2, 2, 5],
        "positions": [3, 4, 9, 10, 11],
        "token_requests": [0, 0, 2, 2, 2],
        "tile_requests": [0, 2],
        "tile_indices": [0, 0],
    }
    assert all(values.dtype == np.int32 for values in arrays.by_name().values())
    bounds = arrays.bounds
    assert (bounds.num_requests, bounds.num_tokens, bounds.num_pages, bounds.num_tiles) == (3, 5, 6, 2)
    assert (bounds.max_page_index, bounds.max_last_page_len) == (9, 4)
    assert (bounds.max_position, bounds.cta_tile_q) == (11, 16)


def test_tiles_of_a_long_request() -> None:
    """20 tokens of 4 heads a group are 80 packed rows: two tiles of 64, or five of 16."""
    long_request = PlanRequest(start_pos=0, q_len=20, page_indices=(0, 1, 2, 3, 4), last_page_len=4)
    short = PlanRequest(start_pos=0, q_len=1, page_indices=(5,), last_page_len=1)
    derived = plan_of(short, long_request, num_qo_heads=32)
    assert derived.bounds.cta_tile_q == 64
    assert derived.tile_requests.tolist() == [0, 1, 1]
    assert derived.tile_indices.tolist() == [0, 0, 1]
    overridden = plan_of(short, long_request, num_qo_heads=32, cta_tile_q=16)
    assert overridden.tile_requests.tolist() == [0, 1, 1, 1, 1, 1]
    assert overridden.tile_indices.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("packed_rows", "requests", "tiles", "tile"),
    [
        (0, 1, (16, 64), 16),
        (16, 1, (16, 64), 16),
        (17, 1, (16, 64), 64),
        (17, 1, (16, 32, 64), 32),
        (17, 1, (16, 64, 32), 64),
        (65, 1, (16, 64, 32), 64),
        # An average of 16.5 does not fit 16 rows.
        (33, 2, (16, 32, 64), 32),
        (32, 2, (16, 32, 64), 16),
        (65, 1, (16, 64), 64),
        (10**6, 1, (16, 64, 128), 128),
        (10**6, 1, (32,), 32),
    ],
)
def test_derived_tile(packed_rows: int, requests: int, tiles: tuple[int, ...], tile: int) -> None:
    assert derive_cta_tile_q(packed_rows, requests, tiles) == tile


def test_a_numpy_head_dim_takes_the_tiles_of_the_device(device: FailingDevice) -> None:
    assert plan_tiles(device, replace(SHAPE, head_dim=np.int64(512))) == plan_tiles(
        device, replace(SHAPE, head_dim=512)
    )
    assert plan_tiles(device, replace(SHAPE, head_dim=None)) == (16, 64)


def test_a_request_may_end_with_a_full_page_and_not_with_an_empty_one() -> None:
    full = PlanRequest(start_pos=0, q_len=4, page_indices=(1,), last_page_len=4)
    assert plan_of(full).kv_lens.tolist() == [4]
    surplus = replace(full, page_indices=(1, 2), last_page_len=1)
    assert refusal(plan_of, surplus) == ("length_equation", "requests[0].last_page_len")
    assert refusal(plan_of, replace(surplus, last_page_len=0)) == ("last_page_len", "requests[0].last_page_len")


@pytest.mark.parametrize("last_page_len", [2**32 + 1, 2**31, -(2**31) - 1])
def test_a_last_page_length_is_never_cut_to_32_bits(last_page_len: int) -> None:
    cut = int(np.int64(last_page_len).astype(np.int32))
    request = PlanRequest(start_pos=3, q_len=2, page_indices=(5, 2), last_page_len=last_page_len)
    assert cut in (1, -(2**31), 2**31 - 1)
    assert refusal(plan_of, request) == ("fits_i32", "requests[0].last_page_len")


@pytest.mark.parametrize(
    ("window_left", "origin", "accepted"),
    # Query 9 sees keys 9 - window_left .. 9; pages hold 4 tokens.
    [(1, 2, True), (2, 2, False), (5, 1, True), (6, 1, False), (0, 2, True), (-1, 1, False), (-1, 0, True)],
)
def test_a_page_that_is_still_seen_is_not_released(window_left: int, origin: int, accepted: bool) -> None:
    pages = (3, 6, 8)[: 3 - origin]
    request = PlanRequest(start_pos=9, q_len=1, page_indices=pages, last_page_len=2, page_origin=origin)
    if accepted:
        assert plan_of(request, window_left=window_left).page_origins.tolist() == [origin]
    else:
        refused = refusal(plan_of, request, window_left=window_left)
        assert refused == ("window_pages", "requests[0].page_origin")


def test_single_is_a_batch_of_one(device: FailingDevice) -> None:
    single = PrefillPagedPlan.single(device, start_pos=3, q_len=2, page_indices=(5, 2), last_page_len=1, shape=SHAPE)
    batch = PrefillPagedPlan.batch(device, REQUESTS[:1], shape=SHAPE)
    assert contents(single) == contents(batch)
    assert contents(single)["positions"] == [3, 4]
    assert single.bounds == batch.bounds


def test_an_unset_plan_refuses_use(device: FailingDevice) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    assert plan.bounds is None
    assert refusal(require_plan, device, plan) == ("plan_set", "plan")
    plan.update(OTHERS, shape=SHAPE)
    bounds, arrays = require_plan(device, plan)
    assert bounds.max_page_index == 7
    assert arrays["positions"] is plan.buffers.positions


def test_an_update_is_in_place_and_leaves_nothing_of_what_was(device: FailingDevice) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    plan.update(REQUESTS, shape=SHAPE)
    addresses = {name: array.address for name, array in plan.buffers.by_name().items()}
    plan.update(OTHERS, shape=SHAPE)
    assert {name: array.address for name, array in plan.buffers.by_name().items()} == addresses
    # The tails: no such page, no such request, empty rows.
    assert contents(plan) == {
        "page_indices": [7] + [-1] * 7,
        "page_indptr": [0, 1, 1, 1, 1],
        "page_origins": [0, -1, -1, -1],
        "last_page_len": [1, -1, -1, -1],
        "kv_lens": [1, -1, -1, -1],
        "q_indptr": [0, 1, 1, 1, 1],
        "positions": [0] + [-1] * 5,
        "token_requests": [0] + [-1] * 5,
        "tile_requests": [0] + [-1] * 3,
        "tile_indices": [0] + [-1] * 3,
    }
    assert plan.bounds is not None
    assert (plan.bounds.max_page_index, plan.bounds.max_last_page_len) == (7, 1)


@pytest.mark.parametrize("error", [RuntimeError("the bus is gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("write", range(1, ARRAYS + 1))
def test_an_update_that_fails_at_any_write_leaves_the_old_plan(
    write: int, error: BaseException, device: FailingDevice
) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    plan.update(REQUESTS, shape=SHAPE)
    before, bounds = contents(plan), plan.bounds
    device.error = error
    device.fail_from_now(write)
    with pytest.raises(type(error)):
        plan.update(OTHERS, shape=replace(SHAPE, window_left=-1))
    assert contents(plan) == before
    assert plan.bounds is bounds
    plan.update(OTHERS, shape=SHAPE)
    assert contents(plan)["page_indices"][0] == 7


def test_there_is_a_failing_test_for_every_write(device: FailingDevice) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    before = device.writes
    plan.update(REQUESTS, shape=SHAPE)
    assert device.writes - before == ARRAYS


@pytest.mark.parametrize("write", range(1, ARRAYS + 1))
def test_a_plan_that_cannot_be_restored_refuses_use(write: int, device: FailingDevice) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    plan.update(REQUESTS, shape=SHAPE)
    device.fail_from_now(write, for_good=True)
    with pytest.raises(RuntimeError):
        plan.update(OTHERS, shape=SHAPE)
    assert plan.bounds is None
    device.fail_from_now(-device.writes - 1)
    plan.update(OTHERS, shape=SHAPE)
    assert contents(plan)["page_indices"][0] == 7


@pytest.mark.parametrize(
    ("requests", "shape", "code"),
    [
        ((replace(REQUESTS[0], last_page_len=2),), SHAPE, "length_equation"),
        ((OTHERS[0], replace(REQUESTS[0], page_indices=())), SHAPE, "page_list_not_empty"),
        (REQUESTS, replace(SHAPE, num_kv_heads=0), "extent_positive"),
        (REQUESTS, replace(SHAPE, sm_scale=float("nan")), "sm_scale"),
        ((OTHERS[0], OTHERS[0]), SHAPE, "slot_unique"),
        (tuple(replace(OTHERS[0], page_indices=(page,)) for page in range(5)), SHAPE, "capacity"),
        (None, SHAPE, "argument_type"),
    ],
)
def test_a_refused_update_writes_nothing(requests: Any, shape: PlanShape, code: str, device: FailingDevice) -> None:
    plan = PrefillPagedPlan.preallocated(device, **ROOM)
    plan.update(REQUESTS, shape=SHAPE)
    before, bounds, writes = contents(plan), plan.bounds, device.writes
    with pytest.raises(ContractError) as caught:
        plan.update(requests, shape=shape)
    assert caught.value.code == code
    assert device.writes == writes
    assert plan.bounds is bounds
    assert contents(plan) == before


@pytest.mark.parametrize("write", range(1, 2 * ARRAYS + 1))
def test_a_construction_that_fails_keeps_no_memory(
    write: int, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DeviceArray] = []
    allocate = device.allocate
    monkeypatch.setattr(device, "allocate", lambda *args, **kw: made.append(allocate(*args, **kw)) or made[-1])
    device.fail_from_now(write)
    with pytest.raises(RuntimeError):
        PrefillPagedPlan.batch(device, REQUESTS, shape=SHAPE)
    assert made
    assert all(array.allocation.freed for array in made)


def test_a_freed_plan_is_refused(device: FailingDevice) -> None:
    plan = PrefillPagedPlan.batch(device, REQUESTS, shape=SHAPE)
    plan.free()
    assert refusal(require_plan, device, plan) == ("not_freed", "plan.page_indices")
