"""Reject cases of the layout and the pool: every stored field, every width, every length of the pool."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from g4kv_cli.cases.reject.changes import replaced
from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import NUM_LAYERS, NUM_PAGES, PAGE_SIZE
from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.kv_format import FOLDED, folded_k_dim
from g4kv_cli.model.kv_layout import KvLayout

I32 = 2**31
U32 = 2**32


def pool_cases(entry: Entry) -> list[Spoiled]:
    """Cases of every paged form; none in the contiguous form."""
    if not entry.has_pool:
        return []
    cases: list[Spoiled] = []

    def field(rule: str, variant: str, name: str, value: Any, twin: Change | None = None) -> None:
        cases.append(Spoiled(rule, f"{name}-{variant}", f"layout.{name}", _set(name, value), twin))

    for name in ("page_size", "num_layers", "num_kv_heads", "head_dim", "k_dim", "element_bytes"):
        field("extent_positive", "zero", name, 0)
    field("extent_positive", "negative", "num_layers", -NUM_LAYERS)
    field("extent_positive", "negative", "page_size", -PAGE_SIZE)
    field("fits_i32", "2^31", "page_size", I32)
    field("fits_i32", "wraps", "num_layers", U32 + NUM_LAYERS)
    field("fits_i32", "wraps", "head_dim", U32 + entry.head_dim)
    field("integer", "float", "page_size", float(PAGE_SIZE), _numpy_layout)
    field("integer", "none", "num_layers", None)
    field("integer", "bool", "num_kv_heads", True)
    field("integer", "text", "head_dim", str(entry.head_dim))
    field("head_dim", "other-family", "head_dim", 768 - entry.head_dim)
    field("k_dim", "one-pair-less", "k_dim", entry.head_dim - 2)
    field("k_dim", "one-pair-more", "k_dim", entry.head_dim + 2)
    if FOLDED in entry.kv_formats:
        cases += _folded_cases(entry)
    else:
        rule = "k_dim" if folded_k_dim(entry.head_dim) == entry.head_dim else "kv_format"
        cases.append(Spoiled(rule, "folded", "layout.k_dim", _folded))
    field("element_bytes", "one-byte", "element_bytes", 1)
    field("element_bytes", "four-bytes", "element_bytes", 4)
    cases.append(Spoiled("kv_heads", "one-more", "layout.num_kv_heads", _more_heads))
    for name in ("kv_block_len", "layer_stride", "page_stride"):
        cases += [
            Spoiled(name, "one-row-more", f"layout.{name}", _step(name, entry.head_dim)),
            Spoiled(name, "one-row-less", f"layout.{name}", _step(name, -entry.head_dim)),
            Spoiled(name, "wraps", f"layout.{name}", _step(name, U32)),
            Spoiled(name, "zero", f"layout.{name}", _set(name, 0)),
            Spoiled("integer", f"{name}-float", f"layout.{name}", _as_float(name)),
        ]
    cases += _product_cases(entry)

    cases += [
        Spoiled("layer_range", "negative", "layer", _argument("layer", -1), _argument("layer", 0)),
        Spoiled("layer_range", "num_layers", "layer", _argument("layer", NUM_LAYERS), _argument("layer", 1)),
        Spoiled("fits_i32", "layer-wraps", "layer", _argument("layer", U32 + 1)),
        Spoiled("integer", "layer-float", "layer", _argument("layer", 1.0), _argument("layer", np.int64(1))),
        Spoiled("integer", "layer-none", "layer", _argument("layer", None)),
        Spoiled("pool_not_empty", "no-elements", "pool", _pool_elems(lambda stride: 0)),
        Spoiled("pool_not_empty", "one-element-short", "pool", _pool_elems(lambda stride: stride - 1)),
        Spoiled("pool_whole_pages", "page-and-one-element", "pool", _pool_elems(lambda stride: stride + 1)),
        Spoiled(
            "pool_whole_pages",
            "last-element-missing",
            "pool",
            _pool_elems(lambda stride: NUM_PAGES * stride - 1),
            _pool_elems(lambda stride: NUM_PAGES * stride),
        ),
        Spoiled("argument_type", "pool-none", "pool", replaced("pool", None)),
        Spoiled("argument_type", "pool-bare-array", "pool", _bare_pool),
        Spoiled("argument_type", "layout-none", "pool.layout", _layout(None)),
        Spoiled("argument_type", "layout-dict", "pool.layout", _layout({"page_size": PAGE_SIZE})),
    ]
    return cases


def _folded_cases(entry: Entry) -> list[Spoiled]:
    """Folded rows of K with what belongs to split ones, and the other way round; the twin is a folded request."""
    folded = folded_k_dim(entry.head_dim)
    cases = [
        Spoiled("kv_block_len", "folded-of-split-rows", "layout.kv_block_len", _set("k_dim", folded), _folded),
        Spoiled("k_dim", "folded-one-pair-more", "layout.k_dim", _then(_folded, _set("k_dim", folded + 2)), _folded),
        Spoiled("kv_block_len", "split-of-folded-rows", "layout.kv_block_len",
                _then(_folded, _set("k_dim", entry.head_dim)), _folded),
        Spoiled("layer_stride", "folded-of-split-rows", "layout.layer_stride", _split_layer_stride, _folded),
        Spoiled("pool_whole_pages", "folded-last-element-missing", "pool",
                _then(_folded, _pool_elems(lambda stride: NUM_PAGES * stride - 1)), _folded),
    ]  # fmt: skip
    if entry.is_prep:
        cases.append(Spoiled("folded_rotation", "half-the-head", "rotary_dim", _then(_folded, _half_the_head), _folded))
    return cases


def _then(*changes: Change) -> Change:
    def change(draft: Draft) -> None:
        for one in changes:
            one(draft)

    return change


def _split_layer_stride(draft: Draft) -> None:
    """Folded rows in layers that lie as far apart as those of split rows."""
    layer_stride = draft.layout.layer_stride
    _folded(draft)
    draft.layout = replace(draft.layout, layer_stride=layer_stride)


def _half_the_head(draft: Draft) -> None:
    """Pairs (d, d + head_dim / 4), and tables for them."""
    rotary_dim = draft.bench.entry.head_dim // 2
    shape = (draft.rope.cos.shape[0], rotary_dim)
    draft.arguments["rotary_dim"] = rotary_dim
    draft.rope = replace(draft.rope, cos=draft.rope.cos.view(shape), sin=draft.rope.sin.view(shape))


def _product_cases(entry: Entry) -> list[Spoiled]:
    """Products past the width that a kernel keeps them in."""
    cases = [
        Spoiled("fits_i64", "page_stride", "layout.page_stride", _derived(I32 - 1, I32 - 1)),
        Spoiled("fits_i64", "pool-bytes", "pool bytes", _huge_pool),
        Spoiled("fits_i32", "pool-pages", "pool pages", _claimed_pool(lambda stride: I32 * stride)),
        # What a 32-bit product leaves of the right value.
        Spoiled("kv_block_len", "product-wraps-i32", "layout.kv_block_len", _wrapped("kv_block_len", I32, signed=True)),
        Spoiled("kv_block_len", "product-wraps-u32", "layout.kv_block_len", _wrapped("kv_block_len", U32)),
        Spoiled("layer_stride", "product-wraps-u32", "layout.layer_stride", _wrapped("layer_stride", U32)),
        Spoiled("page_stride", "product-wraps-i32", "layout.page_stride", _wrapped("page_stride", I32, signed=True)),
        Spoiled("page_stride", "product-wraps-u32", "layout.page_stride", _wrapped("page_stride", U32)),
    ]
    if entry.is_prep:
        cases += [
            Spoiled("fits_i64", "kv_block_len", "layout.kv_block_len", _heads_and_page(I32 - 1, I32 - 1)),
            # page_size * heads * head_dim is just below 2^63, its double is not.
            Spoiled("fits_i64", "layer_stride", "layout.layer_stride", _heads_and_page(U32 // entry.head_dim, I32 - 1)),
        ]
    return cases


def _set(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.layout = replace(draft.layout, **{name: value})

    return change


def _step(name: str, elems: int) -> Change:
    def change(draft: Draft) -> None:
        draft.layout = replace(draft.layout, **{name: getattr(draft.layout, name) + elems})

    return change


def _as_float(name: str) -> Change:
    def change(draft: Draft) -> None:
        draft.layout = replace(draft.layout, **{name: float(getattr(draft.layout, name))})

    return change


def _numpy_layout(draft: Draft) -> None:
    """NumPy integers are integers; their products must not wrap in their own 32 bits."""
    fields: dict[str, Any] = {name: np.int32(getattr(draft.layout, name)) for name in KvLayout.__slots__}
    draft.layout = KvLayout(**fields)


def _more_heads(draft: Draft) -> None:
    layout = draft.layout
    draft.layout = KvLayout.derive(
        page_size=layout.page_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads + 1,
        head_dim=layout.head_dim,
    )


def _folded(draft: Draft) -> None:
    """Folded rows, a layout that is right in itself, and a pool of as many pages of them."""
    layout = draft.layout
    draft.layout = KvLayout.derive(
        page_size=layout.page_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        k_dim=layout.head_dim // 4,
    )
    draft.pool_data = draft.pool_data.view((draft.layout.pool_elems(NUM_PAGES),))


def _derived(page_size: int, num_layers: int) -> Change:
    """A layout that is right in itself, in Python's integers."""

    def change(draft: Draft) -> None:
        draft.layout = KvLayout.derive(
            page_size=page_size,
            num_layers=num_layers,
            num_kv_heads=draft.layout.num_kv_heads,
            head_dim=draft.layout.head_dim,
        )

    return change


