"""What a device is to the rest of g4kv: memory, kernels and one way to launch. See cuda.py and emulated.py."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.records.run import DeviceInfo, ImageKind, KernelImage

HostArray = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class Allocation:
    """One block of device memory. ``address`` is a device address, never to be read from the host directly."""

    device: Device
    address: int
    nbytes: int
    label: str
    freed: bool = False
    owner: object = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """A typed view of an allocation. ``strides_bytes`` as NumPy's; a fresh array is row-contiguous.

    A dtype is a NumPy dtype; bf16 is ``ml_dtypes.bfloat16``.
    """

    allocation: Allocation
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides_bytes: tuple[int, ...]

    @property
    def device(self) -> Device:
        """The device that owns the memory."""
        return self.allocation.device

    @property
    def address(self) -> int:
        """Device address of element 0."""
        return self.allocation.address + self.offset_bytes

    @property
    def label(self) -> str:
        """The name the allocation was made under, for messages."""
        return self.allocation.label

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the span they lie in)."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie row-contiguous without gaps."""
        return self.size == 0 or self.strides_bytes == contiguous_strides(self.shape, self.dtype.itemsize)

    def view(
        self, shape: tuple[int, ...], *, offset_elems: int = 0, strides_elems: tuple[int, ...] | None = None
    ) -> DeviceArray:
        """Another array over the same memory, ``offset_elems`` after this one's first element. Nothing is copied."""
        itemsize = self.dtype.itemsize
        strides = (
            contiguous_strides(shape, itemsize)
            if strides_elems is None
            else tuple(stride * itemsize for stride in strides_elems)
        )
        return DeviceArray(self.allocation, self.offset_bytes + offset_elems * itemsize, shape, self.dtype, strides)

    def as_type(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> DeviceArray:
        """The same bytes from the first element on, read as another type and shape."""
        kind = np.dtype(dtype)
        return DeviceArray(self.allocation, self.offset_bytes, shape, kind, contiguous_strides(shape, kind.itemsize))


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a row-contiguous array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Hard limits that a launch must respect (threads, blocks, bytes)."""

    max_threads_per_block: int
    max_grid: tuple[int, int, int]
    max_shared_bytes_per_block: int
    multiprocessors: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedReads:
    """Which pages of a pool the requests of a launch may read; the emulated device reports a read of any other.

    ``pool`` lies in pages of ``page_bytes``; request r has ``page_indices[page_indptr[r] : page_indptr[r + 1]]``, and
    several may have one page. ``one_request_a_block``: no block serves two requests. In words: ``place`` says where a
    byte of the pool lies, ``stranger`` whose a page is that no request of the launch has.
    """

    pool: DeviceArray
    page_bytes: int
    page_indices: npt.NDArray[np.integer[Any]]
    page_indptr: npt.NDArray[np.integer[Any]]
    one_request_a_block: bool
    place: Callable[[int], str]
    stranger: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as the device sees it.

    ``arguments`` are one for each kernel parameter, in order; ``must_write`` names outputs of which every byte
    has to be stored (the emulated device checks it); ``may_collide`` names memory that several blocks may store to
    by contract, such as a padding page: its contents are unspecified afterwards; ``paged_reads`` say what may be read
    of pools. ``cluster`` are blocks of a thread block cluster, which divide the grid. With ``overlap`` the launch may
    begin before the one in front of it has ended (programmatic stream serialization): the kernel waits
    (``griddepcontrol.wait``) before it reads its results. ``cooperative`` launches have a barrier of all blocks, which
    are resident together.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    dynamic_shared_bytes: int = 0
    must_write: tuple[DeviceArray, ...] = ()
    may_collide: tuple[DeviceArray, ...] = ()
    cluster: tuple[int, int, int] = (1, 1, 1)
    overlap: bool = False
    paged_reads: tuple[PagedReads, ...] = ()
    cooperative: bool = False


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel of a loaded image, ready to launch on the device that loaded it."""

    name: str
    image: KernelImage
    handle: Any = field(repr=False)


class Store(Protocol):
    """Bytes by names, of which those are read whole that were written: ``compiler.cache``, say."""

    def read(self, key: str) -> bytes | None: ...
    def write(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """``seconds`` that were given, and the moment of ``time.monotonic()`` at which they are over."""

    seconds: float
    deadline: float


def require_own(device: Device, array: DeviceArray) -> None:
    """Raises ValueError if the array is another device's, or was freed."""
    if array.device is not device:
        raise ValueError(f"{array.label} belongs to another device ({array.device.info.name})")
    if array.allocation.freed:
        raise ValueError(f"{array.label} was freed")


class Device(ABC):
    """A place where kernels run. ``launch_count`` counts the launches that were asked for, so a test can see zero.

    Past its time limit (``limit_time``) a launch or a wait for one raises CaseTimeout, and the device is lost.
    """

    info: DeviceInfo
    limits: DeviceLimits
    image_kind: ImageKind
    launch_count: int
    time_limit: TimeLimit | None = None
    is_capturing: bool = False
    """True while launches are recorded into a graph: nothing can be copied, allocated or waited for."""

    @abstractmethod
    def allocate(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, label: str, *, sparse: bool = False
    ) -> DeviceArray:
        """Uninitialised memory. ``sparse`` allows a pool far larger than what will be touched.

        Raises DeviceUnavailable when the memory is not there.
        """

    @abstractmethod
    def free(self, array: DeviceArray) -> None:
        """Return the array's whole allocation."""

    @abstractmethod
    def write(self, array: DeviceArray, values: HostArray) -> None:
        """Copy host values (same shape and dtype) into a contiguous device array."""

    def compose(self, array: DeviceArray, make: Callable[[HostArray], None]) -> HostArray | None:
        """Have ``make`` write all of a contiguous array, given as host memory of its shape and dtype that holds
        anything. That memory afterwards, if it is not the array's own: large contents are made where they lie."""
        values = np.empty(array.shape, array.dtype)
        make(values)
        self.write(array, values)
        return values

    @abstractmethod
    def read(self, array: DeviceArray) -> HostArray:
        """Copy a contiguous device array to the host; waits for all launches. Raises DeviceFault on a sticky error."""

    def inspect(self, array: DeviceArray) -> HostArray:
        """As ``read``, but read-only, and good only until the device is used again: large contents are not copied where
        the device's memory is the host's."""
        values = self.read(array)
        values.flags.writeable = False
        return values

    @abstractmethod
    def fill(self, array: DeviceArray, byte: int) -> None:
        """Set every byte of a contiguous array."""

    @abstractmethod
    def load(self, image: KernelImage, name: str) -> LoadedKernel:
        """Load an image (once) and find a kernel in it. Raises CompileError if it has no such kernel."""

    def keep_translations(self, store: Store) -> None:  # noqa: B027 (most devices translate nothing)
        """Keep what is made of images, where a device makes something of them, for the processes to come."""

    @abstractmethod
    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        """Queue one launch. Raises DeviceFault (now or at the next synchronise/read) if the kernel faults."""

    @abstractmethod
    def tensor_map_at(self, address: int, element_bytes: int, shape: TensorMapShape, label: str) -> Argument:
        """A tensor map of memory at an address, as this device's kernels take it; ``label`` names it in errors.

        Raises ContractError for what the driver refuses.
        """

    def tensor_map(self, array: DeviceArray, shape: TensorMapShape) -> Argument:
        """A tensor map of the array from its first element on. Raises ContractError for what the driver refuses."""
        require_own(self, array)
        return self.tensor_map_at(array.address, array.dtype.itemsize, shape, array.label)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all launches. Raises DeviceFault on a sticky error."""

    def synchronize_context(self, what: str) -> None:
        """Wait for all work of the process on this device, in whichever stream it was queued. Raises DeviceFault that
        names ``what`` was done."""
        self.synchronize()

    @property
    def stream_handle(self) -> int:
        """The stream that all work goes into, as the CUDA runtime takes it; 0: its legacy default stream."""
        return 0

    @abstractmethod
    def written_ranges(self, array: DeviceArray) -> npt.NDArray[np.int64] | None:
        """Byte ranges [n, 2] (begin, end) of the array that kernels stored since the last write/fill/allocate of
        the allocation, merged and sorted; None where the device cannot know (cuda)."""

    @property
    def holds_host_state(self) -> bool:
        """Whether other people's host code, in this process, may count on what it left here, as another device has
        nothing of it."""
        return False

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """True after a fault, or a launch past its time, that leaves the device of no more use."""

    @abstractmethod
    def standing(self) -> str:
        """Where the kernel stands that runs now, in words; empty where none does. For signal handlers too."""

    def limit_time(self, seconds: float | None) -> None:
        """All that runs from now on has ``seconds`` together; None lifts the limit."""
        finite = seconds is not None and math.isfinite(seconds)
        self.time_limit = TimeLimit(seconds, time.monotonic() + seconds) if finite and seconds is not None else None

    @contextmanager
    def time_apart(self) -> Iterator[None]:
        """What is done meanwhile, compiling say, does not count against the limit."""
        begin = time.monotonic()
        yield
        limit = self.time_limit
        if limit is not None:
            self.time_limit = TimeLimit(limit.seconds, limit.deadline + time.monotonic() - begin)

    def peek(self, array: DeviceArray) -> HostArray | None:
        """What a contiguous array holds, after a fault too; None where a fault takes the memory with it."""
        return None

    @contextmanager
    def only_the_ends(self) -> Iterator[None]:
        """Meanwhile a device that emulates runs the first and the last blocks along a grid's x axis alone, and along
        another that is long: all that it can of a launch with millions of rows. A GPU runs every block."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""

    def upload(self, values: HostArray, label: str) -> DeviceArray:
        """A device copy of a host array."""
        array = self.allocate(values.shape, values.dtype, label)
        if array.size:
            self.write(array, np.ascontiguousarray(values))
        return array

    def free_all(self, arrays: Sequence[DeviceArray]) -> None:
        """Free several arrays."""
        for array in arrays:
            self.free(array)
