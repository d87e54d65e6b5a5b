"""Sources, their headers, and the digests that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4kv_cli.compiler import SourceFile, find_source, kernels_digest, source_names
from g4kv_cli.compiler import sources as sources_module
from g4kv_cli.errors import UsageError


@pytest.fixture
def built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set of built-in kernels: main.cu includes a.cuh, which includes b.cuh."""
    directory = tmp_path / "built-in"
    directory.mkdir()
    (directory / "main.cu").write_text('#include "a.cuh"\n#include <cuda_bf16.h>\n')
    (directory / "a.cuh").write_text('  #  include "b.cuh"\nint a();\n')
    (directory / "b.cuh").write_text("int b();\n")
    (directory / "unused.cuh").write_text("int unused();\n")
    monkeypatch.setattr(sources_module, "BUILT_IN_KERNELS_DIRECTORY", directory)
    return directory


def test_headers_are_collected_recursively_and_toolkit_headers_are_left_out(built_in: Path) -> None:
    source = find_source("main.cu")
    assert [header.name for header in source.headers] == ["a.cuh", "b.cuh"]
    assert source.path == built_in / "main.cu"


@pytest.mark.parametrize("changed", ["main.cu", "a.cuh", "b.cuh"])
def test_a_changed_file_changes_the_digest(built_in: Path, changed: str) -> None:
    before = find_source("main.cu").digest
    path = built_in / changed
    path.write_text(path.read_text() + "// one comment more\n")
    assert find_source("main.cu").digest != before


def test_a_file_that_is_not_compiled_leaves_the_digests(built_in: Path) -> None:
    source, everything = find_source("main.cu").digest, kernels_digest(["main.cu"])
    (built_in / "unused.cuh").write_text("int changed();\n")
    (built_in / "other.cu").write_text("int other();\n")
    assert find_source("main.cu").digest == source
    assert kernels_digest(["main.cu"]) == everything
    assert kernels_digest(["main.cu", "other.cu"]) != everything
    assert kernels_digest(["other.cu", "main.cu", "main.cu"]) == kernels_digest(["main.cu", "other.cu"])


def test_headers_that_include_each_other_end(built_in: Path) -> None:
    (built_in / "b.cuh").write_text('#include "a.cuh"\n')
    assert [header.name for header in find_source("main.cu").headers] == ["a.cuh", "b.cuh"]


def test_a_directory_overlays_the_built_in_files(built_in: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "b.cuh").write_text("int mine();\n")
    source = find_source("main.cu", mine)
    assert {header.name: header.text for header in source.headers}["b.cuh"] == "int mine();\n"
    assert source.path == built_in / "main.cu"
    assert source.digest != find_source("main.cu").digest
    assert kernels_digest(["main.cu"], mine) != kernels_digest(["main.cu"])
    assert source_names(mine) == ("main.cu",)


def test_an_overlay_equal_to_the_built_in_files_has_the_same_digests(built_in: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "b.cuh").write_text((built_in / "b.cuh").read_text())
    assert kernels_digest(["main.cu"], mine) == kernels_digest(["main.cu"])
    assert find_source("main.cu", mine).digest == find_source("main.cu").digest


def test_moving_text_from_one_header_to_another_changes_the_digest() -> None:
    split = [SourceFile("k.cu", "x", (sources_module.Header("h", "ab"),)).digest]
    split.append(SourceFile("k.cu", "xa", (sources_module.Header("h", "b"),)).digest)
    split.append(SourceFile("k.cux", "", (sources_module.Header("h", "ab"),)).digest)
    assert len(set(split)) == 3


def test_an_unknown_source_names_the_nearest(built_in: Path) -> None:
    with pytest.raises(UsageError, match=r"no kernel source mein\.cu in .*; did you mean main\.cu\?"):
        find_source("mein.cu")
    with pytest.raises(UsageError, match=r"there are: main\.cu"):
        find_source("something-else")


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist"):
        find_source("main.cu", tmp_path / "nowhere")


def test_a_source_that_is_not_text_is_a_usage_error(built_in: Path) -> None:
    (built_in / "main.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read the kernel source .*main\.cu"):
        find_source("main.cu")
