"""What must come out of the closed-form inputs, written down without the oracle: signs times weights, moved about.

A row of magnitude m has mean square m^2 exactly, so the norm gives sign * (1 - eps / (2 m^2)): for m >= 2 within
1.3e-7 of the sign, far inside half a bf16 ulp (2e-3) of it and of sign * weight. Every expected value is therefore
an exact bf16 number. The RoPE rows only move and negate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.inputs import IDENTITY, NEGATE, ROPE_PERIOD, closed_form_signs, closed_form_weight
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.oracle.reference import Expected

EXACT_TEXT = "exact (closed form)"


def closed_form_expected(
    geometry: Geometry, positions: npt.NDArray[np.int64], rotary_dim: int, with_v: bool
) -> tuple[Expected, Expected, Expected]:
    """(q, k, v) for ``make_inputs(kind="closed-form")`` at these positions."""
    head_dim = geometry.head_dim
    weight = closed_form_weight(head_dim).astype(np.float64)
    q_signs = closed_form_signs(positions, geometry.num_qo_heads, head_dim, of_query=True)
    k_signs = closed_form_signs(positions, geometry.num_kv_heads, head_dim, of_query=False)
    q = _turned(q_signs * weight, positions, rotary_dim)
    k = _turned(k_signs * -weight, positions, rotary_dim)
    v = (-k_signs if with_v else k_signs).astype(np.float64)
    return _exact(q), _exact(k), _exact(v)


def _turned(rows: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], rotary_dim: int) -> Any:
    half = rotary_dim // 2
    out = rows.copy()
    for token, position in enumerate(positions):
        turn = int(position) % ROPE_PERIOD
        if turn == IDENTITY:
            continue
        if turn == NEGATE:
            out[token, :, :rotary_dim] = -rows[token, :, :rotary_dim]
        else:
            # cos 0, sin 1: the first half becomes minus the second, the second becomes the first.
            out[token, :, :half] = -rows[token, :, half:rotary_dim]
            out[token, :, half:rotary_dim] = rows[token, :, :half]
    return out


def _exact(values: npt.NDArray[np.float64]) -> Expected:
    return Expected(values, np.zeros_like(values), EXACT_TEXT)
