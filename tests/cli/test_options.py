"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from g4kv_cli import main
from g4kv_cli.commands.options import device_options, kernels_option


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def command(seen: list[dict[str, Any]]) -> click.Command:
    @click.command()
    @device_options
    @kernels_option
    def probe(**arguments: Any) -> None:
        seen.append(arguments)

    return probe


@pytest.mark.parametrize(
    ("arguments", "environment", "want"),
    [
        ([], {}, ("auto", False)),
        (["--device", "cuda:1", "--require-gpu"], {}, ("cuda:1", True)),
        ([], {"G4KV_DEVICE": "emulated", "G4KV_REQUIRE_GPU": "1"}, ("emulated", True)),
        (["--device", "auto"], {"G4KV_DEVICE": "emulated", "G4KV_REQUIRE_GPU": "0"}, ("auto", False)),
    ],
)
def test_device_options(command: click.Command, seen: list, arguments: list, environment: dict, want: tuple) -> None:
    assert CliRunner().invoke(command, arguments, env=environment).exit_code == 0
    assert (seen[0]["device"], seen[0]["require_gpu"]) == want


def test_kernels_is_a_directory_that_exists(command: click.Command, seen: list, tmp_path: Path) -> None:
    (tmp_path / "warp.cuh").write_text("// mine")
    assert CliRunner().invoke(command, ["--kernels", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(command, []).exit_code == 0
    assert [arguments["kernels"] for arguments in seen] == [tmp_path, None]
    missing = CliRunner().invoke(command, ["--kernels", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
    assert "does not exist" in missing.output


@pytest.mark.parametrize("name", ["", "typo.cu", "decode_body.cuh/"])
def test_kernels_that_replace_nothing_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run would test the built-in kernels and pass."""
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    elif name:
        (tmp_path / name).write_text("// mine")
    for arguments in (["smoke", "--list"], ["reject", "--list"], ["bench", "--dry-run"]):
        assert main.run([*arguments, "--kernels", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert (
            f"--kernels {tmp_path}: nothing there replaces a built-in file; those are: attention_params.cuh, " in error
        )
