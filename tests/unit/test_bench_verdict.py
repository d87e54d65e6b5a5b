"""The verdict on a recorded sample: every number here was worked out by hand from the sample's times."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records
from g4kv_cli.bench.dispatch import dispatch_table, dispatch_text
from g4kv_cli.bench.verdict import decide, own_times, splits_by_rule, uncertainty
from g4kv_cli.bench.workloads import decode_shape, prep_shape
from g4kv_cli.entries.table import entry_for
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY, BenchRecord, Measurement, Timing, read_bench_record
from g4kv_cli.records.findings import CellVerdict, GeometryVerdict
from g4kv_cli.report.bench_format import columns_of

DATA = Path(__file__).resolve().parents[1] / "data" / "bench"


@pytest.fixture
def sample() -> BenchRecord:
    return read_bench_record(DATA / "sample.json", "--from")


@pytest.fixture
def verdict(sample: BenchRecord) -> GeometryVerdict:
    (found,) = decide(sample)
    return found


def _cell(verdict: GeometryVerdict, batch: int, kv_len: int) -> CellVerdict:
    (found,) = [cell for cell in verdict.cells if (cell.shape.batch, cell.shape.kv_len) == (batch, kv_len)]
    return found


def test_ties_go_to_b_which_needs_the_least(verdict: GeometryVerdict) -> None:
    # a and b both take 6.0 us, two splits 7.5 us: a quarter more.
    cell = _cell(verdict, 1, 128)
    assert (cell.configuration, cell.tied, cell.decided) == ("b", ("a",), True)
    assert cell.margin == pytest.approx(0.25)
    # Half of the rounds' spread of 0.99 to 1.01 is 1 % on each side: sqrt(2) % together.
    assert cell.margin_noise == pytest.approx(0.01 * 2**0.5, rel=1e-3)
    assert cell.peer_seconds == pytest.approx(9e-6)


def test_a_baseline_is_no_winner(sample: BenchRecord, verdict: GeometryVerdict) -> None:
    faster = [
        replace(item, id=f"{item.id}{BASELINE_SUFFIX}", configuration=f"{item.configuration}{BASELINE_SUFFIX}",
                graph=Timing(*(1e-9,) * 5, 1))
        for item in sample.measurements if item.status == "measured" and item.form != "peer"
    ]  # fmt: skip
    assert faster
    record = replace(sample, measurements=(*sample.measurements, *faster))
    assert decide(record) == (verdict,)
    assert all(
        not item.configuration.endswith(BASELINE_SUFFIX) for one in record.shapes for item in own_times(record, one)
    )


def test_a_difference_within_the_noise_is_undecided(verdict: GeometryVerdict) -> None:
    # 9.00 us unsplit, 9.02 us split: 0.2 %.
    cell = _cell(verdict, 16, 128)
    assert (cell.configuration, cell.decided) == ("b", False)
    assert cell.tied == ("a", "c2")


def test_splits_win_where_one_block_a_head_leaves_the_card_idle(verdict: GeometryVerdict) -> None:
    # c8 10.00, c16 10.05 (a tie of the same form), b 29.5.
    cell = _cell(verdict, 1, 1024)
    assert (cell.configuration, cell.num_splits, cell.tied, cell.decided) == ("c8", 8, ("c16",), True)
    assert cell.margin == pytest.approx(1.95)


def test_a_wrong_configuration_takes_no_part(verdict: GeometryVerdict) -> None:
    cell = _cell(verdict, 16, 1024)
    assert cell.configuration == "c2"
    assert "c4" not in cell.tied


def test_the_sentences_name_the_crossover(verdict: GeometryVerdict) -> None:
    assert verdict.sentences == (
        "kv_len 128: unsplit (b) at batch 1, undecided at batch 16, unsplit (b) at batch 64",
        "kv_len 1024: split (c) at batch 1 to 16, unsplit (b) at batch 64",
    )


def test_equal_patterns_share_a_sentence_and_one_kind_needs_no_crossover(sample: BenchRecord) -> None:
    unsplit = tuple(item for item in sample.measurements if item.form != "c")
    (verdict,) = decide(dataclasses.replace(sample, measurements=unsplit))
    assert verdict.sentences == ("kv_len 128, 1024: unsplit (b) at every batch measured",)
    assert all(cell.margin is None for cell in verdict.cells)


def test_the_rule_is_the_best_of_all_targets(verdict: GeometryVerdict) -> None:
    # 256 blocks and 128 keys a split: b, b (16 x 8 x 2 = 256 but 128 / 128 = 1), b; c8 (1024 / 128 = 8), c2, b: every
    # cell's fastest. Fewer blocks give c4 at batch 1 (128: 12 us for 10) or lose c2 at batch 16; 512 keys give c2
    # nowhere at batch 1.
    rule = verdict.rule
    assert rule is not None
    assert (rule.target_blocks, rule.min_keys_per_split) == (256, 128)
    assert rule.mean_loss == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("batch", "kv_len", "target", "keys", "splits"),
    [
        (1, 1024, 128, 64, 16),
        (1, 1024, 128, 128, 8),
        (3, 1024, 128, 64, 4),
        (16, 1024, 128, 64, 1),
        (1, 128, 128, 64, 2),
    ],
)
def test_splits_by_rule(batch: int, kv_len: int, target: int, keys: int, splits: int) -> None:
    shape = decode_shape(GEOMETRIES["12b-local"], batch, kv_len)
    assert splits_by_rule(shape, target, keys) == splits


def test_noise_has_a_floor_and_takes_one_round_by_its_quartiles() -> None:
    quiet = _measurement(Timing(1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 9, (1e-5, 1e-5)))
    assert uncertainty(quiet, quiet) == pytest.approx(0.005 * 2**0.5)
    single = Timing(1e-5, 0.97e-5, 1.01e-5, 0.9e-5, 1.2e-5, 9, (1e-5,))
    assert single.noise == pytest.approx(0.02)


def _measurement(timing: Timing) -> Measurement:
    return Measurement("id", "shape", "b", "b", "measured", graph=timing)


def test_the_dispatch_table(sample: BenchRecord) -> None:
    table = json.loads(dispatch_text(analyse(sample)))
    geometry = table["geometries"]["12b-local"]
    assert table["kind"] == "g4kv-decode-dispatch"
    used = {cell["form"] for geometry in table["geometries"].values() for cell in geometry["cells"]}
    assert used <= set(table["forms"])
    assert (table["forms"]["b"]["is_split"], table["forms"]["c"]["is_split"]) == (False, True)
    assert [(cell["kv_len"], cell["batch"], cell["form"], cell["num_splits"], cell["decided"]) for cell in
            geometry["cells"]] == [
        (128, 1, "b", 1, True), (128, 16, "b", 1, False), (128, 64, "b", 1, True),
        (1024, 1, "c", 8, True), (1024, 16, "c", 2, True), (1024, 64, "b", 1, True),
    ]  # fmt: skip
    assert geometry["rule"]["target_blocks"] == 256
    assert geometry["num_kv_heads"] == 8


def test_a_folded_pool_has_a_verdict_of_its_own(sample: BenchRecord) -> None:
    """The same times for both formats, in one record."""
    folded = {shape.id: replace(shape, id=_of_folded(shape.id), kv_format="folded") for shape in sample.shapes}
    measured = tuple(
        replace(item, id=_of_folded(item.id), shape=_of_folded(item.shape)) for item in sample.measurements
    )
    both = replace(sample, shapes=(*sample.shapes, *folded.values()), measurements=(*sample.measurements, *measured))
    table = dispatch_table(analyse(both))["geometries"]
    assert list(table) == ["12b-local", "12b-local-folded"]
    assert table["12b-local-folded"] == table["12b-local"] | {"geometry": "12b-local", "kv_format": "folded"}


def test_a_dispatch_table_of_other_pages_says_so(sample: BenchRecord) -> None:
    usual = dispatch_table(analyse(sample))["geometries"]
    paged = replace(sample, shapes=tuple(replace(shape, page_size=64) for shape in sample.shapes))
    found = dispatch_table(analyse(paged))["geometries"]
    assert found == {"12b-local": usual["12b-local"] | {"page_size": 64}}
    assert "page_size" not in usual["12b-local"]


def _of_folded(identifier: str) -> str:
    return identifier.replace("/12b-local/", "/12b-local-folded/")


def _beside_a_copy(sample: BenchRecord, copy: float = 1.2e-6, kernel: float = 1.5e-6) -> BenchRecord:
    """With a prep shape of a kernel, a peer and a copy."""
    geometry = GEOMETRIES["12b-local"]
    shape = prep_shape(geometry, entry_for(geometry, "prep", "prefill"), 64)
    times = {"kernel": ("x", kernel), "peer:y": ("peer", 2e-6), COPY: (COPY, copy)}
    cells = tuple(
        Measurement(f"{shape.id}/{name}", shape.id, name, form, "measured", graph=Timing(*[seconds] * 5, 8))
        for name, (form, seconds) in times.items()
    )
    return replace(sample, shapes=(*sample.shapes, shape), measurements=(*sample.measurements, *cells))


def test_prep_stands_against_the_copy_beside_it(sample: BenchRecord) -> None:
    rows = {row.measurement.id: row for row in analyse(_beside_a_copy(sample)).rows}
    found = {name.rpartition("/")[2]: row for name, row in rows.items() if name.startswith("prep/")}
    shares = {name: row.copy_share for name, row in found.items() if "12b-local/qkv" in row.shape.id}
    assert shares == pytest.approx({"kernel": 0.8, "peer:y": 0.6, COPY: 0.0})
    assert {row.copy_share for row in rows.values() if row.shape.kind != "prep"} == {0.0}
    (of_copy,) = [column for column in columns_of(list(rows.values())) if column.name == "of copy"]
    assert [of_copy.text(found[name]) for name in ("kernel", COPY)] == ["80.0 %", ""]
    assert "of copy" not in [column.name for column in columns_of(analyse(sample).rows)]
    # A copy is none of ours, and no kernel that two records are compared by.
    record = _beside_a_copy(sample)
    assert [item.configuration for item in own_times(record, record.shapes[-1])] == ["kernel"]
    changes = compare_records(record, _beside_a_copy(sample, copy=9e-6, kernel=3e-6), "a", "b", 0.05)
    found_there = [(cell.id, cell.change) for cell in changes.cells if record.shapes[-1].id in cell.id]
    assert [(name.rpartition("/")[2], change) for name, change in found_there] == [
        ("kernel", "slower"),
        ("peer:y", "same"),
    ]


def test_rows_stand_against_the_ceilings_of_the_run(sample: BenchRecord) -> None:
    rows = {row.measurement.id: row for row in analyse(sample).rows}
    # batch 64, kv 1024: 64 x 1024 keys x 8 heads x 256 x 2 bytes x (K, V), and Q and out of 64 x 16 x 256 x 2 bytes.
    moved = 64 * 1024 * 8 * 256 * 2 * 2 + 2 * 64 * 16 * 256 * 2
    row = rows["decode/12b-local/batch64/kv1024/b"]
    assert row.floor_seconds == pytest.approx(moved / 4.7e12)
    assert row.rate == pytest.approx(moved / 130e-6)
    assert row.ceiling_share == pytest.approx(moved / 4.7e12 / 130e-6)
    assert (row.floor_bound, row.standing) == ("read", "best")
    # One request of 128 keys: 2 MB are read in 0.45 us, less than a launch takes.
    assert rows["decode/12b-local/batch1/kv128/b"].floor_bound == "launch"
    assert rows["decode/12b-local/batch1/kv128/peer:torch-sdpa"].standing == "best peer"
    # Prefill is bound by the GEMM rate: 512 tokens see 1024 keys each.
    prefill = rows["prefill/12b-local/chunk512/history8192/tile64"]
    assert prefill.rate == pytest.approx(4 * 256 * 16 * 512 * 1024 / 60e-6)
    assert prefill.floor_seconds == pytest.approx(4 * 256 * 16 * 512 * 1024 / 8e14)
    assert prefill.floor_bound == "compute"
    # Bursts stand against the GEMM in bursts, 880 TFLOP/s.
    assert prefill.burst_rate == pytest.approx(4 * 256 * 16 * 512 * 1024 / 54e-6)
    assert prefill.burst_share == pytest.approx(prefill.burst_rate / 8.8e14)
