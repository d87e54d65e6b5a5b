"""The emulated device as a program uses it: load, launch, look at what came out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.emulated import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    LaunchConfigurationError,
    LaunchFault,
    LaunchReport,
    Machine,
)
from g4kv_cli.emulator.arguments import HostBuffer, Prepared, TensorArgument, is_same, memory_of, prepare
from g4kv_cli.emulator.errors import (
    ArgumentError,
    DeviceLost,
    LaunchFailed,
    LaunchRefused,
    LaunchTimedOut,
    Unsupported,
)
from g4kv_cli.emulator.memory import DeviceArray, HostArray
from g4kv_cli.emulator.module import Kernel, Module
from g4kv_cli.emulator.policy import Policy, PolicyLike
from g4kv_cli.emulator.report import Extent, Report
from g4kv_cli.emulator.sources import read_source
from g4kv_cli.errors import DeviceUnavailable, UsageError

DEFAULT_SECONDS = 60.0
FRESH_MACHINE_BYTES = 1 << 38
"""Address space after which a device that holds nothing starts over: addresses are never used twice."""


class Emulator:
    """An emulated device: memory, modules and launches, with every check on.

    ``policy`` says what becomes of findings (see :class:`Policy`); ``seconds`` is what a launch may take, ``math.inf``
    for no limit. After a finding that a GPU would not survive either (a wild address, a trap) launches raise DeviceLost
    until ``reset``; memory can still be read.
    """

    def __init__(self, policy: PolicyLike | Policy = "raise", seconds: float = DEFAULT_SECONDS) -> None:
        self.policy = Policy.of(policy)
        self.seconds = _positive(seconds)
        self._arrays: list[DeviceArray] = []
        self.machine = _new_machine()

    def load(
        self,
        source: str | bytes | Path,
        *,
        arch: str | None = None,
        options: Sequence[str] = (),
        include: Sequence[str | Path] = (),
        names: Sequence[str] = (),
    ) -> Module:
        """Load CUDA source (compiled with NVRTC, no GPU or toolkit needed), PTX, or what nvcc made.

        source: text, or the path of a ``.cu``, ``.ptx``, ``.fatbin``, ``.o`` or ``.so`` file; PTX and fat binaries as
            bytes too. nvcc compresses PTX unless told ``--no-compress``.
        arch: what CUDA source is compiled for, ``sm_90`` if not given; it decides how much shared memory a block has.
        options: NVRTC's, such as ``["--fmad=false", "-DTILE=32"]``. Its default fuses ``a * b + c`` into one rounding,
            as nvcc does. Where the PTX still leaves open whether a product fuses with a sum, it does as ptxas does it,
            and ``report.counts.contracted`` counts such sums; with ``--fmad=false`` nothing is left open.
        include: directories of your headers. CUDA's own and CCCL's (``<cuda/std/...>``, ``<cub/...>``) are found; a
            file's own directory is searched for what it includes in quotes.
        names: instances of templates to compile, such as ``["scale<float, 4>"]``.

        Raises SourceError, CompileError with NVRTC's log, Unsupported for PTX that cannot be run.
        """
        loaded = read_source(source, arch=arch, options=options, include=include, names=names)
        return Module(self, loaded)

    def array(self, values: HostArray, label: str = "") -> DeviceArray:
        """A device array with these contents."""
        if not isinstance(values, np.ndarray) or values.dtype.hasobject:
            raise ArgumentError(f"a device array is made from a NumPy array of numbers, not {type(values).__name__}")
        made = self.empty(values.shape, values.dtype, label)
        made.write(values)
        return made

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, label: str = "") -> DeviceArray:
        """An uninitialised device array: what a kernel reads before it was written is found."""
        self._arrays = [array for array in self._arrays if not array.is_freed]
        kind, extents = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        if min(extents, default=0) < 0:
            raise ArgumentError(f"a device array of shape {list(extents)}: an extent is negative")
        try:
            made = DeviceArray(self.machine, extents, kind, label or f"array {len(self._arrays)}")
        except EmulatorError as error:
            raise DeviceUnavailable(str(error)) from error
        self._arrays.append(made)
        return made

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | Mapping[str, Any] = (),
        *,
        shared: int = 0,
        policy: PolicyLike | Policy | None = None,
        seconds: float | None = None,
        reverse_blocks: bool = False,
        cooperative: bool | None = None,
        cluster: int | Sequence[int] = 1,
        overlap: bool = False,
    ) -> Report:
        """Run a kernel to its end and report on it.

        grid, block: blocks, and threads of a block: an int, or up to three of them (x, y, z).
        args: one for each parameter, in order; as a mapping they have names, which findings use. NumPy arrays are
            copied to the device, and back where the kernel stored to them; the same array twice is one. Besides:
            :func:`out` of an array, a DeviceArray, an Address, None for a null pointer, :func:`tensor_map` of an array,
            Python numbers, NumPy and ctypes scalars, structs as bytes, ``ctypes.Structure`` or a structured NumPy
            scalar.
        shared: bytes of dynamic shared memory of a block.
        policy, seconds: for this launch in place of the device's.
        reverse_blocks: run the blocks in descending order; a result that changes depends on their order.
        cooperative: whether the launch is one, with all blocks resident together; if not given, it is where the kernel
            has a barrier of the grid (``cooperative_groups::this_grid().sync()``), which traps in any other.
        cluster: blocks of a thread block cluster, as of ``grid``, which they have to divide; 1 are those that the
            kernel was compiled for (``__cluster_dims__``).
        overlap: the launch may begin before the one in front has ended (programmatic stream serialization). It does
            not, but a kernel that never waits for that one is a finding, and so is a read of what it wrote before
            the wait. With an array of NumPy's among ``args``, or a read or write of memory between the launches, the
            one in front has ended.

        Raises ArgumentError and LaunchRefused before anything ran; LaunchFailed for findings, LaunchTimedOut and
        Unsupported, and then every host array is as it was.
        """
        rules = self.policy if policy is None else Policy.of(policy)
        limit = self.seconds if seconds is None else _positive(seconds)
        if kernel.module.emulator is not self:
            raise DeviceLost(f"{kernel.name} was loaded on another emulated device; load it on this one")
        extents = _extent("grid", grid), _extent("block", block)
        if not isinstance(shared, (int, np.integer)) or isinstance(shared, bool):
            raise LaunchRefused(f"shared is {shared!r}; it is a number of bytes")
        prepared = prepare(kernel.name, kernel.parameters, kernel.signature, args)
        together = kernel.handle.synchronises_grid if cooperative is None else bool(cooperative)
        how: dict[str, Any] = {"reverse_blocks": reverse_blocks, "cooperative": together, "overlap": bool(overlap)}
        how["cluster"] = _extent("cluster", cluster)
        return self._run(kernel, extents, prepared, int(shared), rules, limit, how)

    def reset(self) -> None:
        """Begin anew: device arrays are gone and symbols have their first values; modules stay loaded."""
        self._arrays.clear()
        self.machine = _new_machine()

    def _run(
        self,
        kernel: Kernel,
        extents: tuple[Extent, Extent],
        prepared: list[Prepared],
        shared: int,
        rules: Policy,
        seconds: float,
        how: dict[str, Any],
    ) -> Report:
        machine = self._ready_machine()
        for memory in map(memory_of, prepared):
            if isinstance(memory, DeviceArray):
                memory.require_on(machine)
        handle, placed = kernel.handle, _Placed(machine)
        try:
            try:
                data = [item if isinstance(item, bytes) else placed.argument(item) for item in prepared]
            except EmulatorError as error:
                raise DeviceUnavailable(f"{error}; reset() the device, or make the arrays smaller") from error
            faults: list[Fault] = []
            fatal = None
            try:
                counts = machine.launch(
                    handle, *extents, data, shared, must_write=placed.outputs, deadline=time.monotonic() + seconds,
                    **how,
                )  # fmt: skip
            except LaunchFault as error:
                faults = [replace(fault, kernel=kernel.name) for fault in error.faults]
                fatal = next((fault for fault in faults if fault.is_fatal), None)
                counts = error.report
            counts = replace(counts, notes=tuple(replace(note, kernel=kernel.name) for note in counts.notes))
            report = _report(kernel, extents, faults, fatal, counts, rules, placed.stored_bytes())
            raised = [fault for fault in report.findings if rules.action(fault.kind) == "raise"]
            if raised:
                raise LaunchFailed(raised, report)
            placed.copy_back(kernel.name)
            return report
        except LaunchConfigurationError as error:
            raise LaunchRefused(_refusal(str(error).replace(kernel.symbol, kernel.name), extents)) from error
        except DeadlinePassed as error:
            raise LaunchTimedOut(
                f"{kernel.name} had not ended after {seconds:g} s: it stood at {error.standing}; where it is only "
                "slow, give the launch more seconds"
            ) from error
        except EmulatorError as error:
            raise Unsupported(f"the emulated device cannot run {kernel.name}: {error}") from error
        finally:
            placed.free()

    def _ready_machine(self) -> Machine:
        self._arrays = [array for array in self._arrays if not array.is_freed]
        if self.machine.used_bytes > FRESH_MACHINE_BYTES and not self._arrays and not self.machine.has_symbols:
            self.machine = _new_machine()
        if self.machine.poisoned_by is not None:
            raise DeviceLost(f"an earlier launch left the device unusable ({self.machine.poisoned_by}); reset() it")
        return self.machine


class _Placed:
    """Host arrays in device memory for the time of one launch."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._buffers: list[tuple[HostBuffer, int]] = []

    def argument(self, item: HostBuffer | DeviceArray | TensorArgument) -> bytes:
        """The address of an argument's memory, or the map of it, as a kernel takes it."""
        if isinstance(item, TensorArgument):
            return self._map(item)
        return self._address(item).to_bytes(8, "little")

    def _address(self, item: HostBuffer | DeviceArray) -> int:
        return item.address if isinstance(item, DeviceArray) else self._place(item)

    def _map(self, item: TensorArgument) -> bytes:
        address = self._address(item.memory)
        try:
            made = self._machine.tensor_map(
                address, item.extents, item.box, item.element_bytes, None, item.swizzle_bytes, item.kind
            )
        except EmulatorError as error:
            raise ArgumentError(f"{item.place}: {error}") from error
        return made.pack()

    def _place(self, buffer: HostBuffer) -> int:
        for known, address in self._buffers:
            if is_same(known.array, buffer.array):
                return address
        address = self._machine.allocate(buffer.array.nbytes, buffer.label)
        self._buffers.append((buffer, address))
        if buffer.array.nbytes and not buffer.is_output:
            self._machine.write(address, buffer.array)
        return address

    @property
    def outputs(self) -> list[tuple[int, int]]:
        """(address, bytes) of arrays that the launch has to fill."""
        return [(address, buffer.array.nbytes) for buffer, address in self._buffers if buffer.is_output]

    def stored_bytes(self) -> dict[str, int]:
        """How many bytes of each array the kernel stored to."""
        ranges = {buffer.label: self._machine.written_ranges(address) for buffer, address in self._buffers}
        return {label: int((found[:, 1] - found[:, 0]).sum()) for label, found in ranges.items()}

    def copy_back(self, kernel: str) -> None:
        """What the kernel stored, byte by byte. Raises ArgumentError before anything for a read-only array."""
        stored = [(buffer, address, self._machine.written_ranges(address)) for buffer, address in self._buffers]
        for buffer, _, ranges in stored:
            if ranges.size and not buffer.array.flags.writeable:
                raise ArgumentError(
                    f"{kernel} stored to {buffer.label}, a read-only array; pass one that can be written"
                )
        for buffer, address, ranges in stored:
            if not ranges.size:
                continue
            values = self._machine.read(address, buffer.array.nbytes)
            target = buffer.array.reshape(-1).view(np.uint8)
            for begin, end in ranges.tolist():
                target[begin:end] = values[begin:end]

    def free(self) -> None:
        """Give the memory back."""
        for _, address in self._buffers:
            self._machine.free(address)


