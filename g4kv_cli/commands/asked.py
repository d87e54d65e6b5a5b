"""``--workload FILE.json`` and ``--shape 'kv=..'``: requests of the user's own in place of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import click

from g4kv_cli.errors import UsageError
from g4kv_cli.model.request_text import KEYS, read_request
from g4kv_cli.model.workload import Workload, WorkloadSpec
from g4kv_cli.model.workload_file import read_workload
from g4kv_cli.records.run import to_json

_Function = TypeVar("_Function", bound=Callable[..., Any])


def asked_options(function: _Function) -> _Function:
    """Add ``--workload`` (argument ``workload_path: Path | None``) and ``--shape`` (``shape: str | None``)."""
    add_file = click.option(
        "--workload",
        "workload_path",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.json",
        help="Take the batch of requests that a file describes in place of the table's (docs/workload.md).",
    )
    add_shape = click.option(
        "--shape",
        metavar="'kv=N q=N ...'",
        help="Take one request, described in one line: 'kv=1030 q=8 window=1024 heads=32/16 page=16 splits=4 "
        f"head_dim=256'. Keys: {', '.join(KEYS)} (docs/workload.md).",
    )
    return add_file(add_shape(function))


@dataclass(frozen=True)
class Asked:
    """What was asked for, if anything was: one of ``path`` and ``shape``; ``geometry`` replaces the file's own."""

    path: Path | None
    shape: str | None
    geometry: str | None
    tp: int = 1

    def __post_init__(self) -> None:
        if self.path is not None and self.shape is not None:
            raise UsageError("--workload and --shape both say which requests to run; give one of them")

    def __bool__(self) -> bool:
        return self.path is not None or self.shape is not None

    @property
    def option(self) -> str:
        """The option that was given."""
        return "--shape" if self.path is None else "--workload"

    @cached_property
    def _read(self) -> tuple[WorkloadSpec, list[Workload]]:
        if self.path is not None:
            return read_workload(self.path, self.geometry, self.tp)
        return read_request(self.shape or "", self.geometry, self.tp)

    @property
    def workloads(self) -> list[Workload]:
        """The requests on each geometry. Raises UsageError, naming the place."""
        return self._read[1]

    def rerun(self) -> list[str]:
        """The words that ask for the same again."""
        words = ["--workload", str(self.path)] if self.path is not None else ["--shape", self.shape or ""]
        words += ["--geometry", self.geometry] if self.geometry is not None else []
        return words + (["--tp", str(self.tp)] if self.tp != 1 else [])

    def values(self) -> dict[str, Any]:
        """All of it as data, for a record: the requests as they were asked for, and the geometries."""
        spec, laid_out = self._read
        return {**spec.values, "on": [to_json(one.geometry) for one in laid_out]}


NOTHING_ASKED = Asked(None, None, None)
