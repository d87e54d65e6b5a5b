"""Where the engine's library comes from, and that without a usable one kernels run on the interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import launch_on, pointer, read_as
from nvrtc_helper import compile_ptx

from g4kv_cli.device.emulated import Machine, Module, kernel, launcher
from g4kv_cli.device.emulated.engine import build, library
from g4kv_cli.device.emulated_device import EmulatedDevice

SOURCE = 'extern "C" __global__ void kernel(int* out) { out[threadIdx.x] = threadIdx.x * 3; }'
C_FILES = sorted(path.name for path in build.SOURCES.glob("*.[ch]"))


def test_without_a_compiler_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match="pip install ziglang"):
        build.build(tmp_path / build.LIBRARY)
    assert not list(tmp_path.iterdir())


def test_a_failing_compiler_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "compiler", lambda driver="cc": ["false"])
    with pytest.raises(build.BuildError, match="failed"):
        build.build(tmp_path / build.LIBRARY)
    assert not list(tmp_path.iterdir())


def test_the_digest_follows_every_source(tmp_path: Path) -> None:
    for name in C_FILES:
        folder = tmp_path / name
        shutil.copytree(build.SOURCES, folder)
        assert build.source_digest(folder) == build.source_digest()
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
        assert build.source_digest(folder) != build.source_digest()


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = engine().path
    library.Library(path)
    monkeypatch.setattr(library, "source_digest", lambda: "0" * 16)
    with pytest.raises(library.LibraryError, match="was made of other sources"):
        library.Library(path)


def test_structures_of_other_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = engine().path  # found before, and kept
    monkeypatch.setattr(library, "sizes", lambda: (1, 2, 3))
    with pytest.raises(library.LibraryError, match="expected"):
        library.Library(path)


def test_lines_of_the_sources_are_as_short_as_those_of_python() -> None:
    long = [
        f"{path.name}:{number}"
        for path in sorted(build.SOURCES.glob("*.[ch]"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert not long


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / build.LIBRARY
    path.write_text("not a library")
    with pytest.raises(library.LibraryError, match="cannot be loaded"):
        library.Library(path)


@pytest.fixture
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the build failed: there is nothing to load."""
    monkeypatch.delenv("G4KV_EMULATOR", raising=False)
    monkeypatch.setattr(library, "_candidates", lambda: iter([Path("absent") / build.LIBRARY]))
    found = library._find.__wrapped__()
    assert found[0] is None
    for module in (kernel, launcher):
        monkeypatch.setattr(module, "library", lambda: found[0])
    monkeypatch.setattr(launcher, "missing_reason", lambda: found[1])
    launcher._engine.cache_clear()
    yield
    launcher._engine.cache_clear()


@pytest.mark.usefixtures("_no_library")
def test_without_the_library_kernels_are_interpreted_and_the_device_says_so() -> None:
    device = EmulatedDevice()
    assert "interpreted, for there is no native engine: " in device.info.name
    assert "was not built" in device.info.name
    machine = Machine()
    out = machine.allocate(128, "out")
    launch_on(machine, Module(compile_ptx(SOURCE)).kernel("kernel"), pointer(out))
    np.testing.assert_array_equal(read_as(machine, out, 32, np.int32), np.arange(32) * 3)
    assert (machine.counts.native, machine.counts.interpreted) == (0, 1)


def test_with_the_library_the_device_has_nothing_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    monkeypatch.delenv("G4KV_EMULATOR", raising=False)
    assert EmulatedDevice().info.name == "emulated sm_90 (H200 limits)"
    monkeypatch.setenv("G4KV_EMULATOR", "interpreter")
    assert EmulatedDevice().info.name == "emulated sm_90 (H200 limits), interpreted"
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    assert EmulatedDevice().info.name == "emulated sm_90 (H200 limits), engine and interpreter compared"
