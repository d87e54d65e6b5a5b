"""Launches whose blocks run on several threads: they come to what one thread comes to, whatever the blocks do."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.cases.run import RunSettings
from g4kv_cli.cases.workers import WorkerPool
from g4kv_cli.device.emulated import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    Kernel,
    LaunchFault,
    LaunchInterrupted,
    Machine,
)
from g4kv_cli.device.emulated.engine import launch as engine_launch
from g4kv_cli.device.emulated.launcher import Launcher
from g4kv_cli.device.emulated.mode import emulator_threads
from g4kv_cli.device.emulated.request import LaunchOutcome
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.errors import UsageError

WORDS, BLOCKS, THREADS = 8192, 60, 64
Started = list[int]
"""For each run of blocks on several threads, how many these were."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Several threads, which begin at once, however short a launch is."""
    engine()
    found: Started = []
    run = engine_launch.run_apart

    def counted(first: Any, others: Any, advance: Any) -> None:
        found.append(1 + len(others))
        run(first, others, advance)

    monkeypatch.setattr(engine_launch, "run_apart", counted)
    monkeypatch.setattr(engine_launch, "FIRST_SLICE", 0)
    monkeypatch.setenv("G4KV_EMULATOR_THREADS", "3")
    return found


APART = {
    "a word each": "if (i < n) x[i] = y[i] * 3 + b;",
    "shared memory": """
        __shared__ int row[64];
        for (int k = 0; k < 5; k++) {
          row[t] = y[i] + k; __syncthreads();
          x[i] = row[63 - t] + row[(t + k) % 64]; __syncthreads();
        }""",
    "spread over pages": "for (int k = 0; k < 2; k++) x[(i * 61 + k * 3840) % 7680] = i + k;",
    "some blocks far longer": "int sum = 0; for (int k = 0; k < (b % 7 == 0) * 2000; k++) sum += y[k] ^ k; x[i] = sum;",
    "local memory": "int a[9]; for (int k = 0; k < 9; k++) a[k] = y[i] + k; x[i] = a[y[i] % 9];",
    "in place": "x[i] = x[i] * 3 + y[b];",
    "in place, what the block stores": "x[i] += 5; if (b == 7) x[i] += x[i];",
    "sums that all add to": "for (int k = 0; k < 9; k++) atomicAdd(x + (i + k) % 5, y[i]);",
    "wide sums": "atomicAdd((unsigned long long*)x + i % 3, (unsigned long long)y[i] << 30);",
    "maxima that all take part in": "atomicMax(x + i % 3, y[i]);",
}
"""Blocks that know nothing of each other."""
MEETING = {
    "stores of all blocks": "x[t] = b + n;",
    "equal stores of all blocks": "x[t] = n;",
    "what another block stores": "x[i] = 1; y2[i] = x[(i + 64) % 3840];",
    "what the block before stores": "y2[i] = b ? x[i - 64] : 0; x[i] = b;",
    "reads beside atomics": "atomicAdd(x, 1); y2[i] = x[0];",
    "stores beside atomics": "atomicAdd(x + i % 7, 1); if (b == 40 && t == 3) x[3] = 5;",
    "atomics of two kinds": "atomicAdd(x + i % 2, 3); atomicMax(x + 1, y[i]);",
    "tickets": "x[i] = atomicAdd(x + 8000, 1) > 90000;",
}
IN_ORDER = {"tickets", "atomics of two kinds"}
"""Those that nobody tries with several threads."""
PERHAPS_IN_PLACE = {"what another block stores", "what the block before stores"}
"""Those that are tried again to see who reads what."""
FAULTY = {
    "traps": "x[i] = b; if (i == 3601 || b == 9) __trap();",
    "a wild address in a late block": "x[i + (b == 58) * 90000] = b;",
    "what nobody wrote": "x[i] = z[i / 6];",
    "shared races": """
        __shared__ int row[64];
        row[t] = y[i]; if (b % 16 != 5) __syncthreads();
        x[i] = row[63 - t];""",
    "stores beyond the end of one block": "x[i + 4 * (b == 30)] = b;",
}


def kernel_of(body: str) -> Kernel:
    head = """extern "C" __global__ void kernel(int* x, const int* y, int* y2, const int* z, int n) {
      const int t = threadIdx.x, b = blockIdx.x, i = b * 64 + t;"""
    return compile_kernel(f"{head}\n{body}\n}}")


