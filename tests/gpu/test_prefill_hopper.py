"""The prefill kernels of compute capability 9.0, through smoke's own cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.clusters import TILE_KEYS
from g4kv_cli.entries.table import kernel_variants
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import FOLDED

pytestmark = pytest.mark.gpu
HOPPER = [kernel.symbol for kernel in kernel_variants().values() if kernel.cluster_tiles or kernel.resident_tiles]


@pytest.mark.parametrize("symbol", HOPPER)
def test_prefill_of_every_geometry_that_it_serves(cuda_device: Device, symbol: str, tmp_path: Path) -> None:
    if cuda_device.info.arch != "sm_90a":
        pytest.skip(f"needs compute capability 9.0, this GPU is {cuda_device.info.arch}")
    family = "local" if "hd256" in symbol else "global"
    record = tmp_path / "run.json"
    code = g4kv(["smoke", "--device", "cuda", "--variant", f"{symbol},portable", "--json", str(record),
                 "--case", f"attention/*-{family}/prefill/*"])  # fmt: skip
    assert code == 0
    cases = json.loads(record.read_text())["cases"]
    folded = FOLDED in kernel_variants()[symbol].kv_formats
    large = [case for case in cases if "/large-tile/" in case["id"] and (f"/{FOLDED}/" in case["id"]) == folded]
    table = gate_cases(list(GEOMETRIES.values()), whole=True)
    pages = {case.id: case.page_size for case in table if isinstance(case, AttentionCase)}
    served = [case for case in large if pages[case["id"]] % TILE_KEYS == 0]
    assert served
    assert all(symbol in case["kernels"] for case in served)
    assert not any(symbol in case["kernels"] for case in large if case not in served)
