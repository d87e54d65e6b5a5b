"""What ``g4kv layout --pool`` shows: the axes, two of them as a picture, numbers and findings; the same for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4kv_cli.model.kv_layout import BF16_BYTES, INT32_MAX, Coordinate
from g4kv_cli.model.pool_layout import MOST_OFFSETS, PoolLayout
from g4kv_cli.model.pool_order import POOL_AXES
from g4kv_cli.report.layout_numbers import size_text
from g4kv_cli.report.layout_picture import framed_rows, shown_indices
from g4kv_cli.report.terminal import print_line, print_table, terminal_width

_LEFT_OUT = "..."


def write_pool(console: Console, layout: PoolLayout) -> None:
    """The whole of it."""
    stated = layout.description
    apart = ", K and V apart: two halves of one pool" if stated.is_apart else ""
    order = " ".join(axis for axis in stated.order.axes if axis != "kv" or not stated.is_apart)
    print_line(console, f"{layout.geometry.name}  ", f"{order}{apart} ({stated.source})", label_style="bold")
    table = _table_of_axes()
    for axis, extent, stride, gap in _axes(layout):
        nbytes = stride * stated.element_bytes
        shown = "any" if axis == "page" and not layout.has_known_size else str(extent)
        table.add_row(f"  {axis}", shown, str(stride), str(nbytes), str(gap) if gap else "")
    print_table(console, table)
    console.print()
    width = terminal_width(console)
    for line in _picture(layout, ascii_only=console.options.ascii_only):
        if width is None or len(line) <= width:
            console.print(Text(line))
        else:
            print_line(console, "", line)
    numbers = pool_json(layout)
    print_line(console, "", f"rows begin at multiples of {numbers['row_alignment_bytes']} bytes")
    if layout.has_known_size:
        size = f"{size_text(numbers['pool_bytes'])}, {numbers['gap_elems']} elements in gaps"
        print_line(console, "", f"{layout.extents['page']} pages: {size}")
    for name in ("int32", "uint32"):
        page = numbers[f"first_page_past_{name}"]
        words = "no element offset leaves" if page is None else f"from page {page} on element offsets leave"
        print_line(console, "", f"{words} {name}")
    for finding in numbers["findings"]:
        print_line(console, "wrong    ", finding, label_style="bold red")
    console.print()


def write_part(console: Console, part: dict[str, Any]) -> None:
    """One allocation of a pool in pieces of axes, or of K's and V's apart."""
    print_line(
        console, f"{part['geometry']}  ", f"{part['part']}: {' '.join(part['axes'])} ({part['source']})",
        label_style="bold",
    )  # fmt: skip
    table, end = _table_of_axes(), 1
    rows = []
    for axis, extent, stride in reversed(list(zip(part["axes"], part["extents"], part["strides"], strict=True))):
        rows.append((axis, extent, stride, max(0, stride - end)))
        end += (extent - 1) * stride
    for axis, extent, stride, gap in reversed(rows):
        table.add_row(f"  {axis}", str(extent), str(stride), str(stride * BF16_BYTES), str(gap) if gap else "")
    print_table(console, table)
    print_line(console, "", f"{size_text(part['pool_bytes'])}")
    for finding in part["findings"]:
        print_line(console, "wrong    ", finding, label_style="bold red")
    console.print()


def write_part_place(console: Console, name: str, where: Coordinate, offset: int) -> None:
    """An element and its offset in one of several allocations."""
    print_line(console, "", f"{_place(where)}: in {name} {_offset(offset, BF16_BYTES)}")


def write_place(console: Console, layout: PoolLayout, where: Coordinate) -> None:
    """An element and its offset."""
    index = {axis: getattr(where, axis) for axis in POOL_AXES} | {"kv": "kv".index(where.kv)}
    print_line(console, "", f"{_place(where)}: {_offset(layout.offset(index), layout.description.element_bytes)}")


def _place(where: Coordinate) -> str:
    return ", ".join(f"{axis} {where.kv.upper() if axis == 'kv' else getattr(where, axis)}" for axis in POOL_AXES)


def _offset(elements: int, element_bytes: int) -> str:
    fits = [name for name in MOST_OFFSETS if elements <= MOST_OFFSETS[name]]
    return f"element offset {elements}, byte offset {elements * element_bytes} (fits {fits[0]})"


def _table_of_axes() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("  axis", "extent", "stride", "bytes", "gap"):
        table.add_column(name, justify="left" if name == "  axis" else "right", no_wrap=True)
    return table


def pool_json(layout: PoolLayout) -> dict[str, Any]:
    """The numbers, in elements and bytes."""
    return {
        "geometry": layout.geometry.name,
        "source": layout.description.source,
        "axes": list(layout.extents),
        "extents": layout.extents | ({} if layout.has_known_size else {"page": None}),
        "strides": layout.strides,
        "element_bytes": layout.description.element_bytes,
        "row_alignment_bytes": layout.row_alignment_bytes,
        "pool_bytes": layout.pool_elems * layout.description.element_bytes if layout.has_known_size else None,
        "gap_elems": layout.pool_elems - layout.used_elems if layout.has_known_size else None,
        "first_page_past_int32": layout.first_page_past(INT32_MAX),
        "first_page_past_uint32": layout.first_page_past(MOST_OFFSETS["uint32"]),
        "findings": layout.findings(),
    }


def _axes(layout: PoolLayout) -> list[tuple[str, int, int, int]]:
    """(axis, extent, stride, elements that one step leaves out), outermost first."""
    rows, end = [], 1
    for axis in sorted(layout.extents, key=lambda axis: layout.strides[axis]):
        extent, stride = layout.extents[axis], layout.strides[axis]
        rows.append((axis, extent, stride, max(0, stride - end)))
        end = max(end, 1 + sum((layout.extents[one] - 1) * layout.strides[one] for one, *_ in rows))
    return rows[::-1]


def _picture(layout: PoolLayout, *, ascii_only: bool) -> list[str]:
    """The two innermost axes of rows as a grid, and where the next index of each outer one begins."""
    *outer, down, across = (axis for axis in layout.description.order.axes if axis != "dim")
    cells = []
    for y in shown_indices(layout.extents[down], at_most=4):
        if y is None:
            cells.append([_LEFT_OUT, f"one every {layout.strides[down]}"])
            cells[-1] += [""] * (len(cells[0]) - 2)
            continue
        row = [_name(down, y)]
        for x in shown_indices(layout.extents[across], at_most=3):
            at = y * layout.strides[down] + (x or 0) * layout.strides[across]
            row.append(_LEFT_OUT if x is None else f"{_name(across, x)}  +{at}")
        cells.append(row)
    lines = [f"rows of {layout.extents['dim']} elements; +n: elements from the first", *framed_rows(cells, ascii_only)]
    steps = [f"{_name(axis, 1)} at +{layout.strides[axis]}" for axis in reversed(outer) if layout.extents[axis] > 1]
    return [*lines, "the same again: " + ", ".join(steps)] if steps else lines


def _name(axis: str, index: int) -> str:
    return "KV"[index] if axis == "kv" else f"{axis} {index}"
