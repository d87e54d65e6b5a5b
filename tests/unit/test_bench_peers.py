"""Peers that are installed and still cannot run: each says what it lacks, as a cell that is not covered."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from g4kv_cli.bench import peers
from g4kv_cli.entries.provider import NotCovered

DECODE = "batch_decode_with_kv_cache_dtype_q_bf16_head_dim_qk_512"


class MissingJITCacheError(RuntimeError):
    """As FlashInfer 0.7 raises it with FLASHINFER_DISABLE_JIT: the module's name is in the spec alone."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(name=DECODE)
        super().__init__("JIT compilation is disabled, but the required module is not found in the JIT cache.")


def _make(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def make(*_: object) -> None:
        raise error

    module = cast("Any", ModuleType("fake_peers"))
    module.make_decode_tensor = make
    monkeypatch.setitem(sys.modules, "g4kv_cli.bench.peers.flashinfer_peers", module)
    monkeypatch.setattr(peers, "peer_status", lambda peer: peers.PeerStatus(peer, "0.7.4", ""))
    peers.make_runnable("peer:flashinfer-tc", cast("Any", None), cast("Any", None))


def test_a_module_that_was_not_built_ahead_is_not_covered_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotCovered, match=f"the module {DECODE} was not built ahead"):
        _make(monkeypatch, MissingJITCacheError())


def test_another_error_of_a_peer_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        _make(monkeypatch, RuntimeError("out of memory"))
    assert not isinstance(raised.value, NotCovered)
