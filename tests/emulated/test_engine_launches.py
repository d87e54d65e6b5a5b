"""Launches on the native engine: where they run, what a fault does, and that comparing finds a wrong engine."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel, compile_ptx, line_of

from g4kv_cli.device.emulated import (
    DeadlinePassed,
    EmulatorError,
    EmulatorsDiffer,
    LaunchInterrupted,
    Machine,
    launcher,
)
from g4kv_cli.device.emulated.engine import handlers
from g4kv_cli.device.emulated.engine import state as engine_state

pytestmark = pytest.mark.usefixtures("_needs_engine")


@pytest.fixture
def _needs_engine() -> None:
    engine()


def machine_in(mode: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    return Machine()


SUM = """
extern "C" __global__ void kernel(const int* in, int* out, int count) {
  __shared__ int row[64];
  int at = blockIdx.x * 64 + threadIdx.x;
  row[threadIdx.x] = at < count ? in[at] : 0;
  BARRIER
  if (threadIdx.x % 3 == 0) row[threadIdx.x] += 7;
  BARRIER
  int total = 0;
  for (int k = 0; k <= threadIdx.x; k++) total += row[k];
  if (at < count) out[at] = total;
}
"""
COUNT = 300


def run_sum(machine: Machine, source: str, count: int = COUNT, **options: Any) -> tuple[list[Any], np.ndarray]:
    values = np.arange(COUNT, dtype=np.int32) * 3
    given, out = upload(machine, values, "in"), machine.allocate(4 * COUNT, "out")
    kernel = compile_kernel(source, "90")
    arguments = [pointer(given), pointer(out), int32(count)]
    faults = faults_of(machine, kernel, *arguments, grid=5, block=64, **options)
    return faults, read_as(machine, out, COUNT, np.int32)


def test_native_launches_give_what_the_interpreter_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SUM.replace("BARRIER", "__syncthreads();")
    native, interpreted = machine_in("native", monkeypatch), machine_in("interpreter", monkeypatch)
    for options in ({}, {"reverse_blocks": True}):
        faults, got = run_sum(native, source, **options)
        assert not faults
        _, expected = run_sum(interpreted, source, **options)
        np.testing.assert_array_equal(got, expected)
    assert (native.counts.native, native.counts.interpreted) == (2, 0)
    assert (interpreted.counts.native, interpreted.counts.interpreted) == (0, 2)


def test_both_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_in("both", monkeypatch)
    assert not run_sum(machine, SUM.replace("BARRIER", "__syncthreads();"))[0]
    assert (machine.counts.compared, machine.counts.native, machine.counts.interpreted) == (1, 0, 0)


@pytest.mark.parametrize("opcode", ["add.s32", "mul.lo.s32", "setp.lt.s32", "setp.ge.s32"])
def test_both_finds_a_wrong_handler(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "add.s32": "sub_b32",
        "mul.lo.s32": "mul_lo_b16",
        "setp.lt.s32": "setp_lt_u32",
        "setp.ge.s32": "setp_gt_s32",
    }
    machine = machine_in("both", monkeypatch)
    source = """
    extern "C" __global__ void kernel(const int* in, int* out, int count) {
      int at = blockIdx.x * blockDim.x + threadIdx.x;
      if (at >= count) return;
      int value = in[at] - 400;
      out[at] = (value < in[0] ? value + at : value * count) + at;
    }
    """
    assert not run_sum(machine, source)[0]
    monkeypatch.setitem(handlers.HANDLERS, opcode, (wrong[opcode],))
    fresh = source.replace("kernel(", f"kernel(/* {opcode} */ ")
    assert f"{opcode} " in compile_ptx(fresh).replace("\t", " ")
    with pytest.raises(EmulatorsDiffer, match="the two emulators differ about kernel"):
        run_sum(machine, fresh)


PAIRS = """
extern "C" __global__ void kernel(const int* in, int* out, int count) {
  __shared__ int row[128];
  int pair = threadIdx.x / 64, at = threadIdx.x % 64;
  for (int round = 0; round < 3; round++) {
    row[threadIdx.x] = in[at] + round;
    asm volatile("bar.sync %0, %1;" :: "r"(pair + 1), "n"(COUNTED) : "memory");
    int other = row[64 * pair + 63 - at];
    asm volatile("bar.sync %0, %1;" :: "r"(pair + 1), "n"(COUNTED) : "memory");
    out[threadIdx.x] = other;
  }
}
"""


def run_pairs(machine: Machine, counted: int) -> list[Any]:
    given, out = upload(machine, np.arange(64, dtype=np.int32), "in"), machine.allocate(512, "out")
    kernel = compile_kernel(PAIRS.replace("COUNTED", str(counted)), "90")
    return faults_of(machine, kernel, pointer(given), pointer(out), int32(0), block=128)


def test_pairs_of_warps_meet_at_barriers_that_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_in("both", monkeypatch)
    assert not run_pairs(machine, 64)
    assert machine.counts.compared == 1
    native, interpreted = machine_in("native", monkeypatch), machine_in("interpreter", monkeypatch)
    faults = run_pairs(native, 32)
    assert faults == run_pairs(interpreted, 32)
    assert {fault.kind for fault in faults} == {"barrier_count"}
    assert sum(native.counts.replayed.values()) == 1


FAULTY = {
    "shared race": SUM.replace("BARRIER", "__threadfence_block();"),
    "global bounds": SUM.replace("BARRIER", "__syncthreads();").replace("if (at < count)", ""),
    "uninitialised": SUM.replace("BARRIER", "__syncthreads();").replace("total = 0", "total = out[0]"),
    "shared uninitialised": SUM.replace("row[64]", "row[128]").replace("row[k]", "row[k + 64]").replace("BARRIER", ""),
    "trap": SUM.replace("BARRIER", "__syncthreads();").replace("total = 0;", "total = 0; if (at == 130) __trap();"),
    "stores that meet": SUM.replace("BARRIER", "__syncthreads();").replace("out[at]", "out[threadIdx.x]"),
    "members": SUM.replace("BARRIER", "__syncthreads();").replace(
        "total = 0;", "total = 0; if (threadIdx.x > 40) total = __shfl_sync(0xffffffffu, at, 3);"
    ),
    "divergent barrier": SUM.replace("BARRIER", "if (threadIdx.x < 50) __syncthreads();"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_fault_is_reported_by_the_interpreter_as_it_always_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native, interpreted = machine_in("native", monkeypatch), machine_in("interpreter", monkeypatch)
    faults, got = run_sum(native, FAULTY[kind])
    expected_faults, expected = run_sum(interpreted, FAULTY[kind])
    assert faults
    assert faults == expected_faults
    np.testing.assert_array_equal(got, expected)
    assert native.counts.replayed == {kind: 1}
    assert native.counts.cleared == 0
    assert (native.poisoned_by is None) == (interpreted.poisoned_by is None)


def test_an_unwritten_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SUM.replace("BARRIER", "__syncthreads();")
    machine = machine_in("native", monkeypatch)
    given, out = upload(machine, np.arange(COUNT, dtype=np.int32), "in"), machine.allocate(4 * COUNT, "out")
    kernel = compile_kernel(source, "90")
    arguments = [pointer(given), pointer(out)]
    options = {"grid": 5, "block": 64, "must_write": [(out, 4 * COUNT)]}
    (fault,) = faults_of(machine, kernel, *arguments, int32(COUNT - 1), **options)
    assert fault.kind == "unwritten_output"
    assert machine.counts.replayed == {"unwritten output": 1}
    assert not faults_of(machine, kernel, *arguments, int32(COUNT), **options)
    assert machine.counts.native == 1
    assert machine.initialised(out, 4 * COUNT).all()


def test_a_kernel_that_the_engine_does_not_know_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void kernel(float* out) {
      __shared__ int own;
      unsigned rank;
      asm volatile("getctarank.u64 %0, %1;" : "=r"(rank) : "l"(&own));
      atomicAdd(out, rank == 0 ? 1.0f : 0.0f);
    }
    """
    machine = machine_in("native", monkeypatch)
    out = upload(machine, np.zeros(1, np.float32), "out")
    kernel = compile_kernel(source, "90")
    assert kernel.program is None
    assert kernel.not_native_for == ("getctarank.u64",)
    launch_on(machine, kernel, pointer(out))
    assert read_as(machine, out, 1, np.float32)[0] == 32
    assert (machine.counts.native, machine.counts.interpreted) == (0, 1)