def _wrapped(name: str, modulus: int, *, signed: bool = False) -> Change:
    """A layout that is right but for one stride, which a product of 32 bits has left at 8 slots' worth, or negative.

    ``modulus`` is what the true value passes: 2^31 where it is read as signed, 2^32 where as unsigned.
    """

    def change(draft: Draft) -> None:
        per_slot = getattr(draft.layout, name) // draft.layout.page_size
        _derived(modulus // per_slot + 8, NUM_LAYERS)(draft)
        cut = getattr(draft.layout, name) % U32
        draft.layout = replace(draft.layout, **{name: cut - U32 if signed else cut})

    return change


def _heads_and_page(num_kv_heads: int, page_size: int) -> Change:
    """A request of that many heads, and the layout that goes with it."""

    def change(draft: Draft) -> None:
        rows, head_dim = draft.bench.tokens, draft.bench.entry.head_dim
        for name in ("q", "k", "v", "q_out", "k_out"):
            if name in draft.arguments:
                draft.arguments[name] = draft.claimed((rows, num_kv_heads, head_dim))
        draft.layout = KvLayout.derive(
            page_size=page_size, num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads, head_dim=head_dim
        )

    return change


def _claimed_pool(elems: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.pool_data = draft.claimed((elems(draft.layout.page_stride),))

    return change


def _huge_pool(draft: Draft) -> None:
    _derived(2**25, NUM_LAYERS)(draft)
    pages = 2**62 // draft.layout.page_stride + 1
    draft.pool_data = draft.claimed((pages * draft.layout.page_stride,))


def _pool_elems(elems: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.pool_data = draft.pool_data.view((elems(draft.layout.page_stride),))

    return change


@lru_cache(maxsize=None, typed=True)  # one twin for all cases that share it
def _argument(name: str, value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments[name] = value

    return change


def _bare_pool(draft: Draft) -> None:
    draft.replaced["pool"] = draft.pool_data


def _layout(value: Any) -> Change:
    def change(draft: Draft) -> None:
        draft.layout = value

    return change
