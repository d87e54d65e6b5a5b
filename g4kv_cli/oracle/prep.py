"""What a prep kernel must produce, in float64, written as the formulas read.

Sources: transformers 5.24.0, `Gemma4RMSNorm` and `apply_rotary_pos_emb`: the weight is `w` (not `1 + w`), eps stands
inside the root, pairs are (d, d + rotary_dim / 2), V has a weightless norm and is never rotated. Inputs are exact
bf16 values; nothing is rounded here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

EPS = 1e-6
"""`rms_norm_eps` of every Gemma 4 size."""


def rms_norm(x: Array, weight: Array | None, eps: float = EPS) -> Float64:
    """``x * (mean(x^2) + eps)^-0.5 * weight`` over the last axis; ``weight`` [head_dim] or None for V."""
    wide = np.asarray(x, dtype=np.float64)
    mean_square = np.einsum("...d,...d->...", wide, wide)[..., None] / wide.shape[-1]
    normed: Float64 = wide * (mean_square + eps) ** -0.5
    if weight is not None:
        normed *= np.asarray(weight, dtype=np.float64)
    return normed


def rotate_half_rope(x: Float64, cos: Array, sin: Array) -> Float64:
    """``x * cos + rotate_half(x) * sin`` on the first ``rotary_dim`` columns; the rest passes through.

    ``x`` [tokens, heads, head_dim]; ``cos``, ``sin`` [tokens, rotary_dim], the rows of each token's position.
    """
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    cos64 = np.asarray(cos, dtype=np.float64)[:, None, :]
    sin64 = np.asarray(sin, dtype=np.float64)[:, None, :]
    first, second = x[..., :half], x[..., half:rotary_dim]
    out = np.array(x, dtype=np.float64)
    out[..., :half] = first * cos64[..., :half] - second * sin64[..., :half]
    out[..., half:rotary_dim] = second * cos64[..., half:] + first * sin64[..., half:]
    return out


def pair_magnitude(x: Float64, rotary_dim: int) -> Float64:
    """``hypot(x_i, x_(i + rotary_dim / 2))`` for each rotated column, ``|x|`` for the columns that pass through."""
    half = rotary_dim // 2
    out: Float64 = np.abs(x)
    pair = np.sqrt(np.square(x[..., :half]) + np.square(x[..., half:rotary_dim]))
    out[..., :half] = pair
    out[..., half:rotary_dim] = pair
    return out
