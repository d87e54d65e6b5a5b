"""Decode in thread block clusters on a GPU that has them: it is what runs, it is right, and each fault in it is seen.

As in tests/emulated/test_attention_faults.py: exact replacements of text, run through ``g4kv smoke --kernels``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.run import run_attention_case
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.cuda import CudaDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.entries.clusters import cluster_blocks
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES

pytestmark = pytest.mark.gpu

BODY = "decode_hopper_body.cuh"
LOCAL, GLOBAL = "attention/12b-local", "attention/12b-global"


@pytest.fixture(autouse=True)
def _sm_90(cuda_device: CudaDevice) -> None:
    if cuda_device.info.arch.rstrip("af") != "sm_90":
        pytest.skip(f"needs a GPU of sm_90, this one is {cuda_device.info.arch}")


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in the kernels' body; each of ``cases`` goes red."""

    name: str
    old: str
    new: str
    cases: tuple[str, ...]


FAULTS = (
    Fault(
        "values not waited for",
        "    barrier_wait(values_full(stage), parity);\n",
        "",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "scores read before the other warps wrote them",
        "          make_float4(scores[0], scores[1], scores[2], scores[3]);\n      sync_team<kTeamWarps>(team);",
        "          make_float4(scores[0], scores[1], scores[2], scores[3]);",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "window one less",
        "max(0, kv_len - 1 - p.window_left);",
        "max(0, kv_len - p.window_left);",
        (f"{LOCAL}/decode/needle/window40", f"{LOCAL}/decode-split/needle/window333"),
    ),
    Fault(
        "one key past the last",
        "  work.end = kv_len;",
        "  work.end = kv_len + (kv_len % 16 != 0);",
        (f"{LOCAL}/decode/needle/window40", f"{GLOBAL}/decode/needle/causal"),
    ),
    Fault(
        "stale page",
        "    newest.page = __shfl_sync(kAllLanes, places.page, asked % kWarpSize);\n",
        "",
        (f"{LOCAL}/decode/page-size/64",),
    ),
    Fault(
        "the first 32 pages again",
        "      places = later_places;\n",
        "",
        tuple(f"{at}/{form}/long-history" for at in (LOCAL, GLOBAL) for form in ("decode", "decode-split")),
    ),
    Fault(
        "origin left out",
        "work.page_row = p.page_indptr[work.request] - p.page_origins[work.request];",
        "work.page_row = p.page_indptr[work.request];",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "slot of the page's first tile",
        "    place.slot = (tile - logical_page * work.tiles_per_page) * kClusterTileKeys;",
        "    place.slot = 0;",
        (f"{LOCAL}/decode/page-size/64", f"{GLOBAL}/decode/page-size/64"),
    ),
    Fault(
        "first layer",
        "p.layer * 2 + is_value",
        "is_value",
        (f"{LOCAL}/decode/ragged", f"{GLOBAL}/decode-split/ragged"),
    ),
    Fault(
        "unwritten slots weighed by zero",
        "*reinterpret_cast<uint4*>(shared + at + lane % 8 * kChunkBytes) = make_uint4(0u, 0u, 0u, 0u);",
        "",
        (f"{LOCAL}/decode/needle/window40", f"{GLOBAL}/decode/ragged"),
    ),
    Fault(
        "the other head's weight in the merge",
        "__shfl_sync(kAllLanes, factor, 16 + source);",
        "__shfl_sync(kAllLanes, factor, source);",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "sum of one part",
        "    float sum = state.y * factor;",
        "    float sum = source == 0 ? state.y * factor : 0.0f;",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "last dims of the last block not written",
        "    if (own < own_pairs) store_item",
        "    if (own < own_pairs - (rank == ranks - 1)) store_item",
        (f"{LOCAL}/decode-split/needle/window333",),
    ),
    Fault(
        "one place for all clusters' partial results",
        "(row * p.num_splits + work.split) * kHeadDim + dim_pair * 2",
        "(row * p.num_splits) * kHeadDim + dim_pair * 2",
        (f"{LOCAL}/decode-split/kv-sweep/1-200/splits16",),
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_turns_its_cases_red(fault: Fault, tmp_path: Path) -> None:
    text = (BUILT_IN_KERNELS_DIRECTORY / BODY).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    overlay, record = tmp_path / "kernels", tmp_path / "smoke.json"
    overlay.mkdir()
    (overlay / BODY).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    chosen = [word for case in fault.cases for word in ("--case", case)]
    arguments = ["smoke", "--geometry", "12b-local,12b-global", "--device", "cuda:0", "--kernels", str(overlay)]
    assert g4kv([*arguments, "--json", str(record), *chosen]) == 1
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    assert {result["id"] for result in results if result["status"] == "failed"} == set(fault.cases)


class _Watched(CudaDevice):
    """Notes the clusters that were launched."""

    def __init__(self) -> None:
        super().__init__(0, "a test")
        self.clusters: dict[str, set[int]] = {}

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.clusters.setdefault(kernel.name, set()).add(launch.cluster[0])
        super().launch(kernel, launch)


def _cases(geometry: str, text: str) -> list[AttentionCase]:
    return [case for case in attention_cases(GEOMETRIES[geometry], seed=1) if text in case.id]


@pytest.mark.parametrize("variant", ["sm_90a", "portable"])
@pytest.mark.parametrize("geometry", ["12b-local", "12b-global", "31b-global"])
def test_both_paths_pass_where_they_are_asked_for(geometry: str, variant: str) -> None:
    device = _Watched()
    library = KernelLibrary(device, variant=variant)
    named = (*_cases(geometry, "/ragged"), *_cases(geometry, "kv-sweep"), *_cases(geometry, "long-history"))
    cases = [case for case in named if case.form != "prefill"]
    for case in cases:
        result = run_attention_case(case, library, "")
        assert (result.status, result.reason) == ("passed", ""), case.id
    in_clusters = {name for name in device.clusters if "hopper" in name}
    if variant == "portable":
        assert not in_clusters
    else:
        assert in_clusters
        assert not any(name.startswith("paged_decode") for name in set(device.clusters) - in_clusters)
        sizes = set().union(*(device.clusters[name] for name in in_clusters))
        assert sizes == {cluster_blocks(case.num_splits, 8) for case in cases}
    device.close()
