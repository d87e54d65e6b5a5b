"""A provider's manifest as data: whose kernels serve which entries, how each is called, what they promise.

docs/providers.md has every field; providers/read.py reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from g4kv_cli.device.arguments import ScalarKind
from g4kv_cli.entries.contract import Contract
from g4kv_cli.model.pool_order import PoolOrder
from g4kv_cli.providers.expression import Expression

ImageKind = Literal["library", "ptx", "source", "cubin", "builder", "python"]
IMAGE_KINDS: tuple[ImageKind, ...] = get_args(ImageKind)
HOST_KINDS: tuple[ImageKind, ...] = ("library", "python")
"""Those whose code runs on the host, in the process that calls it."""
SCALAR_KINDS: tuple[ScalarKind, ...] = get_args(ScalarKind)
ELEMENT_KINDS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64", "bf16", "bool")


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
    """Where code comes from. ``path`` is a file.

    A builder has a command that gets ``constants``, and ``files`` that it reads; a Python function is ``module:name``.
    A library whose ``path`` is a source is compiled by nvcc, with ``options`` beside its own.
    """

    name: str
    kind: ImageKind
    path: Path | None = None
    last_error: str = ""
    defines: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    constants: tuple[tuple[str, Expression], ...] = ()
    files: tuple[Path, ...] = ()
    function: str = ""
    is_compiled: bool = False
    options: tuple[str, ...] = ()
    line: int = 1

    @property
    def read_files(self) -> tuple[Path, ...]:
        """The files that are known to decide what it is, in order."""
        found = [] if self.path is None else [self.path]
        return tuple(file for file in (*found, *self.files) if file.is_file())


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One argument. A struct has ``fields`` and is passed by value with C's alignment. A Python function's tensors have
    their element kind, which may be ``bf16`` or ``bool``."""

    kind: ScalarKind | Literal["ptr", "struct", "bf16", "bool"]
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
    """A whole manifest. ``digest`` is of its bytes and those of its images' files."""

    name: str
    file: Path
    digest: str
    images: dict[str, Image]
    pool_order: PoolOrder
    contract: Contract
    waivers: tuple[Waiver, ...]
    entries: tuple[EntrySpec, ...]
