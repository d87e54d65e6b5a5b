"""The emulated device as the rest of g4kv sees it: memory, launches, and each fault in one line."""

from __future__ import annotations

import ast
import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from g4kv_cli.compiler import SourceFile, compile_image
from g4kv_cli.device.arguments import Argument, TensorMapShape, by_value, pointer, scalar
from g4kv_cli.device.emulated import faults
from g4kv_cli.device.emulated_device import ARCHS, EmulatedDevice, _ends
from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel
from g4kv_cli.device.validation import check_launch
from g4kv_cli.errors import CompileError, ContractError, DeviceFault, DeviceUnavailable, UsageError
from g4kv_cli.records.run import KernelImage

# Line numbers matter: the tests name them.
SOURCE = SourceFile(
    "probe.cu",
    r"""struct Parameters { unsigned long long out, in; int count, which; };
__device__ void store(float* out, int i, float value) {
  out[i] = value;
}
extern "C" __global__ void scale(const Parameters p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) store(reinterpret_cast<float*>(p.out), i, 2.0f * i);
}
extern "C" __global__ void trap(const Parameters p) {
  if (blockIdx.x == 1 && threadIdx.x == 5) __trap();
}
extern "C" __global__ void copy(const Parameters p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  reinterpret_cast<float*>(p.out)[i] = reinterpret_cast<const float*>(p.in)[i];
}
extern "C" __global__ void collide(const Parameters p) {
  reinterpret_cast<float*>(p.out)[threadIdx.x] = blockIdx.x;
}
extern "C" __global__ void race(const Parameters p) {
  __shared__ float row[64];
  row[threadIdx.x] = threadIdx.x;
  reinterpret_cast<float*>(p.out)[threadIdx.x] = row[63 - threadIdx.x];
}
extern "C" __global__ void dynamic(const Parameters p) {
  extern __shared__ float row[];
  row[threadIdx.x] = threadIdx.x;
  __syncthreads();
  reinterpret_cast<float*>(p.out)[threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void several(float* out, int count, float scale, const Parameters p) {
  if (threadIdx.x < count) out[threadIdx.x] = scale * threadIdx.x + p.which;
}
""",
)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(reason="a test")
    yield opened
    opened.close()


def _load(device: EmulatedDevice, name: str) -> LoadedKernel:
    return device.load(compile_image(SOURCE, arch=device.info.arch, kind="ptx"), name)


def _parameters(out: DeviceArray, given: DeviceArray | None = None, count: int = 0) -> tuple[Argument, ...]:
    return (by_value(struct.pack("<QQii", out.address, given.address if given else 0, count, 0)),)


def _launch(device: EmulatedDevice, name: str, out: DeviceArray, *, grid: int = 1, block: int = 32, **more) -> None:  # type: ignore[no-untyped-def]
    names = {key: more.pop(key) for key in ("given", "count") if key in more}
    device.launch(_load(device, name), Launch((grid, 1, 1), (block, 1, 1), _parameters(out, **names), **more))


def test_what_the_device_says_of_itself(device: EmulatedDevice) -> None:
    assert (device.info.kind, device.info.arch, device.info.reason) == ("emulated", "sm_90", "a test")
    assert device.info.driver == ""
    assert device.image_kind == "ptx"
    assert "arithmetic" not in device.info.name
    assert "arithmetic of sm_90" in EmulatedDevice("sm_80").info.name


# KiB of CUDA's table "technical specifications per compute capability", written out a second time.
@pytest.mark.parametrize(
    ("arch", "shared_kib", "multiprocessors"),
    [("sm_80", 163, 108), ("sm_86", 99, 84), ("sm_89", 99, 142), ("sm_90", 227, 132), ("sm_120", 99, 188)],
)
def test_limits_of_an_arch(arch: str, shared_kib: int, multiprocessors: int) -> None:
    limits = EmulatedDevice(arch).limits
    assert limits.max_shared_bytes_per_block == shared_kib * 1024
    assert limits.multiprocessors == multiprocessors
    assert limits.memory_bytes > 0


def test_an_unknown_arch_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"does not know 'sm_42'; it knows sm_80, .*sm_120"):
        EmulatedDevice("sm_42")


