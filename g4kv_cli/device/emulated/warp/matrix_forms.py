"""``mma.sync`` of every type, and ``wmma``: loads, stores and products of fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.mma_forms import Form, multiply
from ..memory.access import Element, load_global, span_of, store_global
from ..memory.generic_memory import load_generic, store_generic
from ..memory.shared_memory import load_shared, store_shared
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from .fragments import Fragment, Fragments
from .matrix_ops import check_whole, loaded_together

Array = npt.NDArray[Any]

_LOADERS = {"global": load_global, "shared": load_shared, None: load_generic}
_STORERS = {"global": store_global, "shared": store_shared, None: store_generic}


def _results(registers: list[Array]) -> Any:
    return registers[0] if len(registers) == 1 else tuple(registers)


def multiply_form(site: Site, form: Form, fragments: Fragments, counts: tuple[int, int, int]) -> Callable[..., Any]:
    """(lanes, registers of A, of B, of C) -> registers of D; ``counts`` of the registers that the opcode names."""

    def run(lanes: LaneSet, *registers: Array) -> Any:
        check_whole(lanes, site)
        frame = lanes.frame
        spread = [frame.spread(register) for register in registers]
        first_b, first_c = counts[0], counts[0] + counts[1]
        a = fragments.a.gather(spread[:first_b])
        b = fragments.b.gather(spread[first_b:first_c])
        c = fragments.c.gather(spread[first_c:])
        found = fragments.c.scatter(multiply(form, a, b, c))
        return _results([frame.collect(register) for register in found])

    return run


def _places(fragment: Fragment, lanes: LaneSet, number: int, part: int, stride: Array, by_rows: bool) -> Array:
    """Byte offsets of one element of a fragment for each lane."""
    row = fragment.row[number, :, part].take(lanes.laneid)
    column = fragment.column[number, :, part].take(lanes.laneid)
    major, minor = (row, column) if by_rows else (column, row)
    places: Array = (major * stride.astype(np.int64) + minor) * fragment.element_bits // 8
    return places


def _moved(base: Array, places: Array) -> Array:
    moved: Array = base + places.astype(base.dtype)
    return moved


def load_fragment(
    site: Site, space: str | None, offset: int, fragment: Fragment, by_rows: bool, count: int
) -> Callable[..., Any]:
    """wmma.load: (lanes, address, elements from one row or column to the next) -> ``count`` registers."""
    is_by_words = fragment.element_bits < 8  # a register is a word of memory then
    nbytes = 4 if is_by_words else fragment.element_bits // 8
    load = _LOADERS[space](site, offset, Element(nbytes, 1, False), (max(nbytes, 2),))
    kind: Any = np.uint64 if fragment.register_bits == 64 else np.uint32

    def run(lanes: LaneSet, base: Array, stride: Array) -> Any:
        check_whole(lanes, site)
        found = []
        for number in range(fragment.registers):
            register: Array = np.zeros(lanes.count, kind)
            for part in range(1 if is_by_words else fragment.row.shape[2]):
                at = _moved(base, _places(fragment, lanes, number, part, stride, by_rows))
                register |= load(lanes, at, span_of(at)).astype(kind) << kind(part * fragment.element_bits)
            found.append(register)
        loaded_together(lanes)
        return _results([found[number % len(found)] for number in range(count)])

    return run


def store_fragment(
    site: Site, space: str | None, offset: int, fragment: Fragment, by_rows: bool
) -> Callable[..., None]:
    """wmma.store: (lanes, address, elements from one row or column to the next, registers...)."""
    nbytes = fragment.element_bits // 8
    store = _STORERS[space](site, offset, Element(nbytes, 1, False))

    def run(lanes: LaneSet, base: Array, stride: Array, *registers: Array) -> None:
        check_whole(lanes, site)
        for number in range(fragment.registers):
            for part in range(fragment.row.shape[2]):
                at = _moved(base, _places(fragment, lanes, number, part, stride, by_rows))
                bits = registers[number] >> registers[number].dtype.type(part * fragment.element_bits)
                store(lanes, at, span_of(at), bits)

    return run
