"""Calls of an engine's C functions: how arguments go in, and what says that a launcher refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from g4kv_cli.errors import CompileError, G4kvError
from g4kv_cli.providers.host_code import running
from g4kv_cli.providers.manifest import Returns
from g4kv_cli.providers.packing import C_TYPES
from g4kv_cli.providers.said import one_line

_STATUSES: dict[str, Any] = {"int": ctypes.c_int, "bool": ctypes.c_bool, "void": None}


@dataclass(frozen=True, slots=True)
class Returned:
    """What a function gave back: why it was refused, empty if it was not, or else a value where it has one."""

    refusal: str
    value: Any = None


class LauncherRefused(G4kvError):
    """The engine's launcher returned an error code, with its own text where it has one."""


def function_of(library: ctypes.CDLL, path: object, name: str) -> Any:
    """A function of an open library. Raises CompileError."""
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise CompileError(f"{path} has no function {name!r}: nm -D --defined-only shows those it has") from error


def call(target: Any, arguments: Sequence[Any], returns: Returns, library: ctypes.CDLL) -> Returned:
    """Call it.

    A status of 0, or true, is success, and so is any value but a null pointer. A function whose result says nothing of
    errors leaves them to the runtime, which is asked.
    """
    target.restype = _STATUSES[returns] if returns in _STATUSES else C_TYPES[returns]
    target.argtypes = [type(argument) for argument in arguments]
    is_status = returns in ("int", "bool")
    _last_runtime_error(library)  # what others left there is not this call's
    with running(f"{getattr(target, '__name__', 'a function')} of the library"):
        returned = target(*arguments)
    if is_status:
        if bool(returned) if returns == "bool" else returned == 0:
            return Returned("")
        left = _last_runtime_error(library)
        return Returned(f"returned {returned}" + (f" and {left}" if left else ""))
    refusal = _last_runtime_error(library)
    if returns == "ptr" and returned is None:
        refusal = " and ".join(part for part in ("returned null", refusal) if part)
    return Returned(refusal, returned)


def last_error_of(library: ctypes.CDLL, name: str) -> str:
    """What the library's own function of this name says of its last error, for the end of a sentence."""
    if not name:
        return ""
    try:
        ask = getattr(library, name)
    except AttributeError:
        return f" (and it has no function {name!r} to ask why)"
    ask.restype = ctypes.c_char_p
    text = ask()
    return f": {one_line(text.decode(errors='replace'))}" if text else ""


def _last_runtime_error(library: ctypes.CDLL) -> str:
    """The CUDA runtime's last error, which is taken; the library's own runtime is found through it."""
    ask: Callable[[], int] | None = getattr(library, "cudaGetLastError", None)
    number = 0 if ask is None else int(ask())
    if number == 0:
        return ""
    words = library.cudaGetErrorString
    words.restype = ctypes.c_char_p
    return f"left the runtime's error {number} ({words(number).decode(errors='replace')})"
