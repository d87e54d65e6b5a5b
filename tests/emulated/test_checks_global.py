"""Each check of global memory on a kernel that breaks exactly that rule, and on a twin that does not."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import DIALECTS, compile_kernel, line_of

from g4kv_cli.device.emulated import LaunchFault, Machine, PoisonedMachine

COPY = """
extern "C" __global__ void kernel(const int* in, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int value = in[i];                                   // MARK: load
  if (i < n) out[i] = value + 1;                       // MARK: store
}
"""


def copy_setup(elements: int) -> tuple[Machine, int, int]:
    machine = Machine()
    source = upload(machine, np.arange(elements, dtype=np.int32), "in")
    return machine, source, machine.allocate(elements * 4, "out")


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_clean_copy(arch: str) -> None:
    machine, source, target = copy_setup(128)
    report = launch_on(
        machine,
        compile_kernel(COPY, arch),
        *(pointer(source), pointer(target), int32(128)),
        grid=2,
        block=64,
        must_write=[(target, 512)],
    )
    assert (report.blocks, report.threads_per_block, report.stored_bytes) == (2, 64, 512)
    np.testing.assert_array_equal(read_as(machine, target, 128, np.int32), np.arange(128) + 1)
    assert machine.initialised(target, 512).all()


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_load_past_the_end(arch: str) -> None:
    machine, source, _ = copy_setup(100)
    target = machine.allocate(512, "out")
    (fault,) = faults_of(
        machine, compile_kernel(COPY, arch), pointer(source), pointer(target), int32(128), grid=2, block=64
    )
    assert fault.kind == "global_out_of_bounds"
    assert fault.is_fatal
    assert fault.source_line == line_of(COPY, "MARK: load")
    assert fault.source_file == "test.cu"
    assert (fault.block, fault.thread) == ((1, 0, 0), (36, 0, 0))  # element 100 = 1 * 64 + 36
    assert (fault.address, fault.label, fault.offset) == (source + 400, "in", 400)
    assert fault.lanes == 28
    assert fault.opcode is not None
    assert fault.opcode.startswith("ld.global")


def test_a_store_past_the_end_stores_nothing() -> None:
    machine = Machine()
    source = upload(machine, np.arange(128, dtype=np.int32), "in")
    target = machine.allocate(256, "out")
    kernel = compile_kernel(COPY)
    (fault,) = faults_of(machine, kernel, pointer(source), pointer(target), int32(128), grid=2, block=64)
    assert (fault.kind, fault.source_line) == ("global_out_of_bounds", line_of(COPY, "MARK: store"))
    assert (fault.block, fault.thread, fault.lanes) == ((1, 0, 0), (0, 0, 0), 64)
    assert not machine.initialised(target, 256).any()
    with pytest.raises(PoisonedMachine):
        launch_on(machine, kernel, pointer(source), pointer(target), int32(0))


def test_an_address_of_no_allocation() -> None:
    machine = Machine()
    target = machine.allocate(4096, "out")
    (fault,) = faults_of(machine, compile_kernel(COPY), pointer(0x1000), pointer(target), int32(32))
    assert (fault.kind, fault.address, fault.label) == ("global_out_of_bounds", 0x1000, None)
    assert (fault.block, fault.thread, fault.lanes) == ((0, 0, 0), (0, 0, 0), 32)


def test_use_after_free() -> None:
    machine, source, target = copy_setup(64)
    machine.free(source)
    (fault,) = faults_of(machine, compile_kernel(COPY), pointer(source), pointer(target), int32(64), block=64)
    assert (fault.kind, fault.label, fault.offset) == ("use_after_free", "in", 0)
    assert fault.source_line == line_of(COPY, "MARK: load")
    assert (fault.thread, fault.lanes) == ((0, 0, 0), 64)


def test_an_uninitialised_read_is_reported_and_the_launch_goes_on() -> None:
    machine = Machine()
    source, target = machine.allocate(256, "in"), machine.allocate(256, "out")
    machine.write(source, np.arange(60, dtype=np.int32))
    kernel = compile_kernel(COPY)
    (fault,) = faults_of(machine, kernel, pointer(source), pointer(target), int32(64), block=64)
    assert (fault.kind, fault.is_fatal) == ("uninitialised_read", False)
    assert fault.source_line == line_of(COPY, "MARK: load")
    assert (fault.thread, fault.lanes, fault.offset) == ((60, 0, 0), 4, 240)
    np.testing.assert_array_equal(read_as(machine, target, 60, np.int32), np.arange(60) + 1)
    machine.write(source + 240, np.zeros(4, np.int32))
    assert not faults_of(machine, kernel, pointer(source), pointer(target), int32(64), block=64)


VECTOR = """
extern "C" __global__ void kernel(const float* in, float4* out) {
  const float* at = in + threadIdx.x * 4 + (threadIdx.x == 5 ? OFFSET : 0);
  out[threadIdx.x] = *reinterpret_cast<const float4*>(at);  // MARK: load
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_misaligned_vector_load(arch: str) -> None:
    for offset, expected in (("0", 0), ("1", 1)):
        source = VECTOR.replace("OFFSET", offset)
        machine = Machine()
        values = upload(machine, np.zeros(256, np.float32), "in")
        target = machine.allocate(512, "out")
        faults = faults_of(machine, compile_kernel(source, arch), pointer(values), pointer(target))
        assert len(faults) == expected
        if faults:
            assert (faults[0].kind, faults[0].thread) == ("misaligned", (5, 0, 0))
            assert (faults[0].address, faults[0].lanes) == (values + 5 * 16 + 4, 1)
            assert faults[0].source_line == line_of(source, "MARK: load")


def test_unwritten_output() -> None:
    machine, source, target = copy_setup(128)
    (fault,) = faults_of(
        machine,
        compile_kernel(COPY),
        *(pointer(source), pointer(target), int32(100)),
        grid=2,
        block=64,
        must_write=[(target, 512)],
    )
    assert (fault.kind, fault.label, fault.offset, fault.address) == ("unwritten_output", "out", 400, target + 400)
    assert "112 of 512 bytes" in fault.message
    assert (fault.block, fault.thread, fault.source_line) == (None, None, None)


def test_outputs_of_an_earlier_launch_do_not_count_as_written() -> None:
    machine, source, target = copy_setup(64)
    kernel = compile_kernel(COPY)
    arguments = (pointer(source), pointer(target))
    launch_on(machine, kernel, *arguments, int32(64), block=64, must_write=[(target, 256)])
    (fault,) = faults_of(machine, kernel, *arguments, int32(63), block=64, must_write=[(target, 256)])
    assert (fault.kind, fault.offset) == ("unwritten_output", 252)


SCATTER = """
extern "C" __global__ void kernel(const int* slot, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[slot[i]] = i;                                    // MARK: store
}
"""


@pytest.mark.parametrize("chunk_threads", [1, 16384])
def test_two_blocks_write_one_location(chunk_threads: int) -> None:
    kernel = compile_kernel(SCATTER)
    for clash in (True, False):
        slots = np.arange(128, dtype=np.int32)
        if clash:
            slots[70] = 3  # block 2, thread 6, writes what block 0, thread 3, wrote
        machine = Machine()
        arguments = (pointer(upload(machine, slots, "slot")), pointer(machine.allocate(512, "out")))
        faults = faults_of(machine, kernel, *arguments, grid=4, block=32, chunk_threads=chunk_threads)
        assert len(faults) == clash
        if clash:
            fault = faults[0]
            assert (fault.kind, fault.is_fatal) == ("block_write_conflict", False)
            assert fault.source_line == line_of(SCATTER, "MARK: store")
            assert (fault.block, fault.thread) == ((2, 0, 0), (6, 0, 0))
            assert (fault.label, fault.offset) == ("out", 12)
            assert "(0, 0, 0)" in fault.message


def test_a_place_where_blocks_may_collide() -> None:
    machine = Machine()
    slots = upload(machine, np.zeros(64, np.int32), "slot")
    target = machine.allocate(512, "out")
    kernel = compile_kernel(SCATTER)
    arguments = (pointer(slots), pointer(target))
    assert faults_of(machine, kernel, *arguments, grid=2)
    assert faults_of(machine, kernel, *arguments, grid=2, may_collide=[(target + 4, 4)])
    assert not faults_of(machine, kernel, *arguments, grid=2, may_collide=[(target, 4)])


MIXED_WIDTHS = """
extern "C" __global__ void kernel(char* out) {
  if (blockIdx.x == 0) reinterpret_cast<int4*>(out)[threadIdx.x] = make_int4(1, 2, 3, 4);
  if (blockIdx.x == 1) out[512 + threadIdx.x - SHIFT] = 7;  // MARK: store
}
"""


def test_stores_of_different_widths_collide_by_bytes() -> None:
    for shift, expected in ((0, 0), (3, 1)):
        source = MIXED_WIDTHS.replace("SHIFT", str(shift))
        machine = Machine()
        target = machine.allocate(1024, "out")
        # One block after the other, so that block 1 is the later writer.
        faults = faults_of(machine, compile_kernel(source), pointer(target), grid=2, chunk_threads=1)
        assert len(faults) == expected
        if faults:
            # Bytes 509 to 511 belong to the 16-byte store of thread 31 of block 0.
            assert (faults[0].kind, faults[0].offset) == ("block_write_conflict", 509)
            assert (faults[0].block, faults[0].thread, faults[0].lanes) == ((1, 0, 0), (0, 0, 0), 3)
            assert faults[0].source_line == line_of(source, "MARK: store")


TRAP = """
__device__ __forceinline__ int checked(int page, int limit) {
  if (page < 0 || page >= limit) __trap();             // MARK: trap
  return page;
}
extern "C" __global__ void kernel(const int* pages, int* out, int limit) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int page = checked(pages[i], limit);                 // MARK: call
  out[page] = i;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_trap_comes_before_the_stores_after_it(arch: str) -> None:
    pages = np.arange(128, dtype=np.int32)
    pages[97] = 500
    machine = Machine()
    source, target = upload(machine, pages, "pages"), machine.allocate(512, "out")
    with pytest.raises(LaunchFault) as caught:
        launch_on(machine, compile_kernel(TRAP, arch), pointer(source), pointer(target), int32(128), grid=4)
    fault = caught.value.fatal
    assert fault is not None
    assert (fault.kind, fault.block, fault.thread, fault.lanes) == ("trap", (3, 0, 0), (1, 0, 0), 1)
    assert fault.source_line == line_of(TRAP, "MARK: trap")
    assert fault.call_line == line_of(TRAP, "MARK: call")
    assert "trap" in str(caught.value)
    assert f"test.cu:{fault.source_line}" in str(caught.value)
    assert not machine.initialised(target, 512)[97 * 4 : 98 * 4].any()
    assert not machine.initialised(target, 512)[96 * 4 :].any()
    with pytest.raises(PoisonedMachine):
        launch_on(machine, compile_kernel(TRAP, arch), pointer(source), pointer(target), int32(128), grid=4)
    assert machine.read(source, 4).tolist() == [0, 0, 0, 0]


def test_no_trap_without_a_reason() -> None:
    machine = Machine()
    source, target = upload(machine, np.arange(128, dtype=np.int32), "pages"), machine.allocate(512, "out")
    kernel = compile_kernel(TRAP)
    assert not faults_of(
        machine, kernel, pointer(source), pointer(target), int32(128), grid=4, must_write=[(target, 512)]
    )


EARLY_STORE = """
extern "C" __global__ void kernel(volatile int* out, int limit) {
  out[threadIdx.x] = 5;
  if (threadIdx.x >= limit) __trap();
  out[32 + threadIdx.x] = 6;
}
"""


def test_stores_before_a_trap_stay() -> None:
    machine = Machine()
    target = machine.allocate(256, "out")
    faults = faults_of(machine, compile_kernel(EARLY_STORE), pointer(target), int32(31))
    assert [(fault.kind, fault.thread) for fault in faults] == [("trap", (31, 0, 0))]
    assert (read_as(machine, target, 32, np.int32) == 5).all()
    assert not machine.initialised(target + 128, 128).any()


ENDLESS = """
extern "C" __global__ void kernel(volatile int* flag) {
  while (*flag == 0) { }                               // MARK: loop
}
"""


COUNTING = """
extern "C" __global__ void kernel(int* out, int step) {
  for (unsigned i = 1; i != 0; i += step) out[threadIdx.x] = i;  // MARK: loop
}
"""


def test_the_watchdog_ends_an_endless_loop() -> None:
    machine = Machine()
    out = upload(machine, np.zeros(32, np.int32), "out")
    (fault,) = faults_of(machine, compile_kernel(COUNTING), pointer(out), int32(2), max_instructions=10_000)
    assert (fault.kind, fault.source_line, fault.lanes) == ("watchdog", line_of(COUNTING, "MARK: loop"), 32)


def test_a_wait_for_what_nobody_does_is_seen_at_once() -> None:
    machine = Machine()
    flag = upload(machine, np.zeros(1, np.int32), "flag")
    (fault,) = faults_of(machine, compile_kernel(ENDLESS), pointer(flag), max_instructions=10_000)
    assert (fault.kind, fault.source_line, fault.lanes) == ("endless_wait", line_of(ENDLESS, "MARK: loop"), 32)
    assert "32 threads wait here for what no thread does" in fault.message
    machine = Machine()
    flag = upload(machine, np.ones(1, np.int32), "flag")
    assert not faults_of(machine, compile_kernel(ENDLESS), pointer(flag), max_instructions=10_000)


LOCAL = """
extern "C" __global__ void kernel(const int* order, int* out) {
  int table[8];
  for (int i = 0; i < FILLED; ++i) table[order[i]] = i * 10;
  out[threadIdx.x] = table[order[threadIdx.x]];        // MARK: load
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_local_memory(arch: str) -> None:
    kernels = {filled: compile_kernel(LOCAL.replace("FILLED", str(filled)), arch) for filled in (8, 7)}
    order = np.array([3, 1, 0, 2, 7, 6, 5, 4], np.int32)
    for filled, kernel in kernels.items():
        machine = Machine()
        source, target = upload(machine, order, "order"), machine.allocate(32, "out")
        faults = faults_of(machine, kernel, pointer(source), pointer(target), block=8)
        if filled == 8:
            # table[order[i]] = 10 i, so thread i reads 10 i back.
            assert not faults
            np.testing.assert_array_equal(read_as(machine, target, 8, np.int32), np.arange(8) * 10)
        else:
            assert [(fault.kind, fault.thread) for fault in faults] == [("uninitialised_read", (7, 0, 0))]
    machine = Machine()
    wild = upload(machine, np.array([0, 1, 2, 3, 4, 5, 6, 9], np.int32), "order")
    faults = faults_of(machine, kernels[7], pointer(wild), pointer(machine.allocate(32, "out")), block=8)
    assert [(fault.kind, fault.thread) for fault in faults] == [("local_out_of_bounds", (7, 0, 0))]
