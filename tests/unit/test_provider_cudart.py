"""The stand-in for libcudart answers for the emulated card at hand, as a launcher that nvcc compiled calls it."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cudart_caller import PTX, Caller, fixtures_of

from g4kv_cli.device.emulated import TensorMap
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.errors import CompileError, ContractError, DeviceFault
from g4kv_cli.providers.cudart.runtime import StandInRuntime, _Call

caller, caller_13 = fixtures_of(Caller)


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_90a", 90), ("sm_120", 120)])
def test_a_functions_attributes_are_of_the_card_that_is_emulated(
    arch: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, runtime = EmulatedDevice(arch), StandInRuntime()
    handle = SimpleNamespace(max_threads=256, shared_bytes=1024, local_bytes=16, cluster=(2, 1, 1))
    monkeypatch.setattr(StandInRuntime, "_kernel", lambda _self, _name, _fatbin: SimpleNamespace(handle=handle))
    runtime._call = _Call(device, lambda _kernel, _launch: None, "libengine.so")
    name, answer = ctypes.create_string_buffer(b"decode"), ctypes.create_string_buffer(b"\xff" * 144, 144)
    values = (ctypes.c_uint64 * 3)(ctypes.addressof(name), 0, ctypes.addressof(answer))
    assert runtime._function_attributes(values) == 0
    # cudaFuncAttributes: shared, constant and local bytes; threads, registers, ptxVersion, binaryVersion; cacheModeCA,
    # most dynamic shared bytes, carve-out; then whether a launch has to be in clusters, and in which.
    shared, constant, local, threads, registers, ptx, binary = struct.unpack("<3Q4i", answer.raw[:40])
    assert (shared, constant, local, threads, registers) == (1024, 0, 16, 256, 0)
    assert (ptx, binary) == (number, number)
    assert struct.unpack("<4i", answer.raw[52:68]) == (1, 2, 1, 1)
    assert answer.raw[68:140] == bytes(72)
    device.close()


CUDA_12 = """
name 256s, uuid 16s, luid 8s, luidDeviceNodeMask I, totalGlobalMem N, sharedMemPerBlock N, regsPerBlock i,
warpSize i, memPitch N, maxThreadsPerBlock i, maxThreadsDim 3i, maxGridSize 3i, clockRate i, totalConstMem N,
major i, minor i, textureAlignment N, texturePitchAlignment N, deviceOverlap i, multiProcessorCount i,
kernelExecTimeoutEnabled i, integrated i, canMapHostMemory i, computeMode i, maxTexture1D i,
maxTexture1DMipmap i, maxTexture1DLinear i, maxTexture2D 2i, maxTexture2DMipmap 2i, maxTexture2DLinear 3i,
maxTexture2DGather 2i, maxTexture3D 3i, maxTexture3DAlt 3i, maxTextureCubemap i, maxTexture1DLayered 2i,
maxTexture2DLayered 3i, maxTextureCubemapLayered 2i, maxSurface1D i, maxSurface2D 2i, maxSurface3D 3i,
maxSurface1DLayered 2i, maxSurface2DLayered 3i, maxSurfaceCubemap i, maxSurfaceCubemapLayered 2i,
surfaceAlignment N, concurrentKernels i, ECCEnabled i, pciBusID i, pciDeviceID i, pciDomainID i, tccDriver i,
asyncEngineCount i, unifiedAddressing i, memoryClockRate i, memoryBusWidth i, l2CacheSize i,
persistingL2CacheMaxSize i, maxThreadsPerMultiProcessor i, streamPrioritiesSupported i,
globalL1CacheSupported i, localL1CacheSupported i, sharedMemPerMultiprocessor N, regsPerMultiprocessor i,
managedMemory i, isMultiGpuBoard i, multiGpuBoardGroupID i, hostNativeAtomicSupported i,
singleToDoublePrecisionPerfRatio i, pageableMemoryAccess i, concurrentManagedAccess i,
computePreemptionSupported i, canUseHostPointerForRegisteredMem i, cooperativeLaunch i,
cooperativeMultiDeviceLaunch i, sharedMemPerBlockOptin N, pageableMemoryAccessUsesHostPageTables i,
directManagedMemAccessFromHost i, maxBlocksPerMultiProcessor i, accessPolicyMaxWindowSize i,
reservedSharedMemPerBlock N, hostRegisterSupported i, sparseCudaArraySupported i,
hostRegisterReadOnlySupported i, timelineSemaphoreInteropSupported i, memoryPoolsSupported i,
gpuDirectRDMASupported i, gpuDirectRDMAFlushWritesOptions I, gpuDirectRDMAWritesOrdering i,
memoryPoolSupportedHandleTypes I, deferredMappingCudaArraySupported i, ipcEventSupported i, clusterLaunch i,
unifiedFunctionPointers i, reserved 63i
"""
"""The fields of CUDA 12.9's cudaDeviceProp in order, in the letters of ``struct``."""


