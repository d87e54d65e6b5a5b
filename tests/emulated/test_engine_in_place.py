"""Kernels that read and store to one allocation run on the engine where each thread reads its own stores alone."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, Machine
from g4kv_cli.device.emulated.engine import same_threads
from g4kv_cli.device.emulated.engine.same_threads import SEVERAL, reads_of_others
from g4kv_cli.device.emulated.engine.structures import STORE

pytestmark = pytest.mark.usefixtures("_needs_engine")
WORDS = 4096

COPIED = """
  __shared__ int4 row[64];
  unsigned to = (unsigned)__cvta_generic_to_shared(row + t);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"((int4*)x + FROM), "r"(BYTES) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  int4 one = row[t]; one.x += 5; ((int4*)x)[i] = one;
"""
OWN = {
    "a word each": "x[i] = x[i] * 3 + y[i];",
    "four words each": "int4* v = (int4*)x + i; int4 one = *v; one.x += one.w; one.z ^= t; *v = one;",
    "rows in two passes": """
        __shared__ int sum;
        if (t == 0) sum = 0;
        __syncthreads();
        for (int k = t; k < 512; k += 64) atomicAdd(&sum, x[b * 512 + k]);
        __syncthreads();
        for (int k = t; k < 512; k += 64) x[b * 512 + k] -= sum;""",
    "wide loads and narrow stores": """
        int4 one = ((int4*)x)[i];
        x[4 * i] = one.y; x[4 * i + 1] = one.z; x[4 * i + 2] = one.w; x[4 * i + 3] = one.x;""",
    "bytes": "unsigned char* c = (unsigned char*)x; c[2 * i] = c[2 * i + 1] + 1; c[2 * i + 1] = c[2 * i];",
    "what nobody stores, beside": "if (i < 128) x[i] = x[i + 2048] + x[4095 - b];",
    "again and again": "for (int k = 0; k < n; k++) x[i] = x[i] * 3 + k;",
    "one lane": "if (t == 7) x[i] = x[i] + x[i + 1 - 1];",
    "pieces of a copy": COPIED.replace("FROM", "i").replace("BYTES", "16"),
}
OTHERS = {
    "the next thread's": "int own = x[i], other = x[(i + 1) % 256]; x[i] = own + other;",
    "one word of another": "int own = x[4 * i + (i == 130)]; x[4 * i] = own; if (i == 131) x[521] = 1;",
    "what all read": "int first = x[n]; x[i] = first + 1;",
    "another block's": "x[i] = x[(i + 64) % 256];",
    "atomics beside": "x[i] += 1; atomicAdd((int*)y + i % 3, y[7 + n]);",
    "in a block, with barriers": "int other = x[b * 64 + 63 - t]; __syncthreads(); x[b * 64 + t] = other;",
    "parts of a copy": COPIED.replace("FROM", "i").replace("BYTES", "8"),
    "a copy of another block's": COPIED.replace("FROM", "(i ^ 64)").replace("BYTES", "16"),
    "a copy of another thread's": COPIED.replace("FROM", "(i ^ 1)").replace("BYTES", "16"),
}
ORDERED = {"in a block, with barriers", "atomics beside"}
"""Those in which nobody depends on who comes first."""


@pytest.fixture
def _needs_engine() -> None:
    engine()


def run(body: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Fault], Machine]:
    """The faults of ``kernel(int* x, const int* y, int n)`` on four blocks of 64 threads, and the machine."""
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    head = """extern "C" __global__ void kernel(int* x, const int* y, int n) {
      const int t = threadIdx.x, b = blockIdx.x, i = b * 64 + t;"""
    kernel = compile_kernel(f"{head}\n{body}\n}}")
    assert kernel.program is not None
    kernel.program.shares = False  # compiled once a process
    values = np.arange(WORDS, dtype=np.int32)
    given = [upload(machine, values * 7 % 1000, "x"), upload(machine, values, "y")]
    return faults_of(machine, kernel, *map(pointer, given), int32(5), grid=4, block=64), machine


@pytest.mark.parametrize("what", OWN)
def test_what_a_thread_reads_is_its_own(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(OWN[what], "both", monkeypatch)
    assert (faults, machine.counts.compared) == ([], 1)
    faults, machine = run(OWN[what], "native", monkeypatch)
    assert (faults, machine.counts.native) == ([], 1)


@pytest.mark.parametrize("what", sorted(ORDERED))
def test_what_others_store_may_have_an_order(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(OTHERS[what], "both", monkeypatch)
    assert (faults, machine.counts.compared, machine.counts.replayed) == ([], 1, {})


@pytest.mark.parametrize("what", sorted(OTHERS.keys() - ORDERED))
def test_what_others_store_is_judged_by_the_interpreter(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(OTHERS[what], "native", monkeypatch)
    assert machine.counts.replayed == {"reads of what others store": 1}
    assert faults == run(OTHERS[what], "interpreter", monkeypatch)[0]
    assert bool(faults) == (what != "parts of a copy")


def log(*runs: tuple[int, int, int, int, int]) -> np.ndarray:
    """Runs of (begin, bytes, block, first, each)."""
    found = np.zeros(len(runs), STORE)
    for row, run in zip(found, runs, strict=True):
        for name, value in zip(("begin", "bytes", "block", "first", "each"), run, strict=True):
            row[name] = value
    return found


def test_the_logs_say_who_reads_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = log((128, 64, 0, 0, 4), (192, 64, 0, 1008, 4))
    assert not reads_of_others(
        log((128, 64, 0, 0, 4), (192, 8, 0, 1008, 4), (0, 128, 3, 0, 4), (256, 64, 3, 0, 4)), stores
    )
    assert not reads_of_others(log((120, 16, 0, 0, 16)), log((124, 4, 0, 0, 4)))
    assert reads_of_others(log((132, 4, 0, 2, 4)), stores)
    assert reads_of_others(log((128, 8, 0, 0, 8)), stores)  # two words, of two threads
    assert reads_of_others(log((128, 4, 1, 0, 4)), stores)
    assert reads_of_others(log((252, 4, 1, SEVERAL, 4)), stores)  # not the last thread of the block before
    assert reads_of_others(log((128, 4, 0, 1, 4)), log((128, 4, 0, 0, 4), (128, 4, 0, 1, 4)))  # stored by two
    assert reads_of_others(log((128, 4, 0, 0, 4)), log((128, 4, 0, 0, 4), (160, 4, 0, 0, 0)))  # by an atomic
    monkeypatch.setattr(same_threads, "MOST_BYTES", 100)
    assert reads_of_others(log((128, 4, 0, 0, 4)), stores)  # too much to look at
