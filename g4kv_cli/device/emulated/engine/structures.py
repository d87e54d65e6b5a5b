"""The structures of ``c/engine.h`` as Python sees them, in the same order."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p

import numpy as np

from ..state.memory import RANGE

FIELDS = 22
LANES = 32
MBARRIERS = 64
"""Of a block, as ``c/async.h`` has room for."""
MOST_AGENTS = 1 << 11
"""Of a cluster's blocks together, as a mark of ``c/races.h`` can name them."""

INSTRUCTION = np.dtype([("run", "<u8"), ("field", "<i4", (FIELDS,))], align=True)
_BLOCK_FIELDS = (
    *("end", "size", "first", "second", "guard", "site", "barrier", "threads", "stores", "loads"),
    *("waits", "address", "is_wide", "offset"),
)
BLOCK = np.dtype(
    [
        ("full", "<u8"),
        ("masked", "<u8"),
        ("look", "<u8"),
        *((name, "<i4") for name in _BLOCK_FIELDS),
    ],
    align=True,
)
STORE = np.dtype(
    [("begin", "<i8"), *((name, "<i4") for name in ("bytes", "site", "block", "is_load", "first", "each"))]
)
FAULT = np.dtype(
    [
        *((name, "<i4") for name in ("kind", "site", "warp", "block")),
        ("lanes", "<u4"),
        ("unused", "<u4"),
        ("address", "<u8"),
    ]
)

OWNED = np.dtype(
    [
        *((name, "<u8") for name in ("begin", "end", "cell_bytes", "numbers", "owners", "may_be", "last")),
        ("words", "<i8"),
    ]
)

FAULT_KINDS = (
    "none",
    "trap",
    "global bounds",
    "misaligned",
    "uninitialised",
    "parameter bounds",
    "shared bounds",
    "shared uninitialised",
    "shared race",
    "lost write",
    "members",
    "divergent barrier",
    "barrier count",
    "deadlock",
    "unknown result",
    "copies full",
    "watchdog",
    "clocks",
    "foreign read",
    "mbarrier",
    "unfinished copy",
    "equal stores",
    "guessed race",
    "local bounds",
    "several spaces",
    "all wait",
    "trace full",
    "unsure",
)
"""Names of ``enum FaultKind``."""

BLOCK_ENDS = {"jump": 0, "branch": 1, "exit": 2, "trap": 3, "barrier": 4, "warp": 5, "phase": 6, "cluster": 7}
RUN_ENDED, RUN_FAULT, RUN_SLICE_OVER, RUN_LOGS_FULL, RUN_CLOCKS_FULL = range(5)


CALL = ctypes.CFUNCTYPE(c_int32, c_int32, c_uint32)
"""The type of ``Launch.call``."""


class Launch(ctypes.Structure):
    """``struct Launch``."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "state")),
        ("base", c_uint64),
        ("ranges", c_void_p),
        ("range_count", c_int64),
        *((name, c_void_p) for name in ("hints", "used")),
        ("parameters", c_void_p),
        ("parameter_bytes", c_int64),
        *((name, c_void_p) for name in ("shared", "shared_state", "within")),
        *((name, c_int64) for name in ("shared_bytes", "shared_room")),
        ("generation", c_uint64),
        *((name, c_int64) for name in ("local_bytes", "local_stride")),
        *((name, c_void_p) for name in ("writers", "readers", "fine_writers", "fine_readers", "fine_atomics")),
        *((name, c_void_p) for name in ("has_fine", "lane_of", "fine_lane_of")),
        ("granules", c_int64),
        *((name, c_int32) for name in ("granule_shift", "reader_stride", "races_on", "warp_count")),
        ("clocks", c_void_p),
        *((name, c_int32) for name in ("agents_each", "agents", "is_async", "unused4")),
        *((name, c_uint32) for name in ("clock", "origin", "latest", "unused2")),
        ("is_guess", c_int32),
        ("stores", c_void_p),
        *((name, c_int64) for name in ("store_count", "store_capacity")),
        *((name, c_uint64) for name in ("watch_begin", "watch_end")),
        *((name, c_void_p) for name in ("saved_in", "saved", "saved_pages")),
        *((name, c_int64) for name in ("saved_count", "saved_capacity")),
        *((name, c_uint32) for name in ("launch_number", "unused1")),
        ("faults", c_void_p),
        *((name, c_int64) for name in ("fault_count", "fault_capacity")),
        ("owned", c_void_p),
        ("owned_count", c_int64),
        ("in_front", c_void_p),
        ("in_front_count", c_int64),
        *((f"{name}_table", c_void_p) for name in ("ex2", "lg2", "rsqrt", "rcp", "sqrt", "sin", "tanh", "square")),
        *((name, c_void_p) for name in ("call", "called")),
        ("blocks", c_void_p),
        *((name, c_int64) for name in ("block_count", "entry", "image_bytes", "frame_bytes", "copies_each")),
        ("image", c_void_p),
        *((name, c_int32) for name in ("clear_frames", "threads")),
        *((name, c_int32 * 3) for name in ("grid", "extent")),
        *((name, c_int64) for name in ("next", "last", "step")),
        ("cursor", c_void_p),
        *((name, c_int64) for name in ("instructions", "instruction_limit", "steps", "step_limit", "slice", "spent")),
        *((name, c_int32) for name in ("is_running", "stop", "current")),
        ("coordinates", c_int32 * 3),
        *((name, c_int32) for name in ("at_warp", "at_block")),
        *((name, c_uint32) for name in ("dynamic_shared_bytes", "total_shared_bytes")),
        *((name, c_int32) for name in ("always_guesses", "together", "loops")),
        ("changes", c_int64),
        ("ticks", c_int64),
        *((name, c_int32) for name in ("resident_count", "ranks")),
        ("cluster", c_int32 * 3),
        ("unused5", c_int32),
        *((name, c_void_p) for name in ("order", "pool")),
        *((name, c_int64) for name in ("products_each", "transfer_capacity", "bulk_capacity")),
        *((name, c_void_p) for name in ("residents", "here", "warps", "barriers", "chunk")),
        ("trace", c_void_p),
        *((name, c_int64) for name in ("trace_bytes", "trace_room", "trace_step")),
        *((name, c_uint64) for name in ("trace_begin", "trace_end")),
        ("trace_sites", c_void_p),
        *(
            (name, c_void_p)
            for name in ("joined", "cluster_joining", "cluster_done", "transfers", "boxes", "bulk_stores")
        ),
        *((name, c_int64) for name in ("transfer_count", "box_count", "bulk_store_count", "cluster_phase")),
        *((name, c_int32) for name in ("batch", "unused3")),
    ]


def sizes() -> tuple[int, ...]:
    """What ``engine_size`` must say, number by number."""
    return (
        ctypes.sizeof(Launch),
        INSTRUCTION.itemsize,
        BLOCK.itemsize,
        FAULT.itemsize,
        STORE.itemsize,
        RANGE.itemsize,
        OWNED.itemsize,
    )