def _report(
    kernel: Kernel,
    extents: tuple[Extent, Extent],
    faults: list[Fault],
    fatal: Fault | None,
    counts: LaunchReport,
    rules: Policy,
    stored: Mapping[str, int],
) -> Report:
    shown = tuple(fault for fault in faults if rules.action(fault.kind) != "ignore")
    ignored = Counter(fault.kind for fault in faults if rules.action(fault.kind) == "ignore")
    return Report(kernel.name, *extents, shown, dict(ignored), fatal, counts, stored)


def _positive(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise UsageError(f"seconds is {seconds!r}; it is a number above 0, math.inf for no limit")
    return float(seconds)


def _extent(name: str, stated: int | Sequence[int]) -> Extent:
    """One to three extents as (x, y, z). Raises LaunchRefused for what is none."""
    axes = [stated] if isinstance(stated, (int, np.integer)) else stated
    if isinstance(axes, (str, bytes)) or not isinstance(axes, (Sequence, np.ndarray)):
        raise LaunchRefused(f"{name} is {stated!r}; it is an int, or up to three of them (x, y, z)")
    if not 1 <= len(axes) <= 3 or any(
        isinstance(each, bool) or not isinstance(each, (int, np.integer)) for each in axes
    ):
        raise LaunchRefused(f"{name} is {stated!r}; it is an int, or up to three of them (x, y, z)")
    x, y, z = (*(int(each) for each in axes), 1, 1)[:3]
    return x, y, z


def _refusal(words: str, extents: tuple[Extent, Extent]) -> str:
    """The device's words, and what is often meant where an extent is zero."""
    if 0 in extents[0]:
        return f"{words}; for n elements write grid=(n + block - 1) // block, and launch nothing where n is 0"
    return words


def _new_machine() -> Machine:
    try:
        return Machine()
    except EmulatorError as error:
        raise DeviceUnavailable(str(error)) from error
