"""What people see of a bench, to the character, on a recorded sample; and the record's schema."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records
from g4kv_cli.bench.dispatch import dispatch_text
from g4kv_cli.bench.run import Request, make_plan
from g4kv_cli.commands.bench_report import compared, exit_code_of
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.bench import (
    BenchRecord,
    Measurement,
    MeasurementStatus,
    Timing,
    median_interval,
    read_bench_record,
    record_to_text,
    timing_of,
)
from g4kv_cli.records.findings import Analysis
from g4kv_cli.report.bench_console import BenchConsole
from g4kv_cli.report.bench_format import bytes_text, clocks_text, flops_text, share_text, time_text
from g4kv_cli.report.bench_html import page
from g4kv_cli.report.bench_plots import Plot, plots_of, render
from g4kv_cli.report.bench_store import BenchStore

pytestmark = pytest.mark.usefixtures("forms_a_b_c")

DATA = Path(__file__).resolve().parents[1] / "data" / "bench"


@pytest.fixture
def sample() -> BenchRecord:
    return read_bench_record(DATA / "sample.json", "--from")


@pytest.fixture
def analysis(sample: BenchRecord) -> Analysis:
    return analyse(sample)


def _shown(show: Callable[[BenchConsole], None]) -> str:
    stream = io.StringIO()
    show(BenchConsole(Console(file=stream, highlight=False, soft_wrap=True, width=150)))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _expected(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def test_the_tables(analysis: Analysis) -> None:
    assert _shown(lambda console: console.tables(analysis)) == _expected("tables.txt")


def test_the_verdict_and_what_is_missing(analysis: Analysis) -> None:
    def show(console: BenchConsole) -> None:
        console.start(analysis.record)
        console.verdicts(analysis.verdicts)
        console.missing(analysis)

    assert _shown(show) == _expected("verdict.txt")


@pytest.mark.parametrize(
    ("status", "configuration", "code"),
    [
        ("wrong", "b", 1),
        ("impossible", "b", 1),
        ("failed", "b", 2),
        ("missing", "b", 2),
        ("skipped", "b", 0),
        ("not covered", "b", 0),
        ("wrong", "peer:mine", 1),
        ("failed", "peer:mine/c2", 2),
        ("wrong", "peer:torch-sdpa", 0),
        ("failed", "peer:torch-sdpa", 0),
    ],
)
def test_the_exit_code_is_that_of_our_cells_and_of_manifests(
    sample: BenchRecord, status: MeasurementStatus, configuration: str, code: int
) -> None:
    """What befalls another library is no finding, of kernels of a manifest it is one."""
    shape, form = sample.shapes[0], "peer" if configuration.startswith("peer:") else "b"
    cell = Measurement(f"{shape.id}/{configuration}", shape.id, configuration, form, status, "why")
    peers = ({"name": "mine", "manifest": "mine.toml"}, {"name": "torch-sdpa"})
    assert exit_code_of(dataclasses.replace(sample, measurements=(cell,), peers=peers, ended="finished")) == code


def test_the_exit_code_is_also_that_of_a_fault_and_of_a_comparison(sample: BenchRecord) -> None:
    good = dataclasses.replace(sample, measurements=tuple(m for m in sample.measurements if m.status == "measured"))
    assert exit_code_of(good) == 0
    assert exit_code_of(dataclasses.replace(good, ended="the GPU faulted at a cell")) == 1
    later = read_bench_record(DATA / "later.json", "--compare")
    slower, same = (compare_records(sample, one, "a", "b", 0.05) for one in (later, sample))
    console = BenchConsole(Console(file=io.StringIO()))
    assert [compared(console, one, 0) for one in (slower, same, None)] == [1, 0, 0]
    assert [compared(console, one, 2) for one in (slower, same, None)] == [2, 2, 2]


def test_the_comparison(sample: BenchRecord) -> None:
    later = read_bench_record(DATA / "later.json", "--compare")
    comparison = compare_records(sample, later, "sample.json", "later.json", 0.05)
    assert _shown(lambda console: console.comparison(comparison)) == _expected("comparison.txt")


def test_a_run_that_ended_early_says_so(sample: BenchRecord) -> None:
    later = analyse(read_bench_record(DATA / "later.json", "--from"))
    assert later.missing[0] == "missing: decode/12b-local/batch16/kv128/a: the run ended before it"
    assert later.missing[-1] == "the run ended early: interrupted"


def test_measured_cells_without_a_cold_time_are_told(sample: BenchRecord) -> None:
    bare = tuple(dataclasses.replace(item, cold=None) for item in sample.measurements)
    missing = analyse(dataclasses.replace(sample, measurements=bare)).missing
    assert missing[-1] == "no cold time: decode/12b-local/batch1/kv128/a and 26 more: cuda-bench reported none"


def test_the_page(analysis: Analysis) -> None:
    def stub(plot: Plot, kind: str) -> bytes:
        assert kind == "svg"
        return (
            f'<?xml version="1.0"?>\n<svg xmlns="x"><metadata>m</metadata><g id="{len(plot.name)}"/></svg>\n'.encode()
        )

    assert page(analysis, stub) == _expected("page.html")


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"version": "1.32.0", "library": "cuDNN 9.19.0"}, "cudnn-sdpa 1.32.0, cuDNN 9.19.0"),
        ({"version": "1.32.0"}, "cudnn-sdpa 1.32.0"),
        ({"version": "", "reason": "cudnn is not installed"}, "cudnn-sdpa cudnn is not installed"),
    ],
)
def test_the_page_says_what_a_peer_ran_on(sample: BenchRecord, peer: dict[str, str], words: str) -> None:
    record = dataclasses.replace(sample, peers=({"name": "cudnn-sdpa", **peer},))
    assert f"<dt>peer</dt><dd>{words}</dd>" in page(analyse(record), None)


def test_the_page_needs_no_network_and_no_script(analysis: Analysis) -> None:
    text = page(analysis)
    assert "<script" not in text
    # What a browser would fetch: sources, style sheets and imports. Links inside of an SVG begin with #.
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', text) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import", text) == []
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert text.count("<svg ") == 3


def test_plots_have_data_and_are_the_same_each_time(analysis: Analysis) -> None:
    plots = plots_of(analysis)
    assert [plot.name for plot in plots] == ["roofline", "12b-local-time", "12b-local-winners"]
    for plot in plots:
        first = render(plot, "svg")
        assert render(plot, "svg") == first
        assert len(first) > 5000
        assert render(plot, "png").startswith(b"\x89PNG")
    assert b"c8" in render(plots[2], "svg")


def test_a_record_without_times_has_no_plots(sample: BenchRecord) -> None:
    planned = make_plan(Request("decode", (GEOMETRIES["12b-local"],), "quick"))
    empty = dataclasses.replace(sample, shapes=planned.shapes, measurements=planned.cells)
    assert plots_of(analyse(empty)) == []
    assert "Without a time" in page(analyse(empty))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.684e-6, "0.68 us"), (99.94e-6, "99.94 us"), (131.62e-6, "131.6 us"), (3.749e-3, "3.75 ms"), (2.5, "2.50 s")],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_other_numbers() -> None:
    assert [share_text(value) for value in (0.056, 0.0996, 0.97, 1.02)] == ["5.6 %", "10 %", "97 %", "102 %"]
    assert [bytes_text(count) for count in (512, 16_777_216, 538_000_000, 68_719_476_736)] == [
        "512 B", "16.8 MB", "538 MB", "68.7 GB",
    ]  # fmt: skip
    assert [flops_text(count) for count in (12, 2_100_000, 3_000_000_000_000)] == ["12 FLOP", "2.1 MFLOP", "3.0 TFLOP"]


# --- the record -------------------------------------------------------------------------------------------------


def test_a_record_reads_back_as_it_was(sample: BenchRecord, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(record_to_text(sample), encoding="utf-8")
    assert read_bench_record(path, "--from") == sample
    assert path.read_text(encoding="utf-8") == _expected("sample.json")


def test_the_schema(sample: BenchRecord) -> None:
    values = json.loads(record_to_text(sample))
    assert list(values) == [
        "schema_version", "kind", "run", "settings", "ceilings", "shapes", "measurements", "peers", "clocks", "ended",
        "burst_ceilings",
    ]  # fmt: skip
    assert values["schema_version"] == 1
    assert values["kind"] == "g4kv-bench"
    assert set(values["shapes"][0]) == {
        "id", "kind", "geometry", "family", "batch", "tokens", "kv_len", "visible_keys", "page_size", "num_qo_heads",
        "num_kv_heads", "head_dim", "read_bytes", "write_bytes", "flops",
    }  # fmt: skip
    assert set(values["measurements"][0]) == {
        "id", "shape", "configuration", "form", "status", "num_splits", "graph", "burst", "burst_calls", "cold",
        "warm_seconds", "sm_clock_hz", "pools", "rotating_bytes", "checked_rows",
    }  # fmt: skip
    assert values["measurements"][0]["graph"] == {
        "median": 6e-6, "q1": 5.97e-6, "q3": 6.03e-6, "low": 5.88e-6, "high": 6.24e-6, "count": 80,
        "round_medians": [5.94e-6, 6e-6, 6e-6, 6.06e-6],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("1980 MHz, 3201 MHz, 127.14 W, 35, 0x0000000000000000",
         "SM 1980 MHz, memory 3201 MHz, 127.14 W, 35 degrees C, clocks held down by nothing"),
        ("345 MHz, 2619 MHz, 76.00 W, 27, 0x0000000000000001",
         "SM 345 MHz, memory 2619 MHz, 76.00 W, 27 degrees C, clocks held down by idle"),
        ("1200 MHz, 3201 MHz, 700.00 W, 80, 0x0000000000001024",
         "SM 1200 MHz, memory 3201 MHz, 700.00 W, 80 degrees C, clocks held down by power cap, heat (software), "
         "0x1000"),
        ("something else", "something else"),
        ("1, 2, 3, 4, [N/A]", "1, 2, 3, 4, [N/A]"),
    ],
)  # fmt: skip
def test_the_clocks_have_units(line: str, want: str, analysis: Analysis) -> None:
    assert clocks_text(line) == want
    record = dataclasses.replace(analysis.record, clocks=(line, line))
    assert f"<dd>{want}</dd>" in page(dataclasses.replace(analysis, record=record), None)


def _damage(tmp_path: Path, change: Callable[[dict], object]) -> str:  # type: ignore[type-arg]
    values = json.loads(_expected("sample.json"))
    change(values)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_bench_record(path, "--compare")
    text = str(caught.value)
    assert text.startswith(f"--compare {path}: ")
    assert text.endswith("; give a bench.json that g4kv bench wrote")
    return text.removeprefix(f"--compare {path}: ").removesuffix("; give a bench.json that g4kv bench wrote")


@pytest.mark.parametrize(
    ("where", "field", "value", "words"),
    [
        ("", "ended", "", "ended is missing"),
        ("peer", "name", "", "a peer has no name"),
        ("ceilings", "read_bytes_per_second", 0.0, "a memory rate is not positive"),
        ("ceilings", "launch_seconds", -1e-6, "a value is negative"),
        ("shape", "batch", 0, "an extent is below 1"),
        ("shape", "num_kv_heads", 3, "num_kv_heads does not divide num_qo_heads"),
        ("shape", "visible_keys", 10**6, "visible_keys is not between 0 and kv_len"),
        ("shape", "flops", -1, "a size is negative"),
        ("shape", "kind", "prefill", "the id does not begin with prefill/"),
        ("cell", "configuration", "other", "the id is not its shape and configuration"),
        ("cell", "num_splits", 0, "num_splits is below 1"),
        ("cell", "pools", -1, "a count is negative"),
        ("cell", "burst_calls", 3, "burst and burst_calls disagree"),
        ("cell", "warm_seconds", 0.0, "warm_seconds is not positive"),
        ("graph", "q1", 6.1e-6, "low, q1, median, q3 and high must be positive and in order"),
        ("graph", "q3", 5.9e-6, "low, q1, median, q3 and high must be positive and in order"),
        ("graph", "count", 0, "0 samples"),
        ("graph", "round_medians", [1.0], "a round's median lies outside low and high"),
        ("graph", "round_clocks_hz", [0.0], "a clock is not positive"),
    ],
)
def test_what_no_run_writes_is_refused(tmp_path: Path, where: str, field: str, value: object, words: str) -> None:
    def change(values: dict) -> None:  # type: ignore[type-arg]
        cell = values["measurements"][0]
        places = {"": values, "peer": values["peers"][0], "ceilings": values["ceilings"], "shape": values["shapes"][0],
                  "cell": cell, "graph": cell["graph"]}  # fmt: skip
        places[where][field] = value

    assert words in _damage(tmp_path, change)


def test_damaged_records_are_refused_in_one_line(tmp_path: Path) -> None:
    def timeless(values: dict) -> None:  # type: ignore[type-arg]
        del values["measurements"][0]["graph"]

    def negative(values: dict) -> None:  # type: ignore[type-arg]
        values["measurements"][0]["graph"]["median"] = 0.0

    def stranger(values: dict) -> None:  # type: ignore[type-arg]
        values["measurements"][0]["shape"] = "decode/nowhere"

    assert _damage(tmp_path, lambda values: values.update(kind="junk")) == "not a bench record"
    assert _damage(tmp_path, lambda values: values.update(schema_version=2)) == "schema version 2, this g4kv reads 1"
    name = "decode/12b-local/batch1/kv128/a"
    wanted = f"the record is damaged: {name}: status measured and its times contradict each other"
    assert _damage(tmp_path, timeless) == wanted
    wanted = f"the record is damaged: {name}: graph: low, q1, median, q3 and high must be positive and in order"
    assert _damage(tmp_path, negative) == wanted
    wanted = f"the record is damaged: {name} names a shape that the record lacks"
    assert _damage(tmp_path, stranger) == wanted
    assert _damage(tmp_path, lambda values: values.pop("run")) == "the record is damaged: run is missing"

    def bursts(values: dict) -> dict:  # type: ignore[type-arg]
        return next(one for one in values["measurements"] if one["burst"])

    name = "prefill/12b-local/chunk512/history8192/tile64"
    assert _damage(tmp_path, lambda values: bursts(values).update(burst_calls=0)) == (
        f"the record is damaged: {name}: burst and burst_calls disagree"
    )
    assert _damage(tmp_path, lambda values: bursts(values).update(graph=None, status="failed")) == (
        f"the record is damaged: {name}: bursts and no time without pauses"
    )
    assert _damage(tmp_path, lambda values: bursts(values)["burst"].update(round_clocks_hz=[0])) == (
        f"the record is damaged: {name}: burst: a clock is not positive"
    )
    assert _damage(tmp_path, lambda values: values["burst_ceilings"].update(copy_bytes_per_second=0)) == (
        "the record is damaged: burst_ceilings: a memory rate is not positive"
    )


def _places(values: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value; of a list, the first."""
    yield path
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _places(value, (*path, name))
    elif isinstance(values, list) and values:
        yield from _places(values[0], (*path, 0))


