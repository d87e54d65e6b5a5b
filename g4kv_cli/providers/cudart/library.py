"""What an engine's shared library needs and offers, read from its ELF headers before it is loaded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from g4kv_cli.errors import CompileError, UsageError
from g4kv_cli.providers.cudart.build import HERE, SONAMES

_REGISTERS = "__cudaRegisterFatBinary"


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """``needed``: libraries by name; ``undefined`` and ``functions``: dynamic symbols wanted and offered."""

    path: Path
    needed: tuple[str, ...]
    undefined: frozenset[str]
    functions: tuple[str, ...]
    has_device_code: bool

    @property
    def cudart(self) -> str:
        """The name under which it wants libcudart, empty if it does not."""
        return next((name for name in self.needed if name.startswith("libcudart.so")), "")


def read_library(path: Path) -> LibraryFacts:
    """Raises UsageError for a file that is no shared library."""
    needed: list[str] = []
    undefined: set[str] = set()
    functions: list[str] = []
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    needed += [str(vars(tag)["needed"]) for tag in section.iter_tags("DT_NEEDED")]
                elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                    for symbol in section.iter_symbols():
                        if symbol["st_shndx"] == "SHN_UNDEF":
                            undefined.add(symbol.name)
                        elif symbol["st_info"]["type"] == "STT_FUNC":
                            functions.append(symbol.name)
            has_device_code = any(section.name == ".nv_fatbin" for section in elf.iter_sections())
    except OSError as error:
        raise UsageError(f"library {path} cannot be read: {error.strerror}") from error
    except ELFError as error:
        raise UsageError(f"{path} is no shared library of Linux: {error}") from error
    return LibraryFacts(path, tuple(needed), frozenset(undefined), tuple(sorted(functions)), has_device_code)


def stand_in_for(path: Path) -> tuple[str, Path]:
    """The stand-in that a library has to find loaded: its name and file. Raises CompileError where none can serve."""
    facts = read_library(path)
    if _REGISTERS not in facts.undefined:
        if facts.has_device_code:
            raise CompileError(
                f"{path.name} has the CUDA runtime linked in statically, so that nothing can stand in for it; build it "
                "with nvcc -cudart shared, or run it on a GPU"
            )
        raise CompileError(f"{path.name} has no kernels of its own: name the library that nvcc built")
    if any(name.startswith("libcuda.so") for name in facts.needed):
        raise CompileError(
            f"{path.name} is linked to the CUDA driver (libcuda), for which nothing stands in; let it ask for the "
            "driver's functions with cudaGetDriverEntryPoint, or run it on a GPU"
        )
    soname = facts.cudart or SONAMES[-1]
    stand_in = HERE / soname
    if soname not in SONAMES:
        raise CompileError(f"{path.name} wants {soname}; the stand-in is made as {' and '.join(SONAMES)}")
    if not stand_in.is_file():
        raise CompileError(
            f"the stand-in for libcudart was not built when g4kv was installed ({stand_in} is missing): reinstall g4kv "
            "where a C compiler or the ziglang wheel can be had"
        )
    return soname, stand_in


def kernels_of_cubin(data: bytes, name: str) -> list[str]:
    """The kernels of a cubin: functions that have a section of launch information. Raises CompileError."""
    try:
        elf = ELFFile(io.BytesIO(data))
        sections = [section.name for section in elf.iter_sections()]
    except ELFError as error:
        raise CompileError(f"{name} is no cubin: {error}") from error
    return [section.removeprefix(".nv.info.") for section in sections if section.startswith(".nv.info.")]
