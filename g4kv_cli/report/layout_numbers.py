"""The numbers of a layout with their units: the text and the JSON of ``g4kv layout`` are made from these."""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.records.run import Mismatch

_BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, slots=True)
class ShownLayout:
    """One layout that was asked for; ``num_pages`` is None where nobody said how large the pool is."""

    geometry: Geometry
    layout: KvLayout
    num_pages: int | None


@dataclass(frozen=True, slots=True)
class LayoutNumber:
    """One derived number with its unit (empty for a plain count or id) and what it is."""

    name: str
    value: int
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class ProbeLine:
    """How one set of coordinates came out."""

    subject: str
    coordinates: str
    total: int
    disagreeing: int
    mismatches: tuple[Mismatch, ...]


def layout_numbers(shown: ShownLayout) -> list[LayoutNumber]:
    """Every number of a layout, extents first."""
    geometry, layout = shown.geometry, shown.layout
    past_int32, past_uint32 = layout.first_page_past(31), layout.first_page_past(32)
    numbers = [
        LayoutNumber("page_size", layout.page_size, "tokens", "token slots of a page"),
        LayoutNumber("num_layers", layout.num_layers, "layers", _layers_meaning(geometry, layout)),
        LayoutNumber("num_kv_heads", layout.num_kv_heads, "heads", "KV heads of a slot"),
        *_rows_and_blocks(layout),
        LayoutNumber("layer_stride", layout.layer_stride, "elements", "one layer: K block, then V block"),
        LayoutNumber("page_stride", layout.page_stride, "elements", "one page: all layers"),
        LayoutNumber("page_bytes", layout.page_bytes, "bytes", f"one page: {size_text(layout.page_bytes)}"),
        LayoutNumber(
            "bytes_per_token",
            layout.bytes_per_token,
            "bytes",
            f"K and V, all layers: {size_text(layout.bytes_per_token)}",
        ),
        LayoutNumber("first_page_past_int32", past_int32, "page id", "its element offset leaves int32"),
        LayoutNumber("first_page_past_uint32", past_uint32, "page id", "its element offset leaves uint32"),
    ]
    if shown.num_pages is not None:
        pool_bytes = layout.pool_bytes(shown.num_pages)
        numbers += [
            LayoutNumber("num_pages", shown.num_pages, "pages", "the pool"),
            LayoutNumber("pool_elems", layout.pool_elems(shown.num_pages), "elements", "the pool"),
            LayoutNumber("pool_bytes", pool_bytes, "bytes", f"the pool: {size_text(pool_bytes)}"),
        ]
    return numbers


def _rows_and_blocks(layout: KvLayout) -> list[LayoutNumber]:
    element_bytes = LayoutNumber("element_bytes", layout.element_bytes, "bytes", "bf16")
    if layout.kv_format == SPLIT:
        return [
            LayoutNumber("head_dim", layout.head_dim, "elements", "one head row"),
            element_bytes,
            LayoutNumber("slot_stride", layout.slot_stride("v"), "elements", "one slot: all its KV heads"),
            LayoutNumber("kv_block_len", layout.kv_block_len, "elements", "one K or one V block"),
        ]
    pairs, half = layout.k_dim // 2, layout.head_dim // 2
    turned = f"columns 0 to {pairs - 1} and {half} to {half + pairs - 1}"
    return [
        LayoutNumber("head_dim", layout.head_dim, "elements", "one head row of V"),
        LayoutNumber("k_dim", layout.k_dim, "elements", f"one head row of K: {turned}"),
        element_bytes,
        LayoutNumber("k_slot_stride", layout.slot_stride("k"), "elements", "one slot of K: all its KV heads"),
        LayoutNumber("v_slot_stride", layout.slot_stride("v"), "elements", "one slot of V"),
        LayoutNumber("k_block_len", layout.kv_block_len, "elements", "one K block"),
        LayoutNumber("v_block_len", layout.v_block_len, "elements", "one V block"),
    ]


def size_text(size_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the value at 1 or more: ``5 MiB``, ``1.27 GiB``."""
    power = 0
    while power + 1 < len(_BINARY_UNITS) and size_bytes >= 1 << 10 * (power + 1):
        power += 1
    number = f"{size_bytes / (1 << 10 * power):.2f}".rstrip("0").rstrip(".")
    return f"{number} {_BINARY_UNITS[power]}"


def _layers_meaning(geometry: Geometry, layout: KvLayout) -> str:
    if layout.num_layers != geometry.num_kv_layers:
        return f"as asked for; own K/V: {geometry.num_kv_layers}"
    if geometry.num_shared_kv_layers:
        return f"of {geometry.num_layers}; {geometry.num_shared_kv_layers} read an earlier one's"
    return "of a page: all of the family"
