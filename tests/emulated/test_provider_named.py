"""Providers that come with g4kv, by name: torch's attention is judged where torch is installed, on the CPU too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from provider_helper import run_cases_of, run_these

from g4kv_cli import pytest_plugin
from g4kv_cli.commands.asked import Asked
from g4kv_cli.commands.smoke import Request, cases_of
from g4kv_cli.errors import CompileError
from g4kv_cli.main import run as g4kv
from g4kv_cli.providers.named import named_providers, provider_file, provider_word
from g4kv_cli.records.run import CaseResult

DECODE = "attention/12b-local/decode/ragged"
CASES = (DECODE, "attention/12b-local/decode/rows-behind-the-tokens", "attention/12b-local/prefill/small-tile/ragged")
CHUNK = "kv=70 q=8 window=40 heads=2/1 origin=1"


def _of_shape(shape: str, *manifests: Path) -> list[CaseResult]:
    cases = cases_of(Request(asked=Asked(None, shape, "12b-local")))
    return run_these(manifests, [case for case in cases if case.id.startswith("attention/") and "spread" in case.id])


def test_a_name_is_a_manifest_unless_there_is_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = named_providers()["torch-sdpa"]
    assert file.is_file()
    assert (provider_file("torch-sdpa"), provider_word(file)) == (file, "torch-sdpa")
    assert provider_word(Path("mine.toml")) == "mine.toml"
    monkeypatch.chdir(tmp_path)
    Path("torch-sdpa").touch()
    assert provider_file("torch-sdpa") == Path("torch-sdpa")


def test_the_pytest_plugin_takes_names_too(tmp_path: Path) -> None:
    option = SimpleNamespace(g4kv_provider=["torch-sdpa", "mine.toml"])
    config: Any = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path), option=option)
    named = named_providers()["torch-sdpa"]
    assert pytest_plugin._providers(config) == (named, tmp_path / "mine.toml")
    (tmp_path / "torch-sdpa").touch()
    assert pytest_plugin._providers(config)[0] == tmp_path / "torch-sdpa"


def test_every_named_provider_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for name in named_providers():
        assert g4kv(["provider", "check", name]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"provider {name}, "), "its name is its file's"
        assert "served  batch_decode_paged_window_hd256_into" in shown
        assert shown.splitlines()[-1].endswith("4 of 18 entries served, 0 problems")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["smoke", "--provider", "torch-spda"],
            "no file 'torch-spda', and no provider of this name comes with g4kv (torch-",
        ),
        (["provider", "check", "nothing.toml"], "there is no file 'nothing.toml', and no provider of this name"),
        (["bench", "--provider", "torch-sdpa", "--dry-run"], "g4kv bench times it as a peer; say --peer torch-sdpa"),
    ],
)
def test_a_name_that_is_none(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert g4kv(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_without_torch_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch.nn.functional", raising=False)
    for name in [name for name in sys.modules if name.startswith("g4kv_provider_") and name.endswith("torch_sdpa")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CompileError, match=r"^python 'torch_sdpa:attention': importing torch_sdpa failed: .*torch"):
        run_cases_of([named_providers()["torch-sdpa"]], [DECODE])


def test_torchs_attention_passes() -> None:
    pytest.importorskip("torch", reason="torch is not installed: python -m pip install torch")
    manifest = named_providers()["torch-sdpa"]
    results = [*run_cases_of([manifest], CASES), *_of_shape(CHUNK, manifest), *_of_shape("kv=33 q=33", manifest)]
    assert {result.status for result in results} == {"passed"}, results


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("behind <= window_left", "behind < window_left"),
        ("int(positions[0]) - window_left", "int(positions[0]) - window_left + 1"),
        ("keys // page_size - origin]", "keys // page_size]"),
        ("behind >= 0) &", "behind >= -1) &"),
    ],
)
def test_another_attention_turns_red(tmp_path: Path, old: str, new: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed: python -m pip install torch")
    folder = named_providers()["torch-sdpa"].parent
    text = (folder / "torch_sdpa.py").read_text()
    assert text.count(old) == 1
    (tmp_path / "torch_sdpa.py").write_text(text.replace(old, new))
    shutil.copy(folder / "torch-sdpa.toml", tmp_path)
    results = _of_shape(CHUNK, tmp_path / "torch-sdpa.toml")
    assert {result.status for result in results} & {"failed", "error"}, results
