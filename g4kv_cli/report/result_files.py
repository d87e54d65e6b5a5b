"""The files that a run of cases writes: the JSON record and the JUnit XML, each whole after every case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import CaseResult, RunInfo, ShardInfo
from g4kv_cli.report.json import NO_SETTINGS, JsonRecord
from g4kv_cli.report.junit import write_junit
from g4kv_cli.report.output import outlive_reader


class ResultFiles:
    """Opens what was asked for, so that an unwritable path is known before the first case.

    A write that fails later (a full disk) does not end the run, whose verdict is worth more than its file: the last
    whole version stays, the next case tries again, and ``require_whole`` raises what still stands at the end.
    """

    def __init__(
        self,
        json_path: Path | None,
        junit_path: Path | None,
        run: RunInfo,
        planned: int,
        *,
        command: str,
        seconds_between_records: float = 0.0,
        settings: Mapping[str, Any] = NO_SETTINGS,
        shard: ShardInfo | None = None,
    ) -> None:
        outlive_reader(json_path, junit_path)
        self._run, self._planned, self._command = run, planned, command
        self._junit_path = junit_path
        self._results: list[CaseResult] = []
        self._failure: UsageError | None = None
        self._record: JsonRecord | None = None
        if json_path is not None:
            self._record = JsonRecord(json_path, run, planned, seconds_between_records, settings, command, shard)
        if junit_path is not None:
            self._write_junit(junit_path)

    def add(self, result: CaseResult) -> None:
        """One more case is done: the record has it. The XML is rewritten at the end only."""
        self._results.append(result)
        if self._record is not None:
            try:
                self._record.add(result)
            except UsageError as error:
                self._failure = error

    def finish(self, interrupted_at: str = "", because: str = "") -> None:
        """Write both for good, and how the run ended: whole, early, and where an interrupt found it or why."""
        self._failure = None
        where = f": interrupted at {interrupted_at}" if interrupted_at else f": {because}" if because else ""
        if self._record is not None:
            try:
                self._record.finish("finished" if len(self._results) == self._planned else f"ended early{where}")
            except UsageError as error:
                self._failure = error
        if self._junit_path is not None:
            try:
                self._write_junit(self._junit_path, where)
            except UsageError as error:
                self._failure = self._failure or error

    def require_whole(self) -> None:
        """Raises UsageError if a file lacks something of the run."""
        if self._failure is not None:
            raise self._failure

    def _write_junit(self, path: Path, where: str = "") -> None:
        write_junit(path, self._run, self._results, self._planned, self._command, where)
