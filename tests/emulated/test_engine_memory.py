"""Local memory, generic addresses and atomics on the native engine: the interpreter's bytes, and its faults."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import DIALECTS, compile_kernel

from g4kv_cli.device.emulated import Fault, Machine, Module

pytestmark = pytest.mark.usefixtures("_needs_engine")
WORDS = 4096


@pytest.fixture
def _needs_engine() -> None:
    engine()


def run(
    source: str, mode: str, monkeypatch: pytest.MonkeyPatch, n: int = 8, **options: int
) -> tuple[list[Fault], Machine]:
    """The faults of ``kernel(int* out, const int* in, int n)``, which the engine knows completely, and the machine."""
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    head = 'extern "C" __global__ void kernel(int* out, const int* in, int n) { const int t = threadIdx.x;\n'
    kernel = compile_kernel(f"{head}{source}\n}}", str(options.pop("arch", "90")))
    assert kernel.not_native_for == ()
    out = upload(machine, np.zeros(WORDS, np.int32), "out")
    given = upload(machine, np.arange(256, dtype=np.int32) * 13 % 97, "in")
    shape = {"grid": 3, "block": 256, **options}
    return faults_of(machine, kernel, pointer(out), pointer(given), int32(n), **shape), machine


LOCAL = """
  ELEMENT a[16];
  for (int k = 0; k < 16; k++) a[(k * 5 + in[t]) & 15] = (ELEMENT)(in[(t + k) % 256] * k - 300);
  long long sum = 0;
  for (int k = 0; k < n; k++) if ((t + k) % 3) sum += (long long)a[(in[k] + t) & 15] * k;
  out[blockIdx.x * 256 + t] = (int)(sum ^ sum >> 32);
"""
TWO_SPACES = """
  __shared__ int row[256];
  int own[4] = {t, n, in[t], 3};
  row[t] = in[t] + 1;
  __syncthreads();
  const int* from = n % 3 == 0 ? row : n % 3 == 1 ? in + 4 : own + (n & 1);
  int* to = n & 8 ? out + blockIdx.x * 256 : row;
  int value = from[t * 7 % (n % 3 == 2 ? 3 : 200)];
  __syncthreads();
  to[t] = value;
  own[t & 3] = value;
  __syncthreads();
  if (to == row) out[blockIdx.x * 256 + t] = row[255 - t] + own[n & 3];
"""
HISTOGRAM = """
  __shared__ unsigned counts[64];
  __shared__ unsigned long long least[8];
  if (t < 64) counts[t] = 0;
  if (t < 8) least[t] = ~0ull;
  __syncthreads();
  for (int k = 0; k < n; k++) atomicAdd(&counts[(in[(t + k * 33) % 256] * 7) % 64], 1u);
  atomicMin(&least[t & 7], (unsigned long long)in[t] << 33 | t);
  __syncthreads();
  if (t < 64) {
    atomicAdd((unsigned*)out + t, counts[t]);
    atomicMax(out + 64 + t, (int)counts[t] - 3);
    atomicMin((unsigned*)out + 128 + t, counts[t]);
    atomicMin(out + 192 + t, -(int)counts[t] * (int)blockIdx.x);
    atomicOr(out + 256 + t, 1 << blockIdx.x);
    atomicXor(out + 320 + t, counts[t] * blockIdx.x);
    atomicAdd((unsigned long long*)(out + 384) + t, least[t & 7]);
    atomicMax((unsigned long long*)(out + 512) + t, least[t & 7]);
    atomicAnd((unsigned*)out + 640 + t, 5u);
  }
