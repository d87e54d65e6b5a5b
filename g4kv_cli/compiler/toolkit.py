"""Finds NVRTC and the CUDA headers that belong to it: pip wheels, conda or an installed toolkit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4kv_cli.errors import CompileError

INSTALL_HINT = (
    "install it with: python -m pip install 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14' "
    "'nvidia-cuda-cccl>=13,<14' 'nvidia-cuda-crt>=13,<14' (or point CUDA_PATH at a CUDA 13 toolkit)"
)
_HEADER_PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "crt/": ("crt/mma.h", "nvidia-cuda-crt>=13,<14"),
        "cuda/": ("cuda/std/cstdint", "nvidia-cuda-cccl>=13,<14"),
        "cub/": ("cuda/std/cstdint", "nvidia-cuda-cccl>=13,<14"),
        "thrust/": ("cuda/std/cstdint", "nvidia-cuda-cccl>=13,<14"),
        "nv/": ("cuda/std/cstdint", "nvidia-cuda-cccl>=13,<14"),
        "curand": ("curand_kernel.h", "nvidia-curand"),
    }
)
"""By the first letters of a header: one that its package always has, and the package."""
OVERLAY_HINT = "a header of your own lies in the --kernels directory and is included with quotes"
_MARKER_HEADER = "cuda_bf16.h"
_SYSTEM_TOOLKIT = Path("/usr/local/cuda")  # where NVIDIA's own installers put it


@cache
def load_nvrtc() -> Any:
    """The module ``cuda.bindings.nvrtc`` with its library loaded. Needs no driver and no GPU.

    Raises CompileError, with the line that installs it, where the binding or the library is missing.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(
            f"NVRTC is not available: {_first_line(error)}; install the bindings with: "
            "python -m pip install 'cuda-python>=13,<14'"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the binding raises types of its own that differ between its versions
        raise CompileError(f"NVRTC is not available: {_first_line(error)}; {INSTALL_HINT}") from error
    return nvrtc


@cache
def nvrtc_version() -> str:
    """``major.minor`` of the NVRTC that compiles. Raises CompileError if there is none."""
    result, major, minor = load_nvrtc().nvrtcVersion()
    if int(result) != 0:
        raise CompileError(f"NVRTC does not tell its version ({result.name}); {INSTALL_HINT}")
    return f"{major}.{minor}"


@cache
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities (80, 90, ...) that this NVRTC can compile for."""
    result, archs = load_nvrtc().nvrtcGetSupportedArchs()
    return tuple(archs) if int(result) == 0 else ()


@cache
def include_directories() -> tuple[Path, ...]:
    """The include directories for NVRTC: that of the CUDA headers and, where CUDA keeps it apart, CCCL's.

    The headers next to the loaded NVRTC come first, so that both are of one version. Raises CompileError.
    """
    tried: list[Path] = []
    for directory in _candidates():
        if directory in tried:
            continue
        tried.append(directory)
        if (directory / _MARKER_HEADER).is_file():
            return _with_cccl(directory)
    places = ", ".join(str(path) for path in tried) or "nowhere"
    raise CompileError(f"the CUDA headers ({_MARKER_HEADER}) were not found (looked in {places}); {INSTALL_HINT}")


@cache
def headers_version() -> str:
    """The version numbers that the CUDA headers and CCCL's state (``13050 3005000``), empty where they state none."""
    stated = (
        _stated("cuda_runtime_api.h", "CUDART_VERSION"),
        _stated("cuda/std/__cccl/version.h", "CCCL_VERSION"),
    )
    return " ".join(number for number in stated if number)


def missing_header_hint(name: str, included_by: str, own_hint: str = OVERLAY_HINT) -> str:
    """What to do about a header that NVRTC cannot open in the file ``included_by``; ``own_hint`` where headers of one's
    own belong."""
    for prefix, (marker, package) in _HEADER_PACKAGES.items():
        if name.startswith(prefix) and not _has_header(marker):
            return f"install it with: python -m pip install '{package}'"
    if any(Path(included_by).is_relative_to(directory) for directory in include_directories()):
        return f"{Path(included_by).name} is for the host's compiler; leave it out of device code"
    bare = name.removesuffix(".h")
    for twin in (f"cuda/std/{bare}", f"cuda/std/c{bare}"):
        if _has_header(twin):
            return f"NVRTC has no headers of the host's compiler; include <{twin}> and write cuda::std::"
    return f'{own_hint}: "{name}"'


def _has_header(name: str) -> bool:
    return any((directory / name).is_file() for directory in include_directories())


def _stated(header: str, macro: str) -> str:
    """The number that a header defines a macro as; empty where there is no such header or definition."""
    for directory in include_directories():
        try:
            text = (directory / header).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(rf"^#define\s+{macro}\s+(\d+)", text, re.MULTILINE):
            return found.group(1)
    return ""


def _with_cccl(directory: Path) -> tuple[Path, ...]:
    """CUDA 13 keeps <cuda/std/...>, <cub/...> and <thrust/...> under ``cccl/``, <nv/target> in some packages too."""
    nested = directory / "cccl"
    if nested.is_dir() or (directory / "cuda/std/cstdint").is_file():
        return (directory, nested) if nested.is_dir() else (directory,)
    # Its wheel may lie in another folder of packages than NVRTC's.
    elsewhere = (Path(place) / directory.parent.name / "include" / "cccl" for place in _package_folders())
    return (directory, *(found for found in elsewhere if found.is_dir()))


def _package_folders() -> list[str]:
    """The folders of the packages' namespace ``nvidia``."""
    spec = find_spec("nvidia")
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _candidates() -> list[Path]:
    candidates: list[Path] = []
    library = _library_path()
    if library is not None:
        candidates += [parent / "include" for parent in list(library.parents)[1:4]]
    located = _located_by_pathfinder()
    if located is not None:
        candidates.append(located)
    roots = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME")]
    candidates += [Path(root) / "include" for root in [*roots, str(_SYSTEM_TOOLKIT)] if root]
    return candidates


def _library_path() -> Path | None:
    try:
        from cuda import pathfinder

        loaded = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, AttributeError, RuntimeError):
        return None
    return Path(loaded).resolve() if loaded else None


def _located_by_pathfinder() -> Path | None:
    try:
        from cuda import pathfinder

        found = pathfinder.locate_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, RuntimeError):
        return None
    return Path(found.abs_path) if found is not None and found.abs_path else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
