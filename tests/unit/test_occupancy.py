"""Resident blocks against numbers worked out by hand from the published limits."""

from __future__ import annotations

import pytest

from g4kv_cli.compiler.occupancy import SM_LIMITS, Occupancy, occupancy


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks", "share", "bound"),
    [
        # 32 registers x 32 threads = 1024 a warp, 64 warps: 2048 threads. Registers and threads tie; registers first.
        ("sm_90a", 256, 32, 0, 8, 1.0, "registers"),
        ("sm_90a", 256, 16, 0, 8, 1.0, "threads"),
        # 33 registers are given out as 40 x 32 = 1280 a warp (units of 256): 51 warps, 6 blocks of 8.
        ("sm_90a", 256, 33, 0, 6, 0.75, "registers"),
        # 233472 / (74240 + 1024) = 3.1, but 254 registers leave 8 warps: 2 blocks of 4.
        ("sm_90a", 128, 254, 74240, 2, 0.125, "registers"),
        # 102400 / (74240 + 1024) = 1.4.
        ("sm_86", 128, 254, 74240, 1, 4 / 48, "shared memory"),
        ("sm_86", 128, 254, 102400, 0, 0.0, "does not fit"),
        # One warp a block: 32 blocks at most on sm_90, 16 on sm_86, 24 on sm_89.
        ("sm_90a", 32, 16, 0, 32, 0.5, "blocks"),
        ("sm_86", 32, 16, 0, 16, 1 / 3, "blocks"),
        ("sm_89", 32, 16, 0, 24, 0.5, "blocks"),
        # 100 + 1024 bytes are given out as 1152: 202 blocks would fit, threads bound it.
        ("sm_90a", 1024, 32, 100, 2, 1.0, "registers"),
    ],
)
def test_blocks(
    arch: str, threads: int, registers: int, shared_bytes: int, blocks: int, share: float, bound: str
) -> None:
    found = occupancy(SM_LIMITS[arch], threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert found == Occupancy(blocks, pytest.approx(share), bound)
