"""A case as data: inputs, the entry that runs, where its tokens go, and what decides. Picklable, so that a worker
process can run it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from g4kv_cli.errors import UsageError
from g4kv_cli.inputs import InputKind
from g4kv_cli.model.geometry import Geometry

Form = Literal["contiguous", "prefill", "decode"]

SPARSE_POOL_BYTES = 192 << 20
"""Pools above this are never copied to the host as a whole on a device that records what was written."""
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a paged call writes. ``rows`` holds page ids: one row for prefill, one a token for decode; row index i is
    the request's page ``origins[..] + i``. The ids ``unread`` (out of range) follow each row and must never be used.
    ``padding_page``, if any, is shared by padding rows: what stands in their slots afterwards is unspecified."""

    page_size: int
    num_pages: int
    num_layers: int
    layer: int
    rows: tuple[tuple[int, ...], ...]
    origins: tuple[int, ...]
    unread: tuple[int, ...] = ()
    padding_page: int | None = None

    def page_and_slot(self, positions: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """(page id, slot) of each token."""
        pages, slots = [], []
        for token, position in enumerate(positions):
            row = 0 if len(self.rows) == 1 else token
            index = position // self.page_size - self.origins[row]
            if not 0 <= index < len(self.rows[row]):
                raise ValueError(f"position {position} lies outside the pages of row {row}")
            pages.append(self.rows[row][index])
            slots.append(position % self.page_size)
        return pages, slots

    def pool_shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int, int, int]:
        """[page][layer][K, V][slot][head][dim]."""
        return (self.num_pages, self.num_layers, 2, self.page_size, num_kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class RawMetadata:
    """Page metadata as a device might hold it, of one token, wrong on purpose. The host cannot see it.

    Prefill uses ``page_indices`` alone.
    """

    page_indices: tuple[int, ...]
    position: int = 0
    page_indptr: tuple[int, int] = (0, 0)
    page_origin: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One case. ``placement`` is None in the contiguous form; ``against_contiguous`` also asks for the Q and K bits of
    the contiguous entry; ``golden`` names a file of recorded vectors that replaces ``kind`` and ``seed``. With
    ``trap`` the kernel gets that metadata and must trap before it writes to the pool.
    """

    id: str
    entry: str
    geometry: Geometry
    form: Form
    kind: InputKind
    seed: int
    positions: tuple[int, ...]
    rotary_dim: int
    table_positions: int
    placement: Placement | None = None
    against_contiguous: bool = False
    golden: Path | None = None
    trap: RawMetadata | None = None

    @property
    def has_v_input(self) -> bool:
        """False where V is made from raw K (and in the contiguous form, which makes no V)."""
        return self.form != "contiguous" and not self.geometry.k_eq_v

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, 0 without one."""
        if self.placement is None:
            return 0
        return math.prod(self.placement.pool_shape(self.geometry.num_kv_heads, self.geometry.head_dim)) * BF16_BYTES

    @property
    def is_sparse(self) -> bool:
        """True if the pool is too large to be filled, read and compared as one host array."""
        return self.pool_bytes > SPARSE_POOL_BYTES


def entry_name(geometry: Geometry, form: Form) -> str:
    """The entry that serves a geometry in a form. UsageError where there is none (contiguous at head_dim 512)."""
    if geometry.head_dim == 256:
        return (
            "qk_norm_rope_prefill_hd256_plain_into"
            if form == "contiguous"
            else (f"qkv_norm_rope_paged_{form}_hd256_plain_into")
        )
    if geometry.head_dim != 512 or form == "contiguous":
        raise UsageError(f"no prep entry for head_dim {geometry.head_dim} in the {form} form")
    if geometry.k_eq_v:
        return f"qk_norm_rope_paged_{form}_hd512_k_eq_v_plain_into"
    return f"qkv_norm_rope_paged_{form}_hd512_plain_into"
