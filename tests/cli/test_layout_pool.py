"""``g4kv layout --pool`` and ``--provider``: pools in other orders, with gaps; offsets by hand; what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.pool_layout import lay_out, read_pool

TRITON = Path(__file__).resolve().parents[2] / "docs" / "examples" / "triton" / "triton.toml"
HND = 'axes = "layer page head slot dim"\nnum_pages = 1000\n'


@pytest.fixture
def pool(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        file = tmp_path / "pool.toml"
        file.write_text(f"[pool]\n{text}")
        return file

    return write


def _layout(*arguments: str, json_path: Path | None = None) -> tuple[int, Any]:
    more = () if json_path is None else ("--json", str(json_path))
    code = g4kv(["layout", *arguments, *more])
    return code, None if json_path is None else json.loads(json_path.read_text())


@pytest.mark.parametrize(
    ("text", "where", "want"),
    [
        # 12b-local: 40 layers, 8 KV heads of 256; kv * (40*1000*32768) + layer * (1000*32768) + page * 32768 + ...
        (HND, "page=3,layer=1,kv=v,slot=2,head=5,dim=7", 1310720000 + 32768000 + 3 * 32768 + 5 * 4096 + 2 * 256 + 7),
        # A token a page (SGLang's pools): [layer][token][head][dim], K and V apart.
        ('axes = "layer page slot head dim"\npage_size = 1\nnum_pages = 4096\n',
         "page=4095,layer=39,kv=k,slot=0,head=7,dim=255", 39 * 4096 * 2048 + 4095 * 2048 + 7 * 256 + 255),
        # vLLM's (blocks, 2, slot, head, dim) of one layer, rows padded to 272 elements.
        ('axes = "layer page kv slot head dim"\nnum_pages = 10\n[pool.strides]\nhead = 272\n',
         "page=9,layer=0,kv=v,slot=15,head=1,dim=3", 9 * 2 * 16 * 8 * 272 + 16 * 8 * 272 + 15 * 8 * 272 + 272 + 3),
        ('axes = "page layer kv slot head dim"\n[pool.strides]\npage = 3000000\n',
         "page=700,layer=0,kv=k,slot=0,head=0,dim=0", 700 * 3000000),
    ],
)  # fmt: skip
def test_offsets_by_hand_and_back(pool, capsys: pytest.CaptureFixture[str], text: str, where: str, want: int) -> None:
    file = str(pool(text))
    assert g4kv(["layout", "--pool", file, "--at", where]) == 0
    shown = capsys.readouterr().out
    assert f"element offset {want}, byte offset {2 * want} " in shown
    assert ("fits int32" in shown) == (want < 1 << 31)
    assert g4kv(["layout", "--pool", file, "--offset", str(want)]) == 0
    assert capsys.readouterr().out == shown


def test_every_offset_is_numpys(pool) -> None:
    file = pool('axes = "slot kv page head layer dim"\nnum_pages = 3\nnum_layers = 2\npage_size = 4\n')
    layout = lay_out(read_pool(file), GEOMETRIES["12b-local"])
    shape = tuple(layout.extents.values())
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for index in ((0, 0, 0, 0, 0, 0), (3, 1, 2, 7, 1, 255), (1, 0, 2, 3, 1, 9)):
        assert layout.offset(dict(zip(layout.extents, index, strict=True))) == numbers[index]
        at = layout.coordinate(int(numbers[index]))
        assert (at.slot, "kv".index(at.kv), at.page, at.head, at.layer, at.dim) == index


def test_a_pool_whose_last_offset_is_the_largest_one_fits(pool) -> None:
    """32 layers of a page take 2^21 elements: 1024 pages end at 2^31 - 1."""
    file = pool('axes = "page layer kv slot head dim"\noffsets = "int32"\nnum_layers = 32\n')
    pools = [lay_out(read_pool(file), GEOMETRIES["12b-local"], num_pages=pages) for pages in (1024, 1025)]
    assert pools[0].pool_elems == 1 << 31
    assert [one.first_page_past((1 << 31) - 1) for one in pools] == [None, 1024]
    assert [len(one.findings()) for one in pools] == [0, 1]


def test_what_is_shown(pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = _layout("--pool", str(pool(HND)), json_path=tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert code == 0
    assert "12b-local  layer page head slot dim, K and V apart: two halves of one pool" in shown
    assert "head 1  │ slot 0  +4096" in shown
    assert "the same again: page 1 at +32768, layer 1 at +32768000, V at +1310720000" in shown
    (one,) = record["pool_layouts"]
    assert one["axes"] == ["kv", "layer", "page", "head", "slot", "dim"]
    assert one["strides"] == {"kv": 1310720000, "layer": 32768000, "page": 32768, "head": 4096, "slot": 256, "dim": 1}
    assert (one["row_alignment_bytes"], one["pool_bytes"], one["gap_elems"]) == (512, 2 * 2621440000, 0)
    assert (one["first_page_past_int32"], one["first_page_past_uint32"]) == (0, None)


def test_the_pool_of_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = _layout("--provider", str(TRITON), "--geometry", "12b-global", json_path=tmp_path / "out.json")
    assert code == 0
    assert record["pool_layouts"][0]["axes"] == ["page", "layer", "kv", "slot", "head", "dim"]
    assert record["pool_layouts"][0]["first_page_past_int32"] == (1 << 31) // 131072
    assert ["page", "any", "131072", "262144"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{HND}alignment = 16\n[pool.strides]\nslot = 260\n",
         "alignment: rows have to begin at multiples of 16 bytes, but one slot is 520 bytes"),
        (f'{HND}offsets = "int32"\n', "offsets: int32 holds offsets up to 2147483647, but the last element is at 262"),
    ],
)  # fmt: skip
def test_what_a_pool_does_not_keep_is_a_finding(pool, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    assert g4kv(["layout", "--pool", str(pool(text))]) == 1
    assert f"wrong    {says}" in capsys.readouterr().out
    assert g4kv(["layout", "--pool", str(pool(text.replace("260", "264").replace("int32", "uint32")))]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('axes = "page kv slot head dim"', "pool.toml:2: pool.axes: the axes 'page kv slot head dim' must name each"),
        ('axes = "page layer kv slot head dim head"', "must name each of"),
        ('axes = "page layer kv slot dim head"', "the innermost of the axes"),
        ("", "pool.toml:1: pool: lacks 'axes'"),
        (f"{HND}strids = 3", "pool.strids: is no field here (nearest: strides)"),
        (f"{HND}num_page = 3",
         "(nearest: num_pages); the fields are alignment, axes, element_bytes, num_layers, num_pages, offsets,"),
        (f"{HND}[pool.strides]\nslots = 3", "pool.strides.slots: is no axis"),
        (f"{HND}[pool.strides]\nslot = -256", "pool.strides.slot: must be from 1"),
        (f"{HND}[pool.strides]\ndim = 2", "pool.strides.dim: must be 1"),
        (f"{HND}page_size = 0", "pool.page_size: must be from 1"),
        ('axes = "layer page head slot dim"', "what lies where depends on the number of pages: give --num-pages"),
        ('axes = "page layer kv slot head dim"\noffsets = "int32"', "whether offsets fit depends on the number"),
        (f"{HND}[pool.strides]\nslot = 128",
         "overlaps itself: the rows of kv K, layer 0, page 0, head 0, slot 0 and of kv K, layer 0, "
         "page 0, head 0, slot 1 are 128 elements apart; a row has 256"),
        ('axes = "page layer kv slot head dim"\nnum_pages = 9\n[pool.strides]\npage = 65536\n',
         "overlaps itself: the rows of page 0, layer 1, kv K, slot 0, head 0 and of page 1, layer 0, kv K, slot 0, "
         "head 0 lie at one place"),
        ('axes = "page layer kv slot head dim"\n[pool.strides]\npage = 65536\n', "too many rows to compare"),
    ],
)  # fmt: skip
def test_a_bad_pool_is_one_line(pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    code = g4kv(["layout", "--pool", str(pool(text)), "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_strides_that_do_not_nest_and_yet_do_not_meet(pool, capsys: pytest.CaptureFixture[str]) -> None:
    # Two layers of five rows each, laid like a zip with other strides: 0 2 4 6 8 and 5 7 9 11 13 (in rows).
    text = (
        'axes = "page layer kv slot head dim"\nnum_pages = 1\nnum_layers = 2\npage_size = 5\n'
        "[pool.strides]\nhead = 256\nslot = 4096\nlayer = 10240\nkv = 1000000\npage = 9000000\n"
    )
    file = str(pool(text))
    assert g4kv(["layout", "--pool", file]) == 0
    capsys.readouterr()
    assert g4kv(["layout", "--pool", file, "--offset", "10240"]) == 2
    assert "do not nest; ask with --at" in capsys.readouterr().err
    assert g4kv(["layout", "--pool", str(pool(text.replace("10240", "8192")))]) == 2


@pytest.mark.parametrize(
    "more", [("--check", "x.json"), ("--context", "100"), ("--probe",), ("--provider", str(TRITON))]
)
def test_what_does_not_go_together(pool, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    assert g4kv(["layout", "--pool", str(pool(HND)), *more]) == 2
    assert f"{more[0]} does not go with --pool" in capsys.readouterr().err


PARTS = """\
provider = "packed"
[pool.k]
axes = "layer page head dim/8 slot dim%8"
[pool.v]
axes = "layer page head dim slot"
[image.a]
python = "engine:run"
[[entry]]
name = "batch_*"
[[entry.launch]]
image = "a"
"""
"""Packed keys, and values by column."""


def _manifest(tmp_path: Path, old: str = "", new: str = "") -> str:
    file = tmp_path / "packed.toml"
    assert old in PARTS
    file.write_text(PARTS.replace(old, new, 1) if old else PARTS)
    return str(file)


@pytest.mark.parametrize(
    ("where", "part", "want"),
    [
        # layer * (100 * 32768) + page * 32768 + head * 4096 + dim / 8 * 128 + slot * 8 + dim % 8
        ("page=3,layer=1,kv=k,slot=2,head=5,dim=19", "k_pool", 3276800 + 3 * 32768 + 5 * 4096 + 2 * 128 + 2 * 8 + 3),
        # layer * (100 * 32768) + page * 32768 + head * 4096 + dim * 16 + slot
        ("page=99,layer=39,kv=v,slot=15,head=7,dim=255", "v_pool", 40 * 3276800 - 1),
    ],
)
def test_offsets_of_a_pool_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, part: str, want: int
) -> None:
    assert g4kv(["layout", "--provider", _manifest(tmp_path), "--num-pages", "100", "--at", where]) == 0
    assert f"in {part} element offset {want}, byte offset {2 * want} (fits int32)" in capsys.readouterr().out


def test_a_pool_in_pieces_is_shown_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gaps = _manifest(
        tmp_path, 'axes = "layer page head dim slot"', 'axes = "layer page head dim slot"\nstrides.dim = 20'
    )
    code, record = _layout("--provider", gaps, "--num-pages", "100", json_path=tmp_path / "out.json")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert ["dim/8", "32", "128", "256"] in lines
    assert ["dim", "256", "20", "40", "4"] in lines
    assert [one["part"] for one in record["pool_layouts"]] == ["k_pool", "v_pool"]
    assert record["pool_layouts"][0]["strides"] == [3276800, 32768, 4096, 128, 8, 1]
    assert record["pool_layouts"][1]["pool_bytes"] == 2 * (40 * 100 * 8 * 256 * 20 - 4)


@pytest.mark.parametrize(
    ("old", "new", "arguments", "code", "says"),
    [
        ("", "", (), 2, "depends on the number of pages: give --num-pages"),
        ("", "", ("--num-pages", "9", "--offset", "5"), 2, "--offset: this manifest's pool has pieces of axes"),
        (
            "",
            "",
            ("--num-pages", "9", "--at", "page=9,layer=0,kv=v,slot=0,head=0,dim=0"),
            2,
            "page must be from 0 to 8",
        ),
        (
            'dim slot"',
            'dim slot"\nstrides.head = 100',
            ("--num-pages", "9"),
            2,
            "v_pool: the pool overlaps itself: one head",
        ),
        (
            'slot dim%8"',
            'slot dim%8"\noffsets = "int32"',
            ("--num-pages", "9000"),
            1,
            "int32 offsets do not reach the last",
        ),
    ],
)
def test_what_is_wrong_with_a_pool_in_pieces(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    assert g4kv(["layout", "--provider", _manifest(tmp_path, old, new), *arguments]) == code
    shown = capsys.readouterr()
    assert says in (shown.out if code == 1 else shown.err)
