"""Lines and tables on a terminal of any width. In a file or a pipe every line is whole, however long.

A table that is wider than the terminal is stacked: a row's key on a line, then its values with their names, as many on
a line as fit. Nothing is cut. Commands to copy are never broken: the terminal wraps them itself.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

FILE_WIDTH = 150
"""Of tables with running text in a file or a pipe."""
NARROWEST_TEXT = 24
"""A column of running text gets this much beside the others, or the table is stacked."""
_GAP = 2


def results_console() -> Console:
    """The console for results: standard output, without colors that nobody asked for."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def terminal_width(console: Console) -> int | None:
    """Columns to keep to; None in a file or a pipe, unless $COLUMNS says some."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def print_line(console: Console, label: str, text: str, style: str = "", label_style: str = "dim") -> None:
    """A label and text after it; on a terminal wrapped between words, below its first letter."""
    width = terminal_width(console)
    lines = [text] if width is None else _wrapped(text, width - len(label)) or [""]
    for index, line in enumerate(lines):
        console.print(Text.assemble((label if index == 0 else " " * len(label), label_style), (line, style)))


def print_entry(console: Console, mark: Text, name: str, rest: str, name_width: int) -> None:
    """A mark, a name and what there is to say of it: on one line where it fits, else on two."""
    width = terminal_width(console)
    if width is None or len(mark) + name_width + 1 + len(rest) <= width:
        console.print(mark + Text(f"{name:<{name_width}} {rest}"))
        return
    room = width - len(mark) - len(name)
    if room > len(rest):
        console.print(mark + Text(f"{name}{rest:>{room}}"))
        return
    console.print(mark + Text(name))
    print_line(console, " " * len(mark), rest)


def print_table(console: Console, table: Table, keys: int = 1) -> None:
    """The table, stacked where the terminal is too narrow; its first ``keys`` columns say what a row is."""
    width = terminal_width(console)
    if width is None:
        console.width = max(FILE_WIDTH, _needed(table))
        console.print(table)
    elif _needed(table) <= width:
        console.print(table)
    else:
        _print_stacked(console, table, keys, width)


def blocks(widths: Sequence[int], key_width: int, console: Console) -> list[range]:
    """Columns of these widths behind a key column, in as many blocks as the terminal needs; in a file, one."""
    width = terminal_width(console)
    if width is None:
        return [range(len(widths))]
    found, begin, used = [], 0, key_width
    for index, one in enumerate(widths):
        if index > begin and used + _GAP + one > width:
            found.append(range(begin, index))
            begin, used = index, key_width
        used += _GAP + one
    return [*found, range(begin, len(widths))]


def _needed(table: Table) -> int:
    """Columns that the table takes at the least with every cell readable."""
    total = 0
    for column in table.columns:
        natural = max(len(text) for text in (_plain(column.header), *_lines_of(column)))
        total += (natural if column.no_wrap else min(natural, NARROWEST_TEXT)) + _GAP
    return total - _GAP if table.columns else 0


def _print_stacked(console: Console, table: Table, keys: int, width: int) -> None:
    if table.title:
        console.print(Text(str(table.title), style="bold"))
    names = [_plain(column.header) if table.show_header else "" for column in table.columns]
    cells = [list(column.cells) for column in table.columns]
    for index, row in enumerate(table.rows):
        texts = [" ".join(_plain(column[index]).split()) for column in cells]
        style = row.style or ""
        for depth, key in enumerate(texts[:keys]):
            if key:
                console.print(Text("  " * depth + key, style=style or "bold"))
        items = [f"{name} {text}".strip() for name, text in zip(names[keys:], texts[keys:], strict=True) if text]
        indent = "  " * keys
        for line in _flowed(items, width - len(indent)):
            console.print(Text(indent + line, style=style))


def _flowed(items: Iterable[str], width: int) -> list[str]:
    """Items two spaces apart, as many on a line as fit; one that is longer than a line is broken between words."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + _GAP + len(item) <= width:
            lines[-1] += " " * _GAP + item
        else:
            lines += _wrapped(item, width)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 8), break_long_words=False, break_on_hyphens=False)


def _lines_of(column: Column) -> Iterable[str]:
    for cell in column.cells:
        yield from _plain(cell).splitlines() or [""]


def _plain(value: object) -> str:
    return value.plain if isinstance(value, Text) else str(value)