def _properties_of_12(raw: bytes) -> dict[str, Any]:
    found, form = {}, "@"
    for name, letter in (item.split() for item in CUDA_12.replace("\n", " ").split(",")):
        form += letter
        values = struct.unpack_from(form, raw)
        count = int(letter[:-1]) if letter[:-1] and letter[-1] != "s" else 1
        found[name] = values[-1] if count == 1 else list(values[-count:])
    return found


def _properties_of_13(caller: Caller) -> dict[str, Any]:
    """Through the layout that NVIDIA's own Python bindings have of CUDA 13's."""
    made = pytest.importorskip("cuda.bindings.runtime").cudaDeviceProp()
    assert caller.cudaGetDeviceProperties(ctypes.c_void_p(made.getPtr()), 0) == 0
    return {name: getattr(made, name) for name in dir(made) if not name.startswith("_") and name != "getPtr"}


@pytest.mark.parametrize(
    ("arch", "want"),
    [
        ("sm_90", {"major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 * 1024,
                   "sharedMemPerMultiprocessor": 228 * 1024, "maxThreadsPerMultiProcessor": 2048,
                   "maxBlocksPerMultiProcessor": 32, "clusterLaunch": 1}),
        ("sm_89", {"major": 8, "minor": 9, "multiProcessorCount": 142, "sharedMemPerBlockOptin": 99 * 1024,
                   "sharedMemPerMultiprocessor": 100 * 1024, "maxThreadsPerMultiProcessor": 1536,
                   "maxBlocksPerMultiProcessor": 24, "clusterLaunch": 0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("major", [12, 13])
def test_a_cards_properties_lie_where_each_cuda_reads_them(
    tmp_path: Path, major: int, arch: str, want: dict[str, int]
) -> None:
    caller = Caller(tmp_path, major, arch)
    if major == 12:
        raw = ctypes.create_string_buffer(b"\xff" * 1100, 1100)
        assert caller.cudaGetDeviceProperties_v2(raw, 0) == 0
        found = _properties_of_12(raw.raw)
        assert raw.raw[1032:] == b"\xff" * 68
    else:
        found = _properties_of_13(caller)
    everywhere = {"warpSize": 32, "regsPerBlock": 65536, "regsPerMultiprocessor": 65536, "maxThreadsPerBlock": 1024,
                  "maxThreadsDim": [1024, 1024, 64], "maxGridSize": [2**31 - 1, 65535, 65535],
                  "sharedMemPerBlock": 48 * 1024, "reservedSharedMemPerBlock": 1024, "totalConstMem": 65536,
                  "unifiedAddressing": 1, "cooperativeLaunch": 1, "memoryPoolsSupported": 1, "concurrentKernels": 1,
                  "managedMemory": 0, "integrated": 0, "l2CacheSize": 0,
                  "totalGlobalMem": caller.device.limits.memory_bytes}  # fmt: skip
    assert {name: found[name] for name in everywhere | want} == everywhere | want
    assert found["name"].rstrip(b"\0").decode() == caller.device.info.name
    value = ctypes.c_int()
    assert caller.cudaDeviceGetAttribute(ctypes.byref(value), 39, 0) == 0
    assert value.value == want["maxThreadsPerMultiProcessor"]
    caller.device.close()


def test_the_properties_of_another_card_or_of_an_older_cuda_are_refused(caller: Caller) -> None:
    raw = ctypes.create_string_buffer(1100)
    assert caller.cudaGetDeviceProperties_v2(raw, 1) == 101
    assert caller.cudaGetLastError() == 101
    assert (caller.cudaGetDeviceProperties(raw, 0) == 0) == (caller.major == 13)
    refused = "calls cudaGetDeviceProperties, which the stand-in for libcudart has not"
    assert (caller.state.error is None) if caller.major == 13 else (refused in str(caller.state.error))
    version = ctypes.c_int()
    caller.cudaRuntimeGetVersion(ctypes.byref(version))
    assert version.value // 1000 == caller.major


def test_where_a_pointer_lies(caller: Caller) -> None:
    device, host, plain = caller.allocate(64), ctypes.c_void_p(), ctypes.create_string_buffer(64)
    assert caller.cudaMallocHost(ctypes.byref(host), ctypes.c_size_t(64)) == 0
    assert device.value is not None
    assert host.value is not None
    of_plain = ctypes.addressof(plain)
    for at, want in (
        (device.value + 60, (2, 0, device.value + 60, 0)),
        (host.value + 4, (1, 0, 0, host.value + 4)),
        (of_plain, (0, -2, 0, of_plain)),
    ):
        answer = ctypes.create_string_buffer(b"\xee" * 96, 96)
        assert caller.cudaPointerGetAttributes(answer, ctypes.c_void_p(at)) == 0
        assert struct.unpack("<2i2Q", answer.raw[:24]) == want
        more = struct.pack("<8q", -1, *[0] * 7) if caller.major == 13 else b""
        assert answer.raw[24:] == more + b"\xee" * (72 - len(more))


def test_free_memory_is_what_is_not_allocated(caller: Caller) -> None:
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert caller.cudaMemGetInfo(ctypes.byref(unused), ctypes.byref(total)) == 0
    assert unused.value == total.value == caller.device.limits.memory_bytes
    at = caller.allocate(1 << 20)
    caller.cudaMemGetInfo(ctypes.byref(unused), ctypes.byref(total))
    assert total.value - unused.value == 1 << 20
    caller.cudaFree(at)
    caller.cudaMemGetInfo(ctypes.byref(unused), ctypes.byref(total))
    assert unused.value == total.value


def test_rows_with_a_pitch(caller: Caller) -> None:
    def size(n: int) -> ctypes.c_size_t:
        return ctypes.c_size_t(n)

    at, rows = caller.allocate(48), (ctypes.c_uint32 * 6)(*range(1, 7))
    assert caller.cudaMemset2DAsync(at, size(16), 0xFF, size(16), size(3), None) == 0
    assert caller.cudaMemcpy2DAsync_ptsz(at, size(16), rows, size(8), size(8), size(3), 1, None) == 0
    rest = [2**32 - 1] * 2
    assert caller.read(at, 12) == [1, 2, *rest, 3, 4, *rest, 5, 6, *rest]
    assert caller.cudaMemcpy2D(at, size(16), rows, size(4), size(8), size(3), 1) == 12
    assert caller.cudaMemset2D(at, size(4), 0, size(8), size(3)) == 12
    assert caller.read(at, 2) == [1, 2]


def test_pinned_memory_of_the_launcher_is_known_as_such(caller: Caller) -> None:
    block, answer = ctypes.create_string_buffer(64), ctypes.create_string_buffer(96)
    assert caller.cudaHostRegister(block, ctypes.c_size_t(64), 0) == 0
    assert caller.cudaHostRegister(ctypes.byref(block, 8), ctypes.c_size_t(8), 0) == 712
    assert caller.cudaPointerGetAttributes(answer, ctypes.byref(block, 60)) == 0
    assert struct.unpack("<i", answer.raw[:4]) == (1,)
    assert caller.cudaHostUnregister(block) == 0
    assert caller.cudaHostUnregister(block) == 713
    assert caller.cudaPointerGetAttributes(answer, block) == 0
    assert struct.unpack("<i", answer.raw[:4]) == (0,)


def test_a_kernel_that_reaches_pinned_memory_is_not_blamed(caller_13: Caller) -> None:
    """On a GPU it may; a store past the pinned bytes is its own fault."""
    host, at = caller_13.registered(PTX.replace(b"DIRECTIVES", b"")), ctypes.c_void_p()
    assert caller_13.cudaMallocHost(ctypes.byref(at), ctypes.c_size_t(32)) == 0
    assert at.value is not None
    assert caller_13.launch_ex(host, at, None) != 0
    said = "libengine.so: ranks reaches pinned memory of the host, which no kernel of the emulated device does;"
    assert isinstance(caller_13.state.error, CompileError)
    assert str(caller_13.state.error).startswith(said)
    caller_13.state.error = None
    caller_13.device.close()
    caller_13.state.device = caller_13.device = EmulatedDevice()
    assert caller_13.launch_ex(host, ctypes.c_void_p(at.value + 4096), None) != 0
    assert isinstance(caller_13.state.error, DeviceFault)


def test_hints_change_nothing(caller: Caller) -> None:
    host, kernel = caller.registered(PTX.replace(b"DIRECTIVES", b"")), ctypes.c_void_p()
    window = ctypes.create_string_buffer(64)
    assert caller.cudaDeviceSetCacheConfig(2) == caller.cudaDeviceSetLimit(0, ctypes.c_size_t(4096)) == 0
    assert caller.cudaDeviceSetSharedMemConfig(2) == caller.cudaFuncSetSharedMemConfig(host, 2) == 0
    assert caller.cudaProfilerStart() == caller.cudaProfilerStop() == caller.cudaCtxResetPersistingL2Cache() == 0
    assert caller.cudaStreamSetAttribute(None, 1, window) == 0
    assert caller.cudaGetKernel(ctypes.byref(kernel), host) == 0
    assert kernel.value == host.value
    assert caller.cudaGetKernel(ctypes.byref(kernel), window) == 98
    assert caller.cudaStreamSetAttribute(None, 4, window) != 0
    assert "calls cudaStreamSetAttribute, which" in str(caller.state.error)


def test_an_attribute_of_the_card_that_is_not_known_is_named(caller_13: Caller) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    assert caller_13.cudaDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 38, 0) != 0
    said = "for device attribute 38 (cudaDevAttrL2CacheSize), which the stand-in for libcudart has not; run it"
    assert said in str(caller_13.state.error)


def test_streams_have_one_priority_and_host_functions_run(caller: Caller) -> None:
    least, greatest = ctypes.c_int(7), ctypes.c_int(7)
    seen: list[Any] = []
    assert caller.cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)) == 0
    assert (least.value, greatest.value) == (0, 0)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    assert caller.cudaLaunchHostFunc_ptsz(None, function, ctypes.c_void_p(42)) == 0
    assert seen == [42]
    stream = ctypes.c_void_p(2)
    told = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda *given: seen.append(given))
    assert caller.cudaStreamAddCallback(stream, told, ctypes.c_void_p(7), 0) == 0
    assert seen[1:] == [(2, 0, 7)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "cudaEventElapsedTime",
            "which the stand-in for libcudart has not: what a GPU takes cannot be told without one",
        ),
        ("cudaEventElapsedTime_v2", "what a GPU takes cannot be told"),
        ("cudaOccupancyMaxActiveClusters", "how a chip groups its multiprocessors"),
        ("cudaGraphAddKernelNode", "which the stand-in for libcudart has not; run it on a GPU"),
        ("cudaThreadSynchronize", "which the stand-in for libcudart has not; run it on a GPU"),
    ],
)
def test_what_is_not_there_is_named(caller: Caller, name: str, why: str) -> None:
    assert getattr(caller, name)() != 0
    assert isinstance(caller.state.error, CompileError)
    assert str(caller.state.error).startswith(f"libengine.so calls {name}, ")
    assert why in str(caller.state.error)


