"""An engine's shared library on the emulated device: its own launchers run, and libcudart is a stand-in (cudart.c).

The library finds the stand-in under libcudart's own name, because it is loaded first. Every launch comes here with its
kernel's name, the fat binary that holds its PTX, and pointers to the arguments.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4kv_cli.compiler.fatbin import ptx_texts
from g4kv_cli.device.arguments import MAX_TENSOR_RANK, SWIZZLE_BYTES, Argument, ArgumentKind, TensorMapShape
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.errors import CompileError, ContractError, DeviceFault, DeviceUnavailable
from g4kv_cli.providers.c_function import LauncherRefused, function_of, last_error_of
from g4kv_cli.providers.c_function import call as call_function
from g4kv_cli.providers.cudart.card import (
    BLOCKS_OF_MULTIPROCESSOR,
    DEFAULT_SHARED_BYTES,
    RESERVED_SHARED_BYTES,
    THREADS_OF_MULTIPROCESSOR,
    attributes_of,
    compute_capability,
    properties_of,
)
from g4kv_cli.providers.cudart.graphs import INVALID_VALUE, SUCCESS, Node, StreamCaptures, Values
from g4kv_cli.providers.cudart.library import stand_in_for
from g4kv_cli.providers.manifest import Returns
from g4kv_cli.records.run import KernelImage

if TYPE_CHECKING:
    from g4kv_cli.device.emulated_device import EmulatedDevice

OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED, LAUNCH_FAILURE = 2, 712, 713, 719
_NEAR_NOTHING = re.compile(r"address (0x[0-9a-f]+), near no allocation")
_STAND_IN = "the stand-in for libcudart"
_WHY_ABSENT = {
    **dict.fromkeys(
        ("cudaEventElapsedTime", "cudaEventElapsedTime_v2"), ": what a GPU takes cannot be told without one"
    ),
    **dict.fromkeys(
        ("cudaOccupancyMaxActiveClusters", "cudaOccupancyMaxPotentialClusterSize"),
        ": it depends on how a chip groups its multiprocessors",
    ),
}
"""Behind a function's name, where there is more to say than that it is not there."""
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_LAUNCH_ATTRIBUTE_BYTES = 72  # cudaLaunchAttribute: an int, padding to 8, a union of 64 bytes
_CLUSTER_DIMENSION, _COOPERATIVE, _OVERLAP = 4, 2, 6  # cudaLaunchAttributeID
_HARMLESS_ATTRIBUTES = frozenset((0, 1, 3, 5, 8, 9, 10, 14))  # caching, order, priority: no result depends on them
_MAX_DYNAMIC_SHARED, _REQUIRED_CLUSTER = 8, (11, 12, 13)  # cudaFuncAttribute
_UNREGISTERED, _OF_HOST, _OF_DEVICE = 0, 1, 2  # cudaMemoryType
_INVALID_DEVICE_ID = -2
_TENSOR_KINDS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")  # CUtensorMapDataType
_TENSOR_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2)


@dataclass(slots=True)
class _Call:
    """What one call of a launcher may use, and what went wrong inside it."""

    device: EmulatedDevice
    launch: Callable[[LoadedKernel, Launch], None]
    image_name: str
    error: BaseException | None = None
    why: str = ""
    """What is known of a refusal that the launcher has been told of by number alone."""


