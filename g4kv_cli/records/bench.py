"""What ``g4kv bench`` writes down: shapes, configurations, their times, the ceilings of the run, and the verdict.

A record is one JSON file in base units (seconds, bytes, FLOPs). ``status`` says which fields a measurement has:
``measured`` has times; every other status has a ``reason`` and no times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import RunInfo, to_json
from g4kv_cli.records.schema import SchemaError, read_json, record_from

BENCH_SCHEMA_VERSION = 1
BENCH_KIND = "g4kv-bench"

ShapeKind = Literal["decode", "prefill", "prep"]
SHAPE_KINDS: tuple[ShapeKind, ...] = get_args(ShapeKind)
MeasurementStatus = Literal["measured", "wrong", "impossible", "failed", "skipped", "not covered", "missing"]
"""wrong: its results are; impossible: faster than the floor of this run; skipped: the memory lacks; not covered: its
provider or library does not serve it, or is not here; missing: the run ended before it."""

PEER_PREFIX = "peer:"
"""Of another library's configuration."""
BASELINE_SUFFIX = "@baseline"
"""A configuration of the kernels that the run was held against."""
COPY = "copy"
"""The configuration, and the form, of a plain kernel that copies as many bytes as a prep shape moves."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem size. ``tokens``: query tokens a request (decode: 1); ``kv_len``: keys a request, new ones included.

    ``requests``: (keys, new tokens) of each, where they are no equals; ``kv_len``, ``tokens`` and ``visible_keys`` are
    then the largest. ``read_bytes`` and ``write_bytes``: each input that the result depends on once, each output once.
    ``flops`` count a multiply and an add as two. ``kv_format``: how rows of K lie in the pool, empty for split.
    """

    id: str
    kind: ShapeKind
    geometry: str
    family: str
    batch: int
    tokens: int
    kv_len: int
    visible_keys: int
    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    read_bytes: int
    write_bytes: int
    flops: int
    requests: tuple[tuple[int, ...], ...] = ()
    kv_format: Literal["", "folded"] = ""

    @property
    def pool(self) -> str:
        """The geometry and, where it is not the usual one, its pool's format: what tables and verdicts go by."""
        return f"{self.geometry}-{self.kv_format}" if self.kv_format else self.geometry


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call: quantiles of ``count`` samples. ``round_medians``: one median for each round of the run.

    ``round_clocks_hz``: the SMs' mean clock while a round's samples ran, for each round that has one.
    """

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int
    round_medians: tuple[float, ...] = ()
    round_clocks_hz: tuple[float, ...] = ()

    @property
    def clock_hz(self) -> float | None:
        """The SM clock: the median over the rounds; None where no round has one."""
        return quantile(sorted(self.round_clocks_hz), 0.5) if self.round_clocks_hz else None

    @property
    def noise(self) -> float:
        """How far the median itself is uncertain, relative: half of median_interval of the rounds' medians, or, where
        there is one round only, half the interquartile range."""
        if len(self.round_medians) > 1:
            low, high = median_interval(self.round_medians)
            return (high - low) / 2 / self.median
        return (self.q3 - self.q1) / 2 / self.median


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration at one shape.

    ``graph``: calls in a replayed CUDA graph that rotates over ``pools`` copies of the data, replays following one
    another without a pause. ``burst``: the same graph in bursts of ``burst_calls`` calls, the card at rest before each;
    one sample a burst, each a round of its own. ``cold``: one call with
    the L2 cache flushed before it; ``warm_seconds``: the same call back to back; ``sm_clock_hz``: the SMs' mean
    clock in the cold samples (all three by cuda-bench, which drops samples of a throttled clock). ``form`` is
    the label of a decode form (``b``), ``peer`` for another library's kernel, ``copy`` for what prep is held against,
    else the entry's or variant's name.
    """

    id: str
    shape: str
    configuration: str
    form: str
    status: MeasurementStatus
    reason: str = ""
    num_splits: int = 1
    graph: Timing | None = None
    burst: Timing | None = None
    burst_calls: int = 0
    cold: Timing | None = None
    warm_seconds: float | None = None
    sm_clock_hz: float | None = None
    pools: int = 0
    rotating_bytes: int = 0
    checked_rows: int = 0

    @property
    def seconds(self) -> float | None:
        """The time that decides: the median of the graph replays."""
        return None if self.graph is None else self.graph.median


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What plain kernels reached in this run. 0: not measured. ``launch_seconds``: an empty kernel in a graph;
    ``gemm_clock_hz``: the SMs' mean clock while the GEMM ran."""

    read_bytes_per_second: float
    copy_bytes_per_second: float
    gemm_flops_per_second: float = 0.0
    launch_seconds: float = 0.0
    note: str = ""
    gemm_clock_hz: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """A whole run. ``ceilings`` hold for launches without pauses, ``burst_ceilings`` for bursts; ``clocks``: what
    nvidia-smi said before and after, in its own words."""

    run: RunInfo
    settings: Mapping[str, Any]
    ceilings: Ceilings | None
    shapes: tuple[Shape, ...]
    measurements: tuple[Measurement, ...]
    peers: tuple[Mapping[str, str], ...] = ()
    clocks: tuple[str, ...] = ()
    ended: str = "finished"
    burst_ceilings: Ceilings | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def overlaps(self) -> bool:
        """Whether our decode launches began while those in front ended (``--pdl``); older records do not say."""
        return bool(self.settings.get("enable_pdl"))

    def at(self, shape: Shape) -> tuple[Measurement, ...]:
        """All measurements of a shape, in the order of the run."""
        return tuple(item for item in self.measurements if item.shape == shape.id)


