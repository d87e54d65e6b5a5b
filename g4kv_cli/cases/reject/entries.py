"""Which geometry's head counts the reject cases of an entry are made with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.geometry import GEOMETRIES, Geometry


def example_geometry(entry: Entry, among: Iterable[Geometry] | None = None) -> Geometry | None:
    """One of the geometries that the entry serves; None if it serves none of them.

    Spread over the entries by their names: what an entry gets changes only where a new geometry takes its place.
    """
    served = [geometry for geometry in (GEOMETRIES.values() if among is None else among) if entry.serves(geometry)]
    return max(served, key=lambda geometry: zlib.crc32(f"{entry.name}/{geometry.name}".encode()), default=None)
