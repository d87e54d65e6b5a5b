"""Tensor maps that kernels change (tensormap.replace): as grouped GEMMs do it, which give each block a map of its own
that begins as a copy of a parameter, and as descriptors made on the device, which begin as zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_helper import hopper_kernel
from launch_helper import faults_of, pointer, read_as, upload

from g4kv_cli.device.emulated import Kernel, Machine, UnsupportedOpcode
from g4kv_cli.device.emulated.memory.tensor_map import ELEMENTS, TensorMap

WRAPPERS = """
__device__ void at_address(u32 map, const void* p) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
      :: "r"(map), "l"(p) : "memory"); }
__device__ void publish(TensorMap* to, u32 from) {
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
      :: "l"(to), "r"(from) : "memory"); }
__device__ void acquire(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory"); }
"""
GROUPED = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, TensorMap* maps, const u16* data, u16* out) {
  __shared__ __align__(128) TensorMap mine;
  __shared__ __align__(1024) u16 tile[16 * 32];
  __shared__ u64 bar;
  const u32 t = threadIdx.x, group = blockIdx.x, width = 40 + 8 * group;
  if (t < 32) ((u32*)&mine)[t] = ((const u32*)&map)[t];
  if (t == 0) { init(&bar, 1); init_fence(); }
  __syncthreads();
  if (t < 32) {
    if (t == 0) {
      at_address(at(&mine), data + 2048 * group);
      asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;"
          :: "r"(at(&mine)), "r"(width) : "memory");
      asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;"
          :: "r"(at(&mine)), "r"(9 + group) : "memory");
      asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
          :: "r"(at(&mine)), "l"(2ull * width) : "memory");
    }
    __syncwarp();
    publish(maps + group, at(&mine));
  }
  __syncthreads();
  if (t == 0) { acquire(maps + group); expect(&bar, 1024); load2(tile, maps + group, 24, 2, &bar); }
  wait(&bar, 0);
  for (u32 k = t; k < 512; k += 64) out[512 * group + k] = tile[k];
}
"""
MADE = """
extern "C" __global__ void kernel(TensorMap* map, const u16* data, u16* out) {
  __shared__ __align__(1024) u16 tile[8 * 64];
  __shared__ u64 bar;
  const u32 t = threadIdx.x;
  if (t == 0) { init(&bar, 1); init_fence(); }
  __syncthreads();
  if (t == 0) {
#define MAKE(words, letter, value) \\
    asm volatile("tensormap.replace.tile." words ";" :: "l"(map), letter(value) : "memory");
    MAKE("global_address.global.b1024.b64 [%0], %1", "l", data)
    MAKE("rank.global.b1024.b32 [%0], %1", "r", 1)
    MAKE("box_dim.global.b1024.b32 [%0], 0, %1", "r", 64)
    MAKE("box_dim.b1024.b32 [%0], 1, %1", "r", 8)
    MAKE("global_dim.global.b1024.b32 [%0], 0, %1", "r", 72)
    MAKE("global_dim.global.b1024.b32 [%0], 1, %1", "r", 24)
    MAKE("global_stride.global.b1024.b64 [%0], 0, %1", "l", 160ull)
    MAKE("element_stride.global.b1024.b32 [%0], 0, %1", "r", STEP)
    MAKE("element_stride.global.b1024.b32 [%0], 1, %1", "r", 1)
    MAKE("elemtype.global.b1024.b32 [%0], 6", "r", 0)
    MAKE("interleave_layout.global.b1024.b32 [%0], 0", "r", 0)
    MAKE("swizzle_mode.global.b1024.b32 [%0], 3", "r", 0)
    MAKE("fill_mode.global.b1024.b32 [%0], 0", "r", 0)
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
    acquire(map);
    expect(&bar, 1024); load2(tile, map, 16, 3, &bar);
  }
  wait(&bar, 0);
  for (u32 k = t; k < 512; k += 64) out[k] = tile[k];
}
"""
GROUPS = 4


def kernel_of(source: str) -> Kernel:
    kernel = hopper_kernel(WRAPPERS + source)
    assert kernel.not_native_for == ()
    return kernel


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    return Machine()


def data_on(machine: Machine) -> tuple[int, Any]:
    data = np.random.default_rng(5).integers(1, 1 << 16, 2048 * GROUPS).astype(np.uint16)
    return upload(machine, data, "data"), data


def test_each_block_has_a_map_of_its_own(machine: Machine) -> None:
    data, numbers = data_on(machine)
    template = machine.tensor_map(data, (64, 32), (32, 16), 2, None, 0)
    maps, out = machine.allocate(128 * GROUPS, "maps"), machine.allocate(1024 * GROUPS, "out")
    arguments = template.pack(), pointer(maps), pointer(data), pointer(out)
    assert faults_of(machine, kernel_of(GROUPED), *arguments, grid=GROUPS, block=64) == []
    assert machine.counts.compared == 1
    for group in range(GROUPS):
        width, rows = 40 + 8 * group, 9 + group
        tensor = numbers[2048 * group :][: width * rows].reshape(rows, width)
        want = np.zeros((16, 32), np.uint16)
        part = tensor[2:18, 24:56]
        want[: part.shape[0], : part.shape[1]] = part
        got = read_as(machine, out + 1024 * group, 512, np.uint16).reshape(16, 32)
        np.testing.assert_array_equal(got, want)


def test_zeros_become_a_map(machine: Machine) -> None:
    data, numbers = data_on(machine)
    space, out = upload(machine, np.zeros(128, np.uint8), "map"), machine.allocate(1024, "out")
    kernel = kernel_of(MADE.replace("STEP", "1"))
    assert faults_of(machine, kernel, pointer(space), pointer(data), pointer(out), block=64) == []
    assert machine.counts.compared == 1
    found = TensorMap.unpack(machine.read(space, 128).tobytes())
    assert found == TensorMap(data, 2, (72, 24), (160,), (64, 8), 128, "f16")
    rows = np.zeros((8, 64), np.uint16)
    rows[:, :56] = numbers[: 80 * 24].reshape(24, 80)[3:11, 16:72]
    chunks = rows.reshape(8, 8, 8)
    want = np.stack([chunk[np.arange(8) ^ row] for row, chunk in enumerate(chunks)])
    np.testing.assert_array_equal(read_as(machine, out, 512, np.uint16), want.reshape(-1))


def test_what_is_no_map_afterwards_is_a_fault(machine: Machine) -> None:
    data, _ = data_on(machine)
    template = machine.tensor_map(data, (64, 32), (32, 16), 2, None, 0)
    maps, out = machine.allocate(128 * GROUPS, "maps"), machine.allocate(1024 * GROUPS, "out")
    kernel = kernel_of(GROUPED.replace("data + 2048 * group);", "(const char*)data + 2);"))
    faults = faults_of(machine, kernel, template.pack(), pointer(maps), pointer(data), pointer(out), grid=2, block=64)
    assert [fault.kind for fault in faults] == ["illegal_instruction"]
    assert "no multiple of 16" in faults[0].message


@pytest.mark.parametrize("field", ["interleave_layout", "fill_mode"])
def test_values_without_a_model_are_refused(field: str) -> None:
    source = MADE.replace("STEP", "1").replace(f"{field}.global.b1024.b32 [%0], 0", f"{field}.global.b1024.b32 [%0], 1")
    with pytest.raises(UnsupportedOpcode, match=f"{field}.*one value here"):
        hopper_kernel(WRAPPERS + source)


def test_elements_left_out_are_refused(machine: Machine) -> None:
    data, _ = data_on(machine)
    space, out = upload(machine, np.zeros(128, np.uint8), "map"), machine.allocate(1024, "out")
    with pytest.raises(UnsupportedOpcode, match="a stride of 2 elements"):
        faults_of(machine, kernel_of(MADE.replace("STEP", "2")), pointer(space), pointer(data), pointer(out), block=64)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_a_map_keeps_the_type_of_its_elements(kind: str) -> None:
    made = TensorMap(4096, ELEMENTS[kind], (64, 3), (512,), (16, 2), 0, kind)
    assert TensorMap.unpack(made.pack()) == made
