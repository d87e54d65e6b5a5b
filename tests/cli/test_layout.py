"""``g4kv layout`` without a device: what it prints, its JSON, its exit codes and error lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from g4kv_cli import main
from g4kv_cli.commands.layout import layout
from g4kv_cli.errors import UsageError


def invoke(*arguments: str) -> Result:
    """Run the command in this process; an error that is not findings propagates."""
    return CliRunner().invoke(layout, arguments, catch_exceptions=False)


def values(*arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "layout.json"
        result = invoke("--json", str(path), *arguments)
        assert result.exit_code == 0
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert content["schema_version"] == 1
    return content


def rows(output: str) -> dict[str, list[str]]:
    """Each line's words by its first word."""
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def test_numbers_with_units() -> None:
    shown = rows(invoke("--no-probe", "--geometry", "31b-local", "--num-pages", "328").stdout)
    want = {
        "page_size": ("16", "tokens"),
        "num_layers": ("50", "layers"),
        "num_kv_heads": ("16", "heads"),
        "head_dim": ("256", "elements"),
        "element_bytes": ("2", "bytes"),
        "slot_stride": ("4096", "elements"),
        "kv_block_len": ("65536", "elements"),
        "layer_stride": ("131072", "elements"),
        "page_stride": ("6553600", "elements"),
        "page_bytes": ("13107200", "bytes"),
        "bytes_per_token": ("819200", "bytes"),
        "first_page_past_int32": ("328", "page"),
        "first_page_past_uint32": ("656", "page"),
        "num_pages": ("328", "pages"),
        "pool_elems": ("2149580800", "elements"),
        "pool_bytes": ("4299161600", "bytes"),
    }
    assert {name: tuple(shown[name][:2]) for name in want} == want
    assert shown["page_bytes"][-2:] == ["12.5", "MiB"]
    assert "num_pages" not in rows(invoke("--no-probe", "--geometry", "31b-local").stdout)


def test_picture_of_a_page() -> None:
    output = invoke("--no-probe", "--geometry", "12b-local").stdout
    lines = output.splitlines()
    layers = [line for line in lines if line.strip().startswith("layer ")]
    # Layers 0, 1 and the last: the K block's first element, then the V block's.
    drawn = [(line.split("│")[0].split(), *(part.split() for part in line.split("│")[1:3])) for line in layers]
    assert drawn == [
        (["layer", "0"], ["K", "+0"], ["V", "+32768"]),
        (["layer", "1"], ["K", "+65536"], ["V", "+98304"]),
        (["layer", "39"], ["K", "+2555904"], ["V", "+2588672"]),
    ]
    last_slot = next(line for line in lines if line.strip().startswith("slot 15"))
    assert "head 0  +30720" in last_slot
    assert "head 7  +32512" in last_slot
    assert "layers 2 to 38" in output
    assert max(len(line) for line in lines) <= 80 + len("; +n: elements from the block's first")


def test_picture_of_the_smallest_page_leaves_nothing_out() -> None:
    output = invoke("--no-probe", "--geometry", "12b-global", "--page-size", "1", "--num-layers", "1").stdout
    assert "layer 0  │ K  +0" in output
    assert "V  +512" in output
    assert "slot 0  │ head 0  +0" in output
    assert "..." not in output


def test_json_holds_every_number_of_the_text() -> None:
    arguments = ("--no-probe", "--geometry", "12b-local,e2b-global", "--num-pages", "7")
    first, second = values(*arguments)["layouts"]
    assert first["geometry"]["name"] == "12b-local"
    assert first["page_stride"] == 2621440
    assert first["pool_bytes"] == 7 * 5242880
    assert second["geometry"]["window"] is None
    assert second["num_layers"] == 3
    text = rows(invoke("--no-probe", "--geometry", "12b-local", "--num-pages", "7").stdout)
    assert {name: str(value) for name, value in first.items() if name != "geometry"} == {
        name: text[name][0] for name in first if name != "geometry"
    }


def test_tensor_parallel_heads() -> None:
    (rank,) = values("--no-probe", "--geometry", "31b-global", "--tp", "8")["layouts"]
    assert rank["geometry"]["name"] == "31b-global@tp8"
    assert (rank["num_kv_heads"], rank["geometry"]["num_qo_heads"], rank["kv_block_len"]) == (1, 4, 8192)