@pytest.mark.parametrize("mode", ["native", "interpreter"])
def test_only_the_ends_of_a_grid_run_where_that_is_asked_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    device = EmulatedDevice()
    out = device.allocate((32 * 1000,), np.float32, "out")
    device.fill(out, 0xFF)
    kernel = _load(device, "scale")
    launch = Launch((1000, 1, 1), (32, 1, 1), _parameters(out, count=32 * 1000), must_write=(out,))
    with device.only_the_ends():
        device.launch(kernel, launch)
    assert device.written_ranges(out).tolist() == [[0, 128], [999 * 128, 1000 * 128]]
    np.testing.assert_array_equal(device.read(out)[-32:], 2.0 * np.arange(999 * 32, 1000 * 32))
    device.launch(kernel, launch)
    np.testing.assert_array_equal(device.read(out), 2.0 * np.arange(32 * 1000))


def test_a_fault_at_one_end_does_not_keep_the_other_from_running(device: EmulatedDevice) -> None:
    given, out = (device.allocate((32 * 1000,), np.float32, label) for label in ("given", "out"))
    with pytest.raises(DeviceFault) as caught, device.only_the_ends():
        _launch(device, "copy", out, grid=1000, given=given)
    assert set(caught.value.kinds) == {"uninitialised_read"}
    assert "block (0, 0, 0)" in caught.value.reports[0]
    assert "block (999, 0, 0)" in caught.value.reports[-1]
    assert device.written_ranges(out).tolist() == [[0, 128], [999 * 128, 1000 * 128]]


@pytest.mark.parametrize(
    ("grid", "blocks"),
    [
        ((1, 1, 1), [0]),
        ((5, 1, 1), [0, 4]),
        ((5, 2, 1), [0, 4, 5, 9]),
        ((5, 1, 2), [0, 4, 5, 9]),
        ((5, 2, 3), [0, 4, 5, 9, 10, 14, 15, 19, 20, 24, 25, 29]),
        ((5, 100, 1), [0, 4, 495, 499]),
        ((5, 100, 2), [0, 4, 495, 499, 500, 504, 995, 999]),
        ((3, 1, 100), [0, 2, 297, 299]),
    ],
)
def test_which_blocks_are_the_ends(grid: tuple[int, int, int], blocks: list[int]) -> None:
    assert sorted(block for run in _ends(grid) for block in run) == blocks


def test_clusters_are_at_the_ends_as_wholes() -> None:
    assert _ends((8, 2, 1), (2, 1, 1)) == [range(2), range(6, 8), range(8, 10), range(14, 16)]
    assert _ends((2, 1, 2), (2, 1, 1)) == [range(2), range(2, 4)]
    assert _ends((4, 4, 1), (2, 2, 1)) == [range(16)]


@pytest.mark.parametrize("arch", [*ARCHS, "sm_90a"])
def test_a_kernel_runs_from_the_ptx_of_every_arch(arch: str) -> None:
    device = EmulatedDevice(arch)
    out = device.allocate((100,), np.float32, "out")
    device.fill(out, 0)
    _launch(device, "scale", out, grid=4, count=70)
    want = np.where(np.arange(100) < 70, 2.0 * np.arange(100), 0.0).astype(np.float32)
    np.testing.assert_array_equal(device.read(out), want)
    device.close()


def test_write_fill_read(device: EmulatedDevice) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    array = device.upload(bits.view(ml_dtypes.bfloat16).reshape(256, 256), "bf16")
    np.testing.assert_array_equal(device.read(array).view(np.uint16).reshape(-1), bits)
    device.fill(array.view((100,), offset_elems=50), 0xA5)
    want = bits.copy()
    want[50:150] = 0xA5A5
    np.testing.assert_array_equal(device.read(array).view(np.uint16).reshape(-1), want)
    assert device.read(device.upload(np.empty((0, 3), np.int32), "empty")).shape == (0, 3)


