"""NVIDIA's cuda-bench (nvbench): one call with the L2 cache flushed before it, and the same call back to back.

cuda-bench runs all of its benchmarks once a process and reports at the end, so the whole sweep runs inside of one
of its benchmarks, a cell for each value of an axis. Its unit of work is a CUDA graph of a single call.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4kv_cli.bench.sweep import RunEnded, Runnable, Sweep
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import Measurement, Timing

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

PIP_LINE = "python -m pip install 'cuda-bench>=0.3'"

MIN_TIME_SECONDS = 0.001
MAX_NOISE = 0.05
MIN_SAMPLES = 30
TIMEOUT_SECONDS = 0.15
BATCH_SECONDS = 0.003
"""What a cell may cost: at least so much measured time and so many samples, and an end where the noise stays."""

AXIS = "Cell"


@dataclass(frozen=True, slots=True)
class ColdTiming:
    """What cuda-bench says about a cell."""

    cold: Timing | None
    warm_seconds: float | None
    sm_clock_hz: float | None = None


def load_cuda_bench() -> Any:
    """The package ``cuda.bench``. Raises UsageError with the line that installs it."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        from cuda import bench

        bench.State  # noqa: B018 (the native part loads on first use)
    except ImportError as error:
        raise UsageError(
            f"g4kv bench needs cuda-bench ({error}); install it with: {PIP_LINE}; or time graph replays only: --no-cold"
        ) from error
    return bench


def run_in_cuda_bench(sweep: Sweep, device: CudaDevice) -> dict[int, ColdTiming]:
    """Run the sweep's cells inside cuda-bench; its timings by index of the cell, as far as the run got.

    Ends early without an error where the sweep did (``sweep.ended``).
    """
    bench = load_cuda_bench()

    def g4kv(state: Any) -> None:
        index = int(state.get_int64(AXIS))
        if sweep.ended:
            state.skip(sweep.ended)
            return
        state.set_stream(device.stream)

        def harness(runnable: Runnable) -> None:
            state.exec(lambda _launch: runnable.queue_single())

        try:
            why = sweep.run_cell(index, harness)
        except RunEnded as ended:
            why = str(ended)
        if why and not state.is_skipped():
            state.skip(why)

    benchmark = bench.register(g4kv)
    benchmark.add_int64_axis(AXIS, list(range(len(sweep.cells))))
    benchmark.set_stopping_criterion("stdrel")
    benchmark.set_criterion_param_float64("min-time", MIN_TIME_SECONDS)
    benchmark.set_criterion_param_float64("max-noise", MAX_NOISE)
    benchmark.set_min_samples(MIN_SAMPLES)
    benchmark.set_cold_warmup_runs(1)
    benchmark.set_timeout(TIMEOUT_SECONDS)
    benchmark.set_batch_target_time(BATCH_SECONDS)
    with tempfile.TemporaryDirectory(prefix="g4kv-bench-") as directory:
        report = Path(directory) / "cuda-bench.json"
        try:
            bench.run_all_benchmarks(["g4kv", "--devices", str(device.ordinal), "--json", str(report), "--quiet"])
        except bench.NVBenchRuntimeError as error:
            # After a fault the driver refuses cuda-bench's own calls too; what the sweep wrote down stays.
            if not sweep.ended:
                sweep.ended = f"cuda-bench stopped: {' '.join(str(error).split())}"
        return read_report(report)


def read_report(path: Path) -> dict[int, ColdTiming]:
    """Timings by cell from cuda-bench's JSON; empty where there is no whole file."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    found: dict[int, ColdTiming] = {}
    for benchmark in values.get("benchmarks") or ():
        for state in benchmark.get("states") or ():
            index = next((axis["value"] for axis in state.get("axis_values") or () if axis["name"] == AXIS), None)
            if index is None or state.get("is_skipped"):
                continue
            found[int(index)] = _timing(_summaries(state))
    return found


def _summaries(state: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by tag."""
    found: dict[str, float] = {}
    for summary in state.get("summaries") or ():
        for item in summary.get("data") or ():
            if item.get("name") == "value":
                with suppress(TypeError, ValueError):
                    found[str(summary["tag"])] = float(item["value"])
    return found


def _timing(values: Mapping[str, float]) -> ColdTiming:
    prefix = "nv/cold/time/gpu/"
    median = values.get(f"{prefix}median", values.get(f"{prefix}mean"))
    warm = values.get("nv/batch/time/gpu/mean")
    clock = values.get("nv/cold/sm_clock_rate/mean")
    if median is None or not median > 0:
        return ColdTiming(None, warm, clock)
    spread = values.get(f"{prefix}stdev/absolute", median * values.get(f"{prefix}stdev/relative", 0.0))
    cold = Timing(
        median=median,
        q1=values.get(f"{prefix}q1", max(0.0, median - 0.6745 * spread)),
        q3=values.get(f"{prefix}q3", median + 0.6745 * spread),
        low=values.get(f"{prefix}min", max(0.0, median - spread)),
        high=values.get(f"{prefix}max", median + spread),
        count=int(values.get("nv/cold/sample_size", 0)),
    )
    return ColdTiming(cold, warm, clock)


def with_cold(cells: Sequence[Measurement], timings: Mapping[int, ColdTiming]) -> list[Measurement]:
    """The measured cells with what cuda-bench says about them."""
    merged = []
    for index, cell in enumerate(cells):
        timing = timings.get(index)
        if timing is not None and cell.status == "measured":
            found = replace(cell, cold=timing.cold, warm_seconds=timing.warm_seconds, sm_clock_hz=timing.sm_clock_hz)
            merged.append(found)
        else:
            merged.append(cell)
    return merged
