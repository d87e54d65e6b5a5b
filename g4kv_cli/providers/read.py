"""Reads a manifest and checks everything that needs no device: fields, types, expressions, names of images.

What an expression's names mean is known when an entry is called (providers/scope.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from g4kv_cli.entries.contract import OUTPUTS, Contract
from g4kv_cli.model.document import read_toml
from g4kv_cli.model.kv_format import KV_FORMATS
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.manifest import BUILDER_SECONDS, IMAGE_KINDS, Image, Manifest, Waiver
from g4kv_cli.providers.read_entry import read_entry
from g4kv_cli.providers.read_pool import read_pool
from g4kv_cli.providers.schema import Table

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def read_manifest(file: Path) -> Manifest:
    """Read and check a manifest. Raises UsageError with file, line and field."""
    document = read_toml(file, "manifest of kernels")
    root = Table(dataclasses.replace(document, what="manifest"), document.values)
    folder = file.resolve().parent
    name = root.text("provider")
    images = root.mapping("image", lambda table, key: _image(table, key, folder))
    order, form, pool = read_pool(root)
    manifest = Manifest(
        name,
        file,
        _digest_of(document.data, images),
        images,
        order,
        _contract(root),
        tuple(_waiver(table) for table in root.tables("waive")),
        tuple(read_entry(table, images) for table in root.tables("entry")),
        form,
        pool,
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
        seconds=table.integer("seconds", BUILDER_SECONDS, low=1, high=86400) if kind == "builder" else BUILDER_SECONDS,
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
        kv_formats=root.texts("kv_formats", default.kv_formats, KV_FORMATS),  # type: ignore[arg-type]
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
