"""Products that ptxas takes into sums: data/contraction.json holds random programs, and what the machine code that
ptxas 13.0 makes of them (sm_90) gives in exact rational arithmetic, instruction by instruction, for eight inputs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_helper import pointer

from g4kv_cli.device.emulated import Machine, Module

STORED = Path(__file__).resolve().parent.parent / "data" / "contraction.json"
OUTPUT_BYTES = 1000


@cache
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


def values(bits: list[int]) -> list[float]:
    """As numbers: the expected ones come from rational arithmetic, which has no signed zeros."""
    found: list[float] = np.array(bits, np.uint32).view(np.float32).tolist()
    return found


def run(module: Module, case: dict[str, Any], row: int) -> list[float]:
    machine = Machine()
    address = machine.allocate(OUTPUT_BYTES + 4 * len(case["outputs"][row]), "values")
    machine.write(address, np.array(case["inputs"][row], np.uint32))
    machine.launch(module.kernel(case["name"]), (1, 1, 1), (1, 1, 1), [pointer(address)])
    count = len(case["outputs"][row])
    return values(machine.read(address + OUTPUT_BYTES, 4 * count).view(np.uint32).tolist())


@cache
def modules() -> tuple[Module, Module]:
    return Module(stored()["ptx"]), Module(stored()["ptx"], contracts=False)


def test_sums_take_products_in_as_ptxas_makes_them() -> None:
    fused, apart = modules()
    differing = 0
    for case in stored()["cases"]:
        for row in range(len(case["inputs"])):
            assert run(fused, case, row) == values(case["outputs"][row]), case["name"]
        differing += any(run(apart, case, row) != values(case["outputs"][row]) for row in (0, 1))
    assert differing > 10  # both ways computed: these programs' bits are not in the PTX


BRANCH = "setp.gt.f32 %p1, %f1, %f3; @%p1 bra L;"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("mul.f32 %f4, %f1, %f2; add.f32 %f5, %f4, %f3;", 1),
        ("mul.f32 %f4, %f1, %f2; sub.f32 %f5, %f3, %f4;", 1),
        ("mul.f32 %f4, %f1, %f2; add.f32 %f6, %f4, %f3; sub.f32 %f5, %f4, %f6;", 2),
        ("mul.rn.f32 %f4, %f1, %f2; add.f32 %f5, %f4, %f3;", 0),
        ("mul.f32 %f4, %f1, %f2; add.rn.f32 %f5, %f4, %f3;", 0),
        ("mul.f32 %f4, %f1, %f2; add.ftz.f32 %f5, %f4, %f3;", 0),
        ("mul.f32 %f4, %f1, %f2; add.f32 %f5, %f4, %f4;", 0),
        ("mul.f32 %f4, %f1, %f2; add.f32 %f6, %f4, %f3; mul.f32 %f5, %f4, %f6;", 0),
        ("mul.f32 %f4, %f1, %f2; bra L; L: add.f32 %f5, %f4, %f3;", 0),
        ("mul.f32 %f4, %f1, %f2; mov.f32 %f1, %f3; add.f32 %f5, %f4, %f3;", 0),
        # A register's other values are other values: one after another, a factor's own, of another block, of a loop.
        ("mul.f32 %f4, %f1, %f2; add.f32 %f6, %f4, %f3; mul.f32 %f4, %f6, %f2; add.f32 %f5, %f4, %f3;", 2),
        ("mul.f32 %f1, %f1, %f2; add.f32 %f5, %f1, %f3;", 1),
        (f"{BRANCH} mov.f32 %f1, %f3; L: max.f32 %f6, %f1, %f3; mul.f32 %f4, %f1, %f2; sub.f32 %f5, %f4, %f6;", 1),
        (f"mul.f32 %f4, %f1, %f2; {BRANCH} mul.f32 %f4, %f3, %f3; L: add.f32 %f5, %f4, %f3;", 0),
        (f"L: mul.f32 %f4, %f1, %f2; add.f32 %f1, %f4, %f3; {BRANCH} mov.f32 %f5, %f1;", 1),
        (f"L: add.f32 %f5, %f4, %f3; mul.f32 %f4, %f5, %f2; add.f32 %f6, %f4, %f3; {BRANCH}", 0),
    ],
)
def test_what_ptxas_keeps_apart(body: str, count: int) -> None:
    loads = "".join(f"ld.global.f32 %f{place}, [%rd1+{4 * place}];\n" for place in (1, 2, 3))
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry kernel(.param .u64 p)\n{\n"
    text += f".reg .f32 %f<9>; .reg .b64 %rd<3>; .reg .pred %p<2>; ld.param.u64 %rd1, [p];\n{loads}{body}\n"
    text += "st.global.f32 [%rd1], %f5;\nret;\n}\n"
    assert Module(text).kernel("kernel").contracted == count
    assert Module(text, contracts=False).kernel("kernel").contracted == 0


@pytest.mark.parametrize(
    ("body", "value", "count"),
    [
        # 2 * 3 + 5, over and over: the factor of each time is the sum of the one before.
        ("L: mul.f32 %f4, %f1, %f2; add.f32 %f1, %f4, %f3; setp.lt.f32 %p1, %f1, %f9; @%p1 bra L; mov.f32 %f5, %f1;",
         119, 1),
        # The product is written over a factor that only its sum still needs.
        ("mul.f32 %f1, %f1, %f2; add.f32 %f6, %f1, %f3; add.f32 %f7, %f1, %f2; mul.rn.f32 %f5, %f6, %f7;", 99, 2),
        # 3 * 5 - 2, or with the first factor 2 as it was.
        (f"{BRANCH} mov.f32 %f1, %f2; L: mul.f32 %f4, %f1, %f3; sub.f32 %f5, %f4, %f9;", -85, 1),
        # What the register holds from the second product on is nothing of the first.
        ("mul.f32 %f4, %f1, %f2; add.f32 %f6, %f4, %f3; mul.f32 %f4, %f6, %f3; add.f32 %f7, %f4, %f6; "
         "add.f32 %f5, %f7, %f1;", 68, 2),
    ],
)  # fmt: skip
def test_values_are_those_that_the_registers_held(body: str, value: int, count: int) -> None:
    """2, 3 and 5, and 100: in small integers a fused sum has no other value."""
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry kernel(.param .u64 p)\n{\n"
    text += ".reg .f32 %f<10>; .reg .b64 %rd<3>; .reg .pred %p<2>; ld.param.u64 %rd1, [p];\n"
    text += "".join(f"ld.global.f32 %f{register}, [%rd1+{4 * at}];\n" for at, register in enumerate((1, 2, 3, 9)))
    kernel = Module(f"{text}{body}\nst.global.f32 [%rd1], %f5;\nret;\n}}\n").kernel("kernel")
    machine = Machine()
    address = machine.allocate(16, "values")
    machine.write(address, np.array([2, 3, 5, 100], np.float32))
    machine.launch(kernel, (1, 1, 1), (1, 1, 1), [pointer(address)])
    assert (machine.read(address, 4).view(np.float32).item(), kernel.contracted) == (value, count)


def test_a_long_chain_of_products_that_ask_each_other() -> None:
    """Each sum takes two products and each product is of two sums, the last sum first; small integers stay exact."""
    count = 600
    loads = "".join(f"ld.global.f32 %a{k}, [%rd1+{4 * k}];\n" for k in range(count + 1))
    products = "".join(f"mul.f32 %p{k}, %a{k}, %a{k};\n" for k in range(count + 1))
    sums = "".join(f"add.f32 %s{k}, %p{k}, %p{k + 1};\n" for k in reversed(range(count)))
    sums += f"add.f32 %s{count}, %p{count}, %a0;\n"
    stores = "".join(f"st.global.f32 [%rd1+{4 * k}], %s{k};\n" for k in range(count + 1))
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry kernel(.param .u64 p)\n{\n"
    text += f".reg .f32 %a<{count + 1}>, %p<{count + 1}>, %s<{count + 1}>; .reg .b64 %rd<3>;\nld.param.u64 %rd1, [p];\n"
    kernel = Module(f"{text}{loads}{products}{sums}{stores}ret;\n}}\n").kernel("kernel")
    assert kernel.contracted > count / 2
    machine = Machine()
    given = np.arange(count + 1, dtype=np.float32) % 50 + 1
    address = machine.allocate(given.nbytes, "values")
    machine.write(address, given)
    machine.launch(kernel, (1, 1, 1), (1, 1, 1), [pointer(address)])
    squares = given.astype(np.float64) ** 2
    expected = squares + np.append(squares[1:], given[0])
    np.testing.assert_array_equal(machine.read(address, given.nbytes).view(np.float32), expected)
