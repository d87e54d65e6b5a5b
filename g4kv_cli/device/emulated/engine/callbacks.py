"""Functions of the table of opcodes, called by the engine for the lanes of one warp where it has no handler.

A call takes about as long as the interpreter takes for an instruction, which it executes for all warps at once: it
pays where warps are few, or such instructions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .structures import CALL, LANES

MOST_RESULTS, MOST_OPERANDS = 2, 5
_ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class Call:
    """One opcode: its function in the table, and the kinds of what goes in and comes out."""

    opcode: str
    function: Callable[..., Any]
    results: tuple[str, ...]
    operands: tuple[str, ...]


@lru_cache(maxsize=1024)
def _lanes_of(mask: int) -> npt.NDArray[np.int64]:
    return np.array([lane for lane in range(LANES) if mask >> lane & 1], np.int64)


class Caller:
    """Where operands and results pass between the engine and Python. ``raised``: what a function raised, if not that
    a result is not known; an exception cannot pass through the engine."""

    def __init__(self) -> None:
        self.places = np.zeros((MOST_RESULTS + MOST_OPERANDS, LANES), np.uint64)
        self._narrow = self.places.view(np.uint32)[:, :LANES]
        self._bits = self.places.view(np.uint8)[:, : LANES // 8]
        self.calls: Sequence[Call] = ()
        self.raised: BaseException | None = None
        self.entry = CALL(self._enter)

    def _enter(self, number: int, mask: int) -> int:
        """What the engine calls; not 0 if there is no result."""
        try:
            call = self.calls[number]
            lanes = slice(None) if mask == _ALL_LANES else _lanes_of(mask)
            operands = [self._read(MOST_RESULTS + place, kind)[lanes] for place, kind in enumerate(call.operands)]
            results = call.function(*operands)
            for place, value in enumerate(results if isinstance(results, tuple) else (results,)):
                self._write(place, call.results[place], lanes, value)
        except ValueError:
            return 1  # not known, says the table; the interpreter meets it again
        except BaseException as error:
            self.raised = error
            return 1
        return 0

    def _read(self, place: int, kind: str) -> npt.NDArray[Any]:
        wide: npt.NDArray[Any] = self.places[place]
        narrow: npt.NDArray[Any] = self._narrow[place]
        if kind == "pred":
            return np.unpackbits(self._bits[place], bitorder="little").view(np.bool_)
        return wide if kind == "b64" else narrow.astype(np.uint16) if kind == "b16" else narrow

    def _write(self, place: int, kind: str, lanes: Any, value: npt.NDArray[Any]) -> None:
        if kind == "pred":
            flags = np.zeros(LANES, np.bool_)
            flags[lanes] = value
            self._bits[place] = np.packbits(flags, bitorder="little")
        else:
            (self.places if kind == "b64" else self._narrow)[place][lanes] = value

    def settle(self) -> None:
        """Raise what a function raised."""
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised
