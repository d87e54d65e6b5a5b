"""The library for any kernel: what it loads and launches, what comes back, and what becomes of findings."""

from __future__ import annotations

import ctypes
import math
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from g4kv_cli import emulator
from g4kv_cli.emulator import Emulator, Module

SOURCE = """
#include <cuda_bf16.h>
#include <cuda/std/cstdint>
struct Point { float* where; int n; };
__constant__ float factors[4] = {1.f, 2.f, 3.f, 4.f};
namespace counting { __device__ unsigned int calls; }

template <class T> __global__ void scale(T* x, T by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) counting::calls += 1;
  if (i < n) x[i] *= by;  // scaled
}
__global__ void take(float* out, Point point, __nv_bfloat16 half, unsigned char byte, bool flag, long long wide,
                     double real, short narrow) {
  int i = threadIdx.x;
  out[i] = float(half) + byte + flag + wide + real + narrow + factors[i & 3];
  if (point.where != nullptr && i < point.n) point.where[i] = -1.f;
}
__global__ void copy(const __nv_bfloat16* from, __nv_bfloat16* to, int* count) {
  to[threadIdx.x] = from[threadIdx.x];
  if (count != nullptr) atomicAdd(count, 1);
}
extern "C" __global__ void last(float* x, int n) { x[n] = 1.f; }
extern "C" __global__ void collide(int* x) { x[0] = blockIdx.x; }
extern "C" __global__ void shared_sum(const int* x, int* out) {
  extern __shared__ int tile[];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) { int sum = 0; for (int i = 0; i < blockDim.x; ++i) sum += tile[i]; *out = sum; }
}
extern "C" __global__ void forever(volatile int* flag) {
  for (unsigned i = *flag; i != 1; i += 2) asm volatile("" : "+r"(i));
}
extern "C" __global__ void through_both(float* a, float* b) { a[0] = 7.f; b[1] = b[0]; }
"""
SQUARE = (
    'extern "C" __global__ void square(float* x) { x[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x] + 1.0000001f; }\n'
)


@pytest.fixture(scope="module")
def loaded() -> Module:
    """The source, loaded once; ``module`` is a fresh device each time."""
    return emulator.load(SOURCE, names=["scale<float>", "scale<int>"])


@pytest.fixture
def module(loaded: Module) -> Module:
    loaded.emulator.reset()
    return loaded


class Point(ctypes.Structure):
    """Twin of the source's."""

    _fields_ = (("where", ctypes.c_uint64), ("n", ctypes.c_int32))


def test_arrays_come_back_and_the_report_counts(module: Module) -> None:
    x = np.arange(1000, dtype=np.float32)
    report = module.launch("scale<float>", grid=4, block=256, args=[x, 2.0, 999])
    np.testing.assert_array_equal(x, np.r_[np.arange(999) * 2, 999].astype(np.float32))
    assert report.is_clean
    assert report.ended_by is None
    assert (report.kernel, report.grid, report.block) == ("scale<float>(float*, float, int)", (4, 1, 1), (256, 1, 1))
    assert report.counts.stored_bytes == 999 * 4 + 4  # and the counter
    assert str(report).startswith("scale<float>(float*, float, int): 4 blocks of 256 threads, ")


def test_every_kind_of_argument_arrives(module: Module) -> None:
    where = module.emulator.array(np.zeros(8, np.float32), "where")
    values = [ml_dtypes.bfloat16(1.5), 200, True, -(1 << 40), 0.25, np.int16(-3)]
    point = np.zeros((), np.dtype([("where", "u8"), ("n", "i4")], align=True))
    point["where"], point["n"] = where.address, 5
    want = 1.5 + 200 + 1 - float(1 << 40) + 0.25 - 3 + np.array([1, 2, 3, 4] * 8)
    for by_value in (Point(where.address, 5), bytes(Point(where.address, 5)), point[()]):
        out = np.zeros(32, np.float32)
        module.launch("take", 1, 32, [out, by_value, *values])
        np.testing.assert_array_equal(out, want.astype(np.float32))
    np.testing.assert_array_equal(where.read(), [-1, -1, -1, -1, -1, 0, 0, 0])


GRID = """
#include <cooperative_groups.h>
__global__ void turned(int* x) {
  cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  int i = grid.thread_rank(), other = x[grid.size() - 1 - i];
  grid.sync();
  x[i] = other;
}
"""


