"""The JSON record of a run: ``schema_version``, ``run``, ``settings``, ``cases``, ``summary``. Whole after every case.

``settings`` holds what was asked for that changes outputs without changing a case's id (``page_size``, and as data the
``geometries`` and the ``workload`` that come from files). ``planned`` is how many cases the run set out to run,
``ended`` whether it did: half a run is no whole one. ``command`` is what ran; ``shard`` is there if it was asked for a
part of its cases (``--shard``), and says which.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4kv_cli.errors import UsageError
from g4kv_cli.records.files import write_whole
from g4kv_cli.records.run import SCHEMA_VERSION, CaseResult, RunInfo, RunRecord, ShardInfo, summarise, to_json
from g4kv_cli.records.schema import SchemaError, read_json, record_from

OPTION = "--json"
PAGE_SIZE = "page_size"
GEOMETRIES_OF_FILES = "geometries"
WORKLOAD = "workload"
_OLDER = {"settings": {}, "planned": 0, "ended": "not said"}
"""Fields that records of before they were written down lack."""
OF_FILES = (GEOMETRIES_OF_FILES, WORKLOAD)
"""Settings that hold what files said, as data."""
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class JsonRecord:
    """The record at ``path``. Making one writes it, without cases, so an unwritable path is known at once.

    ``every_seconds`` spares thousands of short cases a rewrite each: a crash then loses the cases of that time, and
    ``finish`` writes the last ones.
    """

    def __init__(
        self,
        path: Path,
        run: RunInfo,
        planned: int,
        every_seconds: float = 0.0,
        settings: Mapping[str, Any] = NO_SETTINGS,
        command: str = "smoke",
        shard: ShardInfo | None = None,
    ) -> None:
        self._path = path
        part = f'  "shard": {json.dumps(to_json(shard))},\n' if shard is not None else ""
        self._head = f'  "command": {json.dumps(command)},\n{part}'
        self._settings = json.dumps(dict(settings))
        self._planned = planned
        self._ended = "still running, or killed"
        self._every_seconds = every_seconds
        self._written = time.monotonic()
        self._run = json.dumps(to_json(run), indent=2)
        self._results: list[CaseResult] = []
        self._texts: list[str] = []
        self._write()

    def add(self, result: CaseResult) -> None:
        """Append a case and rewrite the file."""
        self._results.append(result)
        self._texts.append(json.dumps(to_json(result)))
        if time.monotonic() - self._written >= self._every_seconds:
            self._write()

    def finish(self, ended: str = "finished") -> None:
        """Write what is outstanding, and how the run ended."""
        self._ended = ended
        self._write()

    def _write(self) -> None:
        cases = "".join(f"\n    {text}," for text in self._texts).rstrip(",")
        summary = json.dumps(dataclasses.asdict(summarise(self._results)))
        run = self._run.replace("\n", "\n  ")
        text = (
            f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "run": {run},\n'
            f'{self._head}  "settings": {self._settings},\n'
            f'  "cases": [{cases}\n  ],\n  "summary": {summary},\n'
            f'  "planned": {self._planned},\n  "ended": {json.dumps(self._ended)}\n}}\n'
        )
        write_whole(self._path, text, OPTION)
        self._written = time.monotonic()


def read_run(path: Path, option: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> RunRecord:
    """All of a record; ``defaults`` stand in for fields that it lacks. UsageError, naming ``option``, if it is none."""

    def fail(what: str) -> UsageError:
        return UsageError(f"{option} {path}: {what}; give a file made with g4kv smoke --json")

    record = read_json(path, fail)
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise fail(f"not a record of schema version {SCHEMA_VERSION}")
    try:
        body = {name: value for name, value in record.items() if name not in ("schema_version", "summary")}
        return record_from(RunRecord, {**defaults, **body})
    except SchemaError as error:
        raise fail(str(error)) from error


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What another run's record says about its bits: ``digests`` by case id, ``kernels`` likewise, where it has them.

    ``page_size`` is what --page-size was (None: not given), where ``knows_page_size``: older records do not say.
    ``of_files``: see OF_FILES.
    """

    path: Path
    kernels_digest: str
    seed: int
    device: str
    digests: Mapping[str, str]
    kernels: Mapping[str, tuple[str, ...]]
    page_size: int | None = None
    knows_page_size: bool = False
    of_files: Mapping[str, Any] = field(default_factory=dict)


def read_record(path: Path, option: str) -> EarlierRun:
    """Read a record made with ``--json``. Raises UsageError if it is none."""
    record = read_run(path, option, _OLDER)
    settings, device = record.settings, record.run.device
    page_size = settings.get(PAGE_SIZE)
    if page_size is not None and not isinstance(page_size, int):
        raise UsageError(f"{option} {path}: settings.{PAGE_SIZE} must be an integer or null")
    return EarlierRun(
        path,
        record.run.kernels_digest,
        record.run.seed,
        f"{device.name} {device.arch}",
        {case.id: case.output_digest for case in record.cases},
        {case.id: case.kernels for case in record.cases if case.kernels},
        page_size=page_size,
        knows_page_size=PAGE_SIZE in settings,
        of_files={name: settings[name] for name in OF_FILES if name in settings},
    )
