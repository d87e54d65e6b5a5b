"""The compiled engine: found beside this file or in the installed distribution, checked, and loaded once.

It is of no use unless it was made of the C sources that lie here, knows this processor, and agrees about the
structures; otherwise kernels run on the interpreter, and ``missing_reason`` says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from .build import HERE, LIBRARY, source_digest
from .structures import sizes

BUILD_HINT = "python g4kv_cli/device/emulated/engine/build.py makes it"


class LibraryError(Exception):
    """The library cannot be used; ``str(error)`` says why, in a few words."""


class Library:
    """The functions of the engine. Raises LibraryError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._loaded = ctypes.CDLL(str(path))
            digest = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self._loaded, "engine_sources"))).decode()
            runs_here = bool(self._loaded.engine_runs_here())
        except (OSError, ValueError, AttributeError) as error:
            raise LibraryError(f"{path.name} cannot be loaded: {error}") from error
        if digest != source_digest():
            raise LibraryError(f"{path.name} was made of other sources; {BUILD_HINT}")
        if not runs_here:
            raise LibraryError("this processor lacks AVX2 or FMA")
        size = self._loaded.engine_size
        size.restype = ctypes.c_int64
        found = tuple(size(number) for number in range(len(sizes())))
        if found != sizes():
            raise LibraryError(f"{path.name} has structures of {found} bytes, expected {sizes()}")
        self.run = self._loaded.engine_run
        self.run.argtypes = [ctypes.c_void_p]
        self.execute = self._loaded.engine_execute
        self.execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
        self.execute.restype = None
        self.exchange = self._loaded.engine_exchange
        self.exchange.argtypes = [ctypes.c_void_p]
        self.exchange.restype = None
        self.settle = self._loaded.engine_settle
        self.settle.argtypes = [ctypes.c_void_p]
        self.settle.restype = None
        self.scratch_bytes = self._loaded.engine_scratch_bytes
        self.scratch_bytes.argtypes = [ctypes.c_void_p]
        self.scratch_bytes.restype = ctypes.c_int64
        self.begin = self._loaded.engine_begin
        self.begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.begin.restype = None
        self._addresses: dict[str, int] = {}

    def handler(self, name: str) -> int:
        """Address of a handler. Raises LibraryError for a name that the engine has not."""
        address = self._addresses.get(name)
        if address is None:
            try:
                address = ctypes.cast(getattr(self._loaded, f"op_{name}"), ctypes.c_void_p).value
            except AttributeError as error:
                raise LibraryError(f"the engine has no handler {name}") from error
            self._addresses[name] = address = address or 0
        return address


def _candidates() -> Iterator[Path]:
    """Beside the sources; then in installed distributions, for a checkout that hides one of the same sources."""
    yield HERE / LIBRARY
    for distribution in distributions(name="g4kv"):
        yield Path(str(distribution.locate_file(f"g4kv_cli/device/emulated/engine/{LIBRARY}")))


@cache
def _find() -> tuple[Library | None, str]:
    reasons = []
    for path in _candidates():
        if not path.exists():
            continue
        try:
            return Library(path), ""
        except LibraryError as error:
            reasons.append(str(error))
    return None, reasons[0] if reasons else f"{LIBRARY} was not built; {BUILD_HINT}"


def library() -> Library | None:
    """The engine, or None where there is none that can be used."""
    return _find()[0]


def missing_reason() -> str:
    """Why there is no engine; empty if there is one."""
    return _find()[1]
