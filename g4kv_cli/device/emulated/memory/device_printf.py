"""printf and assert in a kernel: text and arguments are read from the kernel's memory."""

from __future__ import annotations

import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import DeviceMemory
from .generic_memory import GLOBAL_SPACE, space_of

Array = npt.NDArray[Any]

_LOCAL_SPACE = 1
_LONGEST_TEXT = 1 << 16
_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|j|z|t|L)?([diouxXeEfFgGaAcspn%])")
_WIDE = frozenset({"l", "ll", "j", "z", "t"})


class Reader(ABC):
    """Reads the memory of one thread for a call; its local memory begins at the generic address ``window``."""

    def __init__(self, memory: DeviceMemory, window: int, local_bytes: int) -> None:
        self.memory = memory
        self.window = window
        self.local_bytes = local_bytes

    @abstractmethod
    def local(self, begin: int, nbytes: int) -> bytes:
        """Bytes of the thread's local memory, in which they lie."""

    @abstractmethod
    def refuse(self, address: int) -> None:
        """There is nothing at an address."""

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` from a generic address, fewer at the end of an allocation, none where it was refused."""
        space, begin = space_of(address), address - self.window
        if space == _LOCAL_SPACE and 0 <= begin < self.local_bytes:
            return self.local(begin, min(nbytes, self.local_bytes - begin))
        if space == GLOBAL_SPACE:
            allocation = self.memory.find(address)
            if allocation is not None and address < allocation.end and not allocation.is_freed:
                return self.memory.read(address, min(nbytes, allocation.end - address)).tobytes()
        self.refuse(address)
        return b""

    def text(self, address: int) -> str:
        """A C string."""
        found = b""
        while b"\0" not in found and len(found) < _LONGEST_TEXT:
            piece = self.bytes_at(address + len(found), 256)
            found += piece
            if len(piece) < 256:
                break
        return found.split(b"\0", 1)[0].decode(errors="replace")


class _LaneReader(Reader):
    """Of the interpreter's lanes; what is not there is a fault."""

    def __init__(self, lanes: LaneSet, position: int, site: Site) -> None:
        chunk = lanes.chunk
        super().__init__(chunk.run.memory, int(lanes.local_window[position]), chunk.local.nbytes)
        self.lanes = lanes
        self.position = position
        self.site = site

    def local(self, begin: int, nbytes: int) -> bytes:
        chunk = self.lanes.chunk
        first = int(self.lanes.index[self.position]) * chunk.local.stride + begin
        return bytes(chunk.local.data.of[0][first : first + nbytes])

    def refuse(self, address: int) -> None:
        self.lanes.chunk.run.collector.add(
            "global_out_of_bounds",
            f"the text or the arguments of a printf or assert at {address:#x} lie outside every allocation",
            self.site,
            self.lanes,
            self.position,
            1,
            address,
        )


class Arguments:
    """The packed arguments of a printf, each aligned to its size."""

    def __init__(self, reader: Reader, address: int) -> None:
        self.reader = reader
        self.address = address
        self.count = 0

    def take(self, code: str) -> Any:
        """The next argument, of a ``struct`` format."""
        nbytes = struct.calcsize(code)
        self.address = -(-self.address // nbytes) * nbytes
        raw = self.reader.bytes_at(self.address, nbytes).ljust(nbytes, b"\0")
        self.address += nbytes
        self.count += 1
        return struct.unpack("<" + code, raw)[0]


def format_text(text: str, arguments: Arguments) -> str:
    """What C's printf makes of a text."""

    def convert(match: re.Match[str]) -> str:
        flags, width, precision, size, letter = match.groups()
        if letter == "%":
            return "%"
        if width == "*":
            width = str(arguments.take("i"))
            if width.startswith("-"):
                flags, width = flags + "-", width[1:]
        if precision == "*":
            precision = str(max(arguments.take("i"), 0))
        elif precision is None and "." in match.group():
            precision = "0"
        stem = f"%{flags}{width or ''}" + (f".{precision}" if precision is not None else "")
        if letter in "di":
            value = arguments.take("q" if size in _WIDE else "i")
            bits = {"hh": 8, "h": 16}.get(size or "", 0)
            if bits:
                value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
            return str(f"{stem}d" % value)
        if letter in "uoxX":
            value = arguments.take("Q" if size in _WIDE else "I") & {"hh": 0xFF, "h": 0xFFFF}.get(size or "", -1)
            if letter == "o" and "#" in flags:
                return f"{stem.replace('#', '')}s" % f"0{value:o}"
            return str(f"{stem}{'d' if letter == 'u' else letter}" % value)
        if letter in "eEfFgG":
            real = float(arguments.take("d"))
            if not math.isfinite(real):
                stem = f"%{flags.replace('0', '')}{width or ''}"
            return f"{stem}{letter}" % real
        if letter in "aA":
            digits = float(arguments.take("d")).hex()
            return f"%{flags}{width or ''}s" % (digits.upper() if letter == "A" else digits)
        if letter == "c":
            return f"%{flags}{width or ''}s" % chr(arguments.take("i") & 0xFF)
        if letter == "s":
            return f"{stem}s" % arguments.reader.text(arguments.take("Q"))
        if letter == "p":
            return f"%{flags}{width or ''}s" % f"{arguments.take('Q'):#x}"
        arguments.take("Q")
        return ""

    return _CONVERSION.sub(convert, text)


def print_text(site: Site) -> Callable[..., Array]:
    """vprintf: (lanes, address of the text, address of the arguments) -> how many arguments there were."""

    def run(lanes: LaneSet, texts: Array, packed: Array) -> Array:
        counts = np.zeros(lanes.count, np.int32)
        texts, packed = (np.broadcast_to(value, (lanes.count,)) for value in (texts, packed))
        for position in range(lanes.count):
            reader = _LaneReader(lanes, position, site)
            arguments = Arguments(reader, int(packed[position]))
            lanes.chunk.run.printed.append(format_text(reader.text(int(texts[position])), arguments))
            counts[position] = arguments.count
        return counts.view(np.uint32)

    return run


def fail_assert(site: Site) -> Callable[..., None]:
    """__assertfail: (lanes, condition, file, line, function): a trap that says which."""

    def run(lanes: LaneSet, condition: Array, file: Array, line: Array, function: Array) -> None:
        reader = _LaneReader(lanes, 0, site)
        words = [reader.text(int(value[0])) for value in (condition, file, function)]
        lanes.chunk.run.collector.add(
            "trap",
            f"assertion `{words[0]}` failed at {words[1]}:{int(line[0])} in {words[2]}",
            site,
            lanes,
            0,
            lanes.count,
        )

    return run


def call_nothing(site: Site) -> Callable[..., None]:
    """A call through a pointer that points to none of the functions with this signature: (lanes, pointer)."""

    def run(lanes: LaneSet, pointer: Array) -> None:
        lanes.chunk.run.collector.add(
            "illegal_instruction",
            f"call through the pointer {int(pointer[0]):#x}, which is the address of no function of this signature",
            site,
            lanes,
            0,
            lanes.count,
        )

    return run
