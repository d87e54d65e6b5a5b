"""``g4kv provider``: what can be said of a manifest before it runs, and the beginning of one."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from g4kv_cli.main import run as g4kv

ENGINE = Path(__file__).resolve().parent.parent / "data" / "engine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in ENGINE.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def _check(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = g4kv(["provider", "check", str(file)])
    return code, capsys.readouterr().out


def test_a_good_manifest_and_what_it_serves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _check(folder / "kernels.toml", capsys)
    assert code == 0
    assert "declared traps = false" in shown
    assert "served  batch_prefill_paged_hd512_into" in shown
    assert "-       merge_splits_hd512_into" in shown
    assert shown.splitlines()[-1].endswith("entries served, 0 problems")


@pytest.mark.parametrize(
    ("old", "new", "line_of", "says"),
    [
        ('"i64 stride_slot"', '"i64 stride_slt"', "arguments", "no 'stride_slt' here (nearest: stride_slot)"),
        ('name = "*_paged_decode_*"', 'name = "*_paged_decod_*"', "", "names no entry; nearest"),
        ('writes = ["q_out"]', 'writes = ["k_out"]', "", "writes 'k_out', which is no array of the call"),
        ('where = "i32 position"', 'where = "i32 positon"', "", "no 'positon' here (nearest: position"),
        ('"ptr q_norm_weight"', '"ptr q_weight"', "", "no 'q_weight' here"),
    ],
)
def test_what_cannot_work_is_told_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line_of: str, says: str
) -> None:
    file = folder / "kernels.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    code, shown = _check(file, capsys)
    assert code == 2
    (wrong,) = [line for line in shown.splitlines() if line.startswith("wrong")]
    assert says in wrong
    assert f"{file}:" in wrong


def test_a_kernel_that_ptx_does_not_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "one.ptx").write_text(".version 8.0\n.target sm_90\n.visible .entry decode_a(){ret;}\n")
    manifest = folder / "one.toml"
    text = (
        'provider = "one"\n[image.a]\nptx = "one.ptx"\n[[entry]]\nname = "batch_*"\n[[entry.launch]]\n'
        'image = "a"\nsymbol = "decode_b"\ngrid = [1]\nblock = [32]\n'
    )
    manifest.write_text(text)
    code, shown = _check(manifest, capsys)
    assert code == 2
    assert f"{manifest}:6: no kernel matches 'decode_b' in one.ptx; it has decode_a" in shown
    manifest.write_text(text.replace("decode_b", "decode_a"))
    assert _check(manifest, capsys)[0] == 0


def test_a_library_its_functions_and_the_beginning_of_its_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH to compile the example engine's host code")
    options = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "--no-compress"]
    target = ["-gencode", "arch=compute_90,code=compute_90"]
    subprocess.run([nvcc, *options, *target, "engine.cu", "-o", "libengine.so"], cwd=folder, check=True)
    assert _check(folder / "engine.toml", capsys)[0] == 0
    text = (folder / "engine.toml").read_text()
    (folder / "engine.toml").write_text(text.replace('call = "engine_attention"', 'call = "engine_atention"'))
    code, shown = _check(folder / "engine.toml", capsys)
    assert (code, "has no function 'engine_atention'; nearest: engine_attention" in shown) == (2, True)

    capsys.readouterr()
    assert g4kv(["provider", "init", "--library", str(folder / "libengine.so")]) == 0
    begun = capsys.readouterr().out
    assert "#   engine_prep\n" in begun
    assert "u64, u64, u64, u64, u64, u32, u64, u64, u64, u32, u32, f32, u32, u64, u64, u64, u32)" in begun


def test_a_beginning_is_written_whole_and_never_over_something(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("g4kv_cli.commands.provider.skeleton_of", lambda library: "begun\n")
    output, link = folder / "begun.toml", folder / "link.toml"
    words = ["provider", "init", "--library", str(folder / "kernels.cu"), "--output"]

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "replace", no_space)
        assert g4kv([*words, str(output)]) == 2
    assert f"--output {output}: cannot write: No space left on device" in capsys.readouterr().err
    assert not list(folder.glob("*begun*")), "nothing half-written"
    assert g4kv([*words, str(output)]) == 0
    assert output.read_text() == "begun\n"
    output.write_text("mine")
    link.symlink_to("nowhere")
    for taken in (output, link):
        assert g4kv([*words, str(taken)]) == 2
        said = f"--output {taken}: cannot write: File exists; a file is in the way: name another"
        assert said in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert link.is_symlink()


def test_what_is_no_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert g4kv(["provider", "init", "--library", str(folder / "kernels.cu")]) == 2
    assert "is no shared library of Linux" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["engine.toml", "triton/triton.toml", "flashinfer/flashinfer.toml", "numba/numba.toml"]
)
def test_nothing_is_wrong_with_the_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _check(Path(__file__).resolve().parents[2] / "docs" / "examples" / name, capsys)
    assert (code, shown.splitlines()[-1].split(", ")[-1]) == (0, "0 problems")


def _compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on the PATH")
    (folder / f"{name}.c").write_text(source)
    library = folder / f"lib{name}.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"{name}.c", "-o", str(library), *options], cwd=folder, check=True)
    return library


def _registering(entry: bytes, kind: int = 1) -> str:
    """C that has a container (magic, version, 16 bytes, size) of one entry (kind, version, 64 bytes, size), as nvcc
    makes it."""
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(entry)) + bytes(12) + struct.pack("<I", 90) + bytes(32)
    data = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 + len(entry)) + head + entry
    return (
        '__attribute__((section(".nv_fatbin"), used, aligned(8))) static const unsigned char data[] = {'
        + ", ".join(map(str, data))
        + "};\nvoid **__cudaRegisterFatBinary(void *);\n"
        "int attention(void) { return __cudaRegisterFatBinary((void *)data) == 0; }\n"
    )


def _calling(folder: Path, library: Path, function: str) -> Path:
    file = folder / "engine.toml"
    file.write_text(
        f'provider = "p"\n[image.engine]\nlibrary = "{library.name}"\n[[entry]]\nname = "batch_decode_paged_*"\n'
        f'[[entry.launch]]\nimage = "engine"\ncall = "{function}"\narguments = []\n'
    )
    return file


@pytest.mark.parametrize(
    ("kind", "says"), [(1, "has its PTX compressed; build it with nvcc"), (2, "has machine code and no PTX, which")]
)
def test_a_library_without_ptx_runs_on_a_gpu_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: int, says: str
) -> None:
    library = _compiled(tmp_path, "engine", _registering(b"\x11\x22\x33\x44", kind))
    code, shown = _check(_calling(tmp_path, library, "attention"), capsys)
    (note,) = [line for line in shown.splitlines() if line.startswith("note")]
    assert code == 0
    assert note.startswith(f"note     image engine runs on a GPU only: libengine.so {says}"), note


PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry scale(.param .u64 x, .param .f32 by) { ret; }\n"


@pytest.mark.parametrize("is_found", [True, False])
def test_kernels_may_be_in_a_library_that_the_named_one_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_found: bool
) -> None:
    """Its functions are C++'s, which have no other names."""
    (tmp_path / "kernels").mkdir()
    _compiled(tmp_path / "kernels", "kernels", _registering(PTX))
    place = ["-Wl,-rpath,$ORIGIN/kernels"] if is_found else []
    source = "int attention(void);\nint _ZN6engine3runEv(void) { return attention(); }\n"
    library = _compiled(tmp_path, "engine", source, "-Lkernels", "-lkernels", "-Wl,--no-as-needed", *place)
    code, shown = _check(_calling(tmp_path, library, "_ZN6engine3runEv"), capsys)
    notes = [line for line in shown.splitlines() if line.startswith("note")]
    assert code == 0
    if is_found:
        assert not notes
        assert g4kv(["provider", "init", "--library", str(library)]) == 0
        begun = capsys.readouterr().out
        assert "#   none\n# C++ functions, which 'call' takes by these names:\n#   _ZN6engine3runEv\n# Kernels" in begun
        assert "#   scale(u64, f32)\n" in begun
        assert 'call = "_ZN6engine3runEv"' in begun
    else:
        (note,) = notes
        assert "libengine.so has no kernels, nor has a library that it needs and that its RUNPATH or LD_" in note
