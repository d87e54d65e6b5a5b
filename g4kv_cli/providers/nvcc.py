"""A shared library from CUDA sources with host code, by nvcc: that of its wheel, or the one on the PATH."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from g4kv_cli.errors import CompileError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

INSTALL_HINT = (
    "install its wheel with: python -m pip install 'nvidia-cuda-nvcc>=13,<14' 'nvidia-cuda-runtime>=13,<14' "
    "'nvidia-cuda-cccl>=13,<14', or put a toolkit's nvcc on the PATH"
)
FLAGS = ("-O2", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler", "-fPIC", "--no-compress")
"""PTX has to be inside, and readable: what the emulated device runs is taken from there."""
COMPILE_SECONDS = 1200
_HEADERS = (".cu", ".cuh", ".h", ".hpp", ".inc", ".inl")


def find_nvcc() -> Path:
    """Raises CompileError, with the line that installs it, where there is none."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in sorted(Path(place).glob("cu1[3-9]/bin/nvcc")):
            return found
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise CompileError(f"compiler = 'nvcc', and there is no nvcc: {INSTALL_HINT}")
    return Path(on_path)


def compile_library(source: Path, options: Sequence[str], files: Sequence[Path], arch: str, cache: Path) -> Path:
    """The library of a source, compiled once for its files: its own folder's sources and headers, and ``files``.

    ``arch``: of the device that runs it, ``sm_90``. Raises CompileError with nvcc's own words.
    """
    nvcc = find_nvcc()
    number = "".join(filter(str.isdigit, arch))
    code = ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    command = [str(nvcc), *FLAGS, *code, *_runtime_of(nvcc), *options, str(source.name)]
    environment = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH")]
    digest = hashlib.sha256("\0".join([*command, *environment]).encode())
    beside = [file for file in source.parent.iterdir() if file.is_file() and file.suffix in _HEADERS]
    for file in sorted({*beside, *files}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    target = cache / "libraries" / f"{source.stem}_{digest.hexdigest()[:24]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(target.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=target.parent) as work:
        if target.is_file():
            return target  # another process has compiled it meanwhile
        made = Path(work) / target.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], cwd=source.parent, capture_output=True, text=True, check=False,
                stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{nvcc} cannot be run: {error}; {INSTALL_HINT}") from error
        if done.returncode or not made.is_file():
            raise CompileError(f"nvcc refused {source.name}:", done.stderr or done.stdout)
        os.replace(made, target)
    return target


@contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Held by one process at a time, and by none that has ended; where no file can be locked, by all."""
    with file.open("w") as held:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # who waits for it holds on to it, and finds the library


def _runtime_of(nvcc: Path) -> list[str]:
    """How to find CCCL, and link the runtime as a shared library: a wheel has it under its full name only."""
    root = nvcc.resolve().parent.parent
    folder, cccl = root / "lib", root / "include" / "cccl"
    headers = ["-I", str(cccl)] if cccl.is_dir() else []
    found = sorted(folder.glob("libcudart.so.*"))
    if not found or (folder / "libcudart.so").exists():
        return [*headers, "-cudart", "shared"]
    return [*headers, "-cudart", "none", "-L", str(folder), "-Xlinker", f"-l:{found[-1].name}"]
