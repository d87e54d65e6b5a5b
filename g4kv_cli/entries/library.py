"""The kernels of one directory on one device, compiled and loaded on first use."""

from __future__ import annotations

import ctypes
from pathlib import Path

from g4kv_cli.compiler.cache import TranslationCache
from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.device.interface import Device, LoadedKernel
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.entries.provider import NotCovered, Provider
from g4kv_cli.model.kv_format import KvFormat
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder


class KernelLibrary:
    """What an entry needs to launch: a device, and where the kernel sources are.

    ``kernels_directory`` overlays the built-in sources: a file found there is used in place of the built-in one.
    ``variant`` leaves only the kernels of one path (``portable``, ``sm_90a``) or symbol to entries that have several,
    or of several in order of preference (``sm_90a,portable``); empty: the first that runs. ``launched`` holds the names
    of the kernels that were asked for since it was last cleared, in the order of their first launch.
    ``provider`` serves the entries in place of the built-in kernels.
    """

    def __init__(
        self,
        device: Device,
        kernels_directory: Path | None = None,
        variant: str = "",
        provider: Provider | None = None,
    ) -> None:
        self.device = device
        device.keep_translations(TranslationCache())
        self.kernels_directory = kernels_directory
        self.variant = variant
        self.launched: dict[str, None] = {}
        self.provider = provider
        self._kernels: dict[tuple[str, str, bool], LoadedKernel] = {}
        self._replaced: dict[str, frozenset[str]] = {}

    def contract_of(self, entry: str) -> Contract:
        """What the kernels that serve an entry promise. Raises NotCovered if none do."""
        return STRICT if self.provider is None else self.provider.contract_of(entry)

    def require_format(self, entry: str, kv_format: KvFormat) -> None:
        """Raises NotCovered for rows of K and V that another's kernels do not take."""
        if self.provider is None:
            return
        taken = self.contract_of(entry).kv_formats
        if kv_format not in taken:
            words = " or ".join(taken)
            raise NotCovered(f"{self.provider.name}: its kernels take {words} rows of K and V, not {kv_format} ones")

    @property
    def pool_order(self) -> PoolOrder:
        """The order of a pool's axes in memory that the kernels want."""
        return OWN_ORDER if self.provider is None else self.provider.pool_order

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        """The loaded kernel ``symbol`` of ``source_name``, compiled for ``sm_90a`` in place of ``sm_90`` if it is
        ``arch_specific``. Raises CompileError."""
        self.launched[symbol] = None
        key = (source_name, symbol, arch_specific)
        if key not in self._kernels:
            source = find_source(source_name, self.kernels_directory)
            arch = self.device.info.arch.rstrip("af") + "a" if arch_specific else self.device.info.arch
            image = compile_image(source, arch=arch, kind=self.device.image_kind)
            self._kernels[key] = self.device.load(image, symbol)
        return self._kernels[key]

    def replaced_files(self, source_name: str) -> frozenset[str]:
        """Of a source and the headers it includes, those that ``kernels_directory`` brings."""
        if self.kernels_directory is None:
            return frozenset()
        if source_name not in self._replaced:
            source = find_source(source_name, self.kernels_directory)
            names = [source_name, *(header.name for header in source.headers)]
            here = frozenset(name for name in names if (self.kernels_directory / name).is_file())
            self._replaced[source_name] = here
        return self._replaced[source_name]

    def pack(self, parameters: ctypes.Structure) -> bytes:
        """A parameter struct as the kernel gets it. Trap cases override this to reach what stands behind the host."""
        return bytes(parameters)
