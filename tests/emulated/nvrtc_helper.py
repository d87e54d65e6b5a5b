"""CUDA source -> PTX text for the tests of the emulator, by NVRTC directly (it needs no GPU)."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from cuda.bindings import nvrtc

from g4kv_cli.device.emulated import Kernel, Module

DATA = Path(__file__).resolve().parent.parent / "data" / "hw"
DIALECTS = ("80", "90", "120")
"""compute_80 and 90 emit typed registers, compute_120 keeps floats in untyped ones."""


def include_directory() -> str:
    """The CUDA headers that the NVIDIA runtime wheel brings."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec is not None else ():
        path = Path(root) / "cu13" / "include"
        if (path / "cuda_bf16.h").exists():
            return str(path)
    raise RuntimeError("no CUDA headers found: install nvidia-cuda-runtime")


@cache
def compile_ptx(source: str, arch: str = "90", name: str = "test.cu", *options: str) -> str:
    """PTX of a CUDA source for compute_<arch>, with line information."""
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    words = [f"--gpu-architecture=compute_{arch}", "-lineinfo", f"-I{include_directory()}", *options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(max(size, 2))  # never shorter: NVRTC writes a NUL even for an empty log
    nvrtc.nvrtcGetProgramLog(program, log)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(log.decode(errors="replace"))
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(max(size, 2))
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(text).rstrip(b"\0").decode()


@cache
def compile_module(source: str, arch: str = "90", name: str = "test.cu", *options: str) -> Module:
    """The emulator's module of a CUDA source."""
    return Module(compile_ptx(source, arch, name, *options), source_name=name)


def compile_kernel(body: str, arch: str = "90", name: str = "kernel") -> Kernel:
    """One kernel of a CUDA source."""
    return compile_module(body, arch).kernel(name)


def line_of(source: str, mark: str) -> int:
    """1-based number of the only line that contains ``mark``."""
    found = [number for number, line in enumerate(source.split("\n"), 1) if mark in line]
    assert len(found) == 1, f"mark {mark!r} is on {len(found)} lines"
    return found[0]
