"""How many thread blocks a card holds at a time: those that may wait for each other.

Limits of one multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; their
number: NVIDIA's data sheets of A100, A40, L40S, H200, B200 and RTX PRO 6000. PTX does not say how many registers a
thread will have, so those bound nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 1024
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Card:
    """Multiprocessors, and the threads, blocks and shared bytes that each of them holds."""

    multiprocessors: int
    threads: int
    blocks: int
    shared_bytes: int


CARDS = {
    "sm_80": Card(108, 2048, 32, 164 * _KIB),
    "sm_86": Card(84, 1536, 16, 100 * _KIB),
    "sm_89": Card(142, 1536, 24, 100 * _KIB),
    "sm_90": Card(132, 2048, 32, 228 * _KIB),
    "sm_100": Card(148, 2048, 32, 228 * _KIB),
    "sm_120": Card(188, 1536, 24, 100 * _KIB),
}


def resident_blocks(target: str, threads: int, shared_bytes: int) -> int:
    """Blocks of so many threads and shared bytes on the card of a PTX target, at least one."""
    number = "".join(character for character in target.split(",")[0] if character.isdigit())
    card = CARDS.get(f"sm_{number}", CARDS["sm_90"])
    whole_warps = -(-threads // 32) * 32
    by_shared = card.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES)
    return max(1, card.multiprocessors * min(card.threads // whole_warps, card.blocks, by_shared))


def chunk_blocks(threads: int, chunk_threads: int) -> int:
    """Blocks of so many threads that are executed together, at least one."""
    return max(1, chunk_threads // (-(-threads // 32) * 32))