def _in_twos(size: int) -> list[int]:
    """What ``ranks`` stores: each block's number in its cluster, and the blocks of that."""
    return [value for block in range(4) for value in (block % size, size)]


@pytest.mark.parametrize(
    ("compiled_for", "asked", "size"),
    [("", (2, 1, 1), 2), ("", (4, 1, 1), 4), ("", None, 1),
     (".explicitcluster .reqnctapercluster 2, 1, 1", None, 2), (".reqnctapercluster 2", (2, 1, 1), 2)],
)  # fmt: skip
def test_a_launch_in_clusters(caller: Caller, compiled_for: str, asked: tuple[int, int, int] | None, size: int) -> None:
    host, out = caller.registered(PTX.replace(b"DIRECTIVES", compiled_for.encode())), caller.allocate(32)
    assert caller.launch_ex(host, out, asked) == 0, caller.state.error
    assert caller.read(out, 8) == _in_twos(size)
    assert caller.launches[0].cluster == (asked or (1, 1, 1))


ALL_BLOCKS = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 out) {
  .reg .b32 %r<4>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %envreg1;
  mov.u32 %r2, %envreg2;
  st.global.v2.u32 [%rd1], {%r1, %r2};
  ret;
}
"""
"""Stores where the memory of the grid's barrier is: nowhere, if the launch is not cooperative."""


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_a_cooperative_launch_has_a_barrier_of_its_grid(caller: Caller, is_cooperative: bool) -> None:
    host, out = caller.registered(ALL_BLOCKS), caller.allocate(8)
    launch = caller["cudaLaunchCooperativeKernel" if is_cooperative else "cudaLaunchKernel"]
    one, none = (ctypes.c_uint32 * 3)(1, 1, 1), ctypes.c_void_p()
    launch.argtypes = [ctypes.c_void_p, _Extent, _Extent, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    assert launch(host, _Extent(*one), _Extent(*one), pointers, 0, none) == 0, caller.state.error
    assert any(caller.read(out, 2)) is is_cooperative
    assert caller.launches[0].cooperative is is_cooperative


class _Extent(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))