def test_contents_are_made_in_the_devices_memory_or_copied_there(device: EmulatedDevice) -> None:
    """What every device has, through host memory that is given back, and the emulated one's own way, without."""
    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    made = [device.allocate((3, 4), np.float32, name) for name in ("copied", "in place")]
    _launch(device, "scale", made[1], count=4)  # what kernels stored before is forgotten, as by a write
    copied = Device.compose(device, made[0], lambda values: np.copyto(values, want))
    assert device.compose(made[1], lambda values: np.copyto(values, want)) is None
    np.testing.assert_array_equal(copied, want)
    for array in made:
        np.testing.assert_array_equal(device.read(array), want)
        assert device.written_ranges(array).tolist() == []
    out = device.allocate((12,), np.float32, "out")
    _launch(device, "copy", out, given=made[1], block=12)  # every byte is initialised
    np.testing.assert_array_equal(device.read(out), want.reshape(-1))
    with pytest.raises(ValueError, match="belongs to another device"):
        EmulatedDevice().compose(made[1], lambda values: None)


def test_contents_are_looked_at_where_they_lie_or_copied(device: EmulatedDevice) -> None:
    array = device.upload(np.arange(12, dtype=np.float32).reshape(3, 4), "given")
    copied, itself = Device.inspect(device, array), device.inspect(array)
    for found in (copied, itself):
        np.testing.assert_array_equal(found, np.arange(12, dtype=np.float32).reshape(3, 4))
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 7
    device.fill(array, 0)
    assert copied.any()
    assert not itself.any()
    assert device.read(array).flags.writeable
    assert device.inspect(device.allocate((0, 4), np.float32, "empty")).shape == (0, 4)
    with pytest.raises(ValueError, match="belongs to another device"):
        EmulatedDevice().inspect(array)
    device.free(array)
    with pytest.raises(ValueError, match="was freed"):
        device.inspect(array)


def test_contents_that_could_not_be_made_are_not_initialised(device: EmulatedDevice) -> None:
    given, out = (device.allocate((12,), np.float32, name) for name in ("given", "out"))

    def fail(values: np.ndarray) -> None:
        raise KeyError("half-way")

    with pytest.raises(KeyError):
        device.compose(given, fail)
    with pytest.raises(DeviceFault, match="uninitialised"):
        _launch(device, "copy", out, given=given, block=12)


def test_reading_and_writing_check_what_they_are_given(device: EmulatedDevice) -> None:
    array = device.allocate((4, 4), np.float32, "square")
    with pytest.raises(ValueError, match=r"square holds float32 \[4, 4\], not float64 \[4, 4\]"):
        device.write(array, np.zeros((4, 4)))
    with pytest.raises(ValueError, match="belongs to another device"):
        EmulatedDevice().read(array)
    device.free(array)
    with pytest.raises(ValueError, match="square was freed"):
        device.read(array)


def test_a_sparse_pool_larger_than_the_machine(device: EmulatedDevice) -> None:
    elements = 1 << 34  # 32 GiB of bf16
    pool = device.allocate((elements,), ml_dtypes.bfloat16, "pool", sparse=True)
    far = pool.view((64,), offset_elems=elements - 64).as_type(np.float32, (32,))
    _launch(device, "scale", far, count=32)
    np.testing.assert_array_equal(device.read(far), 2 * np.arange(32, dtype=np.float32))
    assert device.written_ranges(pool).tolist() == [[2 * elements - 128, 2 * elements]]


def test_more_memory_than_the_host_has_is_refused(device: EmulatedDevice) -> None:
    nbytes = device.limits.memory_bytes + 1
    with pytest.raises(DeviceUnavailable, match=rf"the memory for pool: {nbytes} bytes asked, \d+ of \d+ bytes free"):
        device.allocate((nbytes,), np.uint8, "pool")


def test_address_space_does_not_run_out_over_many_cases(device: EmulatedDevice) -> None:
    """Freed addresses are never used again, yet 60 sparse pools of 8 GiB in turn are no problem."""
    for _ in range(60):
        pool = device.allocate((1 << 33,), np.uint8, "pool", sparse=True)
        device.free(pool)


