"""The prep entries: norm and rotate Q, and write normed, rotated K and weightless-normed V where attention reads them.

All take token-major bf16 tensors: q [tokens, num_qo_heads, head_dim], k and v [tokens, num_kv_heads, head_dim],
norm weights [head_dim] (plain w, not 1 + w), RoPE tables as RopeTables says, and write q_out like q. Q and K become
rope(x * rsqrt(mean(x^2) + eps) * w), V becomes v * rsqrt(mean(v^2) + eps) with no weight and no rotation
(Hugging Face transformers, models/gemma4: q_norm, k_norm, v_norm). ``rotary_dim`` columns rotate in pairs
(d, d + rotary_dim / 2), the rest passes through; head_dim is Gemma 4's production form.

Everything is checked on the host before the one launch (ContractError with a stable code; nothing was launched and
nothing written). No tokens is a valid request that launches nothing. The kernels trap behind the host's checks on
metadata that only the device knows (DeviceFault, now or at the next synchronisation).
"""

from __future__ import annotations

from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import BF16, PagedBatch, PagedPool, PageRow, RopeTables, require_array
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.prep_request import (
    check_rows,
    check_start,
    launch_checked,
    launch_paged_batch_prefill,
    launch_paged_decode,
    launch_paged_prefill,
)
from g4kv_cli.entries.table import PREP_ENTRIES

RMS_NORM_EPS = 1e-6
"""rms_norm_eps of every Gemma 4 size."""


def qk_norm_rope_prefill_hd256_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    q_out: DeviceArray,
    k_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """Q and K to contiguous token-major outputs (k_out like k); token t has position start_pos + t."""
    entry = PREP_ENTRIES["qk_norm_rope_prefill_hd256_plain_into"]
    request = check_rows(library, entry, q, k, None, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    shape = (request.tokens, request.num_kv_heads, entry.head_dim)
    request.outputs["k_out"] = require_array(library.device, "k_out", k_out, BF16, shape)
    request.parameters.k_out = k_out.address
    check_start(request, start_pos)
    launch_checked(request, ())


def qkv_norm_rope_paged_prefill_hd256_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    pool: PagedPool,
    layer: int,
    page_row: PageRow,
    page_origin: int = 0,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """One request's chunk: Q to q_out, K and V into the layer's blocks of its pages.

    Token t has position p = start_pos + t, page page_row[p // page_size - page_origin] and slot p % page_size.
    """
    entry = PREP_ENTRIES["qkv_norm_rope_paged_prefill_hd256_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_prefill(request, start_pos, pool, layer, page_row, page_origin)


def qkv_norm_rope_paged_decode_hd256_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    batch: PagedBatch,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """Batched decode: each token is its own request with its position, CSR row of pages and page origin."""
    entry = PREP_ENTRIES["qkv_norm_rope_paged_decode_hd256_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_decode(request, batch, pool, layer)


def qkv_norm_rope_paged_prefill_hd512_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    pool: PagedPool,
    layer: int,
    page_row: PageRow,
    page_origin: int = 0,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """The prefill form at head_dim 512 with a V projection of its own (E2B, E4B)."""
    entry = PREP_ENTRIES["qkv_norm_rope_paged_prefill_hd512_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_prefill(request, start_pos, pool, layer, page_row, page_origin)


def qkv_norm_rope_paged_decode_hd512_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    batch: PagedBatch,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """The batched decode form at head_dim 512 with a V projection of its own (E2B, E4B)."""
    entry = PREP_ENTRIES["qkv_norm_rope_paged_decode_hd512_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_decode(request, batch, pool, layer)


def qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    pool: PagedPool,
    layer: int,
    page_row: PageRow,
    page_origin: int = 0,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """The prefill form of K=V layers (12B, 26B-A4B, 31B): V is the same raw K, normed without weight or rotation."""
    entry = PREP_ENTRIES["qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into"]
    request = check_rows(library, entry, q, k, None, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_prefill(request, start_pos, pool, layer, page_row, page_origin)


def qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    batch: PagedBatch,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """The batched decode form of K=V layers (12B, 26B-A4B, 31B)."""
    entry = PREP_ENTRIES["qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into"]
    request = check_rows(library, entry, q, k, None, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_decode(request, batch, pool, layer)


def qkv_norm_rope_paged_batch_prefill_hd256_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
    cta_tile_q: int | None = None,
) -> None:
    """Chunks of several requests, ragged, in one launch: token i of the plan is row i of q, k, v and q_out.

    Rows past the plan's tokens are padding: neither read nor written. ``cta_tile_q`` is the override that the plan was
    made with, None where its tile was derived.
    """
    entry = PREP_ENTRIES["qkv_norm_rope_paged_batch_prefill_hd256_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_batch_prefill(request, plan, pool, layer, cta_tile_q)


def qkv_norm_rope_paged_batch_prefill_hd512_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
    cta_tile_q: int | None = None,
) -> None:
    """The ragged batch at head_dim 512 with a V projection of its own (E2B, E4B)."""
    entry = PREP_ENTRIES["qkv_norm_rope_paged_batch_prefill_hd512_plain_into"]
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_batch_prefill(request, plan, pool, layer, cta_tile_q)


def qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
    cta_tile_q: int | None = None,
) -> None:
    """The ragged batch of K=V layers (12B, 26B-A4B, 31B)."""
    entry = PREP_ENTRIES["qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into"]
    request = check_rows(library, entry, q, k, None, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_batch_prefill(request, plan, pool, layer, cta_tile_q)
