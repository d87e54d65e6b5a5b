"""The emulated device: memory and launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .checks.owned_reads import OwnedReads
from .faults import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    LaunchConfigurationError,
    LaunchFault,
    LaunchInterrupted,
    LaunchReport,
    PoisonedMachine,
    Standing,
)
from .interpreter.emit import GRID_WORKSPACE
from .kernel import Kernel, Module
from .launcher import LaunchCounts, Launcher
from .memory.allocation import keep_freed_memory
from .memory.tensor_map import TensorMap, contiguous_strides
from .mode import emulator_mode, emulator_threads
from .request import LaunchRequest
from .residency import resident_blocks
from .state.memory import GLOBAL_BASE, Bytes, DeviceMemory
from .state.store_log import NO_RANGES, Ranges, WrittenRanges, union_ranges

MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = {"sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448}
"""Opt-in shared memory of one block, CUDA programming guide, table of compute capabilities; see ``shared_limit``."""
MAX_PARAMETER_BYTES = 32764
MAX_CLUSTER_BLOCKS = 16
"""Of compute capability 9.0, where more than 8 are allowed."""

_WORKSPACE_BYTES = 8
_NEVER_WAITS = (
    "the launch may begin before the one in front of it has ended, and the kernel never waits for that "
    "(griddepcontrol.wait, cudaGridDependencySynchronize)"
)

Extent = tuple[int, int, int]


def shared_limit(target: str) -> int:
    """Shared bytes a block may have on a PTX target such as ``sm_90a``."""
    number = "".join(character for character in target.split(",")[0] if character.isdigit())
    known = MAX_SHARED_BYTES.get(f"sm_{number}")
    if known is not None:
        return known
    return 232448 if number.startswith("10") else 101376


class Machine:
    """One device memory and everything launched on it.

    Host mistakes raise EmulatorError, refused launches LaunchConfigurationError, and rules broken by a kernel
    LaunchFault. After a fatal fault the machine is poisoned: further launches raise PoisonedMachine, reads are allowed.
    """

    def __init__(self) -> None:
        keep_freed_memory()
        self._memory = DeviceMemory()
        self._written = WrittenRanges()
        self._modules: dict[Module, dict[str, int]] = {}
        self._grid_workspace = 0
        self._in_front: Ranges = NO_RANGES
        """What launches wrote that may not have ended when the next begins, if it overlaps them."""
        self._launcher = Launcher(self._memory, emulator_mode(), emulator_threads())
        self.poisoned_by: LaunchFault | DeadlinePassed | LaunchInterrupted | None = None

    def allocate(self, nbytes: int, label: str = "", sparse: bool = False) -> int:
        """Address of ``nbytes`` new, uninitialised bytes, 256-byte aligned with a guard gap behind them.

        Only touched pages cost memory. ``sparse`` keeps the pages small, for pools far larger than what is touched.
        """
        return self._memory.allocate(nbytes, label or f"allocation {len(self._memory.allocations)}", sparse).begin

    @property
    def used_bytes(self) -> int:
        """Address space taken so far; what was freed stays taken."""
        return self._memory.used_bytes

    def free(self, address: int) -> None:
        """End an allocation; later kernel accesses are ``use_after_free`` faults."""
        self._memory.free(address)

    def write(self, address: int, values: npt.NDArray[Any] | bytes | bytearray | memoryview) -> None:
        """Copy host bytes (an array of any dtype, or bytes) to the device."""
        if isinstance(values, np.ndarray):
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            raw = np.frombuffer(values, np.uint8)
        self._memory.write(address, raw)
        self._in_front = NO_RANGES

    @contextmanager
    def written_by_host(self, address: int, nbytes: int) -> Iterator[Bytes]:
        """Device bytes themselves, uint8, every one of which the host writes meanwhile."""
        with self._memory.written_by_host(address, nbytes) as memory:
            yield memory
        self._in_front = NO_RANGES

    def store(self, address: int, data: bytes) -> None:
        """Copy host bytes as a kernel's store: they are among ``written_ranges``."""
        self.write(address, data)
        if data:
            begin = address - GLOBAL_BASE
            self._written.add(np.array([[begin, begin + len(data)]], np.int64), self._memory)

    def read(self, address: int, nbytes: int) -> Bytes:
        """A copy of ``nbytes`` device bytes, uint8."""
        self._in_front = NO_RANGES
        return self._memory.read(address, nbytes)

    def inspect(self, address: int, nbytes: int) -> Bytes:
        """Device bytes themselves, uint8, read-only."""
        self._in_front = NO_RANGES
        return self._memory.inspect(address, nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes."""
        self._memory.fill(address, nbytes, byte)
        self._in_front = NO_RANGES

    def initialised(self, address: int, nbytes: int) -> npt.NDArray[np.bool_]:
        """For each byte, whether host or kernel ever wrote it."""
        return self._memory.initialised(address, nbytes)

    def written_ranges(self, address: int) -> Ranges:
        """Byte ranges [n, 2], (begin, end) relative to the allocation at ``address``, that kernels stored to since
        ``clear_written`` of it; sorted and merged."""
        begin = self._memory.block(address).begin - GLOBAL_BASE
        return self._written.of(begin) - begin

    def clear_written(self, address: int | None = None) -> None:
        """Forget what kernels stored, to the allocation at ``address`` or to all memory."""
        self._written.clear(None if address is None else self._memory.block(address).begin - GLOBAL_BASE)

    def tensor_map(
        self,
        address: int,
        extents: Sequence[int],
        box: Sequence[int],
        element_bytes: int = 2,
        strides_bytes: Sequence[int] | None = None,
        swizzle_bytes: int = 128,
        kind: str = "",
    ) -> TensorMap:
        """A tensor map of memory at ``address`` for bulk tensor copies; ``pack()`` gives the kernel argument.

        Sequences begin with the innermost dimension; strides are those of all others, without gaps if None (see
        ``TensorMap``). As with the driver, whether all of the tensor is allocated shows only when it is touched.
        Raises EmulatorError if the address is in no live allocation, or for what the driver would refuse.
        """
        self._memory.span(address, element_bytes)
        strides = contiguous_strides(extents, element_bytes) if strides_bytes is None else tuple(strides_bytes)
        return TensorMap(address, element_bytes, tuple(extents), strides, tuple(box), swizzle_bytes, kind)

    def launch(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[bytes],
        dynamic_shared_bytes: int = 0,
        must_write: Sequence[tuple[int, int]] = (),
        may_collide: Sequence[tuple[int, int]] = (),
        reverse_blocks: bool = False,
        chunk_threads: int = 16384,
        max_instructions: int | None = None,
        deadline: float | None = None,
        owned_reads: Sequence[OwnedReads] = (),
        chosen: range | None = None,
        cluster: Extent = (1, 1, 1),
        cooperative: bool = False,
        overlap: bool = False,
    ) -> LaunchReport:
        """Run a kernel with all checks on.

        grid: blocks, or clusters where the kernel was compiled for a grid of those (``__block_size__``).
        arguments: the bytes of each parameter, a struct by value as one.
        must_write: (address, nbytes) of outputs of which every byte must be stored by this launch.
        may_collide: (address, nbytes) of memory that several blocks may store to by contract.
        reverse_blocks: run the blocks in descending order, to find results that depend on their order.
        chunk_threads: threads executed together; only speed depends on it.
        max_instructions: thread instructions after which the watchdog ends the launch.
        deadline: moment of ``time.monotonic()`` (seconds) at which the launch is given up.
        owned_reads: ranges whose cells belong to somebody; a block reads those of its owner only.
        chosen: numbers (x + grid.x * (y + grid.y * z)) of the blocks that run, all of them if None.
        cluster: blocks of a thread block cluster along each axis of the grid, which they have to divide; (1, 1, 1) are
            those that the kernel was compiled for.
        overlap: the launch may begin before the one in front of it has ended, where nothing on the host came between.
        cooperative: all blocks are resident together, and the grid's barrier works; without it the barrier traps.

        Raises LaunchFault with all faults. A fatal one stops the launch where it was found: stores before it stay.
        Raises DeadlinePassed, and LaunchInterrupted where it meets a KeyboardInterrupt.
        """
        if self.poisoned_by is not None:
            raise PoisonedMachine(f"the machine is unusable after an earlier fault: {self.poisoned_by}")
        grid = grid_of(kernel, grid)
        blob = self._check_launch(kernel, grid, block, arguments, dynamic_shared_bytes)
        shared = kernel.shared_total(dynamic_shared_bytes)
        cluster = cluster_of(kernel, cluster)
        _check_cluster(kernel, grid, cluster)
        resident = resident_blocks(kernel.module.parsed.target, block[0] * block[1] * block[2], shared)
        if cooperative and grid[0] * grid[1] * grid[2] > resident:
            raise LaunchConfigurationError(
                f"launch of {kernel.name} refused: {grid[0] * grid[1] * grid[2]} blocks in a cooperative launch, of "
                f"which the card holds {resident} at a time"
            )
        symbols = [
            self._workspace(cooperative) if name == GRID_WORKSPACE else self._place(kernel.module, name)
            for name in kernel.device_variables
        ]
        request = LaunchRequest(
            kernel,
            grid,
            block,
            blob,
            dynamic_shared_bytes,
            symbols,
            must_write,
            may_collide,
            reverse_blocks,
            chunk_threads,
            max_instructions,
            deadline,
            owned_reads,
            chosen,
            resident,
            cluster=cluster,
            in_front=self._in_front if overlap else NO_RANGES,
        )
        try:
            outcome = self._launcher.run(request)
        except (DeadlinePassed, LaunchInterrupted) as ended:
            self.poisoned_by = ended
            raise
        self._written.add(outcome.ranges, self._memory)
        before = self._in_front if overlap and kernel.lets_the_next_begin_early else NO_RANGES
        self._in_front = union_ranges([before, outcome.ranges])
        report = LaunchReport(
            kernel.name,
            grid[0] * grid[1] * grid[2],
            block[0] * block[1] * block[2],
            outcome.thread_instructions,
            int((outcome.ranges[:, 1] - outcome.ranges[:, 0]).sum()),
            kernel.shared_total(dynamic_shared_bytes),
            outcome.printed,
            kernel.contracted,
            outcome.notes,
        )
        faults = list(outcome.faults)
        if overlap and not kernel.waits_for_the_one_in_front:
            faults.append(Fault("overlap_without_wait", _NEVER_WAITS, kernel.name))
        if faults:
            error = LaunchFault(faults, report)
            if error.fatal is not None:
                self.poisoned_by = error
            raise error
        return report

    def symbol(self, module: Module, name: str) -> tuple[int, int]:
        """(address, bytes) of a module's ``__device__`` or ``__constant__`` variable. Raises EmulatorError."""
        variable = module.parsed.variables.get(name)
        if variable is None or variable.space == "shared":
            raise EmulatorError(f"the module has no global or constant variable {name}")
        return self._place(module, name), variable.nbytes

    @property
    def has_symbols(self) -> bool:
        """Whether any module's variable has memory here."""
        return any(self._modules.values())

    def standing(self) -> Standing | None:
        """Where the launch in progress stands, for a signal handler; None where there is none."""
        return self._launcher.standing()

    @property
    def counts(self) -> LaunchCounts:
        """How many launches ran where."""
        return self._launcher.counts

    def _check_launch(
        self, kernel: Kernel, grid: Extent, block: Extent, arguments: Sequence[bytes], dynamic_shared_bytes: int
    ) -> bytes:
        def refuse(words: str) -> LaunchConfigurationError:
            return LaunchConfigurationError(f"launch of {kernel.name} refused: {words}")

        for name, extent, limit in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            for axis, size, most in zip("xyz", extent, limit, strict=True):
                if not 1 <= size <= most:
                    raise refuse(f"{name}.{axis} is {size}, must be 1 to {most}")
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK:
            raise refuse(f"{threads} threads in a block, at most {MAX_THREADS_PER_BLOCK} are allowed")
        if kernel.max_threads and threads > kernel.max_threads:
            raise refuse(f"{threads} threads in a block, the kernel was compiled for at most {kernel.max_threads}")
        if dynamic_shared_bytes < 0:
            raise refuse(f"dynamic shared memory of {dynamic_shared_bytes} bytes")
        target = kernel.module.parsed.target
        shared = kernel.shared_total(dynamic_shared_bytes)
        if shared > shared_limit(target):
            raise refuse(f"{shared} bytes of shared memory in a block, {target} has {shared_limit(target)}")
        if len(arguments) != len(kernel.parameters):
            raise refuse(f"{len(arguments)} arguments given, the kernel has {len(kernel.parameters)} parameters")
        blob = bytearray(kernel.parameter_bytes)
        for number, (argument, parameter) in enumerate(zip(arguments, kernel.parameters, strict=True)):
            if len(argument) != parameter.nbytes:
                raise refuse(f"argument {number} has {len(argument)} bytes, the parameter {parameter.nbytes}")
            blob[parameter.offset : parameter.offset + parameter.nbytes] = argument
        if len(blob) > MAX_PARAMETER_BYTES:
            raise refuse(f"{len(blob)} bytes of parameters, at most {MAX_PARAMETER_BYTES} are allowed")
        return bytes(blob)

    def _workspace(self, cooperative: bool) -> int:
        """What the driver gives a cooperative launch for the barrier of its grid: the size, and the count at zero."""
        if not cooperative:
            return 0
        if not self._grid_workspace:
            self._grid_workspace = self.allocate(_WORKSPACE_BYTES, "the grid's barrier")
        count = _WORKSPACE_BYTES.to_bytes(4, "little") + bytes(4)
        self._memory.write(self._grid_workspace, np.frombuffer(count, np.uint8))
        return self._grid_workspace

    def _address_of(self, module: Module, name: str) -> int:
        parsed = module.parsed
        return parsed.function_address(name) if name in parsed.functions else self._place(module, name)

    def _place(self, module: Module, name: str) -> int:
        """Address of a module's global or constant variable, made and initialised when first needed."""
        addresses = self._modules.setdefault(module, {})
        if name in addresses:
            return addresses[name]
        variable = module.parsed.variables.get(name)
        if variable is None or variable.external:
            raise EmulatorError(f"variable {name} is defined elsewhere; the emulator does not link modules")
        addresses[name] = self.allocate(variable.nbytes, name)
        data = np.zeros(variable.nbytes, np.uint8)
        size = variable.element_bytes
        for index, value in variable.initial:
            bits = value if isinstance(value, int) else self._address_of(module, value.name) + value.offset
            data[index * size : (index + 1) * size] = np.frombuffer(bits.to_bytes(size, "little"), np.uint8)
        self._memory.write(addresses[name], data)
        return addresses[name]


__all__ = ["Machine", "cluster_of", "grid_of", "shared_limit"]


def cluster_of(kernel: Kernel, given: Extent = (1, 1, 1)) -> Extent:
    """Blocks of a launch's clusters: those given, else those that the kernel was compiled for (``__cluster_dims__``).

    Raises LaunchConfigurationError where both are given and differ.
    """
    words, own = f"launch of {kernel.name} refused: ", kernel.cluster
    if own is not None and given not in ((1, 1, 1), own):
        raise LaunchConfigurationError(f"{words}clusters of {given} blocks, the kernel was compiled for {own}")
    return own or given


def grid_of(kernel: Kernel, given: Extent) -> Extent:
    """Blocks of a launch's grid: what is given counts clusters if the kernel was compiled so (``__block_size__``)."""
    if not kernel.grid_of_clusters:
        return given
    x, y, z = (extent * size for extent, size in zip(given, kernel.cluster or (1, 1, 1), strict=True))
    return x, y, z


def _check_cluster(kernel: Kernel, grid: Extent, cluster: Extent) -> None:
    words = f"launch of {kernel.name} refused: "
    if any(size < 1 or extent % size for size, extent in zip(cluster, grid, strict=True)):
        raise LaunchConfigurationError(f"{words}clusters of {cluster} blocks do not fill the grid {grid}")
    blocks = cluster[0] * cluster[1] * cluster[2]
    if blocks > MAX_CLUSTER_BLOCKS:
        raise LaunchConfigurationError(f"{words}{blocks} blocks in a cluster, at most {MAX_CLUSTER_BLOCKS} are allowed")
    target = kernel.module.parsed.target.split(",")[0]
    if blocks > 1 and int("".join(filter(str.isdigit, target)) or 0) < 90:
        raise LaunchConfigurationError(f"{words}{target} has no thread block clusters")