def test_a_kernel_that_meets_its_grid_is_launched_cooperatively() -> None:
    module = emulator.load(GRID)
    x = np.arange(96, dtype=np.int32)
    assert module.launch("turned", 3, 32, [x]).is_clean
    assert x.tolist() == list(range(95, -1, -1))
    with pytest.raises(emulator.LaunchRefused, match="133 blocks in a cooperative launch, of which the card holds 132"):
        module.launch("turned", 133, 1024, [np.zeros(133 * 1024, np.int32)], shared=120000)
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("turned", 3, 32, [x], cooperative=False)
    assert caught.value.report.kinds == ["trap"], "as on a GPU"


CLUSTERS = """
__global__ void neighbour(int* x) {
  __shared__ int mine;
  unsigned rank, there;
  int value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  mine = blockIdx.x;
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
      : "r"((unsigned)__cvta_generic_to_shared(&mine)), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there));
  x[blockIdx.x] = value;
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__global__ void next(const int* x, int* y, int waits) {
  if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
  y[threadIdx.x] = x[threadIdx.x];
}
__global__ void never(int* y) { y[threadIdx.x] = 1; }
"""


def test_clusters_and_launches_that_overlap() -> None:
    device = emulator.Emulator()
    module = device.load(CLUSTERS)
    x, y = device.empty(4, np.int32), device.empty(4, np.int32)
    assert module.launch("neighbour", 4, 1, [x], cluster=2).is_clean
    assert module.launch("next", 1, 4, [x, y, 1], overlap=True).is_clean
    assert y.read().tolist() == [1, 0, 3, 2]
    with pytest.raises(emulator.LaunchRefused, match=r"clusters of \(3, 1, 1\) blocks do not fill the grid"):
        module.launch("neighbour", 4, 1, [x], cluster=3)
    assert module.launch("next", 1, 4, [x, y, 0], overlap=True).is_clean, "y was read: the one in front has ended"
    for name, args, kind in (("next", [x, y, 0], "read_before_wait"), ("never", [y], "overlap_without_wait")):
        module.launch("neighbour", 4, 1, [x], cluster=(2, 1))
        with pytest.raises(emulator.LaunchFailed) as caught:
            module.launch(name, 1, 4, args, overlap=True)
        assert caught.value.report.kinds == [kind], name


def test_vectors_carry_smaller_elements() -> None:
    source = "__global__ void swap(uint4* x, const float2* y) { x[threadIdx.x] = x[threadIdx.x ^ 1]; }"
    x, y = np.arange(16).astype(ml_dtypes.bfloat16), np.zeros(16, np.float16)
    emulator.load(source).launch("swap", 1, 2, [x, y], policy={"global_race": "ignore"})
    assert x.tolist() == [*range(8, 16), *range(8)]
    with pytest.raises(emulator.ArgumentError, match="uint32 on the host; got float64"):
        emulator.load(source).launch("swap", 1, 2, [y.astype(float), y])


def test_bfloat16_arrays_null_pointers_and_one_array_twice(module: Module) -> None:
    x = np.linspace(-2, 2, 32).astype(ml_dtypes.bfloat16)
    kept = x.copy()
    to, count = np.zeros(32, ml_dtypes.bfloat16), np.array(0, np.int32)
    module.launch("copy", 1, 32, {"from": x, "to": to, "count": count})
    assert (to == kept).all()
    assert count == 32
    one = np.zeros(2, np.float32)
    module.launch("through_both", 1, 1, [one, one])
    np.testing.assert_array_equal(one, [7, 7])


def test_device_memory_stays_from_launch_to_launch(module: Module) -> None:
    x = module.emulator.array(np.ones(64, np.float32), "x")
    for _ in range(3):
        module.launch("scale<float>", 1, 64, [x, np.float32(2), np.int32(64)])
    module.launch("scale<float>", 1, 32, [x.at(32), 10.0, 32])
    np.testing.assert_array_equal(x.read(), [8] * 32 + [80] * 32)
    assert module.get("counting::calls", np.uint32) == 4
    x.free()
    with pytest.raises(emulator.ArgumentError, match="x was freed"):
        module.launch("scale<float>", 1, 64, [x, 1.0, 64])


def test_symbols_are_read_and_written(module: Module) -> None:
    np.testing.assert_array_equal(module.get("factors", np.float32), [1, 2, 3, 4])
    module.set("factors", np.full(4, 100, np.float32))
    module.set("calls", np.uint32(41))
    x = np.ones(4, np.float32)
    module.launch("scale<float>", 1, 32, [x, 1.0, 4])
    assert module.get("calls", np.uint32) == 42
    out = np.zeros(4, np.float32)
    module.launch("take", 1, 4, [out, bytes(16), ml_dtypes.bfloat16(0), 0, False, 0, 0.0, 0])
    np.testing.assert_array_equal(out, [100] * 4)
    module.emulator.reset()
    np.testing.assert_array_equal(module.get("factors", np.float32), [1, 2, 3, 4])


