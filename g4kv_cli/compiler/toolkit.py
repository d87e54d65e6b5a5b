"""Finds NVRTC and the CUDA headers that belong to it: pip wheels, conda or an installed toolkit."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from g4kv_cli.errors import CompileError

INSTALL_HINT = (
    "install it with: python -m pip install 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14' "
    "'nvidia-cuda-cccl>=13,<14' (or point CUDA_PATH at a CUDA 13 toolkit)"
)
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
    """The version number that the CUDA headers state (``13050``), empty where they state none."""
    path = include_directories()[0] / "cuda_runtime_api.h"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def _with_cccl(directory: Path) -> tuple[Path, ...]:
    """cuda_bf16.h includes <nv/target>, which some CUDA 13 packages keep under ``cccl/`` only."""
    nested = directory / "cccl"
    if not (directory / "nv" / "target").is_file() and (nested / "nv" / "target").is_file():
        return (directory, nested)
    return (directory,)


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
