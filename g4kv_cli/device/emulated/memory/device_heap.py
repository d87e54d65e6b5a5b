"""malloc and free in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import EmulatorError
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import ALIGNMENT_BYTES

Array = npt.NDArray[Any]


def allocate_bytes(site: Site) -> Callable[..., Array]:
    """malloc: (lanes, bytes, alignment if one is asked for) -> address, 0 where the heap has not so much."""
    line = f":{site.location.line}" if site.location.line else ""
    label = f"malloc at {site.location.file or 'PTX line'}{line or f' {site.ptx_line}'}"

    def run(lanes: LaneSet, nbytes: Array, alignment: Array | None = None) -> Array:
        heap = lanes.chunk.run.heap
        if alignment is not None and int(alignment.max()) > ALIGNMENT_BYTES:
            raise EmulatorError(f"{label} asks for more than {ALIGNMENT_BYTES} bytes of alignment")
        sizes = np.broadcast_to(nbytes, (lanes.count,)).tolist()
        return np.array([heap.allocate(size, label) for size in sizes], np.uint64)

    return run


def free_bytes(site: Site) -> Callable[..., None]:
    """free: (lanes, address)."""

    def run(lanes: LaneSet, address: Array) -> None:
        heap = lanes.chunk.run.heap
        for position, each in enumerate(np.broadcast_to(address, (lanes.count,)).tolist()):
            wrong = heap.free(each) if each else ""
            if wrong:
                lanes.chunk.run.collector.add("use_after_free", wrong, site, lanes, position, 1, each)

    return run
