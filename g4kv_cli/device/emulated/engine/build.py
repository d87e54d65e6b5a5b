"""Compiles the engine's C sources to the library beside this file; setup.py does it when the package is installed.

    python g4kv_cli/device/emulated/engine/build.py

does the same in a checkout. The compiler is the clang of the ``ziglang`` wheel, or ``clang`` itself; the sources use
its vector types. Needs nothing but the standard library, for it also runs where the package is not installed.

With ``--sanitize`` every access of the library to memory is checked and undefined behaviour is an illegal instruction.
It needs the run-time library of gcc's sanitizer, and the tests then run as

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m pytest tests/emulated -k engine

with NVRTC's folder in LD_LIBRARY_PATH, where it comes as a wheel: the sanitizer loads it without its own search path.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "c"
SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}
LIBRARY = "engine" + SUFFIXES.get(sys.platform, ".so")

FLAGS = ("-ffreestanding", "-fno-stack-protector", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
"""Freestanding: the library calls nothing but memcpy, memset and memcmp."""
EXACT_FLAGS = ("-ffp-contract=off", "-fno-strict-aliasing")
"""Floating-point operations are rounded one by one; registers are read as integers and as floats."""
PLAIN_FLAGS = ("-O2", "-g0")
SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fsanitize-trap=undefined")
PROCESSORS = {"x86_64": "x86_64_v3", "AMD64": "x86_64_v3"}
"""What is compiled for, where the oldest of a family would be slow: FMA must be one instruction."""


class BuildError(Exception):
    """The library cannot be made here; ``str(error)`` is one readable line."""


def source_digest(folder: Path = SOURCES) -> str:
    """Digest of all sources, which the library carries."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler(driver: str = "cc") -> list[str]:
    """The command that compiles C; of zig, ``clang`` is the driver that can sanitize. Raises BuildError."""
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", driver]
    clang = shutil.which("clang")
    if clang is not None:
        return [clang]
    raise BuildError("no compiler: install the ziglang wheel (pip install ziglang), or clang")


def _zig_headers() -> list[str]:
    """The compiler's own headers, which zig's cc finds by itself and its clang does not."""
    found = find_spec("ziglang")
    folders = found.submodule_search_locations if found is not None else None
    return ["-isystem", str(Path(folders[0]) / "lib" / "include")] if folders else []


def _run(command: list[str], folder: str) -> None:
    """Run one step of a build in a folder that is thrown away. Raises BuildError."""
    # zig keeps what it made in the home directory otherwise, which may be missing or read-only.
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        shown = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{' '.join(command[:4])} failed: {shown}")


def build(target: Path, sanitize: bool = False) -> None:
    """Compile the sources to a library at ``target``. Raises BuildError."""
    flags = [*FLAGS, *EXACT_FLAGS, *(SANITIZE_FLAGS if sanitize else PLAIN_FLAGS)]
    flags.append(f'-DENGINE_SOURCES="{source_digest()}"')
    if sys.platform != "win32":
        flags.append("-fPIC")
    # Elsewhere the three functions above come from the system's own library.
    link = ["-shared", *(["-nostdlib"] if sys.platform.startswith("linux") else [])]
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    plain, processor = compiler(), PROCESSORS.get(platform.machine())
    is_zig = "ziglang" in plain
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        if sanitize:
            march = [f"-march={processor.replace('_', '-')}"] if processor else []
            march += _zig_headers()
            objects = []
            for source in sources:
                objects.append(str(Path(folder) / f"{Path(source).name}.o"))
                _run([*compiler("clang"), *flags, *march, "-c", source, "-o", objects[-1]], folder)
            _run([*plain, *link, *objects, "-o", str(made)], folder)
        else:
            if is_zig:
                flags.append("-fno-sanitize=all")
            if processor:
                flags.append(f"-mcpu={processor}" if is_zig else f"-march={processor.replace('_', '-')}")
            _run([*plain, *flags, *link, *sources, "-o", str(made)], folder)
        os.replace(made, target)


def main() -> int:
    """Build in place."""
    parser = argparse.ArgumentParser(description="Compile the native engine beside its Python files.")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    parser.add_argument("--output", type=Path, default=HERE / LIBRARY, help="where the library goes")
    options = parser.parse_args()
    try:
        build(options.output, options.sanitize)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
