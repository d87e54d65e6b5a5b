"""Reading cuda-bench's report, and running inside of it (a stand-in: the real one needs a GPU to be imported)."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli.bench import harness
from g4kv_cli.bench.harness import ColdTiming, load_cuda_bench, read_report, run_in_cuda_bench, with_cold
from g4kv_cli.bench.sweep import RunEnded
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import Measurement, Timing

TIMES = {
    "nv/cold/time/gpu/mean": "1.12e-05", "nv/cold/time/gpu/median": "1.1e-05", "nv/cold/time/gpu/min": "1e-05",
    "nv/cold/time/gpu/max": "1.5e-05", "nv/cold/time/gpu/q1": "1.08e-05", "nv/cold/time/gpu/q3": "1.13e-05",
    "nv/cold/time/gpu/stdev/absolute": "2e-07", "nv/batch/time/gpu/mean": "9e-06",
    "nv/cold/sm_clock_rate/mean": "1.98e+09",
}  # fmt: skip


def _state(cell: int, times: dict[str, str], *, skipped: bool = False) -> dict[str, Any]:
    """A state as cuda-bench writes it: numbers are texts, each summary has a list of named values."""
    summaries = [
        {"tag": tag, "name": "x", "data": [{"name": "value", "type": "float64", "value": value}]}
        for tag, value in times.items()
    ]
    count = {"tag": "nv/cold/sample_size", "data": [{"name": "value", "type": "int64", "value": "42"}]}
    axis = {"name": "Cell", "type": "int64", "value": str(cell)}
    return {
        "name": f"Device=0 Cell={cell}",
        "axis_values": [axis],
        "summaries": None if skipped else [count, *summaries],
        "is_skipped": skipped,
    }


def _report(path: Path, states: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"meta": {}, "devices": [], "benchmarks": [{"name": "g4kv", "states": states}]}))
    return path


def test_a_report(tmp_path: Path) -> None:
    path = _report(tmp_path / "r.json", [_state(0, TIMES), _state(1, {}, skipped=True), _state(2, {})])
    assert read_report(path) == {
        0: ColdTiming(Timing(1.1e-5, 1.08e-5, 1.13e-5, 1e-5, 1.5e-5, 42), 9e-6, 1.98e9),
        2: ColdTiming(None, None),
    }


def test_a_report_of_an_older_version_has_a_mean_and_a_deviation(tmp_path: Path) -> None:
    times = {"nv/cold/time/gpu/mean": "2e-05", "nv/cold/time/gpu/stdev/relative": "0.01"}
    timing = read_report(_report(tmp_path / "r.json", [_state(7, times)]))[7].cold
    assert timing is not None
    assert (timing.median, timing.count) == (2e-5, 42)
    # The quartiles of a normal distribution lie 0.6745 deviations from its mean.
    assert timing.q3 - timing.q1 == pytest.approx(2 * 0.6745 * 0.01 * 2e-5)


@pytest.mark.parametrize("text", ["", "{", '{"benchmarks": null}'])
def test_a_report_that_is_not_whole_has_no_timings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    assert read_report(path) == {}
    path.write_text(text)
    assert read_report(path) == {}


def test_only_measured_cells_get_a_cold_time() -> None:
    timing = Timing(1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 5)
    good = Measurement("a", "s", "a", "a", "measured", graph=timing)
    wrong = Measurement("b", "s", "b", "b", "wrong", reason="no")
    late = Measurement("c", "s", "c", "c", "measured", graph=timing)
    merged = with_cold([good, wrong, late], {0: ColdTiming(timing, 9e-6, 2e9), 1: ColdTiming(timing, 9e-6)})
    assert (merged[0].cold, merged[0].warm_seconds, merged[0].sm_clock_hz) == (timing, 9e-6, 2e9)
    assert merged[1:] == [wrong, late]


class FakeState:
    def __init__(self, cell: int, log: list[str]) -> None:
        self._cell, self._log = cell, log
        self.skipped = ""

    def get_int64(self, name: str) -> int:
        assert name == "Cell"
        return self._cell

    def set_stream(self, stream: object) -> None:
        assert stream == "the stream"

    def exec(self, launcher: Callable[[object], None]) -> None:
        launcher(object())
        self._log.append(f"exec {self._cell}")

    def skip(self, reason: str) -> None:
        self.skipped = reason
        self._log.append(f"skip {self._cell}: {reason}")

    def is_skipped(self) -> bool:
        return bool(self.skipped)


class FakeBenchmark:
    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., FakeBenchmark]:
        def note(*arguments: Any) -> FakeBenchmark:
            self.settings[name if len(arguments) == 1 else f"{name} {arguments[0]}"] = arguments[-1]
            return self

        return note


class FakeCudaBench(types.ModuleType):
    """``cuda.bench`` as far as it is used: one registered function, run over the values of an axis."""

    class NVBenchRuntimeError(RuntimeError):
        pass

    State = FakeState

    def __init__(self, log: list[str]) -> None:
        super().__init__("cuda.bench")
        self.log = log
        self.benchmark = FakeBenchmark()
        self.dies_after: int | None = None

    def register(self, function: Callable[[Any], None]) -> FakeBenchmark:
        self.function = function
        return self.benchmark

    def run_all_benchmarks(self, arguments: list[str]) -> None:
        assert arguments[0] == "g4kv"
        assert arguments[1:3] == ["--devices", "1"]
        states = []
        for cell in self.benchmark.settings["add_int64_axis Cell"]:
            state = FakeState(cell, self.log)
            self.function(state)
            if self.dies_after == cell:
                raise self.NVBenchRuntimeError("CUDA error:\n  unspecified launch failure")
            states.append(_state(cell, TIMES, skipped=state.is_skipped()))
        _report(Path(arguments[arguments.index("--json") + 1]), states)


class FakeSweep:
    """Three cells; the second is wrong."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.cells = ("x", "y", "z")
        self.ended = ""
        self._ends_at = ends_at

    def run_cell(self, index: int, harness: Callable[[Any], None]) -> str:
        if index == self._ends_at:
            self.ended = "interrupted"
            raise RunEnded(self.ended)
        if index == 1:
            return "wrong: 2 rows"
        harness(types.SimpleNamespace(queue_single=lambda: None))
        return ""


