"""tensormap.replace, and the copy of a tensor map from shared to global memory that a fence goes with.

What is replaced is stored where this encoding of a map has it; each time with the mark of a map, so that 128 zeros
become one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import UnsupportedOpcode
from ..ptx.sites import Site
from ..state.lanes import WARP, LaneSet
from .access import Element, span_of, store_global
from .bulk_copy import displaced
from .generic_memory import store_generic
from .shared_memory import load_shared, store_shared
from .tensor_map import CHUNK_BYTES, MAGIC, TENSOR_MAP_BYTES

Array = npt.NDArray[Any]
_STORERS: dict[str | None, Any] = {"global": store_global, "shared": store_shared, None: store_generic}
_MARK = np.frombuffer(MAGIC, np.uint64)


def replace_field(site: Site, space: str | None, offset: int, at: int, nbytes: int, plus: int) -> Callable[..., None]:
    """(lanes, address of the map, new value): ``nbytes`` at ``at`` of the map become the value plus ``plus``."""
    mark = _STORERS[space](site, offset, Element(len(MAGIC), 1, False))
    store = _STORERS[space](site, offset + at, Element(nbytes, 1, False))
    dtype: Any = {2: np.uint16, 4: np.uint32, 8: np.uint64}[nbytes]

    def run(lanes: LaneSet, base: Array, value: Array) -> None:
        span = span_of(base)
        mark(lanes, base, span, _MARK)
        store(lanes, base, span, (value + value.dtype.type(plus % (1 << 8 * value.itemsize))).astype(dtype))

    return run


def require_one(site: Site) -> Callable[..., None]:
    """(lanes, new value) of a field that has one value here: raises UnsupportedOpcode for another."""

    def run(lanes: LaneSet, value: Array) -> None:
        if (value != 1).any():
            raise UnsupportedOpcode(site.opcode, site.ptx_line, f"a stride of {int(value.max())} elements")

    return run


def copy_map(site: Site, target_offset: int, source_offset: int) -> Callable[..., None]:
    """(lanes, global address, shared address): the first lanes of each warp copy 16 bytes each."""
    element = Element(8, 2, False)
    load, store = load_shared(site, 0, element, (8, 8)), store_global(site, 0, element)

    def run(lanes: LaneSet, target: Array, source: Array) -> None:
        if not lanes.frame.is_whole:
            words = f"a warp executes the instruction with only the lanes {int(lanes.frame.present_bits[0]):#010x}"
            lanes.chunk.run.collector.add("illegal_instruction", words, site, lanes, 0, lanes.count)
        first = np.flatnonzero(lanes.index % WARP < TENSOR_MAP_BYTES // CHUNK_BYTES)
        here, step = lanes.subset(first), lanes.index[first] % WARP * CHUNK_BYTES
        source, target = (
            np.broadcast_to(displaced(base, offset), (lanes.count,)).take(first) + step.astype(base.dtype)
            for base, offset in ((source, source_offset), (target, target_offset))
        )
        store(here, target, span_of(target), *load(here, source, span_of(source)))
        lanes.chunk.order.fence(lanes, "gpu")

    return run
