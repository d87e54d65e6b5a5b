"""The only maker of a CheckedGeometry: what a pool and a layer are, re-derived and found consistent.

Layout fields are public and may come from somebody else, so nothing stored is trusted: every stride is derived
again with the width that the kernel uses, and compared. One helper serves prep writes and attention reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.model import rules
from g4kv_cli.model.kv_layout import BF16_BYTES, KvLayout

I32_MAX = 2**31 - 1
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class CheckedGeometry:
    """A pool that holds ``num_pages`` whole pages of ``layout``, and a layer inside it. Made by check_pool only."""

    layout: KvLayout
    layer: int
    num_pages: int


def require_integer(field: str, value: object) -> int:
    """``value`` if it is an int (NumPy integers too, no bool, no float). Raises ContractError (integer)."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    rules.INTEGER.require(is_integer, field, f"{type(value).__name__} {value!r}", "int")
    return value.__index__() if is_integer else 0  # type: ignore[attr-defined]


def require_i32(field: str, value: object) -> int:
    """``value`` as an int that fits a signed 32-bit integer: the explicit narrowing before a kernel parameter."""
    number = require_integer(field, value)
    rules.FITS_I32.require(-I32_MAX - 1 <= number <= I32_MAX, field, number, f"-{I32_MAX + 1}..{I32_MAX}")
    return number


def product_i64(field: str, *factors: int) -> int:
    """The product of non-negative factors, required to fit int64 (the kernels' offset width)."""
    result = 1
    for factor in factors:
        result *= factor
        rules.FITS_I64.require(result <= I64_MAX, field, " * ".join(map(str, factors)), f"<= {I64_MAX}")
    return result


def check_pool(
    *, layout: KvLayout, layer: int, pool_elems: int, head_dim: int, num_kv_heads: int
) -> CheckedGeometry:
    """Check a layout against an entry's head_dim and KV heads, and a pool of ``pool_elems`` elements against it.

    Raises ContractError: extent_positive, fits_i32, fits_i64, head_dim, kv_heads, element_bytes, kv_block_len,
    layer_stride, page_stride, layer_range, pool_not_empty, pool_whole_pages.
    """
    for name in ("page_size", "num_layers", "num_kv_heads", "head_dim"):
        extent = require_i32(f"layout.{name}", getattr(layout, name))
        rules.EXTENT_POSITIVE.require(extent >= 1, f"layout.{name}", extent, ">= 1")
    rules.HEAD_DIM.require(layout.head_dim == head_dim, "layout.head_dim", layout.head_dim, head_dim)
    rules.KV_HEADS.require(
        layout.num_kv_heads == num_kv_heads, "layout.num_kv_heads", layout.num_kv_heads, num_kv_heads
    )
    rules.ELEMENT_BYTES.require(
        layout.element_bytes == BF16_BYTES, "layout.element_bytes", layout.element_bytes, BF16_BYTES
    )

    block = product_i64("layout.kv_block_len", layout.page_size, layout.num_kv_heads, layout.head_dim)
    rules.KV_BLOCK_LEN.require(
        layout.kv_block_len == block, "layout.kv_block_len", layout.kv_block_len, block
    )
    layer_stride = product_i64("layout.layer_stride", 2, block)
    rules.LAYER_STRIDE.require(
        layout.layer_stride == layer_stride, "layout.layer_stride", layout.layer_stride, layer_stride
    )
    page_stride = product_i64("layout.page_stride", layout.num_layers, layer_stride)
    rules.PAGE_STRIDE.require(
        layout.page_stride == page_stride, "layout.page_stride", layout.page_stride, page_stride
    )

    checked_layer = require_i32("layer", layer)
    rules.LAYER_RANGE.require(
        0 <= checked_layer < layout.num_layers, "layer", layer, f"0..{layout.num_layers - 1}"
    )

    rules.POOL_NOT_EMPTY.require(
        pool_elems >= page_stride, "pool", f"{pool_elems} elements", f">= {page_stride}"
    )
    rules.POOL_WHOLE_PAGES.require(
        pool_elems % page_stride == 0, "pool", f"{pool_elems} elements", f"a multiple of {page_stride}"
    )
    num_pages = require_i32("pool pages", pool_elems // page_stride)
    product_i64("pool bytes", num_pages, page_stride, layout.element_bytes)
    return CheckedGeometry(layout=layout, layer=checked_layer, num_pages=num_pages)
