"""A CUDA GPU through cuda.core, and through the driver API where cuda.core has no call for it.

Memory comes from cuMemAlloc, not from a memory pool: each array is an allocation of its own, so that
compute-sanitizer sees an access past its end. All work goes into one non-blocking stream.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.arguments import TENSOR_MAP_BYTES, Argument, TensorMapShape
from g4kv_cli.device.cuda_driver import (
    MINIMUM_COMPUTE_CAPABILITY,
    arch_of,
    count_gpus,
    driver_error,
    first_line,
    jit_complaint,
)
from g4kv_cli.device.cuda_graph import CapturedGraph
from g4kv_cli.device.interface import (
    Allocation,
    Device,
    DeviceArray,
    DeviceLimits,
    HostArray,
    Launch,
    LoadedKernel,
    contiguous_strides,
    require_own,
)
from g4kv_cli.device.validation import (
    TENSOR_MAP,
    check_arguments,
    check_launch,
    require_contiguous,
    require_same_kind,
)
from g4kv_cli.errors import (
    CaseTimeout,
    CompileError,
    DeviceFault,
    DeviceUnavailable,
    G4kvError,
)
from g4kv_cli.records.run import DeviceInfo, ImageKind, KernelImage

PORTABLE_CLUSTER_BLOCKS = 8
"""CUDA C++ Programming Guide, thread block clusters: larger ones are not portable."""


_PTX_VERSION = re.compile(rb"^\.version\s+(\d+\.\d+)", re.MULTILINE)
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3


@dataclass(slots=True)
class _CudaKernel:
    """What a launch needs: handles, the bytes of the parameters asked for so far, and what was opted into."""

    owner: Any
    kernel: Any
    function: Any
    parameter_bytes: dict[int, int | None]
    opted_in_shared_bytes: int = 0
    large_clusters: bool = False


class CudaDevice(Device):
    """GPU number ``ordinal`` of this process. Raises DeviceUnavailable if it cannot be used."""

    image_kind: ImageKind = "cubin"

    def __init__(self, ordinal: int = 0, reason: str = "") -> None:
        count = count_gpus()
        if not 0 <= ordinal < count:
            raise DeviceUnavailable(f"there is no GPU {ordinal}; the CUDA driver shows {count} (0 to {count - 1})")
        from cuda.bindings import driver
        from cuda.core import Device as CoreDevice

        self._driver = driver
        self.ordinal = ordinal
        self.launch_count = 0
        self._allocations: list[Allocation] = []
        self._modules: dict[bytes, Any] = {}
        self._fault: G4kvError | None = None
        self._is_hung = False
        self._queued: list[str] = []
        """What was launched since the last wait, each once."""
        self._closed = False
        try:
            core = CoreDevice(ordinal)
            capability = tuple(core.compute_capability)
            name = str(core.name)
            if capability < MINIMUM_COMPUTE_CAPABILITY:
                raise DeviceUnavailable(
                    f"GPU {ordinal} ({name}) has compute capability {capability[0]}.{capability[1]}; the "
                    f"kernels need {MINIMUM_COMPUTE_CAPABILITY[0]}.{MINIMUM_COMPUTE_CAPABILITY[1]} or later"
                )
            core.set_current()
            self.stream = core.create_stream()
            properties = core.properties
        except DeviceUnavailable:
            raise
        except Exception as error:  # as in count_gpus
            raise DeviceUnavailable(f"GPU {ordinal} cannot be used: {first_line(error)}") from error
        self._device_handle = self.call("find the GPU", driver.cuDeviceGet(ordinal))
        self.info = DeviceInfo("cuda", name, arch_of(*capability), self._driver_text(), reason)
        self.limits = DeviceLimits(
            max_threads_per_block=properties.max_threads_per_block,
            max_grid=(properties.max_grid_dim_x, properties.max_grid_dim_y, properties.max_grid_dim_z),
            max_shared_bytes_per_block=properties.max_shared_memory_per_block_optin,
            multiprocessors=properties.multiprocessor_count,
            memory_bytes=self.memory_bytes()[1],
        )

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total device memory in bytes."""
        status, free, total = self._driver.cuMemGetInfo()
        self.call("ask for the free memory", (status,))
        return int(free), int(total)

    def allocate(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, label: str, *, sparse: bool = False
    ) -> DeviceArray:
        """Uninitialised device memory; ``sparse`` makes no difference here."""
        self._require_usable()
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        self._wait_in_time()
        status, pointer = self._driver.cuMemAlloc(max(nbytes, 1))
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
            free, total = self.memory_bytes()
            raise DeviceUnavailable(
                f"{self.info.name} has not the memory for {label}: {nbytes} bytes asked, {free} of {total} bytes free"
            )
        self.call(f"allocate {label}", (status,))
        allocation = Allocation(self, int(pointer), nbytes, label)
        self._allocations.append(allocation)
        return DeviceArray(allocation, 0, tuple(shape), kind, contiguous_strides(tuple(shape), kind.itemsize))

    def free(self, array: DeviceArray) -> None:
        """Return the array's whole allocation, after the work queued so far. Quiet after a fault."""
        require_own(self, array)
        if self._fault is None:
            self.synchronize()
        self._release(array.allocation)

    def write(self, array: DeviceArray, values: HostArray) -> None:
        """Copy host values into the array and wait for the copy."""
        require_own(self, array)
        require_contiguous(array, "write")
        require_same_kind(array, values)
        self._require_usable()
        if array.nbytes == 0:
            return
        self._wait_in_time()
        source = np.ascontiguousarray(values)
        self.call(
            f"write {array.label}",
            self._driver.cuMemcpyHtoDAsync(array.address, source.ctypes.data, array.nbytes, self.stream.handle),
        )
        self.synchronize()

    def read(self, array: DeviceArray) -> HostArray:
        """Wait for all launches and copy the array to the host."""
        require_own(self, array)
        require_contiguous(array, "read")
        self._require_usable()
        self._wait_in_time()
        values: HostArray = np.empty(array.shape, array.dtype)
        if array.nbytes:
            self.call(
                f"read {array.label}",
                self._driver.cuMemcpyDtoHAsync(values.ctypes.data, array.address, array.nbytes, self.stream.handle),
            )
        self.synchronize()
        return values

    def fill(self, array: DeviceArray, byte: int) -> None:
        """Set every byte of the array, in stream order."""
        require_own(self, array)
        require_contiguous(array, "fill")
        self._require_usable()
        if array.nbytes:
            self.call(
                f"fill {array.label}",
                self._driver.cuMemsetD8Async(array.address, byte, array.nbytes, self.stream.handle),
            )

    def load(self, image: KernelImage, name: str) -> LoadedKernel:
        """Load a cubin (or PTX, which the driver then compiles) once and find a kernel in it."""
        self._require_usable()
        key = hashlib.sha256(image.kind.encode() + image.data).digest()
        module = self._modules.get(key)
        try:
            from cuda.core import ObjectCode

            if module is None:
                build = ObjectCode.from_cubin if image.kind == "cubin" else ObjectCode.from_ptx
                module = self._modules[key] = build(image.data, name=image.name)
            kernel = module.get_kernel(name)
            function = self._driver.CUfunction(int(kernel.handle))
        except Exception as error:  # cuda.core raises CUDAError with the driver's own name in its text
            words = f"cannot load {name} from {image.name} for {image.arch}: {first_line(error)}"
            raise CompileError(f"{words}{self._against_ptx(image, words)}") from error
        return LoadedKernel(name, image, _CudaKernel(module, kernel, function, {}))

    def _against_ptx(self, image: KernelImage, said: str) -> str:
        """What the driver's compiler has against PTX, and what to do where it is only too new; empty for the rest."""
        version = _PTX_VERSION.search(image.data)
        if image.kind != "ptx" or version is None:
            return ""
        if "UNSUPPORTED_PTX_VERSION" in said:
            known = int(self._driver.cuDriverGetVersion()[1])
            return (
                f". The PTX is of version {version[1].decode()}, which this driver (CUDA {known // 1000}."
                f"{known % 1000 // 10}) does not know: write PTX of an earlier version, or machine code (a cubin), or "
                "take a newer driver"
            )
        why = ""
        if "PTX" in said:
            with suppress(Exception):  # what went wrong there must not hide what went wrong here
                why = jit_complaint(self._driver, image.data)
        return f"; its compiler says: {why}" if why else ""

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        """Queue one launch. A fault shows at the next synchronize or read."""
        self._require_usable()
        handle: _CudaKernel = kernel.handle
        check_launch(self.limits, launch, kernel.name)
        self._check_arguments(handle, kernel.name, launch)
        self._opt_in_shared(handle, kernel.name, launch.dynamic_shared_bytes)
        # The driver copies the parameters before the call returns.
        buffers = [_aligned(argument.data) for argument in launch.arguments]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(address for _, address in buffers))
        parameters = ctypes.addressof(pointers) if buffers else 0
        self.launch_count += 1
        attributes = self._launch_attributes(launch)
        if attributes:
            self._allow_cluster(handle, launch.cluster)
            returned = self._driver.cuLaunchKernelEx(
                self._launch_configuration(launch, attributes), handle.function, parameters, 0
            )
        else:
            shape = (*launch.grid, *launch.block, launch.dynamic_shared_bytes, self.stream.handle)
            returned = self._driver.cuLaunchKernel(handle.function, *shape, parameters, 0)
        self.call(f"launch {kernel.name}", returned)
        self.note_queued(f"kernel {kernel.name}")

    def tensor_map_at(self, address: int, element_bytes: int, shape: TensorMapShape, label: str) -> Argument:
        """The driver's encoding (cuTensorMapEncodeTiled)."""
        driver = self._driver
        kinds = driver.CUtensorMapDataType
        by_size = {
            1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            8: kinds.CU_TENSOR_MAP_DATA_TYPE_INT64,
        }
        swizzle = "NONE" if shape.swizzle_bytes == 0 else f"{shape.swizzle_bytes}B"
        promotion = "NONE" if shape.l2_bytes == 0 else f"L2_{shape.l2_bytes}B"
        rank = len(shape.extents)
        status, made = driver.cuTensorMapEncodeTiled(
            by_size[element_bytes],
            rank,
            address,
            [driver.cuuint64_t(extent) for extent in shape.extents],
            [driver.cuuint64_t(stride) for stride in shape.strides_bytes],
            [driver.cuuint32_t(extent) for extent in shape.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        why = f"a map that the driver takes: cuTensorMapEncodeTiled says {getattr(status, 'name', status)}"
        TENSOR_MAP.require(int(status) == 0, label, shape, why)
        return Argument("tensor_map", ctypes.string_at(made.getPtr(), TENSOR_MAP_BYTES))

    def synchronize(self) -> None:
        """Wait for all launches. Raises DeviceFault on a sticky error, and CaseTimeout past the time limit."""
        self._require_usable()
        self._wait_in_time()
        self.call("run the kernels", self._driver.cuStreamSynchronize(self.stream.handle))
        self._queued.clear()

    def synchronize_context(self, what: str) -> None:
        """Wait for every stream of the context: other people's host code has streams of its own."""
        self._require_usable()
        self.call(what, self._driver.cuCtxSynchronize())
        self._queued.clear()

    @property
    def stream_handle(self) -> int:
        """The device's one stream."""
        return int(self.stream.handle)

    def note_queued(self, what: str) -> None:
        """Remember what was launched, for ``standing``."""
        if what not in self._queued:
            self._queued.append(what)

    def _wait_in_time(self) -> None:
        """Under a time limit, wait for what was launched before any call of the driver that would wait for it: none of
        them comes back from an endless kernel."""
        limit, pause = self.time_limit, _FIRST_PAUSE_SECONDS
        if limit is None or not self._queued:
            return
        while self._driver.cuStreamQuery(self.stream.handle)[0].name == "CUDA_ERROR_NOT_READY":
            if time.monotonic() >= limit.deadline:
                self._is_hung = True
                self._fault = CaseTimeout(limit.seconds, self.standing())
                raise self._fault
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    @property
    def is_lost(self) -> bool:
        """True after a fault, or a kernel that did not end: the context is then lost for its process."""
        return self._fault is not None

    def standing(self) -> str:
        """What is in the queue; a GPU does not say at which line it is."""
        return " or ".join(self._queued)

    def written_ranges(self, array: DeviceArray) -> npt.NDArray[np.int64] | None:
        """None: a GPU does not record which bytes were stored."""
        return None

    def close(self) -> None:
        """Free everything. After a fault the driver refuses to; the memory then goes with the process."""
        if self._closed:
            return
        self._closed = True
        if self._is_hung:
            # Every call that frees something would wait for the kernel, a destructor's too; the process takes it along.
            for kept in (self.stream, *self._modules.values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            return
        if self._fault is None:
            self._driver.cuStreamSynchronize(self.stream.handle)
        for allocation in list(self._allocations):
            self._release(allocation)
        self._modules.clear()
        with suppress(Exception):  # after a fault even this call may report the fault once more
            self.stream.close()

    @contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """Record the launches of the ``with`` body into a graph instead of running them.

        The object that the body gets can be replayed once the body has ended. Copies and allocations do not
        belong in the body.
        """
        self.synchronize()
        graph = CapturedGraph(self)
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # a kernel may still load lazily
        self.call("begin a graph", self._driver.cuStreamBeginCapture(self.stream.handle, mode))
        self.is_capturing = True
        try:
            yield graph
        except BaseException:
            self.is_capturing = False
            status, abandoned = self._driver.cuStreamEndCapture(self.stream.handle)
            if int(status) == 0 and abandoned is not None:
                self._driver.cuGraphDestroy(abandoned)
            raise
        self.is_capturing = False
        graph.finish(self.call("end a graph", self._driver.cuStreamEndCapture(self.stream.handle)))

    def call(self, what: str, returned: tuple[Any, ...]) -> Any:
        """Check what a ``cuda.bindings.driver`` function returned; its first value.

        ``what`` says what it was to do. Raises DeviceFault or DeviceUnavailable.
        """
        status, *values = returned
        if int(status) != 0:
            error = driver_error(self._driver, status, what)
            if isinstance(error, DeviceFault):
                self._fault = error
            raise error
        return values[0] if values else None

    def _require_usable(self) -> None:
        if self._closed:
            raise ValueError("the device was closed")
        if self._fault is not None:
            raise self._fault

    def _opt_in_shared(self, handle: _CudaKernel, name: str, dynamic_bytes: int) -> None:
        """More than 48 KiB of dynamic shared memory has to be asked for, once a kernel."""
        if dynamic_bytes <= handle.opted_in_shared_bytes:
            return
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call(
            f"opt {name} in to {dynamic_bytes} bytes of dynamic shared memory",
            self._driver.cuKernelSetAttribute(attribute, dynamic_bytes, handle.kernel.handle, self._device_handle),
        )
        handle.opted_in_shared_bytes = dynamic_bytes

    def _release(self, allocation: Allocation) -> None:
        if not allocation.freed:
            allocation.freed = True
            self._allocations.remove(allocation)
            if not self._is_hung:
                self._driver.cuMemFree(allocation.address)

    def _check_arguments(self, handle: _CudaKernel, name: str, launch: Launch) -> None:
        """Hold the arguments against what the driver says of as many parameters.

        One index past the last is an API error, which compute-sanitizer reports: a right launch must not ask for it.
        """
        known = handle.parameter_bytes
        for index in range(len(launch.arguments)):
            if index not in known:
                status, _offset, size = self._driver.cuKernelGetParamInfo(handle.kernel.handle, index)
                # No size: a parameter that does not exist, or a driver too old to tell.
                known[index] = int(size) if int(status) == 0 else None
        sizes = [known[index] for index in range(len(launch.arguments))]
        if sizes and sizes[0] is None:
            return
        check_arguments(launch.arguments, name, [size for size in sizes if size is not None])

    def _launch_attributes(self, launch: Launch) -> list[Any]:
        made: list[Any] = []
        if launch.cluster != (1, 1, 1):
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = launch.cluster
            made.append(attribute)
        if launch.overlap:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            made.append(attribute)
        if launch.cooperative:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            made.append(attribute)
        return made

    def _launch_configuration(self, launch: Launch, attributes: list[Any]) -> Any:
        made = self._driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = launch.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = launch.block
        made.sharedMemBytes = launch.dynamic_shared_bytes
        made.hStream = self._driver.CUstream(int(self.stream.handle))
        made.attrs = attributes
        made.numAttrs = len(attributes)
        return made

    def _allow_cluster(self, handle: _CudaKernel, cluster: tuple[int, int, int]) -> None:
        """Clusters of more than 8 blocks have to be allowed, once a kernel."""
        if math.prod(cluster) <= PORTABLE_CLUSTER_BLOCKS or handle.large_clusters:
            return
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self.call(
            "allow clusters of more than 8 blocks",
            self._driver.cuKernelSetAttribute(attribute, 1, handle.kernel.handle, self._device_handle),
        )
        handle.large_clusters = True

    def _driver_text(self) -> str:
        version = int(self.call("ask for the driver's version", self._driver.cuDriverGetVersion()))
        text = f"CUDA {version // 1000}.{version % 1000 // 10}"
        kernel_module = Path("/sys/module/nvidia/version")
        try:
            return f"{kernel_module.read_text(encoding='ascii').strip()} ({text})"
        except OSError:
            return text


def _aligned(data: bytes) -> tuple[Any, int]:
    """A copy of an argument at an address that suits a tensor map, and what keeps it alive."""
    buffer = ctypes.create_string_buffer(len(data) + 63)
    address = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(address, data, len(data))
    return buffer, address
