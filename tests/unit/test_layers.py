"""The import contracts of pyproject.toml hold, and they can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def _lint(directory: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="needs import-linter (the lint extra)")
    script = "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command; "
    script += "lint_imports_command(['--no-cache', '--no-logo'])"
    return subprocess.run([sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, check=False)


def test_the_import_contracts_hold() -> None:
    done = _lint(REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("model/geometry.py", "import g4kv_cli.entries", "An import only ever points down"),
        ("oracle/prep.py", "import g4kv_cli.model.kv_layout", "The oracle judges offsets"),
        ("oracle/attention.py", "import g4kv_cli.model.prefill_plan", "The oracle judges offsets"),
        ("device/emulated/arithmetic/bits.py", "import g4kv_cli.records.run", "The PTX interpreter is a library"),
        ("device/emulated/state/lanes.py", "from ..interpreter.chunk import Chunk", "In the emulator state lies below"),
        (
            "device/emulated/checks/owned_reads.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..warp.barriers import Barriers",
            "In the emulator state lies below",
        ),
        (
            "device/emulated/memory/access.py",
            "import g4kv_cli.device.emulated.warp",
            "In the emulator state lies below",
        ),
        ("cases/__init__.py", "import g4kv_cli.device.cuda", "Only device.open chooses"),
        ("emulator/device.py", "import g4kv_cli.model.geometry", "The library for any kernel"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(REPOSITORY / "g4kv_cli", tmp_path / "g4kv_cli", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    path = tmp_path / "g4kv_cli" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), done.stdout


EMULATED = "g4kv_cli.device.emulated"


def _in_a_circle(graph: Any) -> set[str]:
    """Modules of the emulated device that are left when those that import none of the others are taken away in turn."""
    left = {module for module in graph.modules if module.startswith(f"{EMULATED}.")}
    while True:
        free = {module for module in left if not graph.find_modules_directly_imported_by(module) & left}
        if not free:
            return left
        left -= free


def test_no_modules_of_the_emulated_device_import_each_other() -> None:
    """Imports for type checking count too."""
    grimp = pytest.importorskip("grimp", reason="needs import-linter (the lint extra)")
    graph = grimp.build_graph("g4kv_cli", cache_dir=None)
    assert _in_a_circle(graph) == set()
    graph.add_import(importer=f"{EMULATED}.state.lanes", imported=f"{EMULATED}.interpreter.chunk")
    assert {f"{EMULATED}.state.lanes", f"{EMULATED}.memory.access", f"{EMULATED}.interpreter.chunk"} <= _in_a_circle(
        graph
    )
