"""What a manifest's check says of names is what a call then has."""

from __future__ import annotations

import pytest

from g4kv_cli.cases.reject.entries import example_geometry
from g4kv_cli.cases.reject.request import RejectBench
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import CheckedRequest
from g4kv_cli.entries.table import entries
from g4kv_cli.model.pool_order import OWN_ORDER
from g4kv_cli.providers.scope import TOKEN_WORDS, addresses_of, names_of, scope_of


class Spy:
    """Launches nothing, and keeps the names of the request."""

    name, pool_order = "a spy", OWN_ORDER

    def contract_of(self, entry: str) -> Contract:
        return STRICT

    def launch(self, request: CheckedRequest) -> None:
        self.numbers = frozenset(scope_of(request, OWN_ORDER, frozenset(TOKEN_WORDS)))
        self.arrays = frozenset(addresses_of(request, request.arrays, {}, {}))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_names_that_are_known_are_those_of_a_call(entry: Entry) -> None:
    device, spy = open_device("emulated"), Spy()
    geometry = example_geometry(entry)
    assert geometry is not None
    RejectBench(KernelLibrary(device, provider=spy), entry, geometry, device).draft().call()
    assert names_of(entry) == (spy.numbers, spy.arrays)
    if entry.has_pool:
        sides = {f"{side}_stride_{axis}" for side in "kv" for axis in ("page", "layer", "slot", "head", "dim")}
        assert sides | {"stride_page", "stride_kv", "stride_dim"} <= spy.numbers
    device.close()
