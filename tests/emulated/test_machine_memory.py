"""Memory of the emulated machine, launch limits, and what a machine remembers between launches."""

from __future__ import annotations

import ctypes
import errno
import gc
import resource
import sys
import weakref

import numpy as np
import pytest
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import EmulatorError, LaunchConfigurationError, Machine, shared_limit
from g4kv_cli.device.emulated.state import spare_pages

STORE = """
extern "C" __global__ void kernel(int* out, const long long* where, int value) {
  long long at = where[blockIdx.x * blockDim.x + threadIdx.x];
  if (at >= 0) out[at] = value;
}
"""


def store(machine: Machine, out: int, where: list[int], value: int = 1) -> None:
    source = upload(machine, np.array(where, np.int64), "where")
    launch_on(machine, compile_kernel(STORE), pointer(out), pointer(source), int32(value), block=len(where))


def test_allocations_are_aligned_and_apart() -> None:
    machine = Machine()
    sizes = (1, 0, 256, 1000, 0, 5)
    addresses = [machine.allocate(nbytes, f"block {nbytes}") for nbytes in sizes]
    assert all(address % 256 == 0 for address in addresses)
    for (first, nbytes), second in zip(zip(addresses, sizes, strict=True), addresses[1:], strict=False):
        assert second - (first + nbytes) >= 256


def test_host_reads_and_writes() -> None:
    machine = Machine()
    address = machine.allocate(64, "block")
    assert not machine.initialised(address, 64).any()
    machine.write(address + 8, np.array([[1.5, -2.0]], np.float32))
    machine.write(address + 16, b"\x01\x02")
    machine.fill(address + 60, 4, 0xAB)
    known = machine.initialised(address, 64)
    assert np.flatnonzero(known).tolist() == [*range(8, 18), *range(60, 64)]
    assert read_as(machine, address + 8, 2, np.float32).tolist() == [1.5, -2.0]
    assert machine.read(address + 60, 4).tolist() == [0xAB] * 4
    copy = machine.read(address, 64)
    copy[:] = 9
    assert machine.read(address + 16, 2).tolist() == [1, 2]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (62, 4), (64, 1), (1 << 40, 1)])
def test_host_access_outside_an_allocation(offset: int, nbytes: int) -> None:
    machine = Machine()
    address = machine.allocate(64, "block")
    with pytest.raises(EmulatorError, match="leaves every allocation"):
        machine.read(address + offset, nbytes)
    with pytest.raises(EmulatorError, match="leaves every allocation"):
        machine.fill(address + offset, nbytes, 0)


def test_host_access_after_free() -> None:
    machine = Machine()
    address = machine.allocate(64, "block")
    machine.free(address)
    with pytest.raises(EmulatorError, match="freed"):
        machine.read(address, 4)
    with pytest.raises(EmulatorError, match="freed already"):
        machine.free(address)
    with pytest.raises(EmulatorError, match="no allocation begins"):
        machine.free(address + 4)
    assert machine.allocate(64, "next") != address


def test_a_pool_larger_than_memory_costs_only_what_is_touched() -> None:
    machine = Machine()
    compile_kernel(STORE)  # loading the compiler takes memory too
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nbytes = 12 << 30
    pool = machine.allocate(nbytes, "pool", sparse=True)
    behind = machine.allocate(16, "behind")
    assert behind >= pool + nbytes + 256
    last = nbytes // 4 - 1
    store(machine, pool, [0, 1, 1 << 28, last - 1, last, -1, 5 << 28, 2])
    assert machine.written_ranges(pool).tolist() == [
        [0, 12],
        [1 << 30, (1 << 30) + 4],
        [5 << 30, (5 << 30) + 4],
        [nbytes - 8, nbytes],
    ]
    assert machine.read(pool + nbytes - 8, 8).tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert machine.initialised(pool + nbytes - 16, 16).tolist() == [False] * 8 + [True] * 8
    machine.free(pool)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_written_ranges_gather_launches_until_cleared() -> None:
    machine = Machine()
    first, second = machine.allocate(256, "first"), machine.allocate(256, "second")
    machine.fill(first, 256, 0)
    assert machine.written_ranges(first).shape == (0, 2)  # the host's stores do not count
    store(machine, first, [0, 1, 8])
    store(machine, first, [2, 9, 9])
    store(machine, second, [63, -1])
    assert machine.written_ranges(first).tolist() == [[0, 12], [32, 40]]
    assert machine.written_ranges(second).tolist() == [[252, 256]]
    machine.clear_written(second)
    assert machine.written_ranges(first).tolist() == [[0, 12], [32, 40]]
    assert machine.written_ranges(second).shape == (0, 2)
    machine.clear_written()
    assert machine.written_ranges(first).shape == (0, 2)
    store(machine, first, [5])
    assert machine.written_ranges(first).tolist() == [[20, 24]]