def test_dynamic_shared_memory_and_three_axes(module: Module) -> None:
    x, out = np.arange(64, dtype=np.int32), np.zeros(1, np.int32)
    report = module.launch("shared_sum", (1, 1, 1), (64, 1), [x, out], shared=256)
    assert out[0] == 64 * 63 // 2
    assert report.counts.shared_bytes == 256


def test_a_finding_names_argument_line_block_and_thread_and_leaves_arrays_alone(module: Module) -> None:
    values = np.ones(100, np.float32)
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("scale<float>", 1, 128, {"values": values, "by": 2.0, "n": 101})
    (fault,) = caught.value.faults
    line = next(number for number, text in enumerate(SOURCE.split("\n"), 1) if "// scaled" in text)
    assert (fault.kind, fault.source_line, fault.block, fault.thread) == (
        "global_out_of_bounds", line, (0, 0, 0), (100, 0, 0),
    )  # fmt: skip
    assert "past the end of 'values' (400 bytes)" in str(caught.value)
    assert caught.value.report.ended_by == fault
    assert (values == 1).all()
    with pytest.raises(emulator.DeviceLost, match=r"reset\(\)"):
        module.launch("scale<float>", 1, 32, [values, 2.0, 32])
    module.emulator.reset()
    assert module.launch("scale<float>", 1, 32, [values, 2.0, 32]).is_clean


def test_the_policy_raises_reports_or_ignores_by_kind(module: Module) -> None:
    x = np.zeros(1, np.int32)
    with pytest.raises(emulator.LaunchFailed, match="block_write_conflict"):
        module.launch("collide", 4, 1, [x])
    assert x[0] == 0
    report = module.launch("collide", 4, 1, [x], policy="report")
    assert report.kinds == ["block_write_conflict"]
    assert x[0] == 3
    assert "block_write_conflict" in str(report)
    ignoring = {"default": "report", "block_write_conflict": "ignore"}
    report = module.launch("collide", 4, 1, [x], policy=ignoring, reverse_blocks=True)
    assert report.is_clean
    assert report.ignored == {"block_write_conflict": 1}
    assert x[0] == 0
    report = module.launch("last", 1, 1, [x.astype(np.float32), 5], policy="report")
    assert report.ended_by is not None
    assert report.ended_by.kind == "global_out_of_bounds"


def test_ignore_as_the_default_still_raises_what_ends_a_launch(module: Module) -> None:
    with pytest.raises(emulator.LaunchFailed, match="global_out_of_bounds"):
        module.launch("last", 1, 1, [np.zeros(1, np.float32), 5], policy="ignore")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"shared_rac": "report"}, "did you mean 'shared_race'"),
        ({"shared_race": "warn"}, "it can be raise, report, ignore"),
        ({"trap": "ignore"}, "cannot be ignored"),
    ],
)
def test_a_policy_that_is_none_is_refused(policy: dict[str, str], words: str) -> None:
    with pytest.raises(emulator.UsageError, match=words):
        Emulator(policy)  # type: ignore[arg-type]


def test_an_output_is_uninitialised_until_it_is_stored(module: Module) -> None:
    x = np.ones(8, np.float32)
    with pytest.raises(emulator.LaunchFailed, match="uninitialised_read"):
        module.launch("scale<float>", 1, 8, [emulator.out(x), 2.0, 8])
    to, source = np.zeros(40, ml_dtypes.bfloat16), np.ones(32, ml_dtypes.bfloat16)
    with pytest.raises(emulator.LaunchFailed, match="unwritten_output: 16 of 80 bytes of 'to'"):
        module.launch("copy", 1, 32, {"from": source, "to": emulator.out(to), "count": None})
    module.launch("copy", 1, 32, [source, emulator.out(to[:32]), None])
    assert to.tolist() == [1] * 32 + [0] * 8


def test_a_read_only_array_is_an_input(module: Module) -> None:
    source, to = np.ones(32, ml_dtypes.bfloat16), np.zeros(32, ml_dtypes.bfloat16)
    source.flags.writeable = False
    module.launch("copy", 1, 32, [source, to, None])
    with pytest.raises(emulator.ArgumentError, match="read-only"):
        module.launch("copy", 1, 32, [to, source, None])