def test_other_clusters_than_a_kernel_was_compiled_for_are_refused(caller_13: Caller) -> None:
    host = caller_13.registered(PTX.replace(b"DIRECTIVES", b".reqnctapercluster 2, 1, 1"))
    assert caller_13.launch_ex(host, caller_13.allocate(32), (4, 1, 1)) != 0
    assert isinstance(caller_13.state.error, ContractError)
    assert "the kernel was compiled for (2, 1, 1)" in str(caller_13.state.error)


def test_a_cluster_set_as_a_functions_attribute_is_refused_and_not_forgotten(caller_13: Caller) -> None:
    host = caller_13.registered(PTX.replace(b"DIRECTIVES", b""))
    assert caller_13.cudaFuncSetAttribute(host, 14, 1) == 0  # larger clusters may be asked for
    assert caller_13.cudaFuncSetAttribute(host, 11, 2) != 0
    assert "sets the cluster of ranks by function attribute 11" in str(caller_13.state.error)


@pytest.mark.parametrize(
    ("name", "before", "outputs", "behind"),
    [
        ("cudaMemGetInfo", (), 2, ()),
        ("cudaMalloc", (), 1, (64,)),
        ("cudaMallocHost", (), 1, (64,)),
        ("cudaGetDevice", (), 1, ()),
        ("cudaGetDeviceCount", (), 1, ()),
        ("cudaDeviceGetAttribute", (), 1, (10, 0)),
        ("cudaRuntimeGetVersion", (), 1, ()),
        ("cudaDriverGetVersion", (), 1, ()),
        ("cudaStreamCreate", (), 1, ()),
        ("cudaEventCreateWithFlags", (), 1, (2,)),
        ("cudaStreamIsCapturing", (0,), 1, ()),
        ("cudaStreamGetPriority", (0,), 1, ()),
        ("cudaGetDriverEntryPoint", (b"cuTensorMapEncodeTiled",), 1, (0, None)),
    ],
)
def test_a_result_without_a_place_is_an_invalid_value(
    caller_13: Caller, name: str, before: tuple[Any, ...], outputs: int, behind: tuple[Any, ...]
) -> None:
    """As on a GPU: each of the places null in turn, and the error is the last one."""
    for missing in range(outputs):
        places = [None if at == missing else ctypes.byref(ctypes.c_uint64()) for at in range(outputs)]
        assert caller_13[name](*before, *places, *behind) == 1
        assert caller_13.cudaGetLastError() == 1
    places = [ctypes.byref(ctypes.c_uint64()) for _ in range(outputs)]
    assert caller_13[name](*before, *places, *behind) == 0, "with places for its results"


