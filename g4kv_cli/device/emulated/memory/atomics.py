"""atom and red: lanes that meet at one location take turns in lane order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.opcodes import ELEMENTWISE
from ..checks.shared_races import ATOMIC
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import SHARED_WINDOW
from .access import ALL_INITIALISED, SIGNED, UNSIGNED, Span, check_initialised, global_units, span_of
from .generic_memory import GLOBAL_SPACE, divide_by_space, space_of
from .shared_memory import SharedMemory

Array = npt.NDArray[Any]
Update = Callable[[Array, Array, Array], Array]
"""(old, b, c) -> new, all raw bits."""


def _signed(function: Any, nbytes: int) -> Update:
    def update(old: Array, b: Array, c: Array) -> Array:
        result: Array = function(old.view(SIGNED[nbytes]), b.view(SIGNED[nbytes])).view(UNSIGNED[nbytes])
        return result

    return update


def _plain(function: Any) -> Update:
    return lambda old, b, c: function(old, b)


def _increment(old: Array, b: Array, c: Array) -> Array:
    return np.where(old >= b, np.uint32(0), old + np.uint32(1))


def _decrement(old: Array, b: Array, c: Array) -> Array:
    return np.where((old == 0) | (old > b), b, old - np.uint32(1))


_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def update_function(operation: str, kind: str, is_shared: bool) -> Update | None:
    """What an atomic does to a location; None if the form is not known exactly."""
    nbytes = int(kind[1:]) // 8 if kind[1:].isdigit() else 0
    if operation == "add" and kind == "f32":
        # Recorded: global memory flushes subnormals, shared memory keeps them.
        return _plain(ELEMENTWISE["add.f32" if is_shared else "add.ftz.f32"].function)
    if nbytes not in (4, 8) or kind[0] == "f":
        return None
    if operation == "add" and kind in ("u32", "s32", "u64"):
        return _plain(np.add)
    if operation in ("min", "max") and kind[0] in "us":
        function = np.minimum if operation == "min" else np.maximum
        return _signed(function, nbytes) if kind[0] == "s" else _plain(function)
    if operation in _BITWISE and kind[0] == "b":
        return _plain(_BITWISE[operation])
    if operation == "exch" and kind[0] == "b":
        return lambda old, b, c: b
    if operation == "cas" and kind[0] == "b":
        return lambda old, b, c: np.where(old == b, c, old)
    if kind == "u32":
        return {"inc": _increment, "dec": _decrement}.get(operation)
    return None


def apply_in_turns(view: Array, units: npt.NDArray[np.int64], update: Update, b: Array, c: Array) -> Array:
    """Apply an atomic for every lane; returns what each lane found."""
    count = units.size
    b, c = (np.broadcast_to(value, (count,)) for value in (b, c))
    order = np.argsort(units, kind="stable")
    in_order = units[order]
    starts = np.concatenate(([True], in_order[1:] != in_order[:-1]))
    if starts.all():
        old: Array = view.take(units)
        view[units] = update(old, b, c)
        return old
    first = np.flatnonzero(starts)
    turn = np.arange(count) - np.repeat(first, np.diff(np.append(first, count)))
    found = np.empty(count, view.dtype)
    by_turn = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[by_turn], np.arange(int(turn.max()) + 2))
    for begin, end in pairwise(bounds.tolist()):
        now = order[by_turn[begin:end]]
        place = units[now]
        old = view.take(place)
        found[now] = old
        view[place] = update(old, b[now], c[now])
    return found


def atomic(site: Site, space: str | None, offset: int, operation: str, kind: str, returns: bool) -> Callable[..., Any]:
    """A function (lanes, base, span, b[, c]) for one atom or red; ``returns`` the old values."""
    nbytes = int(kind[1:]) // 8
    shift = nbytes.bit_length() - 1
    dtype: Any = UNSIGNED[nbytes]
    updates = {is_shared: update_function(operation, kind, is_shared) for is_shared in (False, True)}

    def on_global(lanes: LaneSet, base: Array, span: Span, b: Array, c: Array) -> Array:
        units, allocation = global_units(lanes, base, span, offset, shift, site)
        run = lanes.chunk.run
        memory = run.memory
        if allocation is None or not allocation.fully_initialised:
            check_initialised(lanes, units, shift, allocation, site)
            memory.state.of[shift][units] = ALL_INITIALISED[shift]
        if units.shape[0] != lanes.count:
            units = np.repeat(units, lanes.count)
        run.stores.add(units, shift, lanes, site, True)
        return apply_in_turns(memory.data.of[shift], units, _known(updates[False]), b, c)

    def on_shared(lanes: LaneSet, base: Array, span: Span, b: Array, c: Array) -> Array:
        shared: SharedMemory = lanes.chunk.shared
        units = shared.units(lanes, base, span, offset, shift, site)
        shared.check_initialised(lanes, units, shift, site)
        if units.shape[0] != lanes.count:
            units = np.repeat(units, lanes.count)
        shared.races.add(ATOMIC, units, shift, lanes, site)
        return apply_in_turns(shared.data.of[shift], units, _known(updates[True]), b, c)

    def on_generic(lanes: LaneSet, base: Array, span: Span, b: Array, c: Array) -> Array:
        window = np.uint64(SHARED_WINDOW)
        if space_of(span[0] + offset) == space_of(span[1] + offset) == GLOBAL_SPACE:
            return on_global(lanes, base, span, b, c)
        found = np.zeros(lanes.count, dtype)
        base, b, c = (np.broadcast_to(value, (lanes.count,)) for value in (base, b, c))
        for part, position in divide_by_space(base, offset):
            here = base.take(position)
            if part == GLOBAL_SPACE:
                function = on_global
            else:
                function, here = on_shared, here - window
            cut = lanes.subset(position)
            found[position] = function(cut, here, span_of(here), b.take(position), c.take(position))
        return found

    chosen = {"global": on_global, "shared": on_shared, None: on_generic}[space]

    def run(lanes: LaneSet, base: Array, span: Span, b: Array, *rest: Array) -> Any:
        found = chosen(lanes, base, span, b.astype(dtype, copy=False), rest[0].astype(dtype, copy=False) if rest else b)
        return found if returns else None

    return run


def _known(update: Update | None) -> Update:
    if update is None:
        raise ValueError("an atomic of unknown meaning was translated")
    return update
