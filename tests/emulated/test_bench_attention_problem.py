"""The bench's own check of results, on the emulated device: right kernels pass, wrong ones do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from g4kv_cli.bench.attention_problem import (
    OWN_ROUNDINGS,
    PEER_ROUNDINGS,
    AttentionProblem,
    attention_problem,
    pool_elems_of,
    wrong_rows,
)
from g4kv_cli.bench.attention_runs import attention_call
from g4kv_cli.bench.ceilings import ACCESSES, queue_copy, queue_read
from g4kv_cli.bench.copies import CopyCall, copied_elems
from g4kv_cli.bench.noise_data import BF16, NoiseArena
from g4kv_cli.bench.prep_problem import PrepProblem, prep_call
from g4kv_cli.bench.workloads import Variant, decode_shape, prefill_shape, prep_shape
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import decode_entries, entries_for, entry_for
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.pool_order import OWN_ORDER
from g4kv_cli.oracle.attention_limits import Rounding

LOCAL, GLOBAL = GEOMETRIES["12b-local"], GEOMETRIES["12b-global"]
FOLDING = GEOMETRIES["26b-a4b-global"]
FORMS = tuple(entry.form for entry in decode_entries(LOCAL))


def _variant(geometry: Geometry, form: str, tile: int = 0) -> Variant:
    """A form as a configuration: split in two where it splits."""
    entry = entry_for(geometry, "attention", form)
    return Variant(form, entry.label, entry.name, num_splits=2 if entry.takes_splits else 1, tile=tile)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = EmulatedDevice("sm_90a", "a test")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def library(device: Device) -> KernelLibrary:
    return KernelLibrary(device)


@pytest.fixture(scope="module")
def arena(library: KernelLibrary) -> NoiseArena:
    return NoiseArena(library, 3 * pool_elems_of(decode_shape(LOCAL, 2, 33), LOCAL), seed=1)


def _out(
    problem: AttentionProblem, library: KernelLibrary, pool: int, form: str = "decode", tile: int = 0
) -> np.ndarray:
    call = attention_call(problem, library, _variant(problem.geometry, form, tile))
    call.poison()
    call.queue(pool)
    return call.output()


def test_the_arena_holds_what_the_host_says(arena: NoiseArena, device: Device) -> None:
    # More than one repetition of the block, a row across its end included.
    assert arena.elems > arena.block_elems + 512
    first = np.array([0, 8, arena.block_elems - 256, arena.block_elems, arena.elems - 512])
    rows = arena.rows(first, 512)
    for begin, row in zip(first, rows, strict=True):
        held = device.read(arena.data.view((512,), offset_elems=int(begin)))
        np.testing.assert_array_equal(held.astype(np.float32), row)
    assert abs(float(rows.std()) - 1) < 0.1


@pytest.mark.parametrize("geometry", [LOCAL, GLOBAL], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("form", FORMS)
def test_right_kernels_pass_and_another_pool_s_result_does_not(geometry, form, library, arena) -> None:  # type: ignore[no-untyped-def]
    problem = attention_problem(decode_shape(geometry, 2, 33), geometry, arena, 2, seed=1)
    out = _out(problem, library, 1, form)
    assert problem.check(out, 1) == ""
    assert "checked rows are wrong, first at request 1, token 0" in problem.check(out, 0)


@pytest.mark.parametrize("form", FORMS)
def test_folded_pools_are_read_as_folded_kernels_read_them(
    form: str, library: KernelLibrary, arena: NoiseArena
) -> None:
    problem = attention_problem(decode_shape(GLOBAL, 2, 33, "folded"), GLOBAL, arena, 2, seed=1)
    library.launched.clear()
    out = _out(problem, library, 1, form)
    assert any("folded" in name for name in library.launched)
    assert problem.check(out, 1) == ""
    split = attention_problem(decode_shape(GLOBAL, 2, 33), GLOBAL, arena, 2, seed=1)
    assert "checked rows are wrong" in split.check(out, 1)
    assert "checked rows are wrong" in problem.check(_out(split, library, 1, form), 1)


def test_renewed_queries_make_an_old_result_wrong(library: KernelLibrary, arena: NoiseArena) -> None:
    problem = attention_problem(decode_shape(LOCAL, 2, 33), LOCAL, arena, 1, seed=1)
    out = _out(problem, library, 0)
    problem.renew_queries()
    assert "wrong" in problem.check(out, 0)
    assert problem.check(_out(problem, library, 0), 0) == ""


def test_a_small_error_in_one_row_is_seen(library: KernelLibrary, arena: NoiseArena) -> None:
    problem = attention_problem(decode_shape(LOCAL, 2, 33), LOCAL, arena, 1, seed=1)
    right = _out(problem, library, 0).astype(np.float32)
    assert problem.check(right, 0) == ""
    row = problem.rows[0]
    at = (row.request, row.kv_head * LOCAL.gqa_group, 5)
    limits = [
        problem._expected[0, OWN_ORDER].rounding[count].limit[0, 0, 5] for count in (OWN_ROUNDINGS, PEER_ROUNDINGS)
    ]
    assert limits[0] < limits[1]
    out, exact = right.copy(), problem._expected[0, OWN_ORDER].value[0, 0, 5]
    # A peer may round once more; not more than that.
    out[at] = exact + sum(limits) / 2
    assert problem.check(out, 0).startswith("1 of 4 checked rows are wrong")
    assert problem.check(out, 0, roundings=PEER_ROUNDINGS) == ""
    out[at] = exact + 1.01 * limits[1]
    assert problem.check(out, 0, roundings=PEER_ROUNDINGS).startswith("1 of 4 checked rows are wrong")
    out[at] = np.nan
    assert problem.check(out, 0) == f"not finite, first at request {row.request}, token 0, KV head {row.kv_head}"


def test_rows_that_are_all_a_little_too_small_are_seen(library: KernelLibrary, arena: NoiseArena) -> None:
    problem = attention_problem(decode_shape(LOCAL, 2, 33), LOCAL, arena, 1, seed=1)
    assert problem.check(_out(problem, library, 0), 0) == ""
    expected = problem._expected[0, OWN_ORDER]
    # As many rows as a bench's cells have: each alone is within what roundings may do to it.
    want = np.concatenate([expected.value] * 16)
    one = expected.rounding[OWN_ROUNDINGS]
    rounding = Rounding(*(np.concatenate([each] * 16) for each in (one.limit, one.scale_variance, one.scale_bias)))
    rows = problem.rows * 16
    assert wrong_rows(want, want, rounding, rows) == ""
    assert wrong_rows(want * 0.996, want, rounding, rows).startswith("the checked rows are off together")
    assert wrong_rows(expected.value * 0.996, expected.value, one, problem.rows) == ""


def test_a_window_of_other_length_is_seen(library: KernelLibrary) -> None:
    # 1025 keys: the first is out of the window. A reference that sees it finds those rows wrong where it counts.
    shape = decode_shape(LOCAL, 1, 1025)
    arena = NoiseArena(library, pool_elems_of(shape, LOCAL), seed=2)
    problem = attention_problem(shape, LOCAL, arena, 1, seed=2)
    out = _out(problem, library, 0)
    assert problem.check(out, 0) == ""
    other = attention_problem(shape, LOCAL, arena, 1, seed=2)
    other.geometry = dataclasses.replace(LOCAL, window=1025)
    assert "checked rows are wrong" in other.check(out, 0)
    arena.close()


def test_a_chunk_with_history(library: KernelLibrary, arena: NoiseArena) -> None:
    problem = attention_problem(prefill_shape(LOCAL, 5, 20), LOCAL, arena, 1, seed=1)
    assert problem.check(_out(problem, library, 0, "prefill", tile=64), 0) == ""
    assert {row.token for row in problem.rows} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("geometry", "entry"),
    [(geometry, entry) for geometry in (LOCAL, GLOBAL) for entry in entries_for(geometry, "prep")],
    ids=lambda value: value.name,
)
def test_prep(geometry, entry, library, arena) -> None:  # type: ignore[no-untyped-def]
    problem = PrepProblem.make(prep_shape(geometry, entry, 3), geometry, arena, 2, seed=1)
    call = prep_call(problem, library)
    call.poison()
    call.queue(1)
    out = call.output()
    assert problem.check(out, 1) == ""
    assert problem.check(out, 0).startswith("q: ")
    spoiled = out.copy()
    spoiled[1, geometry.num_qo_heads, 7] += BF16.type(0.25)
    assert problem.check(spoiled, 1).startswith("k: 1 of ")
    problem.renew_queries()
    assert problem.check(out, 1).startswith("q: ")
    call.poison()
    call.queue(1)
    assert problem.check(call.output(), 1) == ""


@pytest.mark.parametrize("entry", entries_for(FOLDING, "prep"), ids=lambda entry: entry.form)
def test_prep_of_folded_rows(entry, library, arena) -> None:  # type: ignore[no-untyped-def]
    problem = PrepProblem.make(prep_shape(FOLDING, entry, 3, "folded"), FOLDING, arena, 1, seed=1)
    call = prep_call(problem, library)
    call.poison()
    library.launched.clear()
    call.queue(0)
    out = call.output()
    assert problem.check(out, 0) == ""
    (symbol,) = library.launched
    assert "_folded_rows" in symbol
    heads = FOLDING.num_qo_heads
    for row, column, what in ((0, 100, "q"), (heads, 300, "k"), (heads + FOLDING.num_kv_heads, 7, "v")):
        spoiled = out.copy()
        spoiled[1, row, column] += BF16.type(0.25)
        assert problem.check(spoiled, 0).startswith(f"{what}: 1 of ")


@pytest.mark.parametrize("accesses", ACCESSES)
def test_a_copy_of_a_shape_s_bytes(library: KernelLibrary, arena: NoiseArena, device: Device, accesses: int) -> None:
    entry = entry_for(FOLDING, "prep", "prefill")
    shape = prep_shape(FOLDING, entry, 3, "folded")
    elems = copied_elems(shape)
    # What is read and what is written, in bytes, is twice the copy's elements of 2 bytes each.
    assert 0 <= 2 * 2 * elems - (shape.read_bytes + shape.write_bytes) < 2 * 16
    call = CopyCall(shape, library, arena, 2)
    call.accesses = accesses
    call.poison()
    assert "16 of 16 rows of the copy are wrong" in call.wrong(call.output(), 0)
    call.queue(1)
    assert call.wrong(call.output(), 1) == ""
    assert call.wrong(call.output(), 0) == "16 of 16 rows of the copy are wrong"
    source = device.read(arena.data.view((2 * elems,)))
    copied = [device.read(array) for array in call._destinations]
    assert (copied[1].view(np.uint16) == source[elems:].view(np.uint16)).all()
    assert not (copied[0].view(np.uint16) == source[:elems].view(np.uint16)).any()
    spoiled = call.output()
    spoiled[-1, -1] += BF16.type(1.0)
    assert call.wrong(spoiled, 1) == "1 of 16 rows of the copy are wrong"


def test_pools_that_do_not_fit_are_refused(arena: NoiseArena) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        attention_problem(decode_shape(LOCAL, 2, 33), LOCAL, arena, 4, seed=1)


@pytest.mark.parametrize("accesses", ACCESSES)
def test_copy_and_read_kernels(library: KernelLibrary, device: Device, accesses: int) -> None:
    values = np.arange(16 * 1027, dtype=np.uint8)
    source, target = device.upload(values, "source"), device.allocate((values.size + 16,), np.uint8, "target")
    device.fill(target, 0xEE)
    queue_copy(library, source, target, accesses)
    held = device.read(target)
    np.testing.assert_array_equal(held[: values.size], values)
    assert (held[values.size :] == 0xEE).all()
    queue_read(library, source, target.view((16,), offset_elems=values.size), accesses)
    assert (device.read(target)[values.size :] == 0xEE).all()
    with pytest.raises(ValueError, match="whole vectors"):
        queue_copy(library, source.view((15,)), target)
    with pytest.raises(ValueError, match="do not fit"):
        queue_copy(library, source, target.view((16,)))
