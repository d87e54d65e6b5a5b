"""``--geometry FILE.toml`` from end to end: the documented example through smoke, reject, layout and bench's plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from seeding import seed
from smoke_helper import smoke

from g4kv_cli.main import run as g4kv

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "geometry.toml"
# A head_dim of the other family, K = V with a window, a rotation of 64 columns; groups of 5.
ODD = """\
model = "odd"
num_qo_heads = 10
max_positions = 65536

[local]
num_layers = 3
num_kv_heads = 2
head_dim = 512
window = 100
k_eq_v = true
rope_theta = 10000.0
rotary_dim = 64

[global]
num_layers = 2
num_kv_heads = 2
head_dim = 256
k_eq_v = false
rope_theta = 500000.0
"""


def test_the_documented_example(tmp_path: Path) -> None:
    chosen = ("prep/*/closed-form", "prep/*/serving/*", "attention/*/decode*/ragged", "trap/*/prefill/page-id-negative",
              "attention/*/decode/needle/window768", "serve/draft-local/interleaved")  # fmt: skip
    cases = [word for pattern in chosen for word in ("--case", pattern)]
    code, record = smoke(tmp_path / "run.json", "--geometry", str(EXAMPLE), *cases)
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) > 16
    assert {case["geometry"] for case in record["cases"]} == {"draft-local", "draft-global"}
    assert record["settings"]["geometries"]["draft-local"]["window"] == 768
    # The command that runs a case again names the file, and does.
    words = shlex.split(next(case["rerun"] for case in record["cases"] if "/ragged" in case["id"]))
    assert words[words.index("--geometry") + 1] == str(EXAMPLE)
    assert g4kv(words[1:]) == 0


def test_any_mix_of_head_dim_window_and_values(tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(ODD)
    chosen = ("prep/*/closed-form", "prep/*/batch_prefill/random/*", "attention/*/decode*/ragged",
              "attention/*/decode/needle/window100", "attention/*/small-tile/group/5")  # fmt: skip
    cases = [word for pattern in chosen for word in ("--case", pattern)]
    code, record = smoke(tmp_path / "run.json", "--geometry", str(file), *cases)
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) > 12
    entries = {case["entry"] for case in record["cases"]}
    assert "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into" in entries
    assert "batch_decode_paged_window_hd256_into" in entries


def test_a_record_of_another_geometry_of_the_same_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(ODD)
    chosen = ("--geometry", str(file), "--case", "prep/*/prefill/closed-form")
    assert smoke(tmp_path / "run.json", *chosen)[0] == 0
    assert smoke(tmp_path / "again.json", *chosen, "--same-bits-as", str(tmp_path / "run.json"))[0] == 0
    file.write_text(ODD.replace("num_kv_heads = 2", "num_kv_heads = 1"))
    assert smoke(tmp_path / "other.json", *chosen, "--same-bits-as", str(tmp_path / "run.json"))[0] == 2
    assert "its geometries are not those of the files here; make the record again" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()


def test_its_own_window_is_what_is_gated(tmp_path: Path) -> None:
    """A kernel whose window is a key too long, under a window that no built-in geometry has."""
    right = "max(0, position - tile.window_left)"
    edits = (("attention_tile.cuh", right, right.replace("left)", "left - 1)")),)
    kernels = seed(tmp_path / "kernels", edits, entries=["batch_decode_paged_window_hd256_into"])
    case = "attention/draft-local/decode/needle/window768"
    code, record = smoke(tmp_path / "run.json", "--geometry", str(EXAMPLE), "--kernels", str(kernels), "--case", case)
    assert code == 1
    assert record["cases"][0]["status"] == "failed"


def test_reject_and_bench_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = g4kv(["reject", "--device", "emulated", "--geometry", str(EXAMPLE), "--host-only", "-q",
                 "--json", str(tmp_path / "reject.json"),
                 "--case", "reject/*/gqa_group/*", "--case", "reject/*/page_coverage/*"])  # fmt: skip
    assert code == 0
    record = json.loads((tmp_path / "reject.json").read_text())
    assert {case["geometry"] for case in record["cases"]} == {"draft-local", "draft-global"}
    capsys.readouterr()
    assert g4kv(["bench", "all", "--geometry", f"{EXAMPLE}:global", "--preset", "full", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "decode/draft-global/batch1/kv65536" in shown
    assert "kv131072" not in shown  # past its positions
    assert g4kv(["layout", "--geometry", str(EXAMPLE), "--no-probe", "--context", "4096"]) == 0
    shown = capsys.readouterr().out
    assert "draft: 1 slot of up to 4096 tokens" in shown
    pools = [line.split()[:2] for line in shown[shown.index("draft: 1 slot") :].splitlines() if "draft-" in line]
    assert pools == [["draft-local", "20"], ["draft-global", "3"]]
