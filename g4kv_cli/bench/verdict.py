"""Which decode form to use where: the winner of each shape, how sure that is, and what it adds up to.

Two times differ if their medians do by more than both uncertainties together (root of the sum of squares), each at
least MIN_NOISE: rounds of one run agree more closely than runs do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from g4kv_cli.entries.table import decode_forms
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY, BenchRecord, Measurement, Shape
from g4kv_cli.records.findings import CellVerdict, GeometryVerdict, SplitRule

MIN_NOISE = 0.005
"""A run's rounds seldom disagree by less than this against the next run's: medians of 126 repeated timings on an H200
differed by 0.2 % in the median and 3.3 % in the 90th percentile."""
RULE_TARGETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
RULE_KEYS = (512, 256, 128, 64, 32, 16)


def uncertainty(*measurements: Measurement) -> float:
    """The relative uncertainty of a ratio of these measurements' times."""
    return math.hypot(*(max(item.graph.noise, MIN_NOISE) for item in measurements if item.graph is not None))


def own_times(record: BenchRecord, shape: Shape) -> list[Measurement]:
    """Our measured configurations at a shape; neither peers nor a baseline, nor a copy."""
    return [
        item
        for item in record.at(shape)
        if item.status == "measured"
        and item.form not in ("peer", COPY)
        and not item.configuration.endswith(BASELINE_SUFFIX)
    ]


def best_peer(record: BenchRecord, shape: Shape) -> Measurement | None:
    """The fastest peer at a shape; None if none was measured."""
    peers = [item for item in record.at(shape) if item.status == "measured" and item.form == "peer"]
    return min(peers, key=_seconds, default=None)


