"""mma.sync and wmma of every type against an NVIDIA H200 (driver 580.159.04, 30 Nov 2026): data/hw/matrix_forms.npz.

``in.mma.OPCODE``: bytes of the registers of A, B and C, [tile, register, lane]; ``out.mma.OPCODE`` those of D.
``in.wmma.SHAPE.TYPE.TYPE.LAYOUT.LAYOUT``: A, B and C in memory; ``out.wmma...``: D in memory, then the registers of A,
B and C as wmma.load filled them. Tiles are of all sizes of numbers, the last of the mma ones random bits, NaN included;
the first of wmma holds the number of each element.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from launch_helper import pointer
from nvrtc_helper import DATA
from ordinary_helper import ARCHS, run

from g4kv_cli.device.emulated import LaunchFault, Machine, Module, UnsupportedOpcode
from g4kv_cli.device.emulated.arithmetic.mma_forms import ELEMENT_BITS

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
ENTRY = HEADER + (
    ".visible .entry kernel(.param .u64 pin, .param .u64 pout)\n{{\n.reg .b64 %rd<20>; .reg .b32 %r<20>; {registers}\n"
    "ld.param.u64 %rd1, [pin]; ld.param.u64 %rd2, [pout]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n"
    "mul.wide.u32 %rd3, %r2, {size}; add.u64 %rd1, %rd1, %rd3; mul.wide.u32 %rd3, %r2, {out_size};\n"
    "add.u64 %rd2, %rd2, %rd3;\n{body}\nret;\n}}\n"
)


@pytest.fixture(autouse=True)
def _on_both_emulators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")


@cache
def recorded() -> dict[str, Any]:
    with np.load(DATA / "matrix_forms.npz") as stored:
        return {name: stored[name] for name in stored.files}


def names(prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in recorded() if name.startswith(prefix)]


def launch(registers: str, body: str, given: Any, wanted: Any) -> Any:
    """What a kernel of one warp a tile makes of the recorded input."""
    text = ENTRY.format(registers=registers, body=body, size=given.shape[1], out_size=wanted.shape[1])
    machine = Machine()
    source, target = machine.allocate(given.nbytes, "in"), machine.allocate(wanted.nbytes, "out")
    machine.write(source, given)
    kernel = Module(text).kernel("kernel")
    machine.launch(kernel, (len(given), 1, 1), (32, 1, 1), [pointer(source), pointer(target)])
    assert machine.counts.compared == 1
    return machine.read(target, wanted.nbytes).reshape(wanted.shape)


def listed(letter: str, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{number}" for number in range(count)) + "}"


def moved(opcode: str, letter: str, bits: int, count: int, base: int, begin: int) -> str:
    """Loads or stores of registers that lie one after another, 32 lanes each."""
    lines = [f"mul.wide.u32 %rd5, %r1, {bits // 8}; add.u64 %rd5, %rd5, %rd{base};"]
    for number in range(count):
        at = f"[%rd5+{begin + number * 32 * bits // 8}]"
        operands = f"%{letter}{number}, {at}" if opcode == "ld" else f"{at}, %{letter}{number}"
        lines.append(f"{opcode}.global.b{bits} {operands};")
    return "\n".join(lines)


def parts_of(opcode: str) -> tuple[tuple[int, int, int], list[str]]:
    shape = re.match(r"m(\d+)n(\d+)k(\d+)", opcode)
    assert shape is not None
    types = [word for word in opcode.split(".") if word in ELEMENT_BITS]
    m, n, k = (int(group) for group in shape.groups())
    return (m, n, k), types


@pytest.mark.parametrize("opcode", names("in.mma."))
def test_a_product_gives_the_recorded_bits(opcode: str) -> None:
    given, wanted = recorded()[f"in.mma.{opcode}"], recorded()[f"out.mma.{opcode}"]
    (m, n, k), types = parts_of(opcode)
    d, a, b = (types * 3)[:3] if len(types) < 3 else types[:3]
    bits, c_bits = (64 if kind == "f64" else 32 for kind in (a, d))
    counts = [
        m * k * ELEMENT_BITS[a] // 32 // bits,
        k * n * ELEMENT_BITS[b] // 32 // bits,
        m * n * ELEMENT_BITS[d] // 32 // c_bits,
    ]
    begin_b = counts[0] * 32 * bits // 8
    begin_c = begin_b + counts[1] * 32 * bits // 8
    body = "\n".join(
        (
            moved("ld", "A", bits, counts[0], 1, 0),
            moved("ld", "B", bits, counts[1], 1, begin_b),
            moved("ld", "C", c_bits, counts[2], 1, begin_c),
            f"mma.sync.aligned.{opcode} {listed('D', counts[2])}, {listed('A', counts[0])}, {listed('B', counts[1])},"
            f" {listed('C', counts[2])};",
            moved("st", "D", c_bits, counts[2], 2, 0),
        )
    )
    registers = f".reg .b{bits} %A<8>, %B<8>; .reg .b{c_bits} %C<8>, %D<8>;"
    np.testing.assert_array_equal(launch(registers, body, given, wanted), wanted)


@pytest.mark.parametrize("name", names("in.wmma."))
def test_wmma_loads_multiplies_and_stores_as_recorded(name: str) -> None:
    given, wanted = recorded()[f"in.wmma.{name}"], recorded()[f"out.wmma.{name}"]
    shape, kind, c_kind, layout_a, layout_b = name.split(".")
    (m, n, k), _ = parts_of(shape)
    bits, c_bits = (64 if word == "f64" else 32 for word in (kind, c_kind))
    nbytes, c_nbytes = ELEMENT_BITS[kind] // 8, ELEMENT_BITS[c_kind] // 8
    sizes = [m * k * nbytes, k * n * nbytes, m * n * c_nbytes]
    repeats = 8 if kind == "f16" else 0
    counts = [repeats or size // (4 * bits) for size in sizes[:2]] + [sizes[2] // (4 * c_bits)]
    strides = [k if layout_a == "row" else m, n if layout_b == "row" else k, n]
    types = f"{c_kind}.{c_kind}" if kind == "f16" else f"{c_kind}.{kind}.{kind}.{c_kind}"
    lines = []
    begin = 0
    for role, letter, layout, stride, count, size in zip(
        "abc", "ABC", (layout_a, layout_b, "row"), strides, counts, sizes, strict=True
    ):
        type_name = c_kind if role == "c" else kind
        opcode = f"wmma.load.{role}.sync.aligned.{layout}.{shape}.global.{type_name}"
        lines.append(f"mov.u32 %r5, {stride}; {opcode} {listed(letter, count)}, [%rd1+{begin}], %r5;")
        begin += size
    product = f"wmma.mma.sync.aligned.{layout_a}.{layout_b}.{shape}.{types}"
    operands = ", ".join(listed(letter, count) for letter, count in zip("ABC", counts, strict=True))
    lines.append(f"{product} {listed('D', counts[2])}, {operands};")
    lines.append(f"wmma.store.d.sync.aligned.row.{shape}.global.{c_kind} [%rd2], {listed('D', counts[2])}, %r5;")
    begin = sizes[2]
    for letter, width, count in zip("ABC", (bits, bits, c_bits), counts, strict=True):
        lines.append(moved("st", letter, width, count, 2, begin))
        begin += count * 4 * width
    registers = f".reg .b{bits} %A<8>, %B<8>; .reg .b{c_bits} %C<8>, %D<8>;"
    np.testing.assert_array_equal(launch(registers, "\n".join(lines), given, wanted), wanted)


def _elements(words: Any, kind: str) -> Any:
    """Rows of words -> rows of their elements, the lowest bits of a word first."""
    bits = ELEMENT_BITS[kind]
    values = words[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    found = values.reshape(len(words), -1).astype(np.int64)
    return np.where(found > 7, found - 16, found) if kind == "s4" else found


@pytest.mark.parametrize(
    ("kind", "combine", "satfinite"),
    [("s4", "", ""), ("u4", "", ".satfinite"), ("s4", "", ".satfinite"), ("b1", "xor", ""), ("b1", "and", "")],
)
def test_wmma_of_parts_of_bytes(kind: str, combine: str, satfinite: str) -> None:
    """Exact, so a product of NumPy's integers is the oracle; rows of A and columns of B are six words apart."""
    random, each = np.random.default_rng(3), 32 // ELEMENT_BITS[kind]
    shape = f"m8n8k{4 * each}"
    words = random.integers(0, 1 << 32, (2, 8, 6), np.uint64).astype(np.uint32)
    c = random.integers(-(1 << 31), 1 << 31, (8, 8), np.int64)
    c[0], c[1] = (1 << 31) - 30, -(1 << 31) + 30
    given = np.concatenate([words.reshape(-1), c.astype(np.uint32).reshape(-1)]).view(np.uint8)[None]
    word = f".{combine}.popc" if combine else ""
    body = f"""
      mov.u32 %r5, {6 * each};
      wmma.load.a.sync.aligned.row.{shape}.global.{kind} {{%A0}}, [%rd1], %r5;
      wmma.load.b.sync.aligned.col.{shape}.global.{kind} {{%B0}}, [%rd1+192], %r5;
      wmma.load.c.sync.aligned.row.{shape}.global.s32 {{%C0, %C1}}, [%rd1+384];
      wmma.mma{word}.sync.aligned.row.col.{shape}.s32.{kind}.{kind}.s32{satfinite}
        {{%D0, %D1}}, {{%A0}}, {{%B0}}, {{%C0, %C1}};
      wmma.store.d.sync.aligned.row.{shape}.global.s32 [%rd2], {{%D0, %D1}};"""
    registers = ".reg .b32 %A<1>, %B<1>, %C<2>, %D<2>;"
    out = launch(registers, body, given, np.zeros((1, 256), np.uint8)).view(np.int32).reshape(8, 8)
    a, b = (_elements(matrix[:, :4], kind) for matrix in words)
    combined = {"": a[:, None] * b, "xor": a[:, None] ^ b, "and": a[:, None] & b}[combine]
    want = c + combined.sum(2)
    if satfinite:
        assert (np.abs(want) >= 1 << 31).any()
        want = np.clip(want, -(1 << 31), (1 << 31) - 1)
    np.testing.assert_array_equal(out, want.astype(np.int32))


