"""A geometry with some numbers of one's own: what a bug report names beside its request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry, contradictions


def with_window(geometry: Geometry, window: int, fault: Callable[[str, str], UsageError]) -> Geometry:
    """The same layers with another window. A name of its own, where it is another one."""
    if window == geometry.window:
        return geometry
    changed = dataclasses.replace(geometry, name=f"{geometry.name}-w{window}", window=window)
    return checked(changed, fault)


def changed_geometry(
    base: Geometry,
    fault: Callable[[str, str], UsageError],
    *,
    heads: tuple[int, int] | None = None,
    head_dim: int | None = None,
    window: int | Literal["own"] | None = "own",
    k_eq_v: bool | None = None,
) -> Geometry:
    """``base`` with other heads (query, KV), head_dim, window (None: none) or source of V; the name says them.

    Where nothing differs it is ``base``. Raises the error that ``fault`` makes of (field, what is wrong).
    """
    queries, kv_heads = heads or (base.num_qo_heads, base.num_kv_heads)
    size = base.head_dim if head_dim is None else head_dim
    keys = base.window if window == "own" else window
    own_values = base.k_eq_v and size == base.head_dim if k_eq_v is None else k_eq_v
    rotation: dict[str, Any] = {} if size == base.head_dim else {"rotary_dim": size, "num_rotated_pairs": size // 2}
    changed = dataclasses.replace(
        base,
        num_qo_heads=queries,
        num_kv_heads=kv_heads,
        head_dim=size,
        window=keys,
        family="global" if keys is None else "local",
        k_eq_v=own_values,
        **rotation,
    )
    if changed == base:
        return base
    name = f"hd{size}-q{queries}-kv{kv_heads}{'' if keys is None else f'-w{keys}'}{'-k-eq-v' if own_values else ''}"
    return checked(dataclasses.replace(changed, name=name, model=name), fault)


def checked(geometry: Geometry, fault: Callable[[str, str], UsageError]) -> Geometry:
    """The geometry, if it contradicts nothing."""
    for field, words in contradictions(geometry):
        raise fault(field, words)
    return geometry
