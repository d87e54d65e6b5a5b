"""Pools in forms that no order of six axes is: with gaps, with an axis in two pieces (``dim/8 slot dim%8``, as packed
keys lie), with K and V in allocations and forms of their own.

A call's pool is copied into the form in front of the call and back behind it. Gaps are NaN, and nobody may store there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.provider import CheckedRequest, NotCovered
from g4kv_cli.errors import DeviceFault, UsageError
from g4kv_cli.model.kv_layout import Coordinate
from g4kv_cli.model.pool_layout import MOST_OFFSETS, OffsetType
from g4kv_cli.model.pool_order import POOL_AXES, PoolShape
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS
from g4kv_cli.providers.callables import MAX_COPIED_BYTES, store_changed

Array = npt.NDArray[Any]
PartName = Literal["pool", "k_pool", "v_pool"]
_TOKEN = re.compile(r"([a-z]+)(?:([/%])([1-9]\d*))?")
_SPLIT_AXES = ("slot", "head", "dim")
_PIECES = {"": "", "/": "_div", "%": "_mod"}


@dataclass(frozen=True, slots=True)
class AxisPiece:
    """An axis, or one of its two pieces: ``/``: index // size, ``%``: index % size."""

    axis: str
    piece: str = ""
    size: int = 0

    @property
    def text(self) -> str:
        """As a manifest has it."""
        return f"{self.axis}{self.piece}{self.size or ''}"

    @property
    def name(self) -> str:
        """As names of expressions have it."""
        return f"{self.axis}{_PIECES[self.piece]}"

    def extent(self, extents: Mapping[str, int]) -> int:
        """How many indices it has. Raises NotCovered where the pieces do not come out even."""
        whole = extents[self.axis]
        if self.size and whole % self.size:
            raise NotCovered(f"a pool with {self.text} needs a {self.axis} of a multiple of {self.size}, got {whole}")
        return {"": whole, "/": whole // max(self.size, 1), "%": self.size}[self.piece]


@dataclass(frozen=True, slots=True)
class PartForm:
    """One allocation: its axes, outermost first, and what is stated of their strides (elements, by the axis' text)."""

    name: PartName
    axes: tuple[AxisPiece, ...]
    strides: tuple[tuple[str, int], ...] = ()
    offsets: OffsetType = "int64"
    alignment_bytes: int = 0

    @classmethod
    def parse(
        cls, name: PartName, text: str, strides: Mapping[str, int], offsets: OffsetType = "int64", alignment: int = 0
    ) -> PartForm:
        """``"layer page head dim/8 slot dim%8"``. Raises UsageError that names what is missing, twice or unknown."""
        axes = []
        for word in text.split():
            found = _TOKEN.fullmatch(word)
            if found is None or found[1] not in POOL_AXES or (found[2] and found[1] not in _SPLIT_AXES):
                raise UsageError(
                    f"{word!r} is no axis; they are {', '.join(POOL_AXES)}, and pieces of {', '.join(_SPLIT_AXES)} "
                    "such as dim/8 and dim%8"
                )
            axes.append(AxisPiece(found[1], found[2] or "", int(found[3] or 0)))
        wanted = [axis for axis in POOL_AXES if axis != "kv" or name == "pool"]
        if name == "pool" and not any(piece.axis == "kv" for piece in axes):
            axes.insert(0, AxisPiece("kv"))
        for axis in dict.fromkeys([*wanted, *(piece.axis for piece in axes)]):
            pieces = sorted((piece.piece, piece.size) for piece in axes if piece.axis == axis)
            sizes = {size for _, size in pieces}
            if axis not in wanted or not (
                pieces == [("", 0)] or ([kind for kind, _ in pieces] == ["%", "/"] and len(sizes) == 1)
            ):
                raise UsageError(
                    f"the axes {text!r} must have each of {', '.join(wanted)} once, or both its pieces ({axis}/N and "
                    f"{axis}%N); {axis} has {', '.join(piece.text for piece in axes if piece.axis == axis) or 'none'}"
                )
        known = [piece.text for piece in axes]
        for stated in strides:
            if stated not in known:
                raise UsageError(f"strides: {stated!r} is none of the axes {', '.join(known)}")
        return cls(name, tuple(axes), tuple(strides.items()), offsets, alignment)

    def extents(self, shape: PoolShape) -> tuple[int, ...]:
        """In memory's order, of a pool of this logical shape."""
        logical = dict(zip(POOL_AXES, shape, strict=True))
        return tuple(piece.extent(logical) for piece in self.axes)

    def strides_elems(self, shape: PoolShape) -> dict[str, int]:
        """Elements from one index to the next, by the pieces' names; an axis of which none is stated leaves no gap."""
        stated, found, step = dict(self.strides), {}, 1
        for piece, extent in zip(reversed(self.axes), reversed(self.extents(shape)), strict=True):
            found[piece.name] = stated.get(piece.text, step)
            step = max(step, found[piece.name] * extent)
        return {piece.name: found[piece.name] for piece in self.axes}

    def elements(self, shape: PoolShape) -> int:
        """From the first to the last, gaps included."""
        steps = self.strides_elems(shape).values()
        return 1 + sum((extent - 1) * step for extent, step in zip(self.extents(shape), steps, strict=True))

    def offset(self, where: Coordinate, shape: PoolShape) -> int:
        """The element offset of a place; of ``kv`` only where the part has both. Raises UsageError for one outside."""
        logical, total = dict(zip(POOL_AXES, shape, strict=True)), 0
        steps = self.strides_elems(shape)
        for piece in self.axes:
            index = "kv".index(where.kv) if piece.axis == "kv" else getattr(where, piece.axis)
            if not 0 <= index < logical[piece.axis]:
                raise UsageError(f"{piece.axis} must be from 0 to {logical[piece.axis] - 1} in this pool, got {index}")
            inside = {"": index, "/": index // max(piece.size, 1), "%": index % max(piece.size, 1)}
            total += inside[piece.piece] * steps[piece.name]
        return total

    def view(self, flat: Array, shape: PoolShape) -> Array:
        """A flat allocation as a view by the logical axes that this part has; an axis in pieces is two."""
        steps = [step * flat.itemsize for step in self.strides_elems(shape).values()]
        order = [self.axes.index(piece) for piece in self._logical_pieces()]
        return as_strided(flat, self.extents(shape), steps).transpose(order)

    def split(self, logical: Array) -> Array:
        """A view of [page][layer]([K, V])[slot][head][dim] with the axes that are in pieces here as two."""
        extents = dict(
            zip((axis for axis in POOL_AXES if axis != "kv" or self.name == "pool"), logical.shape, strict=True)
        )
        return logical.reshape([piece.extent(extents) for piece in self._logical_pieces()])

    def require_good(self, shape: PoolShape) -> None:
        """Raises UsageError for a pool of which two elements lie at one place or whose rows are not aligned as stated,
        and NotCovered for one that the stated type of offsets does not reach."""
        elements, count = self.elements(shape), math.prod(self.extents(shape))
        if elements - 1 > MOST_OFFSETS[self.offsets]:
            raise NotCovered(f"{self.offsets} offsets do not reach the last of {elements} elements of {self.name}")
        span, inside = 1, "an element"
        steps = sorted(
            zip(self.strides_elems(shape).values(), self.extents(shape), self.axes, strict=True),
            key=lambda one: one[:2],
        )
        for step, extent, piece in steps:
            if extent > 1 and step < span:
                taken = np.zeros(elements, bool)
                self.view(taken, shape)[...] = True
                if int(taken.sum()) < count:
                    raise UsageError(
                        f"the pool overlaps itself: one {piece.text} is {step} elements, and what lies inside it, up "
                        f"to {inside}, takes {span}"
                    )
            if step > 1 and extent > 1 and self.alignment_bytes and step * BF16.itemsize % self.alignment_bytes:
                raise UsageError(
                    f"rows have to begin at multiples of {self.alignment_bytes} bytes, but one {piece.text} is "
                    f"{step * BF16.itemsize} bytes"
                )
            span += (extent - 1) * step
            inside = piece.text

    def _logical_pieces(self) -> list[AxisPiece]:
        return sorted(self.axes, key=lambda piece: (POOL_AXES.index(piece.axis), piece.piece == "%"))


def shared_strides(strides: Mapping[str, int]) -> dict[str, int]:
    """What expressions see of strides that K and V share: each also as K's own and V's, as they have where they lie
    apart."""
    sides = ("", *(f"{side}_" for side in "kv"))
    return {
        f"{side}stride_{name}": step for side in sides for name, step in strides.items() if not (side and name == "kv")
    }


@dataclass(frozen=True, slots=True)
class PoolForm:
    """One part, or one for K and one for V."""

    parts: tuple[PartForm, ...]

    @property
    def is_apart(self) -> bool:
        """Whether K and V have parts of their own."""
        return len(self.parts) > 1

    def numbers(self, shape: PoolShape, layer: int) -> dict[str, int]:
        """What expressions see of it: where K and V of the layer begin, and strides (elements)."""
        found: dict[str, int] = {}
        for part in self.parts:
            strides, side = part.strides_elems(shape), part.name[0]
            if self.is_apart:
                found |= {f"{side}_stride_{name}": step for name, step in strides.items()}
                found[f"{side}_offset"] = layer * strides["layer"]
            else:
                found |= shared_strides(strides)
                found["k_offset"] = layer * strides["layer"]
                found["v_offset"] = found["k_offset"] + strides["kv"]
        return found

    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of its numbers and of its parts."""
        shape = (1, 1, 2, *(math.lcm(*(one.size or 1 for part in self.parts for one in part.axes)),) * 3)
        return frozenset(self.numbers(shape, 0)), frozenset(part.name for part in self.parts)


class StagedPool:
    """A call's pool in its form. Raises NotCovered for one that is too large to be copied, or is not covered."""

    def __init__(self, form: PoolForm, request: CheckedRequest, shape: PoolShape) -> None:
        self._form, self._request, self._shape = form, request, shape
        device, own = request.device, request.arrays["pool"]
        if own.nbytes > MAX_COPIED_BYTES:
            raise NotCovered(f"the pool has {own.nbytes / 2**30:.1f} GiB, too many to be copied into the engine's form")
        for part in form.parts:
            part.require_good(shape)
        logical = bits(device.read(own)).reshape(shape)
        self._before: dict[str, Array] = {}
        self.arrays: dict[str, DeviceArray] = {}
        try:
            for part in form.parts:
                flat = np.full(part.elements(shape), POISON_BITS, np.uint16)
                part.view(flat, shape)[...] = part.split(self._part_of(logical, part))
                self._before[part.name] = flat
                self.arrays[part.name] = device.upload(flat.view(BF16), part.name)
        except BaseException:
            device.free_all(list(self.arrays.values()))
            raise

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The extents of the parts' axes, of those without gaps."""
        parts = {part: part.extents(self._shape) for part in self._form.parts}
        return {part.name: each for part, each in parts.items() if math.prod(each) == part.elements(self._shape)}

    def pieces_of_page(self, page: int) -> tuple[DeviceArray, ...]:
        """The stretches of memory that a page lies in."""
        found = []
        for part in self._form.parts:
            inside = np.zeros(part.elements(self._shape), bool)
            part.view(inside, self._shape)[page] = True
            array = self.arrays[part.name]
            found += [array.view((end - begin,), offset_elems=begin) for begin, end in _runs(inside)]
        return tuple(found)

    def give_back(self) -> None:
        """Copy what was stored into the call's own pool. Raises DeviceFault for a store where nothing lies, and for any
        store of kernels that only read."""
        device, request = self._request.device, self._request
        logical = np.zeros(self._shape, np.uint16)
        stored = np.zeros(self._shape, bool)
        for part in self._form.parts:
            array = self.arrays[part.name]
            now = bits(device.read(array)).reshape(-1)
            touched = _stored(device, array, now != self._before[part.name])
            self._require_inside(part, touched)
            for whole, flat in ((logical, now), (stored, touched)):
                part.split(self._part_of(whole, part))[...] = part.view(flat, self._shape)
        if not stored.any():
            return
        if not request.entry.writes_pool:
            at = dict(zip(POOL_AXES, (int(one[0]) for one in np.nonzero(stored)), strict=True))
            words = ", ".join(f"{axis} {'KV'[index] if axis == 'kv' else index}" for axis, index in at.items())
            raise DeviceFault([f"pool_write: attention stored to the pool, first at {words}"], ["pool_write"])
        own = request.arrays["pool"]
        if device.info.kind == "emulated":
            store_changed(device, own, logical.reshape(-1).view(np.uint8), np.repeat(stored.reshape(-1), BF16.itemsize))
        else:
            device.write(own, logical.reshape(-1).view(BF16))

    def _part_of(self, logical: Array, part: PartForm) -> Array:
        """A part's own of [page][layer][K, V][slot][head][dim], a view."""
        return logical if part.name == "pool" else logical[:, :, "kv".index(part.name[0])]

    def _require_inside(self, part: PartForm, touched: Array) -> None:
        outside = touched.copy()
        part.view(outside, self._shape)[...] = False
        if outside.any():
            first, count = int(np.argmax(outside)), int(outside.sum())
            raise DeviceFault(
                [f"pool_gap_write: {count} elements stored where {part.name} has a gap, the first at element {first}"],
                ["pool_gap_write"],
            )


def _stored(device: Device, array: DeviceArray, changed: Array) -> Array:
    """Which elements were stored to: those that a device that records stores has seen, else those that differ."""
    ranges = device.written_ranges(array)
    if ranges is None:
        return changed
    found = np.zeros(changed.shape, bool)
    for begin, end in ranges.tolist():
        found[begin // BF16.itemsize : -(-end // BF16.itemsize)] = True
    return found


def _runs(inside: Array) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of true elements."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
