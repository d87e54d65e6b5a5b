"""Compiles the stand-in for libcudart once for each name that libraries want it under; setup.py does it when the
package is installed, ``python g4kv_cli/providers/cudart/build.py`` in a checkout.

It has to be machine code: what an engine's library calls is found by the loader, under libcudart's own name and symbol
version. Needs nothing but the standard library and a C compiler (the ziglang wheel's, clang or cc).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
SONAMES = ("libcudart.so.12", "libcudart.so.13")
"""By which nvcc of CUDA 12 and 13 link it; the symbol version has the same name."""


class BuildError(Exception):
    """The stand-in cannot be made here; ``str(error)`` is one readable line."""


def compiler() -> list[str]:
    """The command that compiles C. Raises BuildError."""
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    found = shutil.which("clang") or shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise BuildError("no compiler: install the ziglang wheel (pip install ziglang), or a C compiler")
    return [found]


def build(target: Path) -> None:
    """Compile the stand-in of the target's name (one of SONAMES). Raises BuildError."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the stand-in for libcudart is for Linux, not {sys.platform}")
    soname, command = target.name, compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        script, output = Path(work) / "versions", Path(work) / soname
        script.write_text(f"{soname} {{ global: cuda*; __cuda*; g4kv_*; local: *; }};\n")
        flags = ["-O2", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-s"]
        flags += [f"-DCUDART_MAJOR={soname.rpartition('.')[2]}"]
        linking = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
        command += [*flags, str(HERE / "cudart.c"), *linking, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise BuildError(f"{' '.join(command[:4])} failed: {lines[0] if lines else 'no output'}")
        os.replace(output, target)


def main() -> int:
    """Build in place."""
    try:
        for soname in SONAMES:
            build(HERE / soname)
            print(HERE / soname)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
