"""``g4kv bench --workload`` and ``--shape``: a batch of one's own as a cell of the decode-form and prefill tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_helper import FakeCuda, fake_cuda, invoke
from click.testing import CliRunner
from seeding import seed

from g4kv_cli.bench import attention_runs
from g4kv_cli.commands.bench import bench
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import read_bench_record

pytestmark = pytest.mark.usefixtures("forms_a_b_c")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    return fake_cuda(monkeypatch, tmp_path)


RAGGED: dict[str, Any] = {
    "workload": "ragged",
    "geometry": "12b-local",
    "splits": [2],
    "padding": 1,
    "num_pages": 120,
    "requests": [{"kv_len": 1200}, {"kv_len": 33, "pages": [77, 3, 4]}, {"kv_len": 5, "count": 2}],
}


def test_a_workload_is_a_cell_of_the_decode_forms(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ragged.json").write_text(json.dumps(RAGGED))
    plans = []
    real = attention_runs.PrefillPagedPlan.batch

    def noted(device: Any, requests: Any, **shape: Any) -> Any:
        plans.append((list(requests), shape))
        return real(device, requests, **shape)

    monkeypatch.setattr(attention_runs.PrefillPagedPlan, "batch", noted)
    result = invoke("--workload", "ragged.json", "--json", "run.json")
    assert result.return_value == 0, result.stdout
    record = read_bench_record(Path("run.json"), "--from")
    (shape,) = record.shapes
    assert shape.id == "decode/12b-local@tp8/ragged"
    assert shape.requests == ((1200, 1), (33, 1), (5, 1), (5, 1))
    assert (shape.batch, shape.tokens, shape.kv_len, shape.visible_keys) == (5, 1, 1200, 1024)
    # Two query heads on one KV head of 256: visible keys 1024 + 33 + 5 + 5 and the padding's one, K and V in bf16.
    row = 5 * 2 * 256 * 2
    assert shape.read_bytes == 2 * (1024 + 33 + 5 + 5 + 1) * 256 * 2 + row
    assert shape.write_bytes == row
    assert shape.flops == 4 * 256 * 2 * (1024 + 33 + 5 + 5 + 1)
    assert {item.configuration: item.status for item in record.measurements} == dict.fromkeys(
        ("a", "b", "c2"), "measured"
    )
    assert {item.checked_rows for item in record.measurements} == {4}
    requests, how = plans[0]
    assert [(one.start_pos, one.q_len, one.page_origin) for one in requests] == [
        (1199, 1, 10), (32, 1, 0), (4, 1, 0), (4, 1, 0), (0, 1, 0)
    ]  # fmt: skip
    assert tuple(requests[1].page_indices) == (77, 3, 4)
    assert how["padding_page"] == 0
    assert record.settings["asked"]["workload"] == "ragged"
    assert record.settings["asked"]["on"][0]["name"] == "12b-local@tp8"
    # The same as data, and a comparison of two such runs.
    assert invoke("--workload", "ragged.json", "--json", "again.json", "--quiet").return_value == 0
    compared = CliRunner().invoke(bench, ["--compare", "run.json", "again.json"], standalone_mode=False)
    assert compared.return_value == 0, compared.stdout
    assert device._allocations == []


def test_a_wrong_row_of_a_ragged_batch_is_found(device: FakeCuda, tmp_path: Path) -> None:
    """Who takes every request for as long as the first is wrong in all others."""
    kernels = seed(tmp_path / "k", (("attention_tile.cuh", "p.kv_lens[request]", "p.kv_lens[0]"),))
    values = {**RAGGED, "padding": 0, "requests": [{"kv_len": 20}, {"kv_len": 33}]}
    Path("ragged.json").write_text(json.dumps(values))
    result = invoke("--workload", "ragged.json", "--kernels", str(kernels), "--json", "run.json")
    assert result.return_value == 1
    record = read_bench_record(Path("run.json"), "--from")
    wrong = [item for item in record.measurements if item.status == "wrong"]
    assert wrong
    assert all("first at request 1, token 0" in item.reason for item in wrong)


def test_one_line_is_a_cell_of_prefill(device: FakeCuda) -> None:
    assert invoke("--shape", "kv=70 q=8 window=40", "--json", "run.json").return_value == 0
    record = read_bench_record(Path("run.json"), "--from")
    assert [shape.kind for shape in record.shapes] == ["prefill"]
    assert {item.configuration: item.status for item in record.measurements} == {
        "tile16": "measured", "tile64": "measured"
    }  # fmt: skip
    assert {item.checked_rows for item in record.measurements} == {6}
    # Keys before the window count for nobody: 40 for the last, 47 in all, and 8 queries of 40 keys.
    (shape,) = record.shapes
    assert (shape.visible_keys, shape.flops) == (47, 4 * 256 * 2 * 8 * 40)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prep", "--shape", "kv=9"), "prep does not apply to --shape, which is one batch of requests"),
        (("--workload", "x.json", "--kv-len", "4"), "--kv-len does not apply to --workload"),
        (("--shape", "kv=9", "--peer", "torch"), "--peer does not apply to --shape"),
        (("--shape", "kv=9", "--dispatch", "x"), "--dispatch does not apply to --shape"),
        (("--shape", "kv=9", "--workload", "x"), "--workload and --shape both say which requests to run"),
        (("--shape", "kv=9", "--list-peers"), "--shape does not apply to --list-peers"),
        (("--shape", "kv=9 scale=2"), "the bench runs attention at sm_scale 1.0: leave"),
    ],
)
def test_what_a_batch_of_ones_own_does_not_take(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(bench, list(arguments), standalone_mode=False, catch_exceptions=False)
