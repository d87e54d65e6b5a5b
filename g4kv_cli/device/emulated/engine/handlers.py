"""Which handlers of the engine do an elementwise opcode: their names, applied one after another.

The first takes the opcode's operands, the others the result before them. Kinds of operands and results are those of the
table of opcodes; 16-bit values lie in 32-bit lanes with zeros above. What the table knows and this does not is left to
the interpreter.
"""

from __future__ import annotations

from itertools import product

_ROUNDED = ("", ".rn")
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_SIGNED_COMPARISONS = ("lt", "le", "gt", "ge")
FLOAT_COMPARISONS = (*_SIGNED_COMPARISONS, "eq", "ne", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
COMBINATIONS = ("and", "or", "xor")
"""setp with a third operand; lowered to the comparison and the operation of two predicates."""


def _integers() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for sign, width in product("us", (16, 32, 64)):
        name = f"{sign}{width}"
        for stem in ("add", "sub", "mul.lo", "mad.lo"):
            table[f"{stem}.{name}"] = (f"{stem.replace('.', '_')}_b{width}",)
        for stem in ("min", "max"):
            table[f"{stem}.{name}"] = (f"{stem}_{'u32' if name == 'u16' else name}",)
        if width < 64:
            for stem in ("mul.wide", "mad.wide"):
                table[f"{stem}.{name}"] = (f"{stem.replace('.', '_')}_{name}",)
        if width != 16:
            for stem in ("div", "rem", "mul.hi"):
                table[f"{stem}.{name}"] = (f"{stem.replace('.', '_')}_{name}",)
    for width in (16, 32, 64):
        kind = f"b{width}"
        for stem in ("and", "or", "xor"):
            table[f"{stem}.{kind}"] = (f"{stem}_b{max(width, 32)}",)
        table[f"not.{kind}"] = (f"not_{kind}",)
        table[f"neg.s{width}"] = (f"neg_s{width}",)
        table[f"shl.{kind}"] = (f"shl_{kind}",)
        table[f"shr.s{width}"] = (f"shr_s{width}",)
        for sign in "bu":
            table[f"shr.{sign}{width}"] = (f"shr_u{width}",)
        for sign in "busf":
            if (sign, width) != ("f", 16):
                table[f"selp.{sign}{width}"] = (f"selp_b{max(width, 32)}",)
    for stem in ("and", "or", "xor", "not"):
        table[f"{stem}.pred"] = (f"{stem}_pred",)
    for name in (
        *(
            "abs.s32",
            "abs.s64",
            "popc.b32",
            "popc.b64",
            "clz.b32",
            "clz.b64",
            "bfe.u32",
            "bfe.s32",
            "brev.b32",
            "bfind.u32",
            "bfi.b32",
            "bfi.b64",
        ),
        *(
            "mul.hi.u16",
            "prmt.b32",
            "lop3.b32",
            "shf.l.wrap.b32",
            "shf.r.wrap.b32",
            "shf.l.clamp.b32",
            "shf.r.clamp.b32",
        ),
    ):
        table[name] = (name.replace(".", "_"),)
    return table


def _comparisons() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for width in (16, 32, 64):
        for sign in "bus":
            for name in ("eq", "ne"):
                table[f"setp.{name}.{sign}{width}"] = (f"setp_{name}_b{max(width, 32)}",)
        for name in _SIGNED_COMPARISONS:
            table[f"setp.{name}.s{width}"] = (f"setp_{name}_s{width}",)
            table[f"setp.{name}.u{width}"] = (f"setp_{name}_u{max(width, 32)}",)
        for name, same in _UNSIGNED_COMPARISONS.items():
            table[f"setp.{name}.u{width}"] = (f"setp_{same}_u{max(width, 32)}",)
    for name in FLOAT_COMPARISONS:
        table[f"setp.{name}.f32"] = (f"setp_{name}_f32",)
        table[f"setp.{name}.ftz.f32"] = (f"setp_{name}_ftz_f32",)
        table[f"setp.{name}.f64"] = (f"setp_{name}_f64",)
    return table


def _floats() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for stem, rounded in product(("add", "sub", "mul"), _ROUNDED):
        table[f"{stem}{rounded}.f32"] = (f"{stem}_f32",)
        table[f"{stem}{rounded}.sat.f32"] = (f"{stem}_sat_f32",)
        table[f"{stem}{rounded}.ftz.f32"] = (f"{stem}_ftz_f32",)
        table[f"{stem}{rounded}.ftz.sat.f32"] = (f"{stem}_ftz_sat_f32",)
    for stem in ("min", "max"):
        for form in ("", ".ftz", ".NaN"):
            table[f"{stem}{form}.f32"] = (f"{stem}{form.replace('.', '_')}_f32",)
    for stem, form in product(("neg", "abs"), ("", ".ftz")):
        table[f"{stem}{form}.f32"] = (f"{stem}{form.replace('.', '_')}_f32",)
    for stem, form in product(("ex2", "lg2", "rcp", "rsqrt", "sqrt"), ("", ".ftz")):
        table[f"{stem}.approx{form}.f32"] = (f"{stem}_approx{form.replace('.', '_')}_f32",)
    for stem, mode in product(("add", "sub", "mul", "fma"), ("rz", "rm", "rp")):
        table[f"{stem}.{mode}.f32"] = (f"{stem}_{mode}_f32",)
    for stem, form in product(("div.full", "div.approx"), ("", ".ftz")):
        table[f"{stem}{form}.f32"] = (f"{stem}{form}_f32".replace(".", "_"),)
    for stem, form in product(("sin", "cos"), ("", ".ftz")):
        table[f"{stem}.approx{form}.f32"] = (f"{stem}_approx_f32",)
    for stem, form in product(("fma", "div", "rcp", "sqrt"), ("", ".sat")):
        if stem == "fma" or not form:
            table[f"{stem}.rn.ftz{form}.f32"] = (f"{stem}_rn_ftz{form.replace('.', '_')}_f32",)
    for name in ("fma.rn.f32", "fma.rn.sat.f32", "div.rn.f32", "rcp.rn.f32", "sqrt.rn.f32", "copysign.f32"):
        table[name] = (name.replace(".", "_"),)
    return table


def _halves() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for form in ("f16", "bf16"):
        for kind in (form, f"{form}x2"):
            for stem, rounded in product(("add", "sub", "mul"), _ROUNDED):
                table[f"{stem}{rounded}.{kind}"] = (f"{stem}_{kind}",)
            for stem in ("fma.rn", "min", "max", "min.NaN", "max.NaN", "neg", "abs"):
                table[f"{stem}.{kind}"] = (f"{stem.replace('.', '_')}_{kind}",)
        for name in FLOAT_COMPARISONS:
            table[f"setp.{name}.{form}"] = (f"setp_{name}_{form}",)
    return table


def _doubles() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for stem, rounded in product(("add", "sub", "mul"), _ROUNDED):
        table[f"{stem}{rounded}.f64"] = (f"{stem}_f64",)
    for name in (
        *("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64"),
        *("fma.rn.f64", "div.rn.f64", "rcp.rn.f64", "sqrt.rn.f64", "min.f64", "max.f64", "neg.f64", "abs.f64"),
        *("copysign.f64", "cvt.f64.f32", "cvt.rn.f32.f64", "cvt.rzi.s32.f64", "cvt.rzi.u32.f64"),
        *(f"cvt.rn.f64.{kind}" for kind in ("s32", "u32", "s64", "u64")),
        *(f"cvt.{how}" for kind in ("s64", "u64") for how in (f"rn.f32.{kind}", f"rzi.{kind}.f32", f"rzi.{kind}.f64")),
    ):
        table[name] = (name.replace(".", "_"),)
    return table


_READ = {"u8": ("cut_b8",), "s8": ("sign_b32_b8",), "s16": ("sign_b32_b16",)}
"""A narrow integer as 32 bits of its value, from a register that holds it."""
_WRITE = {"u8": ("cut_b8",), "s8": ("sign_b32_b8", "cut_b16_b32"), "u16": ("cut_b16_b32",), "s16": ("cut_b16_b32",)}


def _conversions() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    names = [f"{sign}{width}" for sign, width in product("us", (8, 16, 32, 64))]
    for target, source in product(names, names):
        steps: tuple[str, ...] = ("cut_b32_b64",) if source.endswith("64") else _READ.get(source, ())
        if target.endswith("64"):
            if source.endswith("64"):
                steps = ("mov_b64",)
            else:
                steps += ("sign_b64_b32",) if source[0] == "s" else ("widen_b64_b32",)
        else:
            steps += _WRITE.get(target, ())
        table[f"cvt.{target}.{source}"] = steps or ("mov_b32",)
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for target in ("f32", "s32", "u32"):
            table[f"cvt.{mode}.{target}.f32"] = (f"cvt_{mode}_{target}_f32",)
        for form in ("f16", "bf16"):
            table[f"cvt.{mode}.{form}.{form}"] = (f"cvt_f32_{form}", f"cvt_{mode}_f32_f32", f"cvt_rn_{form}_f32")
        for target in ("s32", "u32", *_WRITE):
            narrow = () if target.endswith("32") else (f"clamp_{target}_s32",)
            wide = f"cvt_{mode}_{'u32' if target == 'u32' else 's32'}_f32"
            for source, widen in (("f32", ()), ("f16", ("cvt_f32_f16",)), ("bf16", ("cvt_f32_bf16",))):
                for word in ("", ".sat"):
                    table[f"cvt.{mode}{word}.{target}.{source}"] = (*widen, wide, *narrow)
    for target, source in product(("u8", "s8", "u16", "s16", "u32", "s32"), ("s32", "u32")):
        if target != source:
            table[f"cvt.sat.{target}.{source}"] = (f"clamp_{target}_{source}",)
    for name in (
        *(
            "cvt.sat.f32.f32",
            "cvt.rn.bf16x2.f32",
            "cvt.rn.bf16.f32",
            "cvt.f32.bf16",
            "cvt.rn.f16x2.f32",
            "cvt.rn.f16.f32",
        ),
        *("cvt.f32.f16", "cvt.rn.f32.s32", "cvt.rn.f32.u32"),
    ):
        table[name] = (name.replace(".", "_"),)
    return table


def _narrow() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for name, word in product(("e4m3x2", "e5m2x2"), ("", ".relu")):
        for source in ("f32", "f16x2"):
            opcode = f"cvt.rn.satfinite{word}.{name}.{source}"
            table[opcode] = (opcode.replace(".", "_"),)
        table[f"cvt.rn{word}.f16x2.{name}"] = (f"cvt_rn{word}_f16x2_{name}".replace(".", "_"),)
    for form in ("f16", "bf16"):
        for kind, relu in ((form, "relu_16"), (f"{form}x2", "relu_16x2")):
            table[f"fma.rn.relu.{kind}"] = (f"fma_rn_{kind}", relu)
            table[f"cvt.rn.relu.{kind}.f32"] = (f"cvt_rn_{kind}_f32", relu)
        for source in ("s16", "u16", "s32", "u32"):
            table[f"cvt.rn.{form}.{source}"] = (f"cvt_rn_{form}_{source}",)
    for types in product(("u32", "s32"), repeat=2):
        for stem in ("dp4a", "dp2a.lo", "dp2a.hi"):
            table[f"{stem}.{'.'.join(types)}"] = (f"{stem.replace('.', '_')}_{'_'.join(types)}",)
    for sign, stem in product("us", ("min", "max")):
        table[f"{stem}.{sign}16x2"] = (f"{stem}_{sign}16x2",)
    for stem in ("min", "max"):
        table[f"{stem}.relu.s32"] = (f"{stem}_s32", "relu_s32")
        table[f"{stem}.relu.s16x2"] = table[f"{stem}.s16x2.relu"] = (f"{stem}_s16x2", "relu_16x2")
    for sign in "us":
        table[f"add.{sign}16x2"] = ("add_16x2",)
    for name in ("mul24.lo.u32", "mul24.lo.s32", "mad.hi.u32", "mad.hi.s32", "cnot.b32"):
        table[name] = (name.replace(".", "_"),)
    for letter, kind in product("busf", ("s32", "f32")):
        table[f"slct.{letter}32.{kind}"] = (f"slct_b32_{kind}",)
    for stem in ("add", "sub", "mul", "fma"):
        table[f"{stem}.rn.f32x2"] = (f"{stem}_f32x2",)
    for stem in ("div", "rem"):
        table[f"{stem}.u16"] = (f"{stem}_u32", "cut_b16_b32")
    for mode in ("rna", "rn"):
        table[f"cvt.{mode}.tf32.f32"] = (f"cvt_{mode}_tf32_f32",)
    for name in ("u8.s32.b32", "s8.s32.b32", "u16.s32", "s16.s32"):
        table[f"cvt.pack.sat.{name}"] = (f"cvt_pack_sat_{name.replace('.', '_')}",)
    for name in ("f32", "f16", "f16x2", "bf16", "bf16x2"):
        table[f"tanh.approx.{name}"] = (f"tanh_approx_{name}",)
    for name in ("f16", "f16x2", "ftz.bf16", "ftz.bf16x2"):
        table[f"ex2.approx.{name}"] = (f"ex2_approx_{name.removeprefix('ftz.')}",)
    return table


HANDLERS: dict[str, tuple[str, ...]] = {
    **_integers(),
    **_comparisons(),
    **_floats(),
    **_halves(),
    **_doubles(),
    **_conversions(),
    **_narrow(),
}
