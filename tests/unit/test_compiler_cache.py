"""The kernel cache: what names an entry, and that no half or foreign entry is ever used."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from g4kv_cli.compiler import Header, SourceFile, cache, compile_image, compile_with_log, nvrtc, toolkit
from g4kv_cli.errors import CompileError

KERNEL = 'extern "C" __global__ void set(int* out) { *out = VALUE; }\n'
SOURCE = SourceFile("set.cu", '#include "value.cuh"\n' + KERNEL, (Header("value.cuh", "#define VALUE 7\n"),))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> list[tuple[str, str]]:
    """What really went to NVRTC, in order, with an empty cache at first."""
    calls: list[tuple[str, str]] = []
    real = nvrtc.compile_program

    def counted(source, arch, kind, options):  # type: ignore[no-untyped-def]
        calls.append((arch, kind))
        return real(source, arch, kind, options)

    monkeypatch.setattr(nvrtc, "compile_program", counted)
    return calls


def _entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_the_second_compilation_comes_from_the_cache(compilations: list, fresh_cache: Path) -> None:
    first = compile_image(SOURCE, arch="sm_80", kind="ptx")
    second = compile_image(SOURCE, arch="sm_80", kind="ptx")
    assert first == second
    assert compilations == [("sm_80", "ptx")]
    assert len(_entries(fresh_cache)) == 1


def test_machine_code_leaves_its_ptx(
    compilations: list, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes, the digest and the log of the PTX are those of a compilation to PTX alone."""
    source = replace(SOURCE, text=SOURCE.text + "__global__ void dull() { int unused; }\n")
    compile_with_log(source, arch="sm_90a", kind="cubin", defines={"EXTRA": "1"})
    left = compile_with_log(source, arch="sm_90a", kind="ptx", defines={"EXTRA": "1"})
    assert compilations == [("sm_90a", "cubin")]
    monkeypatch.setenv("G4KV_CACHE_DIR", str(tmp_path / "another"))
    assert compile_with_log(source, arch="sm_90a", kind="ptx", defines={"EXTRA": "1"}) == left
    assert compilations == [("sm_90a", "cubin"), ("sm_90a", "ptx")]
    assert "declared but never referenced" in left.log
    assert "ptxas" not in left.log


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_90"},
        {"kind": "cubin"},
        {"defines": {"EXTRA": "1"}},
        {"source": replace(SOURCE, text=SOURCE.text + "// more\n")},
        {"source": replace(SOURCE, headers=(Header("value.cuh", "#define VALUE 8\n"),))},
    ],
    ids=["arch", "kind", "options", "source", "header"],
)
def test_each_input_is_part_of_the_key(compilations: list, change: dict) -> None:
    request = {"source": SOURCE, "arch": "sm_80", "kind": "ptx", "defines": {}}
    for arguments in (request, {**request, **change}):
        source = arguments["source"]
        compile_image(source, arch=arguments["arch"], kind=arguments["kind"], defines=arguments["defines"])
    assert len(compilations) == 2


@pytest.mark.parametrize("what", ["nvrtc_version", "headers_version"])
def test_another_compiler_version_compiles_again(
    compilations: list, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    compile_image(SOURCE, arch="sm_80", kind="ptx")
    monkeypatch.setattr(toolkit, what, lambda: "99.9")
    compile_image(SOURCE, arch="sm_80", kind="ptx")
    assert len(compilations) == 2


def test_another_schema_compiles_again(compilations: list, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_image(SOURCE, arch="sm_80", kind="ptx")
    monkeypatch.setattr(cache, "CACHE_SCHEMA_VERSION", cache.CACHE_SCHEMA_VERSION + 1)
    compile_image(SOURCE, arch="sm_80", kind="ptx")
    assert len(compilations) == 2


def _truncate(raw: bytes) -> bytes:
    return raw[:-5]


def _flip_a_bit_of_the_image(raw: bytes) -> bytes:
    return raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:]


def _empty(raw: bytes) -> bytes:
    return b""


def _no_json(raw: bytes) -> bytes:
    return b"{" + raw


def _other_log(raw: bytes) -> bytes:
    return raw.replace(b'"log": "', b'"log": "x', 1)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit_of_the_image, _empty, _no_json, _other_log])
