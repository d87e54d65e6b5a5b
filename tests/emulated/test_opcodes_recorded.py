"""Every opcode recorded on the hardware: the table's function gives the same bits, or the opcode is
absent."""

from __future__ import annotations

import re
from typing import Any

import hardware_vectors as hardware
import numpy as np
import pytest

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

DTYPES = hardware.DTYPES


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


def run(text: str, operands: list[Any], result_dtype: Any) -> Any:
    """Evaluate an inline assembly with the table alone."""
    return hardware.evaluate(text, operands, result_dtype, lambda opcode, values: ELEMENTWISE[opcode].function(*values))


def differing(expected: Any, got: Any) -> int:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    return int((got != expected).sum())


@pytest.mark.parametrize(("group", "name"), hardware.cases(hardware.SUPPORTED))
def test_equals_the_hardware(group: str, name: str) -> None:
    operands, expected = hardware.inputs(group), hardware.output(group, name)
    if name in hardware.LIMITED_BELOW_256:
        inside = (operands[-1] < 256) & (operands[-2] < 256)
        assert 100 < inside.sum() < inside.size
        operands, expected = [array[inside] for array in operands], expected[inside]
    assert differing(expected, run(hardware.assembly(group, name), operands, expected.dtype)) == 0


def test_every_recorded_opcode_is_listed() -> None:
    listed = hardware.cases(hardware.SUPPORTED)
    assert len(listed) == len(set(listed)) == 251
    assert set(listed) == hardware.recorded_names()


@pytest.mark.parametrize(
    "name", ["mul.ftz.f32", "add.ftz.f32", "div.rn.ftz.f32", "fma.rn.ftz.f32", "mul.f32", "fma.rn.f32"]
)
def test_flush_boundary(name: str) -> None:
    operands, outputs = hardware.flush_boundary()
    op = ELEMENTWISE[name]
    assert differing(outputs.pop(name), op.function(*operands[: len(op.operands)])) == 0


@pytest.mark.parametrize("name", sorted(hardware.LIMITED_BELOW_256))
def test_wide_fields_beyond_255_raise(name: str) -> None:
    op = ELEMENTWISE[name]
    operands = [np.array([1], DTYPES[kind]) for kind in op.operands]
    op.function(*operands)
    for index in (-1, -2):
        beyond = list(operands)
        beyond[index] = np.array([5, 256], np.uint32)
        with pytest.raises(ValueError, match="above 255"):
            op.function(*beyond)


def check_more(name: str, kinds: list[str]) -> None:
    operands, expected = hardware.more_inputs(kinds[1:]), hardware.more_output(name, kinds[0])
    if name.startswith("carry."):
        got = run(hardware.carry_assembly(name), operands, expected.dtype)
    else:
        op = ELEMENTWISE[name]
        assert list(op.results + op.operands) == kinds, name
        got = op.function(*operands)
    assert differing(expected, got) == 0, name


SIGNATURES = hardware.more_signatures()


@pytest.mark.parametrize("family", sorted({name.split(".")[0] for name in SIGNATURES}))
def test_equals_the_second_recording(family: str) -> None:
    """All opcodes of one family; a failure names the opcode."""
    for name, kinds in SIGNATURES.items():
        if name.split(".")[0] == family:
            check_more(name, kinds)


def test_every_opcode_of_the_table_was_recorded() -> None:
    direct = {name for _, name in hardware.cases(hardware.SUPPORTED)}
    used = {
        opcode
        for group, name in hardware.cases(hardware.SUPPORTED)
        for opcode, _ in hardware.statements(hardware.assembly(group, name))
    }
    carried = {
        opcode
        for name in SIGNATURES
        if name.startswith("carry.")
        for opcode, _ in hardware.statements(hardware.carry_assembly(name))
    }
    others = {name[3:].removeprefix(".") for name in np.load(hardware.DATA / "breadth.npz").files}
    others |= {f"{name}x2" for name in others if name.endswith(("f16", "bf16"))}
    left = set(ELEMENTWISE) - direct - used - carried - set(SIGNATURES) - others
    assert {"addc.cc.u32", "subc.cc.u32"} <= left
    assert {name for name in left if not NEVER_RECORDED.fullmatch(name)} == set()


NEVER_RECORDED = re.compile(
    r"(addc|subc)\.cc\.u32"  # their s32 twins were recorded
    r"|v(add|sub|avrg|absdiff|min|max|set)[24]\..*"  # one function for all types; 15 of them were recorded
    r"|madc?\.(lo|hi)(\.cc)?\.[us](32|64)"  # a product and a sum that were recorded each
    r"|lop3\.(or|and)\.b32"  # lop3, and whether it is zero
    r"|sub\.r[zmp]\.f64"  # add of the negative
    r"|(min|max)\.relu\.s16x2"  # another spelling
    r"|(add|sub|mul|fma)\.(r[nzmp]\.)?ftz\.(sat\.)?f32"  # against exact fractions and roots, as the two below:
    r"|(div|rcp|sqrt)\.r[zmp]\.ftz\.f32"
    r"|cvt\.r[nzmp]\.ftz\.f32\.f64"  # test_flushed_roundings.py
    r"|setp\.\w+\.((and|or|xor)\.)?\w+x2|slct\.[busf]16\..*|testp\..*|cvt\.pack\..*"  # as those below:
    r"|cvt\.r[nzmp]\.(b?f16|f64)\.[us]\d+|cvt\.r[nzmp]i\.[us]8\.bf16"
    r"|cvt\..*sat\..*|cvt\.r[nzmp]\.(bf16\.f16|f16\.bf16)|(add|sub|mul|fma)\.r[zmp]\.sat\.f32|mad\.r[nzmp]\..*"
    r"|\w+\.r[nzmp]\.(ftz\.)?f32x2|cvt\.ftz\.f32\.f16"  # test_opcodes_composed.py
    r"|cvt\..*(e2m1|e2m3|e3m2|ue8m0)x2.*|cvt\.rn\.(satfinite\.)?(relu\.)?(e.m.x2\.bf16x2|b?f16x2\.e.m.x2)"
    # test_opcodes_small_floats.py
)
"""Opcodes of the table without a vector of their own, and why they need none."""


def test_the_check_sees_a_single_wrong_bit() -> None:
    operands, expected = hardware.inputs("T"), hardware.output("T", "fma.rn.f32")
    wrong = expected.copy()
    wrong[7] ^= np.uint32(1)
    assert differing(wrong, run("fma.rn.f32 %0, %1, %2, %3;", operands, np.uint32)) == 1