def test_a_launch_past_its_time_says_where_it_stood(module: Module) -> None:
    with pytest.raises(emulator.LaunchTimedOut, match=r"forever had not ended after 0\.2 s: it stood at .*source\.cu:"):
        module.launch("forever", 1, 1, [np.zeros(1, np.int32)], seconds=0.2)


def test_contraction_is_nvrtcs_unless_told_otherwise() -> None:
    x = np.float32(1) + np.arange(32, dtype=np.float32) * np.float32(2**-12)
    squares = x.astype(np.float64) ** 2
    want = (squares + np.float64(np.float32(1.0000001))).astype(np.float32)
    fused, apart = x.copy(), x.copy()
    emulator.load(SQUARE).launch("square", 1, 32, [fused])
    emulator.load(SQUARE, options=["--fmad=false"]).launch("square", 1, 32, [apart])
    np.testing.assert_array_equal(fused, want)
    np.testing.assert_array_equal(apart, squares.astype(np.float32) + np.float32(1.0000001))
    assert (fused != apart).any()


def test_sources_of_every_kind(module: Module, tmp_path: Path) -> None:
    ptx = module.ptx[0]
    (tmp_path / "folder").mkdir()
    (tmp_path / "scale.cuh").write_text("#define BY 3.f\n")
    (tmp_path / "folder" / "more.cuh").write_text("#define MORE 1.f\n")
    cuda = 'extern "C" __global__ void triple(float* x) { *x = *x * BY + MORE + D; }\n'
    (tmp_path / "triple.cu").write_text('#include "scale.cuh"\n#include <more.cuh>\n' + cuda)
    (tmp_path / "all.ptx").write_text(ptx)
    x = np.ones(1, np.float32)
    for include in ('#include"scale.cuh"\n', '#define OWN "scale.cuh"\n # include OWN\n'):
        (tmp_path / "beside.cu").write_text(include + 'extern "C" __global__ void put(float* x) { *x = BY; }\n')
        x[0] = 1
        emulator.load(tmp_path / "beside.cu").launch("put", 1, 1, [x])
        assert x[0] == 3
    x[0] = 1
    from_file = {"include": [tmp_path / "folder"], "options": ["-DD=2"]}
    emulator.load(tmp_path / "triple.cu", **from_file).launch("triple", 1, 1, [x])
    assert x[0] == 6
    (tmp_path / "scale.cuh").write_text("#define BY 5.f\n")  # and no cache stands between
    emulator.load(str(tmp_path / "triple.cu"), **from_file).launch("triple", 1, 1, [x])
    assert x[0] == 33
    for source in (ptx, ptx.encode(), ptx.encode() + b"\0", str(tmp_path / "all.ptx")):
        x[0] = 7
        emulator.load(source).launch("scale<float>", 1, 1, [x, 2.0, 1])
        assert x[0] == 14


