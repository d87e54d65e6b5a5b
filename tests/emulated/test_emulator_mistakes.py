"""A newcomer's mistakes with the library: each is one typed error of one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli import emulator
from g4kv_cli.emulator import Module

SOURCE = """
struct Pair { int a, b; };
template <class T> __global__ void scale(T* x, T by, int n) {
  if (threadIdx.x < n) x[threadIdx.x] *= by;
}
template <class T> __global__ void unused(T* x) { *x = T(1); }
__global__ void twice(float* x) { *x *= 2; }
__global__ void twice(double* x) { *x *= 2; }
__global__ void count(unsigned int* x, unsigned int n, Pair pair) { *x = n + pair.a; }
extern "C" __global__ void plain(float* x, float by, int n, Pair pair) { *x = by * n + pair.b; }
extern "C" __global__ void __launch_bounds__(64) small(float* x) { *x = 1; }
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void boxes(const __grid_constant__ Map map, float* x) { *x = map.bytes[0]; }
__device__ int table[4];
"""
X = np.ones(64, np.float32)
PAIR = bytes(8)


@pytest.fixture(scope="module")
def module() -> Module:
    return emulator.load(SOURCE, names=["scale<float>"])


def _launch(kernel: str, *args: Any, grid: Any = 1, block: Any = 32, **options: Any) -> Callable[[Module], object]:
    return lambda module: module.launch(kernel, grid, block, list(args), **options)


class _OfAnotherLibrary:
    """Something like a tensor: NumPy can make an array of it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.ones(64, np.float32)


