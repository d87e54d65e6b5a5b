"""Each check of bulk copies on a kernel that breaks exactly that rule, and on a twin that does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hopper_helper import SMALL, hopper_kernel, line, run_small, seeded, where
from launch_helper import faults_of, pointer, read_as, upload

from g4kv_cli.device.emulated import Fault, Machine, UnsupportedOpcode

# A ring of two stages: thread 0 loads rows of 64 x 32 elements, warps 1 and 2 add up their halves of every stage.
STEPS = 5
RING = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, u32* out) {
  __shared__ __align__(1024) u16 stage[2][32 * 64];
  __shared__ u64 full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) { init(&full[s], 1); init(&empty[s], 2); }     // MARK: init
    init_fence();
  }
  /*BARRIER*/ __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) for (int i = 0; i < 5; ++i) {
      int s = i % 2, parity = i / 2 % 2;
      /*EMPTY*/ wait(&empty[s], parity ^ 1);                                   // MARK: empty wait
      /*EXPECT*/ expect(&full[s], 4096);
      /*LOAD*/ load2(stage[s], &map, 0, i * 32 + blockIdx.x * 160, &full[s]);  // MARK: load
    }
    return;
  }
  u32 total = 0;
  for (int i = 0; i < 5; ++i) {
    int s = i % 2, parity = i / 2 % 2;
    /*FULL*/ wait(&full[s], parity);                                           // MARK: full wait
    for (int j = threadIdx.x - 32; j < 32 * 64; j += 64) total += stage[s][j]; // MARK: read
    __syncwarp();
    /*RELEASE*/ if (threadIdx.x % 32 == 0) arrive(&empty[s]);                  // MARK: release
  }
  out[blockIdx.x * 64 + threadIdx.x - 32] = total;
}
"""
BLOCKS = 3


