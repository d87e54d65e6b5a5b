"""The attention cases on the emulated device, and their checks made to fail without touching a kernel."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smoke_helper import smoke

from g4kv_cli.cases.attention import run as attention_run
from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.pool import AttentionPool
from g4kv_cli.cases.attention.prepared import prepared
from g4kv_cli.cases.attention.run import run_attention_case
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.attention_request import SplitWorkspace, merge
from g4kv_cli.entries.contract import STRICT
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import entries
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import BF16, bits

TABLE = {case.id: case for case in attention_cases(GEOMETRIES["e2b-local"], seed=1)}


def _case(name: str) -> AttentionCase:
    return TABLE[f"attention/e2b-local/{name}"]


@pytest.mark.parametrize(("geometry", "count"), [("12b-global", 11), ("e4b-local", 6), ("31b-global", 11)])
def test_the_models_own_heads_in_every_form(geometry: str, count: int, tmp_path: Path) -> None:
    """Split rows in six cases; where the geometry has folded ones, in all but the one that is named in full."""
    code, record = smoke(tmp_path / "run.json", "--device", "emulated", "--case", f"attention/{geometry}/*/ragged",
                          "--case", f"attention/{geometry}/prefill/model-heads",
                          "--case", f"attention/{geometry}/*/forms-agree")  # fmt: skip
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) == count


@pytest.mark.parametrize("name", ["e2b-local", "12b-global"])
def test_a_card_with_little_shared_memory_runs_every_form_and_kind_of_case(name: str, tmp_path: Path) -> None:
    """sm_86 has 99 KiB a block: no tile of 64 at head_dim 512, fewer warps in decode. One case of each form and kind of
    keys and check, whatever the table holds."""
    listed = [case for case in attention_cases(GEOMETRIES[name], seed=1) if case.check != "graph"]
    listed.sort(key=lambda case: -sum(request.kv_len for request in case.requests))  # the cheapest of a kind stays
    kinds = {(case.form, case.cta_tile_q, case.kind, case.check): case.id for case in listed}
    chosen = [argument for case_id in kinds.values() for argument in ("--case", case_id)]
    serving = ("--case", f"serve/{name}/interleaved")
    code, record = smoke(tmp_path / "run.json", "--device", "emulated:sm_86", *chosen, *serving)
    assert code == 0, [case for case in record["cases"] if case["status"] != "passed"]
    assert record["summary"]["passed"] == len(record["cases"]) == len(kinds) + 1


@pytest.mark.parametrize("arch", ["sm_86", pytest.param("sm_89", marks=pytest.mark.more_archs), "sm_120"])
def test_forms_agree_on_cards_whose_kernels_differ(arch: str, tmp_path: Path) -> None:
    """Split decode has other warps there than decode: two right results, further apart than one limit."""
    for seed in ("1", "3"):
        code, record = smoke(tmp_path / "run.json", "--device", f"emulated:{arch}", "--seed", seed,
                              "--geometry", "12b-global,31b-global", "--case", "attention/*/forms-agree")  # fmt: skip
        assert code == 0, record["cases"]


@pytest.mark.parametrize("page_size", ["1", "256"])
def test_another_page_size(page_size: str, tmp_path: Path) -> None:
    code, record = smoke(tmp_path / "run.json", "--device", "emulated", "--page-size", page_size, "--geometry",
                          "e2b-local", "--case", "attention/*/ragged", "--case", "attention/*/page-size/*",
                          "--case", "attention/*/padding/*", "--case", "attention/*/window40/spread")  # fmt: skip
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) > 0


def test_the_output_bits_do_not_depend_on_the_form_of_the_call(tmp_path: Path) -> None:
    """Prefill's smallest tile at one token a request is the decode kernel: the same bits."""
    device = EmulatedDevice("sm_90")
    decode = _case("decode/companions")
    prefill = dataclasses.replace(decode, form="prefill", entry="batch_prefill_paged_window_hd256_into", check="oracle")
    library = KernelLibrary(device)
    digests = [
        run_attention_case(dataclasses.replace(case, check="oracle"), library, "").output_digest
        for case in (decode, prefill)
    ]
    assert digests[0] == digests[1] != ""


