"""Where a manifest's code comes from: PTX, sources, machine code, builders and libraries, loaded once each."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from g4kv_cli.compiler import cache
from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.device.arguments import Argument, pointer
from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel, PagedReads
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import CompileError
from g4kv_cli.providers.callables import load_function
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.manifest import Image, Manifest
from g4kv_cli.providers.nvcc import compile_library
from g4kv_cli.records.run import KernelImage

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_C_TYPES: dict[str, Any] = {
    "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16, "u16": ctypes.c_uint16, "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
    "f64": ctypes.c_double, "ptr": ctypes.c_void_p,
}  # fmt: skip
BUILDER_SECONDS = 600
"""The longest that a builder may take: compilers of whole attention kernels take minutes."""
_ZERO = Expression.parse("0")


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What an image says of its launches. ``arguments`` are names in order where a builder states them, then the step's
    own list is by name; ``trailing`` follow them. ``names`` are words for the step's expressions."""

    ptx: Path | None = None
    symbol: str = ""
    block: tuple[Expression, ...] = ()
    shared: Expression = _ZERO
    arguments: tuple[str, ...] | None = None
    trailing: tuple[Argument, ...] = ()
    names: Mapping[str, int] = field(default_factory=dict)


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
                self._facts[key] = self._built(image, constants)
        return self._facts[key]

    def kernel(self, facts: LaunchFacts, name: str, symbol: str, device: Device) -> LoadedKernel:
        """The one kernel of an image whose name matches. Raises CompileError, or NotCovered if there is none."""
        image = self.image(name)
        loaded = self._load(image, facts, device)
        names = _kernel_names(loaded)
        pattern = facts.symbol or symbol
        found = [each for each in names if re.search(pattern, each)]
        if not found:
            raise NotCovered(f"image {name} has no kernel that matches {pattern!r}")
        if len(found) > 1:
            shown = ", ".join(found[:3])
            raise CompileError(f"image {name}: {len(found)} kernels match {pattern!r} ({shown}); say which")
        return device.load(loaded, found[0])

    def call(
        self,
        name: str,
        function: str,
        arguments: Sequence[tuple[str, float]],
        device: Device,
        run: Callable[[LoadedKernel, Launch], None],
        may_collide: Sequence[DeviceArray],
        paged_reads: Sequence[PagedReads],
    ) -> None:
        """Call a function of a library: on a GPU with the real runtime, on the emulated device with the stand-in."""
        image, path = self.image(name), self.library(name, device)
        typed = [_C_TYPES[kind](int(value) if kind not in ("f32", "f64") else value) for kind, value in arguments]
        if device.info.kind == "emulated":
            from g4kv_cli.providers.cudart.runtime import runtime_of_process

            def collide(kernel: LoadedKernel, launch: Launch) -> None:
                run(kernel, replace(launch, may_collide=tuple(may_collide), paged_reads=tuple(paged_reads)))

            runtime_of_process().call(path, function, typed, device, collide, image.last_error)  # type: ignore[arg-type]
            return
        self._call_on_gpu(image, path, function, typed, device)

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
                    image.path, image.options, image.files, device.info.arch, _cache_folder()
                )
        return self._compiled[name]

    def function(self, name: str) -> Callable[..., Any]:
        """A Python function, imported once. Raises CompileError."""
        if name not in self._functions:
            folder = self._manifest.file.resolve().parent
            self._functions[name] = load_function(self.image(name).function, folder)
        return self._functions[name]

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self, image: Image, facts: LaunchFacts, device: Device) -> KernelImage:
        file = facts.ptx or image.path
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
            is_cubin = image.kind == "cubin"
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

    def _built(self, image: Image, constants: str) -> LaunchFacts:
        """Run a builder, once for each set of constants and state of its files."""
        folder = self._manifest.file.resolve().parent
        digest = hashlib.sha256("\0".join((*image.command, constants)).encode())
        for file in image.read_files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        target = _cache_folder() / "builders" / f"{image.name}_{digest.hexdigest()[:24]}.ptx"
        facts_file = target.with_suffix(".json")
        if not (target.is_file() and facts_file.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [*image.command, str(target), constants]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, cwd=folder, timeout=BUILDER_SECONDS
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CompileError(f"builder of image {image.name} cannot be run: {error}") from error
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()
                last = said[-1] if said else "no output"
                raise CompileError(f"builder of image {image.name} failed with {done.returncode}: {last}", done.stderr)
        return _read_facts(image, target, facts_file)

    def _call_on_gpu(self, image: Image, path: Path, function: str, typed: list[Any], device: Device) -> None:
        if path not in self._libraries:
            try:
                self._libraries[path] = ctypes.CDLL(str(path))
            except OSError as error:
                raise CompileError(f"{path} cannot be loaded: {error}; ldd shows what it lacks") from error
        library = self._libraries[path]
        try:
            target = getattr(library, function)
        except AttributeError as error:
            raise CompileError(
                f"{path} has no function {function!r}: nm -D --defined-only shows those it has"
            ) from error
        target.restype = ctypes.c_int
        target.argtypes = [type(argument) for argument in typed]
        # The launcher may use any stream: what is queued before it is done first, and its own work before what follows.
        # A graph records what goes into the device's own stream, and there is nothing to wait for.
        if not device.is_capturing:
            device.synchronize()
        device.launch_count += 1
        returned = int(target(*typed))
        if not device.is_capturing:
            device.synchronize_context(f"run {function} of {path.name}")
        if returned:
            from g4kv_cli.providers.cudart.runtime import LauncherRefused, last_error_of

            raise LauncherRefused(f"{function} returned {returned}{last_error_of(library, image.last_error)}")


def _kernel_names(image: KernelImage) -> list[str]:
    if image.kind == "ptx":
        return _ENTRY.findall(image.data.decode(errors="replace"))
    from g4kv_cli.providers.cudart.library import kernels_of_cubin

    return kernels_of_cubin(image.data, image.name)


def _read_facts(image: Image, target: Path, file: Path) -> LaunchFacts:
    """What a builder left beside its PTX: threads, shared, and the kernel's arguments by name."""
    try:
        values = json.loads(file.read_text())
        threads, shared = int(values["threads"]), int(values["shared"])
        arguments = tuple(str(name) for name in values["arguments"])
        extra = int(values.get("null_pointers", 0))
        symbol = str(values.get("symbol", "."))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompileError(
            f"builder of image {image.name} left no good {file.name}: {error!r}; it has to "
            "have threads, shared and arguments"
        ) from error
    if not target.is_file():
        raise CompileError(f"builder of image {image.name} left no PTX in {target}")
    names = {"built_threads": threads, "built_shared": shared}
    trailing = tuple(pointer(0) for _ in range(extra))
    pattern = "." if symbol == "." else f"^{re.escape(symbol)}$"
    return LaunchFacts(
        target, pattern, (Expression.parse(str(threads)),), Expression.parse(str(shared)), arguments, trailing, names
    )


def _cache_folder() -> Path:
    """Where built images are kept; a folder of the process's own where the user has none."""
    return cache.cache_directory() or Path(tempfile.mkdtemp(prefix="g4kv-"))
