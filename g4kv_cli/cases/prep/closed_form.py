"""What must come out of the closed-form inputs, written down without the oracle: signs times weights, moved about.

A row of magnitude m has mean square m^2 exactly, so the norm gives sign * (1 - eps / (2 m^2)): for m >= 2 within
1.3e-7 of the sign, far inside half a bf16 ulp (2e-3) of it and of sign * weight. Every expected value is therefore
an exact bf16 number. The RoPE rows only move and negate. Folded queries take K's weights, powers of two, where no pair
turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.inputs import IDENTITY, NEGATE, ROPE_PERIOD, closed_form_k_weight, closed_form_signs, closed_form_weight
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.oracle.reference import Expected

EXACT_TEXT = "exact (closed form)"


def closed_form_expected(
    geometry: Geometry, positions: npt.NDArray[np.int64], rotary_dim: int, with_v: bool, *, folded: bool = False
) -> tuple[Expected, Expected, Expected]:
    """(q, k, v) for ``make_inputs(kind="closed-form")`` at these positions; ``k`` with the columns that a row has."""
    head_dim = geometry.head_dim
    weight = closed_form_weight(head_dim).astype(np.float64)
    k_weight = closed_form_k_weight(head_dim, folded=folded).astype(np.float64)
    q_signs = closed_form_signs(positions, geometry.num_qo_heads, head_dim, of_query=True)
    k_signs = closed_form_signs(positions, geometry.num_kv_heads, head_dim, of_query=False)
    pairs = geometry.num_rotated_pairs if folded else rotary_dim // 2
    q = _turned(q_signs * weight, positions, rotary_dim // 2, pairs)
    k = _turned(k_signs * k_weight, positions, rotary_dim // 2, pairs)
    v = (-k_signs if with_v else k_signs).astype(np.float64)
    if folded:
        half = head_dim // 2
        q[..., pairs:half] *= k_weight[pairs:half]
        q[..., half + pairs :] *= k_weight[half + pairs :]
        k = np.concatenate([k[..., :pairs], k[..., half : half + pairs]], axis=-1)
    return _exact(q), _exact(k), _exact(v)


def _turned(rows: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], half: int, pairs: int) -> Any:
    """Pairs (d, d + half) turned, for d below ``pairs``."""
    out = rows.copy()
    first, second = slice(pairs), slice(half, half + pairs)
    for token, position in enumerate(positions):
        turn = int(position) % ROPE_PERIOD
        if turn == IDENTITY:
            continue
        if turn == NEGATE:
            out[token, :, first], out[token, :, second] = -rows[token, :, first], -rows[token, :, second]
        else:
            # cos 0, sin 1: the first becomes minus the second, the second becomes the first.
            out[token, :, first], out[token, :, second] = -rows[token, :, second], rows[token, :, first]
    return out


def _exact(values: npt.NDArray[np.float64]) -> Expected:
    return Expected(values, np.zeros_like(values), EXACT_TEXT)
