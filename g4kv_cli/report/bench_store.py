"""The record of a run while it runs: a whole file on disk after every shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from g4kv_cli.records.bench import BenchRecord, Measurement, record_to_text
from g4kv_cli.report.files import write_whole

OPTION = "--json"


class BenchStore:
    """Holds the record; with a path, also on disk. Making one writes it, so an unwritable path is known at once."""

    def __init__(self, record: BenchRecord, path: Path | None) -> None:
        self.record = record
        self._path = path
        self._write()

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
        if self._path is not None:
            write_whole(self._path, record_to_text(self.record), OPTION)
