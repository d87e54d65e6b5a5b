"""Gemma 4's prep and paged attention in NumPy, as a provider: what a fast kernel can be held against anywhere."""

from __future__ import annotations

import numpy as np


def _normed(rows: np.ndarray, eps: float) -> np.ndarray:
    wide = rows.astype(np.float32)
    return wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(eps))


def _turned(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate-half of the first columns; ``cos``, ``sin`` [tokens, rotary_dim]."""
    half, out = cos.shape[-1] // 2, rows.copy()
    c, s = (table.astype(np.float32)[:, None, :half] for table in (cos, sin))
    left, right = rows[..., :half], rows[..., half : 2 * half]
    out[..., :half] = left * c - right * s
    out[..., half : 2 * half] = right * c + left * s
    return out


def prep(q, k, v, q_weight, k_weight, cos, sin, q_out, pool, positions, pages, slots, layer, eps):
    """Norm and rotate; ``pool`` [page][layer][K, V][slot][head][dim]; ``v`` None: V is the raw K."""
    turn_by = cos[positions], sin[positions]
    q_out[...] = _turned(_normed(q, eps) * q_weight.astype(np.float32), *turn_by)
    keys = _turned(_normed(k, eps) * k_weight.astype(np.float32), *turn_by)
    pool[pages, layer, 0, slots] = keys.astype(pool.dtype)
    pool[pages, layer, 1, slots] = _normed(k if v is None else v, eps).astype(pool.dtype)


def attention(q, pool, out, lse, page_indices, page_indptr, page_origins, positions, token_requests, layer, group,
              sm_scale, window_left):  # fmt: skip
    """Each token over the keys of its request that it sees."""
    page_size = pool.shape[3]
    for token, (position, request) in enumerate(zip(positions, token_requests, strict=True)):
        first = 0 if window_left < 0 else max(0, int(position) - window_left)
        keys = np.arange(first, int(position) + 1)
        row = page_indices[page_indptr[request] : page_indptr[request + 1]]
        pages = row[keys // page_size - page_origins[request]]
        k, v = (pool[pages, layer, kv, keys % page_size].astype(np.float32) for kv in (0, 1))
        k, v = (np.repeat(side, group, axis=1) for side in (k, v))
        scores = np.einsum("hd,khd->hk", q[token].astype(np.float32), k) * np.float32(sm_scale)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out[token] = np.einsum("hk,khd->hd", weights / total, v)
        if lse is not None:
            lse[token] = (top + np.log(total))[:, 0]