def test_written_ranges_count_from_the_last_write_of_the_same_allocation(device: EmulatedDevice) -> None:
    out, other = (device.allocate((64,), np.float32, name) for name in ("out", "other"))
    assert device.written_ranges(out).tolist() == []
    _launch(device, "scale", out.view((8,), offset_elems=16), count=8)
    _launch(device, "scale", out, count=4)
    _launch(device, "scale", other, count=1)
    assert device.written_ranges(out).tolist() == [[0, 16], [64, 96]]
    assert device.written_ranges(out.view((20,), offset_elems=2)).tolist() == [[0, 8], [56, 80]]
    device.fill(out, 0)
    assert device.written_ranges(out).tolist() == []
    assert device.written_ranges(other).tolist() == [[0, 4]]
    _launch(device, "scale", out, count=2)
    device.write(other, np.zeros(64, np.float32))
    assert device.written_ranges(out).tolist() == [[0, 8]]
    assert device.written_ranges(other).tolist() == []


def test_a_trap_is_one_line_with_source_line_block_and_thread(device: EmulatedDevice) -> None:
    out = device.allocate((64,), np.float32, "out")
    with pytest.raises(DeviceFault) as caught:
        _launch(device, "trap", out, grid=3, block=32)
    assert caught.value.kinds == ("trap",)
    (line,) = caught.value.reports
    assert "\n" not in line
    assert line.startswith("trap: probe.cu:10: block (1, 0, 0) thread (5, 0, 0): ")
    assert "kernel trap" in line
    for action in (lambda: device.read(out), device.synchronize, lambda: _launch(device, "scale", out)):
        with pytest.raises(DeviceFault, match=r"probe\.cu:10"):
            action()
    device.free(out)


def test_a_wild_store_names_label_offset_and_both_lines(device: EmulatedDevice) -> None:
    out = device.allocate((60,), np.float32, "the output")
    with pytest.raises(DeviceFault) as caught:
        _launch(device, "scale", out, grid=2, block=32, count=64)
    assert caught.value.kinds == ("global_out_of_bounds",)
    (line,) = caught.value.reports
    assert line.startswith("global_out_of_bounds: probe.cu:3 (inlined at line 7): ")
    assert "block (1, 0, 0) thread (28, 0, 0)" in line
    assert "'the output'" in line
    assert "4 lanes" in line


@pytest.mark.parametrize(
    ("name", "kind", "line_number"),
    [("copy", "uninitialised_read", 14), ("collide", "block_write_conflict", 17), ("race", "shared_race", 22)],
)
def test_a_finding_that_hardware_would_not_notice(
    device: EmulatedDevice, name: str, kind: str, line_number: int
) -> None:
    out, given = (device.allocate((128,), np.float32, label) for label in ("out", "given"))
    with pytest.raises(DeviceFault) as caught:
        _launch(device, name, out, grid=2, block=64, given=given)
    assert kind in caught.value.kinds
    report = caught.value.reports[caught.value.kinds.index(kind)]
    assert report.startswith(f"{kind}: probe.cu:{line_number}: block ")
    assert device.read(out).shape == (128,)
    device.synchronize()


def test_an_output_that_is_not_written_is_a_finding(device: EmulatedDevice) -> None:
    out = device.allocate((64,), np.float32, "out")
    device.fill(out, 0)
    _launch(device, "scale", out, grid=2, count=64, must_write=(out,))
    with pytest.raises(DeviceFault) as caught:
        _launch(device, "scale", out, grid=2, count=63, must_write=(out,))
    assert caught.value.kinds == ("unwritten_output",)
    assert "out" in caught.value.reports[0]


def test_a_collision_allowed_by_contract_is_none(device: EmulatedDevice) -> None:
    out = device.allocate((64,), np.float32, "out")
    _launch(device, "collide", out, grid=2, block=64, may_collide=(out,))


def test_shared_memory_is_bounded_by_the_arch() -> None:
    small, large = EmulatedDevice("sm_86"), EmulatedDevice("sm_80")
    for device in (small, large):
        out = device.allocate((32,), np.float32, "out")
        _launch(device, "dynamic", out, dynamic_shared_bytes=99 * 1024)
        np.testing.assert_array_equal(device.read(out), np.arange(32, dtype=np.float32)[::-1])
    _launch(large, "dynamic", out, dynamic_shared_bytes=163 * 1024)
    out = small.allocate((32,), np.float32, "out")
    with pytest.raises(ContractError, match="launch_shared"):
        _launch(small, "dynamic", out, dynamic_shared_bytes=99 * 1024 + 1)
    assert small.launch_count == 1


