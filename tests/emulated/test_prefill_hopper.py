"""The warpgroup kernels of prefill on the emulated device, whole and with one fault each.

The emulated device has no clusters, so what runs here is the variant whose blocks stand alone; the one in clusters has
the same source and runs on a GPU (tests/gpu).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.main import run as g4kv

BODY, WGMMA = "prefill_hopper_body.cuh", "wgmma.cuh"
CASES = "attention/31b-global/prefill"
ALONE_512 = "batch_prefill_paged_hd512_tile64_cluster1"


def _smoke(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    record = directory / "run.json"
    code = g4kv(
        [
            "smoke",
            "--device",
            "emulated",
            "--variant",
            "sm_90a,portable",
            "--jobs",
            "1",
            "--json",
            str(record),
            *arguments,
        ]
    )
    return code, json.loads(record.read_text())


def _chosen(*cases: str) -> list[str]:
    return [argument for case in cases for argument in ("--case", f"{CASES}/{case}")]


WHOLE = (
    "large-tile/needle/causal",
    "large-tile/companions",
    "large-tile/group/5",
    "large-tile/group/16",
    "scores/to-80/long",
    "page-size/48",
)


def test_the_cases_of_the_portable_kernel_are_green(tmp_path: Path) -> None:
    code, record = _smoke(tmp_path, *_chosen(*WHOLE))
    assert code == 0
    assert {case["id"]: case["kernels"] for case in record["cases"]} == {
        f"{CASES}/{case}": [ALONE_512] for case in WHOLE
    }


@pytest.mark.parametrize("page_size", [1, 3, 100])
def test_pages_that_a_box_does_not_divide_take_the_portable_kernel(page_size: int, tmp_path: Path) -> None:
    code, record = _smoke(tmp_path, *_chosen(f"page-size/{page_size}"))
    assert code == 0
    (case,) = record["cases"]
    assert case["kernels"]
    assert ALONE_512 not in case["kernels"]


@dataclass(frozen=True)
class Fault:
    """One replacement of text; ``case`` goes red and ``words`` stand in what is said."""

    name: str
    source: str
    old: str
    new: str
    case: str
    words: str = "out"


_KEYS_WAIT = "barrier_wait(shared + Shape::kKeysThere + ring.stage * 8, ring.parity);"
_VALUES_WAIT = "barrier_wait(shared + Shape::kValuesThere + stage * 8, half);"
_WEIGHTS_WAIT = "barrier_wait(shared + Shape::kWeightsThere + half * 8, block & 1);"
_USED_WAIT = "barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);"

FAULTS = (
    Fault("K not waited for", BODY, _KEYS_WAIT, "", "large-tile/group/2", "FAILED"),
    Fault("V not waited for", BODY, _VALUES_WAIT, "", "page-size/64", "FAILED"),
    Fault("weights not waited for", BODY, _WEIGHTS_WAIT, "", "large-tile/group/2", "FAILED"),
    Fault("a stage filled before it was used", BODY, _USED_WAIT, "", "page-size/64", "FAILED"),
    Fault("K's bytes expected by half", BODY, "if (lane == 0) barrier_expect(there, Shape::kStageBytes);",
          "if (lane == 0) barrier_expect(there, Shape::kStageBytes / 2);", "large-tile/group/2", "FAILED"),
    Fault("queries not fenced", BODY, "  wait_copies<0>();\n  fence_async_copies();\n", "  wait_copies<0>();\n",
          "large-tile/group/2", "FAILED"),
    Fault("one key too many behind the query", BODY, "newest[i]), newest[i], first_key",
          "newest[i]), newest[i] + 1, first_key", "large-tile/needle/causal"),
    Fault("one key too few", BODY, "newest[i]), newest[i], first_key", "newest[i]), newest[i] - 1, first_key",
          "large-tile/needle/causal"),
    Fault("no mask in a block whose last key all rows but the first see", BODY,
          "|| first_key + Shape::kKeys - 1 > common.newest", "|| first_key + Shape::kKeys - 2 > common.newest",
          "large-tile/needle/causal"),
    Fault("V behind the last key kept", BODY, "|| first_key + Shape::kHalfKeys > t.tile.end) {", ") {",
          "large-tile/group/2"),
    Fault("V cleared too soon", BODY, "if (key >= t.tile.begin && key < t.tile.end) continue;",
          "if (key >= t.tile.begin && key < t.tile.end - 1) continue;", "large-tile/needle/causal"),
    Fault("pages of the block before", BODY, "    place = next;\n  }\n}\n\n// V, a stage",
          "  }\n}\n\n// V, a stage", "page-size/64"),
    Fault("the page after", BODY, "place.page = pages[logical_page];",
          "place.page = pages[logical_page == last_key / p.layout.page_size ? logical_page : logical_page + 1];",
          "large-tile/ragged"),
    Fault("half of the output not rescaled", BODY, "rescale(out[1], factor0, factor1);", "", "page-size/64"),
    Fault("sums not rescaled", BODY, "sum[i] *= factor;", "", "page-size/64"),
    Fault("descriptor steps of 48 bytes", BODY, "multiply_rows_128<32, true>", "multiply_rows_128<48, true>",
          "large-tile/group/2"),
    Fault("column blocks of V one apart", BODY, "matrix_descriptor(values + stage * Shape::kStageBytes, "
          "Shape::kColumnBlockBytes);", "matrix_descriptor(values + stage * Shape::kStageBytes, "
          "2 * Shape::kColumnBlockBytes);", "large-tile/group/2"),
    Fault("another swizzle of Q", BODY, "swizzled<Shape::kBlockColumns>(row, chunk % 8)",
          "swizzled<Shape::kBlockColumns>(row + 1, chunk % 8) - 128", "large-tile/group/2"),
    Fault("rows behind the last stored", BODY, "    if (row < tile.num_rows) {\n      const uint4 packed",
          "    if (true) {\n      const uint4 packed", "large-tile/group/5", "FAILED"),
    Fault("log-sum-exp of the first row for both", BODY, "log_sum_exp(max[i], sum[i], p.scale_log2);",
          "log_sum_exp(max[0], sum[0], p.scale_log2);", "large-tile/group/2", "lse"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_turns_its_case_red(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (BUILT_IN_KERNELS_DIRECTORY / fault.source).read_text()
    assert text.count(fault.old) == 1
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / fault.source).write_text(text.replace(fault.old, fault.new))
    code, record = _smoke(tmp_path, "--kernels", str(kernels), *_chosen(fault.case))
    shown = capsys.readouterr().out
    assert code == 1, shown
    assert [case["status"] for case in record["cases"]] == ["failed"], shown
    assert fault.words in shown
