"""Table entries of comparisons: ``setp`` and ``set``, with and without a combining predicate."""

from __future__ import annotations

from functools import partial

from g4kv_cli.device.emulated import packed16
from g4kv_cli.device.emulated.numerics import flush
from g4kv_cli.device.emulated.operation import EXPRESSION_NAMES, Op, call, inline

_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INVERSE = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMBINE = {"and": "&", "or": "|", "xor": "^"}


def float_comparison(name: str) -> str:
    """Python source that compares float arrays {0} and {1}; a NaN makes u-forms true and the others false."""
    if name in _ORDERED:
        return f"{{0}} {_ORDERED[name]} {{1}}"
    if name in _INVERSE:
        return f"~({{0}} {_INVERSE[name]} {{1}})"
    return {
        "ne": "({0} < {1}) | ({0} > {1})",
        "equ": "~(({0} < {1}) | ({0} > {1}))",
        "neu": "{0} != {1}",
        "num": "({0} == {0}) & ({1} == {1})",
        "nan": "({0} != {0}) | ({1} != {1})",
    }[name]


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


def comparison_operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for width, view in ((16, "np.int16"), (32, "i32"), (64, "i64")):
        kind = f"b{width}"
        for name, sign in ({"ne": "!="} | _ORDERED).items():
            plain, viewed = f"{{0}} {sign} {{1}}", f"{{0}}.view({view}) {sign} {{1}}.view({view})"
            table |= _with_combinations(name, f"u{width}", kind, plain)
            table |= _with_combinations(name, f"s{width}", kind, plain if name in {"eq", "ne"} else viewed)
            if name in {"eq", "ne"}:
                table |= _with_combinations(name, f"b{width}", kind, plain)
        for name, sign in _UNSIGNED.items():
            table |= _with_combinations(name, f"u{width}", kind, f"{{0}} {sign} {{1}}")
    for name in FLOAT_COMPARISONS:
        source = float_comparison(name)
        table |= _with_combinations(name, "f32", "b32", source.format("{0}.view(f32)", "{1}.view(f32)"))
        table |= _with_combinations(
            name, "f64", "b64", source.format("{0}.view(np.float64)", "{1}.view(np.float64)")
        )
        table |= _with_combinations(
            name, "f16", "b16", source.format("{0}.view(np.float16)", "{1}.view(np.float16)")
        )
        compare = eval(f"lambda a, b: {source.format('a', 'b')}", dict(EXPRESSION_NAMES))
        table |= _called(name, "ftz.f32", "b32", partial(_flushed, compare))
        table |= _called(name, "bf16", "b16", partial(_widened, compare))
    return table


def _flushed(compare, a, b):  # type: ignore[no-untyped-def]
    return compare(flush(a).view("f4"), flush(b).view("f4"))


def _widened(compare, a, b):  # type: ignore[no-untyped-def]
    return compare(packed16.as_float32(a, "bf16"), packed16.as_float32(b, "bf16"))


def _with_combinations(name: str, type_name: str, kind: str, source: str) -> dict[str, Op]:
    table = {f"setp.{name}.{type_name}": inline("pred", (kind, kind), source)}
    for word, sign in _COMBINE.items():
        table[f"setp.{name}.{word}.{type_name}"] = inline(
            "pred", (kind, kind, "pred"), f"({source}) {sign} {{2}}"
        )
    results = {
        "u32": "np.where({0}, u32(0xffffffff), u32(0))",
        "f32": "np.where({0}, u32(0x3f800000), u32(0))",
    }
    for result, template in (results | {"s32": results["u32"]}).items():
        table[f"set.{name}.{result}.{type_name}"] = inline("b32", (kind, kind), template.format(source))
    return table


def _called(name: str, type_name: str, kind: str, compare) -> dict[str, Op]:  # type: ignore[no-untyped-def]
    table = {f"setp.{name}.{type_name}": call("pred", (kind, kind), compare)}
    table[f"setp.{name}.and.{type_name}"] = call(
        "pred", (kind, kind, "pred"), lambda a, b, p: compare(a, b) & p
    )
    table[f"setp.{name}.or.{type_name}"] = call(
        "pred", (kind, kind, "pred"), lambda a, b, p: compare(a, b) | p
    )
    table[f"setp.{name}.xor.{type_name}"] = call(
        "pred", (kind, kind, "pred"), lambda a, b, p: compare(a, b) ^ p
    )
    return table
