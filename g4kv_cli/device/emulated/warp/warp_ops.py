"""Operations across the lanes of a warp: shfl, vote, match, redux, elect, and the checks of their member masks.

Checked against recordings of an NVIDIA H200 (random lanes, widths and member masks: no difference).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import WARP, LaneSet, pack_lanes, unpack_lanes

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
WarpFunction = Callable[..., Any]

_FULL = 0xFFFFFFFF
_LANE = np.arange(WARP)


def check_members(lanes: LaneSet, mask: Array, site: Site) -> None:
    """Report executing lanes that the mask leaves out, and members of the mask that live and are not here."""
    frame = lanes.frame
    if mask.shape[0] == 1 and frame.is_whole and int(mask[0]) == _FULL:
        return
    own = (mask >> lanes.laneid) & np.uint32(1)
    left_out = np.flatnonzero(own == 0)
    collector = lanes.chunk.run.collector
    if left_out.size:
        position = int(left_out[0])
        collector.add(
            "exited_lane_shuffle",
            f"lane {int(lanes.laneid[position])} executes the instruction but is not in its member mask "
            f"{int(mask[position if mask.size > 1 else 0]):#010x}",
            site,
            lanes,
            position,
            left_out.size,
        )
    alive = pack_lanes(lanes.chunk.alive_flags().reshape(-1, WARP))[lanes.warps]
    absent = frame.collect(frame.spread(mask) & (alive & ~frame.present_bits)[:, None])
    missing = np.flatnonzero((absent != 0) & (own != 0))
    if missing.size:
        position = int(missing[0])
        bits = int(absent[position])
        collector.add(
            "exited_lane_shuffle",
            f"lane {(bits & -bits).bit_length() - 1} is in the member mask but is elsewhere",
            site,
            lanes,
            position,
            missing.size,
        )


def _exchange(lanes: LaneSet, mask: Array, site: Site) -> None:
    check_members(lanes, mask, site)
    lanes.chunk.order.exchange(lanes, mask)


@lru_cache(maxsize=256)
def _uniform_source(mode: str, b: int, c: int) -> tuple[npt.NDArray[np.int64], Flags]:
    source, valid = _sources(mode, np.array([[b]], np.int64), np.array([[c]], np.int64))
    return source[0], valid[0]


def _sources(mode: str, b: Array, c: Array) -> tuple[npt.NDArray[np.int64], Flags]:
    """(source lane, whether it is in range) per lane; b and c are int64 tables (warps, 32) or (1, 1)."""
    b = b & 31
    clamp, segment = c & 31, (c >> 8) & 31
    lane = _LANE[None]
    limit = (lane & segment) | (clamp & ~segment)
    if mode == "up":
        source = lane - b
        valid = source >= limit
    elif mode == "down":
        source = lane + b
        valid = source <= limit
    elif mode == "bfly":
        source = lane ^ b
        valid = source <= limit
    else:
        source = (lane & segment) | (b & ~segment)
        valid = source <= limit
    return np.where(valid, source, np.broadcast_to(lane, source.shape)), valid


def shuffle(site: Site, mode: str, wants_predicate: bool) -> WarpFunction:
    """shfl.sync: (lanes, a, b, c, mask) -> (value, in-range predicate or None)."""

    def run(lanes: LaneSet, a: Array, b: Array, c: Array, mask: Array) -> tuple[Array, Flags | None]:
        _exchange(lanes, mask, site)
        frame = lanes.frame
        if b.shape[0] == 1 and c.shape[0] == 1:
            source, valid = _uniform_source(mode, int(b[0]), int(c[0]))
            if frame.is_whole:
                flags = np.tile(valid, frame.rows) if wants_predicate else None
                if a.shape[0] == 1:
                    return a, flags
                return a.reshape(-1, WARP).take(source, axis=1).reshape(-1), flags
            source, valid = source[None], valid[None]
        else:
            source, valid = _sources(mode, frame.spread(b).astype(np.int64), frame.spread(c).astype(np.int64))
        source = np.broadcast_to(source, (frame.rows, WARP))
        valid = np.broadcast_to(valid, source.shape)
        if frame.present is not None:
            lost = ~np.take_along_axis(frame.present, source, 1)
            source = np.where(lost, _LANE[None], source)
            bad = np.flatnonzero(frame.collect(lost))
            if bad.size:
                lanes.chunk.run.collector.add(
                    "exited_lane_shuffle",
                    "shfl reads a lane that has exited or is elsewhere",
                    site,
                    lanes,
                    int(bad[0]),
                    bad.size,
                )
        values = np.take_along_axis(frame.spread(a), source, 1)
        return frame.collect(values), frame.collect(valid) if wants_predicate else None

    return run


def vote(site: Site, mode: str) -> WarpFunction:
    """vote.sync: (lanes, predicate, mask) -> predicate, or the ballot bits."""

    def run(lanes: LaneSet, predicate: Array, mask: Array) -> Array:
        _exchange(lanes, mask, site)
        frame = lanes.frame
        members = frame.spread(mask) & frame.present_bits[:, None]
        bits = pack_lanes(frame.spread(predicate))[:, None] & members
        if mode == "ballot":
            return frame.collect(bits)
        if mode == "all":
            return frame.collect(bits == members)
        if mode == "any":
            return frame.collect(bits != 0)
        return frame.collect((bits == members) | (bits == 0))

    return run


def match(site: Site, mode: str) -> WarpFunction:
    """match.sync: (lanes, a, mask) -> equal lanes (any), or (mask or 0, predicate) (all)."""

    def run(lanes: LaneSet, a: Array, mask: Array) -> Any:
        _exchange(lanes, mask, site)
        frame = lanes.frame
        table = frame.spread(a)
        members = frame.spread(mask) & frame.present_bits[:, None]
        equal = table[:, :, None] == table[:, None, :]
        bits = pack_lanes(equal.reshape(-1, WARP)).reshape(frame.rows, WARP) & members
        if mode == "any":
            return frame.collect(bits)
        same = bits == members
        return frame.collect(np.where(same, members, np.uint32(0))), frame.collect(same)

    return run


_REDUCERS: dict[str, tuple[Any, Any]] = {
    "add": (np.add, 0),
    "min": (np.minimum, None),
    "max": (np.maximum, None),
    "and": (np.bitwise_and, _FULL),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


def reduce_warp(site: Site, operation: str, is_signed: bool) -> WarpFunction:
    """redux.sync: (lanes, a, mask) -> the members' reduction."""
    function, neutral = _REDUCERS[operation]
    dtype: Any = np.int32 if is_signed else np.uint32
    if neutral is None:
        extremes = np.iinfo(dtype)
        neutral = extremes.max if operation == "min" else extremes.min
    fill = np.array(neutral, np.int64).astype(dtype)

    def run(lanes: LaneSet, a: Array, mask: Array) -> Array:
        _exchange(lanes, mask, site)
        frame = lanes.frame
        table = frame.spread(a).view(dtype) if a.shape[0] != 1 else frame.spread(a.view(dtype))
        members = frame.spread(mask) & frame.present_bits[:, None]
        if (members == members[:, :1]).all() or (frame.present is None and mask.shape[0] == 1):
            inside = unpack_lanes(members[:, 0])
            rows = function.reduce(np.where(inside, table, fill), axis=1, dtype=dtype)
            result = np.broadcast_to(rows[:, None], (frame.rows, WARP))
        else:
            inside = unpack_lanes(members)
            result = function.reduce(np.where(inside, table[:, None, :], fill), axis=2, dtype=dtype)
        return frame.collect(np.ascontiguousarray(result).view(np.uint32))

    return run


def elect(site: Site) -> WarpFunction:
    """elect.sync: (lanes, mask) -> (lowest member lane, whether this lane is it)."""

    def run(lanes: LaneSet, mask: Array) -> tuple[Array, Flags]:
        check_members(lanes, mask, site)
        frame = lanes.frame
        members = frame.spread(mask) & frame.present_bits[:, None]
        lowest = members & (~members + np.uint32(1))
        leader = frame.collect(np.log2(np.maximum(lowest, 1).astype(np.float64)).astype(np.uint32))
        return leader, leader == lanes.laneid

    return run


def active_mask() -> WarpFunction:
    """activemask: (lanes) -> bits of the lanes that execute together here."""

    def run(lanes: LaneSet) -> Array:
        frame = lanes.frame
        return frame.collect(np.broadcast_to(frame.present_bits[:, None], (frame.rows, WARP)))

    return run


def warp_barrier(site: Site) -> WarpFunction:
    """bar.warp.sync: (lanes, mask)."""

    def run(lanes: LaneSet, mask: Array) -> None:
        check_members(lanes, mask, site)
        lanes.chunk.order.warp_barrier(lanes, mask)

    return run
