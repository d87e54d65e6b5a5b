"""The arithmetic of manifests: numbers and arrays, no statements, no attributes, nothing that reaches outside.

The syntax is a subset of Python's expressions and is read by Python's own parser; what runs is this file's evaluator
over a fixed list of operators and functions. Values are integers, floats, booleans, tuples of them, and NumPy arrays,
on which operators act element by element.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from g4kv_cli.errors import G4kvError
from g4kv_cli.providers.functions import FUNCTIONS

MAX_TEXT = 2000
MAX_SHIFT = 62
"""Bits of the largest shift or power of two: offsets are 64-bit integers."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, among: item in among,
    ast.NotIn: lambda item, among: item not in among,
}


class ExpressionError(G4kvError):
    """An expression that cannot be read, or not be evaluated with the names at hand."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. ``names`` are the names it reads."""

    text: str
    tree: ast.expr = field(repr=False, compare=False)
    names: frozenset[str] = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Raises ExpressionError with the place and, for an unknown function, the nearest ones."""
        if len(text) > MAX_TEXT:
            raise ExpressionError(f"an expression of {len(text)} characters; at most {MAX_TEXT} are read")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            at = getattr(error, "offset", None)
            where = f" at column {at}" if at else ""
            raise ExpressionError(f"{text!r} is no expression{where}: {getattr(error, 'msg', error)}") from error
        names: set[str] = set()
        _check(tree, text, names)
        return cls(text, tree, frozenset(names))

    def evaluate(self, scope: Mapping[str, Any]) -> Any:
        """The value with these names. Raises ExpressionError for an unknown name and for arithmetic that fails."""
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                return _value(self.tree, scope)
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r}: {error}") from error
        except (ArithmeticError, ValueError, TypeError, IndexError) as error:
            raise ExpressionError(f"{self.text!r}: {type(error).__name__}: {error}") from error

    def integer(self, scope: Mapping[str, Any]) -> int:
        """The value as an integer. Raises ExpressionError if it is a fraction, an array or no number."""
        value = self.evaluate(scope)
        if isinstance(value, (bool, np.bool_)) or np.ndim(value) != 0 or int(value) != value:
            raise ExpressionError(f"{self.text!r} is {_shown(value)}, which is no integer")
        return int(value)

    def truth(self, scope: Mapping[str, Any]) -> bool:
        """The value as a condition. Raises ExpressionError if it is an array: say any(..) or all(..)."""
        value = self.evaluate(scope)
        if np.ndim(value) != 0:
            raise ExpressionError(f"{self.text!r} is an array, not a condition; use any(..) or all(..)")
        return bool(value)


def _check(node: ast.AST, text: str, names: set[str]) -> None:
    """Refuse every construct that the evaluator does not know, and collect the names."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name(id=name):
            names.add(name)
            return
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name not in FUNCTIONS:
                raise ExpressionError(f"{text!r}: no function {name!r}; {_near(name, FUNCTIONS)}")
            children: list[ast.AST] = [*arguments, *(keyword.value for keyword in keywords)]
            if any(keyword.arg is None for keyword in keywords):
                raise _refused(node, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            children = [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            children = [operand]
        case ast.BoolOp(values=values):
            children = [*values]
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            children = [left, *comparators]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            children = [test, body, orelse]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            children = [*items]
        case ast.Subscript(value=value, slice=index):
            children = [value, index]
        case ast.Slice(lower=lower, upper=upper, step=step):
            children = [part for part in (lower, upper, step) if part is not None]
        case _:
            raise _refused(node, text)
    for child in children:
        _check(child, text, names)


def _refused(node: ast.AST, text: str) -> ExpressionError:
    at = getattr(node, "col_offset", 0) + 1
    what = type(node).__name__
    return ExpressionError(
        f"{text!r}: {what} at column {at} is not part of the language; it has numbers, names, + - * / // % ** << >> & "
        "| ^ ~, comparisons, and/or/not, x if c else y, tuples, indices and the functions of docs/providers.md"
    )


def _value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in scope:
                raise ExpressionError(f"no name {name!r} here; {_near(name, scope)}")
            return scope[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            given = {str(keyword.arg): _value(keyword.value, scope) for keyword in keywords}
            return FUNCTIONS[name](*(_value(item, scope) for item in arguments), **given)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(left, scope), _value(right, scope)
            if isinstance(op, ast.Pow | ast.LShift) and np.max(np.abs(second), initial=0) > MAX_SHIFT:
                raise ExpressionError(f"a shift or power by {_shown(second)}; at most {MAX_SHIFT}")
            return _BINARY[type(op)](first, second)
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, scope))
        case ast.BoolOp(op=op, values=values):
            last: Any = isinstance(op, ast.And)
            for item in values:
                last = _value(item, scope)
                if bool(last) != isinstance(op, ast.And):
                    return last
            return last
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _compared(_value(left, scope), ops, [_value(item, scope) for item in comparators])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, scope) else orelse, scope)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_value(item, scope) for item in items)
        case ast.Subscript(value=value, slice=index):
            return _value(value, scope)[_value(index, scope)]
        case ast.Slice(lower=lower, upper=upper, step=step):
            return slice(*(None if part is None else _value(part, scope) for part in (lower, upper, step)))
        case _:
            raise ExpressionError(f"{type(node).__name__} cannot be evaluated")


def _compared(left: Any, ops: list[ast.cmpop], others: list[Any]) -> Any:
    result: Any = True
    for op, right in zip(ops, others, strict=True):
        step = _COMPARE[type(op)](left, right)
        result = step if result is True else np.logical_and(result, step)
        left = right
    return result


def _near(name: str, among: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(among), n=3, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else f"known: {', '.join(sorted(among))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
