"""What threads know of others: said in few keys, nothing of it lost, and within a budget of memory."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import EmulatorError, Machine
from g4kv_cli.device.emulated.checks import order
from g4kv_cli.device.emulated.checks.known import BLOCK_OF, NOTHING, THREAD, WARP_OF, Known, key_of

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
    of_launch = order.Order(256)
    published = NOTHING
    for thread in range(2048):
        number = of_launch.join(0, published)
        mine = Known.of([(key_of(THREAD, thread), 2)])
        published = Known.joined((of_launch.known[number], mine)).compact(of_launch.threads)
    assert max(known.keys.size for known in of_launch.known) <= 128


COUNTER = """
extern "C" __global__ void kernel(int* out, int* count) {
  __threadfence();
  out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(count, 1);
}
"""
POST = """
extern "C" __global__ void kernel(int* out, int* flag) {
  for (int i = 1; i <= 300; ++i) { __threadfence(); *(volatile int*)flag = i; }
  out[0] = *(volatile int*)flag;
}
"""


def launched(source: str, grid: int, block: int, machine: Machine) -> list[int]:
    """What a kernel made of ``out``, in order."""
    out, word = (
        upload(machine, np.zeros(words, np.int32), name) for words, name in ((grid * block, "out"), (1, "aux"))
    )
    launch_on(machine, compile_kernel(source), pointer(out), pointer(word), grid=grid, block=block)
    return sorted(read_as(machine, out, grid * block, np.int32).tolist())


def test_a_launch_whose_order_takes_too_much_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "interpreter")
    machine = Machine()
    with monkeypatch.context() as small:
        small.setattr(order, "MOST_BYTES", 1 << 20)
        with pytest.raises(EmulatorError, match=r"more than 1 MiB to keep.*launch fewer blocks"):
            launched(COUNTER, 16, 256, machine)
        assert launched(COUNTER, 2, 256, machine) == list(range(512))
    assert launched(COUNTER, 16, 256, machine) == list(range(4096))


def test_what_a_location_no_longer_hands_on_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "interpreter")
    monkeypatch.setattr(order, "MOST_BYTES", 1 << 12)
    assert launched(POST, 1, 1, Machine()) == [300]
