"""Stated layouts: what a file may say, and which of its statements are contradicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.stated_layout import Contradiction, StatedCheck, check_stated_layout, read_stated_layout

# 12b-local at page size 16, by hand.
RIGHT = {
    "page_size": 16,
    "num_layers": 40,
    "num_kv_heads": 8,
    "head_dim": 256,
    "kv_block_len": 32768,
    "layer_stride": 65536,
    "page_stride": 2621440,
    "element_bytes": 2,
    "num_pages": 3,
    "pool_elems": 7864320,
    "pool_bytes": 15728640,
    "samples": [
        {"page": 2, "layer": 1, "kv": "v", "slot": 3, "head": 7, "dim": 128, "element_offset": 5349248},
        {"page": 0, "layer": 0, "kv": "k", "slot": 0, "head": 0, "dim": 1, "element_offset": 1},
    ],
}


def check(tmp_path: Path, content: object, **options: int) -> StatedCheck:
    path = tmp_path / "stated.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return check_stated_layout(read_stated_layout(path), GEOMETRIES["12b-local"], **options)


def test_a_right_layout_has_no_contradiction(tmp_path: Path) -> None:
    # 2 x 2621440 + 65536 + 32768 + 3 x 2048 + 7 x 256 + 128 = 5349248
    result = check(tmp_path, RIGHT)
    assert result.contradictions == ()
    assert result.stated.statements == 13


@pytest.mark.parametrize("field", [name for name in RIGHT if name not in ("samples", "page_size", "num_pages")])
def test_each_wrong_field_is_the_only_contradiction(tmp_path: Path, field: str) -> None:
    want = RIGHT[field]
    assert isinstance(want, int)
    assert check(tmp_path, {**RIGHT, field: want + 1}).contradictions == (Contradiction(field, want + 1, want),)


def test_page_size_and_pages_are_contradicted_when_asked_for(tmp_path: Path) -> None:
    stated = {"page_size": 32, "num_pages": 4}
    assert check(tmp_path, stated).contradictions == ()
    assert check(tmp_path, stated, page_size=16, num_pages=3).contradictions == (
        Contradiction("page_size", 32, 16),
        Contradiction("num_pages", 4, 3),
    )


def test_the_files_own_page_size_judges_its_strides(tmp_path: Path) -> None:
    right = {"page_size": 32, "kv_block_len": 65536, "page_stride": 5242880}
    assert check(tmp_path, right).contradictions == ()
    assert check(tmp_path, {**right, "page_stride": 2621440}).contradictions == (
        Contradiction("page_stride", 2621440, 5242880),
    )


def test_layers_are_the_familys_unless_asked_for(tmp_path: Path) -> None:
    assert check(tmp_path, {"num_layers": 2}).contradictions == (Contradiction("num_layers", 2, 40),)
    assert check(tmp_path, {"num_layers": 2}, num_layers=2).contradictions == ()


def test_true_is_not_one(tmp_path: Path) -> None:
    path, geometry = tmp_path / "stated.json", GEOMETRIES["12b-global"]
    path.write_text('{"geometry": {"num_kv_heads": 1, "k_eq_v": true}}')
    assert check_stated_layout(read_stated_layout(path), geometry).contradictions == ()
    path.write_text('{"geometry": {"num_kv_heads": true, "k_eq_v": 1}}')
    found = check_stated_layout(read_stated_layout(path), geometry).contradictions
    assert [one.field for one in found] == ["geometry.num_kv_heads", "geometry.k_eq_v"]


def test_extents_that_are_not_positive(tmp_path: Path) -> None:
    assert check(tmp_path, {"page_size": 0, "num_pages": 0, "num_layers": -40}).contradictions == (
        Contradiction("page_size", 0, 16),
        Contradiction("num_layers", -40, 40),
        Contradiction("num_pages", 0, "at least 1"),
    )


def test_a_pool_of_unknown_size_is_whole_pages(tmp_path: Path) -> None:
    assert check(tmp_path, {"pool_bytes": 5242880, "pool_elems": 5242880}).contradictions == ()
    half = check(tmp_path, {"pool_bytes": 7864320, "pool_elems": 0}).contradictions
    assert half == (
        Contradiction("pool_elems", 0, "one or more whole pages of 2621440"),
        Contradiction("pool_bytes", 7864320, "one or more whole pages of 5242880"),
    )


def test_wrong_samples(tmp_path: Path) -> None:
    right = RIGHT["samples"][0]  # type: ignore[index]
    swapped = {**right, "kv": "k"}
    outside = {**right, "head": 8, "page": 3}
    result = check(tmp_path, {"num_pages": 3, "samples": [right, swapped, outside]})
    assert result.contradictions == (
        Contradiction("samples[1].element_offset", 5349248, 5349248 - 32768),
        Contradiction("samples[2].page", 3, "0 to 2"),
        Contradiction("samples[2].head", 8, "0 to 7"),
    )


SAMPLE = {"page": 0, "layer": 0, "kv": "k", "slot": 0, "head": 0, "dim": 0, "element_offset": 0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"page_size": 16, "page_size": 16}', "'page_size' is there twice"),
        ("[]", "must hold one JSON object with fields of a layout, not a list"),
        ("{}", "states nothing"),
        ('{"samples": []}', "states nothing"),
        ({"page_sise": 16}, "unknown key 'page_sise'; known are page_size, "),
        ({"page_size": "16"}, 'page_size must be an integer, not "16"'),
        ({"page_size": 16.0}, "page_size must be an integer, not 16.0"),
        ({"page_size": True}, "page_size must be an integer, not true"),
        ({"page_size": None}, "page_size must be an integer, not null"),
        ({"samples": {}}, "samples must be a list of objects, not an object"),
        ({"samples": [5]}, r"samples\[0\] must be an object, not 5"),
        ({"samples": [{**SAMPLE, "kv": "K"}]}, r'samples\[0\]: kv must be "k" or "v", not "K"'),
        ({"samples": [{**SAMPLE, "kv": []}]}, r'samples\[0\]: kv must be "k" or "v", not a list'),
        ({"samples": [SAMPLE, {**SAMPLE, "dim": 1.5}]}, r"samples\[1\]: dim must be an integer, not 1.5"),
        ({"samples": [{**SAMPLE, "token": 1}]}, r"samples\[0\]: unknown key 'token'"),
        ({"samples": [{"page": 0, "kv": "k"}]}, r"samples\[0\] lacks layer, slot, head, dim, element_offset"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        check(tmp_path, content)
    assert "\n" not in str(raised.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        read_stated_layout(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot read .*[Dd]irectory"):
        read_stated_layout(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not JSON"):
        read_stated_layout(binary)
