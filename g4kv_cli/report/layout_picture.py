"""The picture of one page in characters: layers from top to bottom, K left and V right, then one block."""

from __future__ import annotations

from g4kv_cli.model.kv_format import FOLDED
from g4kv_cli.model.kv_layout import KvKind, KvLayout

_LABEL_WIDTH = 10
_SHORTEST_CELL = 22
_TO_ASCII = str.maketrans("┌┬┐├┼┤└┴┘─│", "+++++++++-|")
_LEFT_OUT = "..."


def page_picture(layout: KvLayout, *, ascii_only: bool = False, width: int | None = None) -> list[str]:
    """The lines of the picture, about 80 columns wide; without the frames that ``width`` columns have no room for.
    Offsets (+n) are elements."""
    lines = [
        f"one page, {layout.page_stride} elements; +n: elements from the page's first",
        *_fitting(framed_rows(_layer_rows(layout)), width),
        *_block_pictures(layout, width),
        f"pool[page][layer][K, V][slot][head][dim]; page p begins at element p x {layout.page_stride}",
    ]
    return [line.translate(_TO_ASCII) for line in lines] if ascii_only else lines


def _block_pictures(layout: KvLayout, width: int | None) -> list[str]:
    """A K and a V block alike, or one after the other where their rows differ."""
    counted = "+n: elements from the block's first"
    blocks: dict[KvKind, str] = {"v": f"one block (K or V of a layer), {layout.v_block_len} elements; {counted}"}
    if layout.kv_format == FOLDED:
        blocks = {
            "k": f"one K block, {layout.kv_block_len} elements, {layout.k_dim} a head; {counted}",
            "v": f"one V block, {layout.v_block_len} elements, {layout.head_dim} a head; {counted}",
        }
    return [
        line for kv, title in blocks.items() for line in (title, *_fitting(framed_rows(_slot_rows(layout, kv)), width))
    ]


def _fitting(picture: list[str], width: int | None) -> list[str]:
    needed = max(map(len, picture))
    if width is None or needed <= width:
        return picture
    return [f"  (its picture takes {needed} columns)"]


def _layer_rows(layout: KvLayout) -> list[list[str]]:
    """Cells of each row, the label first."""
    rows = []
    for layer in shown_indices(layout.num_layers, at_most=4):
        if layer is None:
            rows.append([_LEFT_OUT, f"layers 2 to {layout.num_layers - 2}", f"one every {layout.layer_stride}"])
            continue
        k_offset = layer * layout.layer_stride
        rows.append([f"layer {layer}", f"K  +{k_offset}", f"V  +{k_offset + layout.kv_block_len}"])
    return rows


def _slot_rows(layout: KvLayout, kv: KvKind) -> list[list[str]]:
    slot_stride, row_dim = layout.slot_stride(kv), layout.row_dim(kv)
    heads = shown_indices(layout.num_kv_heads, at_most=3)
    rows = []
    for slot in shown_indices(layout.page_size, at_most=4):
        if slot is None:
            rows.append([_LEFT_OUT, f"one every {slot_stride}", *([""] * (len(heads) - 1))])
            continue
        cells = [
            _LEFT_OUT if head is None else f"head {head}  +{slot * slot_stride + head * row_dim}" for head in heads
        ]
        rows.append([f"slot {slot}", *cells])
    return rows


def shown_indices(extent: int, at_most: int) -> list[int | None]:
    """Indices to draw; None stands for those left out between the first two and the last."""
    if extent <= at_most:
        return list(range(extent))
    return [0, 1, None, extent - 1]


def framed_rows(rows: list[list[str]], ascii_only: bool = False) -> list[str]:
    """Cells in frames; the first of each row is its label, in front."""
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    shortest = _SHORTEST_CELL if len(columns) < 3 else 0
    widths = [max(shortest, *(len(cell) for cell in column)) + 2 for column in columns]

    def rule(left: str, middle: str, right: str) -> str:
        return " " * (_LABEL_WIDTH + 2) + left + middle.join("─" * width for width in widths) + right

    lines = [rule("┌", "┬", "┐")]
    for index, (label, *cells) in enumerate(rows):
        if index:
            lines.append(rule("├", "┼", "┤"))
        padded = (f" {cell}".ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{label:>{_LABEL_WIDTH}}  │{'│'.join(padded)}│")
    lines.append(rule("└", "┴", "┘"))
    return [line.translate(_TO_ASCII) for line in lines] if ascii_only else lines