@pytest.fixture
def cuda_bench(monkeypatch: pytest.MonkeyPatch) -> FakeCudaBench:
    fake = FakeCudaBench([])
    monkeypatch.setattr(harness, "load_cuda_bench", lambda: fake)
    return fake


DEVICE: Any = types.SimpleNamespace(stream="the stream", ordinal=1)


def test_the_sweep_runs_inside_of_cuda_bench(cuda_bench: FakeCudaBench) -> None:
    sweep: Any = FakeSweep()
    timings = run_in_cuda_bench(sweep, DEVICE)
    assert cuda_bench.log == ["exec 0", "skip 1: wrong: 2 rows", "exec 2"]
    assert sorted(timings) == [0, 2]
    assert sweep.ended == ""
    assert cuda_bench.benchmark.settings["set_stopping_criterion"] == "stdrel"


def test_an_interrupt_skips_what_is_left_and_keeps_the_timings(cuda_bench: FakeCudaBench) -> None:
    sweep: Any = FakeSweep(ends_at=1)
    timings = run_in_cuda_bench(sweep, DEVICE)
    assert cuda_bench.log == ["exec 0", "skip 1: interrupted", "skip 2: interrupted"]
    assert sorted(timings) == [0]


def test_where_cuda_bench_dies_the_run_says_so(cuda_bench: FakeCudaBench) -> None:
    cuda_bench.dies_after = 1
    sweep: Any = FakeSweep()
    assert run_in_cuda_bench(sweep, DEVICE) == {}
    assert sweep.ended == "cuda-bench stopped: CUDA error: unspecified launch failure"


def test_without_cuda_bench_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bench", None)
    with pytest.raises(UsageError) as caught:
        load_cuda_bench()
    text = str(caught.value)
    assert text.startswith("g4kv bench needs cuda-bench (")
    assert "python -m pip install 'cuda-bench>=0.3'" in text
    assert text.endswith("or time graph replays only: --no-cold")
