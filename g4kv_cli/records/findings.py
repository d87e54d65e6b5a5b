"""What follows from a bench record, ready to be shown: rows against the roofline, verdicts, comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from g4kv_cli.records.bench import BenchRecord, Measurement, Shape

Change = Literal["faster", "slower", "same", "undecided", "broken", "mended", "only in A", "only in B", "no time"]
REGRESSIONS: tuple[Change, ...] = ("slower", "broken")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement against the roofline. Rates and shares are 0 where it has no time.

    ``rate`` in bytes or FLOPs a second, as ``rate_kind`` says; ``ceiling_share`` of what bounds the shape; ``standing``
    is best, tie, or empty, among our own configurations; for a peer, best peer. ``burst_rate`` and ``burst_share``: the
    bursts', against the ceilings in bursts. ``copy_share``: the time of a copy of as many bytes over this one, 0 where
    none was timed.
    """

    measurement: Measurement
    shape: Shape
    floor_seconds: float
    floor_bound: str
    rate: float
    rate_kind: Literal["bytes", "flops"]
    ceiling_share: float
    over_floor: float
    standing: str
    burst_rate: float = 0.0
    burst_share: float = 0.0
    copy_share: float = 0.0


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """Which configuration to use at one decode shape.

    ``tied`` are ours whose difference is within the noise. ``margin``: how much slower the best of the other kind
    (unsplit, or split) is, relative; ``margin_noise`` its uncertainty. None where there is no other kind.
    ``decided`` is False if ``tied`` has one of the other kind.
    """

    shape: Shape
    configuration: str
    form: str
    is_split: bool
    num_splits: int
    seconds: float
    noise: float
    tied: tuple[str, ...]
    margin: float | None
    margin_noise: float
    decided: bool
    best_peer: str = ""
    peer_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Split so that requests x KV heads x splits comes near ``target_blocks``; the loss against each cell's best."""

    target_blocks: int
    min_keys_per_split: int
    mean_loss: float
    worst_loss: float
    worst_shape: str


@dataclass(frozen=True, slots=True)
class GeometryVerdict:
    """The decode verdict of a geometry and format of its pool (Shape.pool): per cell, in sentences, and as a rule."""

    geometry: str
    kv_format: str
    pool: str
    family: str
    num_kv_heads: int
    cells: tuple[CellVerdict, ...]
    sentences: tuple[str, ...]
    rule: SplitRule | None


@dataclass(frozen=True, slots=True)
class Analysis:
    """A record with all that follows from it. ``missing`` says what the run did not get to, and why."""

    record: BenchRecord
    rows: tuple[Row, ...]
    verdicts: tuple[GeometryVerdict, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One configuration in two records. ``ratio`` is B over A minus 1; ``noise`` its uncertainty."""

    id: str
    change: Change
    reason: str
    a_seconds: float | None = None
    b_seconds: float | None = None
    ratio: float | None = None
    noise: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two records cell by cell. ``notes`` say what else differs (card, kernels, settings)."""

    a_name: str
    b_name: str
    threshold: float
    cells: tuple[ComparedCell, ...]
    notes: tuple[str, ...]

    @property
    def has_regression(self) -> bool:
        """True if a cell became slower, or does not run right any more."""
        return any(cell.change in REGRESSIONS for cell in self.cells)
