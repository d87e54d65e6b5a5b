"""Every seeded fault replaces text that is there, also those that a default run does not compile."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import decode_hopper_faults
import pytest
import test_attention_faults
import test_e2e_faults
import test_extreme_faults
import test_folded_faults
import test_prefill_hopper
import test_provider_folded
import test_provider_forms
import test_seeded_faults
from provider_helper import ENGINE
from seeding import edited

LISTS = {
    test_attention_faults: ("FAULTS",),
    test_e2e_faults: ("PREP_FAULTS", "ATTENTION_FAULTS"),
    test_extreme_faults: ("FAULTS",),
    test_folded_faults: ("FAULTS",),
    test_prefill_hopper: ("FAULTS",),
    test_seeded_faults: ("FAULTS",),
}


@pytest.mark.parametrize("module", LISTS, ids=lambda module: module.__name__)
def test_the_text_of_every_fault_is_there_once(module: ModuleType) -> None:
    faults = [fault for name in LISTS[module] for fault in getattr(module, name)]
    assert len(faults) >= 10
    for fault in faults:
        assert edited(fault.edits), fault.name


def test_so_is_that_of_faults_of_decode_for_9_0(tmp_path: Path) -> None:
    for number, fault in enumerate(decode_hopper_faults.FAULTS):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert list(fault.overlay(directory).iterdir())


def test_so_is_that_of_faults_between_pairs_of_tiles() -> None:
    for fault in test_prefill_hopper.FAULTS_BETWEEN_PAIRS:
        _, old, new = fault.values
        assert edited(test_prefill_hopper.edits_of(old, new, test_prefill_hopper.PAIRS)), fault.id


@pytest.mark.parametrize("module", [test_provider_folded, test_provider_forms], ids=lambda module: module.__name__)
def test_that_of_faults_of_the_example_engine_is_there(module: ModuleType) -> None:
    """Once or more often: engine_in replaces it wherever it stands."""
    assert len(module.FAULTS) >= 5
    for file, old, *_ in module.FAULTS:
        assert old in (ENGINE / file).read_text(), f"{file}: {old}"


def test_a_text_that_is_not_there_is_seen() -> None:
    with pytest.raises(AssertionError, match="holds 0 times: no such text"):
        edited((("bf16.cuh", "no such text", ""),))