def _fatbin(*entries: tuple[int, bytes], kind: int = 1) -> bytes:
    """A container as nvcc embeds it: (compute capability, PTX text) each."""
    body = b""
    for arch, text in entries:
        body += (
            struct.pack("<HHIQ", kind, 0x101, 64, len(text)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + text
        )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _library(section: bytes) -> bytes:
    """A shared library with a section .nv_fatbin and nothing else."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64 + len(section) + len(names)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 2)
    fatbin = struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 64, len(section), 0, 0, 8, 0)
    strings = struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, 64 + len(section), len(names), 0, 0, 1, 0)
    return header + section + names + bytes(64) + fatbin + strings


def test_what_nvcc_made_is_loaded_with_all_its_translation_units(module: Module, tmp_path: Path) -> None:
    other = emulator.load('__constant__ float by; extern "C" __global__ void other(float* x) { *x *= by; }\n').ptx[0]
    units = [module.ptx[0].encode(), other.encode()]
    (tmp_path / "one.fatbin").write_bytes(_fatbin((90, units[0])))
    (tmp_path / "both.so").write_bytes(_library(_fatbin((90, units[0])) + _fatbin((80, b"x"), (90, units[1]), kind=1)))
    x = np.ones(1, np.float32)
    for source in (_fatbin((90, units[0])), tmp_path / "one.fatbin", tmp_path / "both.so"):
        emulator.load(source).launch("scale<float>", 1, 1, [x, 2.0, 1])
    assert x[0] == 8
    both = emulator.load(tmp_path / "both.so")
    both.set("by", np.float32(5))
    both.launch("other", 1, 1, [x])
    assert x[0] == 40
    assert "other" in both.ptx_of("other")
    assert "other" not in both.ptx_of(both.symbol("scale<float>"))
    (tmp_path / "code.so").write_bytes(_library(_fatbin((90, b"machine code"), kind=2)))
    with pytest.raises(emulator.CompileError, match="has machine code and no PTX"):
        emulator.load(tmp_path / "code.so")
    (tmp_path / "packed.so").write_bytes(_library(_fatbin((90, b"\1\2\3"))))
    with pytest.raises(emulator.CompileError, match="--no-compress"):
        emulator.load(tmp_path / "packed.so")


def test_the_c_headers_that_kernels_include_are_there() -> None:
    headers = [
        "stdint.h",
        "cstdint",
        "math.h",
        "cmath",
        "float.h",
        "climits",
        "cstdio",
        "assert.h",
        "cstddef",
        "string.h",
        "stdbool.h",
    ]
    body = "assert(*x == 0); uint32_t y = INT_MAX; *x = FLT_MAX + INFINITY + y;"
    text = "".join(f"#include <{name}>\n" for name in headers) + f"__global__ void k(float* x) {{ {body} }}\n"
    x = np.zeros(1, np.float32)
    emulator.load(text).launch("k", 1, 1, [x])
    assert x[0] == np.inf


STANDARD = r"""
#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
template <class T> __global__ std::enable_if_t<std::is_same_v<T, float>> most(const T* x, T* out, std::uint32_t n) {
  std::array<T, 2> two{std::numeric_limits<T>::lowest(), T(2)};
  for (std::uint32_t i = 0; i < n; ++i) two[0] = std::max(two[0], std::abs(x[i]));
  auto [best, by] = std::make_tuple(std::move(two[0]), two[1]);
  union Number { __extension__ struct { T whole; }; int bits; } number;
  __asm__ __volatile__("mul.rn.f32 %0, %1, %2;" : "=f"(number.whole) : "f"(best), "f"(by));
  *out = number.whole;
}
"""


def test_the_standard_library_as_nvcc_has_it() -> None:
    """CCCL's, in std, and words of the host's compiler."""
    x, most = np.array([1, -9, 4], np.float32), np.zeros(1, np.float32)
    module = emulator.load(STANDARD, names=["most<float>"])
    assert module.kernel_names == ["most<float>"]  # what it returns, enable_if_t, is not read
    module.kernel("most").launch(1, 1, [x, emulator.out(most), 3])
    assert most[0] == 18


def test_notes_of_one_line_are_one_line() -> None:
    source = """
__global__ void k(int* out) {
  __shared__ int s[8];
  if (threadIdx.x < 4) s[threadIdx.x] = 1;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += i < 4 ? s[i] : ((volatile int*)s)[i] & 0;
  out[threadIdx.x] = sum;
}
"""
    report = emulator.load(source).launch("k", 1, 32, [np.zeros(32, np.int32)])
    assert report.is_clean
    assert len(report.notes) == 4
    (line,) = str(report).splitlines()[1:]
    assert line.startswith("no finding: unused_undefined: source.cu:8: ")
    assert line.endswith(" (and 3 more at this line)")


def test_integers_of_128_bits_as_nvcc_has_them() -> None:
    text = "__global__ void k(unsigned long long* x) { *x = (unsigned __int128)*x * *x >> 64; }"
    x = np.array([0xFEDCBA9876543210], np.uint64)
    want = int(x[0]) ** 2 >> 64
    emulator.load(text).launch("k", 1, 1, [x])
    assert int(x[0]) == want


BOXES = """
#include <cuda.h>
#include <cuda/barrier>
namespace copies = cuda::device::experimental;
using Barrier = cuda::barrier<cuda::thread_scope_block>;
__global__ void add_rows(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap to, int by) {
  __shared__ alignas(128) int tile[8][32];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) { init(&barrier, blockDim.x); copies::fence_proxy_async_shared_cta(); }
  __syncthreads();
  Barrier::arrival_token token;
  if (threadIdx.x == 0) {
    copies::cp_async_bulk_tensor_2d_global_to_shared(tile, &in, blockIdx.x * 32, blockIdx.y * 8, barrier);
    token = cuda::device::barrier_arrive_tx(barrier, 1, sizeof(tile));
  } else {
    token = barrier.arrive();
  }
  barrier.wait(cuda::std::move(token));
  for (int row = 0; row < 8; ++row) tile[row][threadIdx.x] += row * by;
  copies::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x == 0) {
    copies::cp_async_bulk_tensor_2d_shared_to_global(&to, blockIdx.x * 32, blockIdx.y * 8, tile);
    copies::cp_async_bulk_commit_group();
    copies::cp_async_bulk_wait_group_read<0>();
  }
}
"""


def test_tensor_maps_of_arrays() -> None:
    """20 rows in boxes of 8: what is outside is read as zeros and not written. A device array has one, too."""
    device = Emulator()
    module = device.load(BOXES)
    x = np.random.default_rng(1).integers(0, 99, (20, 64)).astype(np.int32)
    y = np.zeros_like(x)
    maps = emulator.tensor_map(x, (8, 32)), emulator.tensor_map(emulator.out(y), (8, 32))
    module.launch("add_rows", (2, 3), 32, [*maps, 100])
    want = x + (np.arange(20) % 8 * 100)[:, None]
    np.testing.assert_array_equal(y, want)
    kept = device.array(x)
    both = emulator.tensor_map(kept, (8, 32))
    module.launch("add_rows", (2, 3), 32, [both, both, 100])
    np.testing.assert_array_equal(kept.read(), want)


def test_two_modules_share_a_device(module: Module) -> None:
    device = Emulator()
    x = device.array(np.ones(32, np.float32))
    one, two = device.load(module.ptx[0]), device.load(module.ptx[0])
    emulator.launch(one.kernel("scale<float>"), 1, 32, [x, 2.0, 32])
    two.kernel("scale<float>").launch(1, 32, [x, 5.0, 32])
    assert (x.read() == 10).all()
    with pytest.raises(emulator.DeviceLost, match="another emulated device"):
        device.launch(module.kernel("last"), 1, 1, [x, 0])
    with pytest.raises(emulator.DeviceLost, match="another device"):
        module.launch("last", 1, 1, [x, 0])


def test_time_without_limit(module: Module) -> None:
    x = np.ones(1, np.float32)
    assert module.launch("scale<float>", 1, 1, [x, 2.0, 1], seconds=math.inf).is_clean
    with pytest.raises(emulator.UsageError, match="above 0"):
        module.launch("scale<float>", 1, 1, [x, 2.0, 1], seconds=0)


def test_the_fixture_fails_a_test_whose_kernel_breaks_a_rule(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["g4kv_cli.emulator.fixture"]\n')
    (tmp_path / "test_it.py").write_text(
        "import numpy as np\n"
        f"SOURCE = {SQUARE!r}\n"
        "def test_good(emulated_device):\n"
        "    assert emulated_device.load(SOURCE).launch('square', 1, 8, [np.zeros(8, np.float32)]).is_clean\n"
        "def test_bad(emulated_device):\n"
        "    emulated_device.load(SOURCE).launch('square', 1, 9, [np.zeros(8, np.float32)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "LaunchFailed: global_out_of_bounds" in done.stdout


def test_what_a_kernel_prints_is_in_the_report() -> None:
    kernel = 'extern "C" __global__ void says(int n) { if (threadIdx.x == 1) printf("n is %d\\n", n); }'
    report = emulator.load(kernel).launch("says", 1, 32, [7])
    assert report.printed == "n is 7\n"
    assert report.to_json()["printed"] == "n is 7\n"


def test_the_report_says_which_bits_the_ptx_leaves_open() -> None:
    source = 'extern "C" __global__ void k(float* x) { float p = x[0] * x[1]; x[2] = p + x[3]; x[4] = p - x[3]; }'
    x = np.array([1 + 2.0**-12, 1 - 2.0**-12, 0, -1, 0], np.float32)
    report = emulator.load(source).launch("k", 1, 1, [x])
    assert x[2] == -(2.0**-24)  # one rounding; two would give 0
    assert "whether products fuse with 2 sums" in str(report)
    assert report.to_json()["contracted"] == report.counts.contracted == 2


def test_what_does_no_harm_is_noted_in_the_report() -> None:
    source = """
extern "C" __global__ void mark(int* found, const int* values) { if (values[threadIdx.x] > 0) found[0] = 1; }
"""
    found, values = np.zeros(1, np.int32), np.arange(32, dtype=np.int32)
    report = emulator.load(source).launch("mark", 2, 32, [found, values])
    assert found[0] == 1
    assert report.is_clean
    assert [(note.kind, note.source_line) for note in report.notes] == [("equal_stores", 2)]
    assert [note["kind"] for note in report.to_json()["notes"]] == ["equal_stores"]
    assert "no finding: equal_stores" in str(report)
