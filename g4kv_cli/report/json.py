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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4kv_cli.errors import UsageError
from g4kv_cli.records.files import write_whole
from g4kv_cli.records.run import SCHEMA_VERSION, CaseResult, RunInfo, RunRecord, ShardInfo, summarise, to_json
from g4kv_cli.records.schema import SchemaError, record_from

OPTION = "--json"
PAGE_SIZE = "page_size"
GEOMETRIES_OF_FILES = "geometries"
WORKLOAD = "workload"
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


def read_run(path: Path, option: str) -> RunRecord:
    """All of a record. Raises UsageError, naming ``option``, if it is none."""

    def fail(what: str) -> UsageError:
        return UsageError(f"{option} {path}: {what}; give a file made with g4kv smoke --json")

    record = dict(_read_json(path, fail))
    record.pop("schema_version"), record.pop("summary", None)
    try:
        return record_from(RunRecord, record)
    except SchemaError as error:
        raise fail(str(error)) from error


def _read_json(path: Path, fail: Callable[[str], UsageError]) -> Mapping[str, Any]:
    """The object in a file, of this schema version. Raises what ``fail`` makes of the reason."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise fail(f"cannot read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise fail(f"not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise fail(f"not a record of schema version {SCHEMA_VERSION}")
    return record


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

    def fail(what: str) -> UsageError:
        return UsageError(f"{option} {path}: {what}; give a file made with g4kv smoke --json")

    record = _read_json(path, fail)
    try:
        run = record["run"]
        digests = {str(case["id"]): str(case.get("output_digest", "")) for case in record["cases"]}
        kernels = {str(case["id"]): tuple(map(str, case["kernels"])) for case in record["cases"] if "kernels" in case}
        device = f"{run['device']['name']} {run['device']['arch']}"
        settings = record.get("settings", {})
        asked = settings.get(PAGE_SIZE)
        return EarlierRun(
            path,
            str(run["kernels_digest"]),
            int(run["seed"]),
            device,
            digests,
            kernels,
            page_size=None if asked is None else int(asked),
            knows_page_size=PAGE_SIZE in settings,
            of_files={name: settings[name] for name in OF_FILES if name in settings},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise fail(f"the record lacks {error}") from error