"""


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("element", ["signed char", "unsigned short", "short", "int", "long long"])
def test_local_memory(element: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(LOCAL.replace("ELEMENT", element), "both", monkeypatch, arch=arch)
    assert (faults, machine.counts.compared) == ([], 1)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 9, 10, 11])
def test_generic_addresses(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(TWO_SPACES, "both", monkeypatch, n)
    assert (faults, machine.counts.compared) == ([], 1)


@pytest.mark.parametrize("arch", DIALECTS)
def test_atomics_whose_results_nobody_reads(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = run(HISTOGRAM, "both", monkeypatch, arch=arch)
    assert (faults, machine.counts.compared) == ([], 1)


FAULTY = {
    "local bounds": "int a[4]; for (int k = 0; k < n; k++) a[k * in[1] % 5] = k; out[t] = a[in[t] & 3];",
    # Block 290's local memory has the marks of block 35's, unless they were taken away in between.
    "uninitialised": """int a[4], b = blockIdx.x; if (b == 35) a[in[t] & 3] = t;
        if (b == 35 || b == 290) out[(b & 1) * 32 + t] = a[in[t] & 3];""",
    "misaligned": "int a[4] = {t, n, 2, 3}; out[t] = *(const int*)((const char*)a + in[t] % 9);",
    "global bounds": "int a[2] = {t, n}; const int* p = n == 8 ? in + in[9] * 100 : a; out[t] = p[t];",
    "several spaces": "int a[2] = {t, n}; const int* p = t & 1 ? in : a; atomicMax(out + 1, p[in[t] & 1]);",
    "reads and stores of one allocation": "atomicAdd(out + t % 5, 1); if (out[t % 5] < 0) out[6] = 1;",
    "stores that meet": "if (n == 8) out[t % 200] = t;",
}
BETWEEN = {
    "a read": "out[t] = counts[t % 64];",
    "a store": "counts[t % 64] = 0;",
    "a wide read": "if (t % 32 < 16) { int4 v = ((int4*)counts)[t % 32]; out[t] = v.x + v.y + v.z + v.w; }",
    "a wide store": "if (t % 32 < 16) ((int4*)counts)[t % 32] = make_int4(1, 2, 3, 4);",
}
WHO = {"first": "t >= 224", "last": "t / 32 == 6"}


def both_say(source: str, monkeypatch: pytest.MonkeyPatch, **options: int) -> tuple[list[Fault], Machine]:
    faults, machine = run(source, "native", monkeypatch, **options)
    assert faults == run(source, "interpreter", monkeypatch, **options)[0]
    return faults, machine


@pytest.mark.parametrize("kind", FAULTY)
def test_what_the_engine_finds_the_interpreter_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"grid": 300, "block": 32} if kind == "uninitialised" else {}
    faults, machine = both_say(FAULTY[kind], monkeypatch, **options)
    assert machine.counts.replayed == {kind: 1}
    assert bool(faults) == (machine.counts.cleared == 0)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("what", BETWEEN)
def test_atomics_are_ordered_with_loads_and_stores_by_barriers(
    what: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warp that completes a barrier goes on first: before the atomics of all others; the last behind them."""
    parts = (
        "__shared__ __align__(16) unsigned counts[64]; if (t < 64) counts[t] = 0; __syncthreads();",
        "atomicAdd(&counts[in[t] % 64], 1u);",
        f"if ({WHO[who]}) {{ {BETWEEN[what]} }}",
        "atomicAdd(&counts[in[t] % 64], 1u);",
    )
    barrier = "__syncthreads();"
    faults, machine = both_say("".join((*parts[:2], barrier, parts[2], barrier, parts[3])), monkeypatch, grid=1)
    assert (faults, machine.counts.native) == ([], 1)
    for wrong, is_guess in (
        # Lanes of one warp alone have come before what clashes: a shuffle might have stood in between.
        ((*parts[:3], barrier, parts[3]), who == "first" and "store" in what),
        ((*parts[:2], barrier, *parts[2:]), who == "last" and "read" in what),
    ):
        faults, machine = both_say("".join(wrong), monkeypatch, grid=1)
        assert {fault.kind for fault in faults} == {"shared_race"}
        assert machine.counts.replayed == {"guessed race" if is_guess else "shared race": 1}


def test_shared_memory_of_a_larger_launch_long_ago_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine counts blocks in a byte: 255 later what the first launch wrote must not look new."""
    large = "__shared__ int row[2048]; {} __syncthreads(); out[t] = row[2047 - t];"
    small = "__shared__ int one[16]; if (t < 16) { one[t] = in[t]; out[blockIdx.x * 16 + t] = one[t]; }"
    assert not run(small, "native", monkeypatch, grid=3)[0]
    filled = large.format("for (int k = t; k < 2048; k += 256) row[k] = in[t];")
    assert not run(filled, "native", monkeypatch, grid=1)[0]
    assert not run(small, "native", monkeypatch, grid=254)[0]
    faults, _ = run(large.format("row[t] = in[t];"), "native", monkeypatch, grid=1)
    assert [fault.kind for fault in faults] == ["shared_uninitialised_read"]


FAR = """.version 9.0\n.target sm_90\n.address_size 64
.visible .entry kernel(.param .u64 place) {{
  .reg .b64 %rd<2>; .{space} .align 16 .b8 row[64];
  ld.param.u64 %rd1, [place]; st.{space}.u32 [row], 1; st.{space}.u32 [%rd1], 7; ret; }}
"""


@pytest.mark.parametrize("space", ["shared", "local"])
@pytest.mark.parametrize("mode", ["native", "interpreter"])
def test_an_address_at_the_end_of_all_numbers(space: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes of the access it is past the largest there is."""
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    kernel = Module(FAR.format(space=space)).kernel("kernel")
    faults = faults_of(Machine(), kernel, pointer((1 << 63) - 4))
    assert [fault.kind for fault in faults] == [f"{space}_out_of_bounds"]
