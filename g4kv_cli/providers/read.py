"""Reads a manifest and checks everything that needs no device: fields, types, expressions, names of images.

What an expression's names mean is known when an entry is called (providers/scope.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4kv_cli.entries.contract import OUTPUTS, Contract
from g4kv_cli.errors import UsageError
from g4kv_cli.model.document import read_toml
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.manifest import (
    ELEMENT_KINDS,
    IMAGE_KINDS,
    SCALAR_KINDS,
    ArgumentSpec,
    EntrySpec,
    Image,
    ImageKind,
    MadeArray,
    Manifest,
    Step,
    Text,
    Waiver,
)
from g4kv_cli.providers.schema import Table

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FIELD = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OF_LAUNCHES = ("grid", "block", "cluster", "shared")


def read_manifest(file: Path) -> Manifest:
    """Read and check a manifest. Raises UsageError with file, line and field."""
    document = read_toml(file, "manifest of kernels")
    root = Table(dataclasses.replace(document, what="manifest"), document.values)
    folder = file.resolve().parent
    name = root.text("provider")
    images = root.mapping("image", lambda table, key: _image(table, key, folder))
    manifest = Manifest(
        name,
        file,
        _digest_of(document.data, images),
        images,
        _pool_order(root),
        _contract(root),
        tuple(_waiver(table) for table in root.tables("waive")),
        tuple(_entry(table, images) for table in root.tables("entry")),
    )
    root.finish()
    if not manifest.entries:
        raise root.error("", "serves no entry: it has no [[entry]]")
    return manifest


def _image(parent: Table, name: str, folder: Path) -> Image:
    table = parent.table(name)
    if table is None:
        raise parent.error(name, "must be a table")
    kinds = [kind for kind in IMAGE_KINDS if kind in table]
    if len(kinds) != 1:
        got = ", ".join(kinds) or "none of them"
        raise parent.error(name, f"an image has one of {', '.join(IMAGE_KINDS)}; this one has {got}")
    kind = kinds[0]
    path: Path | None = None
    command: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    function = ""
    if kind == "builder":
        command = table.texts("builder")
        if not command:
            raise table.error("builder", "must be a command: a list of strings")
        named = (folder / part for part in command)
        files = (*(file for file in named if file.is_file()), *_files(table, folder))
    elif kind == "python":
        function = table.text("python")
        if _CALLABLE.fullmatch(function) is None:
            raise table.error("python", f"{function!r} must be 'module:function'")
        beside = folder / f"{function.partition(':')[0].replace('.', '/')}.py"
        files = (beside,) if beside.is_file() else ()
    else:
        path = folder / table.text(kind)
        if "{" not in path.name and not path.is_file():
            raise table.error(kind, f"there is no file {path}")
    is_compiled = kind == "source" and table.text("compiler", "nvrtc", ("nvrtc", "nvcc")) == "nvcc"
    if is_compiled:
        kind, files = "library", _files(table, folder)
    image = Image(
        name,
        kind,
        path,
        last_error=table.text("last_error", "") if kind == "library" else "",
        defines=table.mapping("defines", lambda inner, key: inner.text(key)) if kind == "source" else {},
        command=command,
        constants=_constants(table) if kind == "builder" else (),
        files=files,
        function=function,
        is_compiled=is_compiled,
        options=table.texts("options") if is_compiled else (),
        line=table.line,
    )
    table.finish()
    return image


def _files(table: Table, folder: Path) -> tuple[Path, ...]:
    """What a builder reads beside the files that its command names."""
    found: list[Path] = []
    for pattern in table.texts("files"):
        matching = sorted(file for file in folder.glob(pattern) if file.is_file())
        if not matching:
            raise table.error("files", f"no file in {folder} matches {pattern!r}")
        found += matching
    return tuple(found)


def _constants(table: Table) -> tuple[tuple[str, Expression], ...]:
    return tuple(table.mapping("constants", lambda inner, key: inner.expression(key)).items())


def _digest_of(data: bytes, images: Mapping[str, Image]) -> str:
    """Of the manifest and of every file that its images are known to be made from."""
    digest = hashlib.sha256(data)
    for image in images.values():
        for file in image.read_files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _pool_order(root: Table) -> PoolOrder:
    table = root.table("pool")
    if table is None:
        return OWN_ORDER
    try:
        order = PoolOrder.parse(table.text("axes"))
    except UsageError as error:
        raise table.error("axes", str(error)) from error
    table.finish()
    return order


def _contract(root: Table) -> Contract:
    default = Contract()
    return Contract(
        rounds_to_bf16_after=root.texts("rounds_to_bf16_after", choices=("norm",)),
        split_partials=root.text("split_partials", "f32", ("f32", "bf16")),  # type: ignore[arg-type]
        lse_weights=root.text("lse_weights", "f32", ("f32", "bf16")),  # type: ignore[arg-type]
        lse=root.text("lse", "natural", ("natural", "log2")),  # type: ignore[arg-type]
        outputs=root.texts("outputs", OUTPUTS, OUTPUTS),
        unseen_keys=root.text("unseen_keys", "nan", ("nan", "finite")),  # type: ignore[arg-type]
        batch_invariant=root.flag("batch_invariant", default.batch_invariant),
        bits_with_released_pages=root.flag("bits_with_released_pages", default.bits_with_released_pages),
        traps=root.flag("traps", default.traps),
        page_origin=root.flag("page_origin", default.page_origin),
    )


def _waiver(table: Table) -> Waiver:
    where = table.text("where")
    try:
        pattern = re.compile(where)
    except re.error as error:
        raise table.error("where", f"is no regular expression: {error}") from error
    waiver = Waiver(table.text("kind"), pattern, table.text("why"))
    table.finish()
    return waiver


def _entry(table: Table, images: dict[str, Image]) -> EntrySpec:
    names = tuple(name.strip() for name in table.text("name").split("|"))
    if not all(names):
        raise table.error("name", "has an empty name")
    only_if = table.table("only_if")
    conditions: list[tuple[Expression, str]] = []
    if only_if is not None:
        for text in only_if.keys():  # noqa: SIM118 a Table is no mapping
            conditions.append((only_if.parsed(text, text), only_if.text(text)))
    spec = EntrySpec(
        names,
        table.line,
        tuple(conditions),
        table.texts("requires"),
        tuple(table.mapping("let", _named_expression).items()),
        tuple(table.mapping("arrays", _made).values()),
        tuple(table.mapping("workspace", _made).values()),
        tuple(_step(step, images) for step in table.tables("launch")),
    )
    table.finish()
    if not spec.steps:
        raise table.error("", "launches nothing: it has no [[entry.launch]]")
    return spec


def _named_expression(table: Table, name: str) -> Expression:
    if not _NAME.fullmatch(name):
        raise table.error(name, "is no name: letters, digits and _")
    return table.expression(name)


def _made(table: Table, name: str) -> MadeArray:
    if not _NAME.fullmatch(name):
        raise table.error(name, "is no name: letters, digits and _")
    kind, _, expression = table.text(name).partition(" ")
    if kind not in ELEMENT_KINDS or not expression.strip():
        raise table.error(
            name, f"must be a type and an expression ('i32 kv_lens'); the types are {', '.join(ELEMENT_KINDS)}"
        )
    return MadeArray(name, kind, table.parsed(name, expression))


def _step(table: Table, images: dict[str, Image]) -> Step:
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
    )
    table.finish()
    return step


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
    return _argument(table, key, table.text(key), ELEMENT_KINDS if kind == "python" else ("ptr", *SCALAR_KINDS))


def _extents(table: Table, key: str, *, required: bool) -> tuple[Expression, ...]:
    if key not in table:
        if required:
            raise table.error("", f"lacks {key!r}: one to three expressions")
        return ()
    items = table.items(key)
    if not 1 <= len(items) <= 3:
        raise table.error(key, f"must be one to three expressions, got {len(items)}")
    return tuple(table.parsed(key, item) for item in items)


def _argument(table: Table, key: str, item: Any, kinds: tuple[str, ...] = ("ptr", *SCALAR_KINDS)) -> ArgumentSpec:
    if isinstance(item, list):
        if not item:
            raise table.error(key, "a struct by value has at least one field")
        return ArgumentSpec("struct", fields=tuple(_argument(table, key, inner) for inner in item))
    kind, _, expression = item.partition(" ") if isinstance(item, str) else ("", "", "")
    if kind not in kinds or not expression.strip():
        raise table.error(
            key, f"{item!r} must be a type and an expression ('i32 page_size'); the types are {', '.join(kinds)}"
        )
    return ArgumentSpec(kind, table.parsed(key, expression))  # type: ignore[arg-type]


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
