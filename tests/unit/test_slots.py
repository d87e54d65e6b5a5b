"""Residency against a request played token by token, and pool sizes against numbers worked out by hand."""

from __future__ import annotations

import pytest

from g4kv_cli.errors import UsageError
from g4kv_cli.model import slots
from g4kv_cli.model.geometry import GEOMETRIES

GIB = 1 << 30


def played_pages(context: int, window: int, page_size: int, step: int) -> list[int]:
    """Pages held after each step of a request that releases by the rule alone, then appends ``step`` tokens."""
    held: set[int] = set()
    counts = []
    frontier = 0
    while frontier < context:
        held -= {page for page in held if (page + 1) * page_size + window <= frontier}
        appended = min(step, context - frontier)
        held |= {position // page_size for position in range(frontier, frontier + appended)}
        counts.append(len(held))
        frontier += appended
    return counts


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("window", [1, 5, 16, 64])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 79, 80, 81, 300])
def test_most_resident_pages_of_a_decoding_request(context: int, window: int, page_size: int) -> None:
    assert slots.max_resident_pages(context, window, page_size) == max(played_pages(context, window, page_size, 1))


@pytest.mark.parametrize("step", [2, 7, 16, 40])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [5, 16, 33])
def test_most_resident_pages_with_longer_steps(step: int, window: int, page_size: int) -> None:
    # A step may begin at any token (after a decode of any length), so every end of a whole step counts.
    context = 200
    most = 0
    for kv_len in range(1, context + 1):
        frontier = max(0, kv_len - step)
        held = {position // page_size for position in range(kv_len)}
        most = max(most, sum((page + 1) * page_size + window > frontier for page in held))
    assert slots.max_resident_pages(context, window, page_size, step) == most
    assert most >= max(played_pages(context, window, page_size, step))


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("window", [1, 5, 16])
def test_no_visible_key_is_ever_released(window: int, page_size: int) -> None:
    for frontier in range(100):
        origin = slots.page_origin(frontier, window, page_size)
        visible = [key for key in range(frontier + 1) if key > frontier - window]
        assert visible[0] // page_size >= origin
        released = [page for page in range(101) if (page + 1) * page_size + window <= frontier]
        assert released == list(range(origin))


def test_without_a_window_all_pages_stay() -> None:
    assert slots.page_origin(100_000, None, 16) == 0
    assert slots.max_resident_pages(100_001, None, 16) == 6251


@pytest.mark.parametrize(
    ("kv_len", "resident"),
    [
        (16, 1),
        (17, 2),  # no surplus page at 16, one more at 17
        (1024, 64),
        (1040, 65),  # frontier 1039 - 1024 = 15: page 0 stays, the window straddles 65 pages
        (1041, 65),  # frontier 1040 - 1024 = 16: page 0 goes as page 65 comes
    ],
)
def test_resident_pages_of_12b_local_in_decode(kv_len: int, resident: int) -> None:
    assert slots.pages_for(kv_len, 16) - slots.page_origin(kv_len - 1, 1024, 16) == resident


def _local(pools: slots.ModelPools) -> slots.FamilyPool:
    return pools.families[0]


def _global(pools: slots.ModelPools) -> slots.FamilyPool:
    return pools.families[1]


def test_pools_of_12b_by_hand() -> None:
    pools = slots.model_pools("12b", context_tokens=131072, slots=4, page_size=16)
    # 65 pages of the window a slot, 4 slots, 1 padding page; 5 MiB each.
    assert (_local(pools).pages_per_slot, _local(pools).num_pages) == (65, 261)
    assert _local(pools).pool_bytes == 261 * 5242880
    # 131072 / 16 pages a slot, 4 slots, 1 padding page; 256 KiB each.
    assert (_global(pools).pages_per_slot, _global(pools).num_pages) == (8192, 32769)
    assert _global(pools).pool_bytes == 32769 * 262144
    assert pools.total_bytes == 261 * 5242880 + 32769 * 262144
    assert pools.uncapped_local_bytes == 32769 * 5242880


def test_a_short_context_needs_no_more_than_itself() -> None:
    pools = slots.model_pools("12b", context_tokens=100, slots=1, page_size=16)
    assert (_local(pools).num_pages, _global(pools).num_pages) == (8, 8)  # 7 pages and the padding page


def test_shared_layers_take_no_room() -> None:
    pools = slots.model_pools("e2b", context_tokens=512, slots=1, page_size=16)
    assert (_local(pools).layout.num_layers, _global(pools).layout.num_layers) == (12, 3)
    assert _local(pools).layout.page_bytes == 12 * 2 * 16 * 256 * 2
    assert _global(pools).layout.page_bytes == 3 * 2 * 16 * 512 * 2


def test_pools_of_one_rank() -> None:
    whole = slots.model_pools("31b", context_tokens=4096, slots=2, page_size=16)
    rank = slots.model_pools("31b", context_tokens=4096, slots=2, page_size=16, tp=8)
    assert _local(rank).pool_bytes * 8 == _local(whole).pool_bytes  # 16 KV heads on 8 ranks
    assert _global(rank).pool_bytes * 4 == _global(whole).pool_bytes  # 4 KV heads, each on two ranks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_tokens": 0}, "--context must be at least 1"),
        ({"context_tokens": 262145}, "--context 262145 is past the 262144 positions of 12b"),
        ({"slots": 0}, "--slots must be at least 1"),
        ({"step_tokens": 0}, "--step-tokens must be at least 1"),
        ({"step_tokens": 101}, "--step-tokens 101 is more than the context"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"model": "13b"}, "unknown model '13b': .*known are .*12b"),
    ],
)
def test_numbers_out_of_range(change: dict[str, object], words: str) -> None:
    request: dict[str, object] = {"model": "12b", "context_tokens": 100, "slots": 1, "page_size": 16}
    with pytest.raises(UsageError, match=words):
        slots.model_pools(**{**request, **change})  # type: ignore[arg-type]


def test_layers_of_a_layout() -> None:
    assert slots.derived_layout(GEOMETRIES["e4b-local"], 16).num_layers == 20
    assert slots.derived_layout(GEOMETRIES["e4b-local"], 16, 2).num_layers == 2
