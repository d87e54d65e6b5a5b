"""A record against its own ceilings, with its verdicts: what the reports show."""

from __future__ import annotations

from g4kv_cli.bench.roofline import bytes_per_second, ceiling_share, floor_of, flops_per_second
from g4kv_cli.bench.verdict import best_peer, decide, own_times, tied_with
from g4kv_cli.records.bench import COPY, BenchRecord, Ceilings, Measurement, Shape
from g4kv_cli.records.findings import Analysis, Row

NO_CEILINGS = Ceilings(read_bytes_per_second=float("inf"), copy_bytes_per_second=float("inf"))


def analyse(record: BenchRecord) -> Analysis:
    """Rows in the order of the record, verdicts, and what is missing."""
    rows = []
    for shape in record.shapes:
        times = own_times(record, shape)
        fastest = min(times, key=lambda item: item.seconds or 0.0, default=None)
        tied = () if fastest is None else tied_with(fastest, times)
        peer = best_peer(record, shape)
        copy = next((item.seconds for item in record.at(shape) if item.form == COPY), None)
        for item in record.at(shape):
            standing = ""
            if shape.kind != "prep" and item is fastest:
                standing = "best"
            elif shape.kind != "prep" and item in tied:
                standing = "tie"
            elif item is peer:
                standing = "best peer"
            ceilings, in_bursts = record.ceilings or NO_CEILINGS, record.burst_ceilings or NO_CEILINGS
            rows.append(_row(item, shape, ceilings, in_bursts, standing, copy))
    return Analysis(record, tuple(rows), decide(record), _missing(record))


def _row(
    item: Measurement, shape: Shape, ceilings: Ceilings, in_bursts: Ceilings, standing: str, copy: float | None
) -> Row:
    floor = floor_of(shape, ceilings)
    seconds = item.seconds
    burst = None if item.burst is None else item.burst.median
    rate = flops_per_second if shape.kind == "prefill" else bytes_per_second
    return Row(
        measurement=item,
        shape=shape,
        floor_seconds=floor.seconds,
        floor_bound=floor.bound,
        rate=0.0 if seconds is None else rate(shape, seconds),
        rate_kind="flops" if shape.kind == "prefill" else "bytes",
        ceiling_share=0.0 if seconds is None else ceiling_share(shape, seconds, ceilings),
        over_floor=0.0 if seconds is None or not floor.seconds else seconds / floor.seconds,
        standing=standing,
        burst_rate=0.0 if burst is None else rate(shape, burst),
        copy_share=0.0 if seconds is None or copy is None or item.form == COPY else copy / seconds,
        burst_share=0.0 if burst is None else ceiling_share(shape, burst, in_bursts),
    )


def _missing(record: BenchRecord) -> tuple[str, ...]:
    """One line for each reason, with the cells it hit."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for item in record.measurements:
        if item.status != "measured":
            by_reason.setdefault((item.status, item.reason), []).append(item.id)
    lines = [
        f"{status}: {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {reason}"
        for (status, reason), ids in by_reason.items()
    ]
    without_cold = [item.id for item in record.measurements if item.status == "measured" and item.cold is None]
    if without_cold and record.settings.get("cold"):
        lines.append(f"no cold time: {without_cold[0]} and {len(without_cold) - 1} more: cuda-bench reported none")
    if record.ended != "finished":
        lines.append(f"the run ended early: {record.ended}")
    return tuple(lines)
