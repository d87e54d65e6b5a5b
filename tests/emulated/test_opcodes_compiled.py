"""The recorded opcodes once more, through the compiler and the interpreter: CUDA kernels of inline assembly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import hardware_vectors as hardware
import numpy as np
import pytest

from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import SourceFile
from g4kv_cli.device.emulated import EmulatorError, Machine, Module, UnsupportedOpcode

TYPES = {2: ("h", "unsigned short"), 4: ("r", "unsigned int"), 8: ("l", "unsigned long long")}
"""Assembly constraint and C type by register bytes."""
THREADS_PER_BLOCK = 256
OPCODES_PER_KERNEL = 48


@dataclass(frozen=True)
class Case:
    """One opcode: its assembly and its expected bits, as an integer array."""

    name: str
    text: str
    expected: Any


def statement(case: Case, index: int, operands: list[Any]) -> str:
    letter, c_type = TYPES[case.expected.itemsize]
    inputs = ", ".join(f'"{TYPES[array.itemsize][0]}"(x{number})' for number, array in enumerate(operands))
    return f'{{ {c_type} v; asm volatile("{case.text}" : "=&{letter}"(v) : {inputs}); out[{index} * count + i] = v; }}'


def source(kernels: list[tuple[list[Any], list[Case]]]) -> str:
    """A translation unit with kernels k0, k1, ...: out[opcode][i] = opcode(in0[i], in1[i], ...)."""
    lines = []
    for number, (operands, cases) in enumerate(kernels):
        types = [TYPES[array.itemsize][1] for array in operands]
        parameters = "".join(f", const {name}* in{index}" for index, name in enumerate(types))
        result = TYPES[cases[0].expected.itemsize][1]
        lines += [
            f'extern "C" __global__ void k{number}({result}* out{parameters}, int count) {{',
            f"    int i = blockIdx.x * {THREADS_PER_BLOCK} + threadIdx.x;",
            "    if (i >= count) return;",
            *(f"    {name} x{index} = in{index}[i];" for index, name in enumerate(types)),
            *(f"    {statement(case, index, operands)}" for index, case in enumerate(cases)),
            "}",
        ]
    return "\n".join(lines)


def failures(kernels: list[tuple[list[Any], list[Case]]], arch: str) -> dict[str, int]:
    """Differing outputs by opcode, after running every kernel on the emulated device."""
    image = compile_image(SourceFile.from_text("opcodes.cu", source(kernels)), arch=arch, kind="ptx")
    module = Module(image.data.decode())
    wrong = {}
    for number, (operands, cases) in enumerate(kernels):
        machine = Machine()
        count, itemsize = operands[0].size, cases[0].expected.itemsize
        addresses = [machine.allocate(array.nbytes, f"in{index}") for index, array in enumerate(operands)]
        for address, array in zip(addresses, operands, strict=True):
            machine.write(address, array)
        out = machine.allocate(count * itemsize * len(cases), "out")
        arguments = [address.to_bytes(8, "little") for address in (out, *addresses)]
        blocks = -(-count // THREADS_PER_BLOCK)
        machine.launch(
            module.kernel(f"k{number}"),
            (blocks, 1, 1),
            (THREADS_PER_BLOCK, 1, 1),
            [*arguments, count.to_bytes(4, "little")],
        )
        raw = machine.read(out, count * itemsize * len(cases))
        got = raw.view(cases[0].expected.dtype).reshape(len(cases), count)
        for case, row in zip(cases, got, strict=True):
            if differing := int((row != case.expected).sum()):
                wrong[case.name] = differing
    return wrong


def first_recording() -> Iterator[tuple[list[Any], list[Case]]]:
    for group, names in hardware.SUPPORTED.items():
        cases = [Case(n, hardware.assembly(group, n), hardware.output(group, n)) for n in names.split()]
        operands = hardware.inputs(group)
        if cases[0].name in hardware.LIMITED_BELOW_256:
            inside = (operands[-1] < 256) & (operands[-2] < 256)
            operands = [array[inside] for array in operands]
            cases = [Case(case.name, case.text, case.expected[inside]) for case in cases]
        yield from split(operands, cases)


def split(operands: list[Any], cases: list[Case]) -> Iterator[tuple[list[Any], list[Case]]]:
    """Kernels of one result width and a limited number of opcodes."""
    for _, same in groupby(sorted(cases, key=lambda case: case.expected.itemsize), lambda c: c.expected.itemsize):
        chosen = list(same)
        for start in range(0, len(chosen), OPCODES_PER_KERNEL):
            yield operands, chosen[start : start + OPCODES_PER_KERNEL]


def second_recording() -> Iterator[tuple[list[Any], list[Case]]]:
    signatures = hardware.more_signatures()
    by_kinds = sorted(signatures, key=lambda name: (signatures[name], name))
    for kinds, names in groupby(by_kinds, lambda name: signatures[name]):
        operands = [
            array.astype(np.uint16) if array.dtype == bool else array for array in hardware.more_inputs(kinds[1:])
        ]
        cases = [second_case(name, kinds) for name in names]
        yield from split(operands, cases)


def second_case(name: str, kinds: list[str]) -> Case:
    """Predicates go in and out as 16-bit integers."""
    expected = hardware.more_output(name, kinds[0])
    if name.startswith("carry."):
        return Case(name, hardware.carry_assembly(name), expected)
    registers, before, arguments = "", "", []
    for number, kind in enumerate(kinds[1:]):
        if kind == "pred":
            registers += f".reg .pred q{number}; "
            before += f"setp.ne.u16 q{number}, %{number + 1}, 0; "
            arguments.append(f"q{number}")
        else:
            arguments.append(f"%{number + 1}")
    target, after = "%0", ""
    if kinds[0] == "pred":
        registers += ".reg .pred p; "
        target, after = "p", " selp.u16 %0, 1, 0, p;"
        expected = expected.astype(np.uint16)
    return Case(name, f"{{{registers}{before}{name} {target}, {', '.join(arguments)};{after}}}", expected)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_first_recording(arch: str) -> None:
    kernels = list(first_recording())
    assert sum(len(cases) for _, cases in kernels) == len(hardware.cases(hardware.SUPPORTED))
    assert failures(kernels, arch) == {}


def test_second_recording() -> None:
    kernels = list(second_recording())
    assert sum(len(cases) for _, cases in kernels) == len(hardware.more_signatures())
    assert failures(kernels, "sm_90") == {}


def one_opcode(text: str, operands: list[Any]) -> tuple[Module, list[tuple[list[Any], list[Case]]]]:
    kernels = [(operands, [Case("one", text, np.zeros(operands[0].size, operands[0].dtype))])]
    image = compile_image(SourceFile.from_text("one.cu", source(kernels)), arch="sm_90", kind="ptx")
    return Module(image.data.decode()), kernels


def test_an_opcode_without_a_model_is_refused_by_name() -> None:
    module, _ = one_opcode("sin.exact.f32 %0, %1;", hardware.inputs("U")[:1])
    with pytest.raises(UnsupportedOpcode, match=r"sin\.exact\.f32"):
        module.kernel("k0")


def test_a_wide_field_beyond_255_is_refused() -> None:
    operands = [np.ones(4, np.uint64), np.full(4, 300, np.uint32), np.full(4, 8, np.uint32)]
    _, kernels = one_opcode("bfe.u64 %0, %1, %2, %3;", operands)
    with pytest.raises(EmulatorError, match="above 255"):
        failures(kernels, "sm_90")


def test_the_check_sees_a_single_wrong_bit() -> None:
    operands, expected = hardware.inputs("T"), hardware.output("T", "fma.rn.f32").copy()
    expected[-1] ^= np.uint32(1)
    case = Case("fma.rn.f32", hardware.assembly("T", "fma.rn.f32"), expected)
    assert failures([(operands, [case])], "sm_90") == {"fma.rn.f32": 1}
