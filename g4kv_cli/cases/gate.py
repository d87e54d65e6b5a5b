"""Every case of the gate: both sides of the cache, the serving loop, and last what must trap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from g4kv_cli.cases.attention.golden import attention_golden_cases
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.prep.golden import golden_cases
from g4kv_cli.cases.prep.table import DEFAULT_SEED, prep_cases
from g4kv_cli.cases.serve.table import serve_cases
from g4kv_cli.cases.trap.table import smoke_traps
from g4kv_cli.entries.table import require_served
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import MAX_PAGE_SIZE_TOKENS


def gate_cases(
    geometries: Sequence[Geometry],
    *,
    seed: int = DEFAULT_SEED,
    page_size: int | None = None,
    every_trap: bool = False,
) -> list[Case]:
    """All cases of these geometries.

    ``page_size`` replaces the default and leaves only it in the page-size sweeps; traps have a small pool of their own.
    A trap costs a GPU its context, so an entry traps in its first geometry only, unless ``every_trap``. Raises
    UsageError for a page size out of range and for a geometry that no kernel serves.
    """
    if page_size is not None and not 1 <= page_size <= MAX_PAGE_SIZE_TOKENS:
        raise UsageError(f"--page-size must be from 1 to {MAX_PAGE_SIZE_TOKENS} tokens, got {page_size}")
    cases: list[Case] = []
    for geometry in geometries:
        require_served(geometry)
    for geometry in geometries:
        cases.extend(_by_entry(prep_cases(geometry, seed=seed, page_size=page_size)))
    for geometry in geometries:
        cases.extend(_by_entry(attention_cases(geometry, seed=seed, page_size=page_size)))
        cases.extend(serve_cases(geometry, seed=seed, page_size=page_size))
    return [*cases, *smoke_traps(geometries, once_an_entry=not every_trap)]


def _by_entry(cases: Iterable[Case]) -> list[Case]:
    """Cases of one entry stand together, as they are shown."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.entry, []).append(case)
    return [case for group in groups.values() for case in group]


def recorded_cases(path: Path, page_size: int | None = None) -> list[Case]:
    """The cases of a file of recorded vectors, or of a directory of them, file by file."""
    cases: list[Case] = [*golden_cases(path, page_size), *attention_golden_cases(path, page_size)]
    return sorted(cases, key=lambda case: case.id.split("/")[1])
