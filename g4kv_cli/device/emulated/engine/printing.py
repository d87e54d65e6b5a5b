"""What printf of a kernel on the engine writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory.device_printf import Arguments, Reader, format_text
from ..ptx.link import PRINTF
from ..state.memory import DeviceMemory
from .callbacks import Call


class _ThreadReader(Reader):
    """Of a thread on the engine, whose local memory lies at ``place`` of this process; what is not there is the
    interpreter's to report."""

    def __init__(self, memory: DeviceMemory, window: int, local_bytes: int, place: int) -> None:
        super().__init__(memory, window, local_bytes)
        self.place = place

    def local(self, begin: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.place + begin, nbytes)

    def refuse(self, address: int) -> None:
        raise ValueError(f"nothing to print at {address:#x}")


def print_to(printed: list[str], memory: DeviceMemory, local_bytes: int) -> Callable[..., npt.NDArray[np.uint32]]:
    """(addresses of the texts, of the arguments, of local memory in this process, its windows) -> counts of arguments,
    of the lanes of a warp; the texts go to ``printed``."""

    def run(texts: Any, packed: Any, places: Any, windows: Any) -> npt.NDArray[np.uint32]:
        counts = []
        for text, begin, place, window in np.stack((texts, packed, places, windows), axis=1).tolist():
            reader = _ThreadReader(memory, window, local_bytes, place)
            arguments = Arguments(reader, begin)
            printed.append(format_text(reader.text(text), arguments))
            counts.append(arguments.count)
        return np.array(counts, np.uint32)

    return run


def _print_nowhere(*_: Any) -> Any:
    raise AssertionError("a launch says where its texts go")


PRINT = Call(PRINTF, _print_nowhere, ("b32",), ("b64",) * 4)
"""A printf, until a launch says where its texts go."""
