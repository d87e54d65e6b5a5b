"""wgmma of every type: whole numbers, where each sum is exact whatever its order, and recorded bits.

data/hw/wgmma_forms.npz is of an NVIDIA H200, driver 580.159.04, 30 Nov 2026: 12 tiles of m64n8 a form. ``b.FORM`` uint8
[tile, 8, 32] is whole; of A, C and D it has the rows ``ROWS_OF_TILE``: ``a.FORM`` uint8 [tile, 12, 32], ``c.FORM`` and
``d.FORM`` raw bits [tile, 12, 8]. Tiles of floats are normal numbers, no C, sums that cancel, numbers of mixed size,
sparse ones, C large, C random, tiny and large products, infinities and NaN, zeros of both signs, random bits; those of
integers random, sparse, zero and extreme numbers. FORM.rs has A in registers, FORM.x4 four instructions in a chain;
both take A, B and C of FORM.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launch_helper import pointer, upload
from nvrtc_helper import DATA

from g4kv_cli.device.emulated import Machine, Module, UnsupportedOpcode


@pytest.fixture(autouse=True)
def _on_both_emulators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")


KERNEL = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 image, .param .u64 fragments, .param .u64 c, .param .u64 out)
{{
.reg .b64 %rd<16>; .reg .b32 %r<16>; .reg .b32 %d<32>; .reg .b32 %a<4>; .reg .pred %p<3>;
.shared .align 1024 .b8 tiles[{nbytes}];
ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [c]; ld.param.u64 %rd3, [out]; ld.param.u64 %rd4, [fragments];
mov.u32 %r1, %tid.x; mov.u32 %r3, tiles; mov.u32 %r4, %r1; mul.wide.u32 %rd6, %r1, 4; mov.u32 %r2, %ctaid.x;
mul.wide.u32 %rd10, %r2, {nbytes}; add.s64 %rd1, %rd1, %rd10; mul.wide.u32 %rd10, %r2, 2048; add.s64 %rd4, %rd4, %rd10;
mul.wide.u32 %rd10, %r2, {c_nbytes}; add.s64 %rd2, %rd2, %rd10; add.s64 %rd3, %rd3, %rd10;
AGAIN: mul.wide.u32 %rd5, %r4, 16; add.s64 %rd5, %rd1, %rd5; shl.b32 %r5, %r4, 4; add.s32 %r5, %r5, %r3;
ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd5]; st.shared.v4.u32 [%r5], {{%r6, %r7, %r8, %r9}};
add.s32 %r4, %r4, 128; setp.lt.u32 %p1, %r4, {chunks}; @%p1 bra AGAIN;
add.s64 %rd2, %rd2, %rd6; add.s64 %rd3, %rd3, %rd6; add.s64 %rd4, %rd4, %rd6;
{loads}
cvt.u64.u32 %rd8, %r3; shr.u64 %rd8, %rd8, 4; and.b64 %rd8, %rd8, 16383; add.s64 %rd9, %rd8, 128;
or.b64 %rd8, %rd8, 0x0000001000080000; or.b64 %rd9, %rd9, 0x0000001000080000;
fence.proxy.async; bar.sync 0; setp.eq.u32 %p2, %r1, %r1; wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{stores}
ret;
}}
"""
"""A block a tile. A and B without swizzle, in chunks of 16 bytes; A also in registers; C and D [register, thread]."""
ROWS = 64
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "b1": 1, "e4m3": 8, "e5m2": 8}
SMALL_FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ROWS_OF_TILE = (5 * np.arange(12) + np.arange(12)[:, None]) % ROWS


