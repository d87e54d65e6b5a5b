"""Every case of the gate: both sides of the cache, the serving loop, and last what must trap."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from g4kv_cli.cases.attention.golden import attention_golden_cases
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.prep.golden import golden_cases
from g4kv_cli.cases.prep.table import DEFAULT_SEED, prep_cases
from g4kv_cli.cases.serve.table import serve_cases
from g4kv_cli.cases.trap.table import smoke_traps
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.table import entries, require_served
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat, can_fold, require_format
from g4kv_cli.model.kv_layout import MAX_PAGE_SIZE_TOKENS

FOLDED_SAMPLE = (
    "closed-form", "random/*/tokens257/*", "random/seed[0-9]", "serving/untouched", "large", "large/tokens5",
    "page-size/3", "page-size/100", "pool/past-*int32", "kv-heads5/*-tokens", "needle/*", "ragged", "group/7",
    "scores/to-80", "long-history", "companions", "forms-agree", "splits/one-not-empty", "*-tile/needle/causal",
    "*-tile/ragged", "model-heads", "interleaved",
)  # fmt: skip
"""Of the cases of folded rows those that run with the split ones, so that the format is never forgotten."""

KEPT_TABLES = 24
"""Of one geometry, format and kind of case each; to make one takes as long as to run a case or two."""


def gate_cases(
    geometries: Sequence[Geometry],
    *,
    seed: int = DEFAULT_SEED,
    page_size: int | None = None,
    every_trap: bool = False,
    kv_format: KvFormat | None = None,
    whole: bool = False,
) -> list[Case]:
    """All cases of these geometries: those of split rows, and some of folded rows (FOLDED_SAMPLE) where a geometry has
    them. ``kv_format`` leaves one format, with all of its cases; ``whole``: all of both.

    ``page_size`` replaces the default and leaves only it in the page-size sweeps; traps have a small pool of their own.
    A trap costs a GPU its context, so an entry traps in its first geometry only, unless ``every_trap``. Raises
    UsageError for a page size out of range, for a geometry that no kernel serves, and if none has the format.
    """
    if page_size is not None and not 1 <= page_size <= MAX_PAGE_SIZE_TOKENS:
        raise UsageError(f"--page-size must be from 1 to {MAX_PAGE_SIZE_TOKENS} tokens, got {page_size}")
    cases: list[Case] = []
    for geometry in geometries:
        require_served(geometry)
    if kv_format is not None:
        require_format(geometries, kv_format)

    rows = tuple(entries())

    def in_formats(table: Callable[..., Iterable[Case]], geometry: Geometry) -> Iterator[Case]:
        if kv_format != FOLDED:
            yield from _made(table, rows, geometry, seed, page_size, SPLIT)
        if kv_format != SPLIT and can_fold(geometry):
            folded = _made(table, rows, geometry, seed, page_size, FOLDED)
            yield from folded if whole or kv_format == FOLDED else filter(_is_in_sample, folded)

    for geometry in geometries:
        cases.extend(_by_entry(in_formats(prep_cases, geometry)))
    for geometry in geometries:
        cases.extend(_by_entry(in_formats(attention_cases, geometry)))
        cases.extend(in_formats(serve_cases, geometry))
    if kv_format == FOLDED:
        return cases
    return [*cases, *smoke_traps(geometries, once_an_entry=not every_trap)]


@lru_cache(maxsize=KEPT_TABLES)
def _made(
    table: Callable[..., Iterable[Case]], rows: tuple[Entry, ...], geometry: Geometry, seed: int,
    page_size: int | None, kv_format: KvFormat,
) -> tuple[Case, ...]:  # fmt: skip
    """The cases of one table, kept for the next who asks; ``rows`` are the entries that it is made of."""
    return tuple(table(geometry, seed=seed, page_size=page_size, kv_format=kv_format))


def _is_in_sample(case: Case) -> bool:
    return any(fnmatch.fnmatchcase(case.id, f"*/{FOLDED}/{pattern}") for pattern in FOLDED_SAMPLE)


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
