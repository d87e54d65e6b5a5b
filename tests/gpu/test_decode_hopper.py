"""Decode in thread block clusters on a GPU that has them: it runs, it is right, each fault but a race is seen in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decode_hopper_faults import FAULTS, Fault

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.run import run_attention_case
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.device.cuda import CudaDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.entries.clusters import cluster_blocks
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _sm_90(cuda_device: CudaDevice) -> None:
    if cuda_device.info.arch.rstrip("af") != "sm_90":
        pytest.skip(f"needs a GPU of sm_90, this one is {cuda_device.info.arch}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_turns_its_cases_red(fault: Fault, tmp_path: Path) -> None:
    if fault.on_gpu == "luck":
        pytest.skip("a race, which a GPU shows or does not: the emulated device judges it (tests/emulated)")
    record = tmp_path / "smoke.json"
    chosen = [word for case in fault.cases for word in ("--case", case)]
    arguments = ["smoke", "--geometry", "12b-local,12b-global", "--device", "cuda:0", "--json", str(record)]
    limit = ["--case-timeout", "10"] if fault.on_gpu == "error" else []
    code = g4kv([*arguments, *limit, "--kernels", str(fault.overlay(tmp_path)), *fault.options, *chosen])
    assert code == {"failed": 1, "error": 2}[fault.on_gpu]
    results = json.loads(record.read_text(encoding="utf-8"))["cases"]
    assert {result["id"] for result in results if result["status"] == fault.on_gpu} == set(fault.cases)


class _Watched(CudaDevice):
    """Notes the clusters that were launched."""

    def __init__(self) -> None:
        super().__init__(0, "a test")
        self.clusters: dict[str, set[int]] = {}

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.clusters.setdefault(kernel.name, set()).add(launch.cluster[0])
        super().launch(kernel, launch)


def _cases(geometry: str, kv_format: KvFormat, text: str) -> list[AttentionCase]:
    return [case for case in attention_cases(GEOMETRIES[geometry], seed=1, kv_format=kv_format) if text in case.id]


@pytest.mark.parametrize("variant", ["sm_90a", "portable"])
@pytest.mark.parametrize(
    ("geometry", "kv_format"),
    [
        ("12b-local", SPLIT),
        ("12b-global", SPLIT),
        ("31b-global", SPLIT),
        ("12b-global", FOLDED),
        ("31b-global", FOLDED),
    ],
)
def test_both_paths_pass_where_they_are_asked_for(geometry: str, kv_format: KvFormat, variant: str) -> None:
    device = _Watched()
    library = KernelLibrary(device, variant=variant)
    texts = ("/ragged", "kv-sweep", "long-history", "splits/112-in-clusters")
    named = [case for text in texts for case in _cases(geometry, kv_format, text)]
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
