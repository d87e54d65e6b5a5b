"""Atomics whose order matters on the native engine: the interpreter's bytes, results and counts, warp after warp."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import DIALECTS, compile_kernel

from g4kv_cli.device.emulated import Fault, Machine

pytestmark = pytest.mark.usefixtures("_needs_engine")
WORDS = 1 << 14


@pytest.fixture
def _needs_engine() -> None:
    engine()


def head_of(source: str) -> str:
    """The whole kernel of a body."""
    head = 'extern "C" __global__ void kernel(int* out, const int* in, int* aux, int n) {\n'
    return f"{head}  const int t = threadIdx.x, b = blockIdx.x, i = b * blockDim.x + t;\n{source}\n}}"


def run(source: str, monkeypatch: pytest.MonkeyPatch, **options: int) -> tuple[list[Fault], Machine]:
    """The faults of ``kernel(int* out, const int* in, int* aux, int n)`` with both emulators compared."""
    monkeypatch.setenv("G4KV_EMULATOR", str(options.pop("mode", "both")))
    machine = Machine()
    kernel = compile_kernel(head_of(source), str(options.pop("arch", "90")))
    assert kernel.not_native_for == ()
    out = upload(machine, np.zeros(WORDS, np.int32), "out")
    given = upload(machine, (np.arange(1024, dtype=np.int64) * 2654435761 % (1 << 32)).astype(np.uint32), "in")
    aux = upload(machine, np.arange(4096, dtype=np.int32) % 61, "aux")
    arguments = pointer(out), pointer(given), pointer(aux), int32(options.pop("n", 3))
    shape = {"grid": 5, "block": 160, **options}
    return faults_of(machine, kernel, *arguments, **shape), machine


INTEGERS = """
  unsigned* u = (unsigned*)aux;
  unsigned long long* wide = (unsigned long long*)(aux + 1024);
  int k = in[i & 1023] & 15, sum = 0;
  sum += atomicAdd(aux + k, in[i & 1023]);
  sum ^= atomicMin(aux + 16 + k, in[i & 1023]);
  sum += atomicMax(u + 32 + k, (unsigned)in[i & 1023]);
  if (t % 3) sum ^= atomicExch(aux + 48 + k, i);
  sum += atomicCAS(aux + 64 + k, k + 3 + (i & 1), i);
  sum ^= atomicInc(u + 80 + k, 7u + (i & 3));
  if (k & 1) sum += atomicDec(u + 96 + k, 9u);
  sum ^= atomicAnd(aux + 112 + k, ~(1 << (i & 31))) + atomicOr(aux + 128 + k, 1 << (i & 31));
  sum += atomicXor(aux + 144 + k, i);
  unsigned long long w = atomicAdd(wide + k, (unsigned long long)in[i & 1023] << 20);
  w ^= atomicCAS(wide + 16 + k, (unsigned long long)(k + (i & 1)) << 32 | k, (unsigned long long)i << 32 | i);
  w += atomicExch(wide + 32 + k, (unsigned long long)i) ^ atomicMax(wide + 48 + k, (unsigned long long)i << 30);
  out[i] = sum; out[4096 + 2 * i] = (int)w; out[4097 + 2 * i] = (int)(w >> 32);
"""
IN_SHARED = """
  __shared__ int own[512];
  for (int k = t; k < 512; k += blockDim.x) own[k] = k % 37;
  __syncthreads();
  int* a = own; unsigned* u = (unsigned*)own; int k = in[i & 1023] & 7;
  int sum = atomicAdd(a + k, i) ^ atomicExch(a + 8 + k, i) ^ atomicCAS(a + 16 + k, 16 + k, t);
  sum += atomicInc(u + 24 + k, 11u) ^ atomicDec(u + 32 + k, 40u) ^ atomicMin(a + 40 + k, -t);
  float f = atomicAdd((float*)(own + 64) + k, 1e-3f * t) + atomicAdd((float*)(own + 72) + k, 1e-42f);
  double d = atomicAdd((double*)(own + 96) + k, 0.1 * t);
  out[i] = sum ^ __float_as_int(f); out[4096 + i] = __double2loint(d) ^ __double2hiint(d);
  __syncthreads();
  if (t < 128) out[8192 + b * 128 + t] = own[t];
