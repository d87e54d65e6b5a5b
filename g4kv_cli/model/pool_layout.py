"""A pool that somebody else lays out: the order of its axes, and strides where it has gaps; and what is wrong with it.

Offsets are elements, as plain Python integers. An element's offset is the sum over the axes of index times stride, and
nothing else: that is the layout's definition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from g4kv_cli.errors import UsageError
from g4kv_cli.model.document import Table, read_toml
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import BF16_BYTES, DEFAULT_PAGE_SIZE_TOKENS, INT32_MAX, Coordinate
from g4kv_cli.model.pool_order import POOL_AXES, PoolOrder

OffsetType = Literal["int32", "uint32", "int64"]
MOST_OFFSETS: dict[OffsetType, int] = {"int32": INT32_MAX, "uint32": (1 << 32) - 1, "int64": (1 << 63) - 1}
PAGE_IDS = INT32_MAX + 1
MAX_COUNTED_ROWS = 1 << 24
"""Rows that are compared one by one where strides do not nest."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What a file says of a pool. ``strides`` (elements) are those that are stated; the others leave no gap.

    ``alignment_bytes``: what every row has to begin at a multiple of; 0 where nothing is stated. ``offsets``: the type
    that kernels hold element offsets in.
    """

    source: str
    order: PoolOrder
    is_apart: bool
    page_size: int | None = None
    num_layers: int | None = None
    num_pages: int | None = None
    strides: Mapping[str, int] = dataclasses.field(default_factory=dict)
    element_bytes: int = BF16_BYTES
    alignment_bytes: int = 0
    offsets: OffsetType = "int64"


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A description with a geometry's extents. ``extents`` and ``strides`` (elements) by axis, outermost axis first."""

    geometry: Geometry
    description: PoolDescription
    extents: dict[str, int]
    strides: dict[str, int]
    has_known_size: bool = True
    """Otherwise nobody said how many pages there are, and there are as many as int32 has ids."""

    @property
    def row_alignment_bytes(self) -> int:
        """The largest power of two that every row (a head's ``dim``) begins at a multiple of, in an aligned pool."""
        steps = [self.strides[axis] for axis, extent in self.extents.items() if axis != "dim" and extent > 1]
        nbytes = math.gcd(*steps, 1 << 62) * self.description.element_bytes
        return nbytes & -nbytes

    @property
    def pool_elems(self) -> int:
        """Elements from the pool's first to its last, gaps included."""
        return 1 + sum((extent - 1) * self.strides[axis] for axis, extent in self.extents.items())

    @property
    def used_elems(self) -> int:
        """Elements without the gaps."""
        return math.prod(self.extents.values())

    def offset(self, index: Mapping[str, int]) -> int:
        """The element offset of an index by axis. Raises UsageError for one outside."""
        for axis, extent in self.extents.items():
            if not 0 <= index[axis] < extent:
                raise UsageError(f"{axis} must be from 0 to {extent - 1} in this pool, got {index[axis]}")
        # pool[..], in any order: the sum of index * stride
        return sum(index[axis] * stride for axis, stride in self.strides.items())

    @property
    def nests(self) -> bool:
        """Whether every axis steps over all that the axes of smaller strides take."""
        span = 1
        for axis in sorted(self.extents, key=lambda axis: self.strides[axis]):
            if self.extents[axis] > 1 and self.strides[axis] < span:
                return False
            span += (self.extents[axis] - 1) * self.strides[axis]
        return True

    def coordinate(self, offset: int) -> Coordinate:
        """The element at an offset. Raises UsageError for a gap, an offset outside, and strides that do not nest."""
        if not self.nests:
            raise UsageError("--offset: the strides of this pool do not nest; ask with --at")
        rest, found = offset, {}
        for axis in sorted(self.strides, key=lambda axis: (-self.strides[axis], self.extents[axis])):
            found[axis] = min(rest // self.strides[axis], self.extents[axis] - 1)
            rest -= found[axis] * self.strides[axis]
        if offset < 0 or rest:
            raise UsageError(f"element offset {offset} is in a gap of this pool, or outside of it")
        return Coordinate(found["page"], found["layer"], "kv"[found["kv"]], found["slot"], found["head"], found["dim"])  # type: ignore[arg-type]

    def findings(self) -> list[str]:
        """What the pool does not keep of what its description states."""
        stated = self.description
        found = []
        if stated.alignment_bytes and self.row_alignment_bytes % stated.alignment_bytes:
            axis = next(axis for axis, stride in self.strides.items() if axis != "dim" and self.extents[axis] > 1
                        and stride * stated.element_bytes % stated.alignment_bytes)  # fmt: skip
            nbytes = self.strides[axis] * stated.element_bytes
            found.append(
                f"alignment: rows have to begin at multiples of {stated.alignment_bytes} bytes, but one {axis} is "
                f"{nbytes} bytes"
            )
        most = MOST_OFFSETS[stated.offsets]
        if self.pool_elems - 1 > most:
            found.append(
                f"offsets: {stated.offsets} holds offsets up to {most}, but the last element is at "
                f"{self.pool_elems - 1} (from page {self.first_page_past(most)} on)"
            )
        return found

    def first_page_past(self, most: int) -> int | None:
        """The first page that has an element whose offset is above ``most``; None if no page has."""
        if self.pool_elems - 1 <= most:
            return None
        others = sum((extent - 1) * self.strides[axis] for axis, extent in self.extents.items() if axis != "page")
        return max(0, -(-(most + 1 - others) // self.strides["page"]))


def read_pool(file: Path) -> PoolDescription:
    """A pool's description from the [pool] of a TOML file. Raises UsageError with file, line and key."""
    document = read_toml(file, "pool")
    root = Table(document, document.values)
    table = root.table("pool")
    if table is None:
        raise root.error("", 'has no [pool]; it begins with [pool] and axes = "layer page head slot dim"')
    found = described_pool(table)
    root.finish()
    return found


def described_pool(table: Table) -> PoolDescription:
    """A [pool] of whole axes. Raises UsageError with file, line and key."""
    axes = table.text("axes")
    try:
        order = PoolOrder.parse(axes)
    except UsageError as error:
        raise table.error("axes", str(error)) from error
    apart = "kv" not in axes.split()
    limits = {"low": 1, "high": INT32_MAX}
    strides = table.mapping("strides", lambda inner, key: _stride(inner, key))
    found = PoolDescription(
        f"{table.document.file}",
        order,
        apart,
        **{key: table.integer(key, **limits) if key in table else None
           for key in ("page_size", "num_layers", "num_pages")},
        strides=strides,
        element_bytes=table.integer("element_bytes", BF16_BYTES, low=1, high=8),
        alignment_bytes=table.integer("alignment", 0, low=0, high=1 << 20),
        offsets=table.text("offsets", "int64", get_args(OffsetType)),  # type: ignore[arg-type]
    )  # fmt: skip
    table.finish()
    return found


def _stride(table: Table, axis: str) -> int:
    if axis not in POOL_AXES:
        raise table.error(axis, f"is no axis; they are {', '.join(POOL_AXES)}")
    stride = table.integer(axis, low=1, high=1 << 62)
    if axis == "dim" and stride != 1:
        raise table.error(axis, "must be 1: kernels read rows of dim")
    return stride


def lay_out(
    description: PoolDescription,
    geometry: Geometry,
    *,
    page_size: int | None = None,
    num_layers: int | None = None,
    num_pages: int | None = None,
) -> PoolLayout:
    """The pool of a geometry; what is given here stands before what the file says. Raises UsageError for an extent that
    nobody gives, and for a pool of which two elements lie at one place."""
    pages = num_pages or description.num_pages
    if pages is None and (description.order.axes[0] != "page" or description.offsets != "int64"):
        why = "what lies where" if description.order.axes[0] != "page" else "whether offsets fit"
        raise UsageError(
            f"{description.source}: {why} depends on the number of pages: give --num-pages, or num_pages in [pool]"
        )
    given = {
        "page": PAGE_IDS if pages is None else pages,
        "layer": num_layers or description.num_layers or geometry.num_kv_layers,
        "kv": 2,
        "slot": page_size or description.page_size or DEFAULT_PAGE_SIZE_TOKENS,
        "head": geometry.num_kv_heads,
        "dim": geometry.head_dim,
    }
    axes = description.order.axes
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(axes):
        strides[axis] = description.strides.get(axis, step)
        # Without a gap of its own, an axis begins where those inside it end.
        step = max(step, strides[axis] * given[axis])
    layout = PoolLayout(
        geometry,
        description,
        {axis: given[axis] for axis in axes},
        {axis: strides[axis] for axis in axes},
        pages is not None,
    )
    _require_no_overlap(layout)
    return layout


def _require_no_overlap(layout: PoolLayout) -> None:
    """Raises UsageError if two elements have one offset, naming both: where strides do not nest, rows are compared."""
    if layout.nests:
        return
    rows = [layout.extents[one] for one in layout.extents if one != "dim"]
    if math.prod(rows) > MAX_COUNTED_ROWS:
        raise UsageError(
            f"{layout.description.source}: the strides do not nest, and the pool has too many rows to compare each "
            "with each; give fewer pages, or strides of which each steps over what the smaller ones take"
        )
    begins = np.zeros(1, np.int64)
    for one, extent in layout.extents.items():
        if one != "dim":
            begins = (begins[:, None] + np.arange(extent) * layout.strides[one]).reshape(-1)
    order = np.argsort(begins, kind="stable")
    gaps = np.diff(begins[order])
    short = np.flatnonzero(gaps < layout.extents["dim"])
    if len(short):
        first, second = (np.unravel_index(int(order[at]), rows) for at in (short[0], short[0] + 1))
        names = [one for one in layout.extents if one != "dim"]
        texts = [_text(dict(zip(names, map(int, place), strict=True))) for place in (first, second)]
        meet = "lie at one place" if gaps[short[0]] == 0 else f"are {gaps[short[0]]} elements apart"
        raise UsageError(
            f"{layout.description.source}: the pool overlaps itself: the rows of {texts[0]} and of {texts[1]} {meet}; "
            f"a row has {layout.extents['dim']}"
        )


def _text(index: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {'KV'[at] if axis == 'kv' else at}" for axis, at in index.items())
