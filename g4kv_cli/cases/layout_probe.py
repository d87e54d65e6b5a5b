"""The proof of the device twin: kv_offsets.cuh against NumPy's own index arithmetic, on a device.

A probe kernel computes the offset of listed coordinates. What must come out is derived without the formula of
model/kv_layout.py: a pool is an array of shape ``[page][layer][K, V][slot][head][dim]``, so the offset of a
coordinate is ``numpy.ravel_multi_index`` over that shape. No pool is allocated: these are addresses only, so
they may lie far past the device's memory.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_layout import KvLayout, KvLayoutParameters
from g4kv_cli.records.run import Mismatch

PROBE_SOURCE = "layout_probe.cu"
PROBE_KERNEL = "kv_layout_probe"
STRUCT_PROBE_KERNEL = "kv_layout_struct_probe"

AXES = ("page", "layer", "kv", "slot", "head", "dim")
"""Columns of a coordinate; ``kv`` is 0 for K and 1 for V."""

OFFSET_KINDS = ("kv_element_offset", "kv_row_offset", "kv_layer_k_offset and kv_layer_v_offset")
"""What the probe kernel reports of each coordinate, in this order: functions of kv_offsets.cuh."""

_AXES_OF_KIND = (6, 5, 3)
"""Leading axes that each kind depends on; the others count as 0."""

_SMALL_POOL_SHAPE = (3, 2, 2, 5, 3, 7)
"""Extents that all differ, where the layout leaves a choice: an exchange of two axes cannot go unnoticed."""

_THREADS_PER_BLOCK = 128
_MAX_PAGES = 1 << 31
"""Page ids are int32."""
_INT64_VALUES = 1 << 63

Coordinates = npt.NDArray[np.int32]
"""[count, 6], columns as AXES."""


class LayoutProbeParameters(ctypes.Structure):
    """``struct LayoutProbeParams`` of kernels/layout_probe.cu, which asserts the same offsets and size."""

    _fields_ = (
        ("layout", KvLayoutParameters),
        ("coordinates", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("count", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class ProbeGroup:
    """One set of coordinates of one layout, and what disagreed (at most one record per kind of offset)."""

    name: str
    layout: KvLayout
    total: int
    disagreeing: int
    mismatches: tuple[Mismatch, ...]
    seconds: float


def probe_small_pool(library: KernelLibrary) -> ProbeGroup:
    """Prove kv_offsets.cuh for every coordinate of a small pool.

    Raises DeviceFault if the probe kernel faults, CompileError if it cannot be built.
    """
    pages, layers, _, slots, heads, dims = _SMALL_POOL_SHAPE
    small = KvLayout.derive(page_size=slots, num_layers=layers, num_kv_heads=heads, head_dim=dims)
    return _probe(library, "every coordinate", small, pages, _all_coordinates())


def probe_layout(library: KernelLibrary, layout: KvLayout) -> tuple[ProbeGroup, ...]:
    """Prove kv_offsets.cuh for a layout at the places that break: its corners, and both 32-bit edges.

    Raises as :func:`probe_small_pool`, and UsageError for a layout whose page does not fit 64-bit offsets.
    """
    # As many pages as int32 page ids and 64-bit offsets allow.
    num_pages = min(_MAX_PAGES, (_INT64_VALUES - 1) // layout.page_stride)
    if num_pages < 1:
        raise UsageError("one page of this layout does not fit 64-bit offsets: give a smaller --page-size")
    groups = [_probe(library, "corners of the layout", layout, num_pages, _corners(layout, num_pages))]
    for name, edge in (("the int32 edge", 1 << 31), ("the uint32 edge", 1 << 32)):
        coordinates = _around(edge, layout, num_pages)
        if len(coordinates):
            groups.append(_probe(library, f"around {name}, offset {edge}", layout, num_pages, coordinates))
    return tuple(groups)


def expected_offsets(layout: KvLayout, num_pages: int, coordinates: Coordinates) -> npt.NDArray[np.int64]:
    """int64 [count, 3]: what each kind of offset has to be, from the pool's shape alone."""
    shape = _shape(layout, num_pages)
    columns = coordinates.astype(np.int64).T
    expected = np.empty((len(coordinates), len(OFFSET_KINDS)), dtype=np.int64)
    for kind, axes in enumerate(_AXES_OF_KIND):
        kept = [column if axis < axes else np.zeros_like(column) for axis, column in enumerate(columns)]
        expected[:, kind] = np.ravel_multi_index(tuple(kept), shape)
    return expected


