"""Anybody's CUDA source to PTX or a cubin: NVRTC's own defaults, with the caller's options, include directories and
name expressions.

NVRTC has no headers of the host's compiler. Those that kernels include (``<stdint.h>``, ``<cmath>``, ``<type_traits>``)
are there all the same: CCCL's of that name, in ``std`` too, or nothing where NVRTC itself has what they declare. Of
``<cuda.h>`` there is what kernels take from it, ``CUtensorMap``.

Nothing is forced on a source but the architecture, C++17 unless it asks for another, line numbers, which findings
are told by, and what nvcc has where the host's compiler does: ``__int128``, ``__asm__``, ``__volatile__`` and
``__extension__``. In particular contraction is NVRTC's default (``--fmad=true``). CCCL's headers are found without an
option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from g4kv_cli.compiler import cache, nvrtc, toolkit
from g4kv_cli.compiler.sources import Header, SourceFile
from g4kv_cli.errors import CompileError, UsageError
from g4kv_cli.records.run import ImageKind

HEADER_HINT = (
    "name the directory of a header of your own as an include path; code for the host stands between "
    "#ifndef __CUDACC_RTC__ and #endif"
)
_CCCL_HAS = ("float", "limits", "math", "stddef", "stdint", "stdlib", "string")
_NVRTC_HAS = ("assert", "stdio", "stdbool")  # assert, printf and bool are built in
_CXX = (
    *("algorithm", "array", "bit", "concepts", "functional", "initializer_list", "iterator", "limits", "numeric"),
    *("optional", "ratio", "span", "tuple", "type_traits", "utility", "variant"),
)
_STD = "namespace std { using namespace cuda::std; }\n"
_TENSOR_MAP = """#pragma once
typedef struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; } CUtensorMap;
"""
C_HEADERS = (
    *(
        Header(name, f"#pragma once\n#include <cuda/std/c{bare}>\n{_STD}" if bare in _CCCL_HAS else "#pragma once\n")
        for bare in (*_CCCL_HAS, *_NVRTC_HAS)
        for name in (f"{bare}.h", f"c{bare}")
    ),
    *(Header(name, f"#pragma once\n#include <cuda/std/{name}>\n{_STD}") for name in _CXX),
    Header("cuda.h", _TENSOR_MAP),  # the driver's functions are the host's, and NVRTC refuses their declarations
)
_GNU_WORDS = {"__asm__": "asm", "__volatile__": "volatile", "__extension__": ""}
_ARCH_OPTION = re.compile(r"--?(gpu-architecture|arch)\b")
_STANDARD_OPTION = re.compile(r"--?std\b")
_LINES_OPTION = re.compile(r"-lineinfo|--generate-line-info|-G|--device-debug")
_READS_FILES = re.compile(r"-I|--include-path|-include|--pre-include|--use-pch|--create-pch|--pch")
_OWN_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[^<\s]", re.MULTILINE)


class NoKernel(CompileError):
    """CUDA source of which no kernel came; ``templates`` are those that it has no instance of."""

    def __init__(self, name: str, templates: Sequence[str]) -> None:
        if templates:
            instance = f"{templates[0]}<float>"
            why = (
                f"{', '.join(templates)} {'is a template' if len(templates) == 1 else 'are templates'}, and of a "
                f"template an instance has to be named: g4kv run --kernel {instance!r}, load(..., "
                f"names=[{instance!r}]), or in the source, template __global__ void {instance}(...)"
            )
        else:
            why = "a kernel is a __global__ function"
        super().__init__(f"{name} has no kernel in its PTX: {why}")
        self.templates = tuple(templates)


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """An image, the compiler's log, and the symbol of each name expression (``scale<float>``: ``_Z5scaleIfEvPT_``)."""

    data: bytes
    log: str
    symbols: Mapping[str, str]


def template_names(source: str) -> list[str]:
    """Kernels of CUDA text that are templates."""
    plain = re.sub(r"__launch_bounds__\s*\([^()]*\)", "", source)
    return list(dict.fromkeys(re.findall(r"\btemplate\s*<[^;{}]*?__global__[^;{}()]*\b(\w+)\s*\(", plain)))


def includes_own(text: str) -> bool:
    """Whether a source may include files that lie beside it: in quotes, or by a macro."""
    return _OWN_INCLUDE.search(text) is not None


def compile_foreign(
    name: str,
    text: str,
    *,
    arch: str,
    kind: ImageKind = "ptx",
    options: Sequence[str] = (),
    include: Sequence[Path] = (),
    expressions: Sequence[str] = (),
) -> ForeignProgram:
    """Compile CUDA source for ``arch`` (``sm_90``). ``name`` is what the compiler calls it.

    Kept in the kernel cache unless it may include files of its own, which NVRTC does not tell. Raises CompileError with
    NVRTC's log, NoKernel, and UsageError for a malformed arch, an option that says it twice, or an include path that is
    none.
    """
    for option in options:
        if _ARCH_OPTION.match(option):
            raise UsageError(f"option {option}: the architecture is an argument of its own, such as sm_90")
    for directory in include:
        if not directory.is_dir():
            raise UsageError(f"include path {directory} is no directory; name the one that the headers lie in")
        if _as_utf8(str(directory)) != str(directory):
            raise UsageError(f"include path {directory}: NVRTC takes names in UTF-8 alone; rename the directory")
    words = (*_own_options(arch, kind, options), *options, *(f"-I{directory}" for directory in include))
    source = SourceFile(_as_utf8(name), text, C_HEADERS)
    is_whole = not (include or includes_own(text) or any(_READS_FILES.match(option) for option in options))
    if not is_whole:
        return _compile(source, arch, kind, words, expressions)
    version, headers = toolkit.nvrtc_version(), toolkit.headers_version()
    key = cache.key_of(("foreign", source.digest, *words, "names", *expressions, version, headers, arch, kind))
    entry = cache.read(key)
    if entry is None:
        made = _compile(source, arch, kind, words, expressions)
        cache.write(key, cache.CacheEntry(made.data, json.dumps([made.log, dict(made.symbols)])))
        return made
    log, symbols = json.loads(entry.log)
    return ForeignProgram(entry.data, log, symbols)


def _as_utf8(name: str) -> str:
    """A file's name with ``?`` for bytes that are no UTF-8."""
    return name.encode(errors="replace").decode()


def _own_options(arch: str, kind: ImageKind, options: Sequence[str]) -> list[str]:
    """What is added to the caller's options: the target, and what they do not say."""
    target = nvrtc.target_of(arch, kind)
    added = [f"--gpu-architecture={target}"]
    if not any(_STANDARD_OPTION.match(option) for option in options):
        added.append("--std=c++17")
    if not any(_LINES_OPTION.fullmatch(option) for option in options):
        added.append("-lineinfo")
    words = {re.split("[ =]", option.removeprefix("-D"))[0] for option in options if option.startswith("-D")}
    added += [f"-D{word}={meant}" for word, meant in _GNU_WORDS.items() if word not in words]
    if "--device-int128" not in options and "-device-int128" not in options:
        added.append("--device-int128")
    return added


def _compile(
    source: SourceFile, arch: str, kind: ImageKind, options: tuple[str, ...], expressions: Sequence[str]
) -> ForeignProgram:
    made = nvrtc.compile_program(source, arch, kind, options, expressions, HEADER_HINT)
    if kind == "ptx" and b".entry" not in made.data:
        raise NoKernel(source.name, template_names(source.text))
    return ForeignProgram(made.data, made.log, made.symbols)