def run_ring(source: str, **options: Any) -> tuple[list[Fault], npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    machine = Machine()
    data = np.random.default_rng(3).integers(0, 1000, (BLOCKS * STEPS * 32, 64)).astype(np.uint16)
    tensor_map = machine.tensor_map(upload(machine, data, "data"), (64, len(data)), (64, 32), swizzle_bytes=0)
    out = machine.allocate(BLOCKS * 64 * 4, "out")
    faults = faults_of(
        machine, hopper_kernel(source), tensor_map.pack(), pointer(out), grid=BLOCKS, block=96, **options
    )
    return faults, read_as(machine, out, BLOCKS * 64, np.uint32), data


@pytest.mark.parametrize("options", [{}, {"chunk_threads": 1}, {"reverse_blocks": True}], ids=str)
def test_ring_of_bulk_copies_is_clean(options: dict[str, Any]) -> None:
    faults, totals, data = run_ring(RING, **options)
    assert not faults
    # Thread t of 64 adds elements t, t + 64, ...: column t of all rows of its block.
    want = data.reshape(BLOCKS, STEPS * 32, 64).astype(np.uint32).sum(1)
    np.testing.assert_array_equal(totals.reshape(BLOCKS, 64), want)


def test_too_many_expected_bytes_are_a_deadlock() -> None:
    source = seeded(RING, "EXPECT", "expect(&full[s], 4112);")
    (fault,), _, _ = run_ring(source)
    assert (fault.kind, fault.is_fatal) == ("deadlock", True)
    assert where(fault) == (line(source, "full wait"), (0, 0, 0), (32, 0, 0))
    assert "0 of 1 arrivals and 16 transaction bytes are missing" in fault.message


def test_too_few_expected_bytes_are_found() -> None:
    # The phase ends before the bytes are there: what the consumers read is not ordered after the copy.
    source = seeded(RING, "EXPECT", "expect(&full[s], 4080);")
    faults, _, _ = run_ring(source)
    assert {"deadlock", "shared_race"} & {fault.kind for fault in faults}


def test_no_expected_bytes_let_consumers_read_before_the_copy() -> None:
    source = seeded(RING, "EXPECT", "arrive(&full[s]);")
    faults, _, _ = run_ring(source)
    races = [fault for fault in faults if fault.kind == "shared_race"]
    assert "read-after-write race: warp 1 and a bulk copy" in races[0].message
    assert where(races[0]) == (line(source, "read"), (0, 0, 0), (32, 0, 0))


@pytest.mark.parametrize("who", ["0", "threadIdx.x == 32"])
def test_missing_arrival_is_a_deadlock(who: str) -> None:
    source = seeded(RING, "RELEASE", f"if ({who}) arrive(&empty[s]);")
    (fault,), _, _ = run_ring(source)
    assert fault.kind == "deadlock"
    # Stages 0 and 1 are filled once without waiting; the third load waits for ever, as do the consumers.
    assert where(fault) in [
        (line(source, "empty wait"), (0, 0, 0), (0, 0, 0)),
        (line(source, "full wait"), (0, 0, 0), (32, 0, 0)),
    ]
    assert "and no thread can run" in fault.message


def test_missing_producer_is_a_deadlock_at_the_consumers_wait() -> None:
    source = seeded(RING, "LOAD", "")
    (fault,), _, _ = run_ring(source)
    assert fault.kind == "deadlock"
    assert where(fault) == (line(source, "full wait"), (0, 0, 0), (32, 0, 0))
    assert "0 of 1 arrivals and 4096 transaction bytes" in fault.message


@pytest.mark.parametrize("text", ["", "wait(&full[s], parity ^ 1);", "if (threadIdx.x < 64) wait(&full[s], parity);"])
def test_consumers_that_do_not_wait_for_a_stage(text: str) -> None:
    faults, _, _ = run_ring(seeded(RING, "FULL", text))
    # They run ahead of the producer, whose phases they then confuse.
    assert faults[0].kind in ("shared_uninitialised_read", "shared_race")
    first = (64, 0, 0) if "64" in text else (32, 0, 0)
    assert where(faults[0]) == (line(RING, "read"), (0, 0, 0), first)


AHEAD = """
  if (threadIdx.x == 0) { expect(&other, 1024); load2(tile, &map, 0, 0, &other); }   // MARK: one load
  __syncthreads();
  WAIT
  u32 value = tile[threadIdx.x];                                                     // MARK: one read
  out[1024 + blockIdx.x * 64 + threadIdx.x] = value;
"""


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", 0),
        ("wait(&other, 1);", 0),  # the phase before
        ("if (threadIdx.x < 32) wait(&other, 0);", 32),  # no other warp knows
        ("if (threadIdx.x < 32) wait(&other, 0); __syncthreads();", None),
        ("wait(&other, 0);", None),
    ],
)
def test_reading_before_the_phase_completed_is_a_race(text: str, first: int | None) -> None:
    source = SMALL.replace("BODY", AHEAD.replace("WAIT", text))
    machine = Machine()
    out = upload(machine, np.arange(2048).astype(np.uint32), "out")
    tensor_map = machine.tensor_map(out, (32, 32), (32, 8), 4, None, 0)
    faults = faults_of(machine, hopper_kernel(source), tensor_map.pack(), pointer(out), block=64)
    races = [fault for fault in faults if fault.kind == "shared_race"]
    if first is None:
        assert faults == []
        np.testing.assert_array_equal(read_as(machine, out, 2048, np.uint32)[1024:1088], np.arange(64))
        return
    (race,) = races
    assert where(race) == (line(source, "one read"), (0, 0, 0), (first, 0, 0))
    assert f"read-after-write race: warp {first // 32} and a bulk copy" in race.message
    assert "whose mbarrier phase was not waited for" in race.message


def test_waiting_for_another_mbarrier_is_a_race() -> None:
    text = """if (threadIdx.x == 0) { expect(&bar, 1024); load2(tile + 512, &map, 0, 0, &bar); arrive(&bar); }
  wait(&bar, 0); int unrelated = tile[512 + threadIdx.x]; if (unrelated == -1) return;"""
    faults = run_small(AHEAD.replace("WAIT", text))
    assert [fault.kind for fault in faults] == ["shared_race"]
    assert "whose mbarrier phase was not waited for" in faults[0].message
    assert faults[0].address == 0


