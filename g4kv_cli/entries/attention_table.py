"""Every attention kernel on one screen: its entry's form and head_dim, and what a launch needs.

A form may have several variants, the best first: a card takes the first whose shared memory it has. The bytes are
those of the kernels' own layout, which asserts the same numbers (kernels/prefill.cu, decode.cu).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from g4kv_cli.errors import DeviceUnavailable

AttentionForm = Literal["prefill", "decode", "decode_split"]

DECODE_TILE_ROWS = 16
"""Packed query rows of the key-parallel kernels; also the largest GQA group."""
MERGE_COLUMNS = 64
MERGE_THREADS = 128


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One compiled variant. ``tile_rows`` are packed query rows (token, head of the group) of a block."""

    symbol: str
    source: str
    form: AttentionForm
    head_dim: int
    tile_rows: int
    threads: int
    shared_bytes: int


_P, _D = "prefill.cu", "decode.cu"
# fmt: off
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = (
    AttentionKernel("batch_prefill_paged_hd256_tile64",        _P, "prefill",      256, 64, 128,  81920),
    AttentionKernel("batch_prefill_paged_hd512_tile64",        _P, "prefill",      512, 64, 256, 205824),
    AttentionKernel("batch_prefill_paged_hd512_tile64_keys32", _P, "prefill",      512, 64, 256, 135680),
    AttentionKernel("batch_prefill_paged_hd512_tile32",        _P, "prefill",      512, 32, 128, 100608),
    AttentionKernel("paged_decode_hd256_groups4",              _D, "decode",       256, 16, 128,  74240),
    AttentionKernel("paged_decode_hd512_groups4",              _D, "decode",       512, 16, 256, 147968),
    AttentionKernel("paged_decode_hd512_groups2",              _D, "decode",       512, 16, 128,  82176),
    AttentionKernel("paged_decode_split_hd256_groups4",        _D, "decode_split", 256, 16, 128,  74240),
    AttentionKernel("paged_decode_split_hd512_groups3",        _D, "decode_split", 512, 16, 192, 213376),
    AttentionKernel("paged_decode_split_hd512_groups2",        _D, "decode_split", 512, 16, 128,  82176),
)
# fmt: on


def merge_symbol(head_dim: int) -> str:
    """The kernel of decode.cu that merges the splits."""
    return f"merge_splits_hd{head_dim}"


def prefill_tiles(head_dim: int, max_shared_bytes: int) -> tuple[int, ...]:
    """The cta_tile_q that a card with this much shared memory a block can run, smallest first.

    The smallest is the key-parallel kernel's: the prefill entry at one token a request is decode form (a).
    """
    return tuple(
        sorted(
            {
                kernel.tile_rows
                for kernel in ATTENTION_KERNELS
                if kernel.head_dim == head_dim
                and kernel.form in ("prefill", "decode")
                and kernel.shared_bytes <= max_shared_bytes
            }
        )
    )


def choose_kernel(form: AttentionForm, head_dim: int, tile_rows: int, max_shared_bytes: int) -> AttentionKernel:
    """The best variant that fits. Raises DeviceUnavailable, which says what is lacking, before any launch."""
    variants = [
        kernel
        for kernel in ATTENTION_KERNELS
        if (kernel.form, kernel.head_dim, kernel.tile_rows) == (form, head_dim, tile_rows)
    ]
    for kernel in variants:
        if kernel.shared_bytes <= max_shared_bytes:
            return kernel
    needed = min((kernel.shared_bytes for kernel in variants), default=0)
    tiles = ", ".join(map(str, prefill_tiles(head_dim, max_shared_bytes))) or "none"
    raise DeviceUnavailable(
        f"attention {form} at head_dim {head_dim} with tiles of {tile_rows} rows needs {needed} bytes of shared "
        f"memory a block, this device has {max_shared_bytes}: choose a cta_tile_q it can run ({tiles})"
    )
