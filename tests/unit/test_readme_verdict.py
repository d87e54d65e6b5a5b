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
RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-30-fb1ee45"


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
    directory = RECORD
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


@pytest.mark.parametrize(
    ("files", "row"), [("smoke_*.json", "smoke_GEOMETRY.json"), ("traps_*.json", "traps_MODEL.json")]
)
def test_the_records_readme_counts_their_cases(files: str, row: str) -> None:
    cases = [case for path in RECORD.glob(files) for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]
    assert {case["status"] for case in cases} == {"passed"}
    (line,) = (line for line in _of_this_record().splitlines() if line.startswith(f"| `{row}`"))
    count = f"{len({case['id'] for case in cases}):,}"
    assert line.endswith(f"| {count} of {count} passed |")


def test_the_records_readme_has_the_times_of_overlapping_decode() -> None:
    found: dict[str, list[str]] = {}
    for name in ("bench_pdl_local.json", "bench_pdl_global.json"):
        for shape, seconds in _best_of_forms(RECORD / name).items():
            _, pool, batch, kv_len = shape.split("/")
            row = found.setdefault(f"{pool} {kv_len.removeprefix('kv')}", ["", "", "", ""])
            row[(1, 4, 16, 64).index(int(batch.removeprefix("batch")))] = time_text(seconds).removesuffix(" us")
    rows = {row[0]: row[1:] for row in _rows("| geometry, kv_len | batch 1 | 4 | 16 | 64 |")}
    assert len(rows) == 10
    assert rows == found


def test_the_records_readme_has_the_rates_of_prefill_and_how_sure_they_are() -> None:
    measured = {}
    for name in ("bench_prefill_global.json", "bench_prefill_local.json"):
        record = read_bench_record(RECORD / name, "")
        shapes = {shape.id: shape for shape in record.shapes}
        measured |= {
            (item.shape.split("/", 1)[1], item.form == "peer"): (shapes[item.shape].flops, item)
            for item in record.measurements
            if item.configuration in ("tile64", "peer:cudnn-sdpa")
        }
    columns = [
        f"chunk{tokens}/history{keys}"
        for tokens, keys in ((8192, 0), (8192, 32768), (512, 8192), (512, 32768), (128, 8192))
    ]
    rows = _rows("| | 8192 | 8192 behind 32768 | 512 behind 8192 | 512 behind 32768 | 128 behind 8192 |")
    assert len(rows) == 8
    noise: dict[str, list[float]] = {"long": [], "ours": [], "theirs": [], "ours, no pause": [], "theirs, no pause": []}
    for label, *cells in rows:
        pool = label.rpartition("cuDNN")[2].split(", ")[-1] if "cuDNN" in label else label.replace(", ", "-")
        for column, cell in zip(columns, cells, strict=True):
            flops, item = measured[f"{pool}/{column}", "cuDNN" in label]
            assert item.graph is not None
            assert item.burst is not None
            assert cell == f"{flops / item.burst.median / 1e12:.0f} ({flops / item.graph.median / 1e12:.0f})"
            whose = "theirs" if "cuDNN" in label else "ours"
            is_long = "global" in pool and column == "chunk8192/history32768"
            noise["long" if is_long else whose].append(100 * item.burst.noise)
            noise[f"{whose}, no pause"].append(100 * item.graph.noise)
    least, most = min(noise["long"]), max(noise["long"])
    text = " ".join(_of_this_record().split())
    assert (
        f"ours uncertain by {max(noise['ours']):.1f} % at most, but {least:.1f} to {most:.1f} % in the global 8192 "
        f"behind 32768, cuDNN's by {max(noise['theirs']):.1f} %." in text
    )
    assert (
        f"ours scatter by up to {max(noise['ours, no pause']):.0f} %, "
        f"cuDNN's by up to {max(noise['theirs, no pause']):.0f} %." in text
    )


def _of_this_record() -> str:
    """What results/README.md says of RECORD."""
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    (section,) = (part for part in text.split("\n## ") if f"commit fb1ee45: `{RECORD.name}`" in part)
    return section


def _rows(head: str) -> list[list[str]]:
    """The cells of the table under that head."""
    lines = _of_this_record().partition(head)[2].strip().splitlines()[1:]
    rows = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def _best_of_forms(path: Path) -> dict[str, float]:
    """Seconds of the fastest of our forms, by shape."""
    best: dict[str, float] = {}
    for item in read_bench_record(path, "").measurements:
        shape, _, configuration = item.id.rpartition("/")
        if item.graph is not None and not configuration.startswith("peer:"):
            best[shape] = min(item.graph.median, best.get(shape, item.graph.median))
    return best
