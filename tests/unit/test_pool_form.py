"""A pool in a form of its own: memory that was taken for a part goes back when the next part gets none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.providers.pool_form import PartForm, PoolForm, StagedPool

FORM = PoolForm(
    (
        PartForm.parse("k_pool", "layer page head dim/8 slot dim%8", {}),
        PartForm.parse("v_pool", "layer page head dim slot", {}),
    )
)
SHAPE = (3, 1, 2, 4, 2, 16)


def test_a_pool_whose_last_offset_is_the_largest_one_is_reached() -> None:
    """1024 pages of 32 layers of 65536 elements end at 2^31 - 1."""
    form = PartForm.parse("pool", "page layer kv slot head dim", {}, "int32")
    form.require_good((1024, 32, 2, 16, 8, 256))
    with pytest.raises(NotCovered, match="int32 offsets do not reach the last of 2149580800 elements of pool"):
        form.require_good((1025, 32, 2, 16, 8, 256))


def test_a_part_that_gets_no_memory_leaves_none_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice("sm_90")
    pool = device.allocate((3 * 2 * 4 * 2 * 16,), BF16, "pool")
    device.fill(pool, 0)
    request: Any = SimpleNamespace(device=device, arrays={"pool": pool})
    before = device.free_bytes
    staged = StagedPool(FORM, request, SHAPE)
    assert list(staged.arrays) == ["k_pool", "v_pool"]
    device.free_all(list(staged.arrays.values()))
    allocate = EmulatedDevice.allocate

    def limited(self: EmulatedDevice, shape: Any, dtype: Any, label: str, **more: Any) -> Any:
        if label == "v_pool":
            raise DeviceUnavailable("out of memory for v_pool")
        return allocate(self, shape, dtype, label, **more)

    monkeypatch.setattr(EmulatedDevice, "allocate", limited)
    with pytest.raises(DeviceUnavailable, match="v_pool"):
        StagedPool(FORM, request, SHAPE)
    assert device.free_bytes == before
    device.close()