def record_to_text(record: BenchRecord) -> str:
    """The record as JSON text, one measurement a line."""
    head = {"schema_version": BENCH_SCHEMA_VERSION, "kind": BENCH_KIND, **to_json(record)}
    lines = []
    for name, value in head.items():
        if name in ("shapes", "measurements") and value:
            items = ",\n".join(f"    {json.dumps(item)}" for item in value)
            lines.append(f'  "{name}": [\n{items}\n  ]')
        else:
            lines.append(f'  "{name}": ' + json.dumps(value, indent=2).replace("\n", "\n  "))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_bench_record(path: Path, option: str) -> BenchRecord:
    """Read a record that ``g4kv bench`` wrote. Raises UsageError, naming ``option``, if it is none."""

    def fail(what: str) -> UsageError:
        return UsageError(f"{option} {path}: {what}; give a bench.json that g4kv bench wrote")

    values = read_json(path, fail)
    if not isinstance(values, dict) or values.get("kind") != BENCH_KIND:
        raise fail("not a bench record")
    if values.get("schema_version") != BENCH_SCHEMA_VERSION:
        raise fail(f"schema version {values.get('schema_version')}, this g4kv reads {BENCH_SCHEMA_VERSION}")
    try:
        body = {name: value for name, value in values.items() if name not in ("schema_version", "kind")}
        record = record_from(BenchRecord, body)
        _require_sense(record)
    except SchemaError as error:
        raise fail(f"the record is damaged: {error}") from error
    return record


