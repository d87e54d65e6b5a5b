"""Line numbers of a TOML document's keys: tomllib gives values only, and an error must name the line."""

from __future__ import annotations

import re
from collections.abc import Sequence

Path = tuple[str | int, ...]
"""Keys and positions in arrays of tables, from the root: ("entry", 2, "launch", 0, "grid")."""

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]')


def lines_of(text: str) -> dict[Path, int]:
    """The line (from 1) of every table header and key of a valid document."""
    found: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    begins = _statement_lines(text)
    for number, line in enumerate(text.splitlines(), start=1):
        if number not in begins:
            continue
        header = _HEADER.match(line)
        if header is not None:
            table = _table(_keys(header[2]), header[1] == "[[", counts)
            found.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            found.setdefault((*table, *_keys(key[1])), number)
    return found


def line_of(path: Path, lines: dict[Path, int]) -> int:
    """The line of a path, or of the nearest table around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


def _keys(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _table(keys: Path, is_array: bool, counts: dict[Path, int]) -> Path:
    """The path of a header: a name that is an array of tables means its newest element."""
    path: Path = ()
    for index, key in enumerate(keys):
        path = (*path, key)
        if index == len(keys) - 1 and is_array:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _statement_lines(text: str) -> frozenset[int]:
    """Lines on which a header or key may begin: those not inside an array, an inline table or a long string."""
    begins, line, depth, quote = {1}, 1, 0, ""
    for token in _TOKEN.finditer(text):
        word = token[0]
        if quote:
            quote = "" if word == quote else quote
            line += word.count("\n")
            continue
        if word in ('"""', "'''"):
            quote = word
        elif word == "\n":
            line += 1
            if depth == 0:
                begins.add(line)
        elif word in "[{":
            depth += 1
        elif word in "]}":
            depth = max(0, depth - 1)
    return frozenset(begins)


def shown(path: Sequence[str | int]) -> str:
    """A path as a reader would say it: ``entry[2].launch[0].grid``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
