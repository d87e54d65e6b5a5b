"""``g4kv kernels --check``: what of a file's kernels the emulated device cannot run."""

from __future__ import annotations

from pathlib import Path

from g4kv_cli.compiler.foreign import compile_foreign, includes_own
from g4kv_cli.device.support import KernelSupport, kernel_support
from g4kv_cli.errors import EXIT_FINDINGS, UsageError
from g4kv_cli.records.files import write_whole
from g4kv_cli.report.kernels_check import check_json, print_check


def check_file(path: Path, archs: tuple[str, ...], json_path: Path | None) -> int:
    """Print, and write as JSON, what each kernel of a source or of PTX needs that is not emulated.

    Returns the exit code: 1 if there is anything. Raises UsageError and CompileError.
    """
    found = [(arch, support) for arch in archs for support in _supports(path, arch)]
    print_check(path.name, found)
    if json_path is not None:
        write_whole(json_path, check_json(path.name, found), "--json")
    return EXIT_FINDINGS if any(support.unsupported for _, support in found) else 0


def _supports(path: Path, arch: str) -> tuple[KernelSupport, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--check {path}: cannot be read as text: {error}") from error
    if path.suffix == ".ptx":
        return kernel_support(text, path.name)
    beside = [path.resolve().parent] if includes_own(text) else []
    return kernel_support(compile_foreign(path.name, text, arch=arch, include=beside).data.decode(), path.name)
