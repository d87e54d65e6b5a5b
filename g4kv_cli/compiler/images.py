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
    """As :func:`compile_image`, with the compiler's log."""
    options = nvrtc.options_for(arch, kind, defines)
    version = toolkit.nvrtc_version()
    source_digest = hashlib.sha256("\0".join((source.digest, *options)).encode()).hexdigest()
    # Our headers count by content (in the source digest), the toolkit's by their version.
    key = cache.key_of((source_digest, version, toolkit.headers_version(), arch, kind))
    entry = cache.read(key)
    if entry is None:
        data, log = nvrtc.compile_unit(source, arch, kind, options)
        entry = cache.CacheEntry(data, log)
        cache.write(key, entry)
    return CompiledUnit(KernelImage(kind, arch, source.name, entry.data, source_digest, version), entry.log)