def test_a_parameter_struct_of_the_wrong_size_is_refused(device: EmulatedDevice) -> None:
    with pytest.raises(ContractError, match="got struct of 16 bytes, want 24 bytes"):
        device.launch(_load(device, "scale"), Launch((1, 1, 1), (32, 1, 1), (by_value(bytes(16)),)))
    assert device.launch_count == 0


def test_an_image_is_translated_once(device: EmulatedDevice) -> None:
    assert _load(device, "scale").handle is _load(device, "scale").handle


def test_a_missing_kernel_is_named(device: EmulatedDevice) -> None:
    with pytest.raises(CompileError, match=r"probe\.cu has no kernel nothing; it has .*scale"):
        _load(device, "nothing")


def test_a_cubin_is_refused(device: EmulatedDevice) -> None:
    with pytest.raises(CompileError, match=r"runs PTX, not the cubin of probe\.cu"):
        device.load(compile_image(SOURCE, arch="sm_90", kind="cubin"), "scale")


def test_an_opcode_that_is_not_known_is_named_before_any_launch(device: EmulatedDevice) -> None:
    ptx = compile_image(SOURCE, arch="sm_90", kind="ptx").data
    assert b"mul.wide.s32" in ptx
    odd = KernelImage("ptx", "sm_90", "odd.cu", ptx.replace(b"mul.wide.s32", b"mul.odd.s32"), "0" * 64, "13.5")
    with pytest.raises(
        CompileError, match=r"cannot run scale of odd\.cu: .*'mul\.odd\.s32' \(probe\.cu:\d+ .*PTX line \d+\)"
    ):
        device.load(odd, "scale")


def test_a_closed_device_says_so(device: EmulatedDevice) -> None:
    array = device.allocate((4,), np.float32, "values")
    device.close()
    device.close()
    with pytest.raises(ValueError, match="was freed"):
        device.read(array)
    with pytest.raises(ValueError, match="the device was closed"):
        device.allocate((4,), np.float32, "more")


def test_several_arguments_each_with_its_type(device: EmulatedDevice) -> None:
    out = device.allocate((32,), np.float32, "out")
    arguments = (
        pointer(out.address),
        scalar("i32", 32),
        scalar("f32", 0.5),
        by_value(struct.pack("<QQii", 0, 0, 0, 3)),
    )
    device.launch(_load(device, "several"), Launch((1, 1, 1), (32, 1, 1), arguments, must_write=(out,)))
    np.testing.assert_array_equal(device.read(out), np.arange(32, dtype=np.float32) / 2 + 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda good: good[:3], r"several number of arguments: .*got 3, want 4"),
        (lambda good: (*good[:1], scalar("i64", 32), *good[2:]), r"argument 1: .*i64 of 8 bytes, want 4 bytes"),
        # An integer where the kernel has a float has the right size and the wrong value.
        (lambda good: (*good[:2], scalar("i32", 1), *good[3:]), r"argument 2: .*got i32, want \.f32"),
        (lambda good: (*good[:1], scalar("f32", 32), *good[2:]), r"argument 1: .*got f32, want \.u32"),
        (lambda good: (by_value(bytes(8)), *good[1:]), r"argument 0: .*got struct, want \.u64"),
    ],
)
def test_an_argument_of_another_type_is_refused(device: EmulatedDevice, change, named: str) -> None:  # type: ignore[no-untyped-def]
    out = device.allocate((32,), np.float32, "out")
    good = (pointer(out.address), scalar("i32", 32), scalar("f32", 0.5), by_value(bytes(24)))
    with pytest.raises(ContractError, match=named) as caught:
        device.launch(_load(device, "several"), Launch((1, 1, 1), (32, 1, 1), change(good)))
    assert caught.value.code == "launch_parameters"
    assert device.launch_count == 0


def test_a_number_that_its_kind_cannot_hold_is_no_argument() -> None:
    with pytest.raises(ValueError, match="i32"):
        scalar("i32", 1 << 31)