def test_stores_before_a_fatal_fault_are_in_the_written_ranges() -> None:
    machine = Machine()
    out = machine.allocate(256, "out")
    source = upload(machine, np.array([3] * 32 + [64] * 32, np.int64), "where")
    kernel = compile_kernel(STORE)
    arguments = (pointer(out), pointer(source), int32(1))
    (fault,) = faults_of(machine, kernel, *arguments, grid=2, chunk_threads=1)
    assert (fault.kind, fault.block) == ("global_out_of_bounds", (1, 0, 0))
    assert machine.written_ranges(out).tolist() == [[12, 16]]


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        ((1, 1, 1), (1025, 1, 1), "block.x is 1025"),
        ((1, 1, 1), (32, 33, 1), "1056 threads"),
        ((1, 1, 1), (1, 1, 65), "block.z is 65"),
        ((1, 65536, 1), (32, 1, 1), "grid.y is 65536"),
        ((1, 1, 65536), (32, 1, 1), "grid.z is 65536"),
        ((2**31, 1, 1), (32, 1, 1), "grid.x is 2147483648"),
        ((0, 1, 1), (32, 1, 1), "grid.x is 0"),
        ((1, 1, 1), (32, 0, 1), "block.y is 0"),
    ],
)
def test_launch_limits(grid: tuple[int, int, int], block: tuple[int, int, int], words: str) -> None:
    machine = Machine()
    arguments = [pointer(0), pointer(0), int32(0)]
    with pytest.raises(LaunchConfigurationError, match=words):
        machine.launch(compile_kernel(STORE), grid, block, arguments)
    assert machine.poisoned_by is None


def test_argument_checks() -> None:
    machine, kernel = Machine(), compile_kernel(STORE)
    with pytest.raises(LaunchConfigurationError, match="2 arguments given, the kernel has 3"):
        launch_on(machine, kernel, pointer(0), pointer(0))
    with pytest.raises(LaunchConfigurationError, match="argument 2 has 8 bytes, the parameter 4"):
        launch_on(machine, kernel, pointer(0), pointer(0), pointer(0))


BOUNDED = """
extern "C" __global__ void __launch_bounds__(64) kernel(int* out) {
  extern __shared__ int row[];
  __shared__ int fixed[100];
  fixed[threadIdx.x] = row[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = row[63 - threadIdx.x] + fixed[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize(("arch", "most"), [("80", 166912), ("90", 232448), ("120", 101376)])
def test_shared_memory_and_thread_bounds(arch: str, most: int) -> None:
    kernel = compile_kernel(BOUNDED, arch)
    assert kernel.shared_bytes == 400
    assert shared_limit(f"sm_{arch}a") == most
    machine = Machine()
    out = machine.allocate(256, "out")
    report = launch_on(machine, kernel, pointer(out), block=64, dynamic_shared_bytes=most - 400)
    assert report.shared_bytes == most
    assert read_as(machine, out, 64, np.int32).tolist() == [2 * (63 - thread) for thread in range(64)]
    with pytest.raises(LaunchConfigurationError, match=f"{most + 1} bytes of shared memory"):
        launch_on(machine, kernel, pointer(out), block=64, dynamic_shared_bytes=most - 399)
    with pytest.raises(LaunchConfigurationError, match="compiled for at most 64"):
        launch_on(machine, kernel, pointer(out), block=96, dynamic_shared_bytes=256)


def test_instructions_are_counted() -> None:
    machine = Machine()
    out = machine.allocate(256, "out")
    source = upload(machine, np.full(64, -1, np.int64), "where")
    kernel = compile_kernel(STORE)
    reports = [launch_on(machine, kernel, pointer(out), pointer(source), int32(0), grid=grid) for grid in (1, 2)]
    assert reports[0].thread_instructions % 32 == 0
    assert 0 < reports[0].thread_instructions <= 32 * kernel.instruction_count
    assert reports[1].thread_instructions == 2 * reports[0].thread_instructions
    assert reports[0].stored_bytes == 0


MIXED = """
extern "C" __global__ void kernel(int* out, const int* a, const int* b, int last) {
  const int* p = threadIdx.x % 2 ? a : b;
  out[threadIdx.x] = p[threadIdx.x == 31 ? last : threadIdx.x];
}
"""


@pytest.mark.parametrize(
    ("last", "whole", "kinds"),
    [(31, True, []), (31, False, ["uninitialised_read"]), (32, True, ["global_out_of_bounds"])],
)
def test_one_instruction_in_several_allocations(last: int, whole: bool, kinds: list[str]) -> None:
    machine = Machine()
    first, second = (machine.allocate(128, label) for label in "ab")
    machine.write(first, np.arange(32 if whole else 31, dtype=np.int32))
    machine.write(second, np.arange(100, 132, dtype=np.int32))
    out = machine.allocate(128, "out")
    faults = faults_of(machine, compile_kernel(MIXED), pointer(out), pointer(first), pointer(second), int32(last))
    assert [(fault.kind, fault.thread, fault.label, fault.lanes) for fault in faults] == [
        (kind, (31, 0, 0), "a", 1) for kind in kinds
    ]
    if not kinds:
        lanes = np.arange(32)
        np.testing.assert_array_equal(read_as(machine, out, 32, np.int32), lanes + 100 * (lanes % 2 == 0))


def test_a_freed_one_among_several_allocations() -> None:
    machine = Machine()
    first, second = (upload(machine, np.zeros(32, np.int32), label) for label in "ab")
    machine.free(second)
    out = machine.allocate(128, "out")
    (fault,) = faults_of(machine, compile_kernel(MIXED), pointer(out), pointer(first), pointer(second), int32(0))
    assert (fault.kind, fault.thread, fault.label, fault.lanes) == ("use_after_free", (0, 0, 0), "b", 16)


def _one_after_another(machine: Machine, sizes: list[int]) -> int:
    """New pages that allocations of these sizes cost, each written as a whole, read and freed before the next."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number, nbytes in enumerate(sizes):
        address = machine.allocate(nbytes, f"block {number}")
        machine.fill(address, nbytes, number % 251)
        assert machine.read(address + nbytes - 9, 9).tolist() == [number % 251] * 9
        assert machine.read(address, 9).tolist() == [number % 251] * 9
        machine.free(address)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux alone")
