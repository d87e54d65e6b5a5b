"""Decode for sm_90 on the emulated device: the portable kernel's cases are green, and each fault in it is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decode_hopper_faults import FAULTS, GLOBAL, LOCAL, Fault
from seeding import seed
from smoke_helper import chosen, smoke

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel

KERNELS = {
    (at, form, folded): {
        f"paged_decode_hopper_{folded and 'folded_'}{part}hd{head_dim}_heads{heads}" for heads in (8, 16)
    }
    for at, head_dim, folded in ((LOCAL, 256, ""), (GLOBAL, 512, ""), (GLOBAL, 512, "folded/"))
    for form, part in (("decode", ""), ("decode-split", "split_"))
}
CASES = {
    "decode": ("ragged", "needle/*", "companions", "group/*", "page-size/48", "page-size/256", "scores/to-80",
               "padding/poisoned-page", "plan/refilled-smaller", "pages/permuted"),
    "decode-split": ("ragged", "companions", "group/*", "page-size/48", "splits/112-in-clusters"),
}  # fmt: skip
FOLDED_CASES = {
    "decode": ("ragged", "group/8", "page-size/256"),
    "decode-split": ("ragged", "group/8", "splits/112-in-clusters"),
}


def _smoke(directory: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    options = ("--geometry", "12b-local,12b-global", "--device", "emulated:sm_90", "--variant", "sm_90a,portable")
    code, record = smoke(directory / "run.json", *options, *arguments)
    return code, record["cases"]


@pytest.mark.parametrize(("at", "form", "folded"), KERNELS)
def test_the_cases_of_the_portable_kernel_are_green(at: str, form: str, folded: str, tmp_path: Path) -> None:
    options, names = (("--kv-format", "folded"), FOLDED_CASES[form]) if folded else ((), CASES[form])
    code, results = _smoke(tmp_path, *options, *chosen(f"{at}/{form}/{folded}{name}" for name in names))
    assert code == 0
    assert KERNELS[at, form, folded] <= {name for case in results for name in case["kernels"]}
    assert all(name.startswith(("paged_decode_hopper", "merge_splits_after")) for case in results
               for name in case["kernels"])  # fmt: skip


def test_pages_that_a_copy_does_not_divide_take_the_portable_kernel(tmp_path: Path) -> None:
    cases = tuple(f"{LOCAL}/decode/page-size/{size}" for size in (1, 3, 100))
    code, results = _smoke(tmp_path, *chosen(cases))
    assert code == 0
    assert {name for case in results for name in case["kernels"]} == {"paged_decode_hd256_groups4"}


@pytest.mark.seeded_faults
@pytest.mark.parametrize("fault", [one for one in FAULTS if one.quick_cases], ids=lambda fault: fault.name)
def test_a_fault_turns_its_cases_red(fault: Fault, tmp_path: Path) -> None:
    cases = fault.quick_cases
    kernels = seed(fault.overlay(tmp_path), (), cases, "sm_90a,portable")
    code, results = _smoke(tmp_path, "--kernels", str(kernels), *fault.options, *chosen(cases))
    assert code == 1
    assert {case["id"] for case in results if case["status"] == "failed"} == set(cases)


def test_the_serving_loop_launches_decode_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[str, bool]] = set()
    launch = EmulatedDevice.launch

    def noted(self: EmulatedDevice, kernel: LoadedKernel, request: Launch) -> None:
        launched.add((kernel.name, request.overlap))
        launch(self, kernel, request)

    monkeypatch.setattr(EmulatedDevice, "launch", noted)
    cases = chosen(f"serve/12b-global/interleaved{name}" for name in ("", "/page16"))
    code, _ = _smoke(tmp_path, *cases)
    assert code == 0
    ways: dict[str, set[bool]] = {}
    for name, overlap in launched:
        ways.setdefault(name, set()).add(overlap)
    both = {name for name, found in ways.items() if len(found) == 2}
    assert both == {"paged_decode_hopper_hd512_heads8", "paged_decode_hopper_split_hd512_heads8"}
    assert not any(True in found for name, found in ways.items() if name not in both)
    assert {"paged_decode_hd512_groups4", "paged_decode_split_hd512_groups3"} <= set(ways)