def test_logs_grow_with_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """More scattered stores than the logs have room for at first; compared byte by byte, and counted."""
    source = """
    extern "C" __global__ void kernel(int* out, int stride) {
      int at = blockIdx.x * blockDim.x + threadIdx.x;
      for (int k = 0; k < 8; k++) out[(long long)(8 * at + k) * stride] = at + k;
    }
    """
    machine = machine_in("both", monkeypatch)
    stride, threads = 37, 64 * 128
    out = machine.allocate(8 * threads * stride * 4, "out")
    machine.fill(out, 8 * threads * stride * 4, 0xAB)
    report = launch_on(machine, compile_kernel(source, "90"), pointer(out), int32(stride), grid=64, block=128)
    assert report.stored_bytes == 8 * threads * 4
    assert machine.counts.compared == 1


def test_logs_that_were_given_back_are_not_made_again_for_the_next_launch() -> None:
    state = engine_state.EngineState()
    state.set_logs(1)
    room = state.launch.saved_capacity
    state.grow_logs(1 << 9)
    assert state.launch.saved_capacity > room
    state.release_logs()
    state.set_logs(1)
    assert state.launch.saved_capacity == room


def test_a_loop_of_stores_to_one_place_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void kernel(volatile int* out, int times) {
      for (int k = 0; k < times; k++) out[WHERE] = k;
    }
    """
    monkeypatch.setattr(engine_state, "FIRST_STORES", 2048)
    launcher._engine.cache_clear()  # an engine whose log has not grown yet
    machine = machine_in("native", monkeypatch)
    out = machine.allocate(1024, "out")
    apart = compile_kernel(source.replace("WHERE", "blockIdx.x * 64 + threadIdx.x"))
    launch_on(machine, apart, pointer(out), int32(1), grid=2, block=64)
    state = launcher._engine().state
    room = state.launch.store_capacity
    launch_on(machine, apart, pointer(out), int32(room), grid=2, block=64)  # four times what there is room for
    assert state.launch.store_capacity == room
    assert machine.written_ranges(out).tolist() == [[0, 512]]
    assert machine.counts.native == 2
    # Two blocks at one place are still told apart after that.
    faults = faults_of(
        machine, compile_kernel(source.replace("WHERE", "threadIdx.x")), pointer(out), int32(room), grid=2
    )
    assert {fault.kind for fault in faults} == {"block_write_conflict"}
    assert machine.counts.replayed == {"stores that meet": 1}


def test_an_interrupt_ends_a_launch_inside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void kernel(int* out, int step) { for (unsigned i = 1; i; i += step) out[threadIdx.x] = i; }
    """
    machine = machine_in("native", monkeypatch)
    out = upload(machine, np.zeros(32, np.int32), "out")
    kernel = compile_kernel(source, "90")
    later = time.monotonic() + 60  # with a deadline nothing else ends it

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
        with pytest.raises(LaunchInterrupted) as interrupted:
            launch_on(machine, kernel, pointer(out), int32(2), deadline=later)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    standing = interrupted.value.standing
    assert (standing.kernel, standing.source_line, standing.block) == (
        "kernel",
        line_of(source, "unsigned i"),
        (0, 0, 0),
    )
    assert not machine.counts.replayed
    other = machine_in("native", monkeypatch)  # the engine itself is usable
    out = upload(other, np.ones(32, np.int32), "out")
    launch_on(other, kernel, pointer(out), int32(-1))
    assert other.counts.native == 1


def test_a_deadline_ends_a_launch_inside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void kernel(int* out, int step) { for (unsigned i = 1; i; i += step) out[threadIdx.x] = i; }
    """
    machine = machine_in("native", monkeypatch)
    out = upload(machine, np.zeros(32, np.int32), "out")
    with pytest.raises(DeadlinePassed) as passed:
        launch_on(
            machine, compile_kernel(source, "90"), pointer(out), int32(2), grid=3, deadline=time.monotonic() + 0.05
        )
    assert (passed.value.standing.block, passed.value.standing.warp) == ((0, 0, 0), 0)
    assert not machine.counts.replayed


def test_the_watchdog_counts_inside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void kernel(int* out, int step) { for (unsigned i = 1; i; i += step) out[threadIdx.x] = i; }
    """
    machine = machine_in("native", monkeypatch)
    out = upload(machine, np.zeros(32, np.int32), "out")
    (fault,) = faults_of(machine, compile_kernel(source, "90"), pointer(out), int32(2), max_instructions=5000)
    assert fault.kind == "watchdog"
    assert machine.counts.replayed == {"watchdog": 1}


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmulatorError, match="G4KV_EMULATOR is 'fast'"):
        machine_in("fast", monkeypatch)