def test_what_is_written_as_a_whole_gets_the_pages_of_what_was_freed() -> None:
    machine = Machine()
    sizes = [3 << 20, 1 << 20, (2 << 20) + 77, 200_000, 5 << 20, 3 << 20] * 10
    pages = sum(sizes) // resource.getpagesize()
    assert _one_after_another(machine, sizes) < pages / 4
    several = [machine.allocate(nbytes, "kept") for nbytes in sizes[:6]]
    for number, (address, nbytes) in enumerate(zip(several, sizes, strict=False)):
        machine.write(address, np.full(nbytes, number, np.uint8))
    for number, (address, nbytes) in enumerate(zip(several, sizes, strict=False)):
        assert (machine.read(address, nbytes) == number).all()
    other = machine.allocate(1 << 20, "written in part")
    machine.fill(other, 100, 1)
    assert np.flatnonzero(machine.initialised(other, 1 << 20)).tolist() == list(range(100))
    assert not machine.read(other + 100, (1 << 20) - 100).any(), "moved pages under what is not written"


@pytest.mark.parametrize("takes_away", [False, True], ids=["refused", "refused, and the old mapping gone"])
def test_where_the_system_moves_no_pages_memory_is_as_ever(monkeypatch: pytest.MonkeyPatch, takes_away: bool) -> None:
    _, mmap_at = spare_pages._library()
    asked = []

    def refuse(_source: int, nbytes: int, _new: int, _flags: int, target: int) -> int | None:
        asked.append(target)
        ctypes.set_errno(errno.EINVAL)
        if takes_away:
            ctypes.CDLL(None).munmap(ctypes.c_void_p(target), ctypes.c_size_t(nbytes))
        return spare_pages._FAILED

    monkeypatch.setattr(spare_pages, "_library", lambda: (refuse, mmap_at))
    _one_after_another(Machine(), [1 << 20] * 5)
    assert len(asked) == (1 if sys.platform == "linux" else 0), "it was asked again"


def test_memories_that_nobody_has_any_more_leave_room_for_a_new_one() -> None:
    """As after a fault, whose traceback holds the machine, each is in a cycle that only the collector takes apart."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(140):  # of 2 TiB each, and a process has 128 TiB
            machine = Machine()
            cycle: list[object] = [machine]
            cycle.append(cycle)
        assert machine.allocate(1 << 39, "half of what one has")
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux alone")
def test_mappings_of_memories_that_nobody_has_any_more_do_not_stop_the_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have so many; what holds them is in a cycle that the collector takes apart."""
    mremap, mmap_at = spare_pages._library()
    machine, held = Machine(), Machine()
    cycle: list[object] = [held]
    cycle.append(cycle)
    alive = weakref.ref(held)
    del held, cycle

    def only_without_it(*arguments: int) -> int | None:
        if alive() is None:
            return mremap(*arguments)
        ctypes.set_errno(errno.ENOMEM)
        return spare_pages._FAILED

    monkeypatch.setattr(spare_pages, "_library", lambda: (only_without_it, mmap_at))
    gc.disable()
    try:
        new_pages = _one_after_another(machine, [4 << 20] * 20)
    finally:
        gc.enable()
    assert new_pages < 20 * (4 << 20) // resource.getpagesize() / 4
