"""wgmma and bulk tensor copies through PTX against recordings of an NVIDIA H200 (driver 580.159.04)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hopper_helper import ARCH, PRELUDE, bf16_bits, floats, hopper_kernel, wgmma_call
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import DATA, compile_kernel, compile_module

from g4kv_cli.device.emulated import Kernel, Machine

KERNELS: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "kernels_hw.npz"))
PRODUCTS: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "wgmma.npz"))
WARP_PRODUCTS: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "mma.npz"))
RECORD: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "layout.npz"))

# The whole: a warp-specialised kernel with a ring of two stages.


def run_gemm(a: npt.NDArray[Any], b: npt.NDArray[Any], **options: Any) -> npt.NDArray[np.uint32]:
    """C = A B^T by kd.cu for A [m, k], B [n, k] bf16; every byte of C must be stored."""
    machine = Machine()
    (m, k), n = a.shape, len(b)
    maps = [machine.tensor_map(upload(machine, x, name), (k, len(x)), (64, 64)) for x, name in ((a, "A"), (b, "B"))]
    c = machine.allocate(m * n * 4, "C")
    machine.launch(
        compile_module((DATA / "kd.cu").read_text(), ARCH, "kd.cu").kernel("wg"),
        (m // 64, n // 64, 1),
        (256, 1, 1),
        [*(each.pack() for each in maps), pointer(c), int32(k)],
        dynamic_shared_bytes=2 * 16384,
        must_write=[(c, m * n * 4)],
        **options,
    )
    return read_as(machine, c, m * n, np.uint32).reshape(m, n)


def test_gemm_with_wgmma_and_bulk_copies_equals_h200() -> None:
    got = run_gemm(KERNELS["wg_s.in.A"], KERNELS["wg_s.in.B"])
    np.testing.assert_array_equal(got, KERNELS["wg_s.hw.C"])


def test_gemm_of_many_blocks_does_not_depend_on_how_they_are_executed() -> None:
    rng = np.random.default_rng(5)
    a, b = (bf16_bits(rng.normal(size=(size, 320))) for size in (128, 192))
    plain = run_gemm(a, b)
    exact = floats(a) @ floats(b).T
    # A sum of 320 products loses at most 1 part in 2^22 of the largest term (below 25) in each of 21 additions.
    assert np.abs(plain.view(np.float32) - exact).max() < 21 * 25 * 2.0**-22
    for options in ({"reverse_blocks": True}, {"chunk_threads": 1}, {"chunk_threads": 512}):
        np.testing.assert_array_equal(run_gemm(a, b, **options), plain)


# One wgmma instruction, with its operands in every place that was recorded.

OFFSETS = {
    ("a", "K"): "r / 8 * 1024 + r % 8 * 128 + 2 * k",
    ("a", "MN"): "k / 8 * 1024 + k % 8 * 128 + 2 * r",
    ("b", "K"): "r / 8 * 1024 + r % 8 * 128 + 2 * k",
    ("b", "MN"): "r / 64 * 2048 + k / 8 * 1024 + k % 8 * 128 + 2 * (r % 64)",
}
"""Byte offset of row r (of M or N), element k in the tile, before the swizzle."""


def product_kernel(columns: int, a_place: str, b_place: str, form: str = "bf16") -> Kernel:
    """One warpgroup a block: D[64][N] = C + A[64][16] B[16][N], and the four warps' register layout."""
    flags = f"1, 1, 1, {int(a_place == 'MN')}, {int(b_place == 'MN')}"
    if a_place == "registers":
        flags = f"1, 1, 1, {int(b_place == 'MN')}"
    call = wgmma_call(columns, "registers" if a_place == "registers" else "descriptor", form, flags)
    fill_a = "" if a_place == "registers" else f"put(ta, {OFFSETS['a', a_place]}, a[r * 16 + k]);"
    return hopper_kernel(f"""
extern "C" __global__ void __launch_bounds__(128) kernel(const u16* a, const u16* b, const float* c, float* out) {{
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *ta = memory, *tb = memory + 8192;
  const int n = {columns}, lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  a += blockIdx.x * 64 * 16; b += blockIdx.x * 16 * n; c += blockIdx.x * 64 * n; out += blockIdx.x * 64 * n;
  for (int i = threadIdx.x; i < 64 * 16; i += 128) {{ int r = i / 16, k = i % 16; {fill_a} }}
  for (int i = threadIdx.x; i < 16 * n; i += 128) {{
    int k = i / n, r = i % n; put(tb, {OFFSETS["b", b_place]}, b[i]); }}
  proxy_fence();
  __syncthreads();
  float d[n / 2];
  for (int i = 0; i < n / 2; ++i) d[i] = c[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + column + i % 2];
  u32 ra[4];
  for (int i = 0; i < 4; ++i) ra[i] = *(const u32*)(a + (row + i % 2 * 8) * 16 + i / 2 * 8 + column);
  u64 da = descriptor(at(ta), 64, 1024), db = descriptor(at(tb), {2048 if b_place == "MN" else 16}, 1024);
  wgmma_fence();
  {call}
  wgmma_commit();
  wgmma_wait();
  for (int i = 0; i < n / 2; ++i) out[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + column + i % 2] = d[i];
}}
""")


