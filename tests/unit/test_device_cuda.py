"""The CUDA device's own logic, on a stand-in for the driver that keeps device memory in host memory.

What the real driver does is tested in tests/gpu.
"""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from g4kv_cli.bench.samples import sample_replays
from g4kv_cli.device import cuda as cuda_module
from g4kv_cli.device import cuda_driver
from g4kv_cli.device.arguments import by_value
from g4kv_cli.device.cuda import CudaDevice
from g4kv_cli.device.interface import Launch
from g4kv_cli.errors import CaseTimeout, CompileError, ContractError, DeviceFault, DeviceUnavailable
from g4kv_cli.records.run import KernelImage

FREE_BYTES = 1 << 20
IMAGE = KernelImage("cubin", "sm_90a", "probe.cu", b"\x7fELF probe", "0" * 64, "13.0")


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719


class StandInDriver:
    """The calls that CudaDevice makes, with the driver's return conventions."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14
    )

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[tuple[int, ...], int, bytes]] = []
        self.opt_ins: list[int] = []
        self.allowed: list[int] = []
        self.configurations: list[SimpleNamespace] = []
        self.next_result = Result.CUDA_SUCCESS
        self.capturing: list[str] | None = None
        self.graph_launches = 0
        self.destroyed: list[str] = []
        self.ended_captures = 0
        self.queries = 0
        self.is_endless = False

    def CUfunction(self, handle: int) -> int:
        return handle

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, ordinal

    def cuDriverGetVersion(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 13010

    def cuMemGetInfo(self) -> tuple[Result, int, int]:
        return Result.CUDA_SUCCESS, FREE_BYTES, 2 * FREE_BYTES

    def cuMemAlloc(self, nbytes: int) -> tuple[Result, int | None]:
        if nbytes < 1:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        if nbytes > FREE_BYTES:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        block = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(block)] = block
        return Result.CUDA_SUCCESS, ctypes.addressof(block)

    def cuMemFree(self, address: int) -> tuple[Result]:
        assert not (self.is_endless and self.launches), "this call does not come back from an endless kernel"
        del self.memory[address]
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple[Result]:
        ctypes.memmove(to, source, nbytes)
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple[Result]:
        assert not (self.is_endless and self.launches), "into pageable memory this call waits for the copy"
        return self.cuMemcpyHtoDAsync(to, source, nbytes, stream)

    def cuMemsetD8Async(self, to: int, byte: int, nbytes: int, stream: int) -> tuple[Result]:
        ctypes.memset(to, byte, nbytes)
        return (Result.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Result]:
        assert not (self.is_endless and self.launches), "this call does not come back from an endless kernel"
        return (self.next_result,)

    def cuCtxSynchronize(self) -> tuple[Result]:
        return (self.next_result,)

    def cuStreamQuery(self, stream: int) -> tuple[Result]:
        self.queries += 1
        is_busy = bool(self.launches) and (self.is_endless or self.queries < 3)
        return (Result.CUDA_ERROR_NOT_READY if is_busy else Result.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function: int, *rest: Any) -> tuple[Result]:
        *shape, shared, _stream, parameters, extra = rest
        assert extra == 0
        data = b""
        if parameters:
            pointer = ctypes.c_void_p.from_address(parameters).value
            assert pointer is not None
            data = ctypes.string_at(pointer, 12)
        self.launches.append((tuple(shape), shared, data))
        return (Result.CUDA_SUCCESS,)

    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2,
    )

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(id=None, value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def CUlaunchConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def CUstream(self, handle: int) -> int:
        return handle

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: int, parameters: int, extra: int) -> tuple[Result]:
        self.configurations.append(config)
        shape = (
            config.gridDimX,
            config.gridDimY,
            config.gridDimZ,
            config.blockDimX,
            config.blockDimY,
            config.blockDimZ,
        )
        return self.cuLaunchKernel(function, *shape, config.sharedMemBytes, config.hStream, parameters, extra)

    def cuKernelGetParamInfo(self, kernel: int, index: int) -> tuple[Result, int, int]:
        assert (kernel, index) == (5, 0), "an index past the last is an API error, which compute-sanitizer reports"
        return Result.CUDA_SUCCESS, 0, 12

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> tuple[Result]:
        assert attribute in (8, 14)
        (self.opt_ins if attribute == 8 else self.allowed).append(value)
        return (Result.CUDA_SUCCESS,)

    CUjit_option = SimpleNamespace(CU_JIT_ERROR_LOG_BUFFER=5, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES=6)

    def cuModuleLoadDataEx(
        self, image: bytes, count: int, options: list[int], values: tuple[bytes, int]
    ) -> tuple[Result, str | None]:
        assert (count, options, image[-1:]) == (2, [5, 6], b"\0")
        if b"odd" in image:
            raise TypeError("expected bytes, int found")
        if b"good" in image:
            return Result.CUDA_SUCCESS, "a module"
        ctypes.memmove(values[0], b"\nptxas line 7; error: no such label\nand more\0", min(values[1], 45))
        return Result.CUDA_ERROR_INVALID_VALUE, None

    def cuModuleUnload(self, module: str) -> tuple[Result]:
        self.destroyed.append(module)
        return (Result.CUDA_SUCCESS,)

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"in the driver's words"

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Result, str]:
        self.ended_captures += 1
        return Result.CUDA_SUCCESS, "graph"

    def cuGraphInstantiate(self, graph: str, flags: int) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, "executable"

    def cuGraphLaunch(self, executable: str, stream: int) -> tuple[Result]:
        self.graph_launches += 1
        return (Result.CUDA_SUCCESS,)

    def cuGraphDestroy(self, graph: str) -> tuple[Result]:
        self.destroyed.append(graph)
        return (Result.CUDA_SUCCESS,)

    cuGraphExecDestroy = cuGraphDestroy

    def cuEventCreate(self, flags: int) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, "event"

    def cuEventRecord(self, event: str, stream: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    cuEventDestroy = cuGraphDestroy

    def cuEventSynchronize(self, event: str) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, begin: str, end: str) -> tuple[Result, float]:
        return Result.CUDA_SUCCESS, 2.5


class StandInCore:
    """cuda.core.Device as far as CudaDevice uses it."""

    compute_capability = (9, 0)
    name = "NVIDIA Stand-in"
    properties = SimpleNamespace(
        max_threads_per_block=1024,
        max_grid_dim_x=2**31 - 1,
        max_grid_dim_y=65535,
        max_grid_dim_z=65535,
        max_shared_memory_per_block_optin=232448,
        multiprocessor_count=132,
    )

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    @classmethod
    def get_all_devices(cls) -> tuple[StandInCore, ...]:
        return (cls(0), cls(1))

    def set_current(self) -> None:
        pass

    def create_stream(self) -> SimpleNamespace:
        return SimpleNamespace(handle=77, close=lambda: None)


class StandInObjectCode:
    loaded: list[bytes] = []  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def from_cubin(cls, data: bytes, *, name: str = "") -> StandInObjectCode:
        cls.loaded.append(data)
        return cls(data)

    def get_kernel(self, name: str) -> SimpleNamespace:
        if name == "missing":
            raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found\nmore")
        return SimpleNamespace(handle=5)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    import cuda.bindings
    import cuda.core

    stand_in = StandInDriver()
    StandInObjectCode.loaded = []
    monkeypatch.setattr(cuda.bindings, "driver", stand_in, raising=False)
    monkeypatch.setattr(cuda.core, "Device", StandInCore)
    monkeypatch.setattr(cuda.core, "ObjectCode", StandInObjectCode)
    return stand_in


@pytest.fixture
def device(driver: StandInDriver) -> CudaDevice:
    return CudaDevice(1, "because")


def test_what_the_device_says_of_itself(device: CudaDevice) -> None:
    assert (device.info.kind, device.info.name, device.info.arch) == ("cuda", "NVIDIA Stand-in", "sm_90a")
    assert device.info.reason == "because"
    assert "CUDA 13.1" in device.info.driver
    assert device.image_kind == "cubin"
    assert device.limits.max_shared_bytes_per_block == 232448
    assert device.limits.max_grid == (2**31 - 1, 65535, 65535)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120")],
)
def test_the_arch_of_a_compute_capability(capability: tuple[int, int], arch: str) -> None:
    assert cuda_driver.arch_of(*capability) == arch


def test_an_old_gpu_is_refused_in_words(driver: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInCore, "compute_capability", (7, 5))
    with pytest.raises(DeviceUnavailable, match=r"compute capability 7\.5; the kernels need 8\.0"):
        CudaDevice(0)


def test_a_gpu_that_is_not_there(driver: StandInDriver) -> None:
    with pytest.raises(DeviceUnavailable, match=r"there is no GPU 2; the CUDA driver shows 2 \(0 to 1\)"):
        CudaDevice(2)


def test_write_fill_read(device: CudaDevice) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    array = device.upload(values, "values")
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(device.read(array), values)
    device.fill(array.view((4,), offset_elems=4), 0xFF)
    raw = device.read(array).view(np.uint16)
    assert (raw[1] == 0xFFFF).all()
    np.testing.assert_array_equal(raw[[0, 2]], values.view(np.uint16)[[0, 2]])


def test_reading_and_writing_check_what_they_are_given(device: CudaDevice) -> None:
    array = device.allocate((4, 4), np.float32, "square")
    with pytest.raises(ValueError, match=r"square holds float32 \[4, 4\], not float64 \[4, 4\]"):
        device.write(array, np.zeros((4, 4)))
    with pytest.raises(ValueError, match="cannot read square: its strides"):
        device.read(array.view((2, 2), strides_elems=(4, 1)))
    with pytest.raises(ValueError, match="bytes 32 to 96 are not inside its 64 bytes"):
        device.fill(array.view((4, 4), offset_elems=8), 0)
    device.free(array)
    with pytest.raises(ValueError, match="square was freed"):
        device.read(array)


def test_an_empty_array_has_an_address_and_copies_nothing(device: CudaDevice) -> None:
    array = device.upload(np.empty((0, 3), np.int32), "empty")
    assert array.address != 0
    assert device.read(array).shape == (0, 3)


def test_out_of_memory_says_how_much_was_asked_and_is_free(device: CudaDevice) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        device.allocate((FREE_BYTES,), np.float32, "the pool")
    assert f"the pool: {4 * FREE_BYTES} bytes asked, {FREE_BYTES} of {2 * FREE_BYTES} bytes free" in str(caught.value)


def test_free_and_close_return_all_memory(device: CudaDevice, driver: StandInDriver) -> None:
    arrays = [device.allocate((8,), np.int32, f"array {index}") for index in range(3)]
    device.free(arrays[1])
    assert len(driver.memory) == 2
    device.close()
    device.close()
    assert driver.memory == {}


def test_launch_passes_the_packed_struct_by_value(device: CudaDevice, driver: StandInDriver) -> None:
    kernel = device.load(IMAGE, "probe")
    device.launch(kernel, Launch((2, 3, 4), (32, 2, 1), (by_value(b"twelve bytes"),), dynamic_shared_bytes=100))
    assert driver.launches == [((2, 3, 4, 32, 2, 1), 100, b"twelve bytes")]
    assert device.launch_count == 1


def test_clusters_and_overlap_are_attributes_of_the_launch(device: CudaDevice, driver: StandInDriver) -> None:
    kernel = device.load(IMAGE, "probe")
    arguments = (by_value(b"twelve bytes"),)
    for cluster in ((8, 1, 1), (16, 1, 1), (16, 1, 1)):
        device.launch(kernel, Launch((32, 1, 1), (32, 1, 1), arguments, cluster=cluster, overlap=True))
    assert [driver.launches[0]] == [((32, 1, 1, 32, 1, 1), 0, b"twelve bytes")]
    cluster_attribute, overlap_attribute = driver.configurations[0].attrs
    dimension = cluster_attribute.value.clusterDim
    assert (cluster_attribute.id, dimension.x, dimension.y, dimension.z) == (4, 8, 1, 1)
    assert (overlap_attribute.id, overlap_attribute.value.programmaticStreamSerializationAllowed) == (6, 1)
    assert driver.configurations[0].numAttrs == 2
    device.launch(kernel, Launch((2, 1, 1), (32, 1, 1), arguments, cooperative=True))
    (together,) = driver.configurations[-1].attrs
    assert (together.id, together.value.cooperative) == (2, 1)
    assert driver.allowed == [1], "asked for once, and only for more than 8 blocks"


def test_shared_memory_is_opted_into_once(device: CudaDevice, driver: StandInDriver) -> None:
    kernel = device.load(IMAGE, "probe")
    for nbytes in (0, 100_000, 100_000, 50_000, 200_000):
        device.launch(kernel, Launch((1, 1, 1), (32, 1, 1), (by_value(b"twelve bytes"),), dynamic_shared_bytes=nbytes))
    assert driver.opt_ins == [100_000, 200_000]


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        (Launch((1, 1, 1), (1025, 1, 1), (by_value(b"twelve bytes"),)), "launch_block"),
        (Launch((1, 1, 1), (0, 1, 1), (by_value(b"twelve bytes"),)), "launch_block"),
        (Launch((1, 65536, 1), (1, 1, 1), (by_value(b"twelve bytes"),)), "launch_grid"),
        (Launch((0, 1, 1), (1, 1, 1), (by_value(b"twelve bytes"),)), "launch_grid"),
        (Launch((1, 1, 1), (1, 1, 1), (by_value(b"twelve bytes"),), dynamic_shared_bytes=232449), "launch_shared"),
        (Launch((1, 1, 1), (1, 1, 1), (by_value(b"thirteen byte"),)), "launch_parameters"),
        (Launch((3, 1, 1), (1, 1, 1), (by_value(b"twelve bytes"),), cluster=(2, 1, 1)), "launch_cluster"),
    ],
)
def test_a_launch_that_cannot_run_is_refused_before_it_is_made(
    device: CudaDevice, driver: StandInDriver, launch: Launch, code: str
) -> None:
    kernel = device.load(IMAGE, "probe")
    with pytest.raises(ContractError) as caught:
        device.launch(kernel, launch)
    assert caught.value.code == code
    assert driver.launches == []
    assert device.launch_count == 0


def test_an_image_is_loaded_once_and_a_missing_kernel_is_named(device: CudaDevice) -> None:
    device.load(IMAGE, "probe")
    device.load(IMAGE, "probe")
    with pytest.raises(CompileError, match=r"cannot load missing from probe\.cu .*CUDA_ERROR_NOT_FOUND"):
        device.load(IMAGE, "missing")
    assert StandInObjectCode.loaded == [IMAGE.data]


@pytest.mark.parametrize(
    ("error", "ptx", "says"),
    [
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: an unsupported toolchain.", b".version 9.4\n",
         r"UNSUPPORTED_PTX_VERSION: an unsupported toolchain\. The PTX is of version 9\.4, which this driver "
         r"\(CUDA 13\.1\) does not know: write PTX of an earlier version, or machine code \(a cubin\), or take a newer "
         r"driver$"),
        ("CUDA_ERROR_INVALID_PTX: failed.", b".version 8.0\n",
         r"INVALID_PTX: failed; its compiler says: ptxas line 7; error: no such label$"),
        ("CUDA_ERROR_INVALID_PTX: failed.", b".version 8.0\n// good", r"INVALID_PTX: failed$"),
        ("CUDA_ERROR_INVALID_PTX: failed.", b".version 8.0\n// odd", r"INVALID_PTX: failed$"),
        ("CUDA_ERROR_NOT_FOUND: no such kernel.", b".version 8.0\n", r"NOT_FOUND: no such kernel$"),
    ],
)  # fmt: skip
def test_ptx_that_the_driver_refuses_is_told_with_its_reason(
    device: CudaDevice, driver: StandInDriver, monkeypatch: pytest.MonkeyPatch, error: str, ptx: bytes, says: str
) -> None:
    def refuse(data: bytes, *, name: str = "") -> StandInObjectCode:
        raise RuntimeError(error)

    monkeypatch.setattr(StandInObjectCode, "from_ptx", refuse, raising=False)
    image = KernelImage("ptx", "sm_90a", "probe.ptx", ptx, "0" * 64, "")
    with pytest.raises(CompileError, match=r"cannot load probe from probe\.ptx for sm_90a: CUDA_ERROR_" + says):
        device.load(image, "probe")
    assert driver.destroyed == (["a module"] if b"good" in ptx else [])


@pytest.mark.parametrize(
    ("result", "kind"),
    [(Result.CUDA_ERROR_LAUNCH_FAILED, "trap"), (Result.CUDA_ERROR_ILLEGAL_ADDRESS, "illegal_address")],
)
def test_a_sticky_error_is_a_fault_and_stays(
    device: CudaDevice, driver: StandInDriver, result: Result, kind: str
) -> None:
    array = device.allocate((4,), np.float32, "values")
    driver.next_result = result
    with pytest.raises(DeviceFault) as caught:
        device.synchronize()
    assert caught.value.kinds == (kind,)
    assert result.name in str(caught.value)
    driver.next_result = Result.CUDA_SUCCESS
    with pytest.raises(DeviceFault):
        device.read(array)
    with pytest.raises(DeviceFault):
        device.load(IMAGE, "probe")
    device.free(array)
    device.close()


def test_the_whole_context_is_waited_for_and_a_fault_names_what_was_done(
    device: CudaDevice, driver: StandInDriver
) -> None:
    device.synchronize_context("run engine_prep of libengine.so")
    driver.next_result = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceFault, match=r"run engine_prep of libengine\.so"):
        device.synchronize_context("run engine_prep of libengine.so")
    assert device.is_lost


def test_any_other_driver_error_is_no_fault(device: CudaDevice, driver: StandInDriver) -> None:
    driver.next_result = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceUnavailable, match=r"could not run the kernels: .*CUDA_ERROR_INVALID_VALUE"):
        device.synchronize()


def test_a_captured_graph_is_replayed(device: CudaDevice, driver: StandInDriver) -> None:
    with device.capture() as graph:
        assert device.is_capturing
        with pytest.raises(ValueError, match="still being captured"):
            graph.replay()
    assert not device.is_capturing
    graph.replay(3)
    assert driver.graph_launches == 3
    graph.close()
    graph.close()
    assert driver.destroyed == ["executable", "graph"]


def test_a_failed_capture_ends_the_capture(device: CudaDevice, driver: StandInDriver) -> None:
    with pytest.raises(KeyError), device.capture():
        raise KeyError("in the body")
    assert not device.is_capturing
    assert driver.ended_captures == 1
    assert driver.destroyed == ["graph"]


def test_samples_are_in_seconds_and_the_first_call_is_none(device: CudaDevice) -> None:
    done: list[bool] = []
    found = sample_replays(device, lambda: done.append(True), 3)
    assert found.seconds == pytest.approx([2.5e-3] * 3)
    assert found.clocks_hz == ()
    assert done == [True] * 4


def test_a_gpu_does_not_know_what_was_written(device: CudaDevice) -> None:
    assert device.written_ranges(device.allocate((4,), np.float32, "values")) is None


def test_importing_the_module_imports_no_cuda() -> None:
    import subprocess
    import sys

    script = f"import sys, {cuda_module.__name__}; sys.exit('cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _launch(device: CudaDevice, name: str = "prep") -> None:
    device.launch(device.load(IMAGE, name), Launch((1, 1, 1), (32, 1, 1), (by_value(b"twelve bytes"),)))


def test_an_endless_kernel_is_left_behind_at_the_limit(driver: StandInDriver, device: CudaDevice) -> None:
    array = device.upload(np.zeros(4, np.float32), "out")
    device.limit_time(0.02)
    driver.is_endless = True
    _launch(device)
    _launch(device, "merge")
    assert device.standing() == "kernel prep or kernel merge"
    with pytest.raises(CaseTimeout, match=r"not finished after 0\.02 s: kernel prep or kernel merge;"):
        device.read(array)
    assert device.is_lost
    with pytest.raises(CaseTimeout):
        device.synchronize()
    # Nothing that follows may wait for it.
    device.free(array)
    device.close()


def test_a_kernel_that_ends_in_time_is_waited_for(driver: StandInDriver, device: CudaDevice) -> None:
    device.limit_time(60.0)
    _launch(device)
    device.synchronize()
    assert driver.queries == 3
    assert device.standing() == ""
    device.limit_time(None)
    _launch(device)
    device.synchronize()
    assert driver.queries == 3
    assert not device.is_lost
