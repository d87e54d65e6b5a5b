"""Loads and stores through generic addresses: each lane's address decides the state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import GLOBAL_BASE, LOCAL_SHIFT, LOCAL_WINDOW, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW
from .access import Element, Loader, Span, Storer, load_global, span_of, store_global
from .local_memory import load_local, load_parameter, store_local
from .shared_memory import load_shared, store_shared

Array = npt.NDArray[Any]
_WINDOWS = (PARAMETER_WINDOW, LOCAL_WINDOW, SHARED_WINDOW, GLOBAL_BASE)
_BOUNDARIES = np.array(_WINDOWS, np.uint64)
_LOCAL_SPACE, _SHARED_SPACE, GLOBAL_SPACE = 1, 2, 3


def space_of(address: int) -> int:
    """0 parameters, 1 local, 2 shared, 3 global (also whatever lies in no window: it faults there)."""
    for number in (3, 2, 1, 0):
        if address >= _WINDOWS[number]:
            return number
    return GLOBAL_SPACE


def divide_by_space(base: Array, offset: int) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """(space, positions) of every space that occurs."""
    spaces = np.searchsorted(_BOUNDARIES, base + np.uint64(offset & 0xFFFFFFFFFFFFFFFF), "right") - 1
    spaces = np.where(spaces < 0, GLOBAL_SPACE, spaces)
    return [(int(space), np.flatnonzero(spaces == space)) for space in np.unique(spaces)]


def is_in_space(space: str, constants: tuple[tuple[int, int], ...]) -> Callable[..., npt.NDArray[np.bool_]]:
    """isspacep: (lanes, generic address) -> whether it is of the space.

    ``constants`` are (number, bytes) of those of the kernel's device variables that are constants.
    """

    def run(lanes: LaneSet, address: Array) -> npt.NDArray[np.bool_]:
        found = np.where(
            address < np.uint64(_WINDOWS[0]), GLOBAL_SPACE, np.searchsorted(_BOUNDARIES, address, "right") - 1
        )
        if space in ("param", "local"):
            return np.asarray(found == ("param", "local").index(space), np.bool_)
        if space.startswith("shared"):
            ranks = ((address - np.uint64(SHARED_WINDOW)) >> np.uint64(RANK_SHIFT)).astype(np.int64) - 1
            is_own = (ranks < 0) | (ranks == lanes.block_slot % lanes.chunk.cluster_blocks)
            return np.asarray((found == _SHARED_SPACE) & (is_own | (space == "shared::cluster")), np.bool_)
        is_constant = np.zeros(address.shape, np.bool_)
        for number, nbytes in constants:
            begin = lanes.chunk.run.symbols[number]
            is_constant |= (address >= begin) & (address < begin + np.uint64(nbytes))
        return np.asarray(is_constant if space == "const" else (found == GLOBAL_SPACE) & ~is_constant, np.bool_)

    return run


def _rebase(base: Array, space: int) -> Array:
    return base if space == GLOBAL_SPACE else base - np.uint64(_WINDOWS[space])


def _own_local(lanes: LaneSet, base: Array, offset: int, site: Site) -> Array:
    """Addresses in the lanes' own local memory, as which hardware takes those of other threads'; these are reported."""
    inner: Array = base - lanes.local_window
    half = np.uint64(1 << (LOCAL_SHIFT - 1))
    beyond = (inner + np.uint64(offset & 0xFFFFFFFFFFFFFFFF) + half) >> np.uint64(LOCAL_SHIFT)
    foreign = np.flatnonzero(beyond != 0)
    if foreign.size:
        lanes.chunk.run.collector.add(
            "foreign_local_access",
            "access through a pointer into the local memory of another thread, which is its own thread's alone",
            site,
            lanes,
            int(foreign[0]),
            foreign.size,
        )
        inner = inner - (beyond << np.uint64(LOCAL_SHIFT))
    return inner


def _inside(lanes: LaneSet, base: Array, space: int, offset: int, site: Site) -> Array:
    return _own_local(lanes, base, offset, site) if space == _LOCAL_SPACE else _rebase(base, space)


def load_generic(site: Site, offset: int, element: Element, register_bytes: tuple[int, ...]) -> Loader:
    """A function that loads through generic addresses for one instruction."""
    what = site, offset, element, register_bytes
    loaders = [load_parameter(*what), load_local(*what), load_shared(*what, is_of_cluster=True), load_global(*what)]

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        space = space_of(span[0] + offset)
        if space == space_of(span[1] + offset):
            inner = _inside(lanes, base, space, offset, site)
            return loaders[space](lanes, inner, span if inner is base else span_of(inner))
        results: list[Array] = []
        for part, position in divide_by_space(base, offset):
            here = lanes.subset(position)
            inner = _inside(here, base.take(position), part, offset, site)
            values = loaders[part](here, inner, span_of(inner))
            values = values if isinstance(values, tuple) else (values,)
            if not results:
                results = [np.zeros(lanes.count, value.dtype) for value in values]
            for result, value in zip(results, values, strict=True):
                result[position] = value
        return results[0] if element.count == 1 else tuple(results)

    return load


def store_generic(site: Site, offset: int, element: Element) -> Storer:
    """A function that stores through generic addresses for one instruction."""

    def refuse(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        lanes.chunk.run.collector.add(
            "global_out_of_bounds", "store to the read-only parameters", site, lanes, 0, lanes.count, span[0]
        )

    what = site, offset, element
    storers: list[Storer] = [refuse, store_local(*what), store_shared(*what, is_of_cluster=True), store_global(*what)]

    def store(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        space = space_of(span[0] + offset)
        if space == space_of(span[1] + offset):
            inner = _inside(lanes, base, space, offset, site)
            storers[space](lanes, inner, span if inner is base else span_of(inner), *values)
            return
        for part, position in divide_by_space(base, offset):
            here = lanes.subset(position)
            inner = _inside(here, base.take(position), part, offset, site)
            cut = [value if value.shape[0] == 1 else value.take(position) for value in values]
            storers[part](here, inner, span_of(inner), *cut)

    return store
