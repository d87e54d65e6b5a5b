"""Every elementwise handler of the engine gives the bits of the table of opcodes, and those that were recorded."""

from __future__ import annotations

from typing import Any

import hardware_vectors as hardware
import numpy as np
import pytest
from engine_helper import execute, execute_opcode

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE
from g4kv_cli.device.emulated.engine.handlers import HANDLERS

HARD_32 = np.array(
    [
        *(0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000),
        *(0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x00800000, 0x007FFFFF),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F7FFFFF, 0x4B000000, 0x4F000000, 0xCF000000, 0xC2FE0000),
        *(0x3F000000, 0x3FC00000, 0xBF000000, 0x7F800001, 0x33800000),
    ],
    np.uint32,
)
_NUMBERS = np.array(
    [
        *(0.0, 1.0, 0.5, 1.5, 2.5, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 2.0**-1022, np.inf, 1e308, 2.0**-149, 3e-320),
        *(2.0**31 - 1, 2.0**31 - 0.5, 2.0**31 + 1, 2.0**32 - 1, 2.0**32 - 0.5, 2.0**128, 2.0**-126),
    ]
).view(np.uint64)
_NANS = np.uint64(0x7FF0000000000001) + (np.arange(16, dtype=np.uint64) << np.uint64(48))
HARD_64 = np.concatenate([_NUMBERS, _NANS])
HARD_64 = np.concatenate([HARD_64, HARD_64 | np.uint64(1 << 63)])
ROWS = 24


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


def draw(rng: np.random.Generator, kind: str, count: int) -> Any:
    """Raw bits: hard values, random bits, and floats of many sizes."""
    if kind == "pred":
        return rng.integers(0, 2, count).astype(np.bool_)
    bits = rng.integers(0, 2**32, count, np.uint64).astype(np.uint32)
    floats = (rng.standard_normal(count) * np.exp2(rng.integers(-40, 40, count))).astype(np.float32).view(np.uint32)
    pick = rng.random(count)
    low = np.where(pick < 0.5, rng.choice(HARD_32, count), np.where(pick < 0.75, floats, bits))
    if kind == "b16":
        return low.astype(np.uint16)
    if kind == "b32":
        return low.astype(np.uint32)
    high = np.where(rng.random(count) < 0.5, rng.choice(HARD_32, count), rng.integers(0, 2**32, count, np.uint64))
    whole = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    doubles = (rng.standard_normal(count) * np.exp2(rng.integers(-70, 70, count))).view(np.uint64)
    pick = rng.random(count)
    return np.where(pick < 0.3, rng.choice(HARD_64, count), np.where(pick < 0.5, doubles, whole))


@pytest.mark.parametrize("family", sorted({opcode.split(".")[0] for opcode in HANDLERS}))
def test_handlers_equal_the_table(family: str) -> None:
    rng = np.random.default_rng(20261130)
    for opcode in HANDLERS:
        if opcode.split(".")[0] != family:
            continue
        op = ELEMENTWISE[opcode]
        operands = [draw(rng, kind, 32 * ROWS) for kind in op.operands]
        if opcode == "bfi.b64":  # what lies above 255 is not known
            operands[2:] = [operand & np.uint32(255) for operand in operands[2:]]
        if opcode == "lop3.b32":  # the table is an immediate
            operands[3] = np.full(32 * ROWS, 0xCA, np.uint32)
        expected = op.function(*operands)
        got = execute_opcode(opcode, op.operands, op.results[0], operands)
        wrong = np.flatnonzero(expected != got)
        shown = [hex(int(operand[wrong[0]])) for operand in operands] if wrong.size else []
        assert not wrong.size, f"{opcode} of {shown}: {hex(int(got[wrong[0]]))}, table {hex(int(expected[wrong[0]]))}"


def opcodes_of(group: str, name: str) -> set[str]:
    found = {opcode for opcode, _ in hardware.statements(hardware.assembly(group, name))}
    return {opcode for opcode in found if not opcode.startswith("mov.")}


RECORDED = [case for case in hardware.cases(hardware.SUPPORTED) if opcodes_of(*case) <= set(HANDLERS)]


@pytest.mark.parametrize(("group", "name"), RECORDED)
def test_handlers_equal_the_hardware(group: str, name: str) -> None:
    operands, expected = hardware.inputs(group), hardware.output(group, name)
    if name in hardware.LIMITED_BELOW_256:
        inside = (operands[-1] < 256) & (operands[-2] < 256)
        operands, expected = [array[inside] for array in operands], expected[inside]

    def apply(opcode: str, values: list[Any]) -> Any:
        op = ELEMENTWISE[opcode]
        return execute_opcode(opcode, op.operands, op.results[0], values)

    got = hardware.evaluate(hardware.assembly(group, name), operands, expected.dtype, apply)
    assert int((got != expected).sum()) == 0


def test_the_check_sees_a_wrong_handler() -> None:
    a, b = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32)[::-1].copy()
    assert (execute(("add_b32",), ("b32", "b32"), "b32", [a, b]) == a + b).all()
    assert not (execute(("sub_b32",), ("b32", "b32"), "b32", [a, b]) == a + b).all()