NONSENSE = (None, "x", -1, 0, 1.5, float("nan"), True, [], {}, [None], 10**40)


def test_nonsense_anywhere_in_a_record_is_refused_or_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the schema lets through, every report of it can show."""
    whole = json.loads(_expected("sample.json"))
    whole["shapes"] = whole["shapes"][:2]
    kept = {shape["id"] for shape in whole["shapes"]}
    whole["measurements"] = [item for item in whole["measurements"] if item["shape"] in kept]
    text = json.dumps(whole)
    path = tmp_path / "nonsense.json"
    errors = []
    for place in list(_places(whole))[1:]:
        for nonsense in NONSENSE:
            values = json.loads(text)
            holder = values
            for step in place[:-1]:
                holder = holder[step]
            holder[place[-1]] = nonsense
            path.write_text(json.dumps(values), encoding="utf-8")
            try:
                record = read_bench_record(path, "--from")
            except UsageError as error:
                errors.append(str(error))
                continue
            analysis = analyse(record)
            console = BenchConsole()
            console.start(record)
            console.tables(analysis)
            console.verdicts(analysis.verdicts)
            console.missing(analysis)
            page(analysis, None)
            dispatch_text(analysis)
            compare_records(record, record, "A", "B", 0.05)
    capsys.readouterr()
    assert all(error.startswith(f"--from {path}: ") and "\n" not in error for error in errors)
    assert len(errors) > 400


def test_files_that_are_no_json_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(UsageError, match="cannot read"):
        read_bench_record(path, "--from")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="not JSON"):
        read_bench_record(path, "--from")


def test_the_store_is_whole_after_each_step(sample: BenchRecord, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    planned = make_plan(Request("decode", (GEOMETRIES["12b-local"],), "quick", batches=(1,), kv_lens=(128,)))
    record = dataclasses.replace(sample, shapes=planned.shapes, measurements=planned.cells, ended="still running")
    store = BenchStore(record, path)
    assert {item.status for item in read_bench_record(path, "--from").measurements} == {"missing"}
    done = dataclasses.replace(planned.cells[1], status="failed", reason="it broke")
    store.put([done])
    wanted = ["failed" if cell.id == done.id else "missing" for cell in planned.cells]
    assert [item.status for item in read_bench_record(path, "--from").measurements] == wanted
    assert wanted.count("failed") == 1 < len(wanted)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.json"]
    with pytest.raises(UsageError, match="cannot write"):
        BenchStore(record, tmp_path / "nowhere" / "bench.json")


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        # 2 * 1/16 misses with the ends (7 in 8 hold), 2 * (1 + 4)/16 without them.
        ((4.0, 1.0, 3.0, 2.0), (1.0, 4.0)),
        # 2 * (1 + 8)/256 = 0.07 without one at either end; 2 * (1 + 8 + 28)/256 = 0.29 without two.
        ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 80.0), (2.0, 7.0)),
        # 2 * (1 + 12 + 66 + 220)/4096 = 0.146 without three; four more would be 0.39.
        (tuple(float(value) for value in range(1, 13)), (4.0, 9.0)),
        # Too few for the confidence: the whole range.
        ((1.0, 3.0, 2.0), (1.0, 3.0)),
        ((1.0, 2.0), (1.0, 2.0)),
        ((5.0,), (5.0, 5.0)),
    ],
)
def test_where_a_median_lies(values: tuple[float, ...], interval: tuple[float, float]) -> None:
    assert median_interval(values) == interval


def test_the_clock_is_the_median_over_the_rounds_that_were_read() -> None:
    found = timing_of([[1.0], [2.0], [3.0]], [[1.9e9, 1.7e9, 1.8e9], [], [1.5e9]])
    assert found.round_clocks_hz == (1.8e9, 1.5e9)
    assert found.clock_hz == 1.65e9
    assert timing_of([[1.0]]).clock_hz is None


def test_timings_of_rounds() -> None:
    # 1..5 and 6: the median of all is 3.5, quartiles 2.25 and 4.75 (linear between neighbours).
    timing = timing_of([[5.0, 1.0, 3.0], [2.0, 4.0, 6.0]])
    assert timing == Timing(3.5, 2.25, 4.75, 1.0, 6.0, 6, (3.0, 4.0))
    assert timing.noise == pytest.approx(0.5 / 3.5)
    with pytest.raises(ValueError, match="no samples"):
        timing_of([[]])
