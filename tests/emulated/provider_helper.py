"""The example engine of tests/data/engine in a folder of a test's own, changed where the test wants it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.select import select_cases
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.records.run import CaseResult

ENGINE = Path(__file__).resolve().parent.parent / "data" / "engine"
Change = tuple[str, str, str]
"""A file's name, text in it, and what stands in its place."""


def engine_in(folder: Path, *changes: Change) -> Path:
    """The folder with the engine's files."""
    for file in ENGINE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    for name, old, new in changes:
        text = (folder / name).read_text()
        assert text.count(old) >= 1, f"{name} has no {old!r}"
        (folder / name).write_text(text.replace(old, new))
    return folder


def prep_and_attention(folder: Path, pool: str = "") -> list[Path]:
    """The engine's kernels as two providers, one that has prep and one that has attention, over pools of these axes."""
    head, *entries = (folder / "kernels.toml").read_text().split("[[entry]]")
    pool_table = f'[pool]\naxes = "{pool}"\n\n' if pool else ""
    files = []
    for name, symbol in (("prep", "prepILi"), ("attention", "attentionILi")):
        begin = head.replace("example-kernels", f"engine-{name}").replace("[image.", f"{pool_table}[image.", 1)
        files.append(folder / f"{name}.toml")
        files[-1].write_text("[[entry]]".join([begin, *(entry for entry in entries if symbol in entry)]))
    return files


def compile_engine(folder: Path) -> Path:
    """The engine's library by nvcc; the test is skipped where there is none."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH to compile the example engine's host code")
    options = ["-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "--no-compress"]
    target = ["-gencode", "arch=compute_90,code=compute_90"]
    subprocess.run([nvcc, *options, *target, "engine.cu", "-o", "libengine.so"], cwd=folder, check=True)
    return folder / "engine.toml"


def run_cases_of(manifests: Sequence[Path], ids: Sequence[str], geometry: str = "12b-local") -> list[CaseResult]:
    """The results of smoke's cases over a provider, in the table's order."""
    return run_these(manifests, select_cases(_table(geometry), ids))


@cache
def _table(geometry: str) -> list[Case]:
    return gate_cases(select_geometries(geometry, 1), every_trap=True)


def run_these(manifests: Sequence[Path], cases: Sequence[Case]) -> list[CaseResult]:
    """The results of these cases over providers."""
    runner = CaseRunner(RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), providers=tuple(manifests)))
    try:
        return [runner.run(case) for case in cases]
    finally:
        runner.close()
