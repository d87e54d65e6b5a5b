"""``g4kv layout --pool`` and ``--provider``: pools that somebody else lays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from g4kv_cli.commands.layout_coordinates import parse_coordinate
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import BF16_BYTES, DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.model.pool_layout import PoolDescription, lay_out, read_pool
from g4kv_cli.providers.manifest import Manifest
from g4kv_cli.providers.read import read_manifest
from g4kv_cli.report.pool_layout import pool_json, write_part, write_part_place, write_place, write_pool

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
    if isinstance(described, Manifest):
        if element_offset is not None:
            raise UsageError("--offset: this manifest's pool has pieces of axes, or K and V apart; ask with --at")
        for geometry in geometries:
            _add_parts(report, described, geometry, extents, at_text)
        return
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


def _described(pool: Path | None, provider: Path | None) -> PoolDescription | Manifest:
    """A pool of whole axes, or else the manifest that has another form of one."""
    if provider is None:
        return read_pool(Path(str(pool)))
    manifest = read_manifest(provider)
    return manifest if manifest.pool is None else manifest.pool


def _add_parts(
    report: LayoutReport, manifest: Manifest, geometry: Geometry, extents: Mapping[str, int | None], at_text: str | None
) -> None:
    """Pools in pieces of axes, or K and V in forms of their own: each allocation by itself."""
    form, pages = manifest.pool_form, extents["num_pages"]
    if form is None or pages is None:
        raise UsageError(f"{manifest.file}: what lies where depends on the number of pages: give --num-pages")
    layers, page_size = (
        extents["num_layers"] or geometry.num_kv_layers,
        extents["page_size"] or DEFAULT_PAGE_SIZE_TOKENS,
    )
    shape = (pages, layers, 2, page_size, geometry.num_kv_heads, geometry.head_dim)
    where = None if at_text is None else parse_coordinate(at_text)
    for part in form.parts:
        try:
            part.require_good(shape)
            findings = []
        except NotCovered as error:
            findings = [str(error)]
        except UsageError as error:
            raise UsageError(f"{manifest.file}: {part.name}: {error}") from error
        report.findings += len(findings)
        shown = {
            "geometry": geometry.name,
            "source": str(manifest.file),
            "part": part.name,
            "axes": [piece.text for piece in part.axes],
            "extents": list(part.extents(shape)),
            "strides": list(part.strides_elems(shape).values()),
            "pool_bytes": part.elements(shape) * BF16_BYTES,
            "findings": findings,
        }
        report.add("pool_layouts", shown)
        if where is None:
            report.write(write_part, shown)
        elif part.name in ("pool", f"{where.kv}_pool"):
            report.write(write_part_place, part.name, where, part.offset(where, shape))
