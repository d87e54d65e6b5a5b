"""bf16 on the host: the dtype, correct rounding from float64, and the size of one unit in the last place."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

_SMALLEST_NORMAL = 2.0**-126
_FRACTION_BITS = 7
_FLOAT64_EXPONENT = np.uint64(0x7FF0_0000_0000_0000)


def round_to_bf16(values: npt.ArrayLike) -> Array:
    """float64 -> bf16, to nearest, ties to even, rounded once.

    NumPy's own cast goes through float32 and rounds twice; narrowing to float32 by round-to-odd first keeps the
    second rounding exact (float32 has more than two bits more than bf16).
    """
    wide = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    inexact = (narrow.astype(np.float64) != wide) & np.isfinite(narrow)
    if inexact.any():
        # Round to odd: of the two float32 neighbours of an inexact value, the one with the odd last bit.
        too_far = np.abs(narrow.astype(np.float64)) > np.abs(wide)
        bits = narrow.view(np.uint32)
        truncated = np.where(too_far, bits - np.uint32(1), bits)
        narrow = np.where(inexact, truncated | np.uint32(1), bits).astype(np.uint32).view(np.float32)
    return narrow.astype(BF16)


def ulp_of_bf16(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Distance of neighbouring bf16 numbers in the binade of each finite value (2**-133 among the subnormals)."""
    wide = np.atleast_1d(np.asarray(values, dtype=np.float64))
    # A float64 without its sign and fraction is the power of two at which the value's binade starts.
    ulp: npt.NDArray[np.float64] = (wide.view(np.uint64) & _FLOAT64_EXPONENT).view(np.float64)
    np.maximum(ulp, _SMALLEST_NORMAL, out=ulp)
    ulp *= 2.0**-_FRACTION_BITS
    return ulp.reshape(np.shape(values))


def bits(values: Array) -> npt.NDArray[np.uint16]:
    """The bit patterns of a bf16 array, as uint16 of the same shape. Nothing is copied."""
    return values.view(np.uint16)
