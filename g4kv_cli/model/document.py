"""Files that people write, TOML or JSON, read field by field: an error names the file, the place and what is wrong.

A place is a line and a key in TOML (``my.toml:7: local.window``), a path in JSON (``my.json: $.requests[2].kv_len``).
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

from g4kv_cli.errors import UsageError
from g4kv_cli.model.toml_lines import Path, line_of, lines_of, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Any = TypeVar("_Any", bound="Table")


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its bytes and values, and the lines of its keys (JSON has none). ``what`` names its root."""

    file: FilePath
    values: Mapping[str, Any]
    lines: Mapping[Path, int] | None
    what: str = "manifest"
    data: bytes = b""

    def error(self, path: Path, words: str) -> UsageError:
        """An error at a key: file, place, what is wrong."""
        if self.lines is None:
            return UsageError(f"{self.file}: {shown(('$', *path))}: {words}")
        return UsageError(f"{self.file}:{line_of(path, dict(self.lines))}: {shown(path) or self.what}: {words}")


def read_toml(file: FilePath, what: str) -> Document:
    """Parse a TOML file, a ``what``. Raises UsageError if it cannot be read or is none."""
    data = _bytes_of(file, what, ".toml")
    try:
        text = data.decode()
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is no TOML: {error}; name a {what}") from error
    return Document(file, values, lines_of(text), what, data)


def read_json(file: FilePath, what: str) -> Document:
    """Parse a JSON file whose root is an object, a ``what``. Raises UsageError if it cannot be read or is none."""
    data = _bytes_of(file, what, ".json")
    try:
        values = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON: {error}; name a {what}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file}: $: must be an object, got {type_words(values)}; name a {what}")
    return Document(file, values, None, what, data)


def _bytes_of(file: FilePath, what: str, ending: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{what} {file} cannot be read: {error.strerror}; name a {ending} file") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice would be silently the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


class Table:
    """One table (object) of a document, read field by field; ``finish`` refuses what nobody read."""

    def __init__(self, document: Document, values: Any, path: Path = ()) -> None:
        if not isinstance(values, Mapping):
            is_json = document.lines is None
            words = f"must be {'an object' if is_json else 'a table'}, got {type_words(values, is_json=is_json)}"
            raise document.error(path, words)
        self.document = document
        self.path = path
        self._values = values
        self._read: set[str] = set()
        self._asked: set[str] = set()  # by "in": a field too, where it is read only if it is there

    def error(self, key: str, words: str) -> UsageError:
        """An error at one of the table's keys, or at the table itself for an empty key."""
        return self.document.error((*self.path, key) if key else self.path, words)

    @property
    def line(self) -> int:
        """Where it stands in a TOML file."""
        return line_of(self.path, dict(self.document.lines or {}))

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return key in self._values

    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(self._values)

    def text(self, key: str, default: str | None = None, choices: tuple[str, ...] = ()) -> str:
        """A string; without a default it has to be there."""
        value = self._value(key, default, str, "a string")
        if choices and value not in choices:
            raise self.error(key, f"{value!r} is not one of {', '.join(choices)}{near(value, choices)}")
        if default is None and not value:
            raise self.error(key, "must not be empty")
        return str(value)

    def flag(self, key: str, default: bool | None) -> bool:
        """true or false; without a default it has to be there."""
        return bool(self._value(key, default, bool, "true or false"))

    def integer(self, key: str, default: int | None = None, *, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``; without a default it has to be there."""
        value = int(self._value(key, default, int, "an integer"))
        if not low <= value <= high:
            raise self.error(key, f"must be from {low} to {high}, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; without a default it has to be there."""
        value = float(self._value(key, default, (int, float), "a number"))
        if not (math.isfinite(value) and value > 0):
            raise self.error(key, f"must be a finite number above 0, got {value:g}")
        return value

    def texts(self, key: str, default: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A list of strings."""
        found = self._value(key, list(default), list, "a list of strings")
        for item in found:
            if not isinstance(item, str) or not item:
                raise self.error(key, f"must be a list of strings, has {item!r}")
            if choices and item not in choices:
                raise self.error(key, f"{item!r} is not one of {', '.join(choices)}{near(item, choices)}")
        return tuple(found)

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers from ``low`` to ``high``; an error names the element."""
        for at, item in enumerate(found := self._value(key, [], list, "a list of integers")):
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                got = item if isinstance(item, int | float | str) else self._kind(item)
                raise self.document.error(
                    (*self.path, key, at), f"must be an integer from {low} to {high}, got {got!r}"
                )
        return tuple(found)

    def items(self, key: str) -> list[Any]:
        """A list of anything."""
        return list(self._value(key, [], list, "a list"))

    def value(self, key: str) -> Any:
        """Whatever stands there; None where nothing does."""
        self._read.add(key)
        return self._values.get(key)

    def table(self: _Any, key: str) -> _Any | None:
        """A table of this table."""
        self._read.add(key)
        if key not in self._values:
            return None
        return type(self)(self.document, self._values[key], (*self.path, key))

    def tables(self: _Any, key: str) -> list[_Any]:
        """An array of tables."""
        words = f"an array of tables ([[{key}]])" if self.document.lines is not None else "a list of objects"
        found = self._value(key, [], list, words)
        return [type(self)(self.document, item, (*self.path, key, index)) for index, item in enumerate(found)]

    def mapping(self: _Any, key: str, read: Callable[[_Any, str], Any]) -> dict[str, Any]:
        """A table of like things, each read by ``read(table, name)``."""
        inner = self.table(key)
        if inner is None:
            return {}
        return {name: read(inner, name) for name in inner.keys()}  # noqa: SIM118 a Table is no mapping

    def finish(self) -> None:
        """Raises UsageError for a key that nothing has read, with the nearest known one."""
        for key in self._values:
            if key not in self._read:
                known = sorted(self._read | self._asked)
                raise self.error(key, f"is no field here{near(key, known)}; the fields are {', '.join(known)}")

    def _kind(self, value: Any) -> str:
        return type_words(value, is_json=self.document.lines is None)

    def _value(self, key: str, default: Any, kinds: Any, words: str) -> Any:
        self._read.add(key)
        if key not in self._values:
            if default is None:
                raise self.error("", f"lacks {key!r} ({words}){near(key, set(self._values) - self._read)}")
            return default
        value = self._values[key]
        wrong = isinstance(value, bool) and kinds is not bool
        if wrong or not isinstance(value, kinds):
            raise self.error(key, f"must be {words}, got {self._kind(value)}")
        return value


def type_words(value: Any, *, is_json: bool = False) -> str:
    """What kind of value it is, as a reader of TOML or JSON would say."""
    names = {
        dict: "an object" if is_json else "a table",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "an integer",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def near(name: str, among: Any) -> str:
    """`` (nearest: ...)`` where one of them is like the name."""
    close = difflib.get_close_matches(name, list(among), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""
