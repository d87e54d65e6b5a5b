"""Arrays of so many token rows that their offsets leave 32 bits, of which the first and the last token's rows count.

A GPU computes all rows, those between from whatever is there; the emulated device runs the blocks at both ends of the
grid, over memory of which hardly a page is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.session import Session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, ROWS, Axes, compare_values
from g4kv_cli.oracle.reference import Expected

Array = npt.NDArray[Any]


class EndRows:
    """Arrays [tokens, heads, head_dim]; values are given and read as [2, heads, head_dim]."""

    def __init__(self, session: Session, tokens: int) -> None:
        self.session, self.device, self.tokens = session, session.device, tokens

    def make(self, rest: tuple[int, ...], label: str) -> DeviceArray:
        """An array whose end rows are poison; on a GPU, all of it."""
        array = self.session.keep(self.device.allocate((self.tokens, *rest), BF16, label, sparse=True))
        for part in (array,) if self.device.info.kind == "cuda" else self._ends_of(array):
            self.device.fill(part, POISON_BYTE)
        return array

    def upload(self, values: Array, label: str) -> DeviceArray:
        """An array with these end rows."""
        array = self.make(values.shape[1:], label)
        for part, rows in zip(self._ends_of(array), values, strict=True):
            self.device.write(part, np.ascontiguousarray(rows))
        return array

    def read(self, array: DeviceArray) -> Array:
        """The end rows."""
        return np.stack([self.device.read(part) for part in self._ends_of(array)])

    def judge(self, operation: str, got: Array, expected: Expected, *, must_be_there: bool) -> None:
        """Compare head rows. On the emulated device one that is still poison was not run, but if it must, the last
        token has one at least."""
        there = (bits(got) != POISON_BITS).any(axis=-1)
        self.session.lacks_rows |= not there.all()
        if must_be_there:
            there[-1] |= not there[-1].any()
        there |= self.device.info.kind == "cuda"
        ends, heads = np.nonzero(there)
        named = {"token": np.where(ends == 0, 0, self.tokens - 1), "head": heads}
        want = Expected(expected.value[there][:, None], expected.limit[there][:, None], expected.limit_text)
        self.session.compared(operation, got[there], expected.value[there], expected.limit[there])
        self.session.found(compare_values(operation, got[there][:, None], want, Axes(ROWS, {}, named)))
        self.session.digest.update(np.ascontiguousarray(got).tobytes())

    def _ends_of(self, array: DeviceArray) -> list[DeviceArray]:
        row = array.shape[1:]
        last = (self.tokens - 1) * int(np.prod(row, dtype=np.int64))
        return [array.view(row), array.view(row, offset_elems=last)]
