"""Two bench records cell by cell: faster, slower, same or undecided, with the reason.

The change of a cell is B over A minus 1; its uncertainty comes from both sides' noise, or, where the rounds of one run
alternated, from how the rounds' own changes scatter. With both as an interval:
slower if it lies above the threshold as a whole, faster if below, same if within, undecided if it straddles one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from g4kv_cli.bench.verdict import MIN_NOISE, uncertainty
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY, BenchRecord, Measurement, median_interval, quantile
from g4kv_cli.records.findings import Change, ComparedCell, Comparison


def compare_records(a: BenchRecord, b: BenchRecord, a_name: str, b_name: str, threshold: float) -> Comparison:
    """Pair the cells of two records by their ids, in A's order, then what only B has. A copy is the card's, no kernel
    that is compared."""
    in_a, in_b = ({item.id: item for item in record.measurements if item.form != COPY} for record in (a, b))
    cells = [_compared(in_a.get(name), in_b.get(name), threshold) for name in dict.fromkeys([*in_a, *in_b])]
    return Comparison(a_name, b_name, threshold, tuple(cells), _notes(a, b))


def compare_with_baseline(record: BenchRecord, name: str, threshold: float) -> Comparison:
    """The two halves of one run that alternated between a baseline's kernels (A) and others (B).

    Rounds alternate too, so each round gives a ratio of its own: drift of the card cancels.
    """
    in_a = {
        item.id.removesuffix(BASELINE_SUFFIX): item
        for item in record.measurements
        if item.configuration.endswith(BASELINE_SUFFIX)
    }
    cells = []
    for item in record.measurements:
        if item.id in in_a:
            cells.append(_paired(in_a[item.id], item, threshold))
    return Comparison(f"{name} (baseline)", "this run's kernels", threshold, tuple(cells), ())


def _compared(a: Measurement | None, b: Measurement | None, threshold: float) -> ComparedCell:
    if a is None or b is None:
        present = a or b
        name = present.id if present is not None else ""
        side: Change = "only in A" if b is None else "only in B"
        return ComparedCell(name, side, f"{'B' if b is None else 'A'} has no such cell", *_seconds(a, b))
    if a.graph is None or b.graph is None:
        return _without_time(a, b)
    ratio, noise = b.graph.median / a.graph.median - 1, uncertainty(a, b)
    cell = ComparedCell(a.id, "same", "", *_seconds(a, b), ratio, noise)
    return _judge(cell, ratio - noise, ratio + noise, threshold)


def _paired(a: Measurement, b: Measurement, threshold: float) -> ComparedCell:
    if a.graph is None or b.graph is None:
        return replace(_without_time(a, b), id=b.id)
    ratios = sorted(new / old - 1 for old, new in zip(a.graph.round_medians, b.graph.round_medians, strict=False))
    if len(ratios) < 2:
        return replace(_compared(a, b, threshold), id=b.id)
    ratio = quantile(ratios, 0.5)
    low, high = median_interval(ratios)
    low, high = min(low, ratio - MIN_NOISE), max(high, ratio + MIN_NOISE)
    cell = ComparedCell(b.id, "same", "", *_seconds(a, b), ratio, (high - low) / 2)
    return _judge(cell, low, high, threshold)


_UNTRIED = ("skipped", "not covered", "missing")


def _without_time(a: Measurement, b: Measurement) -> ComparedCell:
    if a.graph is not None:
        # A cell that the run did not get to says nothing about the kernel.
        change: Change = "only in A" if b.status in _UNTRIED else "broken"
        return ComparedCell(a.id, change, f"B: {b.status}: {b.reason}", *_seconds(a, b))
    if b.graph is not None:
        change = "only in B" if a.status in _UNTRIED else "mended"
        return ComparedCell(a.id, change, f"A: {a.status}: {a.reason}", *_seconds(a, b))
    return ComparedCell(a.id, "no time", f"A: {a.status}, B: {b.status}")


def _judge(cell: ComparedCell, low: float, high: float, threshold: float) -> ComparedCell:
    """``low`` to ``high``: where the change lies."""
    interval = f"{100 * low:+.1f} % to {100 * high:+.1f} %"
    limit = f"{100 * threshold:g} %"
    if low > threshold:
        return replace(cell, change="slower", reason=f"{interval}, all above {limit}")
    if high < -threshold:
        return replace(cell, change="faster", reason=f"{interval}, all below -{limit}")
    if -threshold <= low and high <= threshold:
        return replace(cell, change="same", reason=f"{interval}, within {limit}")
    return replace(
        cell, change="undecided", reason=f"{interval} straddles {limit}: the noise is {50 * (high - low):.1f} %"
    )


def _seconds(a: Measurement | None, b: Measurement | None) -> tuple[float | None, float | None]:
    return (None if a is None else a.seconds, None if b is None else b.seconds)


def _notes(a: BenchRecord, b: BenchRecord) -> tuple[str, ...]:
    notes: list[str] = []
    pairs: Sequence[tuple[str, object, object]] = (
        ("GPU", f"{a.run.device.name} {a.run.device.arch}", f"{b.run.device.name} {b.run.device.arch}"),
        ("driver", a.run.device.driver, b.run.device.driver),
        ("NVRTC", a.run.nvrtc, b.run.nvrtc),
        ("kernel sources", a.run.kernels_digest[:12], b.run.kernels_digest[:12]),
        ("seed", a.run.seed, b.run.seed),
    )
    for what, left, right in pairs:
        if left != right:
            notes.append(f"{what}: A {left}, B {right}")
    for side, record in (("A", a), ("B", b)):
        if record.ended != "finished":
            notes.append(f"{side} did not finish: {record.ended}")
    return tuple(notes)