def _require_sense(record: BenchRecord) -> None:
    """Raises SchemaError for what no run of g4kv bench writes, though each value has its type."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise SchemaError(what)

    require(bool(record.ended), "ended is missing")
    require(all(peer.get("name") for peer in record.peers), "a peer has no name")
    for name, ceilings in (("ceilings", record.ceilings), ("burst_ceilings", record.burst_ceilings)):
        if ceilings is not None:
            rates = (ceilings.read_bytes_per_second, ceilings.copy_bytes_per_second)
            require(min(rates) > 0, f"{name}: a memory rate is not positive")
            rest = (ceilings.gemm_flops_per_second, ceilings.launch_seconds, ceilings.gemm_clock_hz)
            require(min(rest) >= 0, f"{name}: a value is negative")
    for one in record.shapes:
        extents = (one.batch, one.tokens, one.kv_len, one.page_size, one.num_qo_heads, one.num_kv_heads, one.head_dim)
        require(min(extents) >= 1, f"{one.id}: an extent is below 1")
        require(one.num_qo_heads % one.num_kv_heads == 0, f"{one.id}: num_kv_heads does not divide num_qo_heads")
        require(0 <= one.visible_keys <= one.kv_len, f"{one.id}: visible_keys is not between 0 and kv_len")
        require(min(one.read_bytes, one.write_bytes) >= 0 and one.flops >= 0, f"{one.id}: a size is negative")
        require(one.read_bytes + one.write_bytes > 0, f"{one.id}: moves no bytes")
        prefix = f"{one.kind}/{one.pool}/"
        require(one.id.startswith(prefix) and one.id != prefix, f"{one.id}: the id does not begin with {prefix}")
    known = {shape.id for shape in record.shapes}
    require(len(known) == len(record.shapes), "two shapes have one id")
    require(len({item.id for item in record.measurements}) == len(record.measurements), "two measurements have one id")
    for item in record.measurements:
        require(item.shape in known, f"{item.id} names a shape that the record lacks")
        require(
            item.id == f"{item.shape}/{item.configuration}", f"{item.id}: the id is not its shape and configuration"
        )
        timed = item.graph is not None
        require(
            (item.status == "measured") == timed, f"{item.id}: status {item.status} and its times contradict each other"
        )
        require(timed or item.burst is None, f"{item.id}: bursts and no time without pauses")
        require((item.burst is None) == (item.burst_calls == 0), f"{item.id}: burst and burst_calls disagree")
        require(item.num_splits >= 1, f"{item.id}: num_splits is below 1")
        counts = (item.pools, item.rotating_bytes, item.checked_rows, item.burst_calls)
        require(min(counts) >= 0, f"{item.id}: a count is negative")
        for name, seconds in (("warm_seconds", item.warm_seconds), ("sm_clock_hz", item.sm_clock_hz)):
            require(seconds is None or seconds > 0, f"{item.id}: {name} is not positive")
        for name, timing in (("graph", item.graph), ("burst", item.burst), ("cold", item.cold)):
            if timing is not None:
                _require_order(timing, f"{item.id}: {name}")


def _require_order(timing: Timing, where: str) -> None:
    """Raises SchemaError unless the quantiles are positive and in order."""
    if not 0 < timing.low <= timing.q1 <= timing.median <= timing.q3 <= timing.high:
        raise SchemaError(f"{where}: low, q1, median, q3 and high must be positive and in order")
    if timing.count < 1:
        raise SchemaError(f"{where}: {timing.count} samples")
    if not all(timing.low <= one <= timing.high for one in timing.round_medians):
        raise SchemaError(f"{where}: a round's median lies outside low and high")
    if not all(one > 0 for one in timing.round_clocks_hz):
        raise SchemaError(f"{where}: a clock is not positive")


def timing_of(rounds: Sequence[Sequence[float]], clocks_hz: Sequence[Sequence[float]] = ()) -> Timing:
    """Quantiles over all samples of all rounds (linear interpolation), and each round's median. Seconds a call.
    ``clocks_hz``: the readings of each round."""
    samples = sorted(sample for one in rounds for sample in one)
    if not samples:
        raise ValueError("no samples")
    return Timing(
        median=quantile(samples, 0.5),
        q1=quantile(samples, 0.25),
        q3=quantile(samples, 0.75),
        low=samples[0],
        high=samples[-1],
        count=len(samples),
        round_medians=tuple(quantile(sorted(one), 0.5) for one in rounds if one),
        round_clocks_hz=tuple(quantile(sorted(one), 0.5) for one in clocks_hz if one),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, linear between neighbours (as NumPy's default)."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


MEDIAN_CONFIDENCE = 0.85
"""Of median_interval: 4 rounds have it from smallest to largest, 7 without one at either end (7 in 8 both)."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what ``values`` were drawn from lies, with MEDIAN_CONFIDENCE, whatever their distribution.

    The k-th smallest and k-th largest of n values miss it with probability 2 * sum of C(n, i) / 2^n over i < k (the
    sign test); the largest k that keeps the confidence is taken, the whole range where none does (n < 4).
    """
    ordered = sorted(values)
    count = len(ordered)
    trimmed, missed = 0, 2.0 / 2**count
    while True:
        missed += 2.0 * math.comb(count, trimmed + 1) / 2**count
        if missed > 1 - MEDIAN_CONFIDENCE:
            return ordered[trimmed], ordered[-1 - trimmed]
        trimmed += 1