def raw_of(values: Any, kind: str) -> Any:
    """Whole numbers [rows, K] as rows of 32 bytes."""
    if kind == "b1":
        return np.packbits(values.astype(np.uint8), axis=1, bitorder="little")
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    dtype = {"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8, **SMALL_FLOATS}[kind]
    return values.astype(dtype).view(np.uint8)


def image_of(rows: Any) -> Any:
    return rows.reshape(len(rows) // 8, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)


def registers_of(matrix: Any, is_half: bool) -> Any:
    """[64, N] -> [register, thread]; two columns to a register of f16."""
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)  # warp, half, lane / 4, columns / 8, lane % 4, column
    if is_half:
        return np.ascontiguousarray(parts.transpose(3, 1, 0, 2, 4, 5)).reshape(-1, 128, 2).view(np.uint32)[..., 0]
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(-1, 128)


def matrix_of(registers: Any, is_half: bool) -> Any:
    """[register, thread] -> [64, 8]."""
    if is_half:
        return (
            np.ascontiguousarray(registers)
            .view(np.uint16)
            .reshape(2, 4, 8, 4, 2)
            .transpose(1, 0, 2, 3, 4)
            .reshape(-1, 8)
        )
    return registers.reshape(2, 2, 4, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 8)


def launch(opcode: str, a: Any, b: Any, c: Any, in_registers: bool = False, sign: int = 1, times: int = 1) -> Any:
    """D, like C, of A [tile, 64, 32] and B [tile, N, 32], rows of bytes, and C [tile, register, thread]."""
    kind = opcode.split(".")[2]
    flags = "" if opcode.split(".")[1] == "s32" else f", {sign}, 1"
    flags += "" if BITS[kind] != 16 else ", 0" if in_registers else ", 0, 0"
    words = np.ascontiguousarray(a).view(np.uint32).reshape(len(a), 4, 2, 8, 2, 4)  # warp, half, row, half of k, lane
    fragments = np.ascontiguousarray(words.transpose(0, 4, 2, 1, 3, 5))
    image = np.stack([np.concatenate([image_of(left), image_of(right)]) for left, right in zip(a, b, strict=True)])
    numbers = range(c.shape[1])
    registers = ", ".join(f"%d{number}" for number in numbers)
    source = "{%a0, %a1, %a2, %a3}" if in_registers else "%rd8"
    loads = [f"ld.global.b32 %d{number}, [%rd2+{512 * number}];" for number in numbers]
    loads += [f"ld.global.b32 %a{number}, [%rd4+{512 * number}];" for number in range(4)]
    text = KERNEL.format(
        nbytes=image.shape[1],
        chunks=image.shape[1] // 16,
        c_nbytes=c[0].nbytes,
        loads="\n".join(loads),
        products=f"wgmma.mma_async.sync.aligned.{opcode} {{{registers}}}, {source}, %rd9, %p2{flags};\n" * times,
        stores="\n".join(f"st.global.b32 [%rd3+{512 * number}], %d{number};" for number in numbers),
    )
    machine = Machine()
    places = [upload(machine, values, "in") for values in (image, fragments, c)]
    out = machine.allocate(c.nbytes, "out")
    machine.launch(Module(text).kernel("kernel"), (len(a), 1, 1), (128, 1, 1), [pointer(at) for at in (*places, out)])
    assert machine.counts.compared == 1
    return machine.read(out, c.nbytes).view(c.dtype).reshape(c.shape)


def numbers(random: Any, kind: str, shape: tuple[int, int]) -> Any:
    low, high = {"s8": (-128, 128), "u8": (0, 256), "b1": (0, 2)}.get(kind, (-4, 5))
    return random.integers(low, high, shape)


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(
    ("columns", "c", "a", "b", "more"),
    [
        (16, "f16", "f16", "f16", ""),
        (8, "f32", "f16", "f16", ""),
        (24, "f32", "e4m3", "e5m2", ""),
        (32, "f16", "e5m2", "e4m3", ""),
        (24, "f32", "tf32", "tf32", ""),
        (8, "s32", "s8", "s8", ""),
        (24, "s32", "s8", "u8", ""),
        (16, "s32", "u8", "s8", ""),
        (48, "s32", "u8", "u8", ""),
        (8, "s32", "s8", "s8", ".satfinite"),
        (8, "s32", "b1", "b1", ".and.popc"),
    ],
)
def test_products_of_whole_numbers(columns: int, c: str, a: str, b: str, more: str, in_registers: bool) -> None:
    random, is_half, is_integer = np.random.default_rng(columns), c == "f16", c == "s32"
    depth = 256 // BITS[a]
    left, right = numbers(random, a, (ROWS, depth)), numbers(random, b, (columns, depth))
    start = random.integers(-99, 100, (ROWS, columns))
    if more == ".satfinite":
        start = np.where(start < 0, -(2**31), 2**31 - 1)
    want = start + (1 if is_integer else -1) * (left @ right.T)
    want = np.clip(want, -(2**31), 2**31 - 1)
    words = np.float16 if is_half else np.int32 if is_integer else np.float32
    given = registers_of(start.astype(words), is_half)[None]
    opcode = f"m64n{columns}k{depth}.{c}.{a}.{b}{more}"
    got = launch(opcode, raw_of(left, a)[None], raw_of(right, b)[None], given, in_registers, sign=-1)
    np.testing.assert_array_equal(got[0], registers_of(want.astype(words), is_half))


@cache
def recorded() -> dict[str, Any]:
    with np.load(DATA / "wgmma_forms.npz") as stored:
        return {name: stored[name] for name in stored.files}


FORMS = [name.removeprefix("d.") for name in recorded() if name.startswith("d.")]


def test_every_type_was_recorded() -> None:
    types = {tuple(name.split(".")[1:4]) for name in FORMS}
    small = {(c, a, b) for c in ("f16", "f32") for a in SMALL_FLOATS for b in SMALL_FLOATS}
    whole = {("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")} | {("s32", "b1", "b1")}
    plain = {("f32", kind, kind) for kind in ("bf16", "f16", "tf32")} | {("f16", "f16", "f16")}
    assert types == small | whole | plain


@pytest.mark.parametrize("name", FORMS)
def test_products_give_the_recorded_bits(name: str) -> None:
    opcode = name.removesuffix(".rs").removesuffix(".x4")
    rows, b, given = (recorded()[f"{role}.{opcode}"] for role in "abc")
    wanted, is_half = recorded()[f"d.{name}"], given.dtype == np.uint16
    a, c = np.zeros((12, ROWS, 32), np.uint8), np.zeros((12, ROWS, 8), given.dtype)
    chosen = ROWS_OF_TILE[:, :, None]
    np.put_along_axis(a, chosen, rows, 1)
    np.put_along_axis(c, chosen, given, 1)
    start = np.stack([registers_of(tile, is_half) for tile in c])
    got = launch(opcode, a, b, start, name.endswith(".rs"), times=4 if name.endswith(".x4") else 1)
    of_rows = np.stack([matrix_of(tile, is_half) for tile in got])
    np.testing.assert_array_equal(np.take_along_axis(of_rows, chosen, 1), wanted)


@pytest.mark.parametrize(
    ("opcode", "words"),
    [
        ("m64n8k16.f32.e4m3.e4m3", "there is no such form"),
        ("m64n8k32.f32.e4m3.s8", "there is no such form"),
        ("m64n8k32.s32.e4m3.e4m3", "there is no such form"),
        ("m64n8k16.f16.bf16.bf16", "there is no such form"),
        ("m64n8k16.s32.s8.s8", "there is no such form"),
        ("m64n8k32.s32.s8.b1", "there is no such form"),
        ("m64n8k256.s32.b1.b1", "there is no such form"),
        ("m64n40k32.s32.s8.s8", "of integers above 32 one of 16"),
    ],
)
def test_forms_that_are_refused_say_why(opcode: str, words: str) -> None:
    text = ".version 8.4\n.target sm_90a\n.address_size 64\n.visible .entry kernel()\n{\n.reg .b32 %d<32>;"
    text += ".reg .b64 %rd<3>; .reg .pred %p;\n"
    text += f"wgmma.mma_async.sync.aligned.{opcode} {{%d0, %d1, %d2, %d3}}, %rd1, %rd2, %p;\nret;\n}}\n"
    with pytest.raises(UnsupportedOpcode, match=re.escape(words)):
        Module(text).kernel("kernel")
