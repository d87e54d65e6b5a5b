"""``compiler = "nvcc"``: a library out of sources with host code; what is said where nvcc or the source is no good."""

from __future__ import annotations

import shutil
import stat
import time
from pathlib import Path

import pytest

from g4kv_cli.cases.run import RunSettings
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.errors import CompileError
from g4kv_cli.main import run as g4kv
from g4kv_cli.providers import nvcc
from g4kv_cli.providers.images import ImageStore
from g4kv_cli.providers.read import read_manifest

ENGINE = Path(__file__).resolve().parent.parent / "data" / "engine"


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    for file in ENGINE.iterdir():
        shutil.copy(file, tmp_path)
    file = tmp_path / "engine.toml"
    file.write_text(file.read_text().replace('library = "libengine.so"', 'source = "engine.cu"\ncompiler = "nvcc"'))
    return file


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that notes its words and copies the source to its output."""
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nwhile [ "$1" != "-o" ]; do shift; done\ncp engine.cu "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(nvcc, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return script


def _compile(manifest: Path, cache: Path) -> Path:
    image = read_manifest(manifest).images["engine"]
    assert image.path is not None
    return nvcc.compile_library(image.path, image.options, image.files, "sm_90", cache)


def test_it_is_compiled_once_for_its_files_and_options(manifest: Path, stub: Path, tmp_path: Path) -> None:
    first = _compile(manifest, tmp_path / "cache")
    assert _compile(manifest, tmp_path / "cache") == first
    (call,) = (stub.parent / "calls").read_text().splitlines()
    assert "-gencode arch=compute_90,code=compute_90" in call
    assert "--no-compress" in call
    header = manifest.parent / "kernels.cu"
    header.write_text(header.read_text() + "\n")
    assert _compile(manifest, tmp_path / "cache") != first
    manifest.write_text(manifest.read_text().replace('"nvcc"', '"nvcc"\noptions = ["-DFAST"]'))
    _compile(manifest, tmp_path / "cache")
    assert (stub.parent / "calls").read_text().splitlines()[-1].count("-DFAST") == 1


def test_many_calls_compile_once(manifest: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("G4KV_CACHE_DIR", str(tmp_path / "cache"))
    device, store = EmulatedDevice(), ImageStore(read_manifest(manifest))
    first = store.library("engine", device)
    shutil.rmtree(tmp_path / "cache")  # the store itself knows where it is
    assert store.library("engine", device) == first
    assert len((stub.parent / "calls").read_text().splitlines()) == 1
    device.close()


def test_a_source_that_nvcc_refuses_comes_with_its_words(manifest: Path, stub: Path, tmp_path: Path) -> None:
    stub.write_text("#!/bin/sh\necho 'engine.cu(3): error: no such thing' >&2\nexit 2\n")
    with pytest.raises(CompileError, match=r"nvcc refused engine\.cu:\nengine\.cu\(3\): error: no such thing"):
        _compile(manifest, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "libraries").iterdir())


def test_no_nvcc_is_one_line_that_says_what_to_install(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunSettings, "calls_host_code", False)  # in this process, where the rest is patched
    monkeypatch.setattr(nvcc, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("G4KV_CACHE_DIR", str(tmp_path / "cache"))
    case = ("--geometry", "12b-local", "--case", "prep/12b-local/decode/closed-form")
    assert g4kv(["smoke", "--provider", str(manifest), "--device", "emulated", *case]) == 2
    error = capsys.readouterr().err
    assert "there is no nvcc: install its wheel with: python -m pip install 'nvidia-cuda-nvcc" in error
    assert error.count("\n") == 1


def test_a_wheels_runtime_is_linked_by_its_full_name(tmp_path: Path) -> None:
    compiler, lib = tmp_path / "bin" / "nvcc", tmp_path / "lib"
    lib.mkdir()
    assert nvcc._runtime_of(compiler) == ["-cudart", "shared"]
    (lib / "libcudart.so.13").touch()
    assert nvcc._runtime_of(compiler)[-1] == "-l:libcudart.so.13"


def test_what_is_compiled_meanwhile_does_not_count_against_a_case() -> None:
    device = EmulatedDevice()
    device.limit_time(100.0)
    assert device.time_limit is not None
    before = device.time_limit.deadline
    with device.time_apart():
        time.sleep(0.05)
    assert 0.05 <= device.time_limit.deadline - before < 5
    device.close()
