"""The README's table of decode forms is that of the record it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records, compare_with_baseline
from g4kv_cli.bench.dispatch import dispatch_table
from g4kv_cli.records.bench import read_bench_record
from g4kv_cli.report.bench_format import time_text

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_the_recorded_verdict() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = set(re.findall(r"`?(results/\S+?/bench\.json)", readme))
    record = read_bench_record(ROOT / name, "--from")
    assert f"kernels of commit {Path(name).parent.name.rpartition('-')[2]}" in readme
    assert (record.ended == "finished") == ("after the end of the run" not in readme)
    rows = [line.strip("| ").split(" | ") for line in readme.splitlines() if re.match(r"\| \d+b-[\w-]+ \d+ \|", line)]
    shown = {
        (row[0], batch): cell.split(", ")
        for row in rows
        for batch, cell in zip((1, 4, 16, 64, 256), row[1:], strict=False)
        if cell.strip()
    }
    cells = {
        (cell.shape.pool, cell.shape.kv_len, cell.shape.batch): cell
        for verdict in analyse(record).verdicts
        for cell in verdict.cells
    }
    assert len(shown) == len(cells) == 136
    for (pool, kv_len, batch), cell in cells.items():
        words, ratio = shown[f"{pool} {kv_len}", batch]
        mark = "" if cell.decided else "~"
        assert words == f"{mark}{cell.configuration} {time_text(cell.seconds)}"
        if pool.endswith("-folded"):
            split = cells[pool.removesuffix("-folded"), kv_len, batch]
            assert ratio == f"{cell.seconds / split.seconds:.2f} of split"
        else:
            assert ratio == ("none" if cell.peer_seconds is None else f"{cell.peer_seconds / cell.seconds:.2f}x")


def test_the_readme_counts_what_the_records_hold() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    directory = ROOT / "results" / "nvidia-h200" / "2026-11-29-fea666b"
    first, again = (read_bench_record(directory / name, "") for name in ("bench.json", "bench_again.json"))
    latest = read_bench_record(directory.parent / "2026-11-30-fb1ee45" / "bench.json", "")
    noise = [item.graph.noise for item in latest.measurements if item.graph is not None]
    assert f"less than 1 % in {sum(one < 0.01 for one in noise)} of {len(noise)} cells" in readme
    changes = [cell.change for cell in compare_records(first, again, "", "", 0.05).cells]
    counts = {name: changes.count(name) for name in set(changes)}
    assert set(counts) == {"same", "undecided", "no time"}
    words = f"{counts['undecided']} undecided, {counts['no time']} without a time"
    assert f"the same in {counts['same']} of {len(changes)} cells ({words}" in readme
    slowed = compare_with_baseline(read_bench_record(directory / "bench_slowed.json", ""), "built-in", 0.05)
    by_form = {cell.id.rsplit("/", 1)[1]: cell for cell in slowed.cells}
    assert {cell.change for cell in slowed.cells} == {"slower"}
    a, b = (100 * (by_form[form].ratio or 0.0) for form in "ab")
    assert f"by {a:.1f} and {b:.1f} %" in readme
    verdicts = analyse(latest).verdicts
    rules = [verdict.rule for verdict in verdicts if verdict.rule is not None]
    losses = [100 * rule.mean_loss for rule in rules]
    assert f"It loses {min(losses):.1f} to {max(losses):.1f} % against the table on average, " in readme
    assert f"{100 * max(rule.worst_loss for rule in rules):.0f} % at most" in readme
    assert [rule.target_blocks for rule in rules] == [
        64,
        128,
        128,
        64,
        64,
        128,
    ]  # in the record's order, a folded pool behind its split one
    assert "T = 64, 128, 128, 64" in readme
    assert [rule.min_keys_per_split for rule in rules] == [16, 32, 32, 16, 16, 256]
    assert "K = 16, 32, 256, 16 for 12b-local, 12b-global, 31b-local and 31b-global, folded or not" in readme
    ratios = [
        cell.peer_seconds / cell.seconds
        for verdict in verdicts
        for cell in verdict.cells
        if cell.peer_seconds is not None
    ]
    cells = {(c.shape.pool, c.shape.kv_len, c.shape.batch): c for verdict in verdicts for c in verdict.cells}
    folded = [
        cell.seconds / cells[(pool.removesuffix("-folded"), *rest)].seconds
        for (pool, *rest), cell in cells.items()
        if pool.endswith("-folded") and cells[(pool.removesuffix("-folded"), *rest)].shape.read_bytes >= 1e9
    ]
    words = f"take {min(folded):.2f} to {max(folded):.2f} of the time of split rows where those are 1 GB and more"
    assert words in readme
    ahead = f"faster in {sum(ratio > 1 for ratio in ratios)} of the {len(ratios)} cells that have a peer"
    assert f"{ahead}, {geometric_mean(ratios):.2f} times in the geometric mean of all" in readme
    assert (
        f"behind FlashInfer by at most {100 * (1 - min(ratios)):.1f} % in the others, which read 4 GB and more"
        in readme
    )
    behind = [c for v in verdicts for c in v.cells if c.peer_seconds is not None and c.peer_seconds <= c.seconds]
    assert all("flashinfer" in c.best_peer and c.shape.read_bytes >= 4e9 for c in behind)


def test_the_recorded_dispatch_is_that_of_its_record() -> None:
    directory = ROOT / "results" / "nvidia-h200" / "2026-11-30-fb1ee45"
    recorded = json.loads((directory / "dispatch.json").read_text(encoding="utf-8"))
    today = json.loads(json.dumps(dispatch_table(analyse(read_bench_record(directory / "bench.json", "")))))
    for table in (recorded, today):
        for geometry in table["geometries"].values():
            geometry["rule"] = {name: pytest.approx(value) if name.endswith("loss") else value
                                for name, value in geometry["rule"].items()}  # fmt: skip
    assert recorded == today


def test_the_readme_compares_the_kernels_for_hopper_with_the_portable_ones() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    results = ROOT / "results" / "nvidia-h200"
    portable, today = (
        _best_of_forms(results / directory / "bench.json") for directory in ("2026-11-29-fea666b", "2026-11-30-fb1ee45")
    )
    shares = [today[shape] / portable[shape] for shape in portable]
    assert f"takes {min(shares):.2f} to {max(shares):.2f} of the time" in readme


def _best_of_forms(path: Path) -> dict[str, float]:
    """Seconds of the fastest of our forms, by shape."""
    best: dict[str, float] = {}
    for item in read_bench_record(path, "").measurements:
        shape, _, configuration = item.id.rpartition("/")
        if item.graph is not None and not configuration.startswith("peer:"):
            best[shape] = min(item.graph.median, best.get(shape, item.graph.median))
    return best
