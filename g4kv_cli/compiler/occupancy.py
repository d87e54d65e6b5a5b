"""How many blocks of a kernel an SM can hold, and what keeps it from more.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers are given out to warps
in units of 256, shared memory in units of 128 bytes, and each block has 1 KiB of it taken by the system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

WARP_THREADS = 32
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256
SHARED_UNIT_BYTES = 128
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class SmLimits:
    """One SM: resident threads and blocks, shared bytes in all and for a single block."""

    threads: int
    blocks: int
    shared_bytes: int
    shared_bytes_per_block: int


_KIB = 1024
SM_LIMITS: Mapping[str, SmLimits] = MappingProxyType(
    {
        "sm_80": SmLimits(2048, 32, 164 * _KIB, 163 * _KIB),
        "sm_86": SmLimits(1536, 16, 100 * _KIB, 99 * _KIB),
        "sm_89": SmLimits(1536, 24, 100 * _KIB, 99 * _KIB),
        "sm_90a": SmLimits(2048, 32, 228 * _KIB, 227 * _KIB),
        "sm_100a": SmLimits(2048, 32, 228 * _KIB, 227 * _KIB),
        "sm_120": SmLimits(1536, 24, 100 * _KIB, 99 * _KIB),
    }
)
"""The archs that the kernels are made for."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """``blocks`` an SM holds, ``share`` of its warps, and the resource that bounds it (``does not fit``: 0 blocks)."""

    blocks: int
    share: float
    bound: str


def occupancy(limits: SmLimits, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The bound for blocks of ``threads`` threads; ``shared_bytes`` static and dynamic together."""
    if shared_bytes > limits.shared_bytes_per_block:
        return Occupancy(0, 0.0, "does not fit")
    warps = -(-threads // WARP_THREADS)
    warp_registers = -(-max(registers, 1) * WARP_THREADS // REGISTER_UNIT) * REGISTER_UNIT
    block_shared = -(-(shared_bytes + RESERVED_SHARED_BYTES) // SHARED_UNIT_BYTES) * SHARED_UNIT_BYTES
    bounds = {
        "registers": (REGISTERS_PER_SM // warp_registers) // warps,
        "shared memory": limits.shared_bytes // block_shared,
        "threads": limits.threads // (warps * WARP_THREADS),
        "blocks": limits.blocks,
    }
    bound = min(bounds, key=lambda name: bounds[name])
    blocks = bounds[bound]
    if blocks == 0:
        return Occupancy(0, 0.0, "does not fit")
    return Occupancy(blocks, blocks * warps * WARP_THREADS / limits.threads, bound)
