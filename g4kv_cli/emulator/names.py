"""Finds kernels and variables by the names that people use: ``add``, ``ns::add<float>``, or the symbol itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from g4kv_cli.compiler.foreign import template_names
from g4kv_cli.emulator.errors import KernelNotFound, SymbolError
from g4kv_cli.emulator.mangled import read_symbol, variable_name


def kernel_words(symbol: str) -> str:
    """A kernel as messages name it: with its parameters where its symbol tells them, else by its name alone."""
    signature = read_symbol(symbol)
    return variable_name(symbol) if signature is None else str(signature)


def find_kernel(name: str, symbols: Sequence[str], expressions: Mapping[str, str], source: str, where: str) -> str:
    """The symbol of a kernel. ``expressions`` are name expressions with their symbols, ``source`` the CUDA text.

    Raises KernelNotFound: no such kernel (with the nearest names), several, or a template without an instance.
    """
    if not isinstance(name, str):
        raise KernelNotFound(
            f"a kernel is found by its name, a text, not by {name!r}; {where} has {_shown(map(kernel_words, symbols))}"
        )
    wanted = _squeezed(name)
    for expression, symbol in expressions.items():
        if _squeezed(expression) == wanted:
            return symbol
    if name in symbols:
        return name
    found = [symbol for symbol in symbols if _is_called(symbol, wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise KernelNotFound(f"{where} has {len(found)} kernels {name}: {_shown(map(kernel_words, found))}; say which")
    bare = re.split(r"[<(]", name)[0].rpartition("::")[2].strip()
    if bare and bare in template_names(source):
        instance = name if "<" in name else f"{name}<float>"
        raise KernelNotFound(
            f"{bare} in {where} is a template, and it has no instance {name}; name one: "
            f"load(..., names=[{instance!r}]), or g4kv run --kernel {instance!r}"
        )
    raise KernelNotFound(f"{where} has no kernel {name}; {_hint(name, symbols, kernel_words)}")


def find_variable(name: str, symbols: Sequence[str], where: str) -> str:
    """The symbol of a ``__device__`` or ``__constant__`` variable. Raises SymbolError."""
    if name in symbols:
        return name
    found = [symbol for symbol in symbols if name in _endings(variable_name(symbol))]
    if len(found) == 1:
        return found[0]
    if found:
        raise SymbolError(f"{where} has {len(found)} variables {name}: {_shown(map(variable_name, found))}; say which")
    raise SymbolError(
        f"{where} has no __device__ or __constant__ variable {name}; {_hint(name, symbols, variable_name)}"
    )


def _is_called(symbol: str, wanted: str) -> bool:
    """Whether a kernel may be called so: with or without parameters, template arguments and namespaces."""
    signature = read_symbol(symbol)
    if signature is None:
        name = variable_name(symbol)
        names = {*_endings(name), *_endings(name.partition("<")[0])}
        return wanted in map(_squeezed, names) or (symbol.startswith("_Z") and f"{len(wanted)}{wanted}" in symbol)
    names = {str(signature), *_endings(signature.name), *_endings(signature.bare_name)}
    return wanted in map(_squeezed, names)


def _endings(name: str) -> set[str]:
    """``a::b::c``, ``b::c`` and ``c``."""
    head, bracket, rest = name.partition("<")
    parts = head.split("::")
    return {"::".join(parts[begin:]) + bracket + rest for begin in range(len(parts))}


def _hint(name: str, symbols: Sequence[str], words: Callable[[str], str]) -> str:
    if not symbols:
        return "it has none"
    bare = {re.split(r"[<(]", words(symbol))[0]: words(symbol) for symbol in symbols}
    near = difflib.get_close_matches(re.split(r"[<(]", name)[0], bare, n=1)
    return f"did you mean {bare[near[0]]}?" if near else f"it has {_shown(words(symbol) for symbol in symbols)}"


def _shown(names: Iterable[str], most: int = 6) -> str:
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def _squeezed(name: str) -> str:
    return re.sub(r"\s+", "", name)
