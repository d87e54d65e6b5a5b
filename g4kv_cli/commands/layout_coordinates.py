"""Coordinates as ``g4kv layout`` takes them: text to coordinate, and offsets both ways inside a pool."""

from __future__ import annotations

from typing import cast

from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_layout import INT32_MAX, Coordinate, KvKind, KvLayout

AXES = ("page", "layer", "kv", "slot", "head", "dim")
PAGE_IDS = INT32_MAX + 1
"""Page ids are int32: 0 to PAGE_IDS - 1, where nobody says how many pages the pool has."""


def parse_coordinate(text_given: str) -> Coordinate:
    """``page=3,layer=1,kv=v,slot=2,head=0,dim=5`` in any order, each axis once. Raises UsageError."""
    given: dict[str, str] = {}
    for part in text_given.split(","):
        axis, _, value = (piece.strip().lower() for piece in part.partition("="))
        if axis not in AXES:
            raise UsageError(f"--at: {part.strip()!r} is none of {'=.., '.join(AXES)}=..")
        if axis in given:
            raise UsageError(f"--at names {axis} twice: name each of {', '.join(AXES)} once")
        given[axis] = value
    missing = [axis for axis in AXES if axis not in given]
    if missing:
        raise UsageError(f"--at lacks {', '.join(missing)}: name each of {', '.join(AXES)} once")
    kv = given.pop("kv")
    if kv not in ("k", "v"):
        raise UsageError(f"--at: kv must be k or v, got {kv!r}")
    numbers: dict[str, int] = {}
    for axis, value in given.items():
        try:
            numbers[axis] = int(value)
        except ValueError:
            raise UsageError(f"--at: {axis} must be an integer, got {value!r}") from None
    return Coordinate(kv=cast(KvKind, kv), **numbers)


def offset_of(where: Coordinate, layout: KvLayout, num_pages: int | None) -> int:
    """The element offset, with the page checked too. Raises UsageError for a coordinate outside the pool."""
    pages = PAGE_IDS if num_pages is None else num_pages
    if not 0 <= where.page < pages:
        raise UsageError(f"page must be from 0 to {pages - 1} {_pool_name(num_pages)}, got {where.page}")
    return layout.element_offset(where.page, where.layer, where.kv, where.slot, where.head, where.dim)


def coordinate_of(element_offset: int, layout: KvLayout, num_pages: int | None) -> Coordinate:
    """The element at an offset. Raises UsageError for an offset outside the pool."""
    pool_elems = layout.pool_elems(PAGE_IDS if num_pages is None else num_pages)
    if not 0 <= element_offset < pool_elems:
        raise UsageError(f"--offset must be 0 to {pool_elems - 1} {_pool_name(num_pages)}, got {element_offset}")
    return layout.coordinates(element_offset)


def _pool_name(num_pages: int | None) -> str:
    return "(page ids are int32)" if num_pages is None else f"in a pool of {num_pages} pages"