class _Map:
    """cuTensorMapEncodeTiled of a launcher: [128 rows][64] bf16, boxes of 16 rows, as it is or changed."""

    def __init__(self, caller: Caller) -> None:
        found = ctypes.c_void_p()
        assert caller.cudaGetDriverEntryPoint(b"cuTensorMapEncodeTiled", ctypes.byref(found), 0, None) == 0
        whole, word = ctypes.c_uint64, ctypes.c_uint32
        kinds = [ctypes.c_void_p, ctypes.c_int, word, ctypes.c_void_p, whole * 2, whole * 1, word * 2, word * 2]
        self._encode = ctypes.CFUNCTYPE(ctypes.c_int, *kinds, *[ctypes.c_int] * 4)(found.value or 0)
        self._tensor = caller.allocate(128 * 64 * 2)
        self.made = ctypes.create_string_buffer(128)

    def encode(self, *, kind: int = 9, stride: int = 128, step: int = 1, interleave: int = 0, swizzle: int = 3,
               fill: int = 0, offset: int = 0) -> int:  # fmt: skip
        extents, strides = (ctypes.c_uint64 * 2)(64, 128), (ctypes.c_uint64 * 1)(stride)
        box, steps = (ctypes.c_uint32 * 2)(64, 16), (ctypes.c_uint32 * 2)(step, 1)
        at = ctypes.c_void_p((self._tensor.value or 0) + offset)
        return int(self._encode(self.made, kind, 2, at, extents, strides, box, steps, interleave, swizzle, 2, fill))

    @property
    def want(self) -> TensorMap:
        return TensorMap(self._tensor.value or 0, 2, (64, 128), (128,), (64, 16), 128, "bf16")


