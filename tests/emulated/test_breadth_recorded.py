"""Opcodes of ordinary programs against what an NVIDIA H200 (driver 580.159.04, 30 Nov 2026) gave: data/hw/breadth.npz.

``in.OPCODE`` are operands (row, operand), ``out.OPCODE`` results, as raw bits; of atom and red (row, memory or operand,
element) and (row, returned or left in memory, element). ``all.OPCODE`` are the results of all 65,536 arguments.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from nvrtc_helper import DATA

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE
from g4kv_cli.device.emulated.memory.atomics import update_function


@cache
def recorded() -> dict[str, Any]:
    with np.load(DATA / "breadth.npz") as stored:
        return {name: stored[name] for name in stored.files}


def opcodes(prefix: str, atomic: bool = False) -> list[str]:
    names = [name.removeprefix(prefix) for name in recorded() if name.startswith(prefix)]
    return [name for name in names if name.startswith(("atom", "red")) == atomic]


@pytest.mark.parametrize("opcode", opcodes("in."))
def test_an_elementwise_opcode_gives_the_recorded_bits(opcode: str) -> None:
    operands, want = recorded()[f"in.{opcode}"], recorded()[f"out.{opcode}"]
    columns = [np.ascontiguousarray(operands[:, place]) for place in range(operands.shape[1])]
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[opcode].function(*columns)
    assert len(want) >= 160
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("opcode", opcodes("all."))
def test_a_16_bit_approximation_gives_the_recorded_bits_everywhere(opcode: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint32)
    want = recorded()[f"all.{opcode}"]
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[opcode].function(every.astype(np.uint16))
        pairs = ELEMENTWISE[f"{opcode}x2"].function(every << 16 | every[::-1])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pairs, want.astype(np.uint32) << 16 | want[::-1])


@pytest.mark.parametrize("form", opcodes("in.", atomic=True))
def test_an_atomic_leaves_the_recorded_bits(form: str) -> None:
    word, space, opcode = form.split(".", 2)
    before, after = recorded()[f"in.{form}"], recorded()[f"out.{form}"]
    operation, kind = opcode.split(".")[0], opcode.split(".")[-1]
    update = update_function(operation, kind, space == "shared", word == "red")
    assert update is not None
    memory, operand = (before[:, place].reshape(-1) for place in (0, 1))
    with np.errstate(all="ignore"):
        got = update(memory, operand, operand)
    np.testing.assert_array_equal(got, after[:, 1].reshape(-1))
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
