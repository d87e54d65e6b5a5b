"""Source in, image out, through the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from g4kv_cli.compiler import cache, nvrtc, toolkit
from g4kv_cli.compiler.sources import SourceFile
from g4kv_cli.records.run import ImageKind, KernelImage

_NO_DEFINES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """An image and what the compiler said about it (read it with :func:`resource_usage`)."""

    image: KernelImage
    log: str


def compile_image(
    source: SourceFile, *, arch: str, kind: ImageKind, defines: Mapping[str, str] = _NO_DEFINES
) -> KernelImage:
    """Compile for an explicit ``arch`` (``sm_80``, ``sm_90a``): a cubin, or PTX of the same virtual arch.

    Raises CompileError (source, line, arch, log), also where NVRTC or its headers are missing; UsageError
    for a malformed arch.
    """
    return compile_with_log(source, arch=arch, kind=kind, defines=defines).image


def compile_with_log(
    source: SourceFile, *, arch: str, kind: ImageKind, defines: Mapping[str, str] = _NO_DEFINES
) -> CompiledUnit:
    """As :func:`compile_image`, with the compiler's log. PTX of a unit that was compiled to machine code is there."""
    options = nvrtc.options_for(arch, kind, defines)
    source_digest, key = _names(source, arch, kind, options)
    entry = cache.read(key)
    if entry is None:
        made = nvrtc.compile_program(source, arch, kind, options)
        entry = cache.CacheEntry(made.data, made.log)
        cache.write(key, entry)
        if kind != "ptx":
            _, ptx_key = _names(source, arch, "ptx", nvrtc.options_for(arch, "ptx", defines))
            cache.write(ptx_key, cache.CacheEntry(made.ptx, made.ptx_log))
    image = KernelImage(kind, arch, source.name, entry.data, source_digest, toolkit.nvrtc_version())
    return CompiledUnit(image, entry.log)


def _names(source: SourceFile, arch: str, kind: ImageKind, options: tuple[str, ...]) -> tuple[str, str]:
    """Digest of the source and how it is compiled, and the key of the image in the cache."""
    digest = hashlib.sha256("\0".join((source.digest, *options)).encode()).hexdigest()
    # Our headers count by content (in the source digest), the toolkit's by their version.
    return digest, cache.key_of((digest, toolkit.nvrtc_version(), toolkit.headers_version(), arch, kind))
