"""The program of the README runs as it stands there, and its assertion is one that a wrong kernel breaks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from seeding import seed

from g4kv_cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
ANY_KERNEL, PROGRAM = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LIBRARY = "g4kv.KernelLibrary(device)"


def test_the_program_for_any_kernel_runs_and_sees_a_wrong_one() -> None:
    exec(compile(ANY_KERNEL, "README.md", "exec"), {})
    assert ANY_KERNEL.count("* by + offset") == 1
    with pytest.raises(AssertionError):
        exec(compile(ANY_KERNEL.replace("* by + offset", "* by - offset"), "README.md", "exec"), {})


def test_the_command_for_any_kernel_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^\.venv/bin/g4kv (run (?:.*\\\n)*.*)$", README, re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    monkeypatch.chdir(tmp_path)
    words[1] = str(REPOSITORY / words[1])
    assert main.run([*words, "--seed", "1"]) == 0
    scaled = np.load("scaled.npy")
    unscaled = [word.replace("f32:2.5", "f32:1").replace("scaled.npy", "as_it_was.npy") for word in words]
    assert main.run([*unscaled, "--seed", "1"]) == 0
    assert (scaled == np.float32(2.5) * np.load("as_it_was.npy")).all()


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAM, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["prefill: 20 keys", "decode: 21 keys"]


def test_the_program_sees_a_kernel_that_attends_to_one_key_too_few(tmp_path: Path) -> None:
    right = "position_of(tile, rows_per_tile - 1) + 1;"
    seed(tmp_path, (("attention_tile.cuh", right, right.replace(" + 1", "")),))
    assert PROGRAM.count(LIBRARY) == 1
    program = PROGRAM.replace(LIBRARY, f"g4kv.KernelLibrary(device, __import__('pathlib').Path({str(tmp_path)!r}))")
    with pytest.raises(AssertionError):
        exec(compile(program, "README.md", "exec"), {})
