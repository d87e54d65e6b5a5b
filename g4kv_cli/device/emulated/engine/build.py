"""Compiles the engine's C sources to the library beside this file; setup.py does it when the package is installed.

    python g4kv_cli/device/emulated/engine/build.py [--sanitize]

does the same in a checkout. The compiler is the clang of the ``ziglang`` wheel, or ``clang`` itself; the sources use
its vector types. Needs nothing but the standard library, for it also runs where the package is not installed.
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

FLAGS = ("-O2", "-g0", "-ffreestanding", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
"""Freestanding: the library calls nothing but memcpy, memset and memcmp."""
EXACT_FLAGS = ("-ffp-contract=off", "-fno-strict-aliasing")
"""Floating-point operations are rounded one by one; registers are read as integers and as floats."""
SANITIZE_FLAGS = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-shared-libasan",
    "-Wno-psabi",
)
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


def compiler() -> list[str]:
    """The command that compiles C. Raises BuildError."""
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    clang = shutil.which("clang")
    if clang is not None:
        return [clang]
    raise BuildError("no compiler: install the ziglang wheel (pip install ziglang), or clang")


def build(target: Path, sanitize: bool = False) -> None:
    """Compile the sources to a library at ``target``. Raises BuildError."""
    command = compiler()
    processor = PROCESSORS.get(platform.machine())
    is_zig = "ziglang" in command
    if processor:
        command.append(f"-mcpu={processor}" if is_zig else f"-march={processor.replace('_', '-')}")
    if is_zig and not sanitize:
        command.append("-fno-sanitize=all")
    command += [*(SANITIZE_FLAGS if sanitize else FLAGS), *EXACT_FLAGS, "-shared", "-std=gnu11"]
    command.append(f'-DENGINE_SOURCES="{source_digest()}"')
    if sys.platform != "win32":
        command.append("-fPIC")
    if sys.platform.startswith("linux") and not sanitize:
        command.append("-nostdlib")
    command += [str(path) for path in sorted(SOURCES.glob("*.c"))]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        # zig keeps what it made in the home directory otherwise, which may be missing or read-only.
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, check=False, env=environment
            )
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be run: {error}") from error
        if done.returncode or not made.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise BuildError(f"{' '.join(command[:4])} failed: {lines[0] if lines else 'no output'}")
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
