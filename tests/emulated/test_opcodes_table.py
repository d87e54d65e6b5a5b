"""The whole table: shapes, dtypes, broadcasting, the expressions, and opcodes that must not be there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE, EXPRESSION_NAMES, Op

DTYPES = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "pred": np.bool_, "carry": np.bool_}
THREADS = 6


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


def operand(kind: str, elems: int, random: np.random.Generator, small: bool) -> Any:
    if kind in {"pred", "carry"}:
        return random.random(elems) < 0.5
    bits = 8 if small else 8 * np.dtype(DTYPES[kind]).itemsize
    return random.integers(0, 2**bits, elems, dtype=np.uint64).astype(DTYPES[kind])


def outcome(op: Op, operands: list[Any]) -> tuple[Any, ...]:
    results = op.function(*operands)
    return results if isinstance(results, tuple) else (results,)


def uniform(name: str, op: Op) -> set[int]:
    """Operands that are immediates in PTX and so the same for all threads."""
    return {3} if name.startswith("lop3.") else set()


FAMILIES = sorted({name.split(".")[0] for name in ELEMENTWISE})


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_dtypes_and_broadcasting(family: str) -> None:
    for name in ELEMENTWISE:
        if name.split(".")[0] == family:
            check_one(name)


def check_one(name: str) -> None:
    op = ELEMENTWISE[name]
    random = np.random.default_rng(7)
    small = name.startswith(("bfe", "bfi"))
    full = [
        operand(kind, 1 if index in uniform(name, op) else THREADS, random, small)
        for index, kind in enumerate(op.operands)
    ]
    whole = outcome(op, full)
    assert len(whole) == len(op.results), name
    for kind, result in zip(op.results, whole, strict=True):
        assert result.dtype == DTYPES[kind], name
        assert result.shape == (THREADS,), name
    for thread in range(THREADS):  # one thread at a time: the same bits
        alone = outcome(op, [array[thread % array.size :][:1] for array in full])
        for result, single in zip(whole, alone, strict=True):
            assert single.shape == (1,), name
            assert single[0] == result[thread], name
    for index in range(len(op.operands)):  # one operand the same for all threads
        mixed = [array[:1] if index == other else array for other, array in enumerate(full)]
        spread = [np.repeat(array[:1], THREADS) if index == other else array for other, array in enumerate(full)]
        if index in uniform(name, op):
            continue
        for one, many in zip(outcome(op, mixed), outcome(op, spread), strict=True):
            assert (np.broadcast_to(one, many.shape) == many).all(), name


def test_expressions_say_what_functions_do() -> None:
    random = np.random.default_rng(11)
    checked = 0
    for name, op in ELEMENTWISE.items():
        if op.expression is None:
            continue
        names = [f"register_{index}" for index in range(len(op.operands))]
        operands = [operand(kind, THREADS, random, False) for kind in op.operands]
        scope = EXPRESSION_NAMES | dict(zip(names, operands, strict=True)) | {"fn": op.function}
        result = eval(op.expression.format(*names), scope)
        assert result.dtype == DTYPES[op.results[0]], name
        assert (result == op.function(*operands)).all(), name
        checked += 1
    assert checked > 400


@pytest.mark.parametrize(
    "name",
    [
        "tanh.approx.ftz.f32",  # not PTX
        "sin.approx.f64",
        "ex2.approx.bf16x2",
        "cvt.f32.f32",
        "fma.f32",  # PTX wants a rounding
        "add.f32.f32",
        "setp.f32",
        "cvt.f32.s32",
        "mul.lo.u32.u32",
    ],
)
def test_unknown_opcodes_are_absent(name: str) -> None:
    assert name not in ELEMENTWISE


def test_kinds_are_known() -> None:
    for name, op in ELEMENTWISE.items():
        assert set(op.results + op.operands) <= set(DTYPES), name
        assert "carry" not in op.results[:1], name
        if op.sign_extends:
            assert name.startswith("cvt."), name
