"""Integer atomics of lanes that meet: what each finds and what stays, against Python integers one lane at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from g4kv_cli.device.emulated.memory.atomic_chains import chain_of
from g4kv_cli.device.emulated.memory.atomics import apply_in_turns, update_function

STEPS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, b, c: old + b,
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b, c: 0 if old >= b else old + 1,
    "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
}
FORMS = [
    *(("add", "u32"), ("add", "u64"), ("min", "s32"), ("max", "s64"), ("min", "u64"), ("max", "u32"), ("and", "b32")),
    *(("or", "b64"), ("xor", "b32"), ("exch", "b64"), ("cas", "b32"), ("cas", "b64"), ("inc", "u32"), ("dec", "u32")),
]


@pytest.mark.parametrize(("operation", "kind"), FORMS)
@pytest.mark.parametrize("values", ["few", "all", "limits"])
def test_lanes_that_meet_take_turns(operation: str, kind: str, values: str) -> None:
    width = int(kind[1:])
    rng = np.random.default_rng(width + len(operation))
    dtype = {32: np.uint32, 64: np.uint64}[width]

    def signed(bits: int) -> int:
        return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits

    for count in (2, 5, 33, 150):
        units = rng.integers(0, 6, count)
        most = 4 if values != "all" else 1 << 63
        held = rng.integers(0, most + 2, 8, np.uint64).astype(dtype)
        b, c = (rng.integers(0, most, count, np.uint64).astype(dtype) for _ in range(2))
        if values == "limits":
            b = np.full(count, (0, 3, (1 << width) - 1, 1)[count % 4], dtype)
        want, seen = [signed(value) for value in held.tolist()], []
        for place, one, other in zip(units.tolist(), b.tolist(), c.tolist(), strict=True):
            seen.append(want[place])
            bits = STEPS[operation](want[place], signed(one), signed(other)) & ((1 << width) - 1)
            want[place] = signed(bits)
        update = update_function(operation, kind, False, False)
        assert update is not None
        chain = chain_of(operation, kind, update)
        assert chain is not None
        found = apply_in_turns(held, units, update, b, c, chain)
        assert [signed(value) for value in found.tolist()] == seen
        assert [signed(value) for value in held.tolist()] == want


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16", "f16x2", "bf16x2"])
def test_sums_of_floats_have_an_order(kind: str) -> None:
    assert chain_of("add", kind, update_function("add", kind, False, False)) is None
