"""The head of a record: which sources it stands for, and which commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from g4kv_cli.cases import run_info
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.open import open_device

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_digest_follows_what_is_launched_and_nothing_else(tmp_path: Path) -> None:
    with_probe, with_prep = tmp_path / "probe", tmp_path / "prep"
    for directory, name in ((with_probe, "layout_probe.cu"), (with_prep, "prep_hd256.cu")):
        directory.mkdir()
        text = (BUILT_IN_KERNELS_DIRECTORY / name).read_text(encoding="utf-8")
        (directory / name).write_text(text + "// one comment more\n", encoding="utf-8")
    device = open_device("emulated")
    built_in = run_info.collect_run_info(device, None, 1).kernels_digest
    assert run_info.collect_run_info(device, with_probe, 1).kernels_digest == built_in
    assert run_info.collect_run_info(device, with_prep, 1).kernels_digest != built_in
    device.close()


def test_a_copy_without_a_repository_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_GIT_COMMIT", "0123abcd")
    device = open_device("emulated")
    assert run_info.collect_run_info(device, None, 1).git_commit == "0123abcd"
    device.close()


def test_without_being_told_the_commit_is_the_checkouts() -> None:
    program = (
        "from g4kv_cli.cases.run_info import collect_run_info\n"
        "from g4kv_cli.device.open import open_device\n"
        "device = open_device('emulated')\n"
        "print(collect_run_info(device, None, 1).git_commit)\n"
        "device.close()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "G4KV_GIT_COMMIT"}
    done = subprocess.run(
        [sys.executable, "-c", program],  # finds the package of the checkout, not the one that was installed
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    expected = asked.stdout.strip() if (REPOSITORY / ".git").exists() else ""
    assert done.stdout.strip().removesuffix("-dirty") == expected
