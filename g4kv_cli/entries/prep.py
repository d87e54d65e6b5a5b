"""The prep entries: norm and rotate Q, and write normed, rotated K and weightless-normed V where attention reads them.

All take token-major bf16 tensors: q [tokens, num_qo_heads, head_dim], k and v [tokens, num_kv_heads, head_dim],
norm weights [head_dim] (plain w, not 1 + w), RoPE tables as RopeTables says, and write q_out like q. Q and K become
rope(x * rsqrt(mean(x^2) + eps) * w), V becomes v * rsqrt(mean(v^2) + eps) with no weight and no rotation
(Hugging Face transformers, models/gemma4: q_norm, k_norm, v_norm). ``rotary_dim`` columns rotate in pairs
(d, d + rotary_dim / 2), the rest passes through; head_dim is Gemma 4's production form.

Everything is checked on the host before the one launch (ContractError with a stable code; nothing was launched and
nothing written). No tokens is a valid request that launches nothing. The kernels trap behind the host's checks on
metadata that only the device knows (DeviceFault, now or at the next synchronisation).

Each entry's signature is that of its form in entries/prep_forms.py, without the row; K=V entries take no ``v``.
"""

from __future__ import annotations

from collections.abc import Callable

from g4kv_cli.entries.prep_forms import RMS_NORM_EPS, contiguous, paged_batch_prefill, paged_decode, paged_prefill
from g4kv_cli.entries.public import public, public_row

__all__ = [
    "RMS_NORM_EPS",
    "qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into",
    "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into",
    "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into",
    "qk_norm_rope_prefill_hd256_plain_into",
    "qkv_norm_rope_paged_batch_prefill_hd256_plain_into",
    "qkv_norm_rope_paged_batch_prefill_hd512_plain_into",
    "qkv_norm_rope_paged_decode_hd256_plain_into",
    "qkv_norm_rope_paged_decode_hd512_plain_into",
    "qkv_norm_rope_paged_prefill_hd256_plain_into",
    "qkv_norm_rope_paged_prefill_hd512_plain_into",
]

qk_norm_rope_prefill_hd256_plain_into = public(contiguous, "qk_norm_rope_prefill_hd256_plain_into")
qkv_norm_rope_paged_prefill_hd256_plain_into = public(paged_prefill, "qkv_norm_rope_paged_prefill_hd256_plain_into")
qkv_norm_rope_paged_decode_hd256_plain_into = public(paged_decode, "qkv_norm_rope_paged_decode_hd256_plain_into")
qkv_norm_rope_paged_prefill_hd512_plain_into = public(paged_prefill, "qkv_norm_rope_paged_prefill_hd512_plain_into")
qkv_norm_rope_paged_decode_hd512_plain_into = public(paged_decode, "qkv_norm_rope_paged_decode_hd512_plain_into")
qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into = public(
    paged_prefill, "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into"
)
qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into = public(
    paged_decode, "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into"
)
qkv_norm_rope_paged_batch_prefill_hd256_plain_into = public(
    paged_batch_prefill, "qkv_norm_rope_paged_batch_prefill_hd256_plain_into"
)
qkv_norm_rope_paged_batch_prefill_hd512_plain_into = public(
    paged_batch_prefill, "qkv_norm_rope_paged_batch_prefill_hd512_plain_into"
)
qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into = public(
    paged_batch_prefill, "qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into"
)


def __getattr__(name: str) -> Callable[..., None]:
    """Rows of the table that stand above by no name of their own."""
    return public_row(__name__, ("prep",), name)