def run_product(kernel: Kernel, a: Any, b: Any, c: Any) -> npt.NDArray[np.uint32]:
    machine = Machine()
    inputs = [upload(machine, values, name) for values, name in ((a, "a"), (b, "b"), (c, "c"))]
    out = machine.allocate(c.nbytes, "out")
    tiles = c.size // (64 * c.shape[-1])
    arguments = [pointer(address) for address in (*inputs, out)]
    launch_on(machine, kernel, *arguments, grid=tiles, block=128, dynamic_shared_bytes=8192 + 32768)
    return read_as(machine, out, c.size, np.uint32).reshape(c.shape)


CLASSES = sorted(name[:-2] for name in PRODUCTS if name.endswith(".D"))
PLACES = [("K", "K"), ("registers", "K"), ("K", "MN"), ("MN", "MN"), ("MN", "K"), ("registers", "MN")]


@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize("columns", [64, 256])
def test_wgmma_equals_h200_wherever_its_operands_lie(columns: int, places: tuple[str, str]) -> None:
    classes = [name for name in CLASSES if name.startswith(f"wg{columns}.")]
    assert len(classes) == {64: 8, 256: 2}[columns]
    a, b, c, want = (np.stack([PRODUCTS[f"{name}.{part}"] for name in classes]) for part in "ABCD")
    got = run_product(product_kernel(columns, *places), a, b, c)
    for number, name in enumerate(classes):
        np.testing.assert_array_equal(got[number], want[number], err_msg=name)


@pytest.mark.parametrize(("form", "suffix"), [("bf16", ""), ("f16", ".f16")])
def test_smallest_wgmma_equals_the_recorded_mma_of_each_warp(form: str, suffix: str) -> None:
    # Recorded too: wgmma and mma.sync give the same bits. Each of the four warps gets the same 16 rows of A.
    a, b, c, want = (WARP_PRODUCTS[f"normal{part}"][:8] for part in (f"{suffix}.A", f"{suffix}.B", ".C", f"{suffix}.D"))
    got = run_product(product_kernel(8, "K", "K", form), np.tile(a, (1, 4, 1)), b, np.tile(c, (1, 4, 1)))
    np.testing.assert_array_equal(got, np.tile(want, (1, 4, 1)))


# Bulk tensor copies.


def copy_kernel(rank: int) -> Kernel:
    """One box to shared memory full of 0xee, then all of shared memory to ``out``."""
    names = ", ".join(f"int c{number}" for number in range(rank))
    places = ", ".join(f"%{number + 2}" for number in range(rank))
    inputs = ", ".join(f'"r"(c{number})' for number in range(rank))
    opcode = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    return hopper_kernel(f"""
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, u32* out, int dst, int nbytes, {names}) {{
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 full;
  for (int i = threadIdx.x; i < 5120; i += 128) ((u32*)memory)[i] = 0xeeeeeeee;
  if (threadIdx.x == 0) {{ init(&full, 1); init_fence(); }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    proxy_fence();
    expect(&full, nbytes);
    asm volatile("{opcode} [%0], [%1, {{{places}}}], [%{rank + 2}];"
        :: "r"(at(memory) + dst), "l"(&map), {inputs}, "r"(at(&full)) : "memory");
  }}
  wait(&full, 0);
  for (int i = threadIdx.x; i < 5120; i += 128) out[i] = ((u32*)memory)[i];
}}
""")


def run_copy(
    source: npt.NDArray[Any], box: tuple[int, ...], swizzle_bytes: int, coordinates: tuple[int, ...], dst: int = 0
) -> npt.NDArray[np.uint32]:
    """Shared memory after one load; ``source`` is [slowest, ..., innermost]."""
    machine = Machine()
    size = source.itemsize
    address = upload(machine, source, "source")
    tensor_map = machine.tensor_map(address, source.shape[::-1], box, size, None, swizzle_bytes)
    out = machine.allocate(20480, "out")
    numbers = [int32(value) for value in (dst, int(np.prod(box)) * size, *coordinates)]
    kernel = copy_kernel(len(box))
    launch_on(machine, kernel, tensor_map.pack(), pointer(out), *numbers, block=128, dynamic_shared_bytes=20480)
    return read_as(machine, out, 5120, np.uint32)


PLANE = np.arange(96 * 200).astype(np.uint16).reshape(96, 200)
CUBE = np.arange(64 * 6 * 40).astype(np.uint16).reshape(40, 6, 64)
SWIZZLES = {3: 128, 2: 64, 1: 32, 0: 0}
LOADS = sorted(name[:-4] for name in RECORD if name.startswith("tma2.") and name.endswith(".par"))


