"""``g4kv provider``: what can be said of a manifest before it runs, and the beginning of one."""

from __future__ import annotations

import shutil
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

    output = folder / "begun.toml"
    assert g4kv(["provider", "init", "--library", str(folder / "libengine.so"), "--output", str(output)]) == 0
    begun = output.read_text()
    assert "#   engine_prep\n" in begun
    assert "u64, u64, u64, u64, u64, u32, u64, u64, u64, u32, u32, f32, u32, u64, u64, u64, u32)" in begun
    assert g4kv(["provider", "init", "--library", str(folder / "libengine.so"), "--output", str(output)]) == 2
    said = f"--output {output}: cannot write: File exists; a file is in the way: name another"
    assert said in capsys.readouterr().err
    assert output.read_text() == begun, "never over somebody's work"


def test_what_is_no_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert g4kv(["provider", "init", "--library", str(folder / "kernels.cu")]) == 2
    assert "is no shared library of Linux" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["engine.toml", "triton/triton.toml", "flashinfer/flashinfer.toml"])
def test_nothing_is_wrong_with_the_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _check(Path(__file__).resolve().parents[2] / "docs" / "examples" / name, capsys)
    assert (code, shown.splitlines()[-1].split(", ")[-1]) == (0, "0 problems")


@pytest.mark.parametrize(
    ("payload", "says"),
    [("1, 0x101, 8, 0x11111111", "has its PTX compressed"), ("2, 0x101, 8, 0", "has machine code and no PTX")],
)
def test_a_library_without_ptx_runs_on_a_gpu_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], payload: str, says: str
) -> None:
    """A container (magic, version, 16 bytes, size) of one entry (kind, version, 64 bytes, size), as nvcc makes it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on the PATH")
    kind, version, size, word = payload.split(", ")
    source = (
        f'__attribute__((section(".nv_fatbin"), used)) static const unsigned data[] = {{0xBA55ED50, 0x100001, 72, 0, '
        f"{kind} | {version} << 16, 64, {size}, 0, 0, 0, 0, 90, 0, 0, 0, 0, 0, 0, 0, 0, {word}, 0}};\n"
        "void **__cudaRegisterFatBinary(void *);\n"
        "int attention(void) { return __cudaRegisterFatBinary((void *)data) == 0; }\n"
    )
    (tmp_path / "engine.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "engine.c", "-o", "libengine.so"], cwd=tmp_path, check=True)
    (tmp_path / "engine.toml").write_text(
        'provider = "p"\n[image.engine]\nlibrary = "libengine.so"\n[[entry]]\nname = "batch_decode_paged_*"\n'
        '[[entry.launch]]\nimage = "engine"\ncall = "attention"\narguments = []\n'
    )
    code, shown = _check(tmp_path / "engine.toml", capsys)
    (note,) = [line for line in shown.splitlines() if line.startswith("note")]
    assert code == 0
    assert note.startswith(f"note     image engine runs on a GPU only: libengine.so {says}"), note