"""
FLOATS = """
  int k = i & 7;
  float f = __int_as_float(in[i & 1023]), small = 1e-39f * (i & 31);
  out[i] = __float_as_int(atomicAdd((float*)aux + k, f)) ^ __float_as_int(atomicAdd((float*)aux + 8 + k, small));
  atomicAdd((float*)aux + 16 + (i & 1), 0.1f * i);
  double d = atomicAdd((double*)(aux + 64) + k, (double)f * 1e300);
  atomicAdd((double*)(aux + 96) + (i & 1), 1.0 / (i + 1));
  out[1024 + i] = __double2loint(d) ^ __double2hiint(d);
  unsigned pair = (unsigned)in[(i + 7) & 1023], h, g; unsigned short one;
  asm volatile("atom.global.add.noftz.f16x2 %0, [%1], %2;" : "=r"(h) : "l"(aux + 128 + k), "r"(pair) : "memory");
  asm volatile("atom.global.add.noftz.bf16x2 %0, [%1], %2;" : "=r"(g) : "l"(aux + 136 + k), "r"(pair) : "memory");
  asm volatile("atom.add.noftz.f16 %0, [%1], %2;" : "=h"(one) : "l"((short*)aux + 400 + k), "h"((short)i) : "memory");
  out[2048 + i] = h; out[3072 + i] = g; out[4096 + i] = one;
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" :: "l"(aux + 220 + k), "r"(pair) : "memory");
  asm volatile("red.global.min.noftz.f16x2 [%0], %1;" :: "l"(aux + 228 + k), "r"(pair) : "memory");
  asm volatile("red.global.max.noftz.bf16x2 [%0], %1;" :: "l"(aux + 236 + k), "r"(pair) : "memory");
"""
VECTORS = """
  float4 v = make_float4(0.1f * i, 1.0f, 1e-40f, -3.0f);
  float4 w = atomicAdd((float4*)aux + (i & 3), v);
  float2 x = atomicAdd((float2*)aux + 32 + (i & 3), make_float2(0.3f * t, 1e8f));
  out[i] = __float_as_int(w.x); out[1024 + i] = __float_as_int(w.y + w.z * w.w + x.x + x.y);
"""
COMPACTION = "if (in[i & 1023] % 3 == 0) out[atomicAdd(aux, 1)] = i;"
QUEUE = """
  __shared__ int mine;
  for (;;) {
    if (t == 0) mine = atomicAdd(aux, 1);
    __syncthreads();
    const int task = mine;
    __syncthreads();
    if (task >= 29) break;
    out[task * 160 + t] = task * 1000 + b * 160 + t;
  }
"""


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("source", [INTEGERS, IN_SHARED, FLOATS], ids=["integers", "in shared memory", "floats"])
def test_results_of_atomics(source: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(source, monkeypatch, arch=arch)
    assert (faults, machine.counts.compared) == ([], 1)


def test_vectors_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(VECTORS, monkeypatch)
    assert (faults, machine.counts.compared) == ([], 1)


@pytest.mark.parametrize("source", [COMPACTION, QUEUE], ids=["compaction", "queue"])
@pytest.mark.parametrize("grid", [5, 300])
def test_who_comes_first(source: str, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run together as the interpreter has them; 300 of them are more than it has together."""
    faults, machine = run(source, monkeypatch, grid=grid)
    assert (faults, machine.counts.compared) == ([], 1)


MIXED = {
    "sums and maxima": "atomicAdd(aux + (i & 7), in[i & 1023] & 255); atomicMax(aux + (i & 7), 3000 + (t & 3));",
    "of two sizes": """
  atomicAdd(aux + 2 * (i & 7) + 1, t & 7);
  atomicMax((unsigned long long*)aux + (i & 7), (unsigned long long)(800 + (i & 63)) << 32);""",
    "in shared memory": """
  __shared__ int own[8], other[8];
  if (t < 8) own[t] = other[t] = t;
  __syncthreads();
  atomicAdd(own + (t & 7), t); atomicAnd(own + (t & 7), ~(t >> 2)); atomicAdd(other + (t & 7), 1);
  __syncthreads();
  if (t < 8) out[8 * b + t] = own[t] - other[t];""",
}
APART = {
    "at places of their own": "atomicAdd(aux + (i & 7), 1); atomicMax(aux + 8 + (i & 7), i);",
    "in arrays of their own": """
  __shared__ int own[8], other[8];
  if (t < 8) own[t] = other[t] = t;
  __syncthreads();
  atomicAdd(own + (t & 7), t); atomicMin(other + (t & 7), -t);
  __syncthreads();
  if (t < 8) out[8 * b + t] = own[t] - other[t];""",
}


@pytest.mark.parametrize("name", [*MIXED, *APART])
def test_kinds_of_atomics_that_show_their_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums alone commute, and maxima do; both at one place do not: then the interpreter's order is kept."""
    source = MIXED.get(name) or APART[name]
    faults, machine = run(source, monkeypatch)
    assert (faults, machine.counts.compared, machine.counts.replayed) == ([], 1, {})
    kernel = compile_kernel(head_of(source), "90")
    assert kernel.program is not None
    assert kernel.program.runs_together == (name in MIXED)


FAULTY = {
    "global bounds": "out[i] = atomicExch(aux + 4000 + i, 1);",
    "misaligned": "out[i] = atomicCAS((int*)((char*)aux + 4 * i + (i == 700)), 1, 2);",
    "uninitialised": "__shared__ int own[256]; if (t) own[t] = 1; __syncthreads(); out[i] = atomicAdd(own + t, 1);",
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_atomics_are_reported_as_by_the_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = run(FAULTY[name], monkeypatch, mode="native")
    wanted, _ = run(FAULTY[name], monkeypatch, mode="interpreter")
    assert found == wanted
    assert found
    assert sum(machine.counts.replayed.values()) == 1
