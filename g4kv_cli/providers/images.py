"""Where a manifest's code comes from: PTX, sources, machine code, builders and libraries, loaded once each."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel, PagedReads
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import CompileError
from g4kv_cli.providers.builder import KERNEL_OF_PTX, LaunchFacts, built, cache_folder
from g4kv_cli.providers.c_function import LauncherRefused, call, function_of, last_error_of
from g4kv_cli.providers.callables import load_function
from g4kv_cli.providers.manifest import Image, Manifest, Returns
from g4kv_cli.providers.nvcc import compile_library
from g4kv_cli.records.run import KernelImage

MAX_SHOWN = 6
"""Kernels that a message names."""


class ImageStore:
    """The images of a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._loaded: dict[tuple[str, str], KernelImage] = {}
        self._facts: dict[tuple[str, str], LaunchFacts] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._compiled: dict[str, Path] = {}
        self._libraries: dict[Path, ctypes.CDLL] = {}

    def image(self, name: str) -> Image:
        """The image of a name. Raises NotCovered: names with expressions in them may not all be there."""
        found = self._manifest.images.get(name)
        if found is None:
            raise NotCovered(f"{self._manifest.name} has no image {name}")
        return found

    def facts(self, name: str, scope: Mapping[str, Any], device: Device) -> LaunchFacts:
        """What is known of an image's launches: all for a builder's, which is run here, nothing for the others."""
        image = self.image(name)
        if image.kind != "builder":
            return LaunchFacts()
        constants = json.dumps({key: value.integer(scope) for key, value in image.constants}, sort_keys=True)
        key = (name, constants)
        if key not in self._facts:
            with device.time_apart():
                self._facts[key] = built(image, constants, self._manifest.file.resolve().parent)
        return self._facts[key]

    def kernel(
        self, facts: LaunchFacts, name: str, symbol: str, device: Device, family: str = ""
    ) -> LoadedKernel | None:
        """The one kernel of an image whose name matches. Raises CompileError, or NotCovered if there is none; None if
        there is none of a ``family`` either, the pattern with any number in it."""
        image = self.image(name)
        loaded = self._load(image, facts, device)
        names = _kernel_names(loaded)
        pattern = facts.symbol or symbol
        found = [each for each in names if re.search(pattern, each)]
        if not found:
            if family and not any(re.search(family, each) for each in names):
                return None
            raise NotCovered(f"image {name} has no kernel that matches {pattern!r}")
        if len(found) > 1:
            shown = ", ".join(found[:3])
            raise CompileError(f"image {name}: {len(found)} kernels match {pattern!r} ({shown}); say which")
        return device.load(loaded, found[0])

    def call(
        self,
        name: str,
        function: str,
        arguments: Sequence[Any],
        returns: Returns,
        device: Device,
        run: Callable[[LoadedKernel, Launch], None],
        may_collide: Sequence[DeviceArray],
        paged_reads: Sequence[PagedReads],
    ) -> Any:
        """Call a function of a library: on a GPU with the real runtime, on the emulated device with the stand-in.
        ``arguments`` are of ctypes. The value that it returned, None where that is a status."""
        image, path = self.image(name), self.library(name, device)
        if device.info.kind == "emulated":
            from g4kv_cli.providers.cudart.runtime import runtime_of_process

            def collide(kernel: LoadedKernel, launch: Launch) -> None:
                run(kernel, replace(launch, may_collide=tuple(may_collide), paged_reads=tuple(paged_reads)))

            runtime = runtime_of_process()
            return runtime.call(path, function, arguments, returns, device, collide, image.last_error)  # type: ignore[arg-type]
        return self._call_on_gpu(image, path, function, arguments, returns, device)

    def library(self, name: str, device: Device) -> Path:
        """The file of a library; one that is a source is compiled, once. Raises CompileError."""
        image = self.image(name)
        if image.path is None:
            raise CompileError(f"image {name} has no file")
        if not image.is_compiled:
            return image.path
        if name not in self._compiled:
            with device.time_apart():
                self._compiled[name] = compile_library(
                    image.path, image.options, image.files, device.info.arch, cache_folder()
                )
        return self._compiled[name]

    def names_of(self, name: str) -> str:
        """The kernels of what was loaded of an image, in words."""
        found = [each for (image, _), loaded in self._loaded.items() if image == name for each in _kernel_names(loaded)]
        return ", ".join(found[:MAX_SHOWN]) + (", .." if len(found) > MAX_SHOWN else "") or "none"

    def function(self, name: str) -> Callable[..., Any]:
        """A Python function, imported once. Raises CompileError."""
        if name not in self._functions:
            folder = self._manifest.file.resolve().parent
            self._functions[name] = load_function(self.image(name).function, folder)
        return self._functions[name]

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self, image: Image, facts: LaunchFacts, device: Device) -> KernelImage:
        is_cubin = image.kind == "cubin"
        file = facts.ptx or image.path
        here = _family(device.info.arch) if device.info.kind == "cuda" else ""
        if facts.cubin is not None and here == _family(facts.cubin_arch):
            file, is_cubin = facts.cubin, True
        key = (image.name, str(file))
        if key in self._loaded:
            return self._loaded[key]
        if file is None:
            raise CompileError(f"image {image.name} has no file")
        arch = device.info.arch
        if image.kind == "source":
            made = compile_image(
                find_source(file.name, file.parent), arch=arch, kind=device.image_kind, defines=image.defines
            )
        else:
            if is_cubin and device.info.kind == "emulated":
                raise NotCovered(f"image {image.name} is machine code, which runs on a GPU only")
            try:
                data = file.read_bytes()
            except OSError as error:
                raise CompileError(f"image {image.name}: {file} cannot be read: {error.strerror}") from error
            made = KernelImage(
                "cubin" if is_cubin else "ptx", arch, file.name, data, hashlib.sha256(data).hexdigest(), ""
            )
        self._loaded[key] = made
        return made

    def _call_on_gpu(
        self, image: Image, path: Path, function: str, arguments: Sequence[Any], returns: Returns, device: Device
    ) -> Any:
        if path not in self._libraries:
            try:
                self._libraries[path] = ctypes.CDLL(str(path))
            except OSError as error:
                raise CompileError(f"{path} cannot be loaded: {error}; ldd shows what it lacks") from error
        library = self._libraries[path]
        target = function_of(library, path, function)
        # The launcher may use any stream: what is queued before it is done first, and its own work before what follows.
        # A graph records what goes into the device's own stream, and there is nothing to wait for.
        if not device.is_capturing:
            device.synchronize()
        device.launch_count += 1
        returned = call(target, arguments, returns, library)
        if not device.is_capturing:
            device.synchronize_context(f"run {function} of {path.name}")
        if returned.refusal:
            raise LauncherRefused(f"{function} {returned.refusal}{last_error_of(library, image.last_error)}")
        return returned.value


def _family(arch: str) -> str:
    """``sm_90`` of ``sm_90a``."""
    return arch.rstrip("af")


def _kernel_names(image: KernelImage) -> list[str]:
    if image.kind == "ptx":
        return KERNEL_OF_PTX.findall(image.data.decode(errors="replace"))
    from g4kv_cli.providers.cudart.library import kernels_of_cubin

    return kernels_of_cubin(image.data, image.name)
