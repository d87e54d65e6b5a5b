"""What the table of opcodes says about one opcode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPRESSION_NAMES: dict[str, Any] = {
    "np": np,
    "u32": np.uint32,
    "i32": np.int32,
    "u64": np.uint64,
    "i64": np.int64,
    "f32": np.float32,
}
"""The global names an ``Op.expression`` may use."""


@dataclass(frozen=True)
class Op:
    """One elementwise opcode.

    Kinds are ``"b16"``, ``"b32"``, ``"b64"`` (raw bits in ``uint16``, ``uint32``, ``uint64``), ``"pred"`` and
    ``"carry"`` (``bool``; carry is the hidden condition-code flag of ``add.cc`` and its kin, listed last).

    A source register wider than its operand kind is cut to it before the call. A destination register wider
    than the result kind receives the result zero-extended, or sign-extended if ``sign_extends`` (only ``cvt``
    may have either).

    results, operands: kinds, in the order PTX writes them.
    function: takes raw-bit arrays of shapes ``(1,)`` or ``(n,)`` and returns one array, or a tuple for two
        results. It may raise ValueError for operand values whose result on hardware is not known.
    expression: the same as ``function`` as Python source with ``{0}``, ``{1}``, ... for the operands, each
        used as an atom, and the names of ``EXPRESSION_NAMES``; None where a call is as good.
    """

    results: tuple[str, ...]
    operands: tuple[str, ...]
    function: Callable[..., Any]
    expression: str | None = None
    sign_extends: bool = False


def inline(result: str, operands: tuple[str, ...], expression: str) -> Op:
    """An Op whose function is compiled from its expression, so that the two cannot differ."""
    names = [f"operand_{index}" for index in range(len(operands))]
    source = f"lambda {', '.join(names)}: {expression.format(*names)}"
    return Op((result,), operands, eval(source, dict(EXPRESSION_NAMES)), f"({expression})")


def call(result: str, operands: tuple[str, ...], function: Callable[..., Any]) -> Op:
    """An Op of one result computed by a function only."""
    return Op((result,), operands, function)
