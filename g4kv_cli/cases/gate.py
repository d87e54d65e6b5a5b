"""Every case of the gate: both sides of the cache, the serving loop, and last what must trap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from g4kv_cli.cases.any_case import SmokeCase
from g4kv_cli.cases.attention.golden import attention_golden_cases
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.cases.prep.golden import golden_cases
from g4kv_cli.cases.prep.table import DEFAULT_SEED, smoke_cases
from g4kv_cli.cases.serve.table import serve_cases
from g4kv_cli.model.geometry import Geometry


def gate_cases(
    geometries: Sequence[Geometry],
    *,
    seed: int = DEFAULT_SEED,
    page_size: int | None = None,
    every_trap: bool = False,
) -> list[SmokeCase]:
    """All cases of these geometries; the arguments are those of smoke_cases, which says what is refused."""
    writes = smoke_cases(geometries, seed=seed, page_size=page_size, every_trap=every_trap)
    cases: list[SmokeCase] = [case for case in writes if case.trap is None]
    for geometry in geometries:
        cases.extend(attention_cases(geometry, seed=seed, page_size=page_size))
        cases.extend(serve_cases(geometry, seed=seed, page_size=page_size))
    # A trap costs a GPU its context.
    cases.extend(case for case in writes if case.trap is not None)
    return cases


def recorded_cases(path: Path, page_size: int | None = None) -> list[SmokeCase]:
    """The cases of a file of recorded vectors, or of a directory of them, file by file."""
    cases: list[SmokeCase] = [*golden_cases(path, page_size), *attention_golden_cases(path, page_size)]
    return sorted(cases, key=lambda case: case.id.split("/")[1])
