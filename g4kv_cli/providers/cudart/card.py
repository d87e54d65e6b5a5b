"""What the stand-in for libcudart says of the card that is emulated: device attributes and cudaDeviceProp."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g4kv_cli.device.emulated_device import EmulatedDevice

DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel has without opting in (CUDA C++ Programming Guide)."""
RESERVED_SHARED_BYTES = 1024
_RESIDENT = {(8, 6): (1536, 16), (8, 9): (1536, 24), (12, 0): (1536, 24)}
"""Threads and blocks of a multiprocessor by compute capability, where they are not 2048 and 32 (the same guide)."""
THREADS_OF_MULTIPROCESSOR, BLOCKS_OF_MULTIPROCESSOR = 39, 106  # cudaDeviceAttr
_LAYOUT_BYTES = {12: 1032, 13: 1008}
# cudaDeviceProp: the cudaDeviceAttr of each field, its form, and where it lies in CUDA 12's and CUDA 13's. What the
# emulated card has not (texture limits, mapped host memory, clocks, an L2 cache) is 0 there.
_FIELDS = (
    (8, "Q", 296, 296),  # sharedMemPerBlock
    (12, "i", 304, 304),  # regsPerBlock
    (10, "i", 308, 308),  # warpSize
    (1, "i", 320, 320),  # maxThreadsPerBlock
    *((2 + axis, "i", 324 + 4 * axis, 324 + 4 * axis) for axis in range(3)),  # maxThreadsDim
    *((5 + axis, "i", 336 + 4 * axis, 336 + 4 * axis) for axis in range(3)),  # maxGridSize
    (9, "Q", 352, 352),  # totalConstMem
    (75, "i", 360, 360),  # major
    (76, "i", 364, 364),  # minor
    (16, "i", 388, 384),  # multiProcessorCount
    (31, "i", 576, 560),  # concurrentKernels
    (41, "i", 604, 588),  # unifiedAddressing
    (THREADS_OF_MULTIPROCESSOR, "i", 624, 604),  # maxThreadsPerMultiProcessor
    (81, "Q", 640, 624),  # sharedMemPerMultiprocessor
    (82, "i", 648, 632),  # regsPerMultiprocessor
    (95, "i", 688, 668),  # cooperativeLaunch
    (97, "Q", 696, 672),  # sharedMemPerBlockOptin
    (BLOCKS_OF_MULTIPROCESSOR, "i", 712, 688),  # maxBlocksPerMultiProcessor
    (111, "Q", 720, 696),  # reservedSharedMemPerBlock
    (115, "i", 744, 720),  # memoryPoolsSupported
    (120, "i", 772, 748),  # clusterLaunch
)
_TOTAL_GLOBAL_MEMORY = 288


def compute_capability(device: EmulatedDevice) -> tuple[int, int]:
    """Major and minor of the card's arch: sm_90a has (9, 0)."""
    return divmod(int(re.sub(r"\D", "", device.info.arch)), 10)


def attributes_of(device: EmulatedDevice) -> dict[int, int]:
    """The device attributes that are known, by the numbers of cudaDeviceAttr."""
    limits, (major, minor) = device.limits, compute_capability(device)
    threads, blocks = _RESIDENT.get((major, minor), (2048, 32))
    return {
        1: limits.max_threads_per_block,
        2: 1024,  # max block x, y, z
        3: 1024,
        4: 64,
        **{5 + axis: extent for axis, extent in enumerate(limits.max_grid)},
        8: DEFAULT_SHARED_BYTES,
        9: 65536,  # constant memory
        10: 32,  # warp size
        12: 65536,  # registers of a block
        16: limits.multiprocessors,
        17: 0,  # a limit of kernels' time
        18: 0,  # integrated
        20: 0,  # the compute mode: the default one
        THREADS_OF_MULTIPROCESSOR: threads,
        31: 1,  # concurrent kernels
        41: 1,  # one address space with the host
        75: major,
        76: minor,
        78: 0,  # priorities of streams
        81: limits.max_shared_bytes_per_block + RESERVED_SHARED_BYTES,  # of a multiprocessor
        82: 65536,  # registers of a multiprocessor
        83: 0,  # managed memory
        88: 0,  # pageable memory of the host
        89: 0,  # the same managed
        95: 1,  # cooperative launches
        97: limits.max_shared_bytes_per_block,
        BLOCKS_OF_MULTIPROCESSOR: blocks,
        111: RESERVED_SHARED_BYTES,
        115: 1,  # memory pools
        120: int(major >= 9),  # clusters
    }


def properties_of(device: EmulatedDevice, layout: int) -> bytes:
    """cudaDeviceProp as CUDA 12 or CUDA 13 lays it out."""
    made, known = bytearray(_LAYOUT_BYTES[layout]), attributes_of(device)
    name = device.info.name.encode()[:255]
    made[: len(name)] = name
    struct.pack_into("<Q", made, _TOTAL_GLOBAL_MEMORY, device.limits.memory_bytes)
    for attribute, form, of_12, of_13 in _FIELDS:
        struct.pack_into(f"<{form}", made, of_12 if layout == 12 else of_13, known[attribute])
    return bytes(made)
