"""NVRTC itself: one translation unit in, PTX or a cubin and the compiler's log out. Needs no driver, no GPU.

The architecture is always explicit, so the result does not depend on the machine. Contraction is off
(``--fmad=false``): the kernels say ``fmaf`` where they mean it, and the bits do not depend on the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4kv_cli.compiler import toolkit
from g4kv_cli.compiler.sources import SourceFile
from g4kv_cli.errors import CompileError, UsageError
from g4kv_cli.records.run import ImageKind

_ARCH = re.compile(r"sm_(\d{2,3})([af]?)")
_FILE_DIRECTIVE = re.compile(rb'^(\s*\.file\s+\d+\s+")([^"\n]*)(")', re.MULTILINE)
_MISSING_HEADER = re.compile(r'^(.*?)\(\d+\): .*cannot open source file "([^"\n]+)"')
_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined')
_DECLARED_BY = (
    (re.compile(r"INFINITY|NAN"), "cuda/std/cmath"),
    (re.compile(r"u?int(8|16|32|64|ptr)_t"), "cuda/std/cstdint"),
    (re.compile(r"(FLT|DBL)_\w+"), "cuda/std/cfloat"),
    (re.compile(r"U?(CHAR|SHRT|INT|LONG|LLONG)_(MIN|MAX)"), "cuda/std/climits"),
)
"""What nvcc declares without being asked, or the host's headers do: names, and the header that NVRTC needs for them."""
_ASSEMBLER_LINE = re.compile(r"^ptxas ", re.MULTILINE)
_ERROR_LINE = re.compile(r"^.*?\(\d+\): (?:catastrophic )?error.*$", re.MULTILINE)


def target_of(arch: str, kind: ImageKind) -> str:
    """What the compiler calls ``arch``: itself for a cubin, the virtual one for PTX. UsageError if it is none."""
    matched = _ARCH.fullmatch(arch)
    if matched is None:
        raise UsageError(f"unknown architecture {arch!r}; write it as sm_80, sm_90a, sm_120, ...")
    return arch if kind == "cubin" else f"compute_{matched.group(1)}{matched.group(2)}"


def options_for(arch: str, kind: ImageKind, defines: Mapping[str, str]) -> tuple[str, ...]:
    """The compiler's options without the include directories. Raises UsageError for an arch that is none."""
    options = ["--std=c++17", "--fmad=false", "-lineinfo", f"--gpu-architecture={target_of(arch, kind)}"]
    if kind == "cubin":
        options.append("--ptxas-options=-v")  # prints registers, stack and spills: see usage.py
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return tuple(options)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compilation made: the image's bytes, the log, the symbol of each name expression, and the PTX of it.

    Of machine code ``ptx`` is what the assembler was given: byte for byte what a compilation to PTX gives.
    """

    data: bytes
    log: str
    symbols: Mapping[str, str]
    ptx: bytes

    @property
    def ptx_log(self) -> str:
        """The log of the compilation to PTX: without the assembler's lines, which come last."""
        return _ASSEMBLER_LINE.split(self.log, maxsplit=1)[0].rstrip()


def compile_program(
    source: SourceFile,
    arch: str,
    kind: ImageKind,
    options: tuple[str, ...],
    expressions: Sequence[str] = (),
    header_hint: str = toolkit.OVERLAY_HINT,
) -> Compiled:
    """Compile, with the symbols of name expressions (``scale<float>``, ``&ns::table``), which are instantiated.

    ``header_hint`` says where a missing header of one's own belongs. Raises CompileError with source, line, arch, log.
    """
    nvrtc = toolkit.load_nvrtc()
    includes = tuple(f"-I{directory}" for directory in toolkit.include_directories())
    names = [header.name.encode() for header in source.headers]
    texts = [header.text.encode() for header in source.headers]
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names),
        "create",
    )
    try:
        for expression in expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()), f"take {expression!r} into")
        arguments = [option.encode() for option in (*options, *includes)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _text(nvrtc, program, "ProgramLog")
        if int(result) != 0:
            raise _compile_error(source, arch, result.name, log, header_hint)
        symbols = {
            expression: _checked(
                nvrtc.nvrtcGetLoweredName(program, expression.encode()), "name the kernels of"
            ).decode()
            for expression in expressions
        }
        ptx = _with_bare_file_names(_bytes(nvrtc, program, "PTX"))
        return Compiled(_bytes(nvrtc, program, "CUBIN") if kind == "cubin" else ptx, log, symbols, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _with_bare_file_names(ptx: bytes) -> bytes:
    """NVRTC puts the working directory before every source name; the image must not depend on it."""
    return _FILE_DIRECTIVE.sub(lambda found: found[1] + found[2].rpartition(b"/")[2] + found[3], ptx.rstrip(b"\0"))


def _compile_error(source: SourceFile, arch: str, result: str, log: str, header_hint: str) -> CompileError:
    who = f"NVRTC {toolkit.nvrtc_version()}"
    known = toolkit.supported_archs()
    if known and int(arch.removeprefix("sm_").rstrip("af")) not in known:
        names = ", ".join(f"sm_{number}" for number in known)
        return CompileError(f"{who} cannot compile {source.name} for {arch}; it knows {names}")
    errors = _ERROR_LINE.findall(log)
    what = errors[0].strip() if errors else result
    if missing := _MISSING_HEADER.search(what):
        what = f"{what}; {toolkit.missing_header_hint(missing[2], missing[1], header_hint)}"
    elif header := _header_of(_UNDEFINED.findall(log)):
        what += f"; include <{header}>"
    elif "host functions are not allowed" in what:
        what = (
            f"{what.partition('. Consider using')[0]}; put code for the host between #ifndef __CUDACC_RTC__ and #endif"
        )
    return CompileError(f"{who} refuses {source.name} for {arch}: {what}", log)


def _header_of(identifiers: Sequence[str]) -> str:
    """The header that declares the first of these that one is known for, or nothing."""
    known = (header for name in identifiers for names, header in _DECLARED_BY if names.fullmatch(name))
    return next(known, "")


def _checked(returned: tuple[Any, ...], step: str) -> Any:
    result, *values = returned
    if int(result) != 0:
        raise CompileError(f"NVRTC failed to {step} a program: {result.name}")
    return values[0] if values else None


def _bytes(nvrtc: Any, program: object, what: str) -> bytes:
    size = _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program), f"size the {what} of")
    # A fresh buffer of at least two bytes: NVRTC writes a NUL into it even if there is no text, and CPython
    # shares all one-byte `bytes` objects.
    buffer = bytearray(max(size, 2))
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), f"read the {what} of")
    return bytes(buffer[:size])


def _text(nvrtc: Any, program: object, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace").strip()
