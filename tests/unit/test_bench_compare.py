"""Comparing records: what counts as slower, what as noise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from g4kv_cli.bench.compare import compare_records, compare_with_baseline
from g4kv_cli.records.bench import BASELINE_SUFFIX, BenchRecord, Measurement, Timing, read_bench_record
from g4kv_cli.records.findings import ComparedCell, Comparison

DATA = Path(__file__).resolve().parents[1] / "data" / "bench"


@pytest.fixture
def sample() -> BenchRecord:
    return read_bench_record(DATA / "sample.json", "--compare")


def _compare(a: BenchRecord, b: BenchRecord, threshold: float = 0.05) -> Comparison:
    return compare_records(a, b, "a.json", "b.json", threshold)


def _cells(comparison: Comparison) -> dict[str, ComparedCell]:
    return {cell.id.split("/", 2)[2]: cell for cell in comparison.cells}


def test_a_record_equals_itself(sample: BenchRecord) -> None:
    comparison = _compare(sample, sample)
    assert {cell.change for cell in comparison.cells} == {"same", "no time"}
    assert not comparison.has_regression
    assert comparison.notes == ()


def test_what_else_differs_is_noted_and_only_that(sample: BenchRecord) -> None:
    run, device = sample.run, sample.run.device
    for changed, note in (
        ({"device": dataclasses.replace(device, name="another")}, f"GPU: A {device.name} {device.arch}, B another "),
        ({"device": dataclasses.replace(device, driver="1.2")}, f"driver: A {device.driver}, B 1.2"),
        ({"nvrtc": "1.0"}, f"NVRTC: A {run.nvrtc}, B 1.0"),
        ({"kernels_digest": "f" * 64}, f"kernel sources: A {run.kernels_digest[:12]}, B ffffffffffff"),
        ({"seed": run.seed + 1}, f"seed: A {run.seed}, B {run.seed + 1}"),
        ({"date": "2001-01-01"}, ""),
    ):
        other = dataclasses.replace(sample, run=dataclasses.replace(run, **changed))  # type: ignore[arg-type]
        notes = _compare(sample, other).notes
        assert len(notes) == bool(note)
        assert all(one.startswith(note) for one in notes)


def test_each_kind_of_change(sample: BenchRecord) -> None:
    later = read_bench_record(DATA / "later.json", "--compare")
    comparison = _compare(sample, later)
    cells = _cells(comparison)
    # 8 % slower with 1.4 % of noise lies above 5 % as a whole; 9 % faster below; 6 % with 4.1 % of noise straddles it.
    assert cells["batch1/kv1024/c8"].change == "slower"
    assert cells["batch1/kv1024/c8"].ratio == pytest.approx(0.08)
    assert cells["batch1/kv128/b"].change == "faster"
    assert cells["batch16/kv1024/c2"].change == "undecided"
    assert cells["batch16/kv1024/c2"].reason == "+1.9 % to +10.1 % straddles 5 %: the noise is 4.1 %"
    assert cells["batch64/kv1024/b"].change == "broken"
    assert cells["batch16/kv128/a"].change == "only in A"
    assert cells["batch64/kv128/b"].change == "same"
    assert comparison.has_regression
    assert comparison.notes == ("kernel sources: A 0123456789ab, B ffffffffffff", "B did not finish: interrupted")


def test_the_other_way_round_slower_is_faster_and_broken_is_mended(sample: BenchRecord) -> None:
    later = read_bench_record(DATA / "later.json", "--compare")
    cells = _cells(_compare(later, sample))
    assert cells["batch1/kv1024/c8"].change == "faster"
    assert cells["batch64/kv1024/b"].change == "mended"
    assert cells["batch16/kv128/a"].change == "only in B"


def test_a_wider_threshold_forgives(sample: BenchRecord) -> None:
    later = read_bench_record(DATA / "later.json", "--compare")
    cells = _cells(_compare(sample, later, threshold=0.12))
    assert cells["batch1/kv1024/c8"].change == "same"


def test_cells_of_one_side_only(sample: BenchRecord) -> None:
    fewer = dataclasses.replace(sample, measurements=sample.measurements[1:])
    first = sample.measurements[0].id
    (cell,) = [cell for cell in _compare(fewer, sample).cells if cell.id == first]
    assert (cell.change, cell.reason) == ("only in B", "A has no such cell")
    (cell,) = [cell for cell in _compare(sample, fewer).cells if cell.id == first]
    assert (cell.change, cell.reason) == ("only in A", "B has no such cell")
    assert not _compare(sample, fewer).has_regression


def _paired(sample: BenchRecord, old: tuple[float, ...], new: tuple[float, ...]) -> ComparedCell:
    template = next(item for item in sample.measurements if item.configuration == "b")

    def timed(rounds: tuple[float, ...], suffix: str) -> Measurement:
        median = sorted(rounds)[len(rounds) // 2]
        timing = Timing(median, min(rounds), max(rounds), min(rounds), max(rounds), 40, rounds)
        name = template.configuration + suffix
        return dataclasses.replace(template, id=template.id + suffix, configuration=name, graph=timing)

    record = dataclasses.replace(sample, measurements=(timed(new, ""), timed(old, BASELINE_SUFFIX)))
    (cell,) = compare_with_baseline(record, "built-in", 0.05).cells
    assert cell.id == template.id
    return cell


def test_alternating_rounds_cancel_the_drift_of_the_card(sample: BenchRecord) -> None:
    # The card slows down by 20 % over the run; each round still says 8 %.
    old = (10e-6, 10.7e-6, 11.3e-6, 12e-6)
    cell = _paired(sample, old, tuple(1.08 * seconds for seconds in old))
    assert cell.change == "slower"
    assert cell.ratio == pytest.approx(0.08)


def test_rounds_that_contradict_each_other_decide_nothing(sample: BenchRecord) -> None:
    cell = _paired(sample, (10e-6, 10e-6, 10e-6, 10e-6), (10e-6, 11.6e-6, 10.1e-6, 11.5e-6))
    assert cell.change == "undecided"


def test_one_round_that_differs_is_not_halved_away(sample: BenchRecord) -> None:
    """Changes of 0, 0, 0 and 9 %: four rounds do not exclude the last, so the interval reaches up to it."""
    cell = _paired(sample, (10e-6, 10e-6, 10e-6, 10e-6), (10e-6, 10e-6, 10e-6, 10.9e-6))
    assert (cell.change, cell.reason) == ("undecided", "-0.5 % to +9.0 % straddles 5 %: the noise is 4.8 %")
    # Seven rounds do: 2 * (1 + 7) / 2^7 = 0.125.
    cell = _paired(sample, (10e-6,) * 7, (10e-6,) * 6 + (10.9e-6,))
    assert cell.change == "same"
