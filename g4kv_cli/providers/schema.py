"""What a manifest may say, as data: each table's fields with their types, and a reader that names the line at fault."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from g4kv_cli.errors import UsageError
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.locate import Path, line_of, shown


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its values, and the lines of its keys."""

    file: FilePath
    values: Mapping[str, Any]
    lines: Mapping[Path, int]

    def error(self, path: Path, words: str) -> UsageError:
        """An error at a key: file, line, key, what is wrong."""
        return UsageError(f"{self.file}:{line_of(path, dict(self.lines))}: {shown(path) or 'manifest'}: {words}")


class Table:
    """One table of a document, read field by field; ``finish`` refuses what nobody read."""

    def __init__(self, document: Document, values: Any, path: Path = ()) -> None:
        if not isinstance(values, Mapping):
            raise document.error(path, f"must be a table, got {_type(values)}")
        self.document = document
        self.path = path
        self._values = values
        self._read: set[str] = set()

    def error(self, key: str, words: str) -> UsageError:
        """An error at one of the table's keys, or at the table itself for an empty key."""
        return self.document.error((*self.path, key) if key else self.path, words)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(self._values)

    def text(self, key: str, default: str | None = None, choices: tuple[str, ...] = ()) -> str:
        """A string; without a default it has to be there."""
        value = self._value(key, default, str, "a string")
        if choices and value not in choices:
            raise self.error(key, f"{value!r} is not one of {', '.join(choices)}{_near(value, choices)}")
        if default is None and not value:
            raise self.error(key, "must not be empty")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        return bool(self._value(key, default, bool, "true or false"))

    def texts(self, key: str, default: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A list of strings."""
        found = self._value(key, list(default), list, "a list of strings")
        for item in found:
            if not isinstance(item, str) or not item:
                raise self.error(key, f"must be a list of strings, has {item!r}")
            if choices and item not in choices:
                raise self.error(key, f"{item!r} is not one of {', '.join(choices)}{_near(item, choices)}")
        return tuple(found)

    def items(self, key: str) -> list[Any]:
        """A list of anything."""
        return list(self._value(key, [], list, "a list"))

    def expression(self, key: str, default: str | None = None) -> Expression:
        """An expression: a string or a number."""
        value = self._value(key, default, (str, int, float), "an expression (a string or a number)")
        return self.parsed(key, value)

    def parsed(self, key: str, value: Any) -> Expression:
        """A value of this key as an expression."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(key, f"must be an expression (a string or a number), got {_type(value)}")
        try:
            return Expression.parse(str(value))
        except ExpressionError as error:
            raise self.error(key, str(error)) from error

    def table(self, key: str) -> Table | None:
        """A table of this table."""
        self._read.add(key)
        if key not in self._values:
            return None
        return Table(self.document, self._values[key], (*self.path, key))

    def tables(self, key: str) -> list[Table]:
        """An array of tables."""
        found = self._value(key, [], list, f"an array of tables ([[{key}]])")
        return [Table(self.document, item, (*self.path, key, index)) for index, item in enumerate(found)]

    def mapping(self, key: str, read: Callable[[Table, str], Any]) -> dict[str, Any]:
        """A table of like things, each read by ``read(table, name)``."""
        inner = self.table(key)
        if inner is None:
            return {}
        return {name: read(inner, name) for name in inner.keys()}  # noqa: SIM118 a Table is no mapping

    def finish(self) -> None:
        """Raises UsageError for a key that nothing has read, with the nearest known one."""
        for key in self._values:
            if key not in self._read:
                known = sorted(self._read)
                raise self.error(key, f"is no field here{_near(key, known)}; the fields are {', '.join(known)}")

    def _value(self, key: str, default: Any, kinds: Any, words: str) -> Any:
        self._read.add(key)
        if key not in self._values:
            if default is None:
                raise self.error("", f"lacks {key!r} ({words})")
            return default
        value = self._values[key]
        wrong = isinstance(value, bool) and kinds is not bool
        if wrong or not isinstance(value, kinds):
            raise self.error(key, f"must be {words}, got {_type(value)}")
        return value


def _type(value: Any) -> str:
    names = {
        dict: "a table",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "an integer",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)


def _near(name: str, among: Any) -> str:
    close = difflib.get_close_matches(name, list(among), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""
