"""Builders: commands of an engine's own environment that leave PTX and what a launch of it has to know."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from g4kv_cli.compiler import cache
from g4kv_cli.device.arguments import Argument, pointer
from g4kv_cli.errors import CompileError
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.manifest import Image
from g4kv_cli.providers.said import one_line

MAX_SAID = 4000
"""Characters of a builder's output that are looked at, from its end."""
MAX_THREADS, MAX_ARGUMENTS, MAX_SHARED_BYTES = 1024, 4096, 1 << 20
_ZERO = Expression.parse("0")
KERNEL_OF_PTX = re.compile(r"\.entry\s+([\w$]+)")
"""Its group is the name."""


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What an image says of its launches. ``arguments`` are names in order where a builder states them, then the step's
    own list is by name; ``trailing`` follow them. ``names`` are words for the step's expressions. ``cubin``: machine
    code of the same kernel, which a GPU of ``cubin_arch`` takes."""

    ptx: Path | None = None
    cubin: Path | None = None
    cubin_arch: str = ""
    symbol: str = ""
    block: tuple[Expression, ...] = ()
    shared: Expression = _ZERO
    arguments: tuple[str, ...] | None = None
    trailing: tuple[Argument, ...] = ()
    names: Mapping[str, int] = field(default_factory=dict)


def built(image: Image, constants: str, folder: Path) -> LaunchFacts:
    """What a builder makes for these constants (JSON): it is run once for them and the state of its files.

    It works in a folder of its own, whose files are taken only if it ended well and they are whole. Raises CompileError
    with one line: it cannot be run, failed, did not end in time, or left something else than it has to.
    """
    digest = hashlib.sha256("\0".join((*image.command, constants)).encode())
    for file in image.read_files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    target = cache_folder() / "builders" / f"{image.name}_{digest.hexdigest()[:24]}.ptx"
    if not target.with_suffix(".json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work) / target.name
            _run(image, [*image.command, str(made), constants], folder, Path(work))
            _facts_of(image, made)
            for suffix in (".ptx", ".cubin", ".json"):  # the facts last: with them it is there
                with suppress(FileNotFoundError):
                    os.replace(made.with_suffix(suffix), target.with_suffix(suffix))
    return _facts_of(image, target)


def cache_folder() -> Path:
    """Where built images are kept; a folder of the process's own where the user has none."""
    return cache.cache_directory() or _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="g4kv-"))


def _run(image: Image, command: list[str], folder: Path, work: Path) -> None:
    """Run it to its end, or end it and all that it started when its time is over."""
    what = f"builder of image {image.name}"
    # Into files, not pipes: something that it left running would hold a pipe open.
    with (work / "stdout").open("w+b") as output, (work / "stderr").open("w+b") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True
            )
        except OSError as error:
            raise CompileError(f"{what} cannot be run: {command[0]}: {error.strerror}") from error
        try:
            process.wait(image.seconds)
        except subprocess.TimeoutExpired as error:
            said = _last_line(errors) or _last_line(output)
            last = f"; its last words: {said}" if said else ""
            raise CompileError(
                f"{what} did not end within {image.seconds} s{last}. It may take longer with seconds = N in the image"
            ) from error
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            code = process.returncode
            ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with {code}"
            said = _last_line(errors) or _last_line(output) or "no output"
            raise CompileError(f"{what} {ending}: {said}", _said(errors))


def _said(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_SAID))
    text = file.read().decode(errors="replace")
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def _last_line(file: IO[bytes]) -> str:
    return one_line(_said(file), last=True)


def _facts_of(image: Image, target: Path) -> LaunchFacts:
    """What a builder left beside its PTX: threads, shared, and the kernel's arguments by name."""
    file, what = target.with_suffix(".json"), f"builder of image {image.name}"
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise CompileError(f"{what} left no {file.name} beside the PTX: {error.strerror}") from error
    except ValueError as error:
        raise CompileError(f"{what} left a {file.name} that is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise CompileError(f"{what}: {file.name} must be an object, got {type(values).__name__}")

    def number(key: str, most: int, default: int | None = None) -> int:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise CompileError(f"{what}: {key!r} in {file.name} must be an integer from 0 to {most}, got {value!r}")
        return value

    def text(key: str) -> str:
        value = values.get(key, "")
        if not isinstance(value, str):
            raise CompileError(f"{what}: {key!r} in {file.name} must be a string, got {value!r}")
        return value

    threads, shared = number("threads", MAX_THREADS), number("shared", MAX_SHARED_BYTES)
    extra, symbol, arch = number("null_pointers", MAX_ARGUMENTS, 0), text("symbol"), text("cubin_arch")
    arguments: Any = values.get("arguments")
    if not isinstance(arguments, list) or not all(isinstance(name, str) for name in arguments):
        raise CompileError(f"{what}: 'arguments' in {file.name} must be a list of names, got {arguments!r}")
    if not target.is_file() or not KERNEL_OF_PTX.search(target.read_text(errors="replace")):
        raise CompileError(
            f"{what} left no PTX in {target.name}: " + ("no .entry is in it" if target.is_file() else "no such file")
        )
    cubin = target.with_suffix(".cubin")
    if bool(arch) != cubin.is_file():
        raise CompileError(f"{what}: machine code goes with both a .cubin beside the PTX and 'cubin_arch' (sm_90a)")
    names = {"built_threads": threads, "built_shared": shared}
    pattern = f"^{re.escape(symbol)}$" if symbol else "."
    block, dynamic = (Expression.parse(str(value)) for value in (threads, shared))
    return LaunchFacts(
        target, cubin if arch else None, arch, pattern, (block,), dynamic, tuple(arguments),
        tuple(pointer(0) for _ in range(extra)), names,
    )  # fmt: skip
