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
from g4kv_cli.model.pool_layout import PoolDescription
from g4kv_cli.model.pool_order import PoolOrder
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.pool_form import PoolForm

ImageKind = Literal["library", "ptx", "source", "cubin", "builder", "python"]
IMAGE_KINDS: tuple[ImageKind, ...] = get_args(ImageKind)
HOST_KINDS: tuple[ImageKind, ...] = ("library", "python")
"""Those whose code runs on the host, in the process that calls it."""
SCALAR_KINDS: tuple[ScalarKind, ...] = get_args(ScalarKind)
VALUE_KINDS = ("ptr", *SCALAR_KINDS, "bool")
"""Of an argument of a kernel or a C function, and of a struct's fields; a bool is a byte."""
ELEMENT_KINDS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "bool")
BUILDER_SECONDS = 600
"""How long a builder may take unless its image says more: compilers of whole attention kernels take minutes."""
Status = Literal["int", "bool", "void"]
Returns = Literal[Status, ScalarKind, "ptr"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""What a C function gives back that is no value: a status that is 0, true, or nothing."""


@dataclass(frozen=True, slots=True)
class Text:
    """A name with expressions in braces, ``decode_hd{head_dim}``."""

    text: str
    parts: tuple[str | Expression, ...]

    def format(self, scope: Any) -> str:
        """With the values of this scope. Raises ExpressionError."""
        return "".join(part if isinstance(part, str) else str(part.integer(scope)) for part in self.parts)

    @property
    def with_any_number(self) -> str:
        """As a pattern, with any number where an expression stands."""
        return "".join(part if isinstance(part, str) else r"-?\d+" for part in self.parts)


@dataclass(frozen=True, slots=True)
class Image:
    """Where code comes from. ``path`` is a file.

    A builder has a command that gets ``constants``, ``files`` that it reads and ``seconds`` to end in; a Python
    function is ``module:name``. A library whose ``path`` is a source is compiled by nvcc, with its ``options`` too.
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
    seconds: int = BUILDER_SECONDS
    options: tuple[str, ...] = ()
    line: int = 1

    @property
    def read_files(self) -> tuple[Path, ...]:
        """The files that are known to decide what it is, in order."""
        found = [] if self.path is None else [self.path]
        return tuple(file for file in (*found, *self.files) if file.is_file())


@dataclass(frozen=True, slots=True)
class MapSpec:
    """What a tensor map says beside its address; from the innermost dimension on, strides (bytes) of all others."""

    elements: str
    extents: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    box: tuple[Expression, ...]
    swizzle_bytes: int

    @property
    def numbers(self) -> tuple[Expression, ...]:
        """Its expressions."""
        return (*self.extents, *self.strides, *self.box)


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One argument. A struct has ``fields`` and is passed by value with C's alignment; a tensor map has a ``map``, and
    its address as value. A Python function's tensors have their element kind, which may be ``bf16`` or ``bool``."""

    kind: ScalarKind | Literal["ptr", "struct", "tensor_map", "bf16", "bool"]
    value: Expression | None = None
    fields: tuple[ArgumentSpec, ...] = ()
    map: MapSpec | None = None

    @property
    def text(self) -> str:
        """As the manifest has it."""
        if self.map is not None and self.value is not None:
            return f"{{ tensor_map = {self.value.text!r} }}"
        if self.fields:
            return f"[{', '.join(field.text for field in self.fields)}]"
        return self.kind if self.value is None else f"{self.kind} {self.value.text}"

    @property
    def pointer_names(self) -> frozenset[str]:
        """The names that a pointer in it is made from."""
        own = self.value.names if self.kind in ("ptr", "tensor_map") and self.value is not None else frozenset()
        return own.union(*(field.pointer_names for field in self.fields))

    @property
    def has_map(self) -> bool:
        """Whether it is a tensor map, or has one in it."""
        return self.map is not None or any(field.has_map for field in self.fields)

    @property
    def names(self) -> frozenset[str]:
        """Every name that it is made from."""
        own = [] if self.value is None else [self.value]
        own += [] if self.map is None else self.map.numbers
        parts = [expression.names for expression in own] + [field.names for field in self.fields]
        return frozenset[str]().union(*parts)


@dataclass(frozen=True, slots=True)
class Step:
    """One call or launch of an entry; ``line`` is where it stands. ``gives`` is the name that what a C function returns
    has for the steps behind it. ``overlap`` and ``cooperative`` as of a ``Launch``."""

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
    returns: Returns = "int"
    gives: str = ""
    overlap: bool = False
    cooperative: bool = False

    @property
    def pointer_names(self) -> frozenset[str]:
        """The names that its pointers are made from."""
        given = [*self.arguments, *(argument for _, argument in self.named)]
        return frozenset(name for argument in given for name in argument.pointer_names)


@dataclass(frozen=True, slots=True)
class MadeArray:
    """Metadata in the engine's form, or scratch: element kind and an expression (values, or a number of elements).
    ``ptr``: addresses, as 64-bit numbers. A struct has ``fields``."""

    name: str
    kind: str
    value: Expression
    fields: tuple[ArgumentSpec, ...] = ()

    @property
    def is_of_addresses(self) -> bool:
        """Whether it is made from where other arrays lie, and so behind them."""
        return self.kind in ("ptr", "struct")

    @property
    def names(self) -> frozenset[str]:
        """Every name that it is made from."""
        return self.value.names.union(*(field.names for field in self.fields))


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
    prepare: tuple[Step, ...] = ()
    """Calls that are made once, before what is made from the names that they give."""
    host: tuple[MadeArray, ...] = ()
    results: tuple[tuple[str, Expression], ...] = ()
    """Outputs that are not written where they belong: each as an expression over the arrays that the steps wrote."""

    @property
    def late_names(self) -> frozenset[str]:
        """What waits for the calls of ``prepare``: the names that they give, and arrays that are made from those."""
        late = {step.gives for step in self.prepare if step.gives}
        arrays = (*self.arrays, *self.host, *self.workspace)
        while more := {array.name for array in arrays if array.names & late} - late:
            late |= more
        return frozenset(late)

    @property
    def host_names(self) -> frozenset[str]:
        """The names that are read before anything is launched."""
        expressions = [*(one for one, _ in self.only_if), *(one for _, one in self.let)]
        expressions += [made.value for made in (*self.arrays, *self.host, *self.workspace) if not made.is_of_addresses]
        return frozenset(name for expression in expressions for name in expression.names)


@dataclass(frozen=True, slots=True)
class Waiver:
    """A report that is tolerated: its kind, a pattern of its line, the reason. An unused one is a finding."""

    kind: str
    where: re.Pattern[str]
    why: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole manifest. ``digest`` is of its bytes and those of its images' files. ``pool_order`` is what calls have;
    a ``pool_form``, where there is one, what kernels get in its place. ``pool``: a pool of whole axes, to be drawn."""

    name: str
    file: Path
    digest: str
    images: dict[str, Image]
    pool_order: PoolOrder
    contract: Contract
    waivers: tuple[Waiver, ...]
    entries: tuple[EntrySpec, ...]
    pool_form: PoolForm | None = None
    pool: PoolDescription | None = None
