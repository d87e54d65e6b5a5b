"""How far a right attention kernel may be from float64 attention, and where each number comes from.

Let p_j be the exact weights, A_j = sum_d |q_d k_jd|, B_d = sum_j p_j |v_jd|, Q_d = sum_j p_j^2 v_jd^2, S = keys / 16
tensor-core steps (and as many online-softmax steps at most), M the largest |sm_scale q k_j| in bits (times log2 e),
u = 2**-24 and h = 2**-8, half a bf16 ulp relative to the smallest number of a binade.

float32:

* One tensor-core step of k = 16 adds 17 terms, each cut toward zero to a multiple of 2**(E - 25), where 2**E is at
  most the largest term, and cuts the sum to float32 (2u): at most (17 / 4 + 1) 2u of the sum of magnitudes. A score
  takes head_dim / 16 of them: it is off by at most head_dim / 16 * 5.25 * 2u * A_j, and its weight exp(..), relatively,
  by sm_scale times that. The sum of weighted values takes S steps.
* The exponent is an fma of numbers up to M in size: 3u M ln 2 in the weight; exp2 itself 2**-22 (PTX ISA,
  ex2.approx). Each new maximum rescales what stands: a product and another exp2, S times at most.
* Quotient, merges of warps and splits: 2**-20 covers 16 float32 operations.

Call the sum of the first two, relative to weight j, e_j, that of their sum e = sum_j p_j e_j, and what the summing
costs s = S * 6.25 * 2u + 2**-20, relative to the largest partial sum.

bf16: a kernel rounds the weights (h each, after they were summed), and once the result. ``roundings`` counts those of
the weights and of anything between them and the result.

Worst case, whatever the values are:

    |out - exact|_d <= sum_j p_j (e_j + e + roundings h) |v_jd| + s B_d + ulp(out) / 2

Likely: where V is spread, roundings average out. A rounding error that may be anything in [-h, h] is sub-Gaussian with
variance h^2 / 3, one that is only bounded by e_j with variance e_j^2, and so is their sum over the keys, independent
of each other or of the signs of V. A sub-Gaussian number exceeds DEVIATIONS = sqrt(2 ln(2 / 2**-40)) = 7.5 of its
standard deviations less often than once in 2**40 elements, and no partial sum is larger than |out| and 7.5 deviations
of it:

    off_d <= 7.5 sqrt(sum_j p_j^2 (roundings h^2 / 3 + e_j^2) v_jd^2) + 7.5 sqrt(sum_j p_j^2 e_j^2) |out_d|
             + s (|out_d| + 7.5 sqrt(Q_d))

The smaller of the two holds for each element. Scores that agree to within h make roundings that agree; then the signs
of V do the averaging.

All rows together: the scale error of a row is error . exact / |exact|^2. Key j's rounding is in it by
a_j = p_j (v_j . exact) / |exact|^2, the result's by ulp_d exact_d / |exact|^2, so it has a mean of 0, but for s, and
the variance

    roundings h^2 / 3 sum_j a_j^2 + 2 sum_j (a_j^2 + p_j^2) e_j^2 + sum_d ulp_d^2 exact_d^2 / (12 |exact|^4)

where roundings are independent. Weights that agree to within an ulp, 2h, may all be rounded alike, so of keys whose
scores lie in one bin of that width (sum of a_j)^2 counts where it is more than their sum of squares. A kernel weighs by
the maximum so far: keys that lie within a bin of it, from either end, are of one bin whatever comes. The mean over N
different rows stays within s and 7.5 sqrt(sum of their variances) / N. This sees what no single element shows: a cut
where a rounding is due makes every row smaller by about 0.7 h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.bfloat16 import ulp_of_bf16
from g4kv_cli.oracle.tolerance import HALF_ULP_RELATIVE, U_FLOAT32

Float64 = npt.NDArray[np.float64]

MMA_DEPTH = 16
MMA_STEP_RELATIVE = (17 / 4 + 1) * 2 * U_FLOAT32
EXP2_RELATIVE = 2.0**-22
EPILOGUE_RELATIVE = 2.0**-20
LOG2_E = 1.4426950408889634
FOLD_SHARE = 2 * ((1 + HALF_ULP_RELATIVE) ** 2 - 1) / (1 - HALF_ULP_RELATIVE) ** 2
"""What folding does to a score: in a column that does not turn, q k of split rows are two bf16 numbers and q' v of
folded rows are, each within h of what it rounds. Both products are within (1 + h)^2 - 1 of the same exact one, so they
differ by no more than that much twice; |exact| is at most |q' v| / (1 - h)^2, and this is relative to |q' v|."""
_TINY = float(np.finfo(np.float64).tiny)
_ALIKE_BINS = 1536
"""Twelve below the largest score: what lies deeper is one bin, of 6e-6 of a weight a key."""

DEVIATIONS = float(np.sqrt(2 * 41 * np.log(2)))


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """What roundings may do to rows: ``limit`` of each element's error, float64 [.., head_dim]; ``scale_variance`` of a
    row's scale error and the ``scale_bias`` that it may have, [..]."""

    limit: Float64
    scale_variance: Float64
    scale_bias: Float64

    def at(self, index: Any) -> Rounding:
        """Those of some rows."""
        return Rounding(self.limit[index], self.scale_variance[index], self.scale_bias[index])

    @staticmethod
    def join(parts: Sequence[Rounding], along: Callable[[list[Float64]], Float64] = np.concatenate) -> Rounding:
        """Those of several results, one behind the other."""
        return Rounding(
            along([part.limit for part in parts]),
            along([part.scale_variance for part in parts]),
            along([part.scale_bias for part in parts]),
        )


