"""How many blocks are resident, by what bounds them."""

from __future__ import annotations

import pytest

from g4kv_cli.compiler.occupancy import SM_LIMITS
from g4kv_cli.device.emulated.residency import CARDS, resident_blocks
from g4kv_cli.device.emulated_device import ARCHS


@pytest.mark.parametrize(
    ("target", "threads", "shared_bytes", "blocks"),
    [
        ("sm_90", 1024, 0, 132 * 2),
        ("sm_90a", 32, 0, 132 * 32),
        ("sm_90", 33, 0, 132 * 32),
        ("sm_90", 128, 227 * 1024, 132),
        ("sm_90", 128, 56 * 1024, 132 * 4),
        ("sm_120, debug", 1024, 0, 188),
        ("sm_80", 96, 40 * 1024, 108 * 4),
    ],
)
def test_blocks_of_a_card(target: str, threads: int, shared_bytes: int, blocks: int) -> None:
    assert resident_blocks(target, threads, shared_bytes) == blocks


def test_the_cards_are_those_of_the_device_and_of_the_occupancy() -> None:
    assert {name: card.multiprocessors for name, card in CARDS.items()} == {
        name: arch.multiprocessors for name, arch in ARCHS.items()
    }
    for name, limits in SM_LIMITS.items():
        card = CARDS[name.rstrip("a")]
        assert (card.threads, card.blocks, card.shared_bytes) == (limits.threads, limits.blocks, limits.shared_bytes)
