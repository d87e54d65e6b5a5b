"""C++ element types of pointers and the NumPy dtypes that hold the same bytes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from g4kv_cli.emulator.mangled import CxxType

_DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned int": np.uint32,
    "long": np.int64,
    "unsigned long": np.uint64,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
    "__half": np.float16,
    "__half2": np.float16,
    "__nv_bfloat16": ml_dtypes.bfloat16,
    "__nv_bfloat162": ml_dtypes.bfloat16,
    "__nv_fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "__nv_fp8_e5m2": ml_dtypes.float8_e5m2,
    **{f"float{count}": np.float32 for count in (2, 3, 4)},
    **{f"double{count}": np.float64 for count in (2, 3, 4)},
    **{f"int{count}": np.int32 for count in (2, 3, 4)},
    **{f"uint{count}": np.uint32 for count in (2, 3, 4)},
}
"""Elements of a pointer that are told apart; a pointer to anything else (char, void, a struct) takes any bytes."""


def mismatch(dtype: np.dtype[Any], kind: CxxType) -> str:
    """Why elements of ``dtype`` are not what a pointer of this type points to; empty if they may be.

    Signed and unsigned integers of one size are the same bytes, and so are complex numbers and pairs of floats; a
    vector (``uint4``, ``float2``) may carry any smaller elements.
    """
    pointee = kind.pointee
    wanted = None if pointee is None else _DTYPES.get(pointee.name)
    if wanted is None or dtype.names is not None:
        return ""
    want = np.dtype(wanted)
    base = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    both_integers = want.kind in "iub" and base.kind in "iub" and want.itemsize == base.itemsize
    carries = pointee is not None and pointee.name[-1] in "234" and base.itemsize < want.itemsize
    if base == want or both_integers or carries:
        return ""
    return f"it takes {kind}, which is {want} on the host; got {dtype}: pass a.astype({_numpy_name(want)})"


def host_name(value: Any) -> str:
    """A host value in words: ``float64 [4, 8]``, ``int 5``."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _numpy_name(dtype: np.dtype[Any]) -> str:
    return f"np.{dtype}" if dtype.kind != "V" else f"ml_dtypes.{dtype}"