def test_tensor_maps_come_through_the_drivers_entry_point(caller: Caller) -> None:
    """As kernels of the emulated device take them: what cuTensorMapEncodeTiled was given is in it."""
    tried = _Map(caller)
    assert tried.encode() == 0, caller.state.error
    assert TensorMap.unpack(tried.made.raw) == tried.want


@pytest.mark.parametrize(("changed", "says"), [({"stride": 100}, "strides (100,)"), ({"offset": 2}, "address")])
def test_a_tensor_map_that_the_driver_refuses_is_an_invalid_value_with_a_reason(
    caller_13: Caller, changed: dict[str, int], says: str
) -> None:
    assert _Map(caller_13).encode(**changed) == 1
    assert caller_13.state.error is None, "the launcher may try another"
    assert says in caller_13.state.why


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kind": 11}, "data type 11"),
        ({"interleave": 1}, "interleave 1"),
        ({"swizzle": 5}, "swizzle 5"),
        ({"fill": 1}, "out-of-bounds fill 1"),
        ({"step": 2}, "element strides"),
    ],
)
def test_a_tensor_map_that_the_stand_in_has_not_is_named(caller_13: Caller, changed: dict[str, int], says: str) -> None:
    assert _Map(caller_13).encode(**changed) != 0
    assert isinstance(caller_13.state.error, CompileError)
    assert f"makes a tensor map with {says}, which the stand-in" in str(caller_13.state.error)


VARIABLES = b"""
.version 8.0
.target sm_90
.address_size 64
.const .align 4 .b8 steps[8] = {1, 0, 0, 0, 2, 0, 0, 0};
.visible .entry ranks(.param .u64 out) {
  .reg .b32 %r<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  ld.const.u32 %r1, [steps];
  ld.const.u32 %r2, [steps+4];
  st.global.v2.u32 [%rd1], {%r1, %r2};
  ret;
}
"""


def test_variables_of_a_library_are_read_and_written(caller_13: Caller) -> None:
    """They have their first values, keep what the host writes to a part of them, and are kept when memory is not."""
    variable, host, out = (
        caller_13.registered(VARIABLES, b"steps"),
        caller_13.registered(VARIABLES),
        caller_13.allocate(8),
    )
    size, at, found = ctypes.c_size_t(), ctypes.c_void_p(), (ctypes.c_uint32 * 2)()
    assert caller_13.cudaGetSymbolSize(ctypes.byref(size), variable) == 0, caller_13.state.error
    assert size.value == 8
    assert caller_13.cudaMemcpyFromSymbol(found, variable, ctypes.c_size_t(8), ctypes.c_size_t(0), 2) == 0
    assert list(found) == [1, 2]
    four, seven = ctypes.c_size_t(4), ctypes.byref(ctypes.c_uint32(7))
    assert caller_13.cudaMemcpyToSymbol(variable, seven, four, four, 1) == 0
    assert caller_13.launch_ex(host, out, None) == 0, caller_13.state.error
    assert caller_13.read(out, 2) == [1, 7]
    assert caller_13.cudaGetSymbolAddress(ctypes.byref(at), variable) == 0
    assert caller_13.read(at, 2) == [1, 7]
    assert caller_13.device.holds_host_state
    assert caller_13.cudaMemcpyToSymbol(variable, seven, four, ctypes.c_size_t(5), 1) == 1, "past its end"
    assert caller_13.cudaGetSymbolSize(ctypes.byref(size), host) == 13, "a kernel is no variable"


def test_a_variable_that_the_ptx_has_not_is_named(caller_13: Caller) -> None:
    size = ctypes.c_size_t()
    assert caller_13.cudaGetSymbolSize(ctypes.byref(size), caller_13.registered(VARIABLES, b"other")) != 0
    assert "asks for the variable other, which its PTX has not" in str(caller_13.state.error)