@pytest.mark.parametrize("arch", ARCHS)
def test_sinks_and_literals_as_operands(arch: str) -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-4, 5, (32, 4)).astype(np.float16) for _ in range(2))
    out, _, _ = run("matrices", "mma_sinks", arch, np.zeros((32, 2), np.float32), a.view(np.uint32), b.view(np.uint32))
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        left[g, 2 * t : 2 * t + 2], left[g, 8 + 2 * t : 10 + 2 * t] = a[lane, :2], a[lane, 2:]
        right[2 * t : 2 * t + 2, g], right[8 + 2 * t : 10 + 2 * t, g] = b[lane, :2], b[lane, 2:]
    product = left @ right
    want = [[product[lane // 4, 2 * (lane % 4)] + 1, 2.0] for lane in range(32)]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chain_of_products_in_column_order(arch: str) -> None:
    random = np.random.default_rng(2)
    a, b = (random.integers(-3, 4, shape).astype(np.float16) for shape in ((32, 16), (32, 16)))
    out, _, _, = run("matrices", "wmma_columns", arch, np.zeros((16, 16), np.float32), a, b, 0.5)  # fmt: skip
    want = 0.5 * (a.astype(float).T @ b.astype(float))
    np.testing.assert_array_equal(out, want.T)


SOURCES = "{%r1,%r2,%r3,%r4},{%r1,%r2},{%f1,%f2,%f3,%f4}"


@pytest.mark.parametrize(
    "statement",
    [
        f"mma.sync.aligned.m16n8k32.row.col.f32.s8.s8.f32 {{%f1,%f2,%f3,%f4}},{SOURCES};",
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {{%f1,%f2,%f3,%f4}},{SOURCES};",
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%f1,%f2,%f3}},{SOURCES};",
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%rd1,%rd2,%rd1,%rd2}},{SOURCES};",
        "atom.global.add.u32 %p1, [%rd1], %r1;",
        "wmma.load.a.sync.aligned.row.m16n16k8.global.f16 {%r1,%r2,%r3,%r4}, [%rd1], %r1;",
        "wmma.load.a.sync.aligned.col.m8n8k32.global.s4 {%r1}, [%rd1], %r1;",
        "wmma.mma.sync.aligned.row.row.m8n8k32.s32.u4.u4.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
        "wmma.mma.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
        "wmma.load.d.sync.aligned.row.m16n16k16.global.f32 {%r1,%r2,%r3,%r4}, [%rd1], %r1;",
    ],
)
def test_a_form_that_does_not_exist_is_refused(statement: str) -> None:
    registers = ".reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<3>; .reg .pred %p<2>;\n"
    text = HEADER + ".visible .entry kernel()\n{\n" + registers + statement
    with pytest.raises(UnsupportedOpcode, match=statement.split()[0].replace(".", r"\.")):
        Module(text + "\nret;\n}\n").kernel("kernel")


def test_a_warp_that_is_not_whole_is_a_fault() -> None:
    body = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1,%d2},{%d3},{%d3},{%d1,%d2};"
    text = HEADER + ".visible .entry kernel(.param .u32 n)\n{\n.reg .b32 %r<9>; .reg .f64 %d<9>; .reg .pred %p;\n"
    text += "ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; setp.ge.u32 %p, %r2, %r1; @%p ret;\n" + body + "\nret;\n}\n"
    machine = Machine()
    machine.launch(Module(text).kernel("kernel"), (1, 1, 1), (32, 1, 1), [struct.pack("<I", 32)])
    with pytest.raises(LaunchFault, match="all 32"):
        machine.launch(Module(text).kernel("kernel"), (1, 1, 1), (32, 1, 1), [struct.pack("<I", 20)])