def test_clusters_need_an_architecture_that_has_them_and_must_fill_the_grid(device: EmulatedDevice) -> None:
    out = device.allocate((32,), np.float32, "out")
    arguments = _parameters(out, count=32)
    device.launch(_load(device, "scale"), Launch((2, 1, 1), (32, 1, 1), arguments, cluster=(2, 1, 1)))
    older = EmulatedDevice("sm_80")
    elsewhere = _parameters(older.allocate((32,), np.float32, "out"), count=32)
    with pytest.raises(ContractError, match="sm_80 has no thread block clusters"):
        older.launch(_load(older, "scale"), Launch((2, 1, 1), (32, 1, 1), elsewhere, cluster=(2, 1, 1)))
    older.close()
    with pytest.raises(ContractError, match="cluster: does not fill the grid"):
        device.launch(_load(device, "scale"), Launch((3, 1, 1), (32, 1, 1), arguments, cluster=(2, 1, 1)))


def test_a_tensor_map_is_an_argument_or_refused(device: EmulatedDevice) -> None:
    array = device.allocate((64, 64), ml_dtypes.bfloat16, "pool")
    made = device.tensor_map(array, TensorMapShape((64, 64), (128,), (64, 16)))
    assert (made.kind, len(made.data)) == ("tensor_map", 128)
    with pytest.raises(ContractError, match="strides"):
        device.tensor_map(array, TensorMapShape((64, 64), (100,), (64, 16)))
    other = EmulatedDevice()
    with pytest.raises(ValueError, match="pool belongs to another device"):
        other.tensor_map(array, TensorMapShape((64, 64), (128,), (64, 16)))
    other.close()


def test_a_device_without_live_memory_starts_over_before_its_addresses_run_out(device: EmulatedDevice) -> None:
    """A call of several arrays must not find the address space used up by the calls before it."""
    for _ in range(40):
        arrays = [
            device.allocate((1 << 34,), np.uint8, name, sparse=True) for name in ("q", "out", "m", "s", "partial_out")
        ]
        for array in arrays:
            device.free(array)


def test_memory_counts_until_it_is_freed_and_sparse_memory_does_not() -> None:
    device = EmulatedDevice()
    device.limits = dataclasses.replace(device.limits, memory_bytes=1000)
    first = device.allocate((600,), np.uint8, "first")
    sparse = device.allocate((5000,), np.uint8, "sparse", sparse=True)
    for _ in range(2):
        with pytest.raises(DeviceUnavailable, match="second: 600 bytes asked, 400 of 1000 bytes free"):
            device.allocate((600,), np.uint8, "second")
        device.free(sparse)
        sparse = device.allocate((5000,), np.uint8, "sparse", sparse=True)
    device.free(first)
    device.allocate((600,), np.uint8, "second")


def test_every_kind_of_fault_is_registered() -> None:
    """A policy of the library names kinds, so each that the device can report stands in faults.py."""
    root = Path(faults.__file__).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
                continue
            method, function = getattr(node.func, "attr", ""), getattr(node.func, "id", "")
            is_report = method in ("add", "add_launch") or "Fault" in (method, function)
            if is_report and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    assert len(found) > 12
    assert found <= faults.FAULT_KINDS, f"add to CHECKED_KINDS or FATAL_KINDS: {found - faults.FAULT_KINDS}"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, ""),
        ({"block": (32, 32, 2)}, "launch_block"),
        ({"block": (32, 0, 1)}, "launch_block"),
        ({"grid": (1, 65536, 1)}, "launch_grid"),
        ({"grid": (4, 0, 1)}, "launch_grid"),
        ({"cluster": (3, 1, 1)}, "launch_cluster"),
        ({"dynamic_shared_bytes": 232449}, "launch_shared"),
        ({"dynamic_shared_bytes": -1}, "launch_shared"),
    ],
)
def test_each_limit_of_a_launch(change: dict[str, tuple[int, int, int]], code: str) -> None:
    launch = dataclasses.replace(Launch((4, 65535, 1), (32, 32, 1), (), 232448), **change)  # type: ignore[arg-type]
    if not code:
        check_launch(EmulatedDevice("sm_90").limits, launch, "a kernel")
        return
    with pytest.raises(ContractError) as caught:
        check_launch(EmulatedDevice("sm_90").limits, launch, "a kernel")
    assert caught.value.code == code