def test_overwriting_a_stage_that_is_still_read_is_a_race() -> None:
    source = seeded(RING, "EMPTY", "")
    faults, _, _ = run_ring(source)
    # The load goes first into a full stage, or the producer arrives twice in one phase.
    assert {fault.kind for fault in faults} <= {"shared_race", "mbarrier_misuse"}
    assert faults
    # One arrival of two releases the stage while the other warp may still read it.
    early = RING.replace("init(&empty[s], 2)", "init(&empty[s], 1)")
    faults, _, _ = run_ring(early)
    assert any(fault.kind in ("shared_race", "deadlock", "mbarrier_misuse") for fault in faults)


def test_release_before_the_reads_is_a_race() -> None:
    source = RING.replace("/*FULL*/ wait(&full[s], parity); ", "/*FULL*/ wait(&full[s], parity); RELEASE_EARLY")
    source = seeded(source, "RELEASE", "").replace("RELEASE_EARLY", "if (threadIdx.x % 32 == 0) arrive(&empty[s]);")
    faults, _, _ = run_ring(source)
    assert {fault.kind for fault in faults} == {"shared_race"}
    race = faults[0]
    assert "write-after-read race: a bulk copy and warp" in race.message
    assert where(race) == (line(source, "load"), (0, 0, 0), (0, 0, 0))
    assert f"line {line(source, 'read')}" in race.message


def test_use_without_a_barrier_behind_the_initialisation() -> None:
    source = seeded(RING, "BARRIER", "")
    faults, _, _ = run_ring(source)
    assert faults
    assert {fault.kind for fault in faults} <= {"shared_race", "mbarrier_misuse"}
    race = next(fault for fault in faults if fault.kind == "shared_race")
    assert "mbarrier.init" in race.message


@pytest.mark.parametrize(("nbytes", "place", "is_clean"), [(2048, 256, True), (1024, 0, True), (1024, 256, False)])
def test_a_phase_that_ends_between_two_copies(nbytes: int, place: int, is_clean: bool) -> None:
    body = f"""
  if (threadIdx.x == 0) {{
    expect(&other, {nbytes}); load2(tile, &map, 0, 0, &other); load2(tile + 256, &map, 0, 8, &other);
  }}
  __syncthreads();
  wait(&other, 0);
  u32 value = tile[{place} + threadIdx.x];
  out[1024 + threadIdx.x] = value;"""
    faults = run_small(body)
    assert [fault.kind for fault in faults] == ([] if is_clean else ["shared_race"])


LOAD_ONE = "if (threadIdx.x == 0) {{ expect(&other, 1024); load2({}, &map, {}, {}, &other); }} wait(&other, 0);"


def test_box_outside_of_shared_memory() -> None:
    assert run_small(LOAD_ONE.format("tile", 0, 0)) == []
    (fault,) = run_small(LOAD_ONE.format("tile + 1024", 0, 0))
    assert (fault.kind, fault.thread) == ("shared_out_of_bounds", (0, 0, 0))


def test_box_at_an_address_that_is_no_multiple_of_128() -> None:
    (fault,) = run_small(LOAD_ONE.format("tile + 16", 0, 0))
    assert fault.kind == "misaligned"
    assert "128-byte aligned" in fault.message


def test_source_of_a_bulk_load_is_checked() -> None:
    machine = Machine()
    address = machine.allocate(32 * 8 * 4, "source")
    kernel = hopper_kernel(SMALL.replace("BODY", LOAD_ONE.format("tile", 0, 0)))

    def run(rows: int) -> list[Fault]:
        tensor_map = machine.tensor_map(address, (32, rows), (32, 8), 4, None, 0)
        return faults_of(machine, kernel, tensor_map.pack(), pointer(address), block=64)

    tensor_map = machine.tensor_map(address, (32, 8), (32, 8), 4, None, 0)
    (note,) = machine.launch(kernel, (1, 1, 1), (64, 1, 1), [tensor_map.pack(), pointer(address)]).notes
    assert (note.kind, note.label, note.offset) == ("unused_undefined", "source", 0)  # nobody reads the tile
    machine.write(address, np.zeros(256, np.uint32))
    assert run(8) == []
    smaller = machine.allocate(32 * 4 * 4, "smaller")
    machine.fill(smaller, 512, 0)
    tensor_map = machine.tensor_map(smaller, (32, 8), (32, 8), 4, None, 0)
    (fault,) = faults_of(machine, kernel, tensor_map.pack(), pointer(address), block=64)
    assert (fault.kind, fault.label, fault.offset) == ("global_out_of_bounds", "smaller", 512)


