"""The emulated device: the PTX interpreter of ``device/emulated`` behind the interface of all devices.

The architecture chooses the PTX dialect and the limits; the arithmetic is always the H200's (sm_90), the one that
was recorded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.device.emulated import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    FreedMemory,
    Kernel,
    LaunchConfigurationError,
    LaunchFault,
    LaunchInterrupted,
    Machine,
    Module,
    OwnedReads,
    cluster_of,
    emulator_words,
    grid_of,
)
from g4kv_cli.device.interface import (
    Allocation,
    Device,
    DeviceArray,
    DeviceLimits,
    HostArray,
    Launch,
    LoadedKernel,
    PagedReads,
    Store,
    contiguous_strides,
    require_own,
)
from g4kv_cli.device.validation import (
    LAUNCH_PARAMETERS,
    LAUNCH_REFUSED,
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
    UsageError,
)
from g4kv_cli.records.run import DeviceInfo, ImageKind, KernelImage

DEFAULT_ARCH = "sm_90"
FRESH_MACHINE_BYTES = 1 << 38
"""Address space after which a device without live memory starts over; the arena has four times as much."""
MANY_BLOCKS = 64
"""Of a grid's y and z axes. Those of more blocks, heads say, have ends as x has, where only the ends are run; fewer are
parts of one row, splits or columns, and belong together."""
ARITHMETIC_ARCH = "sm_90"


@dataclass(frozen=True, slots=True)
class EmulatedArch:
    """A chip to stand in for: its opt-in shared bytes of a block, and the multiprocessors of a typical card."""

    max_shared_bytes_per_block: int
    multiprocessors: int
    card: str


# Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability ("maximum amount of
# shared memory per thread block", KB of 1024 bytes). Multiprocessors: NVIDIA's data sheets of the cards named.
ARCHS: dict[str, EmulatedArch] = {
    "sm_80": EmulatedArch(163 * 1024, 108, "A100"),
    "sm_86": EmulatedArch(99 * 1024, 84, "A40"),
    "sm_89": EmulatedArch(99 * 1024, 142, "L40S"),
    "sm_90": EmulatedArch(227 * 1024, 132, "H200"),
    "sm_100": EmulatedArch(227 * 1024, 148, "B200"),
    "sm_120": EmulatedArch(99 * 1024, 188, "RTX PRO 6000"),
}


class EmulatedDevice(Device):
    """A device without hardware. Raises UsageError for an arch that it does not know.

    A launch runs at once, with all checks on, and raises DeviceFault with every rule that the kernel broke. After
    a fault that would have ended it on hardware too (a trap, a wild address) every further call raises it again.
    """

    image_kind: ImageKind = "ptx"

    def __init__(self, arch: str = DEFAULT_ARCH, reason: str = "") -> None:
        plain = arch.rstrip("af")  # sm_90a: the same chip
        known = ARCHS.get(plain)
        if known is None:
            raise UsageError(f"the emulated device does not know {arch!r}; it knows {', '.join(ARCHS)}")
        note = "" if plain == ARITHMETIC_ARCH else f", arithmetic of {ARITHMETIC_ARCH}"
        try:
            how = emulator_words()
        except EmulatorError as error:
            raise UsageError(str(error)) from error
        name = f"emulated {plain} ({known.card} limits{note})" + (f", {how}" if how else "")
        self.info = DeviceInfo("emulated", name, arch, "", reason)
        self.limits = DeviceLimits(
            max_threads_per_block=1024,
            max_grid=(2**31 - 1, 65535, 65535),
            max_shared_bytes_per_block=known.max_shared_bytes_per_block,
            multiprocessors=known.multiprocessors,
            memory_bytes=_host_memory_bytes(),
        )
        self.launch_count = 0
        self._machine = Machine()
        self._allocations: list[Allocation] = []
        self._bytes_in_use = 0
        """Of all live allocations but sparse ones."""
        self._fault: G4kvError | None = None
        self._closed = False
        self._ends_only = False
        self._of_host_code: set[int] = set()
        """Where memory of other people's host code begins."""
        self._gave_variables = False
        self._store: Store | None = None

    def allocate(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, label: str, *, sparse: bool = False
    ) -> DeviceArray:
        """Uninitialised memory. Pages cost host memory when they are touched; ``sparse`` keeps those few."""
        self._require_usable()
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if not sparse and self._bytes_in_use + nbytes > self.limits.memory_bytes:
            raise DeviceUnavailable(
                f"the host has not the memory for {label}: {nbytes} bytes asked, "
                f"{self.free_bytes} of {self.limits.memory_bytes} bytes free"
            )
        address = self._reserve(nbytes, label, sparse)
        allocation = Allocation(self, address, nbytes, label, owner="sparse" if sparse else None)
        self._allocations.append(allocation)
        self._bytes_in_use += 0 if sparse else nbytes
        return DeviceArray(allocation, 0, tuple(shape), kind, contiguous_strides(tuple(shape), kind.itemsize))

    def free(self, array: DeviceArray) -> None:
        """Return the array's whole allocation; a later access of a kernel to it is a fault."""
        require_own(self, array)
        array.allocation.freed = True
        self._allocations.remove(array.allocation)
        self._bytes_in_use -= 0 if array.allocation.owner == "sparse" else array.allocation.nbytes
        self._machine.free(array.allocation.address)

    def write(self, array: DeviceArray, values: HostArray) -> None:
        """Copy host values into the array."""
        require_own(self, array)
        require_contiguous(array, "write")
        require_same_kind(array, values)
        self._require_usable()
        self._machine.clear_written(array.allocation.address)
        if array.nbytes:
            self._machine.write(array.address, np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def compose(self, array: DeviceArray, make: Callable[[HostArray], None]) -> None:
        """``make`` writes to the device's memory itself."""
        require_own(self, array)
        require_contiguous(array, "write")
        self._require_usable()
        self._machine.clear_written(array.allocation.address)
        if array.nbytes:
            with self._machine.written_by_host(array.address, array.nbytes) as memory:
                make(memory.view(array.dtype).reshape(array.shape))

    def read(self, array: DeviceArray) -> HostArray:
        """Copy the array to the host."""
        require_own(self, array)
        self._require_usable()
        return self.peek(array)

    def inspect(self, array: DeviceArray) -> HostArray:
        """The device's memory itself."""
        require_own(self, array)
        require_contiguous(array, "read")
        self._require_usable()
        values: HostArray = self._machine.inspect(array.address, array.nbytes).view(array.dtype)
        return values.reshape(array.shape)

    def peek(self, array: DeviceArray) -> HostArray:
        """Copy the array to the host, after a fault too."""
        require_own(self, array)
        require_contiguous(array, "read")
        if array.nbytes == 0:
            return np.empty(array.shape, array.dtype)
        values: HostArray = self._machine.read(array.address, array.nbytes).view(array.dtype)
        return values.reshape(array.shape)

    def fill(self, array: DeviceArray, byte: int) -> None:
        """Set every byte of the array."""
        require_own(self, array)
        require_contiguous(array, "fill")
        self._require_usable()
        self._machine.clear_written(array.allocation.address)
        if array.nbytes:
            self._machine.fill(array.address, array.nbytes, byte)

    def load(self, image: KernelImage, name: str) -> LoadedKernel:
        """Translate PTX once and find a kernel in it. Raises CompileError, also for PTX that it cannot run."""
        self._require_usable()
        if image.kind != "ptx":
            raise CompileError(f"the emulated device runs PTX, not the {image.kind} of {image.name}")
        try:
            module = _module(image.data, image.name)
            if name not in module.kernel_names:
                names = ", ".join(module.kernel_names) or "none"
                raise CompileError(f"{image.name} has no kernel {name}; it has {names}")
            kernel = module.kernel(name, self._store)
        except EmulatorError as error:
            raise CompileError(f"the emulated device cannot run {name} of {image.name}: {error}") from error
        return LoadedKernel(name, image, kernel)

    def keep_translations(self, store: Store) -> None:
        """Keep what the engine runs of a kernel."""
        self._store = store

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        """Run one launch to its end. Raises DeviceFault if the kernel breaks a rule."""
        self._require_usable()
        handle: Kernel = kernel.handle
        check_launch(self.limits, launch, kernel.name)
        check_arguments(launch.arguments, kernel.name, [parameter.nbytes for parameter in handle.parameters])
        _check_kinds(launch.arguments, handle)
        self.launch_count += 1
        faults: list[LaunchFault] = []
        try:
            for chosen in (
                _ends(grid_of(handle, launch.grid), cluster_of(handle, launch.cluster)) if self._ends_only else (None,)
            ):
                try:
                    self._run(handle, launch, chosen)
                except LaunchFault as error:
                    faults.append(error)
                    if error.fatal is not None:
                        break
        except DeadlinePassed as error:
            seconds = 0.0 if self.time_limit is None else self.time_limit.seconds
            self._fault = CaseTimeout(seconds, str(error.standing))
            raise self._fault from error
        except LaunchInterrupted as interrupt:
            self._fault = DeviceFault([f"interrupted: {interrupt}"], ["interrupted"])
            raise
        except LaunchConfigurationError as error:
            LAUNCH_REFUSED.require(False, kernel.name, launch.block, f"a launch that fits: {error}")
        except EmulatorError as error:
            raise CompileError(f"the emulated device cannot run {kernel.name}: {error}") from error
        found = {report_line(item): item.kind for error in faults for item in error.faults}
        if found:
            fault = DeviceFault(list(found), list(found.values()))
            if faults and faults[-1].fatal is not None:
                self._fault = fault
            raise fault from (faults[0] if faults else None)

    def _run(self, kernel: Kernel, launch: Launch, chosen: range | None) -> None:
        """All blocks of a launch, or the chosen ones. Raises what the machine raises."""
        self._machine.launch(
            kernel,
            launch.grid,
            launch.block,
            [argument.data for argument in launch.arguments],
            dynamic_shared_bytes=launch.dynamic_shared_bytes,
            must_write=() if chosen is not None else _spans(launch.must_write),
            may_collide=_spans(launch.may_collide),
            owned_reads=[_owned(reads) for reads in launch.paged_reads],
            deadline=None if self.time_limit is None else self.time_limit.deadline,
            chosen=chosen,
            cluster=launch.cluster,
            cooperative=launch.cooperative,
            overlap=launch.overlap,
        )

    @contextmanager
    def only_the_ends(self) -> Iterator[None]:
        """Launches leave out all blocks but those at both ends of x and other long axes; no output has to be whole."""
        self._ends_only = True
        try:
            yield
        finally:
            self._ends_only = False

    def tensor_map_at(self, address: int, element_bytes: int, shape: TensorMapShape, label: str) -> Argument:
        """The interpreter's own encoding of a tensor map."""
        try:
            made = self._machine.tensor_map(
                address, shape.extents, shape.box, element_bytes, shape.strides_bytes, shape.swizzle_bytes, shape.kind
            )
        except EmulatorError as error:
            TENSOR_MAP.require(False, label, shape, f"a map that the driver takes: {error}")
            raise
        return Argument("tensor_map", made.pack())

    # --- for host code that is not ours ---------------------------------------------------------------------------

    @property
    def stream_handle(self) -> int:
        """The runtime's cudaStreamPerThread: unlike the legacy default stream it can be captured, as a GPU's can."""
        return 2

    @property
    def holds_host_state(self) -> bool:
        """True with memory that host code has not freed, and once it has asked for a module's variable."""
        return self._gave_variables or not self._of_host_code.isdisjoint(one.address for one in self._allocations)

    def variable(self, image: KernelImage, name: str) -> tuple[int, int] | None:
        """(address, bytes) of a ``__device__`` or ``__constant__`` variable of an image; None if it has none of the
        name. Raises CompileError for PTX that it cannot run."""
        self._require_usable()
        try:
            module = _module(image.data, image.name)
            if name not in module.parsed.variables:
                return None
            self._gave_variables = True
            return self._machine.symbol(module, name)
        except EmulatorError as error:
            raise CompileError(f"the emulated device has no variable {name} of {image.name}: {error}") from error

    def allocate_bytes(self, nbytes: int, label: str) -> int:
        """Address of new memory. Raises DeviceUnavailable."""
        address = self.allocate((nbytes,), np.uint8, label).address
        self._of_host_code.add(address)
        return address

    def free_address(self, address: int) -> bool:
        """Free the allocation that begins there; False if there is none."""
        for allocation in self._allocations:
            if allocation.address == address:
                self.free(DeviceArray(allocation, 0, (allocation.nbytes,), np.dtype(np.uint8), (1,)))
                return True
        return False

    @property
    def free_bytes(self) -> int:
        """Memory that is not allocated."""
        return self.limits.memory_bytes - self._bytes_in_use

    def owns_address(self, address: int) -> bool:
        """Whether the address lies in an allocation of this device."""
        return any(0 <= address - allocation.address < max(allocation.nbytes, 1) for allocation in self._allocations)

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Raises DeviceFault for bytes outside of every allocation."""
        self._require_usable()
        try:
            return self._machine.read(address, nbytes).tobytes()
        except EmulatorError as error:
            raise _copy_fault("from", error) from error

    def write_bytes(self, address: int, data: bytes) -> None:
        """As a kernel's stores: they are among the ``written_ranges``. Raises DeviceFault as ``read_bytes``."""
        self._require_usable()
        try:
            self._machine.store(address, data)
        except EmulatorError as error:
            raise _copy_fault("to", error) from error

    def synchronize(self) -> None:
        """Nothing is ever pending; raises the fault of an earlier launch that hardware would not have survived."""
        self._require_usable()

    def written_ranges(self, array: DeviceArray) -> npt.NDArray[np.int64]:
        """Byte ranges [n, 2] (begin, end) of the array, relative to its first byte, that kernels stored to."""
        require_own(self, array)
        require_contiguous(array, "look at the stores to")
        ranges = self._machine.written_ranges(array.allocation.address) - array.offset_bytes
        inside = ranges[(ranges[:, 1] > 0) & (ranges[:, 0] < array.nbytes)]
        return np.clip(inside, 0, array.nbytes)

    @property
    def is_lost(self) -> bool:
        """True once a launch has ended in what hardware would not have survived either."""
        return self._fault is not None

    def standing(self) -> str:
        """The source line, block and warp of the launch in progress."""
        found = None if self._closed else self._machine.standing()
        return "" if found is None else str(found)

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for allocation in self._allocations:
            allocation.freed = True
        self._allocations.clear()
        self._bytes_in_use = 0
        del self._machine

    def _reserve(self, nbytes: int, label: str, sparse: bool) -> int:
        """Address space is never used twice, so that a late access is seen; start afresh once nothing is live.

        That is done early: a call that needs much of it must not run out half-way.
        """
        if not self._allocations and self._machine.used_bytes > FRESH_MACHINE_BYTES and not self._gave_variables:
            self._machine = Machine()
        try:
            return self._machine.allocate(nbytes, label, sparse)
        except EmulatorError as error:
            if self._allocations:
                raise DeviceUnavailable(f"the emulated device has not the memory for {label}: {error}") from error
        self._machine = Machine()
        try:
            return self._machine.allocate(nbytes, label, sparse)
        except EmulatorError as error:
            raise DeviceUnavailable(f"the emulated device has not the memory for {label}: {error}") from error

    def _require_usable(self) -> None:
        if self._closed:
            raise ValueError("the device was closed")
        if self._fault is not None:
            raise self._fault


def _ends(grid: tuple[int, int, int], cluster: tuple[int, int, int] = (1, 1, 1)) -> list[range]:
    """The numbers of the blocks with the first or the last x of a grid; of y and z all, or the ends of many.

    Clusters come whole: with those along x the first and the last of each row, with others all blocks.
    """
    columns, rows, layers = grid
    if cluster[1:] != (1, 1):
        return [range(columns * rows * layers)]
    found = []
    for z in range(layers) if layers <= MANY_BLOCKS else (0, layers - 1):
        # block[z][y][x]
        runs = [(0, rows)] if rows <= MANY_BLOCKS else [(0, 1), (rows - 1, rows)]
        for begin, end in runs:
            blocks = range((z * rows + begin) * columns, (z * rows + end) * columns)
            if cluster[0] == 1:
                found += [blocks[x::columns] for x in sorted({0, columns - 1})]
                continue
            begins = sorted({0, columns - cluster[0]})
            found += [blocks[row + x : row + x + cluster[0]] for row in range(0, len(blocks), columns) for x in begins]
    return found


@lru_cache(maxsize=64)
def _module(ptx: bytes, name: str) -> Module:
    """The module of a PTX image. Devices come and go with the faults of a run; what was translated is kept for all."""
    return Module(ptx.decode(), name)


def report_line(fault: Fault) -> str:
    """A fault in one line: kind, source line, block, thread, what happened (address as label + offset), lanes."""
    parts = [fault.kind]
    if fault.source_line is not None:
        inlined = f" (inlined at line {fault.call_line})" if fault.call_line is not None else ""
        parts.append(f"{fault.source_file or 'source'}:{fault.source_line}{inlined}")
    if fault.block is not None and fault.thread is not None:
        parts.append(f"block {fault.block} thread {fault.thread}")
    parts.append(" ".join(fault.message.split()))
    where = f"kernel {fault.kernel}"
    if fault.opcode is not None:
        where += f", {fault.opcode}"
    if fault.lanes:
        where += f", {fault.lanes} lane{'s' if fault.lanes > 1 else ''}"
    return f"{': '.join(parts)} [{where}]"


def _copy_fault(direction: str, error: EmulatorError) -> DeviceFault:
    kind = "use_after_free" if isinstance(error, FreedMemory) else "global_out_of_bounds"
    return DeviceFault([f"{kind}: a copy {direction} the device: {error}"], [kind])


def _check_kinds(arguments: Sequence[Argument], kernel: Kernel) -> None:
    """PTX tells floats, integers and arrays of bytes apart; a mix-up of equal size would be a wrong answer."""
    for number, (argument, parameter) in enumerate(zip(arguments, kernel.parameters, strict=True)):
        declared = f"{parameter.kind}[{parameter.nbytes}]" if parameter.is_array else parameter.kind
        by_value = argument.kind in ("struct", "tensor_map")
        is_float = argument.kind.startswith("f")
        LAUNCH_PARAMETERS.require(
            by_value == parameter.is_array and (by_value or is_float == parameter.kind.startswith("f")),
            f"{kernel.name} argument {number}",
            argument.kind,
            f".{declared}",
        )


def _owned(reads: PagedReads) -> OwnedReads:
    return OwnedReads(
        reads.pool.address,
        reads.pool.nbytes,
        reads.page_bytes,
        np.asarray(reads.page_indices, np.int64),
        np.asarray(reads.page_indptr, np.int64),
        reads.one_request_a_block,
        reads.place,
        reads.stranger,
        "page",
        "request",
    )


def _spans(arrays: Sequence[DeviceArray]) -> list[tuple[int, int]]:
    for array in arrays:
        require_contiguous(array, "watch the stores to")
    return [(array.address, array.nbytes) for array in arrays]


def _host_memory_bytes() -> int:
    """Physical memory of the host, where the system tells it."""
    sysconf: Any = getattr(os, "sysconf", None)
    try:
        return int(sysconf("SC_PAGE_SIZE")) * int(sysconf("SC_PHYS_PAGES"))
    except (TypeError, ValueError, OSError):
        return 1 << 34
