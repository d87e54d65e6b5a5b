"""Python functions as kernels: ``module:function`` is called with tensors and numbers by name, and writes its outputs.

On a GPU the tensors are the device's memory. On the emulated device they are host arrays with its contents, and what
the function changed goes back: an implementation in NumPy, or in torch on the CPU, is judged with no GPU.
"""

from __future__ import annotations

import importlib.util
import math
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Allocation, Device, DeviceArray, contiguous_strides
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import CompileError, G4kvError
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.providers.host_code import running
from g4kv_cli.providers.said import one_line
from g4kv_cli.providers.tensors import CPU, DeviceTensor, GivenTensor, given_tensor, host_tensor, let_go_of_unused

MAX_COPIED_BYTES = 1 << 30
"""An array that is larger is not copied to the host and back."""
ENDED = BaseException
"""How somebody's code ends early: sys.exit there is an error of the call, and must not end the run with its code. An
interrupt is the user's, unless this process ignores those."""


class CallableFailed(G4kvError):
    """A provider's Python function raised, or did not do what it has to."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument, in the shape that the function sees, and whether the function may write to it."""

    array: DeviceArray
    is_output: bool


def find_module(function: str, folder: Path) -> str:
    """Why the module of ``module:function`` cannot be found, empty if it can. Nothing is imported but its packages."""
    module = function.partition(":")[0]
    if _beside(module, folder).is_file():
        return ""
    try:
        found = importlib.util.find_spec(module)
    except ENDED as error:  # a package's own code runs
        return f"no module {module!r}: {_last_line(error)}"
    return "" if found is not None else f"no module {module!r} in {folder} or where Python looks (sys.path)"


def load_function(function: str, folder: Path) -> Callable[..., Any]:
    """The function of ``module:function``; a file beside the manifest goes before installed modules.

    Raises CompileError.
    """
    module_name, _, name = function.partition(":")
    problem = find_module(function, folder)
    if problem:
        raise CompileError(f"python {function!r}: {problem}")
    file = _beside(module_name, folder)
    try:
        module = _import_file(file, module_name, folder) if file.is_file() else importlib.import_module(module_name)
    except ENDED as error:  # whatever a module does when it is imported
        missing = "; it has to be installed beside g4kv" if isinstance(error, ModuleNotFoundError) else ""
        raise CompileError(
            f"python {function!r}: importing {module_name} failed: {_last_line(error)}{missing}"
        ) from error
    target = getattr(module, name, None)
    if not callable(target):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        has = ", ".join(names)
        raise CompileError(f"python {function!r}: {module_name} has no function {name!r}; it has {has or 'none'}")
    found_function: Callable[..., Any] = target
    return found_function


def call_function(
    function: Callable[..., Any], name: str, tensors: Mapping[str, TensorArgument], values: Mapping[str, Any],
    device: Device, outputs: Mapping[str, DeviceArray | None] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Call it. ``outputs``: what it may return by the array's name, of which the call has not those that are None.

    Raises CallableFailed if it raises, returns something else, changes an input or writes nothing, NotCovered for
    arrays that are too large to be copied, DeviceFault if the device faulted meanwhile.
    """
    if device.is_capturing:
        raise NotCovered("a Python function is not recorded into a graph")
    device.launch_count += 1
    known = {**outputs, **{key: one.array for key, one in tensors.items() if one.is_output}}
    if device.info.kind == "emulated":
        _call_on_host(function, name, tensors, values, device, known)
        return
    device.synchronize_context(f"run what came before {name}")
    ordinal = int(getattr(device, "ordinal", 0))
    given = {key: DeviceTensor(one.array, ordinal) for key, one in tensors.items()}
    returned = _called(function, name, {**values, **given}, known)
    device.synchronize_context(f"run {name}")
    for array, tensor in returned.values():
        device.write(array, _on_host(tensor, device))


def _call_on_host(
    function: Callable[..., Any], name: str, tensors: Mapping[str, TensorArgument], values: Mapping[str, Any],
    device: Device, outputs: Mapping[str, DeviceArray | None],
) -> None:  # fmt: skip
    before: dict[str, npt.NDArray[Any]] = {}
    given: dict[str, Any] = {}
    for key, one in tensors.items():
        if one.array.nbytes > MAX_COPIED_BYTES:
            raise NotCovered(
                f"{key} has {one.array.nbytes / 2**30:.1f} GiB, too many to be copied for a Python function"
            )
        before[key] = device.read(one.array)
        given[key] = host_tensor(before[key].copy())
    returned = _called(function, name, {**values, **given}, outputs)
    for key, one in tensors.items():
        changed = _bytes_of(before[key]) != _bytes_of(given[key])
        if not changed.any():
            if one.is_output and changed.size and key not in returned and (_bytes_of(before[key]) == POISON_BYTE).all():
                raise CallableFailed(f"{name} wrote nothing to {key}")
            continue
        if not one.is_output:
            raise CallableFailed(f"{name} changed {key}, which is an input: it has to write to its outputs alone")
        store_changed(device, one.array, _bytes_of(given[key]), changed)
    for array, tensor in returned.values():
        new = _bytes_of(_on_host(tensor, device))
        store_changed(device, array, new, _bytes_of(device.read(array)) != new)


def _bytes_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.asarray(values).reshape(-1).view(np.uint8)


def store_changed(
    device: Device, array: DeviceArray, new: npt.NDArray[np.uint8], changed: npt.NDArray[np.bool_]
) -> None:
    """Write the bytes of the elements that changed to an emulated device, as a kernel's stores would."""
    size = array.dtype.itemsize
    elements = changed.reshape(-1, size).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], elements, [False]]))).reshape(-1, 2) * size
    write: Any = device.write_bytes  # type: ignore[attr-defined]
    for begin, end in edges.tolist():
        write(array.address + begin, new[begin:end].tobytes())