def test_operand_that_is_no_tensor_map() -> None:
    machine = Machine()
    out = machine.allocate(4096, "out")
    kernel = hopper_kernel(SMALL.replace("BODY", LOAD_ONE.format("tile", 0, 0)))
    (fault,) = faults_of(machine, kernel, bytes(128), pointer(out), block=64)
    assert fault.kind == "illegal_instruction"
    assert "no tensor map" in fault.message
    flat = machine.tensor_map(out, (32, 8, 4), (32, 8, 1), 4, None, 0)
    machine = Machine()
    (fault,) = faults_of(machine, kernel, flat.pack(), pointer(out), block=64)
    assert "2 coordinates for a tensor map of 3 dimensions" in fault.message


def test_tensor_map_in_global_memory() -> None:
    source = """
extern "C" __global__ void kernel(const TensorMap* map, u32* out) {
  __shared__ __align__(1024) u32 tile[256];
  __shared__ u64 full;
  if (threadIdx.x == 0) { init(&full, 1); expect(&full, 1024); load2(tile, map, 0, 8, &full); wait(&full, 0); }
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) out[i] = tile[i];
}
"""
    machine = Machine()
    data = np.arange(32 * 32).astype(np.uint32)
    tensor_map = machine.tensor_map(upload(machine, data, "data"), (32, 32), (32, 8), 4, None, 0)
    place = upload(machine, np.frombuffer(tensor_map.pack(), np.uint8), "map")
    out = machine.allocate(1024, "out")
    assert faults_of(machine, hopper_kernel(source), pointer(place), pointer(out)) == []
    np.testing.assert_array_equal(read_as(machine, out, 256, np.uint32), data[256:512])


def test_copy_that_nobody_waits_for() -> None:
    body = "if (threadIdx.x == 0) { expect(&other, 1024); load2(tile, &map, 0, 0, &other); }"
    (fault,) = run_small(body)
    assert (fault.kind, fault.is_fatal) == ("unfinished_copy", False)
    assert "ended before a bulk copy" in fault.message
    assert run_small(body + " wait(&other, 0);") == []