# --- what a GPU does differently, on a device that says it is one --------------------------------------------------


class _Graph:
    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.device: EmulatedDevice | None = None

    def replay(self) -> None:
        assert self.device is not None
        for kernel, launch in self.launches:
            EmulatedDevice.launch(self.device, kernel, launch)

    def close(self) -> None:
        self.launches.clear()


class _GraphDevice(EmulatedDevice):
    """Records launches while a graph is captured, and does not tell what was written; contents are made on the host."""

    compose = Device.compose

    def __init__(self) -> None:
        super().__init__("sm_80")  # whose kernels need no clusters: the emulated device has none
        self.info = dataclasses.replace(self.info, kind="cuda")
        self._graph: _Graph | None = None

    def launch(self, kernel: Any, launch: Any) -> None:
        if self._graph is None:
            super().launch(kernel, launch)
        else:
            self._graph.launches.append((kernel, launch))

    def written_ranges(self, array: Any) -> Any:
        return None

    @contextlib.contextmanager
    def capture(self) -> Iterator[_Graph]:
        self._graph = graph = _Graph()
        graph.device = self
        try:
            yield graph
        finally:
            self._graph = None


@pytest.mark.parametrize("form", ["decode", "decode-split"])
def test_a_replayed_graph_reads_the_updated_plan(form: str) -> None:
    result = run_attention_case(_case(f"{form}/plan/graph-replay"), KernelLibrary(_GraphDevice()), "")
    assert (result.status, result.reason, result.mismatches) == ("passed", "", ())


def test_a_graph_that_replays_the_old_plan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    update = PrefillPagedPlan.update

    def only_once(plan: PrefillPagedPlan, *arguments: Any, **options: Any) -> None:
        if plan.bounds is None:
            update(plan, *arguments, **options)

    monkeypatch.setattr(PrefillPagedPlan, "update", only_once)
    result = run_attention_case(_case("decode/plan/graph-replay"), KernelLibrary(_GraphDevice()), "")
    assert result.status == "failed"
    assert any("replayed graph" in mismatch.operation for mismatch in result.mismatches)


def test_on_the_emulated_device_a_graph_is_skipped_with_the_reason() -> None:
    result = run_attention_case(_case("decode/plan/graph-replay"), KernelLibrary(EmulatedDevice("sm_90")), "")
    assert (result.status, result.reason) == ("skipped", "CUDA graphs need a CUDA device")


# --- each check beside the oracle can fail -------------------------------------------------------------------------