@dataclass(slots=True, eq=False)
class KeySums:
    """Sums over the keys that the limits of rows are made of, float64; they can be added up piece by piece.

    ``value`` [.., head_dim] is the exact result. ``size`` sum_j p_j |v_jd|, ``error`` sum_j p_j (e_j + e) |v_jd|,
    ``square`` sum_j p_j^2 v_jd^2, ``error_square`` sum_j p_j^2 e_j^2 v_jd^2.
    """

    value: Float64
    size: Float64
    error: Float64
    square: Float64
    error_square: Float64


def summing_error(keys: float) -> float:
    """s of the module's docstring."""
    return keys / MMA_DEPTH * (MMA_STEP_RELATIVE + 2 * U_FLOAT32) + EPILOGUE_RELATIVE


def weight_errors(magnitudes: Float64, bits: Float64, head_dim: int, keys: float) -> Float64:
    """e_j of each score [rows, keys]: ``magnitudes`` |sm_scale| A_j [rows, keys], ``bits`` M [rows, 1]."""
    exponent = 3 * U_FLOAT32 * bits * np.log(2)
    rescaling = keys / MMA_DEPTH * (EXP2_RELATIVE + U_FLOAT32 + exponent)
    errors: Float64 = head_dim / MMA_DEPTH * MMA_STEP_RELATIVE * magnitudes + exponent + EXP2_RELATIVE + rescaling
    return errors


def rounding_of(
    sums: KeySums, weights: Float64, scores: Float64, errors: Float64, overlaps: Float64, roundings: int = 1
) -> Rounding:
    """Limits of rows. ``weights`` p_j, ``scores`` (-infinity: not seen), ``errors`` e_j, ``overlaps`` v_j . exact, each
    [.., keys]."""
    keys, h2 = weights.shape[-1], roundings * HALF_ULP_RELATIVE**2 / 3
    summing = summing_error(keys)
    size, norm = np.abs(sums.value), np.square(sums.value).sum(axis=-1)
    error_sum = np.square(weights * errors).sum(axis=-1)
    worst = sums.error + (roundings * HALF_ULP_RELATIVE + summing) * sums.size
    likely = DEVIATIONS * np.sqrt(h2 * sums.square + sums.error_square)
    likely += DEVIATIONS * np.sqrt(error_sum)[..., None] * size
    likely += summing * (size + DEVIATIONS * np.sqrt(sums.square))
    off = np.minimum(worst, likely)
    shares = weights * overlaps / np.maximum(norm, _TINY)[..., None]
    alike = _squares_of_alike(shares, scores)
    result = (np.square(ulp_of_bf16(size) * size)).sum(axis=-1) / 12 / np.maximum(np.square(norm), _TINY)
    variance = h2 * alike + 2 * np.square(shares * errors).sum(axis=-1) + 2 * error_sum + result
    return Rounding(off + 0.5 * ulp_of_bf16(size + off), variance, np.full(variance.shape, summing))


def _squares_of_alike(shares: Float64, scores: Float64) -> Float64:
    """Sum of squares of the ``shares`` [.., keys] of each row, those of scores in one bin together."""
    flat, rows = shares.reshape(-1, shares.shape[-1]), scores.reshape(-1, shares.shape[-1])
    so_far = np.minimum(np.maximum.accumulate(rows, axis=-1), np.maximum.accumulate(rows[:, ::-1], axis=-1)[:, ::-1])
    below = np.minimum((rows.max(axis=-1, keepdims=True) - rows) / (2 * HALF_ULP_RELATIVE), _ALIKE_BINS - 1)
    below[rows >= so_far - 2 * HALF_ULP_RELATIVE] = 0
    below[np.isnan(below)] = 0  # a row that holds a NaN has no limit to be within
    bins = below.astype(np.int64) + _ALIKE_BINS * np.arange(len(flat))[:, None]
    used, at = np.unique(bins, return_inverse=True)
    together = np.square(np.bincount(at.reshape(-1), flat.reshape(-1)))
    apart = np.bincount(at.reshape(-1), np.square(flat).reshape(-1))
    total = np.bincount(used // _ALIKE_BINS, np.maximum(together, apart), len(flat)).astype(np.float64)
    return total.reshape(shares.shape[:-1])


def scale_error(got: Float64, exact: Float64) -> Float64:
    """Of each row [.., head_dim]."""
    norm = np.square(exact).sum(axis=-1)
    error: Float64 = ((got - exact) * exact).sum(axis=-1) / np.maximum(norm, _TINY)
    return error


def mean_scale_limit(rounding: Rounding) -> float:
    """Of the mean scale error of all rows."""
    variance, bias = rounding.scale_variance, rounding.scale_bias
    return float(bias.mean() + DEVIATIONS * np.sqrt(variance.sum()) / variance.size)
