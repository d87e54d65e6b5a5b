"""Registers of 128 bits: moves, loads, stores, and atomics on 16 bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from launch_helper import faults_of, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, Machine, UnsupportedOpcode

Words = np.ndarray

HEAD = """
typedef unsigned long long u64;
struct __align__(16) Pair { u64 low, high; };
__device__ Pair swapped(SPACE* at, Pair want, Pair given) {
  Pair found;
  asm volatile("{ .reg .b128 q, r, s; mov.b128 r, {%3, %4}; mov.b128 s, {%5, %6};"
               " atom.relaxed.gpu.WHERE.cas.b128 q, [%2], r, s; mov.b128 {%0, %1}, q; }"
               : "=l"(found.low), "=l"(found.high)
               : ADDRESS(at), "l"(want.low), "l"(want.high), "l"(given.low), "l"(given.high) : "memory");
  return found;
}
__device__ Pair exchanged(SPACE* at, Pair given) {
  Pair found;
  asm volatile("{ .reg .b128 q<3>; mov.b128 q1, {%3, %4}; atom.WHERE.exch.b128 q2, [%2], q1; mov.b128 {%0, %1}, q2; }"
               : "=l"(found.low), "=l"(found.high) : ADDRESS(at), "l"(given.low), "l"(given.high) : "memory");
  return found;
}
extern "C" __global__ void kernel(Pair* out, const Pair* in) {
  const unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
"""
COUNTED = """
  Pair seen = Pair{0, 0};
  for (;;) {
    const Pair next = {seen.low + 1, seen.high + ((u64)i << 40)}, found = swapped(PLACE, seen, next);
    if (found.low == seen.low && found.high == seen.high) break;
    seen = found;
  }
"""
MOVED = """
  asm volatile("{ .reg .b128 a, b; .reg .b64 l, h; .reg .pred p; setp.gt.u32 p, %2, 5;"
               " ld.global.b128 a, [%1]; mov.b128 b, a; mov.b128 {l, h}, b; not.b64 l, l; @p mov.b128 b, {h, l};"
               " st.global.b128 [%0], b; }" :: "l"(out + i), "l"(in + i), "r"(t) : "memory");
"""
SHARED = """
  __shared__ Pair own;
  if (t == 0) own = Pair{0, 0};
  __syncthreads();
  const unsigned at = (unsigned)__cvta_generic_to_shared(&own);
"""
THREADS = 3 * 48


def run(body: str, space: str = "global") -> tuple[list[Fault], Words, Words, Machine]:
    is_shared = space == "shared"
    text = HEAD.replace("WHERE", space).replace("ADDRESS", '"r"' if is_shared else '"l"')
    if is_shared:
        text = text.replace("SPACE* at", "unsigned at")
    kernel = compile_kernel(f"{text.replace('SPACE', 'Pair')}{body}\n}}", "90")
    machine = Machine()
    given = np.random.default_rng(1).integers(0, 1 << 63, 2 * THREADS).astype(np.uint64)
    out, source = upload(machine, np.zeros(2 * THREADS, np.uint64), "out"), upload(machine, given, "in")
    faults = faults_of(machine, kernel, pointer(out), pointer(source), grid=3, block=48)
    return faults, read_as(machine, out, 2 * THREADS, np.uint64), given, machine


def test_loads_moves_and_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    faults, out, given, machine = run(MOVED)
    assert (faults, machine.counts.compared) == ([], 1)
    pairs = given.reshape(-1, 2)
    turned = np.stack([pairs[:, 1], ~pairs[:, 0]], axis=1)
    is_turned = (np.arange(THREADS) % 48 > 5)[:, None]
    np.testing.assert_array_equal(out.reshape(-1, 2), np.where(is_turned, turned, pairs))


def test_threads_take_turns_at_both_halves_together() -> None:
    faults, out, _, _ = run(COUNTED.replace("PLACE", "out"))
    assert faults == []
    assert out[:2].tolist() == [THREADS, sum(range(THREADS)) << 40]


def test_in_shared_memory() -> None:
    body = SHARED + COUNTED.replace("PLACE", "at") + "__syncthreads(); if (t == 0) out[blockIdx.x] = own;"
    faults, out, _, _ = run(body, "shared")
    assert faults == []
    want = [[48, sum(range(48 * block, 48 * block + 48)) << 40] for block in range(3)]
    assert out[:6].reshape(3, 2).tolist() == want


def test_an_exchange_hands_every_value_on_once() -> None:
    faults, out, _, _ = run("if (t) out[i] = exchanged(out, Pair{i, ~(u64)i});")
    assert faults == []
    numbers = [block * 48 + t for block in range(3) for t in range(1, 48)]
    pairs = out.reshape(-1, 2)
    held = pairs[[0, *numbers]]
    assert sorted(held[:, 0].tolist()) == [0, *numbers]
    assert all(high == (0 if low == 0 else ~low) for low, high in held)


def test_half_of_a_pair_is_misaligned() -> None:
    faults, _, _, _ = run("exchanged((Pair*)((char*)out + 8), Pair{i, 1});")
    assert [fault.kind for fault in faults] == ["misaligned"]


@pytest.mark.parametrize("words", ["add.b128 q, q, r;", "mov.b128 q, {%0, %0, %0, %0};"])
def test_what_has_no_meaning_here_is_refused(words: str) -> None:
    body = f'asm volatile("{{ .reg .b128 q, r; {words} }}" :: "l"(in));'
    with pytest.raises((UnsupportedOpcode, RuntimeError), match=re.escape("128 bits only mov, ld, st and atom")):
        run(body)
