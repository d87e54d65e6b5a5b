"""The record of a run while it runs: a whole file on disk after every shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import BenchRecord, Measurement, record_to_text
from g4kv_cli.records.files import write_whole
from g4kv_cli.report.output import outlive_reader

OPTION = "--json"


class BenchStore:
    """Holds the record; with a path, also on disk. Making one writes it, so an unwritable path is known at once.

    A write that fails later (a full disk) does not end the run: the last whole version stays, the next one tries
    again, and ``require_whole`` raises what still stands at the end.
    """

    def __init__(self, record: BenchRecord, path: Path | None) -> None:
        self.record = record
        self._path = path
        self._failure: UsageError | None = None
        outlive_reader(path)
        self._write()
        self.require_whole()

    def put(self, measurements: Sequence[Measurement]) -> None:
        """Replace the planned measurements of these ids and rewrite the file."""
        found = {item.id: item for item in measurements}
        kept = tuple(found.get(item.id, item) for item in self.record.measurements)
        self.update(replace(self.record, measurements=kept))

    def update(self, record: BenchRecord) -> None:
        """Replace the record as a whole."""
        self.record = record
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_whole(self._path, record_to_text(self.record), OPTION)
            self._failure = None
        except UsageError as error:
            self._failure = error

    def require_whole(self) -> None:
        """Raises UsageError if the file lacks something of the record."""
        if self._failure is not None:
            raise self._failure
