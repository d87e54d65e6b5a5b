"""What a row of K holds in the pool, as data: ``split``, all of its columns, or ``folded``, the rotated ones alone.

Where V is made of raw K, the normed K is ``norm(x) * weight`` and V is ``norm(x)``. RoPE turns only the pairs
(d, d + head_dim / 2) of a few d; in all other columns K is V times the weight. So a folded row keeps V whole and K's
rotated columns, in ascending order, and the weight of the others goes into the query:

    q' = q in the columns that turn, q * weight in the others
    score = sum over the columns that turn of q' K + sum over the others of q' V
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES, Geometry

KvFormat = Literal["split", "folded"]
SPLIT: KvFormat = "split"
FOLDED: KvFormat = "folded"
KV_FORMATS: tuple[KvFormat, ...] = (SPLIT, FOLDED)
_FOLDED_K_DIMS = {512: 128}
"""By head_dim, columns of a folded row of K that kernels are compiled for: what Gemma 4's K = V layers turn."""


def format_of(head_dim: int, k_dim: int) -> KvFormat:
    """The format of rows of V and K of so many columns."""
    return SPLIT if k_dim == head_dim else FOLDED


def folded_k_dim(head_dim: int) -> int:
    """Columns of a folded row of K that kernels are compiled for; head_dim where none are."""
    return _FOLDED_K_DIMS.get(head_dim, head_dim)


def can_fold(geometry: Geometry) -> bool:
    """Whether there is a folded format of the geometry's pool that kernels are compiled for."""
    folded = folded_k_dim(geometry.head_dim)
    return geometry.k_eq_v and 2 * geometry.num_rotated_pairs == folded < geometry.head_dim


def formats_of(geometry: Geometry) -> tuple[KvFormat, ...]:
    """The formats that pools of the geometry may have."""
    return KV_FORMATS if can_fold(geometry) else (SPLIT,)


def format_for(geometry: Geometry, kv_format: KvFormat) -> KvFormat:
    """The format that a pool of the geometry has where this one is asked for: split where it does not fold."""
    return kv_format if can_fold(geometry) else SPLIT


def require_format(geometries: Iterable[Geometry], kv_format: KvFormat) -> None:
    """Raises UsageError if none of the geometries has this format, with the reason for the first."""
    asked = tuple(geometries)
    if not any(format_for(geometry, kv_format) == kv_format for geometry in asked):
        k_dim_of(asked[0], kv_format)


def k_dim_of(geometry: Geometry, kv_format: KvFormat) -> int:
    """Columns of a row of K. Raises UsageError where the geometry's K does not fold, with the reason."""
    if kv_format == SPLIT:
        return geometry.head_dim
    if can_fold(geometry):
        return folded_k_dim(geometry.head_dim)
    if not geometry.k_eq_v:
        why = "its V is not made of raw K"
    else:
        compiled = " and ".join(f"{k_dim} of {head_dim}" for head_dim, k_dim in _FOLDED_K_DIMS.items())
        why = f"{2 * geometry.num_rotated_pairs} of its {geometry.head_dim} columns turn, and compiled are {compiled}"
    known = ", ".join(name for name, one in GEOMETRIES.items() if can_fold(one))
    raise UsageError(f"{geometry.name} has no folded format of K and V: {why}; it is for {known}")


def k_columns(head_dim: int, k_dim: int) -> tuple[int, ...]:
    """The columns of a head that a row of K holds, in its order: both halves of the pairs that turn; or all."""
    pairs, half = k_dim // 2, head_dim // 2
    return (*range(pairs), *range(half, half + pairs))