def run(
    body: str, threads: int, mode: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[Fault], npt.NDArray[np.uint8], list[Any], Machine]:
    """What comes of ``kernel(int* x, const int* y, int* y2, const int* z, int n)``: faults, all bytes and which of them
    are initialised, what was counted and where was stored to, and the machine."""
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    monkeypatch.setenv("G4KV_EMULATOR_THREADS", str(threads))
    machine, kernel = Machine(), kernel_of(body)
    assert kernel.program is not None
    kernel.program.shares = False  # compiled once a process
    values = np.arange(WORDS, dtype=np.int32)
    given = [upload(machine, part, name) for part, name in ((values * 7 % 1000, "x"), (values, "y"), (-values, "y2"))]
    given.append(machine.allocate(4 * WORDS, "z"))
    machine.write(given[3], values[:600])
    counted: list[Any] = []
    faults: list[Fault] = []
    try:
        report = launch_on(machine, kernel, *map(pointer, given), int32(3800), grid=BLOCKS, block=THREADS, **options)
        counted = [report.thread_instructions, report.stored_bytes, report.notes]
    except LaunchFault as error:
        faults = error.faults
    counted += [machine.written_ranges(address).tolist() for address in given]
    state = [machine.initialised(address, 4 * WORDS).view(np.uint8) for address in given]
    memory = [machine.read(address, 4 * WORDS) for address in given[:3]]
    return faults, np.concatenate([*memory, *state]), counted, machine


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse_blocks": True}, {"chosen": range(3, 50)}, {"cluster": (4, 1, 1)}],
    ids=["all", "back", "some", "clusters"],
)
@pytest.mark.parametrize("what", APART)
def test_blocks_apart_come_to_what_one_thread_comes_to(
    what: str, options: dict[str, Any], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, memory, counted, machine = run(APART[what], 3, "both", monkeypatch, **options)
    assert not faults
    assert machine.counts.compared == 1
    assert started == [3] * (2 if what.startswith("in place") else 1)  # once to see who reads what
    _, expected, wanted, _ = run(APART[what], 1, "native", monkeypatch, **options)
    np.testing.assert_array_equal(memory, expected)
    assert counted == wanted


@pytest.mark.parametrize("what", [*MEETING, *FAULTY])
def test_other_blocks_run_in_order(what: str, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    body = MEETING.get(what) or FAULTY[what]
    faults, memory, counted, machine = run(body, 3, "native", monkeypatch)
    assert started == ([] if what in IN_ORDER else [3, 3] if what in PERHAPS_IN_PLACE else [3])
    expected_faults, expected, wanted, alone = run(body, 1, "native", monkeypatch)
    assert faults == expected_faults
    assert counted == wanted
    np.testing.assert_array_equal(memory, expected)
    assert machine.counts == alone.counts
    if what in FAULTY:
        assert faults
    else:  # nobody tries again what cannot be
        before = len(started)
        run(body, 3, "native", monkeypatch)
        assert len(started) == before


def test_what_is_taken_back_is_as_before_in_every_byte(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads store to the same pages, each of which has to be saved before anybody does."""
    nothing = LaunchOutcome(np.empty((0, 2), np.int64), 0, [])
    monkeypatch.setattr(Launcher, "_interpret", lambda launcher, request: nothing)
    values = np.arange(1 << 21, dtype=np.int32)
    source = """extern "C" __global__ void kernel(int* x, int pages) {
      for (int k = threadIdx.x; k < pages; k += 32) x[k * 256 + blockIdx.x] = ~k;
      x[255] = blockIdx.x;
    }"""
    kernel = compile_kernel(source)
    assert kernel.program is not None
    for _ in range(3):
        machine = Machine()
        x = upload(machine, values, "x")
        kernel.program.runs_apart = True
        launch_on(machine, kernel, pointer(x), int32(values.size // 256), grid=8)
        assert machine.counts.replayed == {"stores that meet": 1}
        np.testing.assert_array_equal(machine.read(x, values.nbytes).view(np.int32), values)
    assert started == [3] * 3


ENDLESS = "if (b == 7) for (unsigned k = 1; k; k += n - 3798) x[i] = k; else x[i] = b;"


def test_an_interrupt_ends_all_threads(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    assert kernel_of(ENDLESS).program is not None  # takes longer than the timer
    before, count = signal.signal(signal.SIGVTALRM, interrupt), threading.active_count()
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
        with pytest.raises(LaunchInterrupted):
            run(ENDLESS, 3, "native", monkeypatch, deadline=time.monotonic() + 30)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert started == [3]
    until = time.monotonic() + 10  # an ended run has no thread in the engine, but perhaps one on its way out
    while threading.active_count() > count and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == count
    assert not run(APART["a word each"], 3, "both", monkeypatch)[0]  # the engine itself is usable


@pytest.mark.parametrize(("kind", "dtype"), [("unsigned", np.uint32), ("unsigned long long", np.uint64)])
def test_no_addition_is_lost(kind: str, dtype: Any, started: Started) -> None:
    source = """extern "C" __global__ void kernel(KIND* x, int n) {
      for (int k = 0; k < n; k++) atomicAdd(x + k % 2, (KIND)3);
    }"""
    machine, times = Machine(), 500
    x = upload(machine, np.zeros(2, dtype), "x")
    launch_on(machine, compile_kernel(source.replace("KIND", kind)), pointer(x), int32(times), grid=BLOCKS, block=64)
    np.testing.assert_array_equal(read_as(machine, x, 2, dtype), 3 * times // 2 * BLOCKS * 64)
    assert started == [3]


def test_where_no_thread_can_be_started_the_callers_runs_all(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert not run(APART["shared memory"], 3, "both", monkeypatch)[0]
    assert started == [3]


def test_a_fault_ends_all_threads(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = LaunchOutcome(np.empty((0, 2), np.int64), 0, [])  # it would begin with the block that does not end
    monkeypatch.setattr(Launcher, "_interpret", lambda launcher, request: nothing)
    body = "if (b == 2) for (int k = 0; k < n; k++) x[i] = y[k]; if (b == 2) __trap();" + ENDLESS
    _, _, _, machine = run(body, 3, "native", monkeypatch, deadline=time.monotonic() + 30)
    assert machine.counts.replayed == {"trap": 1}
    assert started == [3]


def test_a_deadline_names_the_block_that_does_not_end(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_of(ENDLESS).program is not None
    for threads, back in ((3, False), (3, True), (1, False)):
        with pytest.raises(DeadlinePassed) as passed:  # the other blocks end in some milliseconds
            run(ENDLESS, threads, "native", monkeypatch, deadline=time.monotonic() + 0.8, reverse_blocks=back)
        assert passed.value.standing.block == (7, 0, 0)
    assert started == [3, 3]


@pytest.mark.parametrize("less", [0, 1])
def test_the_watchdog_counts_all_threads_together(less: int, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    body = APART["some blocks far longer"]
    _, _, counted, _ = run(body, 1, "native", monkeypatch)
    faults, _, _, machine = run(body, 3, "native", monkeypatch, max_instructions=counted[0] - less)
    assert [fault.kind for fault in faults] == ["watchdog"] * less
    assert machine.counts.replayed == ({"watchdog": 1} if less else {})
    assert started == [3]


def test_what_several_blocks_may_store_by_contract_is_theirs_in_order(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    kernel = compile_kernel('extern "C" __global__ void kernel(int* x) { x[threadIdx.x] = blockIdx.x; }')
    x = machine.allocate(4 * THREADS, "x")
    options = {"grid": BLOCKS, "block": THREADS, "may_collide": [(x, 4 * THREADS)], "must_write": [(x, 4 * THREADS)]}
    assert not faults_of(machine, kernel, pointer(x), **options)
    np.testing.assert_array_equal(read_as(machine, x, THREADS, np.int32), BLOCKS - 1)
    assert started == [3]


def test_an_unwritten_output_is_found_among_the_stores_of_all(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "int i = blockIdx.x * 64 + threadIdx.x; if (i != n) x[i] = i;"
    source = f'extern "C" __global__ void kernel(int* x, int n) {{ {body} }}'
    kernel, nbytes = compile_kernel(source), 4 * THREADS * BLOCKS
    for left_out, kinds in ((-1, []), (1234, ["unwritten_output"])):
        machine = Machine()
        x = machine.allocate(nbytes, "x")
        options = {"grid": BLOCKS, "block": THREADS, "must_write": [(x, nbytes)]}
        assert [fault.kind for fault in faults_of(machine, kernel, pointer(x), int32(left_out), **options)] == kinds
    assert started == [3, 3]


def test_a_short_launch_starts_no_thread(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_launch, "FIRST_SLICE", 1 << 17)
    assert not run(APART["a word each"], 3, "native", monkeypatch)[0]
    assert not run(APART["some blocks far longer"], 1, "native", monkeypatch)[0]
    assert not started
    assert not run(APART["some blocks far longer"], 3, "native", monkeypatch)[0]
    assert started == [3]


def test_no_more_threads_than_blocks_are_left(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, threads in ((range(10), 10), (range(2), 2), (range(1), 1)):
        assert not run(APART["shared memory"], 16, "both", monkeypatch, chosen=chosen)[0]
        assert started.pop() == threads


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5", "100000", "\u0662"])
def test_what_is_no_number_of_threads_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR_THREADS", word)
    with pytest.raises(EmulatorError, match=r"G4KV_EMULATOR_THREADS is .*; it can be 1 to 1024"):
        Machine()
    with pytest.raises(UsageError, match="it can be 1 to 1024"):
        EmulatedDevice()


def test_as_many_threads_as_this_process_may_use_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("G4KV_EMULATOR_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(5)), raising=False)
    assert emulator_threads() == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(100)), raising=False)
    assert emulator_threads() == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert emulator_threads() == 7


def test_a_worker_of_smoke_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("G4KV_EMULATOR_THREADS")
    pool = WorkerPool(RunSettings("emulated:sm_90", None, ("g4kv", "smoke")), 1, may_fork=True)
    try:
        assert pool._executor.submit(emulator_threads).result(120) == 1
    finally:
        pool.shutdown()
