"""Kernels that a process before made ready: taken over where nothing they depend on has changed, and only there."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, float32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_ptx, line_of

import g4kv_cli.device.emulated.kernel as kernels
from g4kv_cli.compiler.cache import TranslationCache
from g4kv_cli.device.emulated import Machine, Module, store
from g4kv_cli.device.emulated.engine.operations import NotLowered
from g4kv_cli.device.emulated.kernel import Kernel, Outline
from g4kv_cli.device.emulated_device import EmulatedDevice, _module
from g4kv_cli.entries.library import KernelLibrary

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(64) turn(const float* in, float* out, float by) {
  __shared__ float row[64];
  row[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float product, sum;
  asm("mul.f32 %0, %1, %2;" : "=f"(product) : "f"(row[63 - threadIdx.x]), "f"(by));
  asm("add.f32 %0, %1, %2;" : "=f"(sum) : "f"(product), "f"(1.0f));
  out[threadIdx.x] = sum;  // the store
}
"""
WANT = 2 * np.arange(64, dtype=np.float32)[::-1] + 1


class Shelf(dict[str, bytes]):
    """A store in memory that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = 0, 0

    def read(self, key: str) -> bytes | None:
        self.reads += 1
        return self.get(key)

    def write(self, key: str, data: bytes) -> None:
        self.writes += 1
        self[key] = data


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("G4KV_EMULATOR", raising=False)
    engine()
    return compile_ptx(SOURCE, name="turn.cu")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels whose bodies were read."""
    names: list[str] = []
    real = kernels.parse_kernel

    def noted(module, name, source_name):  # type: ignore[no-untyped-def]
        names.append(name)
        return real(module, name, source_name)

    monkeypatch.setattr(kernels, "parse_kernel", noted)
    return names


def _run(kernel: Kernel) -> np.ndarray:
    machine = Machine()
    given, out = upload(machine, np.arange(64, dtype=np.float32), "in"), machine.allocate(256, "out")
    launch_on(machine, kernel, pointer(given), pointer(out), float32(2), block=64)
    return read_as(machine, out, 64, np.float32)


def test_the_second_process_reads_no_body_and_runs_the_same(ptx: str, parsed: list[str]) -> None:
    shelf = Shelf()
    first = Module(ptx, "turn.cu").kernel("turn", shelf)
    assert (parsed, shelf.writes) == (["turn"], 1)
    second = Module(ptx, "turn.cu").kernel("turn", shelf)
    assert (parsed, shelf.writes) == (["turn"], 1)
    for kernel in (first, second):
        np.testing.assert_array_equal(_run(kernel), WANT)
        assert kernel.program is not None
        assert kernel.not_native_for == ()
    assert parsed == ["turn"]
    plain = Module(ptx, "turn.cu").kernel("turn")
    for kernel in (first, second):
        for name in (*(each.name for each in fields(Outline)), "contracted", "has_problems"):
            assert getattr(kernel, name) == getattr(plain, name), name
    assert plain.max_threads == 64
    assert plain.contracted == 1


def test_a_fault_of_a_kept_kernel_is_told_in_the_same_words(ptx: str) -> None:
    shelf, told = Shelf(), []
    for given in (None, shelf, shelf):
        machine = Machine()
        source, out = upload(machine, np.zeros(64, np.float32), "in"), machine.allocate(240, "out")
        kernel = Module(ptx, "turn.cu").kernel("turn", given)
        told.append(faults_of(machine, kernel, pointer(source), pointer(out), float32(2), block=64))
    assert shelf.writes == 1
    assert told[0] == told[1] == told[2]
    assert [fault.source_line for fault in told[0]] == [line_of(SOURCE, "the store")]


def test_a_kernel_that_the_engine_lacks_something_for_is_not_kept(ptx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise NotLowered("an opcode of tomorrow")

    monkeypatch.setattr(kernels, "lower", lacks)
    shelf = Shelf()
    kernel = Module(ptx).kernel("turn", shelf)
    assert (kernel.program, kernel.not_native_for, shelf.writes) == (None, ("an opcode of tomorrow",), 0)
    np.testing.assert_array_equal(_run(kernel), WANT)


def test_another_text_name_or_rule_is_another_entry(ptx: str, parsed: list[str]) -> None:
    shelf = Shelf()
    for text, source, contracts in (
        (ptx, "turn.cu", True), (ptx + "\n", "turn.cu", True), (ptx, "other.cu", True), (ptx, "turn.cu", False)
    ):  # fmt: skip
        kernel = Module(text, source, contracts).kernel("turn", shelf)
        assert kernel.contracted == contracts
    assert (len(parsed), len(shelf)) == (4, 4)


def test_what_another_translator_made_is_not_taken(
    ptx: str, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    Module(ptx).kernel("turn", shelf)
    monkeypatch.setattr(store, "translator_digest", lambda: "another one's")
    Module(ptx).kernel("turn", shelf)
    assert (len(parsed), len(shelf)) == (2, 2)


def test_the_translators_digest_is_of_every_module_by_name_and_content(tmp_path: Path) -> None:
    package = Path(store.__file__).parent
    copy = tmp_path / "emulated"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    before = store.digest_of(copy)
    assert before == store.translator_digest()
    for path in sorted(copy.rglob("*.py")):
        content = path.read_bytes()
        path.write_bytes(content + b"#")
        assert store.digest_of(copy) != before, path
        path.write_bytes(content)
    (copy / "mode.py").rename(copy / "modes.py")
    assert store.digest_of(copy) != before


class _Foreign:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (Path(_Foreign.target),)

    target = ""


def test_an_entry_that_is_none_is_made_again_and_nothing_of_it_is_run(
    ptx: str, parsed: list[str], tmp_path: Path
) -> None:
    shelf = Shelf()
    Module(ptx).kernel("turn", shelf)
    (key, whole), = shelf.items()  # fmt: skip
    _Foreign.target = str(tmp_path / "touched")
    for broken in (b"", b"no pickle", whole[:-7], whole[: len(whole) // 2], pickle.dumps(_Foreign())):
        shelf[key] = broken
        np.testing.assert_array_equal(_run(Module(ptx).kernel("turn", shelf)), WANT)
        assert shelf[key] == whole
    assert len(parsed) == 6
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["Path", "io.open", "pickle.loads", "sys.modules"])
def test_what_a_module_of_the_package_imports_is_not_the_packages(name: str) -> None:
    def named(what: str) -> bytes:
        return b"\x80\x04" + f"c{store.__name__}\n{what}\n.".encode()

    assert store.unpacked(named("packed")) is store.packed
    assert store.unpacked(named(name)) is None


@pytest.mark.parametrize("mode", ["interpreter", "both"])
def test_the_interpreter_keeps_nothing(mode: str, ptx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    shelf = Shelf()
    np.testing.assert_array_equal(_run(Module(ptx).kernel("turn", shelf)), WANT)
    assert (shelf.reads, shelf.writes) == (0, 0)


def test_a_library_of_kernels_keeps_them_beside_the_images(
    fresh_cache: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("G4KV_EMULATOR", raising=False)
    for _ in range(2):
        _module.cache_clear()  # as in another process
        device = EmulatedDevice()
        loaded = KernelLibrary(device).kernel("merge.cu", "merge_splits_hd256")
        assert loaded.handle.program is not None
        device.close()
    assert parsed == ["merge_splits_hd256"]
    assert len(list((fresh_cache / "translations").iterdir())) == 1
    assert len(list((fresh_cache / "images").iterdir())) == 1
    entry = next((fresh_cache / "translations").iterdir())
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert TranslationCache().read(entry.stem) is None