class StandInRuntime:
    """The stand-in of this process, and the libraries opened on it, which keep what they register there."""

    def __init__(self) -> None:
        self._stand_ins: dict[str, ctypes.CDLL] = {}
        self._libraries: dict[Path, ctypes.CDLL] = {}
        self._texts: dict[int, list[str]] = {}
        self._images: dict[int, KernelImage] = {}
        self._operations: dict[int, Callable[[Values], int]] = {}
        self._handler = _HANDLER(self._handle)
        self._by_name = {
            "launch": self._launch,
            "absent": self._absent,
            "malloc": self._malloc,
            "free": self._free,
            "copy": self._copy,
            "fill": self._fill,
            "device_attribute": self._device_attribute,
            "function_attribute": self._function_attribute,
            "function_attributes": self._function_attributes,
            "occupancy": self._occupancy,
            "symbol": self._symbol,
            "tensor_map": self._tensor_map,
            "entry_point": self._entry_point,
            "host_malloc": self._host_malloc,
            "host_free": self._host_free,
            "device_properties": self._device_properties,
            "pointer_attributes": self._pointer_attributes,
            "memory_info": self._memory_info,
            "host_function": self._host_function,
            "host_register": self._host_register,
            "host_unregister": self._host_unregister,
        }
        self._captures = StreamCaptures(lambda address: self._now.device.free_address(address))
        self._by_name |= {"captures": self._captures.capture_step, "graphs": self._captures.graph_step}
        self._call: _Call | None = None
        self._opted_in: dict[str, int] = {}
        self._host: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._registered: dict[int, int] = {}
        """Pinned memory: what was allocated here, and the bytes of what the launcher has itself, by address."""

    def call(
        self,
        library: Path,
        function: str,
        arguments: Sequence[Any],
        returns: Returns,
        device: EmulatedDevice,
        launch: Callable[[LoadedKernel, Launch], None],
        last_error: str = "",
    ) -> Any:
        """Call ``function`` of the library; ``launch`` makes each of its launches. The value that it returned, None
        where that is a status.

        Raises what a launch raised, LauncherRefused if what the function returned says so, and CompileError for
        a library, image or runtime function that the stand-in cannot serve.
        """
        opened = self._open(library)
        target = function_of(opened, library, function)
        self._call = call = _Call(device, launch, library.name)
        try:
            returned = call_function(target, arguments, returns, opened)
        finally:
            self._call = None
        if call.error is not None:
            raise call.error
        if returned.refusal:
            raise LauncherRefused(f"{function} {returned.refusal}{last_error_of(opened, last_error)}{call.why}")
        return returned.value

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> ctypes.CDLL:
        if path not in self._libraries:
            soname, stand_in = stand_in_for(path)
            if soname not in self._stand_ins:
                loaded = ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)
                loaded.g4kv_set_handler(self._handler)
                self._stand_ins[soname] = loaded
                self._operations = self._numbered(loaded)
            try:
                self._libraries[path] = ctypes.CDLL(str(path), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
            except OSError as error:
                raise CompileError(f"{path} cannot be loaded: {error}; ldd shows what it lacks") from error
        return self._libraries[path]

    def _numbered(self, loaded: ctypes.CDLL) -> dict[int, Callable[[Values], int]]:
        """The handlers by the numbers that the stand-in gives them; its list of names ends in null."""
        at = ctypes.addressof(ctypes.c_char_p.in_dll(loaded, "g4kv_operations"))
        found: dict[int, Callable[[Values], int]] = {}
        for number in range(1 << 8):
            name = ctypes.c_char_p.from_address(at + number * ctypes.sizeof(ctypes.c_char_p)).value
            if name is None:
                break
            found[number] = self._by_name[name.decode()]
        return found

    # --- the handler -------------------------------------------------------------------------------------------------

    def _handle(self, operation: int, values: Values) -> int:
        """An exception must not cross C: it is kept, and the launcher sees an error code."""
        call = self._call
        if call is None or call.error is not None:
            return LAUNCH_FAILURE
        try:
            return self._operations[operation](values)
        except BaseException as error:
            call.error = error
            return LAUNCH_FAILURE

    @property
    def _now(self) -> _Call:
        if self._call is None:
            raise RuntimeError("the stand-in was asked outside of a call")
        return self._call

    def _launch(self, values: Values) -> int:
        name_at, fatbin, *extents, shared, arguments_at, attributes_at, count, cooperative, stream = values[:14]
        name = ctypes.string_at(name_at).decode()
        if shared > self._opted_in.get(name, DEFAULT_SHARED_BYTES):
            # As on a GPU: without cudaFuncSetAttribute the launch is an invalid value.
            return INVALID_VALUE
        kernel = self._kernel(name, fatbin)
        pointers = (ctypes.c_void_p * len(kernel.handle.parameters)).from_address(arguments_at) if arguments_at else ()
        given = tuple(
            Argument(_kind_of(parameter), ctypes.string_at(pointers[number] or 0, parameter.nbytes))
            for number, parameter in enumerate(kernel.handle.parameters)
        )
        cluster, overlap, is_cooperative = self._attributes(name, attributes_at, count)
        grid, block = tuple(extents[:3]), tuple(extents[3:6])
        together = is_cooperative or bool(cooperative)
        launch = Launch(grid, block, given, shared, cluster=cluster, overlap=overlap, cooperative=together)

        def do() -> int:
            # A graph may be launched in a later call, of which everything is asked anew: its device too.
            try:
                self._now.launch(self._kernel(name, fatbin), launch)
            except DeviceFault as fault:
                self._require_no_host_memory(name, fault)
                raise
            return SUCCESS

        return self._captures.queue(stream, Node("kernel", do, name))

    def _require_no_host_memory(self, name: str, fault: DeviceFault) -> None:
        """What is good on a GPU must not be told as a kernel's fault. Raises CompileError."""
        if any(self._is_pinned(int(found, 16)) for line in fault.reports for found in _NEAR_NOTHING.findall(line)):
            raise CompileError(
                f"{self._now.image_name}: {name} reaches pinned memory of the host, which no kernel of the emulated "
                "device does; run it on a GPU"
            ) from fault

    def _is_pinned(self, address: int) -> bool:
        begins = {begin: len(block) for begin, block in self._host.items()} | self._registered
        return any(begin <= address < begin + nbytes for begin, nbytes in begins.items())

    def _attributes(self, name: str, at: int, count: int) -> tuple[tuple[int, int, int], bool, bool]:
        cluster, overlap, is_cooperative = (1, 1, 1), False, False
        for index in range(count):
            raw = ctypes.string_at(at + index * _LAUNCH_ATTRIBUTE_BYTES, _LAUNCH_ATTRIBUTE_BYTES)
            (number,) = struct.unpack_from("<i", raw)
            if number == _CLUSTER_DIMENSION:
                cluster = struct.unpack_from("<3I", raw, 8)
            elif number == _OVERLAP:
                overlap = bool(struct.unpack_from("<i", raw, 8)[0])
            elif number == _COOPERATIVE:
                is_cooperative = bool(struct.unpack_from("<i", raw, 8)[0])
            elif number not in _HARMLESS_ATTRIBUTES:
                raise CompileError(f"{name} is launched with attribute {number}, which {_STAND_IN} has not")
        return cluster, overlap, is_cooperative

    def _kernel(self, name: str, fatbin: int) -> LoadedKernel:
        call = self._now
        entry = re.compile(rf"\.entry\s+{re.escape(name)}\b")
        text = next((text for text in self._ptx_of(fatbin) if entry.search(text)), None)
        if text is None:
            raise CompileError(
                f"{call.image_name} has no PTX of {name}: build it with -gencode arch=compute_90,code=compute_90"
            )
        return call.device.load(self._image(text), name)

    def _ptx_of(self, fatbin: int) -> list[str]:
        if fatbin not in self._texts:
            _, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(fatbin, 16))
            self._texts[fatbin] = ptx_texts(ctypes.string_at(fatbin, header + size), self._now.image_name)
        return self._texts[fatbin]

    def _image(self, text: str) -> KernelImage:
        key = id(text)
        if key not in self._images:
            arch = self._now.device.info.arch
            self._images[key] = KernelImage("ptx", arch, self._now.image_name, text.encode(), "", "")
        return self._images[key]

    def _absent(self, values: Values) -> int:
        name = ctypes.string_at(values[0]).decode()
        why = _WHY_ABSENT.get(name, "")
        raise CompileError(f"{self._now.image_name} calls {name}, which {_STAND_IN} has not{why}; run it on a GPU")

    def _entry_point(self, values: Values) -> int:
        name = ctypes.string_at(values[0]).decode()
        raise CompileError(
            f"{self._now.image_name} asks for the driver's {name}, which {_STAND_IN} has not: run it on a GPU"
        )

    def _malloc(self, values: Values) -> int:
        nbytes, stream = (int(value) for value in values[:2])

        def make() -> tuple[int, int]:
            try:
                return SUCCESS, self._now.device.allocate_bytes(nbytes, "cudaMalloc")
            except DeviceUnavailable:
                return OUT_OF_MEMORY, 0

        error, values[0] = self._captures.allocate(stream, make)
        return error

    def _free(self, values: Values) -> int:
        address, stream = (int(value) for value in values[:2])
        return self._captures.free(
            stream, address, lambda: SUCCESS if self._now.device.free_address(address) else INVALID_VALUE
        )

    def _host_malloc(self, values: Values) -> int:
        error = self._captures.unsafe()
        if error:
            return error
        block = ctypes.create_string_buffer(max(int(values[0]), 1))
        values[0] = ctypes.addressof(block)
        self._host[values[0]] = block
        return SUCCESS

    def _host_free(self, values: Values) -> int:
        return SUCCESS if self._host.pop(int(values[0]), None) is not None else INVALID_VALUE

    def _host_register(self, values: Values) -> int:
        address, nbytes = (int(value) for value in values[:2])
        if self._is_pinned(address):
            return ALREADY_REGISTERED
        self._registered[address] = nbytes
        return SUCCESS

    def _host_unregister(self, values: Values) -> int:
        return SUCCESS if self._registered.pop(int(values[0]), None) is not None else NOT_REGISTERED

    def _copy(self, values: Values) -> int:
        to, source, nbytes, kind, stream = (int(value) for value in values[:5])

        def do() -> int:
            device = self._now.device
            from_device = kind in (2, 3) or (kind == 4 and device.owns_address(source))
            to_device = kind in (1, 3) or (kind == 4 and device.owns_address(to))
            data = device.read_bytes(source, nbytes) if from_device else ctypes.string_at(source, nbytes)
            if to_device:
                device.write_bytes(to, data)
            else:
                ctypes.memmove(to, data, nbytes)
            return SUCCESS

        return self._captures.queue(stream, Node("memcpy", do))

    def _fill(self, values: Values) -> int:
        to, byte, nbytes, stream = (int(value) for value in values[:4])

        def do() -> int:
            self._now.device.write_bytes(to, bytes((byte,)) * nbytes)
            return SUCCESS

        return self._captures.queue(stream, Node("memset", do))

    def _host_function(self, values: Values) -> int:
        function, data, stream = (int(value) for value in values[:3])

        def do() -> int:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)
            return SUCCESS

        return self._captures.queue(stream, Node("host", do))

    # --- what launchers ask of the card ------------------------------------------------------------------------------

    def _device_attribute(self, values: Values) -> int:
        known, number = attributes_of(self._now.device), int(values[0])
        if number not in known:
            what = f"device attribute {number}{_attribute_name(number)}"
            raise CompileError(f"{self._now.image_name} asks for {what}, which {_STAND_IN} has not; run it on a GPU")
        values[0] = known[number]
        return SUCCESS

    def _device_properties(self, values: Values) -> int:
        made = properties_of(self._now.device, int(values[1]))
        ctypes.memmove(int(values[0]), made, len(made))
        return SUCCESS

    def _memory_info(self, values: Values) -> int:
        device = self._now.device
        values[0], values[1] = device.free_bytes, device.limits.memory_bytes
        return SUCCESS

    def _pointer_attributes(self, values: Values) -> int:
        """cudaPointerAttributes: type, device, address on the device and on the host; CUDA 13 has eight longs more.

        No kernel reaches the host's memory here, so that pinned memory has no address on the device.
        """
        at = int(values[1])
        if self._now.device.owns_address(at):
            found = (_OF_DEVICE, 0, at, 0)
        elif self._is_pinned(at):
            found = (_OF_HOST, 0, 0, at)
        else:
            found = (_UNREGISTERED, _INVALID_DEVICE_ID, 0, at)
        more = struct.pack("<q56x", -1) if values[2] >= 13 else b""  # of no locality domain
        made = struct.pack("<2i2Q", *found) + more
        ctypes.memmove(int(values[0]), made, len(made))
        return SUCCESS

    def _function_attribute(self, values: Values) -> int:
        call, name = self._now, ctypes.string_at(values[0]).decode()
        attribute, value = int(values[2]), ctypes.c_int64(values[3]).value
        if attribute == _MAX_DYNAMIC_SHARED:
            static = self._kernel(name, int(values[1])).handle.shared_bytes
            if not 0 <= value <= call.device.limits.max_shared_bytes_per_block - static:
                return INVALID_VALUE
            self._opted_in[name] = value
        elif attribute in _REQUIRED_CLUSTER:
            raise CompileError(
                f"{call.image_name} sets the cluster of {name} by function attribute {attribute}, which {_STAND_IN} "
                "has not: let the launch have it (cudaLaunchKernelEx)"
            )
        return SUCCESS

    def _function_attributes(self, values: Values) -> int:
        """cudaFuncAttributes: three sizes, then ints. Registers are unknown without an assembler, and said to be 0."""
        name = ctypes.string_at(values[0]).decode()
        handle = self._kernel(name, int(values[1])).handle
        most = handle.max_threads or self._now.device.limits.max_threads_per_block
        dynamic = self._opted_in.get(name, DEFAULT_SHARED_BYTES - handle.shared_bytes)
        sizes = struct.pack("<3Q", handle.shared_bytes, 0, handle.local_bytes)
        major, minor = compute_capability(self._now.device)
        arch = 10 * major + minor
        ints = struct.pack("<7i", most, 0, arch, arch, 0, dynamic, -1)
        cluster = handle.cluster or (0, 0, 0)
        clusters = struct.pack("<6i64x", int(any(cluster)), *cluster, 0, 0)
        made = sizes + ints + clusters
        ctypes.memmove(int(values[2]), made, len(made))
        return SUCCESS

    def _occupancy(self, values: Values) -> int:
        """By threads and shared memory alone: the registers are the assembler's to say."""
        limits = self._now.device.limits
        name, threads, dynamic = ctypes.string_at(values[0]).decode(), int(values[2]), int(values[3])
        if not 1 <= threads <= limits.max_threads_per_block:
            return INVALID_VALUE
        shared = self._kernel(name, int(values[1])).handle.shared_bytes + dynamic + RESERVED_SHARED_BYTES
        by_shared = (limits.max_shared_bytes_per_block + RESERVED_SHARED_BYTES) // shared
        known = attributes_of(self._now.device)
        by_threads = known[THREADS_OF_MULTIPROCESSOR] // (-(-threads // 32) * 32)
        values[0] = min(known[BLOCKS_OF_MULTIPROCESSOR], by_threads, by_shared)
        return SUCCESS

    def _symbol(self, values: Values) -> int:
        """Where a module's variable lies, and its bytes. Its kernels are of the same PTX."""
        name, fatbin = ctypes.string_at(values[0]).decode(), int(values[1])
        for text in self._ptx_of(fatbin):
            found = self._now.device.variable(self._image(text), name)
            if found is not None:
                values[0], values[1] = found
                return SUCCESS
        raise CompileError(
            f"{self._now.image_name} asks for the variable {name}, which its PTX has not: build it with -gencode "
            "arch=compute_90,code=compute_90"
        )

    def _tensor_map(self, values: Values) -> int:
        to, kind, rank, address, extents, strides, box, steps, interleave, swizzle, _promotion, fill = values[:12]
        if not 1 <= rank <= MAX_TENSOR_RANK or not steps or not extents or not box or (rank > 1 and not strides):
            return INVALID_VALUE
        asked = {
            f"data type {kind}": kind >= len(_TENSOR_BYTES),
            f"interleave {interleave}": bool(interleave),
            f"swizzle {swizzle}": swizzle >= len(SWIZZLE_BYTES),
            f"out-of-bounds fill {fill}": bool(fill),
            "element strides": any(step != 1 for step in (ctypes.c_uint32 * rank).from_address(steps)),
        }
        lacking = [what for what, is_asked in asked.items() if is_asked]
        if lacking:
            raise CompileError(
                f"{self._now.image_name} makes a tensor map with {' and '.join(lacking)}, which {_STAND_IN} has not; "
                "run it on a GPU"
            )
        shape = TensorMapShape(
            tuple((ctypes.c_uint64 * rank).from_address(extents)),
            tuple((ctypes.c_uint64 * (rank - 1)).from_address(strides)) if rank > 1 else (),
            tuple((ctypes.c_uint32 * rank).from_address(box)),
            SWIZZLE_BYTES[swizzle],
            kind=_TENSOR_KINDS[kind],
        )
        try:
            made = self._now.device.tensor_map_at(int(address), _TENSOR_BYTES[kind], shape, "the engine's tensor")
        except ContractError as error:
            # As the driver does; if the launcher then gives up, why is known.
            self._now.why = f" (cuTensorMapEncodeTiled: {error.want})"
            return INVALID_VALUE
        ctypes.memmove(int(to), made.data, len(made.data))
        return SUCCESS


def _kind_of(parameter: Any) -> ArgumentKind:
    """The kind that a PTX parameter takes: the launcher's own types are not known here."""
    if parameter.is_array:
        return "struct"
    if parameter.kind in ("f32", "f64"):
        return parameter.kind  # type: ignore[no-any-return]
    kinds: dict[int, ArgumentKind] = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
    return kinds[parameter.nbytes]


def _attribute_name(number: int) -> str:
    """`` (cudaDevAttrL2CacheSize)`` of 38, as NVIDIA's bindings have it; empty for none."""
    try:
        from cuda.bindings.runtime import cudaDeviceAttr

        return f" ({cudaDeviceAttr(number).name})"
    except (ImportError, ValueError):
        return ""


@functools.cache
def runtime_of_process() -> StandInRuntime:
    """The one stand-in runtime of this process."""
    return StandInRuntime()
