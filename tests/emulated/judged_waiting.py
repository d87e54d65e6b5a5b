"""Programs whose threads wait in loops for others: locks, flags, look-back, barriers of a grid."""

from __future__ import annotations

import numpy as np
from judged_programs import GRID_BARRIER, LOCK, LOOK_BACK, ORDERED, VOLATILE, Program, each, filled, scan_of

SPINNING = (
    Program(
        "spin lock between lanes",
        "lock(aux); V(out) = V(out) + 1; unlock(aux);",
        1,
        32,
        VOLATILE + LOCK,
        filled(lambda grid, block: block - 1),
    ),
    Program(
        "spin lock between lanes, released inside the loop",
        """
  bool done = false;
  while (!done) {
    if (atomicCAS(aux, 0, 1) == 0) { __threadfence(); V(out) = V(out) + 1; __threadfence(); atomicExch(aux, 0);
                                     done = true; }
  }""",
        1,
        32,
        VOLATILE,
        filled(lambda grid, block: block - 1),
    ),
    Program(
        "spin lock between warps",
        "if (t % 32 == 0) { lock(aux); out[0] = out[0] + 1; unlock(aux); }",
        1,
        256,
        LOCK,
        filled(lambda grid, block: block // 32 - 1),
    ),
    Program(
        "spin lock of all threads of all blocks",
        "lock(aux); out[0] = out[0] + 1; unlock(aux);",
        3,
        40,
        LOCK,
        filled(lambda grid, block: grid * block - 1),
    ),
    Program(
        "spin lock between blocks",
        "if (t == 0) { lock(aux); out[0] = out[0] + 1; unlock(aux); }",
        40,
        64,
        LOCK,
        filled(lambda grid, block: grid - 1),
    ),
    Program(
        "shared spin lock of a block",
        """
  __shared__ int l, count;
  if (t == 0) { l = 0; count = 0; }
  __syncthreads();
  if (t % 32 == 5) {
    while (atomicCAS(&l, 0, 1) != 0) { }
    __threadfence_block();
    count += 1;
    __threadfence_block();
    atomicExch(&l, 0);
  }
  __syncthreads();
  if (t == 0) out[0] = count;""",
        2,
        128,
        "",
        filled(lambda grid, block: block // 32),
        notes=("equal_stores",),
    ),
    Program(
        "scan with look-back, tiles by ticket",
        LOOK_BACK.replace("TILE", "tile = atomicAdd(aux, 1)"),
        12,
        64,
        VOLATILE,
        scan_of,
    ),
    Program("scan with look-back, tiles by block", LOOK_BACK.replace("TILE", "tile = b"), 12, 64, VOLATILE, scan_of),
    Program(
        "scan with look-back, tiles from behind",
        LOOK_BACK.replace("TILE", "tile = gridDim.x - 1 - b"),
        12,
        64,
        VOLATILE,
        scan_of,
    ),
    Program(
        "flag between blocks, producer first",
        """
  if (b == 0 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 1 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        2,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag between blocks, producer last",
        """
  if (b == gridDim.x - 1 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 0 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        3,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag from the last of more blocks than fit",
        """
  if (b == gridDim.x - 1 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 0 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        6000,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag by acquire and release, with backoff",
        """
  if (b == 1) { out[64 + t] = t; __syncthreads(); if (t == 0) store_release(aux, 1); }
  if (b == 0) {
    if (t == 0) { unsigned ns = 8; while (load_acquire(aux) == 0) { __nanosleep(ns); if (ns < 256) ns *= 2; } }
    __syncthreads();
    out[t] = out[64 + t] * 2;
  }""",
        2,
        64,
        ORDERED,
        lambda grid, block: np.arange(block) * 2,
    ),
    Program(
        "a spin that counts its turns",
        """
  if (b == 1 && t == 0) { out[1] = 5; __threadfence(); atomicExch(aux, 1); }
  if (b == 0 && t == 0) {
    int turns = 0;
    while (atomicAdd(aux, 0) == 0) { if (++turns > 1000000) __trap(); }
    __threadfence();
    out[0] = out[1];
  }""",
        2,
        32,
        "",
        filled(lambda grid, block: 5),
    ),
    Program(
        "a warp that waits for a volatile shared flag",
        """
  __shared__ volatile int ready;
  __shared__ int value[32];
  if (t == 0) ready = 0;
  __syncthreads();
  if (t < 32) {
    while (ready == 0) { }
    __threadfence_block();
    out[t] = value[t];
  } else {
    value[t - 32] = t * 3;
    __threadfence_block();
    __syncwarp();
    if (t == 32) ready = 1;
  }""",
        2,
        64,
        "",
        lambda grid, block: (np.arange(32) + 32) * 3,
        notes=("equal_stores",),
    ),
    Program(
        "a later warp that waits for a volatile shared flag",
        """
  __shared__ volatile int ready;
  __shared__ int value;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t == 0) { value = 9; __threadfence_block(); ready = 1; }
  if (t >= 32) { while (ready == 0) { } __threadfence_block(); out[t - 32] = value; }""",
        1,
        64,
        "",
        lambda grid, block: np.full(32, 9),
    ),
    Program(
        "grid barrier, polled by a volatile load",
        GRID_BARRIER.replace("WAIT", "V(aux)"),
        20,
        64,
        VOLATILE,
        each(lambda i: i),
    ),
    Program(
        "grid barrier, polled by an atomic",
        GRID_BARRIER.replace("WAIT", "atomicAdd(aux, 0)"),
        20,
        64,
        "",
        each(lambda i: i),
    ),
    Program(
        "grid barrier of large blocks", GRID_BARRIER.replace("WAIT", "V(aux)"), 4, 512, VOLATILE, each(lambda i: i)
    ),
)
