"""Opcodes without a handler on the native engine, which calls the interpreter's functions for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Kernel, LaunchInterrupted, Machine
from g4kv_cli.device.emulated.engine.callbacks import Call

pytestmark = pytest.mark.usefixtures("_needs_engine")
WORDS = 1024

DOUBLES = """
  double sum = 0;
  for (int k = 0; k < n; k++) if ((t + k) % 3) sum = sum * 1.25 + rint((double)in[(t + k) % 256] / 3.0);
  out[b * 48 + t] = (int)sum ^ __double2loint(sum);
"""
APPROXIMATIONS = """
  float sum = 0;
  for (int k = 0; k < n; k++) if (t % 5) sum += __fdividef(cut_rcp(in[t + k] + 0.3f), __cosf(in[k]) + 2.0f);
  out[b * 48 + t] = __float_as_int(sum);
"""
HALVES = """
  unsigned short one = (unsigned short)(0x3c00 + in[t]), sum = one, is_less;
  for (int k = 0; k < n; k++) if (t % 7 > k % 5)
    asm volatile("fma.rn.sat.f16 %0, %0, %1, %2;" : "+h"(sum) : "h"(one), "h"((unsigned short)(0xb800 + k)));
  asm volatile("{ .reg .pred p; setp.lt.f16 p, %1, %2; selp.u16 %0, 7, 9, p; }" : "=h"(is_less) : "h"(sum), "h"(one));
  out[b * 48 + t] = sum << 16 | is_less;
"""
PAIRS = """
  unsigned one = 0x3c004000 + in[t] - 0x30000 * (t % 3), other = 0x3c004000 + in[3 * t % 256];
  int found = 0;
  if (t % 4) asm volatile("{ .reg .pred p, q; setp.lt.f16x2 p|q, %1, %2; selp.b32 %0, 1, 2, p; @q add.s32 %0, %0, 4; }"
                          : "+r"(found) : "r"(one), "r"(other));
  out[b * 48 + t] = found;
"""
CALLED = {
    "cvt.rni.f64.f64": DOUBLES,
    "rcp.rz.f32": APPROXIMATIONS,
    "fma.rn.sat.f16": HALVES,
    "setp.lt.f16x2": PAIRS,
}


@pytest.fixture
def _needs_engine() -> None:
    engine()


def kernel_of(body: str) -> Kernel:
    head = """
    __device__ float cut_rcp(float x) { float y; asm("rcp.rz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
    extern "C" __global__ void kernel(int* out, const int* in, int n) { const int t = threadIdx.x, b = blockIdx.x;
    """
    return compile_kernel(f"{head}{body}\n}}")


def machine_in(mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, list[bytes], int]:
    """A machine, the arguments of a kernel on it, and the address of its output."""
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    out = upload(machine, np.zeros(WORDS, np.int32), "out")
    given = upload(machine, np.arange(256, dtype=np.int32) * 13 % 97, "in")
    return machine, [pointer(out), pointer(given), int32(9)], out


@pytest.mark.parametrize("opcode", CALLED)
def test_the_engine_calls_what_it_has_no_handler_for(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes apart, and a warp that is not full; compared byte by byte, and counted."""
    kernel = kernel_of(CALLED[opcode])
    assert kernel.not_native_for == ()
    assert opcode in kernel.called_for
    machine, arguments, _ = machine_in("both", monkeypatch)
    assert faults_of(machine, kernel, *arguments, grid=2, block=48) == []
    assert machine.counts.compared == 1


def test_a_launch_of_many_warps_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(APPROXIMATIONS.replace("b * 48 + t", "t").replace("in[t + k]", "in[(t + k) % 256]"))
    program = kernel.program
    assert program is not None
    most = next(warps for warps in range(1, 1000) if not program.pays(warps + 1))
    assert 1 < most < 32
    for warps, expected in ((most, (1, 0)), (most + 1, (0, 1))):
        machine, arguments, _ = machine_in("native", monkeypatch)
        launch_on(machine, kernel, *arguments, block=32 * warps)
        assert (machine.counts.native, machine.counts.interpreted) == expected


def call_instead(kernel: Kernel, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every function that the engine calls for a kernel raise."""

    def fail(*operands: Any) -> Any:
        raise error

    program = kernel.program
    assert program is not None
    monkeypatch.setattr(program, "calls", [replace(call, function=fail) for call in program.calls])


def test_a_result_that_is_not_known_is_the_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(PAIRS)
    results = []
    for replayed in ({}, {"unknown result": 1}):
        if replayed:
            call_instead(kernel, ValueError("not known"), monkeypatch)
        machine, arguments, out = machine_in("native", monkeypatch)
        launch_on(machine, kernel, *arguments, grid=2, block=48)
        assert (machine.counts.replayed, machine.counts.cleared) == (replayed, len(replayed))
        results.append(read_as(machine, out, WORDS, np.int32))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("raised", "seen"), [(KeyboardInterrupt(), LaunchInterrupted), (RuntimeError("a defect"), RuntimeError)]
)
def test_what_a_function_raises_comes_out_of_the_launch(
    raised: BaseException, seen: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(PAIRS)
    with monkeypatch.context() as changed:
        call_instead(kernel, raised, changed)
        machine, arguments, _ = machine_in("native", monkeypatch)
        with pytest.raises(seen):
            launch_on(machine, kernel, *arguments, grid=2, block=48)
    machine, arguments, _ = machine_in("native", monkeypatch)  # the engine itself is usable
    launch_on(machine, kernel, *arguments, grid=2, block=48)
    assert machine.counts.native == 1


def test_a_function_gets_the_lanes_that_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other lanes hold is anything, and may be what the table does not know."""
    kernel = kernel_of(PAIRS)
    program = kernel.program
    assert program is not None
    seen: list[int] = []

    def watched(call: Call) -> Call:
        def function(*operands: Any) -> Any:
            seen.extend(operand.size for operand in operands)
            return call.function(*operands)

        return replace(call, function=function) if call.opcode == "setp.lt.f16x2" else call

    monkeypatch.setattr(program, "calls", [watched(call) for call in program.calls])
    machine, arguments, _ = machine_in("native", monkeypatch)
    launch_on(machine, kernel, *arguments, block=48)
    assert seen == [24, 24, 12, 12]
