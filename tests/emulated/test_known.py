"""What threads know of others: said in few keys, and nothing of it lost."""

from __future__ import annotations

import numpy as np
import pytest

from g4kv_cli.device.emulated.checks.known import BLOCK_OF, NOTHING, THREAD, WARP_OF, Known, key_of
from g4kv_cli.device.emulated.checks.order import Order

WARP = 32


def learnt(known: Known, threads: int, blocks: int) -> list[int]:
    """What is known of each thread, read key by key."""
    warps = -(-threads // WARP)
    times = dict(zip(known.keys.tolist(), known.times.tolist(), strict=True))
    found = []
    for block in range(blocks):
        for at in range(threads):
            thread = block * warps * WARP + at
            keys = key_of(THREAD, thread), key_of(WARP_OF, thread // WARP), key_of(BLOCK_OF, block)
            found.append(max(times.get(key, -1) for key in keys))
    return found


@pytest.mark.parametrize("threads", [32, 40, 96, 250])
def test_fewer_keys_say_the_same(threads: int) -> None:
    random = np.random.default_rng(threads)
    blocks, warps = 4, -(-threads // WARP)
    for share in (0.3, 0.97, 1.0):
        pairs = []
        for block in range(blocks):
            base = block * warps * WARP
            pairs += [(key_of(THREAD, base + at), int(random.integers(1, 4))) for at in range(threads)]
            pairs += [(key_of(WARP_OF, base // WARP + at), int(random.integers(1, 4))) for at in range(warps)]
            pairs.append((key_of(BLOCK_OF, block), int(random.integers(1, 4))))
        kept = [pair for pair in pairs if random.random() < share]
        known = Known.of(kept)
        fewer = known.compact(threads)
        assert learnt(fewer, threads, blocks) == learnt(known, threads, blocks)
        assert (np.diff(fewer.keys) > 0).all()
        assert fewer.compact(threads).keys.tolist() == fewer.keys.tolist()


def test_all_threads_of_blocks_are_as_many_keys_as_blocks() -> None:
    threads, blocks = 250, 6
    of = [block * 256 + at for block in range(blocks) for at in range(threads)]
    known = Known.of((key_of(THREAD, thread), 7) for thread in of).compact(threads)
    assert known.keys.tolist() == [key_of(BLOCK_OF, block) for block in range(blocks)]
    missing = Known.of((key_of(THREAD, thread), 7) for thread in of if thread != 3).compact(threads)
    assert missing.keys.size == 31 + 7 + blocks - 1


def test_of_moment_zero_there_is_nothing_to_know() -> None:
    assert Known.of([(key_of(THREAD, 5), 0)]) is NOTHING


def test_a_chain_of_threads_that_learn_of_each_other_takes_memory_by_its_length() -> None:
    """As a counter that every thread of a grid adds to behind a fence."""
    order = Order(256)
    published = NOTHING
    for thread in range(2048):
        number = order.join(0, published)
        mine = Known.of([(key_of(THREAD, thread), 2)])
        published = Known.joined((order.known[number], mine)).compact(order.threads)
    assert max(known.keys.size for known in order.known) <= 128
