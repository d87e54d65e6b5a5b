"""How far a right kernel may be from the float64 formula, element by element, and where each number comes from.

A prep kernel keeps float32 throughout and rounds to bf16 once, at the store. With u = 2**-24 (half a float32 ulp,
relative) its float32 result z is off from the exact value by at most

* sum of D squares: each square is an exact product (bf16 has 8 significant bits), each of at most D additions of
  non-negative terms is off by u in any order: D u, halved by the root                                    D/2 u
* / D (a power of two, exact), + eps, and eps itself in float32: 2 u, halved by the root                     1 u
* rsqrt.approx.f32: at most 2**-22.9 (PTX ISA, rsqrt)                                                     2.2 u
* x * inv_rms and * w: one rounding each                                                                     2 u

relative to the normed value; call the sum r. The rotation x c - y s adds one rounding a product and one for the sum
(an fma saves one), each at most u times |x c| + |y s|. The products can cancel, so these errors are relative not to
the result but to |x c| + |y s| <= hypot(x, y) hypot(c, s), by Cauchy-Schwarz: the pair magnitude times the length of
the table's (cos, sin), which is 1 up to bf16 rounding. Together

    |z - exact| <= delta = (r + 3 u) * hypot(x, y) * hypot(c, s)

and the store adds half a bf16 ulp of z, so

    |bf16(z) - exact| <= delta + ulp(|exact| + delta) / 2

With D = 512 delta is 1.6e-5 of the pair, against half an ulp of 2e-3 to 4e-3. V has neither weight nor rotation:
the same with delta = r |exact|, hence within 1 bf16 ulp of the correctly rounded value.

A folded query (K's row has the columns that turn alone) takes K's weight in its other columns: one product more, in
float32 and before the store, and no rounding to bf16 that a split query has not. They do not turn, so

    |bf16(z) - exact| <= delta + ulp(|exact| + delta) / 2,   delta = (r + u) |exact|

A float32 intermediate below 2**-126 loses relative accuracy; the absolute floor of 2**-140 covers it and lies far
below half an ulp of the smallest bf16 (2**-134).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.bfloat16 import ulp_of_bf16

Float64 = npt.NDArray[np.float64]

U_FLOAT32 = 2.0**-24
HALF_ULP_RELATIVE = 2.0**-8
"""Half a bf16 ulp, relative to the smallest number of a binade: no rounding to bf16 is off by more."""
RSQRT_APPROX_RELATIVE = 2.0**-22.9
"""Maximum relative error of rsqrt.approx.f32: PTX ISA, section on rsqrt."""

_ABSOLUTE_FLOOR = 2.0**-140

GOLDEN_PAIR_LIMIT = (1 + HALF_ULP_RELATIVE) * ((1 + HALF_ULP_RELATIVE) ** 4 - 1)
"""Of a pair. The recorded side rounds to bf16 behind the norm, both products and the sum, the kernel once, each at most
half an ulp of what it rounds and that at most the pair times the length of the table's bf16 (cos, sin)."""
GOLDEN_PAIR_RMS_LIMIT = (1 + HALF_ULP_RELATIVE) * 2 * HALF_ULP_RELATIVE / 3**0.5
"""Root mean square of the same difference: the four in quadrature, each spread evenly over its half ulp."""


def norm_relative_error(head_dim: int) -> float:
    """r of the module's docstring: relative float32 error of ``x * inv_rms * w``."""
    return (head_dim / 2 + 1 + 2) * U_FLOAT32 + RSQRT_APPROX_RELATIVE


def once_rounded_limit(exact: Float64, delta: Float64) -> Float64:
    """Largest |bf16(z) - exact| for a float32 z within ``delta`` of ``exact``."""
    size = np.abs(exact)
    size += delta
    limit: Float64 = delta + _ABSOLUTE_FLOOR
    limit += 0.5 * ulp_of_bf16(size)
    return limit


def rotated_limit(exact: Float64, pair: Float64, table_length: Float64) -> Float64:
    """Limit of q and k: ``pair`` is hypot(x_i, x_(i+half)) of the normed row, ``table_length`` hypot(cos, sin) (or 1
    where a column passes through); all broadcast to ``exact`` [tokens, heads, head_dim]."""
    relative = norm_relative_error(exact.shape[-1]) + 3 * U_FLOAT32
    return once_rounded_limit(exact, relative * pair * table_length)


def twice_rounded_limit(value: Float64, normed: Float64, cos: Float64, sin: Float64, table_length: Float64) -> Float64:
    """The limit of a q or k whose normed row is rounded to bf16 before it turns.

    A normed element is then off by ``row`` = r |normed| + half a bf16 ulp of it. The rotation carries that on as
    |c| row(x) + |s| row(y), adds its own three float32 roundings of the pair, and the store half an ulp. ``normed``,
    ``value`` [tokens, heads, head_dim]; ``cos``, ``sin`` [tokens, 1, rotary_dim]; ``table_length`` of the pair.
    """
    rotary_dim, half = cos.shape[-1], cos.shape[-1] // 2
    relative = norm_relative_error(value.shape[-1])
    row = relative * np.abs(normed) + 0.5 * ulp_of_bf16(np.abs(normed) * (1 + relative))
    delta = row.copy()
    cosine, sine = np.abs(cos), np.abs(sin)
    delta[..., :half] = cosine[..., :half] * row[..., :half] + sine[..., :half] * row[..., half:rotary_dim]
    delta[..., half:rotary_dim] = cosine[..., half:] * row[..., half:rotary_dim] + sine[..., half:] * row[..., :half]
    pair = np.hypot(normed[..., :half], normed[..., half:rotary_dim])
    delta[..., :rotary_dim] += 3 * U_FLOAT32 * np.concatenate([pair, pair], axis=-1) * table_length[..., :rotary_dim]
    return once_rounded_limit(value, delta)


def folded_limit(exact: Float64) -> Float64:
    """Limit of the columns of a folded query that do not turn: norm, weight, and K's weight."""
    return once_rounded_limit(exact, (norm_relative_error(exact.shape[-1]) + U_FLOAT32) * np.abs(exact))


def normed_limit(exact: Float64) -> Float64:
    """Limit of v: norm without weight, no rotation."""
    return once_rounded_limit(exact, norm_relative_error(exact.shape[-1]) * np.abs(exact))
