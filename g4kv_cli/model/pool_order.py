"""Orders of a pool's axes in memory: g4kv's own, and those of other engines, as data.

Whatever the order, a pool is one allocation without gaps, and everything that looks at it names its elements by the
logical axes ``[page][layer][K, V][slot][head][dim]``. K and V in pools of their own are an outermost ``kv`` axis: two
halves of one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.errors import UsageError

POOL_AXES = ("page", "layer", "kv", "slot", "head", "dim")
"""The logical order, which is also the built-in kernels' order in memory."""
PoolShape = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """``axes``: outermost first, each of POOL_AXES once, ``dim`` last."""

    axes: tuple[str, ...] = POOL_AXES

    @classmethod
    def parse(cls, text: str) -> PoolOrder:
        """``"layer page head slot dim"``; without ``kv``, K and V lie apart. Raises UsageError."""
        axes = tuple(text.split())
        if "kv" not in axes:
            axes = ("kv", *axes)
        if sorted(axes) != sorted(POOL_AXES):
            raise UsageError(f"the axes {text!r} must name each of {', '.join(POOL_AXES)} once (kv may be left out)")
        if axes[-1] != "dim":
            raise UsageError(f"the innermost of the axes {text!r} must be dim: kernels read rows of it")
        return cls(axes)

    @property
    def is_own(self) -> bool:
        """Whether it is the built-in kernels'."""
        return self.axes == POOL_AXES

    def physical_shape(self, shape: PoolShape) -> tuple[int, ...]:
        """The extents in memory of a pool of this logical shape."""
        return tuple(shape[POOL_AXES.index(axis)] for axis in self.axes)

    def strides_elems(self, shape: PoolShape) -> dict[str, int]:
        """Elements from one index to the next, by axis."""
        physical = self.physical_shape(shape)
        return {axis: math.prod(physical[at + 1 :]) for at, axis in enumerate(self.axes)}

    def logical(self, flat: npt.NDArray[Any], shape: PoolShape) -> npt.NDArray[Any]:
        """A view of a flat pool by the logical axes; writing to it writes to the pool."""
        return flat.reshape(self.physical_shape(shape)).transpose([self.axes.index(axis) for axis in POOL_AXES])

    def page_pieces(self, page: int, shape: PoolShape, layer: int | None = None) -> list[tuple[int, int]]:
        """(first element, number of elements) of each stretch of memory that a page lies in; of one layer, if given."""
        fixed = {"page": page} if layer is None else {"page": page, "layer": layer}
        inner = max(map(self.axes.index, fixed)) + 1
        physical = self.physical_shape(shape)
        # flat[axes up to the inner of page and layer][inner axes..]
        outer = [
            [fixed[axis]] if axis in fixed else range(extent)
            for axis, extent in zip(self.axes[:inner], physical[:inner], strict=True)
        ]
        inside = math.prod(physical[inner:])
        numbers = [0]
        for extent, indices in zip(physical[:inner], outer, strict=True):
            numbers = [number * extent + index for number in numbers for index in indices]
        return [(number * inside, inside) for number in numbers]

    def offsets(self, places: Sequence[npt.ArrayLike], shape: PoolShape) -> npt.NDArray[np.int64]:
        """Element offsets of logical places, broadcast together: page, layer, K or V, slot, head, dim."""
        strides = self.strides_elems(shape)
        # flat[sum of index * stride over the logical axes]
        total = np.zeros((), np.int64)
        for axis, index in zip(POOL_AXES, places, strict=True):
            total = total + np.asarray(index, np.int64) * strides[axis]
        return np.asarray(total)

    def coordinates(self, offsets: npt.ArrayLike, shape: PoolShape) -> tuple[npt.NDArray[np.int64], ...]:
        """The logical places of element offsets: the inverse of ``offsets``."""
        found = np.unravel_index(np.asarray(offsets, np.int64), self.physical_shape(shape))
        return tuple(np.asarray(found[self.axes.index(axis)], np.int64) for axis in POOL_AXES)


OWN_ORDER = PoolOrder()
