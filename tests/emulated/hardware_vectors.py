"""Opcode vectors recorded on an NVIDIA H200 (driver 580.159.04, 29 Nov 2026): data/hw/vec.npz and
vec_ftz.npz.

vec.npz holds inputs ``in.GROUP.INDEX`` and outputs ``out.GROUP.NAME`` as raw bits. Every output was computed
by a kernel of one inline-assembly statement, ``assembly(name)``: %0 is the result, %1 and on the inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

DATA = Path(__file__).resolve().parent.parent / "data" / "hw"

FLOAT_COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
)
SIGNED_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_COMPARISONS = ("eq", "ne", "lo", "ls", "hi", "hs", "lt", "le", "gt", "ge")

SUPPORTED = {
    "U": """
        ex2.approx.f32 ex2.approx.ftz.f32 lg2.approx.f32 lg2.approx.ftz.f32 rsqrt.approx.f32 rsqrt.approx.ftz.f32
        rcp.approx.f32 rcp.approx.ftz.f32 rcp.rn.f32 rcp.rn.ftz.f32 sqrt.rn.f32 sqrt.rn.ftz.f32 sqrt.approx.f32
        sqrt.approx.ftz.f32 abs.f32 neg.f32 abs.ftz.f32 neg.ftz.f32 cvt.rni.f32.f32 cvt.rzi.f32.f32 cvt.rmi.f32.f32
        cvt.rpi.f32.f32 cvt.rni.s32.f32 cvt.rzi.s32.f32 cvt.rmi.s32.f32 cvt.rpi.s32.f32 cvt.rni.u32.f32
        cvt.rzi.u32.f32 cvt.rzi.ftz.s32.f32 cvt.rzi.s8.f32 cvt.rzi.u8.f32 cvt.rzi.s16.f32 cvt.rzi.u16.f32
        cvt.sat.f32.f32 cvt.ftz.f32.f32 cvt.rni.s64.f32 cvt.rzi.s64.f32 cvt.rzi.u64.f32 cvt.f64.f32 cvt.rn.bf16.f32
        cvt.rz.bf16.f32 cvt.rn.f16.f32 cvt.rz.f16.f32 cvt.rn.relu.bf16.f32 cvt.rna.tf32.f32
        sin.approx.f32 sin.approx.ftz.f32 cos.approx.f32 cos.approx.ftz.f32 tanh.approx.f32
    """,
    "B": """
        add.f32 add.ftz.f32 add.rz.f32 add.sat.f32 sub.f32 mul.f32 mul.ftz.f32 mul.rz.f32 min.f32 max.f32 min.NaN.f32
        max.NaN.f32 min.ftz.f32 max.ftz.f32 div.rn.f32 div.rn.ftz.f32 div.full.f32 div.full.ftz.f32 div.approx.f32
        div.approx.ftz.f32 copysign.f32 cvt.rn.bf16x2.f32 cvt.rz.bf16x2.f32 cvt.rn.relu.bf16x2.f32 cvt.rn.f16x2.f32
        add.rm.f32 add.rp.f32 cvt.rn.satfinite.e4m3x2.f32 cvt.rn.satfinite.e5m2x2.f32
        cvt.rn.satfinite.relu.e4m3x2.f32 setp.f32 setp.ftz.f32 atom.global.add.f32 atom.shared.add.f32
    """,
    "T": "fma.rn.f32 fma.rn.ftz.f32 fma.rz.f32 fma.rn.sat.f32",
    "H": "fma.rn.bf16x2 fma.rn.relu.bf16x2 fma.rn.f16x2 fma.rn.relu.f16x2",
    "H2": """
        add.bf16x2 sub.bf16x2 mul.bf16x2 min.bf16x2 max.bf16x2 min.NaN.bf16x2 max.NaN.bf16x2 add.f16x2 sub.f16x2
        mul.f16x2 min.f16x2 max.f16x2 min.NaN.f16x2 max.NaN.f16x2 add.rn.bf16x2 mul.rn.bf16x2 sub.rn.bf16x2
    """,
    "H1": """
        neg.bf16x2 abs.bf16x2 neg.f16x2 abs.f16x2 ex2.approx.ftz.bf16x2 ex2.approx.f16x2 tanh.approx.bf16x2
    """,
    "H1h": "cvt.f32.bf16 cvt.f32.f16",
    "E": "cvt.rn.f16x2.e4m3x2 cvt.rn.f16x2.e5m2x2",
    "I1": """
        cvt.rn.f32.s32 cvt.rn.f32.u32 cvt.rz.f32.s32 cvt.s8.s32 cvt.u8.u32 cvt.s16.s32 cvt.u16.u32 cvt.sat.s8.s32
        cvt.sat.u8.s32 cvt.sat.s16.s32 cvt.sat.u16.u32 brev.b32 popc.b32 clz.b32 not.b32 neg.s32 abs.s32 bfind.u32
        bfind.s32 bfind.shiftamt.u32 cnot.b32 cvt.s64.s32 cvt.u64.u32 cvt.rn.bf16.s32? cvt.rn.f16.s32
    """,
    "L1": """
        cvt.rn.f32.s64 cvt.rn.f32.u64 cvt.u32.u64 cvt.s32.s64 popc.b64 clz.b64 bfind.u64 bfind.s64 neg.s64 abs.s64
        not.b64 brev.b64
    """,
    "I2": """
        add.s32 add.sat.s32 sub.sat.s32 mul.lo.s32 mul.hi.s32 mul.hi.u32 mul24.lo.s32 mul24.hi.u32 div.s32 div.u32
        rem.s32 rem.u32 min.s32 max.s32 min.u32 max.u32 mul.wide.s32 mul.wide.u32 setp.s32 setp.u32 addcc subcc
    """,
    "S2": """
        shl.b32 shr.u32 shr.s32 shr.b32 szext.wrap.s32 szext.clamp.u32 bmsk.wrap.b32 bmsk.clamp.b32
    """,
    "S3": "shf.l.wrap.b32 shf.l.clamp.b32 shf.r.wrap.b32 shf.r.clamp.b32",
    "LS": "shl.b64 shr.u64 shr.s64",
    "L2": """
        add.s64 mul.lo.s64 mul.hi.s64 mul.hi.u64 div.s64 div.u64 rem.s64 rem.u64 min.s64 max.u64 setp.s64 setp.u64
    """,
    "I3": """
        mad.lo.s32 mad.hi.s32 mad.hi.u32 sad.s32 sad.u32 dp4a.s32.s32 dp4a.u32.u32 dp4a.s32.u32 dp4a.u32.s32
        dp2a.lo.s32.s32 dp2a.hi.u32.s32 slct.s32.s32 prmt.b32 prmt.b32.f4e prmt.b32.b4e prmt.b32.rc8 prmt.b32.ecl
        prmt.b32.ecr prmt.b32.rc16 slct.b32.f32 selp.b32 lop3.b32.0x80 lop3.b32.0xfe lop3.b32.0x96 lop3.b32.0xca
        lop3.b32.0xe8 lop3.b32.0x01 lop3.b32.0x6a lop3.b32.0x1b lop3.b32.0xd8 lop3.b32.0x3c lop3.b32.0x72
        lop3.b32.0xf8 lop3.b32.0x40 lop3.b32.0x2d lop3.b32.0xb4 lop3.b32.0x9f
    """,
    "IW": "mad.wide.s32 mad.wide.u32",
    "BF": "bfe.u32 bfe.s32",
    "BFL": "bfe.u64 bfe.s64",
    "BI": "bfi.b32",
    "BIL": "bfi.b64",
}
"""Recorded opcodes the table supports, by input group."""

LIMITED_BELOW_256 = {"bfe.u64", "bfe.s64", "bfi.b64"}
"""Opcodes whose last two operands (position, length) must be below 256; beyond, the table raises."""

_SHARED_INPUTS = {"H2": "H", "H1": "H"}


def cases(table: dict[str, str]) -> list[tuple[str, str]]:
    """(group, name) of every opcode of SUPPORTED."""
    return [(group, name) for group, names in table.items() for name in names.split()]


@cache
def _vectors() -> dict[str, Any]:
    with np.load(DATA / "vec.npz") as stored:
        return {name: stored[name] for name in stored.files}


def recorded_names() -> set[tuple[str, str]]:
    """(group, name) of every recorded output."""
    keys = (key.split(".", 2) for key in _vectors() if key.startswith("out."))
    return {(group, name) for _, group, name in keys}


def inputs(group: str) -> list[Any]:
    """The recorded inputs of a group, one array an operand."""
    source = _SHARED_INPUTS.get(group, group)
    count = {"H2": 2, "H1": 1}.get(group, 8)
    keys = [f"in.{source}.{index}" for index in range(count)]
    return [_vectors()[key] for key in keys if key in _vectors()]


def output(group: str, name: str) -> Any:
    """The recorded output, in the dtype of its register."""
    return _vectors()[f"out.{group}.{name}"]


def flush_boundary() -> tuple[list[Any], dict[str, Any]]:
    """vec_ftz.npz: inputs a, b, c around the flush boundary, and outputs by opcode."""
    with np.load(DATA / "vec_ftz.npz") as stored:
        data = {name: stored[name] for name in stored.files}
    return [data.pop(name) for name in "abc"], data


def _comparisons(names: tuple[str, ...], type_name: str) -> str:
    parts = "".join(
        f" setp.{name}.{type_name} p, %1, %2; selp.b32 t, {1 << bit}, 0, p; or.b32 %0, %0, t;"
        for bit, name in enumerate(names)
    )
    return "{.reg .pred p; .reg .b32 t; mov.u32 %0, 0;" + parts + "}"


def assembly(group: str, name: str) -> str:
    """The inline assembly that was recorded under a name."""
    operands = ", ".join(f"%{index}" for index in range(len(inputs(group)) + 1))
    special = {
        "setp.f32": _comparisons(FLOAT_COMPARISONS, "f32"),
        "setp.ftz.f32": _comparisons(FLOAT_COMPARISONS, "ftz.f32"),
        "setp.s32": _comparisons(SIGNED_COMPARISONS, "s32"),
        "setp.u32": _comparisons(UNSIGNED_COMPARISONS, "u32"),
        "setp.s64": _comparisons(SIGNED_COMPARISONS, "s64"),
        "setp.u64": _comparisons(SIGNED_COMPARISONS, "u64"),
        "selp.b32": "{.reg .pred p; setp.lt.s32 p, %3, 0; selp.b32 %0, %1, %2, p;}",
        "addcc": "{.reg .u32 x,y; add.cc.u32 x, %1, %2; addc.u32 y, %2, %1; mov.b64 %0, {x,y};}",
        "subcc": "{.reg .u32 x,y; sub.cc.u32 x, %1, %2; subc.u32 y, %2, %1; mov.b64 %0, {x,y};}",
        "cvt.f64.f32": "{.reg .f64 t; cvt.f64.f32 t, %1; mov.b64 %0, t;}",
        "cvt.rn.bf16.s32?": "{.reg .f32 t; cvt.rn.f32.s32 t, %1; cvt.rn.bf16.f32 %0, t;}",
        # red.global flushes subnormals, atom.shared keeps them.
        "atom.global.add.f32": "add.ftz.f32 %0, %1, %2;",
        "atom.shared.add.f32": "add.f32 %0, %1, %2;",
    }
    if name.startswith("lop3."):
        opcode, table = name.rsplit(".", 1)
        return f"{opcode} {operands}, {int(table, 16)};"
    return special.get(name, f"{name} {operands};")


def statements(text: str) -> list[tuple[str, list[str]]]:
    """(opcode, operands) of the instructions of an inline assembly, declarations left out."""
    found = []
    inside = text[1:-1] if text.startswith("{.reg") else text
    for statement in inside.split(";"):
        opcode, _, rest = statement.strip().partition(" ")
        if opcode and opcode != ".reg":
            found.append((opcode, [part.strip() for part in re.findall(r"\s*\{[^}]*\}|[^,]+", rest)]))
    return found


@cache
def _more() -> dict[str, Any]:
    with np.load(DATA / "vec_more.npz") as stored:
        return {name: stored[name] for name in stored.files}


def more_signatures() -> dict[str, list[str]]:
    """vec_more.npz: a second recording on the same machine, of every other opcode of the table: result kind and
    operand kinds by opcode. The three words of ``carry.VERB.TYPE`` stand for ``carry_assembly``."""
    signatures: dict[str, list[str]] = json.loads(str(_more()["signatures"]))
    return signatures


def more_inputs(kinds: list[str]) -> list[Any]:
    """Operands of the second recording: by kind and position."""
    arrays = [_more()[f"in.{kind}.{position}"] for position, kind in enumerate(kinds)]
    return [array != 0 if kind == "pred" else array for kind, array in zip(kinds, arrays, strict=True)]


def more_output(name: str, kind: str) -> Any:
    """Output of the second recording."""
    bits = _more()[f"out.{name}"]
    return np.unpackbits(bits, count=_more()["in.b32.0"].size).astype(bool) if kind == "pred" else bits


def carry_assembly(name: str) -> str:
    """What was recorded as carry.add.u64 and its kin: all three carry forms, folded into one word."""
    _, verb, type_name = name.split(".")
    bits = f"b{type_name[1:]}"
    return (
        f"{{.reg .{bits} x,y,z; {verb}.cc.{type_name} x, %1, %2; {verb}c.cc.{type_name} y, %2, %1; "
        f"{verb}c.{type_name} z, %1, %1; shl.{bits} y, y, 1; xor.{bits} x, x, y; shl.{bits} z, z, 2; "
        f"xor.{bits} %0, x, z;}}"
    )


DTYPES = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def evaluate(text: str, operands: list[Any], result_dtype: Any, apply: Callable[[str, list[Any]], Any]) -> Any:
    """Run an inline assembly, each opcode by ``apply(opcode, operands of its kinds)``."""
    registers: dict[str, Any] = {f"%{index + 1}": array for index, array in enumerate(operands)}
    registers["carry"] = None
    for opcode, names in statements(text):
        target, sources = names[0], names[1:]
        if opcode.startswith("mov."):
            registers[target] = _move(registers, sources[0])
            continue
        op = ELEMENTWISE[opcode]
        arguments = [_value(registers, name, kind) for name, kind in zip(sources, op.operands, strict=False)]
        arguments += [registers["carry"]] * (len(op.operands) - len(arguments))
        results = apply(opcode, arguments)
        if len(op.results) == 2:
            results, registers["carry"] = results
        if target == "%0" and results.dtype != result_dtype:
            results = _widened(results, result_dtype, op.sign_extends)
        registers[target] = results
    return registers["%0"]


def _value(registers: dict[str, Any], name: str, kind: str) -> Any:
    if kind == "pred":
        return registers[name]
    array = registers[name] if name in registers else np.array([int(name)])
    return array.astype(DTYPES[kind])


def _move(registers: dict[str, Any], source: str) -> Any:
    if source.startswith("{"):
        low, high = (registers[name.strip()].astype(np.uint64) for name in source[1:-1].split(","))
        return low | (high << np.uint64(32))
    return registers[source] if source in registers else np.array([int(source)], np.uint32)


def _widened(results: Any, dtype: Any, sign_extends: bool) -> Any:
    signed = results.view(f"i{results.dtype.itemsize}")
    return (signed if sign_extends else results).astype(dtype)
