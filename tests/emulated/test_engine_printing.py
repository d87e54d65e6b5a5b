"""printf, assert and calls through pointers on the native engine: the texts of the interpreter, in its order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, launch_on, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import EmulatorsDiffer, Kernel, LaunchReport, Machine
from g4kv_cli.device.emulated.engine import printing

PRINTING = {
    "all threads": 'printf("%d of %d\\n", t, b);',
    "one, with arguments of all sizes": """
        double d = x[i] / 3.0;
        long long q = x[i];
        if (t == 5) printf("%s|%c|%hhd|%lld|%8.3f|%p|%*d\\n", "words", 65 + b, x[i], q << 40, d, x, 6, t);""",
    "no arguments": 'if (t % 16 == b) printf("here\\n"); x[i] = t;',
    "two in a row": 'printf("a%d ", t); printf("b%d\\n", t);',
    "in both branches": 'if (t % 3) printf("yes %d\\n", x[i]); else printf("no %d %d\\n", i, t);',
    "in a loop of its own length": 'for (int k = 0; k < (t + b) % 4; k++) printf("%d:%d ", i, k);',
    "the count of its arguments": 'x[i] = t % 2 ? printf("%d %d\\n", t, n) : printf("none\\n");',
    "behind a barrier": """
        __shared__ int sum;
        if (t == 0) sum = 0;
        __syncthreads();
        atomicAdd(&sum, x[i]);
        __syncthreads();
        if (t == 40) printf("block %d: %d\\n", b, sum);""",
    "a text of the thread's own": """
        char text[4] = {'a', 'b', 'c', 0};
        text[t % 3] += n;
        if (t > 44) printf("<%s>\\n", text);""",
    "in the order of tickets": 'int k = atomicAdd(x, 1); if (k % 50 == 0) printf("%d is %d\\n", i, k);',
}


def kernel_of(body: str) -> Kernel:
    engine()
    head = (
        'extern "C" __global__ void kernel(int* x, int n) { const int t = threadIdx.x, b = blockIdx.x, i = b * 48 + t;'
    )
    return compile_kernel(f"{head}\n{body}\n}}")


def launch(
    kernel: Kernel, mode: str, monkeypatch: pytest.MonkeyPatch, n: int = 3, blocks: int = 5, **options: Any
) -> tuple[Machine, LaunchReport]:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    x = upload(machine, np.arange(blocks * 48, dtype=np.int32) * 13 % 97, "x")
    return machine, launch_on(machine, kernel, pointer(x), int32(n), grid=blocks, block=48, **options)


@pytest.mark.parametrize("what", PRINTING)
def test_the_engine_prints_what_the_interpreter_prints(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(PRINTING[what])
    assert kernel.not_native_for == ()
    machine, report = launch(kernel, "both", monkeypatch)
    assert machine.counts.compared == 1
    assert report.printed


def test_texts_of_several_chunks_of_blocks_are_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of('if (t == 17) printf("%d\\n", b); if (t == 3) printf("%d again\\n", b);')
    for options in ({"chunk_threads": 64 * 7}, {"chunk_threads": 64 * 7, "reverse_blocks": True}):
        machine, report = launch(kernel, "both", monkeypatch, blocks=20, **options)
        assert machine.counts.compared == 1
        assert len(report.printed.splitlines()) == 40
    assert report.printed.splitlines()[:8] == ["19", "18", "17", "16", "15", "14", "13", "19 again"]


def test_comparing_finds_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of('if (t == 1) printf("%d\\n", b);')
    format_text = printing.format_text
    monkeypatch.setattr(printing, "format_text", lambda *what: format_text(*what).replace("3", "4"))
    with pytest.raises(EmulatorsDiffer, match="other texts were printed"):
        launch(kernel, "both", monkeypatch)


def test_a_launch_that_is_run_again_prints_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of('x[i] += 3; if (t == 1) printf("%d\\n", x[i]); if (b == n && t < 2) x[t] = 7;')
    machine, report = launch(kernel, "native", monkeypatch, n=9)
    assert machine.counts.native == 1
    assert report.printed == "".join(f"{(b * 48 + 1) * 13 % 97 + 3}\n" for b in range(5))


def test_what_cannot_be_printed_is_the_interpreters_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of('if (t == 7) printf("%s\\n", (const char*)x + (n << 20));')
    found = {}
    for mode in ("native", "interpreter"):
        monkeypatch.setenv("G4KV_EMULATOR", mode)
        machine = Machine()
        x = upload(machine, np.arange(48, dtype=np.int32), "x")
        found[mode] = faults_of(machine, kernel, pointer(x), int32(3), block=48)
        assert machine.counts.replayed == ({"unknown result": 1} if mode == "native" else {})
    assert [fault.kind for fault in found["native"]] == ["global_out_of_bounds"]
    assert found["native"] == found["interpreter"]


def test_asserts_that_hold_run_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of("assert(x[i] < 97); assert(i < n); x[i] = i;")
    assert kernel.not_native_for == ()
    machine, _ = launch(kernel, "both", monkeypatch, n=240)
    assert machine.counts.compared == 1
    found = {}
    for mode in ("native", "interpreter"):
        monkeypatch.setenv("G4KV_EMULATOR", mode)
        machine = Machine()
        x = upload(machine, np.zeros(240, np.int32), "x")
        found[mode] = faults_of(machine, kernel, pointer(x), int32(230), grid=5, block=48)
        assert machine.counts.replayed == ({"trap": 1} if mode == "native" else {})
    assert found["native"] == found["interpreter"]
    (fault,) = found["native"]
    assert (fault.kind, fault.block, fault.thread) == ("trap", (4, 0, 0), (38, 0, 0))
    assert "assertion `i < n` failed" in fault.message


def test_calls_through_pointers_run_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of("""
      using Function = int (*)(int);
      Function both[2] = {[](int v) { return v + 1; }, [](int v) { return 3 * v; }};
      x[i] = both[(i / n) & 1](x[i]);
    """)
    assert kernel.not_native_for == ()
    machine, _ = launch(kernel, "both", monkeypatch)
    assert machine.counts.compared == 1
