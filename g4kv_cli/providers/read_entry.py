"""Reads an [[entry]] of a manifest: what it makes for a call, its launches in order, their arguments."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from g4kv_cli.device.arguments import MAX_TENSOR_RANK, SWIZZLE_BYTES
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.manifest import (
    ELEMENT_KINDS,
    SCALAR_KINDS,
    STATUSES,
    VALUE_KINDS,
    ArgumentSpec,
    EntrySpec,
    Image,
    ImageKind,
    MadeArray,
    MapSpec,
    Returns,
    Step,
    Text,
)
from g4kv_cli.providers.schema import Table

_FIELD = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OF_LAUNCHES = ("grid", "block", "cluster", "shared", "overlap", "cooperative")
_OTHER_TYPES = re.compile(r"f16|fp16|float16|half|f?p?8|fp?4|e[45]m[23]|float8")
_NOTHING = Expression.parse("0")
"""The value of a struct, which has fields."""


def read_entry(table: Table, images: dict[str, Image]) -> EntrySpec:
    names = tuple(name.strip() for name in table.text("name").split("|"))
    if not all(names):
        raise table.error("name", "has an empty name")
    only_if = table.table("only_if")
    conditions: list[tuple[Expression, str]] = []
    if only_if is not None:
        for text in only_if.keys():  # noqa: SIM118 a Table is no mapping
            conditions.append((only_if.parsed(text, text), only_if.text(text)))
    host = tuple(table.mapping("host", _made).values())
    of_host = {made.name for made in host}
    spec = EntrySpec(
        names,
        table.line,
        tuple(conditions),
        table.texts("requires"),
        tuple(table.mapping("let", _named_expression).items()),
        tuple(table.mapping("arrays", _made).values()),
        tuple(table.mapping("workspace", _scratch).values()),
        tuple(_step(step, images, of_host) for step in table.tables("launch")),
        tuple(_prepared(step, images) for step in table.tables("prepare")),
        host,
        tuple(table.mapping("results", _named_expression).items()),
    )
    table.finish()
    if not spec.steps:
        raise table.error("", "launches nothing: it has no [[entry.launch]]")
    _require_one_each(table, spec)
    return spec


def _require_one_each(table: Table, spec: EntrySpec) -> None:
    """Refuse a name that is made twice: expressions would see one of the two."""
    seen: set[str] = set()
    for key, made in (("arrays", spec.arrays), ("host", spec.host), ("workspace", spec.workspace)):
        for one in made:
            if one.name in seen:
                raise table.error(key, f"{one.name!r} is made twice")
            seen.add(one.name)
    for step in (*spec.prepare, *spec.steps):
        if step.gives in seen:
            raise table.error("", f"{step.gives!r}, which a function returns, is an array's name too")


def _prepared(table: Table, images: dict[str, Image]) -> Step:
    """A call that is made once for all runs of an entry's steps."""
    step = _step(table, images, ())
    if step.call is None:
        raise table.error("", "prepare has calls of C functions; what launches a kernel is an [[entry.launch]]")
    return step


