"""What an engine's shared library needs and offers, read from its ELF headers before it is loaded."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from g4kv_cli.compiler.fatbin import ptx_of_library
from g4kv_cli.errors import CompileError, UsageError
from g4kv_cli.providers.cudart.build import HERE, SONAMES

_REGISTERS = "__cudaRegisterFatBinary"


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """``needed``: libraries by name, looked for in ``folders`` first; ``undefined`` and ``functions``: dynamic symbols
    wanted and offered; of ``cxx_functions`` the names are C++'s, and none is a copy that others may have too."""

    path: Path
    needed: tuple[str, ...]
    folders: tuple[Path, ...]
    undefined: frozenset[str]
    functions: tuple[str, ...]
    cxx_functions: tuple[str, ...]
    has_device_code: bool

    @property
    def cudart(self) -> str:
        """The name under which it wants libcudart, empty if it does not."""
        return next((name for name in self.needed if name.startswith("libcudart.so")), "")


def read_library(path: Path) -> LibraryFacts:
    """Raises UsageError for a file that is no shared library."""
    needed: list[str] = []
    places: list[str] = []
    undefined: set[str] = set()
    functions: list[str] = []
    cxx_functions: list[str] = []
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    needed += [str(vars(tag)["needed"]) for tag in section.iter_tags("DT_NEEDED")]
                    for kind in ("runpath", "rpath"):
                        tags = section.iter_tags(f"DT_{kind.upper()}")
                        places += [place for tag in tags for place in str(vars(tag)[kind]).split(":") if place]
                elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                    for symbol in section.iter_symbols():
                        if symbol["st_shndx"] == "SHN_UNDEF":
                            undefined.add(symbol.name)
                        elif symbol["st_info"]["type"] == "STT_FUNC":
                            functions.append(symbol.name)
                            if symbol.name.startswith("_Z") and symbol["st_info"]["bind"] == "STB_GLOBAL":
                                cxx_functions.append(symbol.name)
            has_device_code = any(section.name == ".nv_fatbin" for section in elf.iter_sections())
    except OSError as error:
        raise UsageError(f"library {path} cannot be read: {error.strerror}") from error
    except ELFError as error:
        raise UsageError(f"{path} is no shared library of Linux: {error}") from error
    places += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    origin = str(path.resolve().parent)
    folders = [place.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for place in places if place]
    return LibraryFacts(
        path, tuple(needed), tuple(Path(folder) for folder in folders), frozenset(undefined),
        tuple(sorted(functions)), tuple(sorted(cxx_functions)), has_device_code,
    )  # fmt: skip


def with_its_libraries(path: Path) -> tuple[LibraryFacts, ...]:
    """A library and those that it needs, and they need, as far as they lie where these say themselves. An engine's host
    code often is in one, its kernels in another. Raises UsageError for a file that is no shared library."""
    found = [read_library(path)]
    for facts in found:  # grows
        for name in facts.needed:
            file = next((folder / name for folder in facts.folders if (folder / name).is_file()), None)
            if file is not None and all(file.name != one.path.name for one in found):
                found.append(read_library(file))
    return tuple(found)


def ptx_of_libraries(path: Path) -> list[str]:
    """Every PTX text of a library and of those that it needs. Raises CompileError where there is none."""
    texts = [text for facts in with_its_libraries(path) if facts.has_device_code for text in ptx_of_library(facts.path)]
    return texts or ptx_of_library(path)


def stand_in_for(path: Path) -> tuple[str, Path]:
    """The stand-in that a library has to find loaded: its name and file. Raises CompileError where none can serve."""
    libraries = with_its_libraries(path)
    registering = [one for one in libraries if _REGISTERS in one.undefined]
    if not registering:
        static = next((one.path.name for one in libraries if one.has_device_code), "")
        if static:
            raise CompileError(
                f"{static} has the CUDA runtime linked in statically, so that nothing can stand in for it; build it "
                "with nvcc -cudart shared, or run it on a GPU"
            )
        raise CompileError(
            f"{path.name} has no kernels, nor has a library that it needs and that its RUNPATH or LD_LIBRARY_PATH "
            "finds: name the library that nvcc built"
        )
    driver = next((one.path.name for one in libraries if any(name.startswith("libcuda.so") for name in one.needed)), "")
    if driver:
        raise CompileError(
            f"{driver} is linked to the CUDA driver (libcuda), for which nothing stands in; let it ask for the "
            "driver's functions with cudaGetDriverEntryPoint, or run it on a GPU"
        )
    soname = next((one.cudart for one in registering if one.cudart), SONAMES[-1])
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