WRONG_ARGUMENTS = [
    (_launch("scale", X, 2.0), r"takes 3 arguments, 2 given"),
    (_launch("scale", X, 2.0, 1, 1), r"takes 3 arguments, 4 given"),
    (lambda module: module.launch("scale", 1, 32, X), r"are a list, not float32 \[64\]"),
    (lambda module: module.launch("scale", 1, 32, {"x": X, "by": "2", "n": 1}), r"^by of scale<float>.*float; got str"),
    (_launch("scale", np.ones(64), 2.0, 1), r"args\[0\] of .*is float32 .* got float64: pass a\.astype\(np\.float32\)"),
    (_launch("scale", X[::2], 2.0, 1), r"not contiguous \(strides \(8,\) for \[32\]\).*np\.ascontiguousarray"),
    (_launch("scale", [1.0], 2.0, 1), r"a list is no argument; pass np\.array"),
    (_launch("scale", _OfAnotherLibrary(), 2.0, 1), r"a _OfAnotherLibrary is no NumPy array; pass np\.asarray\(a\)"),
    (_launch("scale", 5, 2.0, 1), r"takes float\*, got 5; pass an array"),
    (_launch("scale", np.float32(5), 2.0, 1), r"takes float\*, got float32 .*; pass an array"),
    (_launch("scale", X.astype(">f4"), 2.0, 1), r"byte order"),
    (_launch("boxes", X, X), r"^args\[0\] of boxes: .*for a CUtensorMap pass emulator\.tensor_map\(array, box\)"),
    (_launch("scale", emulator.tensor_map(X, (64,)), 2.0, 1), r"takes float\*, which is no tensor map"),
    (_launch("boxes", emulator.tensor_map(X, (64,), swizzle_bytes=48), X), r"boxes: .*swizzle of 48 bytes"),
    (_launch("boxes", emulator.tensor_map(X, (8, 8)), X), r"1 extents need 1 box sizes"),
    (_launch("boxes", emulator.tensor_map(X[::2], (8,)), X), r"not contiguous"),
    (lambda module: emulator.tensor_map([1.0], (1,)), r"takes an array, not list"),  # type: ignore[arg-type]
    (_launch("scale", np.array([None]), 2.0, 1), r"Python objects"),
    (_launch("scale", X, X, 1), r"args\[1\] of .* takes float, which is no pointer; got float32 \[64\]"),
    (_launch("scale", X, None, 1), r"takes float, which is no pointer; got None"),
    (_launch("scale", X, 1e39, 1), r"1e\+39 does not fit float"),
    (_launch("scale", X, (1 << 24) + 1, 1), r"16777217 is not exact as float"),
    (_launch("scale", X, np.float64(2), 1), r"takes float, got float64 .*pass np\.float32\(\.\.\.\)"),
    (_launch("scale", X, np.int32(2), 1), r"takes float, got int32 .*pass np\.float32"),
    (_launch("scale", X, 2.0, 1.5), r"takes int, got the float 1\.5; pass int"),
    (_launch("scale", X, 2.0, 1 << 31), r"2147483648 does not fit int \(-2147483648 to 2147483647\)"),
    (_launch("scale", X, 2.0, np.int64(1)), r"takes int, got int64 .*pass np\.int32"),
    (_launch("scale", X, 2.0, np.float32(1)), r"takes int, got float32 .*pass np\.int32"),
    (_launch("count", X.view(np.uint32), -1, PAIR), r"-1 does not fit unsigned int"),
    (_launch("count", X.view(np.uint32), 1, bytes(12)), r"takes Pair by value, 8 bytes aligned to 4; got 12 bytes"),
    (_launch("count", X.view(np.uint32), 1, 5), r"takes Pair by value \(8 bytes\); got int 5: pass bytes"),
    (_launch("plain", X, 2.0, 1, X), r"args\[3\] of plain: it takes a struct of 8 bytes, which is no pointer"),
    (_launch("plain", X, 2.0, 1 << 32, PAIR), r"does not fit an integer of 32 bits"),
    (_launch("plain", X, np.int32(2), 1, PAIR), r"takes a float, got int32"),
    (_launch("plain", np.float32(1), 2.0, 1, PAIR), r"takes a pointer or a 64-bit integer, got float32"),
    (_launch("scale", emulator.Address(-1), 2.0, 1), r"-1 is no address"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG_ARGUMENTS)
def test_a_wrong_argument(module: Module, call: Callable[[Module], object], words: str) -> None:
    _refused(module, call, emulator.ArgumentError, words)


def test_what_a_launch_forgot_is_said_where_it_breaks(module: Module) -> None:
    """A null pointer, and dynamic shared memory that nobody gave."""
    with pytest.raises(emulator.LaunchFailed, match="address 0x0, near no allocation: a null pointer"):
        module.launch("small", 1, 1, [None])
    module.emulator.reset()
    text = "__global__ void k(float* x) { extern __shared__ float s[]; s[threadIdx.x] = *x; *x = s[0]; }"
    with pytest.raises(emulator.LaunchFailed, match="0 bytes; the launch gave it no dynamic shared memory"):
        emulator.load(text).launch("k", 1, 1, [np.ones(1, np.float32)])


def test_arrays_that_overlap_on_the_host(module: Module) -> None:
    both = emulator.load('extern "C" __global__ void two(float* a, float* b) { *a = *b; }\n')
    with pytest.raises(emulator.ArgumentError, match=r"args\[0\] and args\[1\] of two overlap on the host"):
        both.launch("two", 1, 1, [X[:8], X[4:]])
    with pytest.raises(emulator.ArgumentError, match=r"one array, but only one is out\(\)"):
        both.launch("two", 1, 1, [X, emulator.out(X)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_launch("scale", X, 2.0, 1, grid=0), r"launch of scale<float>.* grid\.x is 0.*\(n \+ block - 1\) // block"),
        (_launch("scale", X, 2.0, 1, grid=(1, 70000)), r"grid\.y is 70000, must be 1 to 65535"),
        (_launch("scale", X, 2.0, 1, grid=1.5), r"grid is 1\.5; it is an int"),
        (_launch("scale", X, 2.0, 1, grid="4"), r"grid is '4'; it is an int"),
        (_launch("scale", X, 2.0, 1, grid=(1, 1, 1, 1)), r"up to three"),
        (_launch("scale", X, 2.0, 1, grid=True), r"grid is True"),
        (_launch("scale", X, 2.0, 1, block=()), r"block is \(\)"),
        (_launch("scale", X, 2.0, 1, block=2048), r"block\.x is 2048, must be 1 to 1024"),
        (_launch("scale", X, 2.0, 1, block=(32, 64)), r"2048 threads in a block, at most 1024"),
        (_launch("small", X, block=128), r"128 threads in a block, the kernel was compiled for at most 64"),
        (_launch("scale", X, 2.0, 1, shared=232449), r"232449 bytes of shared memory in a block, sm_90 has 232448"),
        (_launch("scale", X, 2.0, 1, shared=-1), r"dynamic shared memory of -1 bytes"),
        (_launch("scale", X, 2.0, 1, shared="1k"), r"shared is '1k'"),
    ],
)
def test_a_wrong_shape_of_the_launch(module: Module, call: Callable[[Module], object], words: str) -> None:
    _refused(module, call, emulator.LaunchRefused, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scael", r"no kernel scael; did you mean scale<float>\(float\*, float, int\)\?"),
        ("nothing_like_it", r"it has .*plain.*small"),
        (
            "scale<double>",
            r"a template, and it has no instance scale<double>; name one: load\(\.\.\., names=\['scale<double>'\]",
        ),
        ("unused", r"unused in source\.cu is a template, and it has no instance unused; name one: "),
        ("twice", r"has 2 kernels twice: twice\(float\*\), twice\(double\*\); say which"),
        (None, r"has 7 kernels: .*; say which"),
        (0, r"by its name, a text, not by 0; source\.cu has .*plain"),
    ],
)
def test_a_kernel_that_is_not_there(module: Module, name: Any, words: str) -> None:
    _refused(module, lambda loaded: loaded.kernel(name), emulator.KernelNotFound, words)


def test_names_that_do_find_a_kernel(module: Module) -> None:
    assert module.kernel("twice(float*)").symbol == "_Z5twicePf"
    assert module.kernel("_Z5twicePd").symbol == "_Z5twicePd"
    assert module.kernel("scale< float >").symbol == module.kernel("scale").symbol == "_Z5scaleIfEvPT_S0_i"


