"""Entries as plain functions: the name and help of the row, the signature of its form without the row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from g4kv_cli.entries.entry import Entry, Operation
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, entry_named

_Arguments = ParamSpec("_Arguments")


def public(
    form: Callable[Concatenate[Entry, KernelLibrary, _Arguments], None], name: str
) -> Callable[Concatenate[KernelLibrary, _Arguments], None]:
    """The entry ``name`` as a function. ``form`` is what its row calls, named again for the types of its arguments."""
    row = entry_named(name)
    if row.function is not form:
        raise ValueError(f"the table has {row.function.__name__} for {name}, not {form.__name__}")

    @functools.wraps(form)
    def call(library: KernelLibrary, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        form(row, library, *args, **kwargs)

    signature = inspect.signature(form)
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{row.what}\n\n{inspect.getdoc(form)}"
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for key, parameter in signature.parameters.items() if key != "entry"]
    )
    return call


def public_row(module: str, operations: tuple[Operation, ...], name: str) -> Callable[..., None]:
    """A row that the module of a public function does not name itself. Raises AttributeError as a module does."""
    row = next((entry for entry in entries() if entry.name == name and entry.operation in operations), None)
    if row is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return public(row.function, name)
