"""atom and red: lanes that meet at one location take turns in lane order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.opcodes import ELEMENTWISE
from ..checks.conflicts import ATOMIC
from ..checks.order import synchronise
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import SHARED_WINDOW
from .access import ALL_INITIALISED, SIGNED, UNSIGNED, Span, check_initialised, differs, global_units, span_of
from .atomic_chains import Chain, Update, chain_of
from .generic_memory import GLOBAL_SPACE, divide_by_space, space_of
from .shared_memory import SharedMemory, placed

Array = npt.NDArray[Any]


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


@dataclass(frozen=True)
class Atomic:
    """One form: ``count`` elements of ``nbytes`` bytes at consecutive addresses, each updated by itself; those of b128
    together."""

    operation: str
    kind: str
    nbytes: int
    count: int
    is_reduction: bool
    """Whether it returns nothing (``red``)."""


def _add_f64_shared(old: Array, b: Array) -> Array:
    """Recorded: as add.f64, the operand first."""
    result: Array = ELEMENTWISE["add.f64"].function(b, old)
    return result


def _add_f64_global(old: Array, b: Array) -> Array:
    """Recorded: as add.f64, but a NaN stays as it is, the operand's before the memory's."""
    result: Array = ELEMENTWISE["add.f64"].function(old, b)
    for value in (old, b):
        result = np.where(np.isnan(value.view(np.float64)), value, result)
    return result


_HALVES = frozenset({"f16", "bf16", "f16x2", "bf16x2"})


def update_function(operation: str, kind: str, is_shared: bool, is_reduction: bool) -> Update | None:
    """What an atomic does to a location; None if the form is not known exactly."""
    nbytes = int(kind[1:]) // 8 if kind[1:].isdigit() else 0
    if operation == "add" and kind == "f32":
        # Recorded: global memory flushes subnormals, shared memory keeps them.
        return _plain(ELEMENTWISE["add.f32" if is_shared else "add.ftz.f32"].function)
    if kind in _HALVES and operation in ("add", "min", "max"):
        return _plain(ELEMENTWISE[f"{operation}.{kind}"].function)
    if kind == "f64":
        return _plain(_add_f64_shared if is_shared else _add_f64_global) if operation == "add" else None
    if kind == "b16" and operation == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    if nbytes not in (4, 8) or kind[0] not in "bus":
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


def apply_in_turns(
    view: Array, units: npt.NDArray[np.int64], update: Update, b: Array, c: Array, chain: Chain | None = None
) -> Array:
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
    ends = np.append(first[1:], count)
    turn = np.arange(count) - np.repeat(first, ends - first)
    found = np.empty(count, view.dtype)
    seen = None if chain is None else chain(view.take(in_order), b[order], c[order], turn)
    if seen is not None:
        last = ends - 1
        view[in_order[last]] = update(seen[last], b[order[last]], c[order[last]])
        found[order] = seen
        return found
    by_turn = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[by_turn], np.arange(int(turn.max()) + 2))
    for begin, end in pairwise(bounds.tolist()):
        now = order[by_turn[begin:end]]
        place = units[now]
        old = view.take(place)
        found[now] = old
        view[place] = update(old, b[now], c[now])
    return found


def swap_pairs(view: Array, units: npt.NDArray[np.int64], values: Sequence[Array], compares: bool) -> list[Array]:
    """Exchange 16 bytes for every lane in turn, or (``compares``) where they are the first two values: what each
    found."""
    count = units.size
    table = np.stack([np.broadcast_to(value, (count,)) for value in values])
    found = np.empty((2, count), view.dtype)
    for lane, unit in enumerate(units.tolist()):
        here = view[2 * unit : 2 * unit + 2]
        found[:, lane] = here
        if not compares or (here == table[:2, lane]).all():
            here[:] = table[-2:, lane]
    return list(found)


def atomic(site: Site, space: str | None, offset: int, what: Atomic) -> Callable[..., Any]:
    """A function (lanes, base, span, count values b, count values c) for one atom or red."""
    count, shift = what.count, what.nbytes.bit_length() - 1
    full_shift = (what.nbytes * count).bit_length() - 1
    dtype: Any = UNSIGNED[what.nbytes]
    updates = {
        is_shared: update_function(what.operation, what.kind, is_shared, what.is_reduction)
        for is_shared in (False, True)
    }
    chain = chain_of(what.operation, what.kind, updates[True])

    def apply(view: Array, units: npt.NDArray[np.int64], is_shared: bool, values: Sequence[Array]) -> list[Array]:
        if what.kind == "b128":
            return swap_pairs(view, units, values, what.operation == "cas")
        update = _known(updates[is_shared])
        second = values[count:] if len(values) > count else values[:count]
        return [
            apply_in_turns(view, units * count + place, update, values[place], second[place], chain)
            for place in range(count)
        ]

    def on_global(lanes: LaneSet, base: Array, span: Span, *values: Array) -> list[Array]:
        units, allocation = global_units(lanes, base, span, offset, full_shift, site)
        run = lanes.chunk.run
        memory = run.memory
        if allocation is None or not allocation.fully_initialised:
            check_initialised(lanes, units, full_shift, allocation, site)
            run.undo.keep(units, full_shift)
            memory.state.of[full_shift][units] = ALL_INITIALISED[full_shift]
        if units.shape[0] != lanes.count:
            units = np.repeat(units, lanes.count)
        run.stores.add(units, full_shift)
        run.accesses.add(ATOMIC, units, full_shift, lanes, site)
        run.undo.keep(units, full_shift)
        return in_order(lanes, memory.data.of, units, values, False)

    def on_shared(lanes: LaneSet, base: Array, span: Span, *values: Array) -> list[Array]:
        shared: SharedMemory = lanes.chunk.shared
        by = offset
        if space != "shared":
            lanes, base, span, by = placed(lanes, base, span, offset, site)
        units = shared.units(lanes, base, span, by, full_shift, site)
        shared.check_initialised(lanes, units, full_shift, site)
        if units.shape[0] != lanes.count:
            units = np.repeat(units, lanes.count)
        shared.races.add(ATOMIC, units, full_shift, lanes, site)
        return in_order(lanes, shared.data.of, units, values, True)

    def in_order(
        lanes: LaneSet, views: Sequence[Array], units: npt.NDArray[np.int64], values: tuple[Array, ...], is_shared: bool
    ) -> list[Array]:
        """Apply the atomic, and take part in the order of the launch."""
        run = lanes.chunk.run
        before = views[full_shift].take(units) if run.watches_changes else None
        found = apply(views[shift], units, is_shared, values)
        if before is not None and differs(views[full_shift].take(units), before).any():
            run.changed()
        synchronise(site, lanes, units << full_shift, True, is_shared)
        return found

    def on_generic(lanes: LaneSet, base: Array, span: Span, *values: Array) -> list[Array]:
        window = np.uint64(SHARED_WINDOW)
        if space_of(span[0] + offset) == space_of(span[1] + offset) == GLOBAL_SPACE:
            return on_global(lanes, base, span, *values)
        found = [np.zeros(lanes.count, dtype) for _ in range(count)]
        base, *values_here = (np.broadcast_to(value, (lanes.count,)) for value in (base, *values))
        for part, position in divide_by_space(base, offset):
            here = base.take(position)
            if part == GLOBAL_SPACE:
                function = on_global
            else:
                function, here = on_shared, here - window
            cut = lanes.subset(position)
            parts = function(cut, here, span_of(here), *(value.take(position) for value in values_here))
            for whole, piece in zip(found, parts, strict=True):
                whole[position] = piece
        return found

    chosen = {"global": on_global, "shared": on_shared, "shared::cluster": on_shared, None: on_generic}[space]

    def run(lanes: LaneSet, base: Array, span: Span, *values: Array) -> Any:
        found = chosen(lanes, base, span, *(value.astype(dtype, copy=False) for value in values))
        if what.is_reduction:
            return None
        return found[0] if count == 1 else tuple(found)

    return run


def _known(update: Update | None) -> Update:
    if update is None:
        raise ValueError("an atomic of unknown meaning was translated")
    return update
