"""CUDA C++ to PTX or cubin with NVRTC: an explicit arch always, no driver needed, cached on disk."""

from g4kv_cli.compiler.images import CompiledUnit, compile_image, compile_with_log
from g4kv_cli.compiler.sources import (
    BUILT_IN_KERNELS_DIRECTORY,
    Header,
    SourceFile,
    find_source,
    kernels_digest,
    source_names,
)
from g4kv_cli.compiler.toolkit import nvrtc_version
from g4kv_cli.compiler.usage import ResourceUsage, resource_usage

__all__ = [
    "BUILT_IN_KERNELS_DIRECTORY",
    "CompiledUnit",
    "Header",
    "ResourceUsage",
    "SourceFile",
    "compile_image",
    "compile_with_log",
    "find_source",
    "kernels_digest",
    "nvrtc_version",
    "resource_usage",
    "source_names",
]