def device_offsets(library: KernelLibrary, layout: KvLayout, coordinates: Coordinates) -> npt.NDArray[np.int64]:
    """int64 [count, 3]: what kv_offsets.cuh computes on the library's device."""
    device = library.device
    uploaded = device.upload(coordinates, "coordinates")
    offsets = device.allocate((len(coordinates), len(OFFSET_KINDS)), np.int64, "offsets")
    try:
        parameters = LayoutProbeParameters(layout.parameters(), uploaded.address, offsets.address, len(coordinates))
        launch(
            library,
            PROBE_SOURCE,
            PROBE_KERNEL,
            grid=(-(-len(coordinates) // _THREADS_PER_BLOCK), 1, 1),
            block=(_THREADS_PER_BLOCK, 1, 1),
            arguments=(parameters,),
            must_write=(offsets,),
        )
        return device.read(offsets)
    finally:
        device.free_all((uploaded, offsets))


def _probe(library: KernelLibrary, name: str, layout: KvLayout, num_pages: int, coordinates: Coordinates) -> ProbeGroup:
    begin = time.perf_counter()
    got = device_offsets(library, layout, coordinates)
    want = expected_offsets(layout, num_pages, coordinates)
    wrong = got != want
    mismatches = tuple(
        _mismatch(OFFSET_KINDS[kind], coordinates, got[:, kind], want[:, kind])
        for kind in range(len(OFFSET_KINDS))
        if wrong[:, kind].any()
    )
    disagreeing = int(wrong.any(axis=1).sum())
    return ProbeGroup(name, layout, len(coordinates), disagreeing, mismatches, time.perf_counter() - begin)


def _mismatch(
    operation: str, coordinates: Coordinates, got: npt.NDArray[np.int64], want: npt.NDArray[np.int64]
) -> Mismatch:
    wrong = np.flatnonzero(got != want)
    first = int(wrong[0])
    # In Python integers: a difference of two int64 can leave int64.
    worst = max(wrong.tolist(), key=lambda index: abs(int(got[index]) - int(want[index])))
    return Mismatch(
        operation=operation,
        count=len(wrong),
        total=len(coordinates),
        first=_named(coordinates[first]),
        first_got=str(got[first]),
        first_want=str(want[first]),
        worst=_named(coordinates[worst]),
        worst_got=str(got[worst]),
        worst_want=str(want[worst]),
        limit="equal",
        note="element offsets; kv is 0 for K and 1 for V",
    )


def _named(coordinate: npt.NDArray[np.int32]) -> dict[str, int]:
    return dict(zip(AXES, coordinate.tolist(), strict=True))


def _shape(layout: KvLayout, num_pages: int) -> tuple[int, ...]:
    # pool[page][layer][K, V][slot][head][dim]
    return (num_pages, layout.num_layers, 2, layout.page_size, layout.num_kv_heads, layout.head_dim)


def _stacked(axes: tuple[npt.NDArray[Any], ...]) -> Coordinates:
    return np.ascontiguousarray(np.stack(axes, axis=1).astype(np.int32))


def _all_coordinates() -> Coordinates:
    return _stacked(np.unravel_index(np.arange(np.prod(_SMALL_POOL_SHAPE)), _SMALL_POOL_SHAPE))


def _corners(layout: KvLayout, num_pages: int) -> Coordinates:
    """All combinations of the first, second, middle and last index of each axis."""
    shape = _shape(layout, num_pages)
    indices = [sorted({0, min(1, extent - 1), extent // 2, extent - 1}) for extent in shape]
    return np.array(list(itertools.product(*indices)), dtype=np.int32)


def _around(edge: int, layout: KvLayout, num_pages: int) -> Coordinates:
    """The elements next to an offset, and those one to three rows, slots, blocks, layers and pages away."""
    blocks = {layout.kv_block_len, layout.layer_stride, layout.page_stride}
    steps = {1, layout.head_dim, layout.row_elems} | blocks
    distances = set(range(-64, 65))
    for step, times, beside in itertools.product(steps, (-3, -2, -1, 1, 2, 3), (-1, 0, 1)):
        distances.add(times * step + beside)
    pool_elems = num_pages * layout.page_stride
    offsets = sorted(edge + distance for distance in distances if 0 <= edge + distance < pool_elems)
    return _stacked(np.unravel_index(np.array(offsets, dtype=np.int64), _shape(layout, num_pages)))
