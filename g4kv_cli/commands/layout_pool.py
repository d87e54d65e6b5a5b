"""``g4kv layout --pool`` and ``--provider``: pools that somebody else lays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from g4kv_cli.commands.layout_coordinates import parse_coordinate
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.pool_layout import PoolDescription, lay_out, read_pool
from g4kv_cli.providers.read import read_manifest
from g4kv_cli.report.pool_layout import pool_json, write_place, write_pool

if TYPE_CHECKING:
    from g4kv_cli.commands.layout import LayoutReport


def add_pools(
    report: LayoutReport,
    files: tuple[Path | None, Path | None],
    geometries: Sequence[Geometry],
    extents: Mapping[str, int | None],
    at_text: str | None,
    element_offset: int | None,
) -> None:
    """Show each geometry's pool as one of the files (a pool's, a manifest's) says, or where one element of it lies."""
    described = _described(*files)
    for geometry in geometries:
        pool = lay_out(described, geometry, **extents)
        report.findings += len(pool.findings())
        report.add("pool_layouts", pool_json(pool))
        if at_text is None and element_offset is None:
            report.write(write_pool, pool)
        if at_text is not None:
            report.write(write_place, pool, parse_coordinate(at_text))
        if element_offset is not None:
            report.write(write_place, pool, pool.coordinate(element_offset))


def _described(pool: Path | None, provider: Path | None) -> PoolDescription:
    if provider is None:
        return read_pool(Path(str(pool)))
    described = read_manifest(provider).pool
    if described is None:
        raise UsageError(
            f"{provider}: only a pool of whole axes can be shown, with K and V in one allocation; this manifest's "
            "has pieces of axes, or [pool.k] and [pool.v]"
        )
    return described
