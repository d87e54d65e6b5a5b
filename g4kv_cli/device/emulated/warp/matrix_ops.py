"""ldmatrix, stmatrix, movmatrix and mma.sync: fragments of 8x8 matrices across the lanes of a warp.

Fragment order as recorded from an NVIDIA H200: lane 4g + t holds row g, columns 2t and 2t + 1 of an 8x8 matrix;
A register 2 * (k half) + (row half), B register (k half), C registers 2 * (row half) + (column parity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.mma import mma
from ..arithmetic.packed16 import Format
from ..checks.conflicts import READ
from ..memory.access import span_of
from ..memory.shared_memory import SharedMemory
from ..ptx.sites import Site
from ..state.lanes import WARP, LaneSet

Array = npt.NDArray[Any]
_EVERY_LANE = np.array([0xFFFFFFFF], np.uint32)


def check_whole(lanes: LaneSet, site: Site) -> None:
    """Report a warp of which not all lanes are here."""
    if lanes.frame.is_whole:
        return
    bits = int(lanes.frame.present_bits[0])
    lanes.chunk.run.collector.add(
        "exited_lane_shuffle",
        f"a warp executes the instruction with only the lanes {bits:#010x}; it needs all 32",
        site,
        lanes,
        0,
        lanes.count,
    )


def loaded_together(lanes: LaneSet) -> None:
    """Whole warps have loaded a matrix: what their lanes read before was read then."""
    lanes.chunk.exchanged(lanes, _EVERY_LANE)


def _row_lanes(lanes: LaneSet, base: Array, matrices: int) -> tuple[LaneSet, Array]:
    """The lanes that give row addresses, and their addresses."""
    frame = lanes.frame
    table = frame.spread(base)[:, : 8 * matrices]
    warps = lanes.index[::WARP] // WARP if frame.is_whole else np.unique(lanes.index // WARP)
    index = (warps[:, None] * WARP + np.arange(8 * matrices)).reshape(-1)
    if index.size == lanes.count and frame.is_whole:
        return lanes, np.ascontiguousarray(table).reshape(-1)
    return LaneSet(lanes.chunk, index), np.ascontiguousarray(table).reshape(-1)


def transpose_matrix(site: Site) -> Callable[..., Any]:
    """movmatrix: (lanes, a) -> the 8x8 matrix that the warp holds, rows and columns changed round."""

    def run(lanes: LaneSet, a: Array) -> Array:
        check_whole(lanes, site)
        table = np.ascontiguousarray(lanes.frame.spread(a)).view(np.uint16)
        # matrix[row][lane of the row and half: column]
        turned = table.reshape(-1, 8, 8).transpose(0, 2, 1)
        return lanes.frame.collect(np.ascontiguousarray(turned).reshape(-1, 2 * WARP).view(np.uint32))

    return run


def _receivers(givers: LaneSet, matrices: int, is_transposed: bool) -> list[LaneSet]:
    """Two of the lanes that read each row: what a lane wrote is always read by another too."""
    warp, row = np.divmod(np.arange(givers.count), 8 * matrices)
    row %= 8
    first, second = (row // 2, row // 2 + 4) if is_transposed else (4 * row, 4 * row + 1)
    base = givers.index[warp * 8 * matrices] // WARP * WARP
    return [LaneSet(givers.chunk, base + lane) for lane in (first, second)]


def load_matrices(site: Site, offset: int, matrices: int, is_transposed: bool) -> Callable[..., Any]:
    """ldmatrix: (lanes, addresses) -> one register, or a tuple."""

    def run(lanes: LaneSet, base: Array) -> Any:
        check_whole(lanes, site)
        shared: SharedMemory = lanes.chunk.shared
        givers, addresses = _row_lanes(lanes, base, matrices)
        units = shared.units(givers, addresses, span_of(addresses), offset, 4, site)
        raw = shared.load(units, 4, givers, site, notes_read=shared.chunk.has_clocks)
        if not shared.chunk.has_clocks:
            for readers in _receivers(givers, matrices, is_transposed):
                shared.races.add(READ, units, 4, readers, site)
        loaded_together(lanes)
        rows = lanes.frame.rows
        if is_transposed:
            halves = raw.view(np.uint16).reshape(rows, matrices, 8, 8).transpose(1, 0, 3, 2)
            table = np.ascontiguousarray(halves).view(np.uint32).reshape(matrices, rows, WARP)
        else:
            table = np.ascontiguousarray(raw.view(np.uint32).reshape(rows, matrices, WARP).transpose(1, 0, 2))
        registers = tuple(lanes.frame.collect(part) for part in table)
        return registers if matrices > 1 else registers[0]

    return run


def store_matrices(site: Site, offset: int, matrices: int, is_transposed: bool) -> Callable[..., None]:
    """stmatrix: (lanes, addresses, registers...)."""

    def run(lanes: LaneSet, base: Array, *registers: Array) -> None:
        check_whole(lanes, site)
        shared: SharedMemory = lanes.chunk.shared
        givers, addresses = _row_lanes(lanes, base, matrices)
        units = shared.units(givers, addresses, span_of(addresses), offset, 4, site)
        frame = lanes.frame
        table = np.stack([frame.spread(register) for register in registers], axis=1)
        if is_transposed:
            halves = table.view(np.uint16).reshape(frame.rows, matrices, 8, 8).transpose(0, 1, 3, 2)
            table = np.ascontiguousarray(halves)
        shared.store(units, 4, table.reshape(-1).view(np.complex128), givers, site)

    return run


def whole_warp(site: Site) -> Callable[[LaneSet], None]:
    """The check of a mma.sync alone: (lanes)."""

    def run(lanes: LaneSet) -> None:
        check_whole(lanes, site)

    return run


def multiply(site: Site | None, form: Format, k_halves: int, count: int) -> Callable[..., Any]:
    """``count`` independent mma.sync m16n8k16 (k_halves 2) or m16n8k8 (1): (lanes, registers...) -> 4 registers each.

    Registers: A of all, B of all, C of all; those of one multiply together. ``site`` None: its warp was checked.
    """

    def run(lanes: LaneSet, *registers: Array) -> tuple[Array, ...]:
        if site is not None:
            check_whole(lanes, site)
        frame = lanes.frame
        tiles = frame.rows * count
        b_first, c_first = 2 * k_halves * count, 3 * k_halves * count

        def table(first: int, step: int) -> Array:
            parts = [frame.spread(registers[first + number * step]) for number in range(count)]
            return np.ascontiguousarray(parts[0]) if count == 1 else np.concatenate(parts)

        a = np.zeros((tiles, 16, 16), np.uint16)
        b = np.zeros((tiles, 16, 8), np.uint16)
        c = np.empty((tiles, 16, 8), np.uint32)
        for half in range(k_halves):
            columns = slice(8 * half, 8 * half + 8)
            for row_half in range(2):
                fragment = table(2 * half + row_half, 2 * k_halves).view(np.uint16).reshape(tiles, 8, 8)
                a[:, 8 * row_half : 8 * row_half + 8, columns] = fragment
            fragment = table(b_first + half, k_halves).view(np.uint16).reshape(tiles, 8, 8)
            b[:, columns, :] = fragment.transpose(0, 2, 1)
        for number in range(4):
            fragment = table(c_first + number, 4).reshape(tiles, 8, 4)
            c[:, 8 * (number // 2) : 8 * (number // 2) + 8, number % 2 :: 2] = fragment
        d = mma(a, b, c, form)
        parts = [
            np.ascontiguousarray(d[:, 8 * (number // 2) : 8 * (number // 2) + 8, number % 2 :: 2])
            for number in range(4)
        ]
        return tuple(
            frame.collect(part.reshape(count, frame.rows, WARP)[multiply_number])
            for multiply_number in range(count)
            for part in parts
        )

    return run