def _called(
    function: Callable[..., Any], name: str, arguments: Mapping[str, Any], outputs: Mapping[str, DeviceArray | None]
) -> dict[str, tuple[DeviceArray, GivenTensor]]:
    """Its outputs that it returned, by name, and where they belong: libraries without assignment have no other way."""
    try:
        with running(f"python {name!r}"):
            returned = function(**arguments)
    except ENDED as error:  # whatever somebody's function raises is told, with its place
        raise CallableFailed(f"{name} {_place(error, function)}: {_last_line(error)}") from error
    finally:
        let_go_of_unused()
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise CallableFailed(
            f"{name} returned {type(returned).__name__}: it has to write into the tensors that it gets and return "
            "None, or to return its outputs by name, {'out': ...}"
        )
    found = {}
    for key, value in returned.items():
        if key not in outputs:
            raise CallableFailed(f"{name} returned {key!r}, which is none of its outputs ({', '.join(outputs)})")
        array = outputs[key]
        if array is not None:
            found[key] = array, _output(key, value, name, array)
    return found


def _output(key: str, value: Any, name: str, wanted: DeviceArray) -> GivenTensor:
    """A returned output. Raises CallableFailed for what is none of this shape and type."""
    try:
        tensor = given_tensor(value)
    except ENDED as error:  # another library's code runs
        raise CallableFailed(f"{name} returned {key} as something else than a tensor: {_last_line(error)}") from error
    if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
        raise CallableFailed(
            f"{name} returned {key} as {tensor.dtype} {list(tensor.shape)}, not as {wanted.dtype} {list(wanted.shape)}"
        )
    return tensor


def _on_host(tensor: GivenTensor, device: Device) -> npt.NDArray[Any]:
    """A copy of what was returned, wherever it lies."""
    if tensor.device_type == CPU:
        return tensor.on_host()
    strides = contiguous_strides(tensor.shape, tensor.dtype.itemsize)
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    allocation = Allocation(device, tensor.address, nbytes, "what a function returned", owner=tensor.owner)
    return device.read(DeviceArray(allocation, 0, tensor.shape, tensor.dtype, strides))


def _beside(module: str, folder: Path) -> Path:
    return folder / f"{module.replace('.', '/')}.py"


def _import_file(file: Path, name: str, folder: Path) -> Any:
    """A module of its own for each file: two manifests may have modules of one name."""
    own_name = f"g4kv_provider_{abs(hash(str(file)))}_{name.replace('.', '_')}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = importlib.util.spec_from_file_location(own_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    sys.path.append(str(folder))  # for what it imports from beside it
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    finally:
        sys.path.remove(str(folder))
    return module


def _last_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raise error
    # Behind the text come notes that others have added (PEP 678); in front of a SyntaxError's, its place.
    lines = traceback.format_exception_only(error)
    return one_line(lines[-1 - len(getattr(error, "__notes__", ()))])


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Where it was raised: the innermost line of the function's own file, and that of another's below it; without any
    line the call did not fit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return "cannot be called with the arguments of 'named'"
    own_file = getattr(getattr(function, "__code__", None), "co_filename", "")
    own = [frame for frame in frames if frame.filename == own_file] or frames
    shown = dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own[-1], frames[-1]))
    return f"raised at {' in '.join(reversed(shown))}"