def test_pools_of_both_families() -> None:
    (pools,) = values("--no-probe", "--geometry", "12b-local", "--context", "131072", "--slots", "4")["pools"]
    assert pools["model"] == "12b"
    assert (pools["local"]["pages_per_slot"], pools["local"]["num_pages"]) == (65, 261)
    assert (pools["global"]["pages_per_slot"], pools["global"]["num_pages"]) == (8192, 32769)
    assert pools["local"]["pool_bytes"] == 261 * 5242880
    assert pools["global"]["pool_bytes"] == 32769 * 262144
    assert pools["total_bytes"] == 261 * 5242880 + 32769 * 262144
    output = invoke("--no-probe", "--geometry", "12b", "--context", "131072", "--slots", "4").stdout
    assert output.count("12b: 4 slots of up to 131072 tokens") == 1
    shown = rows(output)
    assert "1368391680" in output
    assert shown["both"][0] == str(261 * 5242880 + 32769 * 262144)
    assert "reserved padding page" in output


def test_pools_count_the_layers_that_own_kv_and_say_so() -> None:
    output = invoke("--no-probe", "--geometry", "e4b", "--context", "1024").stdout
    shown = [line.split() for line in output.splitlines() if line.strip().startswith("e4b-")]
    # ceil((512 + 1 + 15) / 16) = 33 pages of 20 layers, 64 pages of 4 layers, and a padding page each
    assert ["e4b-local", "20", "33", "34"] in [words[:4] for words in shown]
    assert ["e4b-global", "4", "64", "65"] in [words[:4] for words in shown]
    assert "the last 18 layers read the K/V of earlier layers" in output


def test_chunked_prefill_holds_more() -> None:
    arguments = ("--no-probe", "--geometry", "12b-local", "--context", "131072", "--step-tokens", "2048")
    (pools,) = values(*arguments)["pools"]
    # ceil((1024 + 2048 + 15) / 16)
    assert pools["local"]["pages_per_slot"] == 193


def test_at_and_offset_are_inverse() -> None:
    # 820 x 2621440 + 32768 + 3 x 2048 + 7 x 256 + 128
    where = "page=820,layer=0,kv=v,slot=3,head=7,dim=128"
    line = f"{where}: element offset 2149621632, byte offset 4299243264\n"
    assert invoke("--at", where).stdout == line
    assert invoke("--offset", "2149621632").stdout == line
    both = values("--at", " dim=128, head=7, slot=3, KV=V, layer=0, page=820", "--offset", "2149621632")
    assert both["at"] == both["offset"]
    assert both["at"]["byte_offset"] == 4299243264
    assert set(both) == {"schema_version", "at", "offset"}


def test_the_last_element_of_the_pool() -> None:
    last = 3 * 2621440 - 1
    found = values("--num-pages", "3", "--offset", str(last))["offset"]
    assert (found["page"], found["layer"], found["kv"]) == (2, 39, "v")
    assert (found["slot"], found["head"], found["dim"]) == (15, 7, 255)


def test_check_agrees(tmp_path: Path) -> None:
    path = tmp_path / "stated.json"
    path.write_text('{"page_size": 32, "page_stride": 5242880}')
    result = invoke("--check", str(path))
    assert result.exit_code == 0
    assert result.stdout == f"{path}: 2 of 2 statements agree with 12b-local, page size 32, 40 layers\n"


def test_check_reports_each_contradiction(tmp_path: Path) -> None:
    path = tmp_path / "stated.json"
    path.write_text('{"page_size": 16, "layer_stride": 32768, "page_stride": 1310720}')
    result = invoke("--check", str(path))
    assert result.exit_code == 1
    assert "wrong layer_stride: got 32768, want 65536\n" in result.stdout
    assert "wrong page_stride: got 1310720, want 2621440\n" in result.stdout
    assert "1 of 3 statements agree" in result.stdout
    written = tmp_path / "check.json"
    assert invoke("--check", str(path), "--json", str(written)).exit_code == 1
    assert json.loads(written.read_text())["check"]["contradictions"] == [
        {"field": "layer_stride", "got": 32768, "want": 65536},
        {"field": "page_stride", "got": 1310720, "want": 2621440},
    ]
    assert invoke("--check", str(path), "--page-size", "32").exit_code == 1


@pytest.mark.parametrize("pages", [[], ["--num-pages", "7"]])
@pytest.mark.parametrize("page_size", ["16", "5"])
def test_check_takes_what_layout_wrote(tmp_path: Path, pages: list[str], page_size: str) -> None:
    """Every number of it is held against the derived one, so a change of any is a contradiction."""
    path = tmp_path / "layout.json"
    made = ["--geometry", "12b,e2b-global", "--page-size", page_size, *pages]
    assert invoke("--no-probe", *made, "--context", "4096", "--json", str(path)).exit_code == 0
    record = json.loads(path.read_text())
    names = [one["geometry"]["name"] for one in record["layouts"]]
    assert names == ["12b-local", "12b-global", "e2b-global"]
    for name, one in zip(names, record["layouts"], strict=True):
        agrees = invoke("--geometry", name, "--check", str(path))
        assert agrees.exit_code == 0, agrees.stdout
        statements = len(one) - 1 + len(one["geometry"])
        assert f"{statements} of {statements} statements agree with {name}" in agrees.stdout
    one = record["layouts"][1]
    for holder, key in [*((one, key) for key in one), *((one["geometry"], key) for key in one["geometry"])]:
        kept = holder[key]
        if (holder is one and key in ("geometry", "page_size", "num_pages")) or key == "name":
            continue
        holder[key] = kept + 1 if isinstance(kept, int) else "else"
        path.write_text(json.dumps(record))
        assert invoke("--geometry", "12b-global", "--check", str(path)).exit_code == 1, key
        holder[key] = kept


