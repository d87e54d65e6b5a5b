"""Geometries from files: a whole one is what the built-in table would say, every fault names file, line and key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.entries.table import require_served
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES, Geometry, contradictions, select_geometries

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "geometry.toml"

TWELVE = """\
model = "twelve"
num_qo_heads = 16
hidden_size = 3840
max_positions = 262144

[global]
num_layers = 8
num_kv_heads = 1
head_dim = 512
k_eq_v = true
rope_theta = 1e6
rope_type = "proportional"
partial_rotary_factor = 0.25

[local]
num_layers = 40
num_kv_heads = 8
head_dim = 256
window = 1024
k_eq_v = false
rope_theta = 1e4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "My.toml"  # names are in any case, files are not
    path.write_text(TWELVE)
    return path


def _as(geometry: Geometry, model: str) -> Geometry:
    return dataclasses.replace(geometry, model=model, name=f"{model}-{geometry.family}")


def test_a_file_says_what_the_built_in_table_says(file: Path) -> None:
    want = tuple(_as(GEOMETRIES[name], "twelve") for name in ("12b-local", "12b-global"))
    assert select_geometries(str(file)) == want
    assert select_geometries(f"{file}:global") == want[1:]
    assert select_geometries(f"31b-local, {file}:local,{file}") == (GEOMETRIES["31b-local"], *want)
    assert [one.num_qo_heads for one in select_geometries(str(file), tp=2)] == [8, 8]


def test_a_file_of_one_family(file: Path) -> None:
    file.write_text(TWELVE[: TWELVE.index("[local]")])
    assert [one.name for one in select_geometries(str(file))] == ["twelve-global"]
    with pytest.raises(UsageError, match=r"My\.toml:1: geometry: has no \[local\]; it has \[global\]"):
        select_geometries(f"{file}:local")
    with pytest.raises(UsageError, match=r"geometry: has no \[locl\]; it has \[global\]"):
        select_geometries(f"{file}:locl")


def test_narrow_rotation_and_shared_layers(file: Path) -> None:
    file.write_text(TWELVE.replace("window = 1024", "window = 1024\nrotary_dim = 64\nnum_shared_kv_layers = 39"))
    local = select_geometries(f"{file}:local")[0]
    assert (local.rotary_dim, local.num_rotated_pairs, local.num_kv_layers) == (64, 32, 1)


def test_cases_are_those_of_a_built_in_geometry() -> None:
    """The same kinds of cases, whichever numbers: of the example's families, and of the built-in ones like them."""

    def kinds(geometry: Geometry) -> set[str]:
        """Ids without the geometry's name and numbers: heads decide token counts, names which splits are swept."""
        ids = ["/".join(case.id.split("/")[2:]) for case in gate_cases([geometry], every_trap=True)]
        return {re.sub(r"(tokens|splits|seed)\d+", r"\1N", one).replace(f"window{geometry.window}", "W") for one in ids}

    for own, built_in in zip(select_geometries(str(EXAMPLE)), ("12b-local", "12b-global"), strict=True):
        assert {case.id.split("/")[1] for case in gate_cases([own])} == {own.name}
        assert kinds(own) == kinds(GEOMETRIES[built_in])
        assert {case.geometry for case in reject_cases([own])} == {own}


