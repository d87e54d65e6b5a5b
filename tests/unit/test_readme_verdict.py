"""The README's table of decode forms is that of the record it names."""

from __future__ import annotations

import re
from pathlib import Path

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench_records import read_bench_record
from g4kv_cli.report.bench_format import time_text

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_the_recorded_verdict() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = set(re.findall(r"`?(results/\S+?/bench\.json)", readme))
    record = read_bench_record(ROOT / name, "--from")
    assert record.ended == "finished"
    assert f"commit {record.run.git_commit}" in readme
    rows = [line.strip("| ").split(" | ") for line in readme.splitlines() if re.match(r"\| \d+b-\w+ \d+ \|", line)]
    shown = {
        (row[0], batch): cell.split(", ")
        for row in rows
        for batch, cell in zip((1, 4, 16, 64, 256), row[1:], strict=False)
        if cell.strip()
    }
    cells = [cell for verdict in analyse(record).verdicts for cell in verdict.cells]
    assert len(shown) == len(cells) == 88
    for cell in cells:
        words, ratio = shown[f"{cell.shape.geometry} {cell.shape.kv_len}", cell.shape.batch]
        mark = "" if cell.decided else "~"
        assert words == f"{mark}{cell.configuration} {time_text(cell.seconds)}"
        assert cell.peer_seconds is not None
        assert ratio.split()[0] == f"{cell.peer_seconds / cell.seconds:.2f}x"
