"""Numbers as people read them. The only place with unit words; records and JSON hold base units."""

from __future__ import annotations

from collections.abc import Mapping

from g4kv_cli.records.run import Summary


def seconds_text(seconds: float) -> str:
    """``0.35 s``, ``12.3 s``, ``2 min 5 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def count_text(count: int, noun: str) -> str:
    """``1 case``, ``3 cases``, ``12,345 elements``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def summary_text(summary: Summary, *, every: bool = False) -> str:
    """``84 passed, 2 failed``; with ``every`` the zero counts too."""
    counts = {
        "passed": summary.passed,
        "failed": summary.failed,
        "error": summary.error,
        "skipped": summary.skipped,
        "not covered": summary.not_covered,
    }
    shown = {name: count for name, count in counts.items() if count or (every and name != "not covered")}
    return ", ".join(f"{count} {name}" for name, count in shown.items()) or "none"


def coordinate_text(coordinate: Mapping[str, int]) -> str:
    """``layer 1, page 7, slot 3, head 0, dim 128``."""
    return ", ".join(f"{name} {value}" for name, value in coordinate.items())


def digest_text(digest: str) -> str:
    """The first 12 hex digits: enough to tell two runs apart by eye."""
    return digest[:12]
