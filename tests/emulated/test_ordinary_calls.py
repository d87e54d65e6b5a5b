"""Functions that are called: values against Python's own, and the texts of printf and assert."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from nvrtc_helper import compile_module, line_of
from ordinary_helper import ARCHS, ORDINARY, Program, ordinary, run

from g4kv_cli.device.emulated import LaunchFault, Machine, UnsupportedKernel

LANES = np.arange(32)


def ints(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


@pytest.mark.parametrize("arch", ARCHS)
def test_functions_out_of_line(arch: str) -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(1, 5000, 100).astype(np.int32) for _ in range(2))
    out, _, _ = run("calls", "noinline_gcd", arch, ints(100), a, b, 100, grid=4)
    assert out.tolist() == [
        math.gcd(x, y) + 1000 * math.gcd(y, 12) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    values = random.integers(-50, 50, 64).astype(np.float32)
    out, _ = run("calls", "noinline_struct", arch, np.zeros(96, np.float32), values)
    want = [[v - values[0] - values[2], v + 1 + values[1] + values[3], i + 2] for i, v in enumerate(values[:32])]
    np.testing.assert_array_equal(out.reshape(32, 3), np.array(want, np.float32))
    values = random.integers(-50, 50, 128).astype(np.int32)
    out, _ = run("calls", "noinline_barrier", arch, ints(128), values, block=128)
    assert set(out.tolist()) == {int(values.sum() - (values * np.arange(128)).sum())}


def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def even(n: int) -> int:
    return 1 if n == 0 else 2 * odd(n - 1) - n


def odd(n: int) -> int:
    return 0 if n == 0 else 3 * even(n - 1) + n


@pytest.mark.parametrize("arch", ARCHS)
def test_recursion(arch: str) -> None:
    (out,) = run("calls", "recursion", arch, ints(64), block=64)
    assert out.tolist() == [fibonacci(i % 13) for i in range(64)]
    (out,) = run("calls", "mutual_recursion", arch, ints(64), block=64)
    assert out.tolist() == [even(i % 9) + odd(i % 4) for i in range(64)]
    values = np.random.default_rng(2).integers(-1000, 1000, (32, 23)).astype(np.int32)
    (out,) = run("calls", "quicksort", arch, values, 23)
    np.testing.assert_array_equal(out, np.sort(values, axis=1))


ENDLESS = """
__device__ __noinline__ int deeper(int n) { return n == 0 ? 1 : deeper(n - 1) * n + 1; }
extern "C" __global__ void kernel(int* out, int n) { out[threadIdx.x] = deeper(n + threadIdx.x); }
"""


def test_a_recursion_that_is_too_deep_is_a_fault() -> None:
    kernel = compile_module(ENDLESS).kernel("kernel")
    machine = Machine()
    address = machine.allocate(128, "out")
    arguments = [address.to_bytes(8, "little"), (1 << 20).to_bytes(4, "little")]
    with pytest.raises(LaunchFault) as caught:
        machine.launch(kernel, (1, 1, 1), (32, 1, 1), arguments)
    assert caught.value.kinds == ["local_out_of_bounds"]


@pytest.mark.parametrize("arch", ARCHS)
def test_function_pointers_and_virtual_calls(arch: str) -> None:
    values = np.random.default_rng(3).integers(-9, 9, 33).astype(np.float32)
    out, _ = run("calls", "function_pointers", arch, np.zeros(32, np.float32), values)
    rules = (lambda a, b: a + b, lambda a, b: a * b, max)
    assert out.tolist() == [rules[i % 3](values[i], values[i + 1]) for i in range(32)]
    (out,) = run("calls", "virtual_calls", arch, np.zeros(32, np.float32))

    def area(lane: int, which: int) -> float:
        return lane * lane if which == 0 else 3.0 * (lane + 0.5) ** 2

    assert out.tolist() == [sum(area(i, (i + k * k) & 1) for k in range(4)) for i in range(32)]


WILD = """
typedef int (*Function)(int);
__device__ __noinline__ int one(int n) { return n + 1; }
__device__ __noinline__ int two(int n) { return n + 2; }
__device__ Function functions[2] = {one, two};
extern "C" __global__ void kernel(int* out, unsigned long long change) {
  Function function = (Function)((unsigned long long)functions[threadIdx.x & 1] + change);
  out[threadIdx.x] = function(threadIdx.x);  // MARK: call
}
"""


def test_a_call_of_what_is_no_function_is_a_fault() -> None:
    kernel = compile_module(WILD).kernel("kernel")
    for change, kinds in ((0, None), (4, ["illegal_instruction"])):
        machine = Machine()
        out = machine.allocate(128, "out")
        arguments = [out.to_bytes(8, "little"), change.to_bytes(8, "little")]
        if kinds is None:
            machine.launch(kernel, (1, 1, 1), (32, 1, 1), arguments)
            assert machine.read(out, 128).view(np.int32).tolist() == [i + 1 + (i & 1) for i in range(32)]
            continue
        with pytest.raises(LaunchFault) as caught:
            machine.launch(kernel, (1, 1, 1), (32, 1, 1), arguments)
        assert caught.value.kinds == kinds
        assert caught.value.faults[0].source_line == line_of(WILD, "MARK: call")


@pytest.mark.parametrize("arch", ARCHS)
def test_printf_goes_to_the_report(arch: str) -> None:
    program = Program("calls", "prints", arch)
    values = (np.arange(64) * 1.25 - 7).astype(np.float32)
    program.run(values, block=64)
    lines = [f"thread {i} of 64: {values[i]:8.3f} [ab   ] x% {1 << 40} 0xff" for i in (3, 19, 35, 51)]
    assert program.report is not None
    assert sorted(program.report.printed.splitlines()) == sorted([*lines, "plain"])


FORMATS = """
extern "C" __global__ void kernel(double d, long long q, const char* text) {
  printf("%d %i %u|%5.1f %e %g|%-6x|%o %#o|%+d %05d|%*d %.*f|%s|%.2s|%p|%hhd %hu|%10f %%|%c\\n", -5, 7, 4000000000u,
         d, d, d, 255, 8, 8, 3, 42, 6, 12, 2, d, text, text, (void*)4096, 300, 70000, d / 0, 65);
  printf("%lld %llu %lx\\n", q, q, q);
}
"""


def test_printf_formats_as_c_does() -> None:
    kernel = compile_module(FORMATS).kernel("kernel")
    machine = Machine()
    text = machine.allocate(6, "text")
    machine.write(text, b"words\0")
    d, q = 3.14159, -(1 << 40) - 3
    packed = [struct.pack("<d", d), struct.pack("<q", q), struct.pack("<Q", text)]
    report = machine.launch(kernel, (1, 1, 1), (1, 1, 1), packed)
    first, second, _ = report.printed.split("\n")
    assert first == (
        "-5 7 4000000000|  3.1 3.141590e+00 3.14159|ff    |10 010|+3 00042|    12 3.14|words|wo|0x1000|44 4464|"
        "       inf %|A"
    )
    assert second == f"{q} {q + (1 << 64)} {q + (1 << 64):x}"


def test_a_failed_assert_is_a_trap_with_its_text() -> None:
    Program("calls", "asserts").run(np.arange(32, dtype=np.int32), 32)
    program = Program("calls", "asserts")
    with pytest.raises(LaunchFault) as caught:
        program.run(np.arange(32, dtype=np.int32), 30)
    (fault,) = caught.value.faults
    assert (fault.kind, fault.thread, fault.lanes) == ("trap", (30, 0, 0), 2)
    line = line_of((ORDINARY / "calls.cu").read_text(), "assert(in[i] < limit)")
    assert fault.source_line == line
    assert "assertion `in[i] < limit` failed at" in fault.message
    assert f"calls.cu:{line}" in fault.message
    assert "asserts" in fault.message


def test_only_a_kernel_that_reaches_what_is_not_supported_is_refused() -> None:
    (out,) = run("calls", "clean", "90", ints(32))
    assert out.tolist() == (3 * LANES).tolist()
    with pytest.raises(UnsupportedKernel, match="pmevent") as caught:
        ordinary("calls", "90").kernel("profiled")
    (problem,) = caught.value.problems
    assert (problem.source_file, problem.source_line) == (
        "calls.cu",
        line_of((ORDINARY / "calls.cu").read_text(), "pmevent 3"),
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_the_heap(arch: str) -> None:
    program = Program("calls", "lists", arch)
    out, _, *_ = program.run(ints(32), ints(128), 4)
    assert out.tolist() == (6 * LANES).tolist()
    assert program.report is not None
    assert [note.kind for note in program.report.notes] == ["unused_undefined"]
    assert not program.machine._launcher._heap.live, "a launch that ran twice leaves what one run leaves"
    program = Program("calls", "heap_beside_a_race", arch)
    out, most, _ = program.run(np.zeros(32, np.uint64), ints(1), 3 * np.arange(32, dtype=np.int32))
    assert program.report is not None
    assert [note.kind for note in program.report.notes] == ["harmless_race"]
    assert most.tolist() == [93]
    assert [program.machine.read(int(at), 4).view(np.int32)[0] for at in out] == list(range(0, 96, 3))
    (out,) = run("calls", "heap_mistake", arch, ints(32), 5, block=1)
    assert out[:4].tolist() == [1, 1, 1, 1]
    (out,) = run("calls", "heap_aligned", arch, ints(32))
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize(
    ("which", "kind", "words"),
    [
        (0, "global_out_of_bounds", "0 bytes past the end of 'malloc at calls.cu:"),
        (1, "use_after_free", "which was freed"),
        (2, "uninitialised_read", "'malloc at calls.cu:"),
        (3, "use_after_free", "which was freed already"),
        (4, "use_after_free", "free of 'argument 0' + 0, which is nothing that malloc gave"),
    ],
)
def test_mistakes_with_the_heap(which: int, kind: str, words: str) -> None:
    with pytest.raises(LaunchFault) as caught:
        run("calls", "heap_mistake", "90", ints(32), which, block=1)
    assert caught.value.faults[0].kind == kind
    assert words in caught.value.faults[0].message


MANY = """
extern "C" __global__ void kernel(int* out) {
  asm volatile("{.reg .u32 x; mov.u32 x, %envreg7;}");
  asm volatile("{.reg .b256 x;}");
  out[0] = 1;
  asm volatile("pmevent 3;");  // MARK: last
}
"""


def test_a_refusal_lists_all_that_a_kernel_needs() -> None:
    with pytest.raises(UnsupportedKernel) as caught:
        compile_module(MANY).kernel("kernel")
    found = [(problem.opcode, problem.source_line) for problem in caught.value.problems]
    last = line_of(MANY, "MARK: last")
    assert found == [("mov.u32", last - 3), (".reg .b256 x", last - 2), ("pmevent", last)]
    text = str(caught.value)
    assert "3 things in kernel kernel" in text
    assert f"'pmevent' (test.cu:{last}, PTX line" in text
    assert "\n" not in text