def test_a_damaged_entry_is_compiled_again_and_replaced(compilations: list, fresh_cache: Path, damage) -> None:  # type: ignore[no-untyped-def]
    whole = compile_image(SOURCE, arch="sm_80", kind="ptx")
    (entry,) = _entries(fresh_cache)
    good = entry.read_bytes()
    entry.write_bytes(damage(good))
    assert entry.read_bytes() != good
    assert compile_image(SOURCE, arch="sm_80", kind="ptx") == whole
    assert len(compilations) == 2
    assert entry.read_bytes() == good


def test_an_entry_under_another_name_is_not_taken(compilations: list, fresh_cache: Path) -> None:
    compile_image(SOURCE, arch="sm_80", kind="ptx")
    (eighty,) = _entries(fresh_cache)
    compile_image(SOURCE, arch="sm_90", kind="ptx")
    (ninety,) = (path for path in _entries(fresh_cache) if path != eighty)
    ninety.write_bytes(eighty.read_bytes())
    assert b".target sm_90" in compile_image(SOURCE, arch="sm_90", kind="ptx").data


def test_a_directory_that_cannot_be_written_warns_once_and_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("not a directory")  # a mode would not stop root
    monkeypatch.setenv("G4KV_CACHE_DIR", str(blocked))
    for arch in ("sm_80", "sm_90"):
        assert compile_image(SOURCE, arch=arch, kind="ptx").data
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(blocked) in lines[0]
    assert "G4KV_CACHE_DIR" in lines[0]
    assert blocked.read_text() == "not a directory"


def test_a_failed_compilation_leaves_no_entry(compilations: list, fresh_cache: Path) -> None:
    with pytest.raises(CompileError):
        compile_image(replace(SOURCE, headers=()), arch="sm_80", kind="ptx")
    assert not fresh_cache.exists() or not _entries(fresh_cache)


def test_a_failed_write_leaves_no_temporary_file(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, destination: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", refuse)
    monkeypatch.setattr(cache, "_warned_directories", set())
    cache.write("0" * 64, cache.CacheEntry(b"data", "log"))
    assert _entries(fresh_cache) == []


def test_parallel_writers_of_one_entry_never_show_half_of_it(fresh_cache: Path) -> None:
    """Three processes write the same key with different, large contents while this one reads."""
    script = (
        "import sys\n"
        "from g4kv_cli.compiler import cache\n"
        "for _ in range(60):\n"
        "    cache.write('k' * 64, cache.CacheEntry(sys.argv[1].encode() * 400_000, sys.argv[1]))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, letter]) for letter in "abc"]
    seen: set[str] = set()
    try:
        while any(writer.poll() is None for writer in writers):
            entry = cache.read("k" * 64)
            if entry is None:
                assert not seen, "an entry that was there became unreadable"
                continue
            assert entry.data == entry.log.encode() * 400_000
            seen.add(entry.log)
    finally:
        codes = [writer.wait() for writer in writers]
    assert codes == [0, 0, 0]
    assert seen
    assert [path.name for path in _entries(fresh_cache)] == ["k" * 64 + ".bin"]


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"G4KV_CACHE_DIR": "/chosen", "XDG_CACHE_HOME": "/xdg"}, Path("/chosen")),
        ({"G4KV_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, Path("/xdg/g4kv")),
        ({"G4KV_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, Path("/home/me/.cache/g4kv")),
        ({"G4KV_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, Path("/home/me/.cache/g4kv")),
    ],
)
def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], want: Path) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_directory() == want