def test_symbols_that_are_not_there_or_of_another_size(module: Module) -> None:
    _refused(module, lambda loaded: loaded.get("tabel", np.int32), emulator.SymbolError, r"did you mean table\?")
    _refused(module, lambda loaded: loaded.get("table", "V3"), emulator.SymbolError, r"16 bytes, which are no whole")
    _refused(
        module, lambda loaded: loaded.set("table", np.zeros(3, np.int32)), emulator.SymbolError, "has 16 bytes, got 12"
    )
    _refused(module, lambda loaded: loaded.set("table", 4), emulator.SymbolError, "NumPy array or scalar")


def _load(source: Any, **options: Any) -> Callable[[Module], object]:
    return lambda _: emulator.load(source, **options)


PTX = ".version 8.0\n.target sm_90\n.address_size 64\n"
BODY = ".visible .entry k(.param .u64 k_param_0)\n{\n ret;\n}\n"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (_load("missing.cu"), emulator.SourceError, r"cannot read missing\.cu: No such file.*name a \.cu, \.ptx"),
        (_load(" "), emulator.SourceError, "empty"),
        (_load(b""), emulator.SourceError, "empty"),
        (_load(5), emulator.SourceError, "int is nothing to load"),
        (_load(b"\xff\xfe\x00"), emulator.SourceError, "neither text nor"),
        (_load(b"\x7fELF"), emulator.SourceError, "by its path"),
        (_load(b"\x50\xed\x55\xba"), emulator.CompileError, "no fat binary"),
        (_load(PTX), emulator.SourceError, r"no kernel \(\.entry\)"),
        (_load(PTX.replace("8.0", "99.0") + BODY), emulator.SourceError, r"PTX 99\.0, the newest known is 9\.5"),
        (_load(PTX.replace("8.0", "new") + BODY), emulator.SourceError, r"\.version new is no version"),
        (_load(PTX.replace("64", "32") + BODY), emulator.SourceError, "addresses of 32 bits"),
        (_load(".version 8.0\n" + BODY), emulator.SourceError, r"no \.version or \.target"),
        (_load(PTX + BODY, options=["-DX"]), emulator.UsageError, "options is for CUDA source"),
        (_load(PTX + BODY, arch="sm_80"), emulator.UsageError, "arch is for CUDA source"),
        (_load(SOURCE, options="-DX"), emulator.UsageError, "options is '-DX'; give a list"),
        (_load(SOURCE, names="scale<float>"), emulator.UsageError, "names is 'scale<float>'; give a list"),
        (_load(SOURCE, include=["/nowhere"]), emulator.UsageError, "/nowhere is no directory"),
        (_load(SOURCE, arch="90"), emulator.UsageError, "unknown architecture '90'"),
        (_load(SOURCE, options=["-arch=sm_80"]), emulator.UsageError, "an argument of its own"),
        (_load(SOURCE, options=["--nonsense"]), emulator.CompileError, "unrecognized option --nonsense"),
        (_load("__global__ void k(int* x) { *x = 1 }"), emulator.CompileError, r"source\.cu\(1\): error: expected a"),
        (_load("#include <vector>\n__global__ void k() {}\n"), emulator.CompileError, r"__CUDACC_RTC__.*\"vector\""),
        (_load("__global__ void k(uint32_t* x) {}\n"), emulator.CompileError, "; include <cuda/std/cstdint>"),
        (_load("__global__ void k() {}\nint main() {}\n"), emulator.CompileError, "for the host between #ifndef"),
        (_load('#include "own.h"\n__global__ void k() {}\n'), emulator.CompileError, r"include path.*\"own\.h\""),
        (_load("template <class T> __global__ void k(T* x) {}\n"), emulator.CompileError, "an instance has to be"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(
    module: Module, call: Callable[[Module], object], kind: type[Exception], words: str
) -> None:
    _refused(module, call, kind, words)


def test_a_compile_error_carries_the_compilers_log() -> None:
    with pytest.raises(emulator.CompileError) as caught:
        emulator.load("__global__ void k(int* x) { *x = undefined_name; }")
    assert 'identifier "undefined_name" is undefined' in caught.value.log


def test_machine_code_is_named_as_such(tmp_path: Path) -> None:
    from g4kv_cli.compiler.foreign import compile_foreign

    made = compile_foreign("k.cu", "__global__ void k() {}", arch="sm_90", kind="cubin")
    path = tmp_path / "k.cubin"
    path.write_bytes(made.data)
    with pytest.raises(emulator.CompileError, match="no PTX"):
        emulator.load(path)


def _refused(module: Module, call: Callable[[Module], object], kind: type[Exception], words: str) -> None:
    launches, kept = module.emulator.machine.counts.native, X.copy()
    with pytest.raises(kind, match=words) as caught:
        call(module)
    assert isinstance(caught.value, emulator.G4kvError)
    first = str(caught.value)
    assert "\n" not in first or isinstance(caught.value, emulator.CompileError)
    assert module.emulator.machine.counts.native == launches
    np.testing.assert_array_equal(X, kept)
