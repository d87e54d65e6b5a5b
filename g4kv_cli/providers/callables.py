"""Python functions as kernels: ``module:function`` is called with tensors and numbers by name, and writes its outputs.

On a GPU the tensors are the device's memory. On the emulated device they are host arrays with its contents, and what
the function changed goes back: an implementation in NumPy, or in torch on the CPU, is judged with no GPU.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import CompileError, G4kvError
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.providers.host_code import running
from g4kv_cli.providers.said import one_line
from g4kv_cli.providers.tensors import DeviceTensor, host_tensor, let_go_of_unused

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
        raise CompileError(f"python {function!r}: importing {module_name} failed: {_last_line(error)}") from error
    target = getattr(module, name, None)
    if not callable(target):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        has = ", ".join(names)
        raise CompileError(f"python {function!r}: {module_name} has no function {name!r}; it has {has or 'none'}")
    found_function: Callable[..., Any] = target
    return found_function


def call_function(
    function: Callable[..., Any], name: str, tensors: Mapping[str, TensorArgument], values: Mapping[str, Any],
    device: Device,
) -> None:  # fmt: skip
    """Call it. Raises CallableFailed if it raises, returns something, changes an input or writes nothing, NotCovered
    for arrays that are too large to be copied, DeviceFault if the device faulted meanwhile."""
    if device.is_capturing:
        raise NotCovered("a Python function is not recorded into a graph")
    device.launch_count += 1
    if device.info.kind == "emulated":
        _call_on_host(function, name, tensors, values, device)
        return
    device.synchronize_context(f"run what came before {name}")
    ordinal = int(getattr(device, "ordinal", 0))
    given = {key: DeviceTensor(one.array, ordinal) for key, one in tensors.items()}
    _called(function, name, {**values, **given})
    device.synchronize_context(f"run {name}")


def _call_on_host(
    function: Callable[..., Any], name: str, tensors: Mapping[str, TensorArgument], values: Mapping[str, Any],
    device: Device,
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
    _called(function, name, {**values, **given})
    for key, one in tensors.items():
        old, new = (np.asarray(held).reshape(-1).view(np.uint8) for held in (before[key], given[key]))
        changed = old != new
        if not changed.any():
            if one.is_output and old.size and (old == POISON_BYTE).all():
                raise CallableFailed(f"{name} wrote nothing to {key}")
            continue
        if not one.is_output:
            raise CallableFailed(f"{name} changed {key}, which is an input: it has to write to its outputs alone")
        store_changed(device, one.array, new, changed)


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


def _called(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> None:
    try:
        with running(f"python {name!r}"):
            returned = function(**arguments)
    except ENDED as error:  # whatever somebody's function raises is told, with its place
        raise CallableFailed(f"{name} {_place(error)}: {_last_line(error)}") from error
    finally:
        let_go_of_unused()
    if returned is not None:
        raise CallableFailed(
            f"{name} returned {type(returned).__name__}: it has to write into the tensors that it gets, and return None"
        )


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
    return one_line(traceback.format_exception_only(error)[-1])


def _place(error: BaseException) -> str:
    """Where it was raised, by the innermost line of the traceback; without one of its own the call did not fit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return "cannot be called with the arguments of 'named'"
    return f"raised at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