def tied_with(best: Measurement, others: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Those of ``others`` whose time cannot be told from ``best``'s."""
    return tuple(
        item for item in others if item is not best and _seconds(item) / _seconds(best) - 1 <= uncertainty(best, item)
    )


def decide_cell(record: BenchRecord, shape: Shape) -> CellVerdict | None:
    """The verdict at one decode shape; None if nothing of ours was measured there."""
    times = own_times(record, shape)
    if not times:
        return None
    fastest = min(times, key=_seconds)
    candidates = (fastest, *tied_with(fastest, times))
    chosen = min(candidates, key=lambda item: (_rank(item), _seconds(item)))
    tied = tuple(item for item in candidates if item is not chosen)
    other_kind = [item for item in times if _is_split(item) != _is_split(chosen)]
    rival = min(other_kind, key=_seconds, default=None)
    peer = best_peer(record, shape)
    return CellVerdict(
        shape=shape,
        configuration=chosen.configuration,
        form=chosen.form,
        is_split=_is_split(chosen),
        num_splits=chosen.num_splits,
        seconds=_seconds(chosen),
        noise=chosen.graph.noise if chosen.graph is not None else 0.0,
        tied=tuple(item.configuration for item in tied),
        margin=None if rival is None else _seconds(rival) / _seconds(chosen) - 1,
        margin_noise=0.0 if rival is None else uncertainty(chosen, rival),
        decided=not any(item in other_kind for item in tied),
        best_peer="" if peer is None else peer.configuration,
        peer_seconds=None if peer is None else _seconds(peer),
    )


def decide(record: BenchRecord) -> tuple[GeometryVerdict, ...]:
    """The verdicts of every geometry and format whose decode forms were measured, in the order of the record."""
    verdicts = []
    for pool in dict.fromkeys(shape.pool for shape in record.shapes if shape.kind == "decode"):
        shapes = [shape for shape in record.shapes if shape.kind == "decode" and shape.pool == pool]
        cells = [cell for cell in (decide_cell(record, shape) for shape in shapes) if cell is not None]
        if cells:
            rule = split_rule(record, cells)
            first = shapes[0]
            names = (first.geometry, first.kv_format, pool, first.family, first.num_kv_heads)
            verdicts.append(GeometryVerdict(*names, tuple(cells), sentences(cells), rule))
    return tuple(verdicts)


def sentences(cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """One sentence for all kv_len that have the same pattern over the batch."""
    patterns: dict[str, list[int]] = {}
    for kv_len in dict.fromkeys(cell.shape.kv_len for cell in cells):
        row = sorted((cell for cell in cells if cell.shape.kv_len == kv_len), key=lambda cell: cell.shape.batch)
        patterns.setdefault(_pattern(row), []).append(kv_len)
    return tuple(f"kv_len {', '.join(map(str, lengths))}: {pattern}" for pattern, lengths in patterns.items())


def _kind(cell: CellVerdict) -> str:
    if not cell.decided:
        return "undecided"
    return f"{'split' if cell.is_split else 'unsplit'} ({cell.form})"


def _pattern(row: Sequence[CellVerdict]) -> str:
    """``split (c) at batch 1 to 16, unsplit (b) from batch 64 on``, for cells of rising batch."""
    runs: list[list[CellVerdict]] = []
    for cell in row:
        if runs and _kind(runs[-1][0]) == _kind(cell):
            runs[-1].append(cell)
        else:
            runs.append([cell])
    if len(runs) == 1:
        return f"{_kind(row[0])} at every batch measured"
    parts = []
    for index, run in enumerate(runs):
        low, high = run[0].shape.batch, run[-1].shape.batch
        if index == len(runs) - 1:
            where = f"from batch {low} on" if low != high else f"at batch {low}"
        else:
            where = f"at batch {low}" if low == high else f"at batch {low} to {high}"
        parts.append(f"{_kind(run[0])} {where}")
    return ", ".join(parts)


def split_rule(record: BenchRecord, cells: Sequence[CellVerdict]) -> SplitRule | None:
    """The targets whose choices lose least on average against the fastest configuration of each cell.

    Among equals the fewest blocks and the longest splits: less workspace, less to merge.
    """
    times = {cell.shape.id: own_times(record, cell.shape) for cell in cells}
    best: SplitRule | None = None
    for target in RULE_TARGETS:
        for least_keys in RULE_KEYS:
            losses = []
            for cell in cells:
                here = times[cell.shape.id]
                chosen = _by_rule(here, cell.shape, target, least_keys)
                if chosen is not None:
                    losses.append((_seconds(chosen) / min(map(_seconds, here)) - 1, cell.shape.id))
            if not losses:
                continue
            mean, worst = sum(loss for loss, _ in losses) / len(losses), max(losses)
            if best is None or mean < best.mean_loss - 1e-9:
                best = SplitRule(target, least_keys, mean, worst[0], worst[1])
    return best


def splits_by_rule(shape: Shape, target_blocks: int, least_keys: int) -> int:
    """The largest power of two with requests x KV heads x splits <= target and keys enough for each split; 1: none."""
    most = min(target_blocks // (shape.batch * shape.num_kv_heads), shape.visible_keys // least_keys)
    return 1 if most < 2 else 1 << (most.bit_length() - 1)


def _by_rule(times: Sequence[Measurement], shape: Shape, target: int, least_keys: int) -> Measurement | None:
    """What the rule chooses among what was measured: the nearest split count not above it, else unsplit."""
    wanted = splits_by_rule(shape, target, least_keys)
    split = [item for item in times if _is_split(item) and item.num_splits <= wanted]
    if wanted > 1 and split:
        return max(split, key=lambda item: item.num_splits)
    return min((item for item in times if not _is_split(item)), key=_rank, default=None)


def _rank(item: Measurement) -> int:
    """The table's preference among decode forms; one that it does not know comes last."""
    return min((form.preference for form in decode_forms() if form.label == item.form), default=len(decode_forms()))


def _is_split(item: Measurement) -> bool:
    """Whether the keys of a request were split over blocks."""
    return any(form.takes_splits for form in decode_forms() if form.label == item.form)


def _seconds(item: Measurement) -> float:
    return item.graph.median if item.graph is not None else math.inf
