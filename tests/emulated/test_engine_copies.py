"""cp.async of 4, 8 and 16 bytes on the native engine: the interpreter's bytes and counts, and its faults."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, Machine

WORDS = 2048
PIPELINE = """
  __shared__ TYPE row[2][64];
  for (int k = 0; k <= n; k++) {
    if (k < n) COPY(row[k & 1] + t, (const TYPE*)in + FROM, SIZE);
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    if (k > 0) for (int part = 0; part < sizeof(TYPE) / 4; part++)
      out[(k * 64 + t) * (sizeof(TYPE) / 4) + part] = ((int*)&row[(k - 1) & 1][63 - t])[part];
    __syncthreads();
  }
"""
"""Each thread copies an element and stores one that another has copied."""
TYPES = {4: "int", 8: "int2", 16: "int4"}
WAYS = {
    "in a row": ("k * 64 + t", "SIZE"),
    "spread": ("(k * 67 + t * 5) % 100", "SIZE"),
    "one for all": ("k", "SIZE"),
    "cut": ("k * 64 + t", "t % 5 == 0 ? 0 : t % 5 == 1 ? SIZE / 2 : t % 5 == 2 ? 3 : SIZE"),
    "cut alike": ("k * 64 + t", "SIZE - 1"),
}
MISTAKES = {
    "no wait": ("wait_group 1", "wait_group 2"),
    "no barrier": ("__syncthreads();\n    if", "if"),
    "a copy before the reads have ended": ("[part];\n    __syncthreads();", "[part];"),
    "misaligned": ("row[k & 1] + t", "(char*)(row[k & 1] + t) + (t == 9) * 2"),
    "beyond the allocation": ("in + k * 64 + t", "in + k * 64 + t + (t == 40 && k == 2) * 90000"),
    "beyond shared memory": ("row[k & 1] + t", "row[k & 1] + t + (t == 63) * 100"),
    "a wait in a branch": ('asm volatile("cp.async.wait', 'if (t % 3) asm volatile("cp.async.wait'),
}


def run(size: int, source: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Fault], Machine]:
    engine()
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    way = "cg" if size == 16 else "ca"
    head = f"""#define SIZE {size}
    #define TYPE {TYPES[size]}
    #define COPY(to, from, bytes) asm volatile("cp.async.{way}.shared.global [%0], [%1], {size}, %2;" :: \\
      "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory")
    extern "C" __global__ void kernel(int* out, const int* in, int n) {{ const int t = threadIdx.x;"""
    kernel = compile_kernel(f"{head}\n{source}\n}}")
    assert kernel.not_native_for == ()
    out = upload(machine, np.zeros(WORDS, np.int32), "out")
    given = upload(machine, np.arange(WORDS, dtype=np.int32) * 77, "in")
    return faults_of(machine, kernel, pointer(out), pointer(given), int32(4), block=64), machine


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", TYPES)
def test_copies_of_every_size(size: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, bytes_read = WAYS[way]
    text = PIPELINE.replace("FROM, SIZE", f"{source}, {bytes_read}")
    faults, machine = run(size, text, "both", monkeypatch)
    assert faults == []
    assert machine.counts.compared == 1


@pytest.mark.parametrize(("what", "size"), list(zip(MISTAKES, (4, 8, 4, 8, 4, 8, 4), strict=True)))
def test_mistakes_with_copies_are_found(what: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PIPELINE.replace("FROM", "k * 64 + t")
    assert MISTAKES[what][0] in text
    text = text.replace(*MISTAKES[what])
    faults, machine = run(size, text, "native", monkeypatch)
    assert faults
    assert sum(machine.counts.replayed.values()) == 1
    assert faults == run(size, text, "interpreter", monkeypatch)[0]


SIGNALLED = """
  __shared__ alignas(8) unsigned long long barrier;
  __shared__ TYPE row[64];
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at), "r"(64) : "memory");
  __syncthreads();
  for (int k = 0; k < n; k++) {
    COPY(row + t, (const TYPE*)in + k * 64 + t, SIZE);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at) : "memory");
    WAIT
    out[k * 64 + t] = ((int*)&row[63 - t])[0];
    __syncthreads();
  }
"""
WAIT = """unsigned done;
    do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done) : "r"(at), "r"(k & 1) : "memory");
    while (!done);"""


@pytest.mark.parametrize("size", TYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_copies_that_signal_an_mbarrier(adds: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``.noinc`` the copies add an arrival and take it, and the thread arrives beside them."""
    text = SIGNALLED.replace("WAIT", WAIT)
    if adds:
        text = text.replace(".noinc.shared.b64 [%0];", ".shared.b64 [%0]; mbarrier.arrive.shared.b64 _, [%0];")
    faults, machine = run(size, text, "both", monkeypatch)
    assert faults == []
    assert machine.counts.compared == 1


def test_a_copy_that_is_read_before_its_signal_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SIGNALLED.replace("WAIT", "")
    faults, machine = run(16, text, "native", monkeypatch)
    assert "shared_race" in {fault.kind for fault in faults}
    assert sum(machine.counts.replayed.values()) == 1
    assert faults == run(16, text, "interpreter", monkeypatch)[0]
