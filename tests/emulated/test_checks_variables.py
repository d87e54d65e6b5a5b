"""Shared variables lie side by side: what reaches from one into the next is found, on both emulators."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, Machine

TWO = "__shared__ int a[32], c[32];"
DYNAMIC = "extern __shared__ int d[]; __shared__ int a[32];"
OVERRUNS = {
    "reads past the end": (f"{TWO} a[t] = c[t] = t; SYNC out[t] = a[t + n] + c[t];", 4),
    "stores before the begin": (
        "__shared__ int a[32], c[32]; a[t] = 1; SYNC c[t - n] = t; SYNC out[t] = a[t] + c[t];",
        4,
    ),
    "static into dynamic": (f"{DYNAMIC} a[t] = d[t] = t; SYNC out[t] = a[t + n];", 4),
    "dynamic into static": (f"{DYNAMIC} a[t] = d[t] = t; SYNC out[t] = d[t - n] + a[t];", 4),
    "atomics": (
        "__shared__ int a[8], c[32]; a[t & 7] = 0; c[t] = t; SYNC atomicAdd(a + t % 9, 1); SYNC out[t] = c[t];",
        3,
    ),
    "the end of a vector": (
        """__shared__ __align__(16) int a[30], c[32]; if (t < 30) a[t] = t; c[t] = t;
        SYNC out[t] = ((int4*)a)[t & 7].w + c[t];""",
        4,
    ),
}
RIGHT = {
    "a pointer to either": """__shared__ int a[32], c[32]; a[t] = c[t] = t; SYNC
        int* p = in[t] & 1 ? a : c; out[t] = p[31 - t];""",
    "carved dynamic memory": """extern __shared__ char d[]; __shared__ int a[32];
        int* x = (int*)d; float* y = (float*)(d + 128);
        a[t] = x[t] = t; y[t] = t; SYNC out[t] = a[31 - t] + x[t] + (int)y[31 - t];""",
    "aligned dynamic memory": """extern __shared__ char d[]; __shared__ int a[32];
        int* x = (int*)(((size_t)d + 127) & ~(size_t)127); a[t] = x[t] = t; SYNC out[t] = a[t] + x[31 - t];""",
    "from behind": """__shared__ int a[32], c[32];
        if (t == 0) for (int k = 32; k > 0; k--) { a[k - 1] = t; c[32 - k] = k; }
        SYNC out[t] = a[t] + c[31 - t];""",
    "a member into the next": """__shared__ struct { int a[32], c[32]; } s; __shared__ int q[4]; q[t & 3] = 1;
        s.a[t] = s.c[t] = t; SYNC out[t] = s.a[t + n] + q[t & 3];""",
    "the distance between two": """__shared__ int a[32], c[32]; a[t] = t; c[t] = -t; SYNC
        long between = (char*)c - (char*)a; out[t] = *(int*)((char*)(a + t) + (in[0] ? between : 0));""",
    "swizzled": "__shared__ int a[32], c[32]; a[t ^ 5] = t; c[t ^ (n << 2)] = t; SYNC out[t] = a[t] + c[31 ^ t];",
}


def judged(body: str, arch: str, monkeypatch: pytest.MonkeyPatch, mode: str) -> tuple[list[Fault], Machine]:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    head = 'extern "C" __global__ void kernel(int* out, const int* in, int n) { const int t = threadIdx.x;\n'
    kernel = compile_kernel(head + body.replace("SYNC", "__syncthreads();") + "\n}", arch)
    out, given = upload(machine, np.zeros(32, np.int32), "out"), upload(machine, np.arange(32, dtype=np.int32), "in")
    arguments = pointer(out), pointer(given), int32(4)
    return faults_of(machine, kernel, *arguments, block=32, dynamic_shared_bytes=512), machine


@pytest.mark.parametrize("name", OVERRUNS)
@pytest.mark.parametrize("mode", ["native", "interpreter"])
def test_an_access_that_leaves_its_variable(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, lanes = OVERRUNS[name]
    faults, _ = judged(body, "90", monkeypatch, mode)
    (found,) = [fault for fault in faults if fault.kind == "shared_variable_overrun"]
    assert (found.lanes, found.is_fatal) == (lanes, False)
    variable = "'d'" if "dynamic into" in name else "'c'" if "before" in name else "'a'"
    assert f"outside {variable} at" in found.message


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("arch", ["90", "120"])
def test_right_pointers_into_shared_memory(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = judged(RIGHT[name], arch, monkeypatch, "both")
    assert (faults, machine.counts.interpreted) == ([], 0)


OWN = """int own[8]; for (int k = 0; k < 8; k++) own[(k + in[t]) & 7] = t + k;
  int* p = own + (in[t] & 3); __shared__ int* given[32]; given[t] = p; SYNC
  {} SYNC out[t] = own[in[t] & 7];"""
LOCALS = {
    "a load through the next thread's pointer": ("out[t] = *given[(t + 1) & 31];", 32),
    "a store through a pointer of lane 0": ("if (t > 27) *given[0] = 5;", 4),
    "its own pointer, through shared memory": ("*given[t] += 2;", 0),
    "its own pointer, behind the begin": ("int* q = given[t] - 9; if (in[0] == 0) q[9] = 1;", 0),
}


@pytest.mark.parametrize("name", LOCALS)
@pytest.mark.parametrize("arch", ["90", "120"])
def test_a_pointer_into_local_memory_is_its_threads_alone(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, lanes = LOCALS[name]
    faults, machine = judged(OWN.replace("{}", body), arch, monkeypatch, "both")
    assert [(fault.kind, fault.lanes) for fault in faults] == [("foreign_local_access", lanes)] * (lanes > 0)
    assert (machine.counts.compared, machine.counts.interpreted) == (int(not lanes), 0)
