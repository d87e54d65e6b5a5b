"""The floor of a shape: the time that no kernel can beat at the rates this card reached in this run."""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.records.bench import Ceilings, Shape

H200_CEILINGS = Ceilings(
    read_bytes_per_second=4.70e12,
    copy_bytes_per_second=4.28e12,
    gemm_flops_per_second=805e12,
    launch_seconds=0.7e-6,
    note="one H200: 4 GiB read and copied, torch bf16 GEMM 8192^3 in a short burst, empty kernels in a graph",
)
"""What ``--dry-run`` reckons with, where there is no card to measure."""

IMPOSSIBLE_SHARE = 0.95
"""A time below this share of the floor is an error of the measurement (data left in L2, work not done)."""


@dataclass(frozen=True, slots=True)
class Floor:
    """``seconds``, and which of the terms it is: read, copy, compute or launch."""

    seconds: float
    bound: str


def floor_of(shape: Shape, ceilings: Ceilings) -> Floor:
    """The largest of the times for bytes, for FLOPs and for one launch.

    Attention reads far more than it writes and is held against the read rate; prep writes as much as it reads and
    is held against the copy rate (bytes read plus bytes written a second). Where no GEMM rate was measured there is
    no compute term.
    """
    moved = shape.read_bytes + shape.write_bytes
    if shape.kind == "prep":
        terms = [Floor(moved / ceilings.copy_bytes_per_second, "copy")]
    else:
        terms = [Floor(moved / ceilings.read_bytes_per_second, "read")]
        if ceilings.gemm_flops_per_second:
            terms.append(Floor(shape.flops / ceilings.gemm_flops_per_second, "compute"))
    terms.append(Floor(ceilings.launch_seconds, "launch"))
    return max(terms, key=lambda term: term.seconds)


def is_impossible(seconds: float, shape: Shape, ceilings: Ceilings, cache_bytes: int) -> bool:
    """Faster than the floor. ``cache_bytes`` of the shape's data may come from L2, however the pools rotate."""
    from_memory = max(0, shape.read_bytes + shape.write_bytes - cache_bytes)
    rate = ceilings.copy_bytes_per_second if shape.kind == "prep" else ceilings.read_bytes_per_second
    terms = [from_memory / rate]
    if ceilings.gemm_flops_per_second and shape.kind != "prep":
        terms.append(shape.flops / ceilings.gemm_flops_per_second)
    return seconds < IMPOSSIBLE_SHARE * max(terms)


def bytes_per_second(shape: Shape, seconds: float) -> float:
    """Bytes read and written a second."""
    return (shape.read_bytes + shape.write_bytes) / seconds


def flops_per_second(shape: Shape, seconds: float) -> float:
    """FLOPs a second."""
    return shape.flops / seconds


def ceiling_share(shape: Shape, seconds: float, ceilings: Ceilings) -> float:
    """Achieved over the ceiling that bounds the shape (the launch apart): 1.0 is as fast as the card goes."""
    without_launch = Ceilings(
        ceilings.read_bytes_per_second, ceilings.copy_bytes_per_second, ceilings.gemm_flops_per_second
    )
    return floor_of(shape, without_launch).seconds / seconds