def _require_name(table: Table, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise table.error(name, "is no name: letters, digits and _")


def _named_expression(table: Table, name: str) -> Expression:
    _require_name(table, name)
    return table.expression(name)


def _made(table: Table, name: str) -> MadeArray:
    """An array of values or of addresses, or a struct."""
    if isinstance(table.value(name), list):
        return MadeArray(name, "struct", _NOTHING, _struct(table, name, table.items(name)).fields)
    return _scratch(table, name, (*ELEMENT_KINDS, "ptr"))


def _scratch(table: Table, name: str, kinds: tuple[str, ...] = ELEMENT_KINDS) -> MadeArray:
    _require_name(table, name)
    kind, _, expression = table.text(name).partition(" ")
    if kind not in kinds or not expression.strip():
        words = "must be a type and an expression ('i32 kv_lens')"
        raise table.error(name, f"{words}; the types are {', '.join(kinds)}{_of_another_type(kind)}")
    return MadeArray(name, kind, table.parsed(name, expression))


def _of_another_type(kind: str) -> str:
    """What to say of an element type that kernels have and calls have not."""
    if not _OTHER_TYPES.match(kind):
        return ""
    return (
        f". {kind}: rows and pools of a call are bfloat16, and kernels for another type cannot be held to them; "
        "scratch of such a type goes as u16 or u8"
    )


def _step(table: Table, images: dict[str, Image], of_host: Collection[str]) -> Step:
    image = _text(table, "image")
    if all(isinstance(part, str) for part in image.parts) and image.text not in images:
        raise table.error("image", f"{image.text!r} is no image here; there are {', '.join(images) or 'none'}")
    condition = table.expression("if") if "if" in table else None
    call = _text(table, "call") if "call" in table else None
    symbol = _text(table, "symbol") if "symbol" in table else None
    kind = images[image.text].kind if image.text in images else None
    if call is not None and symbol is not None:
        raise table.error("symbol", "a launch has a call (an engine's C function) or a symbol (a kernel), not both")
    if kind == "library" and call is None:
        raise table.error("", "an image that is a library is called: give call = 'function'")
    if call is not None and kind not in ("library", None):
        raise table.error("call", f"only a library has functions to call; image {image.text!r} is of kind {kind}")
    if call is None and symbol is None and kind not in ("builder", "python"):
        raise table.error("", "lacks 'symbol', a pattern of the kernel's name, or 'call'")
    _require_fitting(table, kind, is_call=call is not None)
    of_grid = kind not in ("builder", "python") and call is None
    returns, gives = _returned(table) if call is not None else ("int", "")
    step = Step(
        image,
        table.line,
        condition,
        call,
        symbol,
        _extents(table, "grid", required=of_grid or kind == "builder"),
        _extents(table, "block", required=of_grid),
        _extents(table, "cluster", required=False),
        table.expression("shared") if "shared" in table else None,
        tuple(_argument(table, "arguments", item) for item in table.items("arguments")),
        tuple(table.mapping("named", lambda inner, key: _named_argument(inner, key, kind)).items()),
        table.texts("writes"),
        returns,
        gives,
        table.flag("overlap", False),
        table.flag("cooperative", False),
    )
    table.finish()
    if call is not None and any(argument.has_map for argument in step.arguments):
        raise table.error(
            "arguments",
            "a tensor map goes to a kernel; a function gets its address: make a struct of it in entry.host or "
            "entry.arrays, or let the function make its own",
        )
    on_host = sorted(step.pointer_names.intersection(of_host))
    if on_host and call is None:
        raise table.error(
            "", f"{on_host[0]!r} is in the host's memory (entry.host), where no kernel reads: move it to arrays"
        )
    return step


def _returned(table: Table) -> tuple[Returns, str]:
    """What a C function returns, and the name of a value."""
    text = table.text("returns", "int")
    kind, _, name = text.partition(" ")
    if text in STATUSES:
        return text, ""
    if kind not in ("ptr", *SCALAR_KINDS) or not _NAME.fullmatch(name):
        raise table.error(
            "returns",
            f"{text!r} is not one of {', '.join(STATUSES)}, nor a type and the name of a value ('ptr handle')",
        )
    return kind, name  # type: ignore[return-value]


def _require_fitting(table: Table, kind: ImageKind | None, *, is_call: bool) -> None:
    """Refuse keys that mean nothing for this kind of step: ignored, they would only seem to say something."""
    if is_call:
        stray: tuple[str, ...] = (*_OF_LAUNCHES, "writes", "named")
        why = "means nothing beside 'call': the function launches by itself, and takes its arguments in order"
    elif kind == "python":
        stray = (*_OF_LAUNCHES, "symbol", "arguments")
        why = "means nothing for a Python function, which is called with the arguments of 'named'"
    elif kind == "builder":
        stray, why = ("arguments",), "stand in an order that the builder knows: give them by name (named)"
    elif kind is None:  # an image of several, whose kind is known when its name is
        stray = ("named",) if "arguments" in table else ()
        why = "arguments stand in order (arguments) or by name (named), not both"
    else:
        stray, why = ("named",), f"goes with a builder or a Python function; image is of kind {kind}: give 'arguments'"
    present = table.keys()  # "in table" would count them among the fields there are
    for key in stray:
        if key in present:
            raise table.error(key, why)


def _named_argument(table: Table, key: str, kind: ImageKind | None) -> ArgumentSpec:
    """An argument by name; a Python function gets tensors, by their element kind."""
    value = table.value(key)
    if isinstance(value, dict) and kind != "python":
        return _tensor_map(table, key, value)
    return _argument(table, key, table.text(key), ELEMENT_KINDS if kind == "python" else VALUE_KINDS)


def _extents(table: Table, key: str, *, required: bool) -> tuple[Expression, ...]:
    if key not in table:
        if required:
            raise table.error("", f"lacks {key!r}: one to three expressions")
        return ()
    items = table.items(key)
    if not 1 <= len(items) <= 3:
        raise table.error(key, f"must be one to three expressions, got {len(items)}")
    return tuple(table.parsed(key, item) for item in items)


def _argument(table: Table, key: str, item: Any, kinds: tuple[str, ...] = VALUE_KINDS) -> ArgumentSpec:
    if isinstance(item, list):
        return _struct(table, key, item)
    if isinstance(item, dict):
        return _tensor_map(table, key, item)
    kind, _, expression = item.partition(" ") if isinstance(item, str) else ("", "", "")
    if kind not in kinds or not expression.strip():
        words = f"{item!r} must be a type and an expression ('i32 page_size')"
        raise table.error(key, f"{words}; the types are {', '.join(kinds)}{_of_another_type(kind)}")
    return ArgumentSpec(kind, table.parsed(key, expression))  # type: ignore[arg-type]


def _struct(table: Table, key: str, items: list[Any]) -> ArgumentSpec:
    """Fields in order, with C's alignment."""
    if not items:
        raise table.error(key, "a struct has at least one field")
    return ArgumentSpec("struct", fields=tuple(_argument(table, key, inner) for inner in items))


def _tensor_map(table: Table, key: str, item: Any) -> ArgumentSpec:
    """What cuTensorMapEncodeTiled takes: address, elements, extents, strides and a box."""
    inner = Table(table.document, item, (*table.path, key))
    address = inner.expression("tensor_map")
    extents, strides, box = (_expressions(inner, name) for name in ("extents", "strides", "box"))
    if not 1 <= len(extents) <= MAX_TENSOR_RANK or len(box) != len(extents) or len(strides) != len(extents) - 1:
        raise inner.error(
            "",
            f"a tensor map has 1 to {MAX_TENSOR_RANK} extents, a box of as many, and strides in bytes of all but the "
            f"innermost, which comes first; got {len(extents)}, {len(box)} and {len(strides)}",
        )
    elements = inner.text("elements", "bf16", tuple(kind for kind in ELEMENT_KINDS if kind != "bool"))
    swizzle = inner.integer("swizzle", 0, low=0, high=max(SWIZZLE_BYTES))
    if swizzle not in SWIZZLE_BYTES:
        raise inner.error("swizzle", f"must be one of {', '.join(map(str, SWIZZLE_BYTES))} bytes, got {swizzle}")
    inner.finish()
    return ArgumentSpec("tensor_map", address, map=MapSpec(elements, extents, strides, box, swizzle))


def _expressions(table: Table, key: str) -> tuple[Expression, ...]:
    return tuple(table.parsed(key, item) for item in table.items(key))


def _text(table: Table, key: str) -> Text:
    text = table.text(key)
    parts: list[str | Expression] = []
    at = 0
    for found in _FIELD.finditer(text):
        if found.start() > at:
            parts.append(text[at : found.start()])
        try:
            parts.append(Expression.parse(found[1]))
        except ExpressionError as error:
            raise table.error(key, str(error)) from error
        at = found.end()
    if at < len(text):
        parts.append(text[at:])
    return Text(text, tuple(parts))
