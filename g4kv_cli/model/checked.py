"""The only maker of a CheckedGeometry: what a pool and a layer are, re-derived and found consistent.

Layout fields are public and may come from somebody else, so nothing stored is trusted: every stride is derived
again with the width that the kernel uses, and compared. One helper serves prep writes and attention reads.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt

from g4kv_cli.model import rules
from g4kv_cli.model.kv_format import SPLIT, KvFormat, folded_k_dim, format_of
from g4kv_cli.model.kv_layout import BF16_BYTES, KvLayout
from g4kv_cli.model.rules import rule

ARGUMENT_TYPE = rule("argument_type", "is not the kind of argument this takes")
INTEGER = rule("integer", "must be an integer")
FITS_I64 = rule("fits_i64", "does not fit a signed 64-bit element offset")
KV_HEADS = rule("kv_heads", "differs from the KV heads of the request")
K_DIM = rule("k_dim", "is neither head_dim nor the rotated columns that the folded format keeps")
KV_FORMAT = rule("kv_format", "is a format of K and V that no kernel of this entry reads or writes")
KV_BLOCK_LEN = rule("kv_block_len", "contradicts page_size * num_kv_heads * k_dim")
LAYER_STRIDE = rule("layer_stride", "contradicts kv_block_len + page_size * num_kv_heads * head_dim")
PAGE_STRIDE = rule("page_stride", "contradicts num_layers * layer_stride")
ELEMENT_BYTES = rule("element_bytes", "is not the 2 bytes of the bf16 that the kernels store")
POOL_NOT_EMPTY = rule("pool_not_empty", "holds less than one page")
POOL_WHOLE_PAGES = rule("pool_whole_pages", "is not a whole number of pages")

I32_MAX = 2**31 - 1
I64_MAX = 2**63 - 1
F32_MAX = (2 - 2**-23) * 2.0**127

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class CheckedGeometry:
    """A pool that holds ``num_pages`` whole pages of ``layout``, and a layer inside it. Made by check_pool only."""

    layout: KvLayout
    layer: int
    num_pages: int


def require_type(field: str, value: object, kind: type[_Kind]) -> _Kind:
    """``value`` if it is a ``kind``. Raises ContractError (argument_type)."""
    ARGUMENT_TYPE.require(isinstance(value, kind), field, _name_of(value), kind.__name__)
    return value  # type: ignore[return-value]


def require_sequence(field: str, values: object) -> list[object]:
    """The elements of a list, tuple, range or one-dimensional array. Raises ContractError (argument_type)."""
    is_vector = getattr(values, "ndim", None) == 1 or isinstance(values, Sequence)
    ARGUMENT_TYPE.require(is_vector and not isinstance(values, (str, bytes)), field, _name_of(values), "a sequence")
    return list(values)  # type: ignore[call-overload,no-any-return]


def require_integer(field: str, value: object) -> int:
    """``value`` as a Python int, from an int or a NumPy integer; no bool, no float. ContractError (integer)."""
    number: int | None = None
    if not isinstance(value, (bool, np.bool_)):  # before NumPy 2.3 a NumPy bool was an index
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
    INTEGER.require(number is not None, field, "" if number is not None else _name_of(value), "int")
    return 0 if number is None else number


def require_i32(field: str, value: object) -> int:
    """``value`` as an int that fits a signed 32-bit integer: the explicit narrowing before a kernel parameter."""
    number = require_integer(field, value)
    rules.FITS_I32.require(-I32_MAX - 1 <= number <= I32_MAX, field, number, f"-{I32_MAX + 1}..{I32_MAX}")
    return number


def require_i32_vector(
    field: str, values: object, name_of: Callable[[int], str] | None = None
) -> npt.NDArray[np.int32]:
    """A sequence of integers as an int32 array of its own; an error names the element, by ``name_of`` if given.

    Raises ContractError: argument_type, integer, fits_i32.
    """
    # Arrays of integers and lists of plain ints are taken as a whole; whatever else there is goes through one by one.
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu" and values.size:
        lowest, highest = int(values.min()), int(values.max())
        if lowest >= -I32_MAX - 1 and highest <= I32_MAX:
            return values.astype(np.int32)
    listed = require_sequence(field, values)
    if set(map(type, listed)) == {int}:
        numbers: list[int] = listed  # type: ignore[assignment]
        if min(numbers) >= -I32_MAX - 1 and max(numbers) <= I32_MAX:
            return np.array(numbers, np.int32)
    name = (lambda at: f"{field}[{at}]") if name_of is None else name_of
    return np.array([require_i32(name(at), value) for at, value in enumerate(listed)], np.int32)


def finite_f32(value: object) -> float | None:
    """``value`` as a float that is finite in float32 too, from any real number but a bool; None for all else."""
    is_scalar = getattr(value, "ndim", 0) == 0 and not isinstance(value, bool)
    if not is_scalar or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= F32_MAX else None


def product_i32(field: str, *factors: int) -> int:
    """The product of non-negative factors, required to fit int32 (a count that a kernel indexes with)."""
    result = 1
    for factor in factors:
        result *= factor
        rules.FITS_I32.require(result <= I32_MAX, field, _product(factors), f"<= {I32_MAX}")
    return result


def product_i64(field: str, *factors: int) -> int:
    """The product of non-negative factors, required to fit int64 (the kernels' offset width)."""
    result = 1
    for factor in factors:
        result *= factor
        FITS_I64.require(result <= I64_MAX, field, _product(factors), f"<= {I64_MAX}")
    return result


def check_head_relation(num_qo_heads: object, num_kv_heads: object) -> tuple[int, int]:
    """(query heads, KV heads) once the group is a whole number: settled before anything divides by either.

    Raises ContractError: integer, fits_i32, extent_positive, q_heads_multiple.
    """
    qo_heads = require_i32("num_qo_heads", num_qo_heads)
    kv_heads = require_i32("num_kv_heads", num_kv_heads)
    rules.EXTENT_POSITIVE.require(kv_heads >= 1, "num_kv_heads", kv_heads, ">= 1")
    rules.Q_HEADS_MULTIPLE.require(
        qo_heads >= 1 and qo_heads % kv_heads == 0, "num_qo_heads", qo_heads, f"a positive multiple of {kv_heads}"
    )
    return qo_heads, kv_heads


def check_layout(
    layout: object, *, head_dim: int, num_kv_heads: int, kv_formats: Sequence[KvFormat] = (SPLIT,)
) -> KvLayout:
    """The layout as it was re-derived, all Python ints: kernels keep every offset in 64 bits.

    ``kv_formats`` are those that the entry has kernels for. Raises ContractError: argument_type, integer,
    extent_positive, fits_i32, fits_i64, head_dim, kv_heads, element_bytes, k_dim, kv_format, kv_block_len,
    layer_stride, page_stride.
    """
    given = require_type("pool.layout", layout, KvLayout)
    extents: dict[str, int] = {}
    for name in ("page_size", "num_layers", "num_kv_heads", "head_dim", "k_dim", "element_bytes"):
        extents[name] = require_i32(f"layout.{name}", getattr(given, name))
        rules.EXTENT_POSITIVE.require(extents[name] >= 1, f"layout.{name}", extents[name], ">= 1")
    rules.HEAD_DIM.require(extents["head_dim"] == head_dim, "layout.head_dim", extents["head_dim"], head_dim)
    KV_HEADS.require(
        extents["num_kv_heads"] == num_kv_heads, "layout.num_kv_heads", extents["num_kv_heads"], num_kv_heads
    )
    ELEMENT_BYTES.require(
        extents["element_bytes"] == BF16_BYTES, "layout.element_bytes", extents["element_bytes"], BF16_BYTES
    )

    k_dim, known = extents["k_dim"], dict.fromkeys((head_dim, folded_k_dim(head_dim)))
    K_DIM.require(k_dim in known, "layout.k_dim", k_dim, " or ".join(map(str, known)))
    kv_format = format_of(head_dim, k_dim)
    KV_FORMAT.require(kv_format in kv_formats, "layout.k_dim", f"{k_dim} ({kv_format})", " or ".join(kv_formats))

    stored = {
        name: require_integer(f"layout.{name}", getattr(given, name))
        for name in ("kv_block_len", "layer_stride", "page_stride")
    }
    block = product_i64("layout.kv_block_len", extents["page_size"], num_kv_heads, k_dim)
    KV_BLOCK_LEN.require(stored["kv_block_len"] == block, "layout.kv_block_len", stored["kv_block_len"], block)
    layer_stride = product_i64("layout.layer_stride", extents["page_size"], num_kv_heads, k_dim + head_dim)
    LAYER_STRIDE.require(
        stored["layer_stride"] == layer_stride, "layout.layer_stride", stored["layer_stride"], layer_stride
    )
    page_stride = product_i64("layout.page_stride", extents["num_layers"], layer_stride)
    PAGE_STRIDE.require(stored["page_stride"] == page_stride, "layout.page_stride", stored["page_stride"], page_stride)
    return dataclasses.replace(given, **extents, **stored)


def check_pool(
    *,
    layout: object,
    layer: object,
    pool_elems: int,
    head_dim: int,
    num_kv_heads: int,
    kv_formats: Sequence[KvFormat] = (SPLIT,),
) -> CheckedGeometry:
    """Check a layout against an entry's head_dim and KV heads, and a pool of ``pool_elems`` elements against it.

    Raises ContractError: those of check_layout, and layer_range, pool_not_empty, pool_whole_pages.
    """
    checked = check_layout(layout, head_dim=head_dim, num_kv_heads=num_kv_heads, kv_formats=kv_formats)
    checked_layer = require_i32("layer", layer)
    rules.LAYER_RANGE.require(
        0 <= checked_layer < checked.num_layers, "layer", checked_layer, f"0..{checked.num_layers - 1}"
    )
    stride = checked.page_stride
    POOL_NOT_EMPTY.require(pool_elems >= stride, "pool", f"{pool_elems} elements", f">= {stride}")
    POOL_WHOLE_PAGES.require(pool_elems % stride == 0, "pool", f"{pool_elems} elements", f"a multiple of {stride}")
    num_pages = require_i32("pool pages", pool_elems // stride)
    product_i64("pool bytes", num_pages, stride, checked.element_bytes)
    return CheckedGeometry(layout=checked, layer=checked_layer, num_pages=num_pages)


def _name_of(value: object) -> str:
    """A short name of a value that is not what was wanted: its type, and its text if that is short and plain."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return f"{kind} {value!r}"
    return kind


def _product(factors: tuple[int, ...]) -> str:
    return " * ".join(str(rules.shown(factor)) for factor in factors)
