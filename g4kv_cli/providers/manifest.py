"""A provider's manifest: whose kernels serve which entries, how each is called, what they promise (docs/providers.md).

Reading checks everything that needs no device: fields, types, expressions, names of images. What an expression's names
mean is known when an entry is called (providers/scope.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from g4kv_cli.device.arguments import ScalarKind
from g4kv_cli.entries.contract import OUTPUTS, Contract
from g4kv_cli.model.document import read_toml
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.schema import Table

ImageKind = Literal["library", "ptx", "source", "cubin", "builder"]
IMAGE_KINDS: tuple[ImageKind, ...] = get_args(ImageKind)
SCALAR_KINDS: tuple[ScalarKind, ...] = get_args(ScalarKind)
ELEMENT_KINDS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64", "bf16", "bool")
POOL_AXES = ("page", "layer", "kv", "slot", "head", "dim")
_FIELD = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Text:
    """A name with expressions in braces, ``decode_hd{head_dim}``."""

    text: str
    parts: tuple[str | Expression, ...]

    def format(self, scope: Any) -> str:
        """With the values of this scope. Raises ExpressionError."""
        return "".join(part if isinstance(part, str) else str(part.integer(scope)) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Image:
    """Where code comes from. ``path`` is a file; a builder has none, but a command that gets ``constants``."""

    name: str
    kind: ImageKind
    path: Path | None = None
    last_error: str = ""
    compiler: Literal["nvrtc", "nvcc"] = "nvrtc"
    defines: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    constants: tuple[tuple[str, Expression], ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One argument. A struct has ``fields`` and is passed by value with C's alignment."""

    kind: ScalarKind | Literal["ptr", "struct"]
    value: Expression | None = None
    fields: tuple[ArgumentSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One call or launch of an entry; ``line`` is where it stands."""

    image: Text
    line: int
    condition: Expression | None
    call: Text | None
    symbol: Text | None
    grid: tuple[Expression, ...]
    block: tuple[Expression, ...]
    cluster: tuple[Expression, ...]
    shared: Expression | None
    arguments: tuple[ArgumentSpec, ...]
    named: tuple[tuple[str, ArgumentSpec], ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MadeArray:
    """Metadata in the engine's form, or scratch: element kind and an expression (values, or a number of elements)."""

    name: str
    kind: str
    value: Expression


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """How the entries whose names match are served."""

    names: tuple[str, ...]
    line: int
    only_if: tuple[tuple[Expression, str], ...]
    requires: tuple[str, ...]
    let: tuple[tuple[str, Expression], ...]
    arrays: tuple[MadeArray, ...]
    workspace: tuple[MadeArray, ...]
    steps: tuple[Step, ...]

    @property
    def host_names(self) -> frozenset[str]:
        """The names that are read before anything is launched."""
        expressions = [*(one for one, _ in self.only_if), *(one for _, one in self.let)]
        expressions += [made.value for made in (*self.arrays, *self.workspace)]
        return frozenset(name for expression in expressions for name in expression.names)


@dataclass(frozen=True, slots=True)
class Waiver:
    """A report that is tolerated: its kind, a pattern of its line, the reason. An unused one is a finding."""

    kind: str
    where: re.Pattern[str]
    why: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole manifest. ``digest`` is of the file's bytes; images have digests of their own."""

    name: str
    file: Path
    digest: str
    cases: tuple[str, ...]
    images: dict[str, Image]
    pool_axes: tuple[str, ...]
    contract: Contract
    waivers: tuple[Waiver, ...]
    entries: tuple[EntrySpec, ...]


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
        hashlib.sha256(document.data).hexdigest(),
        root.texts("cases", ("*",)),
        images,
        _pool_axes(root),
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
    if kind == "builder":
        command = table.texts("builder")
        if not command:
            raise table.error("builder", "must be a command: a list of strings")
    else:
        path = folder / table.text(kind)
        if "{" not in path.name and not path.is_file():
            raise table.error(kind, f"there is no file {path}")
    image = Image(
        name,
        kind,
        path,
        last_error=table.text("last_error", "") if kind == "library" else "",
        compiler=table.text("compiler", "nvrtc", ("nvrtc", "nvcc")) if kind == "source" else "nvrtc",  # type: ignore[arg-type]
        defines=table.mapping("defines", lambda inner, key: inner.text(key)) if kind == "source" else {},
        command=command,
        constants=tuple(table.mapping("constants", lambda inner, key: inner.expression(key)).items()),
    )
    table.finish()
    return image


def _pool_axes(root: Table) -> tuple[str, ...]:
    table = root.table("pool")
    if table is None:
        return POOL_AXES
    axes = tuple(table.text("axes").split())
    table.finish()
    allowed = (frozenset(POOL_AXES), frozenset(POOL_AXES) - {"kv"})
    if len(set(axes)) != len(axes) or frozenset(axes) not in allowed:
        raise table.error("axes", f"must name each of {', '.join(POOL_AXES)} once (without kv: K and V in pools apart)")
    if axes[-1] != "dim":
        raise table.error("axes", "the innermost axis must be dim: kernels read rows of it")
    return axes


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
    launched = call is None
    if launched and symbol is None and kind != "builder":
        raise table.error("", "lacks 'symbol', a pattern of the kernel's name, or 'call'")
    step = Step(
        image,
        table.line,
        condition,
        call,
        symbol,
        _extents(table, "grid", required=launched and kind != "builder"),
        _extents(table, "block", required=launched and kind != "builder"),
        _extents(table, "cluster", required=False),
        table.expression("shared") if "shared" in table else None,
        tuple(_argument(table, "arguments", item) for item in table.items("arguments")),
        tuple(table.mapping("named", lambda inner, key: _argument(inner, key, inner.text(key))).items()),
        table.texts("writes"),
    )
    table.finish()
    if step.named and step.arguments:
        raise table.error("named", "arguments stand in order (arguments) or by name (named), not both")
    return step


def _extents(table: Table, key: str, *, required: bool) -> tuple[Expression, ...]:
    if key not in table:
        if required:
            raise table.error("", f"lacks {key!r}: one to three expressions")
        return ()
    items = table.items(key)
    if not 1 <= len(items) <= 3:
        raise table.error(key, f"must be one to three expressions, got {len(items)}")
    return tuple(table.parsed(key, item) for item in items)


def _argument(table: Table, key: str, item: Any) -> ArgumentSpec:
    if isinstance(item, list):
        if not item:
            raise table.error(key, "a struct by value has at least one field")
        return ArgumentSpec("struct", fields=tuple(_argument(table, key, inner) for inner in item))
    kinds = ("ptr", *SCALAR_KINDS)
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