def test_check_takes_the_elements_that_layout_answered_for(tmp_path: Path) -> None:
    path = tmp_path / "at.json"
    assert invoke("--at", AT.replace("page=0", "page=9"), "--offset", "4711", "--json", str(path)).exit_code == 0
    assert "2 of 2 statements agree" in invoke("--check", str(path)).stdout
    record = json.loads(path.read_text())
    record["at"]["byte_offset"] += 2
    record["offset"]["element_offset"] += 1
    path.write_text(json.dumps(record))
    wrong = invoke("--check", str(path))
    assert wrong.exit_code == 1
    assert "wrong at.byte_offset: got 47185922, want 47185920" in wrong.stdout
    assert "wrong offset.element_offset: got 4712, want 4711" in wrong.stdout


def test_a_record_without_the_geometry_is_no_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.json"
    invoke("--no-probe", "--geometry", "12b", "--json", str(path))
    assert main.run(["layout", "--geometry", "31b-local", "--check", str(path)]) == 2
    words = "holds no layout of 31b-local but of 12b-local, 12b-global; choose one with --geometry"
    assert words in capsys.readouterr().err


AT = "page=0,layer=0,kv=k,slot=0,head=0,dim=0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--geometry", "12b-locl"], "did you mean 12b-local?"),
        (["--page-size", "0"], "page_size must be at least 1, got 0"),
        (["--page-size", "2147483648"], "--page-size must be from 1 to 2147483647, got 2147483648"),
        (["--num-layers", "99999999999"], "--num-layers must be from 1 to 2147483647, got 99999999999"),
        (
            ["--context", "4096", "--slots", "100000000"],
            "page ids are int32: give fewer --slots",
        ),
        (["--page-size", "x"], "'x' is not a valid integer"),
        (["--num-layers", "0"], "num_layers must be at least 1, got 0"),
        (["--num-pages", "0"], "--num-pages must be from 1 to 2147483647, got 0"),
        (["--num-pages", "2147483648"], "--num-pages must be from 1 to 2147483647"),
        (["--tp", "3"], "--tp 3 does not divide the 16 query heads of 12b-local: use 1, 2, 4, 8, 16"),
        (["--slots", "2"], "give --context too"),
        (["--context", "0"], "--context must be at least 1"),
        (["--context", "262145"], "past the 262144 positions of 12b"),
        (["--context", "9", "--slots", "0"], "--slots must be at least 1"),
        (["--context", "9", "--num-layers", "2"], "leave out --num-layers"),
        (["--at", "page=1"], "--at lacks layer, kv, slot, head, dim"),
        (["--at", ""], "--at is empty; give it a value or leave it out"),
        (["--geometry="], "--geometry is empty; give it a value or leave it out"),
        (["--at", "plane=1"], "--at: 'plane=1' is none of page=.., layer=.."),
        (["--at", f"{AT},dim=1"], "--at names dim twice"),
        (["--at", AT.replace("kv=k", "kv=0")], "--at: kv must be k or v, got '0'"),
        (["--at", AT.replace("dim=0", "dim=x")], "--at: dim must be an integer, got 'x'"),
        (["--at", AT.replace("head=0", "head=8")], "head must be from 0 to 7 in this layout, got 8"),
        (["--at", AT.replace("page=0", "page=-1")], "page must be from 0 to 2147483647"),
        (["--num-pages", "3", "--at", AT.replace("page=0", "page=3")], "0 to 2 in a pool of 3 pages, got 3"),
        (["--offset", "-1"], "--offset must be 0 to"),
        (["--num-pages", "3", "--offset", "7864320"], "0 to 7864319 in a pool of 3 pages, got 7864320"),
        (["--geometry", "all", "--offset", "0"], "need one geometry"),
        (["--check", "/none.json"], "cannot read /none.json: No such file"),
        (["--probe", "--device", "tpu"], "unknown device 'tpu'"),
        (["--probe", "--device", "emulated", "--kernels", "/none"], "'/none' does not exist"),
    ],
)
def test_bad_requests_get_one_line_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["layout", "--no-probe", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("g4kv: error: ")
    assert words in captured.err


def test_without_a_probe_neither_numpy_nor_cuda_is_imported() -> None:
    script = (
        "import sys; from g4kv_cli.main import run; "
        "code = run(['layout', '--no-probe', '--context', '4096']); "
        "loaded = {'numpy', 'cuda', 'ml_dtypes'} & set(sys.modules); "
        "sys.exit(code or (3 if loaded else 0))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


FOLDED = ("--no-probe", "--geometry", "12b-global", "--kv-format", "folded")


def test_the_folded_format_in_numbers_and_pictures() -> None:
    output = invoke(*FOLDED, "--num-pages", "3").stdout
    shown = rows(output)
    assert "V from raw K, folded" in output
    assert (shown["head_dim"][0], shown["k_dim"][0]) == ("512", "128")
    assert "columns 0 to 63 and 256 to 319" in output
    assert (shown["k_block_len"][0], shown["v_block_len"][0]) == ("2048", "8192")  # 16 slots of 128 and of 512
    assert (shown["layer_stride"][0], shown["page_stride"][0]) == ("10240", "81920")  # 8 layers
    assert "layer 1  │ K  +10240" in output
    assert "V  +12288" in output  # behind the K block
    assert "one K block, 2048 elements, 128 a head" in output
    assert "one V block, 8192 elements, 512 a head" in output
    (made,) = values(*FOLDED)["layouts"]
    assert (made["kv_format"], made["k_dim"], made["bytes_per_token"]) == ("folded", 128, 8 * 640 * 2)
    split = values("--no-probe", "--geometry", "12b-global")["layouts"][0]
    assert "kv_format" not in split
    assert "k_dim" not in split


def test_elements_of_a_folded_pool_both_ways() -> None:
    at = invoke(*FOLDED, "--at", "page=2,layer=1,kv=k,slot=3,head=0,dim=64").stdout
    offset = 2 * 81920 + 10240 + 3 * 128 + 64
    assert f"dim=64 (column 256 of the head): element offset {offset}, byte offset {2 * offset}" in at
    assert invoke(*FOLDED, "--offset", str(offset)).stdout == at
    v_offset = 10240 + 2048 + 512 + 5
    answer = invoke(*FOLDED, "--offset", str(v_offset)).stdout
    assert answer == f"page=0,layer=1,kv=v,slot=1,head=0,dim=5: element offset {v_offset}, byte offset {2 * v_offset}\n"
    with pytest.raises(UsageError, match="dim must be from 0 to 127 in this layout, got 128"):
        invoke(*FOLDED, "--at", "page=2,layer=1,kv=k,slot=3,head=0,dim=128")


def test_a_record_of_a_folded_layout_is_held_against_the_format_that_is_asked_for(tmp_path: Path) -> None:
    record = tmp_path / "folded.json"
    assert invoke(*FOLDED, "--num-pages", "3", "--json", str(record)).exit_code == 0
    same = invoke(*FOLDED, "--check", str(record))
    assert (same.exit_code, "wrong" in same.stdout) == (0, False)
    assert "agree with 12b-global, folded, page size 16" in same.stdout
    split = invoke("--geometry", "12b-global", "--check", str(record))
    assert split.exit_code == 1
    assert "wrong kv_format: got folded, want split" in split.stdout
    assert "wrong k_dim: got 128, want 512" in split.stdout
    stated = tmp_path / "split.json"
    stated.write_text(json.dumps({"kv_block_len": 8192, "slot_stride": 512}))
    found = invoke(*FOLDED, "--check", str(stated)).stdout
    assert "wrong kv_block_len: got 8192, want 2048 of K and 8192 of V" in found
    assert "wrong slot_stride: got 512, want 128 of K and 512 of V" in found
    stated.write_text(json.dumps({"kv_format": "rotated"}))
    with pytest.raises(UsageError, match=r'kv_format must be split or folded, not "rotated"'):
        invoke(*FOLDED, "--check", str(stated))


def test_the_folded_format_of_a_model_is_that_of_the_families_that_have_it() -> None:
    arguments = ("--no-probe", "--geometry", "12b", "--context", "4096", "--kv-format", "folded")
    (pools,) = values(*arguments)["pools"]
    assert "kv_format" not in pools["local"]
    assert (pools["global"]["kv_format"], pools["global"]["page_bytes"]) == ("folded", 163840)
    for name in ("12b-local", "e2b"):
        with pytest.raises(UsageError, match="has no folded format of K and V: its V is not made of raw K"):
            invoke("--geometry", name, "--kv-format", "folded")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--context", "8192", "--at", "page=1,layer=99,kv=k,slot=0,head=0,dim=0"], "layer"),
        (["--context", "8192", "--check", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_a_wrong_word_leaves_nothing_half_shown(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["layout", "--no-probe", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