@pytest.mark.parametrize("name", LOADS)
def test_bulk_load_equals_h200(name: str) -> None:
    width, height, swizzle, x, y, dst = (int(value) for value in RECORD[f"{name}.par"])
    got = run_copy(PLANE, (width, height), SWIZZLES[swizzle], (x, y), dst)
    np.testing.assert_array_equal(got, RECORD[name])


def test_all_recorded_loads_were_found() -> None:
    assert len(LOADS) == 13


def test_bulk_load_of_three_dimensions_equals_h200() -> None:
    got = run_copy(CUBE, (64, 2, 8), 128, (0, 3, 35))
    np.testing.assert_array_equal(got, RECORD["tma3.sw128"])


@pytest.mark.parametrize("coordinates", [(8, 0, 1, 2), (0, -1, 1, 3), (16, 2, 0, 1)])
def test_bulk_load_of_four_dimensions_takes_zeros_outside(coordinates: tuple[int, ...]) -> None:
    source = np.arange(1, 4 * 3 * 5 * 24 + 1).astype(np.uint16).reshape(4, 3, 5, 24)
    box = (16, 3, 2, 2)
    got = run_copy(source, box, 0, coordinates).view(np.uint16)
    padded = np.pad(source, 16)  # zeros all around
    x, y, z, w = (value + 16 for value in coordinates)
    want = padded[w : w + 2, z : z + 2, y : y + 3, x : x + 16]
    np.testing.assert_array_equal(got[: want.size], want.reshape(-1))
    assert (got[want.size :] == 0xEEEE).all()


STORE = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, int x, int y) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 4096; i += 128) ((u16*)memory)[i] = i;
  proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) { store2(&map, x, y, memory); commit(); wait_store(); }
}
"""


def test_bulk_store_equals_h200() -> None:
    machine = Machine()
    out = machine.allocate(PLANE.nbytes, "out")
    machine.fill(out, PLANE.nbytes, 0xEE)
    tensor_map = machine.tensor_map(out, (200, 96), (64, 64))
    machine.clear_written()
    kernel = hopper_kernel(STORE)
    arguments = (tensor_map.pack(), int32(152), int32(40))
    report = launch_on(machine, kernel, *arguments, block=128, dynamic_shared_bytes=8192)
    np.testing.assert_array_equal(read_as(machine, out, PLANE.size, np.uint16).reshape(96, 200), RECORD["tmast.sw128"])
    assert report.stored_bytes == 56 * 48 * 2  # rows 40 to 95, columns 152 to 199
    assert machine.written_ranges(out).tolist() == [[(y * 200 + 152) * 2, (y * 200 + 200) * 2] for y in range(40, 96)]


# Recorded: an inner coordinate that is no multiple of 16 bytes is an illegal instruction, in loads and stores alike.


@pytest.mark.parametrize("swizzle_bytes", [0, 128])
@pytest.mark.parametrize(
    ("element_bytes", "x", "works"),
    [
        *((2, x, False) for x in (1, 4, 9, -9)),
        *((2, x, True) for x in (8, 72, 160, -8)),
        (4, 2, False),
        (4, 4, True),
    ],
)
def test_inner_coordinates_must_be_multiples_of_16_bytes(
    element_bytes: int, x: int, works: bool, swizzle_bytes: int
) -> None:
    for kernel, options in ((copy_kernel(2), {}), (hopper_kernel(STORE), {})):
        machine = Machine()
        source = upload(machine, np.zeros((96, 200), f"u{element_bytes}"), "source")
        box = (64 // element_bytes, 32)
        tensor_map = machine.tensor_map(source, (200, 96), box, element_bytes, None, swizzle_bytes)
        out = machine.allocate(20480, "out")
        is_load = len(kernel.parameters) == 6
        arguments = [pointer(out), int32(0), int32(32 * 64)] if is_load else []
        arguments = [tensor_map.pack(), *arguments, int32(x), int32(3)]
        faults = faults_of(machine, kernel, *arguments, block=128, dynamic_shared_bytes=20480, **options)
        assert [fault.kind for fault in faults] == ([] if works else ["illegal_instruction"])
        if faults:
            assert f"inner coordinate {x} is no multiple of 16 bytes" in faults[0].message
            assert (faults[0].block, faults[0].thread, faults[0].is_fatal) == ((0, 0, 0), (0, 0, 0), True)


def test_prelude_needs_no_other_target() -> None:
    # compute_90 has no wgmma: the PTX of these tests must say 90a.
    kernel = compile_kernel(PRELUDE + 'extern "C" __global__ void kernel(int* out) { *out = 1; }', ARCH)
    assert kernel.module.parsed.target == "sm_90a"
    assert not kernel.is_asynchronous