@pytest.mark.parametrize("device", [EmulatedDevice, _GraphDevice])
def test_a_write_to_the_pool_is_seen(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = device()
    upload, launch = AttentionPool.upload, opened.launch
    pools: list[Any] = []

    def noted(self: AttentionPool, *arguments: Any) -> Any:
        pools.append(upload(self, *arguments))
        return pools[-1]

    def launch_and_write(kernel: Any, request: Any) -> None:
        launch(kernel, request)
        opened.write(pools[0].view((1,), offset_elems=5), np.zeros(1, pools[0].dtype))

    monkeypatch.setattr(AttentionPool, "upload", noted)
    opened.launch = launch_and_write
    if device is EmulatedDevice:  # a write of the host is no store of a kernel: say that it was one
        opened.written_ranges = lambda array: np.array([[10, 12]])
    result = run_attention_case(_case("decode/kv-len-one"), KernelLibrary(opened), "")
    assert result.status == "failed"
    assert [mismatch.operation for mismatch in result.mismatches] == ["pool after attention"]
    assert result.mismatches[0].first == {"page": 0, "layer": 0, "kv": 0, "slot": 0, "head": 0, "dim": 5}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode/companions", "out of request 1 alone"),
        ("decode/pages/permuted", "out with other pages"),
        ("prefill/large-tile/plan/refilled-smaller", "out of a plan refilled with less"),
        ("decode/forms-agree", "out of decode-split"),
    ],
)
def test_a_second_call_that_differs_is_seen(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = attention_run.Call.run, []

    def differs(self: attention_run.Call) -> attention_run.Outputs:
        outputs = run(self)
        calls.append(self)
        if len(calls) == 3 or (len(calls) == 2 and "permuted" in name):
            outputs.out[0] = -outputs.out[0]
        return outputs

    monkeypatch.setattr(attention_run.Call, "run", differs)
    result = run_attention_case(_case(name), KernelLibrary(EmulatedDevice("sm_90")), "")
    assert result.status == "failed"
    assert any(words in mismatch.operation for mismatch in result.mismatches), [m.operation for m in result.mismatches]


@pytest.mark.parametrize(
    ("name", "array", "at", "words"),
    [
        ("decode/kv-len-one", "out", 0, "out"),
        ("decode/kv-len-one", "lse", 0, "lse"),
        ("prefill/rows-behind-the-tokens", "out", -1, "out, rows behind the tokens"),
    ],
)
def test_one_wrong_row_is_seen(name: str, array: str, at: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attention_run.Call.run

    def wrong(self: attention_run.Call) -> attention_run.Outputs:
        outputs = run(self)
        getattr(outputs, array)[at] = 3.0
        return outputs

    monkeypatch.setattr(attention_run.Call, "run", wrong)
    result = run_attention_case(_case(name), KernelLibrary(EmulatedDevice("sm_90")), "")
    assert (result.status, [mismatch.operation for mismatch in result.mismatches]) == ("failed", [words])


def test_a_pool_is_poison_but_for_the_rows_of_its_requests() -> None:
    case, device = _case("decode/ragged"), EmulatedDevice("sm_90")
    tensors, _ = prepared(case, STRICT)
    held = bits(device.read(AttentionPool(case, tensors).upload(device)))
    assert int((held != 0xFFFF).sum()) == sum(rows.size for rows in (*tensors.k, *tensors.v))


@pytest.mark.parametrize("form", ["decode", "decode-split", "prefill/small-tile", "prefill/large-tile"])
def test_a_call_of_millions_of_rows_touches_its_ends_alone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wrong value there, or none, is seen."""
    case, device = _case(f"{form}/rows/past-int32"), EmulatedDevice("sm_90")
    assert run_attention_case(case, KernelLibrary(device), "").status == "passed"
    read = EmulatedDevice.read

    def with_last(value: float) -> Any:
        def changed(self: EmulatedDevice, array: Any) -> Any:
            values = read(self, array).copy()
            if array.label == "out" and array.offset_bytes >= array.allocation.nbytes // case.num_tokens * (
                case.num_tokens - 1
            ):
                values[:] = value
            return values

        return changed

    poison = np.uint16(0xFFFF).view(BF16)
    for value, words in ((1.0, "out"), (poison, "non-finite")):
        monkeypatch.setattr(EmulatedDevice, "read", with_last(value))
        result = run_attention_case(case, KernelLibrary(device), "")
        assert result.status == "failed"
        assert words in result.mismatches[0].operation
        assert result.mismatches[0].first["token"] == case.num_tokens - 1


@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.parametrize("maximum", [np.inf, np.nan])
def test_a_split_whose_scores_overflowed_shows_in_the_merged_result(head_dim: int, maximum: float) -> None:
    """The other split's result by itself would look right."""
    device = EmulatedDevice("sm_90")
    (entry,) = (one for one in entries() if one.operation == "merge" and one.head_dim == head_dim)
    results, maxima, sums = (
        np.ones((1, 1, 2, head_dim), np.float32),
        np.ones((1, 1, 2), np.float32),
        np.ones((1, 1, 2), np.float32),
    )
    results[..., 0, :], maxima[..., 0], sums[..., 0] = np.nan, maximum, np.nan
    space = SplitWorkspace(*(device.upload(values, "partial") for values in (results, maxima, sums)))
    out = device.upload(np.zeros((1, 1, head_dim), BF16), "out")
    merge(entry, KernelLibrary(device), workspace=space, num_splits=2, out=out, lse=None)
    assert np.isnan(device.read(out).astype(np.float32)).all()