FAULTS = [
    ("num_kv_heads = 8", "num_kv_heads = 7", 17, "local.num_kv_heads: 7 KV heads do not divide 16 query heads"),
    ("num_kv_heads = 8", "num_kv_heads = 0", 17, "local.num_kv_heads: must be from 1 to 2147483647, got 0"),
    ("num_kv_heads = 8", 'num_kv_heads = "8"', 17, "local.num_kv_heads: must be an integer, got a string"),
    ("head_dim = 256", "head_dim = 128", 18, "local.head_dim: no kernel is compiled for 128: compiled are 256 and 512"),
    ("head_dim = 256", "", 15, "local: lacks 'head_dim' (an integer)"),
    ("window = 1024", "", 15, "local: lacks 'window' (an integer)"),
    ("window = 1024", "window = 262145", 19, "local.window: must be from 1 to the 262144 positions, got 262145"),
    ("num_kv_heads = 1\n", "num_kv_heads = 1\nwindow = 9\n", 9, "global.window: a global layer has none"),
    ("k_eq_v = false", "k_eq_v = 0", 20, "local.k_eq_v: must be true or false, got an integer"),
    ("k_eq_v = false", "", 15, "local: lacks 'k_eq_v' (true or false)"),
    ("rope_theta = 1e4", "rope_theta = -1", 21, "local.rope_theta: must be a finite number above 0, got -1"),
    ("rope_theta = 1e4", "rope_theta = 0.5", 21, "local.rope_theta: must be above 1, got 0.5"),
    ("rope_theta = 1e4", "rope_theta = inf", 21, "local.rope_theta: must be a finite number above 0, got inf"),
    ("rope_theta = 1e4", "rope_theta = 2\nrotary_dim = 258", 22, "local.rotary_dim: must be even and up to"),
    ("rope_theta = 1e4", "rope_theta = 2\nrotary_dim = 3", 22, "local.rotary_dim: must be even and up to"),
    ("rope_theta = 1e4", "rope_theta = 2\npartial_rotary_factor = 1", 22, "goes with rope_type = \"proportional\""),
    ("= 0.25", "= 0.3", 13, "global.partial_rotary_factor: must be up to 1 and a whole number of the 256 pairs"),
    ("= 0.25", "= 2", 13, "global.partial_rotary_factor: must be up to 1 and a whole number of the 256 pairs"),
    ("= 0.25", "= 0.25\nrotary_dim = 128", 14, "global.rotary_dim: a proportional rotation runs over the whole head"),
    ('"proportional"', '"yarn"', 12, "global.rope_type: 'yarn' is not one of default, proportional"),
    ("num_layers = 40", "num_layers = 40\nnum_shared_kv_layers = 40", 17, "must leave a layer that owns K/V"),
    ("num_layers = 40", "num_layer = 40", 15, "local: lacks 'num_layers' (an integer) (nearest: num_layer)"),
    ("num_layers = 40", "num_layers = 40\nnum_layer = 4", 17, "num_layer: is no field here (nearest: num_layers)"),
    ("max_positions = 262144", "max_positions = 16777217", 4, "max_positions: must be up to 16777216 (2^24)"),
    ("[local]", "[locals]", 15, "locals: is no field here (nearest: local); the fields are global, hidden_size, local"),
    ('model = "twelve"', 'model = "12b"', 1, "model: 12b is a built-in model; give yours another name"),
    ('model = "twelve"', 'model = "Twelve/12"', 1, "model: 'Twelve/12' is no name"),
    ("num_qo_heads = 16", "", 1, "geometry: lacks 'num_qo_heads' (an integer)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "words"), FAULTS, ids=[f"{line}-{words}" for *_, line, words in FAULTS])
def test_a_fault_names_file_line_and_key(file: Path, old: str, new: str, line: int, words: str) -> None:
    assert old in TWELVE
    file.write_text(TWELVE.replace(old, new))
    with pytest.raises(UsageError) as error:
        select_geometries(str(file))
    assert str(error.value).startswith(f"{file}:{line}: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"\nnum_qo_heads = 1\nmax_positions = 9\n', r"has no family: give a table \[local\], \[global\]"),
        ("model = ", "is no TOML"),
        ("\xff", "is no TOML"),
        (f"model = {'[' * 100_000}", "is no TOML"),
    ],
)
def test_files_that_are_no_geometry(file: Path, text: str, words: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=words):
        select_geometries(str(file))


def test_two_geometries_of_one_name(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(TWELVE.replace("num_layers = 8", "num_layers = 9"))
    with pytest.raises(UsageError, match="two geometries are called twelve-global; rename one of them"):
        select_geometries(f"{file},{other}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"geometry nowhere\.toml cannot be read: No such file or directory; name a"):
        select_geometries("nowhere.toml:local")


def test_the_built_in_geometries_pass_the_same_checks() -> None:
    assert [list(contradictions(geometry)) for geometry in GEOMETRIES.values()] == [[]] * len(GEOMETRIES)
    for geometry in GEOMETRIES.values():
        require_served(geometry)
    split = dataclasses.replace(GEOMETRIES["12b-local"], rotary_dim=128)
    assert [field for field, _ in contradictions(split)] == ["num_rotated_pairs"]
    wide = dataclasses.replace(GEOMETRIES["12b-local"], num_qo_heads=1 << 24, num_kv_heads=1 << 24)
    assert [field for field, _ in contradictions(wide)] == ["num_qo_heads"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"num_qo_heads": 24, "num_kv_heads": 1},
            "24 query heads on 1 KV heads are groups of 24, and no attention kernel takes them: compiled are groups of "
            "1 to 16",
        ),
        (
            {"k_eq_v": True},
            "no kernel writes the pool at head_dim 256 with K = V: compiled are 256 with a V of its own, 512 with a V "
            "of its own, 512 with K = V",
        ),
    ],
)
def test_a_geometry_without_kernels_says_what_is_compiled(changed: dict, words: str) -> None:
    geometry = dataclasses.replace(GEOMETRIES["12b-local"], name="mine-local", **changed)
    for make in (lambda: gate_cases([geometry]), lambda: reject_cases([geometry])):
        with pytest.raises(UsageError, match="mine-local") as error:
            make()
        assert words in str(error.value)
