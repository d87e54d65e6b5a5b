"""A manifest's tables: those of any document (model/document.py), with expressions in them."""

from __future__ import annotations

from typing import Any

from g4kv_cli.model import document
from g4kv_cli.providers.expression import Expression, ExpressionError


class Table(document.Table):
    """One table of a manifest."""

    def expression(self, key: str, default: str | None = None) -> Expression:
        """An expression: a string or a number."""
        value = self._value(key, default, (str, int, float), "an expression (a string or a number)")
        return self.parsed(key, value)

    def parsed(self, key: str, value: Any) -> Expression:
        """A value of this key as an expression."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            words = "must be an expression (a string or a number)"
            raise self.error(key, f"{words}, got {document.type_words(value)}")
        try:
            return Expression.parse(str(value))
        except ExpressionError as error:
            raise self.error(key, str(error)) from error
