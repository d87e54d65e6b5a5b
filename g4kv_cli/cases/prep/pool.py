"""Where a case's rows lie in the pool, and that nothing else was touched.

Places are NumPy indices into ``pool[page][layer][K, V][slot][head][dim]``: derived from that shape and the order of its
axes in memory alone (model/pool_image.py), never with the offset formula that the kernels and their callers use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.model.pool_image import BLOCK_AXES
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, ROWS, Axes, compare_untouched
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]

_READ_CHUNK_BYTES = 256 << 20
_UNTOUCHED = "{} in the pool, outside the call's slots"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What the pool holds after a call: ``k``, ``v`` [tokens, heads, columns] at the tokens' slots, a digest of the
    pool's bytes, and what was written elsewhere."""

    k: Array
    v: Array
    digest: bytes
    untouched: tuple[Mismatch, ...]


class PoolCheck:
    """The pool of one paged case."""

    def __init__(self, case: PrepCase, placement: Placement, order: PoolOrder = OWN_ORDER) -> None:
        self.case, self.placement = case, placement
        self.image = case.image_of(placement, order)
        pages, slots = case.page_and_slot()
        self.pages, self.slots = np.asarray(pages, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        # Padding rows may share a slot, and what stands there is nobody's business.
        self.is_padding = self.pages == (-1 if placement.padding_page is None else placement.padding_page)

    @property
    def compared_tokens(self) -> npt.NDArray[np.intp]:
        """Tokens whose K and V rows are compared: all but the padding rows."""
        return np.flatnonzero(~self.is_padding)

    @property
    def row_axes(self) -> Axes:
        """Coordinates of the compared rows."""
        kept = self.compared_tokens
        where = {"page": self.pages[kept], "slot": self.slots[kept]}
        # Index along the compared rows -> token of the call; the same unless padding rows were left out.
        return Axes(ROWS, {"layer": self.placement.layer}, where | {"token": kept})

    def allocate(self, device: Device) -> DeviceArray:
        """The pool, flat bf16 [pool_elems], all poison (a sparse one on the emulated device is left untouched)."""
        sparse = self.case.is_sparse
        pool = device.allocate((self.image.elements,), BF16, "pool", sparse=sparse)
        if not sparse or device.info.kind == "cuda":
            device.fill(pool, POISON_BYTE)
        return pool

    def read(self, device: Device, pool: DeviceArray) -> Stored:
        """Read back and compare all that the call must not touch."""
        if not self.case.is_sparse:
            return self._read_whole(device, pool)
        device.synchronize()
        written = device.written_ranges(pool)
        stray = self._stray_in_chunks(device, pool) if written is None else self._stray_ranges(written)
        rows = [self.read_rows(device, pool, kv, written) for kv in (0, 1)]
        total = hashlib.sha256(rows[0].tobytes() + rows[1].tobytes())
        return Stored(rows[0], rows[1], total.digest(), stray)

    def _read_whole(self, device: Device, pool: DeviceArray) -> Stored:
        got = device.inspect(pool)
        blocks = self.image.blocks(got)
        touched = (self.pages, self.placement.layer, self.slots)
        k, v = (block[touched] for block in blocks)
        stray = tuple(
            mismatch
            for block, name in zip(blocks, "KV", strict=True)
            if (mismatch := compare_untouched(_UNTOUCHED.format(name), block, touched, Axes(BLOCK_AXES)))
        )
        if self.is_padding.any():
            got = got.copy()
            for block in self.image.blocks(got):
                block[self.pages[self.is_padding], self.placement.layer, self.slots[self.is_padding]] = 0
        return Stored(k, v, hashlib.sha256(bits(self.image.ordered(got)).data).digest(), stray)

    # --- pools too large to hold twice -----------------------------------------------------------------------

    def _row_ranges(self) -> npt.NDArray[np.int64]:
        """Element ranges [2 * tokens * heads, 2] (begin, end) of each head's K rows, then V rows."""
        heads = np.arange(self.image.num_kv_heads)
        places = (self.pages[:, None], self.placement.layer, self.slots[:, None], heads, 0)
        ranges = []
        for kv in (0, 1):
            begin = self.image.offsets(places, kv).reshape(-1)
            ranges.append(np.stack([begin, begin + self.image.row_dim(kv)], axis=1))
        return np.concatenate(ranges)

    def read_rows(
        self, device: Device, pool: DeviceArray, kv: int, written_bytes: npt.NDArray[np.int64] | None
    ) -> Array:
        """The tokens' rows; where the device knows that nobody wrote (it was never filled), they read as poison."""
        heads, columns = self.image.num_kv_heads, self.image.row_dim(kv)
        count = len(self.pages) * heads
        rows = []
        for begin, end in self._row_ranges()[kv * count : (kv + 1) * count]:
            row = device.read(pool.view((columns,), offset_elems=int(begin))).copy()
            if written_bytes is not None:
                flat = bits(row).reshape(-1)
                for low, high in _subtract(np.array([[begin, end]]), written_bytes // BF16.itemsize):
                    flat[low - begin : high - begin] = POISON_BITS
            rows.append(row)
        return np.stack(rows).reshape(-1, heads, columns)

    def _stray_ranges(self, written_bytes: npt.NDArray[np.int64]) -> tuple[Mismatch, ...]:
        """What a device that records stores has seen outside the rows, and rows that it has not seen written."""
        allowed = _merged(self._row_ranges())
        written = np.asarray(written_bytes, dtype=np.int64) // BF16.itemsize
        stray = _subtract(written, allowed)
        if not len(stray):
            return ()
        first = self._coordinate(int(stray[0, 0]))
        count = int((stray[:, 1] - stray[:, 0]).sum())
        return (self._stray_mismatch(first, count, "a store"),)

    def _stray_in_chunks(self, device: Device, pool: DeviceArray) -> tuple[Mismatch, ...]:
        """Read the whole pool piece by piece: every element outside the rows must still be the poison."""
        elements = self.image.elements
        ranges = self._row_ranges()
        step = _READ_CHUNK_BYTES // BF16.itemsize
        count, first, text = 0, -1, ""
        for begin in range(0, elements, step):
            end = min(begin + step, elements)
            got = bits(device.read(pool.view((end - begin,), offset_elems=begin)))
            for low, high in ranges:
                got[max(low - begin, 0) : max(high - begin, 0)] = POISON_BITS
            # The poison is the largest uint16: one pass over the memory decides whether to look closer.
            if got.min() == POISON_BITS:
                continue
            changed = got != POISON_BITS
            if first < 0:
                first = begin + int(np.argmax(changed))
                text = f"0x{int(got[first - begin]):04x}"
            count += int(np.count_nonzero(changed))
        return () if first < 0 else (self._stray_mismatch(self._coordinate(first), count, text),)

    def _coordinate(self, element: int) -> dict[str, int]:
        found = self.image.coordinate(element)
        return Axes(tuple(found)).coordinate(tuple(found.values()))

    def _stray_mismatch(self, first: dict[str, int], count: int, got: str) -> Mismatch:
        kv = "V" if first.pop("kv") else "K"
        return Mismatch(
            operation=_UNTOUCHED.format(kv),
            count=count,
            total=self.image.elements,
            first=first,
            first_got=got,
            first_want="poison (0xffff)",
            worst=first,
            worst_got=got,
            worst_want="poison (0xffff)",
            limit="bit-equal",
            note="a region that this call must not touch was written",
        )


def _merged(ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ranges sorted, with touching ones joined."""
    joined: list[list[int]] = []
    for begin, end in sorted(ranges.tolist()):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return np.asarray(joined, dtype=np.int64).reshape(-1, 2)


def _subtract(ranges: npt.NDArray[np.int64], allowed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The parts of ``ranges`` outside ``allowed`` (both sorted and disjoint)."""
    left: list[list[int]] = []
    for begin, end in ranges.tolist():
        at = begin
        for low, high in allowed.tolist():
            if high <= at or low >= end:
                continue
            if low > at:
                left.append([at, low])
            at = max(at, high)
        if at < end:
            left.append([at, end])
    return np.asarray(left, dtype=np.int64).reshape(-1, 2)