STORES = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, u32* out) {
  __shared__ __align__(1024) u32 tile[256];
  for (int i = threadIdx.x; i < 256; i += 64) tile[i] = i;                    // MARK: fill
  /*FENCE*/ proxy_fence();
  /*BARRIER*/ __syncthreads();
  if (threadIdx.x == 0) {
    store2(&map, 0, 8, tile);                                                 // MARK: store
    /*COMMIT*/ commit();
    /*WAIT*/ wait_read();
  }
  /*AGAIN*/ __syncthreads();
  tile[threadIdx.x] = 7;                                                      // MARK: reuse
  /*END*/
}
"""


def run_stores(source: str) -> tuple[list[Fault], npt.NDArray[np.uint32]]:
    machine = Machine()
    out = machine.allocate(4096, "out")
    tensor_map = machine.tensor_map(out, (32, 32), (32, 8), 4, None, 0)
    faults = faults_of(machine, hopper_kernel(source), tensor_map.pack(), pointer(out), block=64)
    return faults, read_as(machine, out, 1024, np.uint32)


def test_bulk_store_and_reuse_of_its_source() -> None:
    faults, values = run_stores(STORES)
    assert faults == []
    np.testing.assert_array_equal(values[256:512], np.arange(256))
    # The fence may also stand behind the barrier, in the thread that issues the store.
    moved = seeded(STORES, "FENCE", "").replace("    store2(&map", "    proxy_fence(); store2(&map")
    assert run_stores(moved)[0] == []


def test_bulk_store_without_a_proxy_fence() -> None:
    source = seeded(STORES, "FENCE", "")
    (fault,), _ = run_stores(source)
    assert fault.kind == "shared_race"
    assert "ordered, but without a fence.proxy.async" in fault.message
    assert where(fault) == (line(source, "store"), (0, 0, 0), (0, 0, 0))
    assert f"line {line(source, 'fill')}" in fault.message


def test_bulk_store_without_a_barrier() -> None:
    (fault,), _ = run_stores(seeded(STORES, "BARRIER", ""))
    assert fault.kind == "shared_race"
    assert "read-after-write race: a bulk store of warp 0 and warp 1" in fault.message


@pytest.mark.parametrize(("mark", "unfinished"), [("WAIT", True), ("COMMIT", True), ("AGAIN", False)])
def test_reuse_before_a_bulk_store_has_read(mark: str, unfinished: bool) -> None:
    source = seeded(STORES, mark, "")
    faults, _ = run_stores(source)
    race = next(fault for fault in faults if fault.kind == "shared_race")
    assert "write-after-read race: warp" in race.message
    assert where(race)[0] == line(source, "reuse")
    assert ("unfinished_copy" in [fault.kind for fault in faults]) == unfinished


ADDED = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, const TYPE* in) {
  __shared__ __align__(1024) TYPE tile[8 * 16];
  for (int k = threadIdx.x; k < 128; k += 32) tile[k] = in[128 * blockIdx.x + k];
  proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.OPERATION.bulk_group [%0, {%1, %2}], [%3];"
        :: "l"(&map), "r"(8 * (int)blockIdx.x), "r"(3 * (int)blockIdx.x - 2), "r"(at(tile)) : "memory");
    commit();
    wait_store();
  }
}
"""


@pytest.mark.parametrize(
    ("operation", "kind", "c_type", "dtype", "update"),
    [
        ("add", "f32", "float", np.float32, np.add),
        ("max", "s32", "int", np.int32, np.maximum),
        ("or", "u32", "u32", np.uint32, np.bitwise_or),
        ("add.tile", "f16", "u16", np.float16, np.add),
    ],
)
def test_boxes_that_are_added_to_a_tensor(operation: str, kind: str, c_type: str, dtype: Any, update: Any) -> None:
    """Boxes of three blocks overlap, and two of them leave the tensor."""
    machine = Machine()
    start = (np.arange(10 * 24) % 31).astype(dtype).reshape(10, 24)
    boxes = (np.arange(3 * 128) % 17 - 5 * (dtype != np.uint32)).astype(dtype).reshape(3, 8, 16)
    tensor, source = upload(machine, start, "tensor"), upload(machine, boxes, "in")
    made = machine.tensor_map(tensor, (24, 10), (16, 8), start.itemsize, None, 0, kind)
    kernel = hopper_kernel(ADDED.replace("TYPE", c_type).replace("OPERATION", operation))
    assert faults_of(machine, kernel, made.pack(), pointer(source), grid=3) == []
    want = start.copy()
    for block, box in enumerate(boxes):
        row, column = 3 * block - 2, 8 * block
        skipped = max(0, -row)
        there = want[row + skipped : row + 8, column : column + 16]
        there[:] = update(there, box[skipped : skipped + there.shape[0], : there.shape[1]])
    np.testing.assert_array_equal(read_as(machine, tensor, 240, dtype).reshape(10, 24), want)
    for other, words in (("", "does not say of which type"), ("f32.ftz", "of type f32.ftz")):
        if start.itemsize == 4:
            unknown = machine.tensor_map(tensor, (24, 10), (16, 8), 4, None, 0, other)
            with pytest.raises(UnsupportedOpcode, match=words):
                faults_of(machine, kernel, unknown.pack(), pointer(source), grid=3)
