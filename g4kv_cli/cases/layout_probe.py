"""The proof of the device twin: kv_offsets.cuh against NumPy's own index arithmetic, on a device.

A probe kernel computes the offset of listed coordinates. What must come out is derived without the formula of
model/kv_layout.py: a pool is an array of shape ``[page][layer][K, V][slot][head][dim]``, so the offset of a
coordinate is ``numpy.ravel_multi_index`` over that shape (model/pool_image.py, where rows of K are shorter than those
of V as well). No pool is allocated: these are addresses only, so they may lie far past the device's memory.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import KV_KINDS, KvLayout, KvLayoutParameters
from g4kv_cli.model.pool_image import BLOCK_AXES, PoolImage
from g4kv_cli.records.run import Mismatch

PROBE_SOURCE = "layout_probe.cu"
PROBE_KERNEL = "kv_layout_probe"
STRUCT_PROBE_KERNEL = "kv_layout_struct_probe"

AXES = ("page", "layer", "kv", "slot", "head", "dim")
"""Columns of a coordinate; ``kv`` is 0 for K and 1 for V."""
_BLOCK_COLUMNS = tuple(AXES.index(axis) for axis in BLOCK_AXES)

OFFSET_KINDS = ("kv_element_offset", "kv_row_offset", "kv_layer_k_offset and kv_layer_v_offset")
"""What the probe kernel reports of each coordinate, in this order: functions of kv_offsets.cuh."""

_AXES_OF_KIND = (6, 5, 3)
"""Leading axes that each kind depends on; the others count as 0."""

_SMALL_POOL_SHAPE = (3, 2, 2, 5, 3, 7)
"""Extents that all differ, where the layout leaves a choice: an exchange of two axes cannot go unnoticed."""
_SMALL_FOLDED_K_DIM = 4

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


def probe_small_pool(library: KernelLibrary, kv_format: KvFormat = SPLIT) -> ProbeGroup:
    """Prove kv_offsets.cuh for every coordinate of a small pool of a format.

    Raises DeviceFault if the probe kernel faults, CompileError if it cannot be built.
    """
    pages, layers, _, slots, heads, dims = _SMALL_POOL_SHAPE
    k_dim = dims if kv_format == SPLIT else _SMALL_FOLDED_K_DIM
    small = KvLayout.derive(page_size=slots, num_layers=layers, num_kv_heads=heads, head_dim=dims, k_dim=k_dim)
    of_each = [_of_block(kv, np.unravel_index(np.arange(np.prod(shape)), shape)) for kv, shape in _blocks(small, pages)]
    return _probe(library, "every coordinate", small, pages, np.concatenate(of_each))


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
    image = PoolImage.of(layout, num_pages)
    expected = np.empty((len(coordinates), len(OFFSET_KINDS)), dtype=np.int64)
    for kv in (0, 1):
        rows = coordinates[:, AXES.index("kv")] == kv
        columns = coordinates[rows].astype(np.int64).T
        for kind, axes in enumerate(_AXES_OF_KIND):
            kept = [column if axis < axes else np.zeros_like(column) for axis, column in enumerate(columns)]
            expected[rows, kind] = image.offsets([kept[axis] for axis in _BLOCK_COLUMNS], kv)
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


def _blocks(layout: KvLayout, num_pages: int) -> list[tuple[int, tuple[int, ...]]]:
    """K (0) and V (1), each with the extents of page, layer, slot, head, dim."""
    rest = (num_pages, layout.num_layers, layout.page_size, layout.num_kv_heads)
    return [(0, (*rest, layout.k_dim)), (1, (*rest, layout.head_dim))]


def _of_block(kv: int, places: Sequence[npt.NDArray[Any]]) -> Coordinates:
    """Places (page, layer, slot, head, dim) of K or V as coordinates."""
    page, layer, *rest = places
    return np.ascontiguousarray(np.stack([page, layer, np.full_like(page, kv), *rest], axis=1).astype(np.int32))


def _corners(layout: KvLayout, num_pages: int) -> Coordinates:
    """All combinations of the first, second, middle and last index of each axis."""
    found = []
    for kv, shape in _blocks(layout, num_pages):
        indices = [sorted({0, min(1, extent - 1), extent // 2, extent - 1}) for extent in shape]
        found.append(_of_block(kv, list(np.array(list(itertools.product(*indices))).T)))
    return np.concatenate(found)


def _around(edge: int, layout: KvLayout, num_pages: int) -> Coordinates:
    """The elements next to an offset, and those one to three rows, slots, blocks, layers and pages away."""
    blocks = {layout.kv_block_len, layout.v_block_len, layout.layer_stride, layout.page_stride}
    steps = {1, *(size(kv) for size in (layout.row_dim, layout.slot_stride) for kv in KV_KINDS)} | blocks
    distances = set(range(-64, 65))
    for step, times, beside in itertools.product(steps, (-3, -2, -1, 1, 2, 3), (-1, 0, 1)):
        distances.add(times * step + beside)
    pool_elems = num_pages * layout.page_stride
    image = PoolImage.of(layout, num_pages)
    found = [image.coordinate(edge + distance) for distance in sorted(distances) if 0 <= edge + distance < pool_elems]
    return np.array([list(place.values()) for place in found], dtype=np.int32).reshape(-1, len(AXES))
