"""Reject cases of the array arguments: kind, device, life, element type, shape, strides, alignment, extent, overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from g4kv_cli.cases.reject.request import Change, Draft, Spoiled
from g4kv_cli.cases.reject.valid import array_names, dtype_of
from g4kv_cli.device.interface import DeviceArray, contiguous_strides
from g4kv_cli.entries.arguments import INT32, RopeTables
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.oracle.compare import POISON_BYTE

ArrayChange = Callable[[Draft, DeviceArray], object]

VECTOR_ELEMS = 8
"""bf16 elements of one 16-byte access."""


def array_cases(entry: Entry) -> list[Spoiled]:
    """Every rule of an array on every array argument where it can be broken there."""
    names = array_names(entry)
    indices = [name for name in names if dtype_of(name) == INT32]
    numbers = [name for name in names if name not in indices]
    output = "q_out" if entry.is_prep else "out"
    cases: list[Spoiled] = []

    def add(
        rule: str, variant: str, among: Sequence[str], change: ArrayChange, twin: ArrayChange | None = None
    ) -> None:
        for name in among:
            if name in names:
                in_range = _on(name, twin) if twin else None
                cases.append(Spoiled(rule, f"{name}-{variant}", name, _on(name, change), in_range))

    add("device_array", "on-the-host", names, lambda _, array: np.zeros(array.shape, array.dtype))
    add("device_array", "none", ["q", output, "workspace.partial_max"], lambda _, __: None)
    add("not_freed", "freed", names, _freed)
    add("same_device", "elsewhere", names, _foreign)
    add("dtype", "float16", numbers, lambda _, array: array.as_type(np.float16, array.shape))
    add("dtype", "one-byte", ["pool"] if entry.has_pool else ["k"], _one_byte)
    add("dtype", "int64", indices, lambda draft, array: draft.fresh(array.shape, np.int64))
    add("dtype", "uint32", indices, lambda _, array: array.as_type(np.uint32, array.shape))
    add("contiguous", "gaps", ["q", "k", output, "lse", *indices], _with_gaps)
    add("aligned", "one-element-on", ["q", "q_norm_weight", "rope.sin", output], _shifted(1), _shifted(VECTOR_ELEMS))
    add("aligned", "one-element-on", ["lse", "workspace.partial_out"], _shifted(1))
    add("aligned", "1-byte-on", indices[:1], _one_byte_on)
    add("inside_allocation", "past-the-end", ["q", "rope.cos", output], _past_the_end, _to_the_end)
    add("inside_allocation", "before-the-begin", ["q", "k"], lambda _, array: array.view(array.shape, offset_elems=-8))
    add("inside_allocation", "past-the-end", ["pool"], lambda _, array: array.view((2 * array.size,)))
    cases += _shape_cases(entry, names)
    overlaps = {"prep": _prep_overlap_cases, "attention": _attention_overlap_cases, "merge": _merge_overlap_cases}
    cases += overlaps[entry.operation](entry)
    return cases


def _on(name: str, change: ArrayChange) -> Change:
    def apply(draft: Draft) -> None:
        draft.replace_array(name, change(draft, draft.array(name)))

    return apply


def _freed(draft: Draft, array: DeviceArray) -> DeviceArray:
    copy = draft.fresh(array.shape, array.dtype)
    draft.device.free(copy)
    return copy


def _foreign(draft: Draft, array: DeviceArray) -> DeviceArray:
    copy = draft.bench.foreign.allocate(array.shape, array.dtype, "of another device")
    draft.keep(copy)
    return copy


def _one_byte(draft: Draft, array: DeviceArray) -> DeviceArray:
    return draft.fresh(array.shape, np.uint8)


def _with_gaps(draft: Draft, array: DeviceArray) -> DeviceArray:
    """Every other row of memory twice as large."""
    wide = draft.fresh((2 * array.size,), array.dtype)
    row_elems = array.size // array.shape[0]
    return wide.view(array.shape, strides_elems=(2 * row_elems, *contiguous_strides(array.shape[1:], 1)))


def _shifted(elems: int) -> ArrayChange:
    """The same contents ``elems`` elements after the begin of a larger allocation."""

    def change(draft: Draft, array: DeviceArray) -> DeviceArray:
        wide = draft.fresh((array.size + 2 * VECTOR_ELEMS,), array.dtype)
        shifted = wide.view(array.shape, offset_elems=elems)
        draft.device.write(shifted, draft.device.read(array))
        return shifted

    return change


def _one_byte_on(draft: Draft, array: DeviceArray) -> DeviceArray:
    wide = draft.fresh((array.size + 1,), array.dtype)
    return replace(wide.view(array.shape), offset_bytes=1)


def _past_the_end(draft: Draft, array: DeviceArray) -> DeviceArray:
    wide = draft.fresh((array.size + VECTOR_ELEMS,), array.dtype)
    return wide.view(array.shape, offset_elems=2 * VECTOR_ELEMS)


def _to_the_end(draft: Draft, array: DeviceArray) -> DeviceArray:
    wide = draft.fresh((array.size + VECTOR_ELEMS,), array.dtype)
    last = wide.view(array.shape, offset_elems=VECTOR_ELEMS)
    draft.device.write(last, draft.device.read(array))
    return last


def _shape_cases(entry: Entry, names: tuple[str, ...]) -> list[Spoiled]:
    """Widths, rows and ranks. What a request is measured by (q's rows and heads, k's heads) is other rules' affair."""
    head_dim = entry.head_dim

    def shape(name: str, variant: str, change: ArrayChange) -> Spoiled:
        return Spoiled("shape", f"{name}-{variant}", name, _on(name, change))

    def dims(*steps: int) -> ArrayChange:
        return lambda draft, array: draft.fresh(
            tuple(extent + step for extent, step in zip(array.shape, steps, strict=True)), array.dtype
        )

    results = [
        shape("out", "other-head-dim", lambda draft, array: draft.fresh((*array.shape[:2], 768 - head_dim))),
        shape("lse", "one-row-less", dims(-1, 0)),
        shape("lse", "with-columns", lambda _, array: array.view((*array.shape, 1))),
    ]
    if entry.operation == "merge":
        return [*results, shape("out", "flat", lambda _, array: array.view((array.size,)))]
    cases = [
        shape("q", "flat", lambda _, array: array.view((array.size,))),
        shape("q", "other-head-dim", lambda draft, array: draft.fresh((*array.shape[:2], 768 - head_dim))),
        shape("q", "negative-rows", lambda _, array: array.view((-1, *array.shape[1:]))),
    ]
    if not entry.is_prep:
        return [
            *cases,
            shape("pool", "by-pages", lambda _, array: array.view((1, array.size))),
            shape("out", "one-row-less", dims(-1, 0, 0)),
            shape("out", "one-head-more", dims(0, 1, 0)),
            *results,
        ]
    cases += [
        shape("k", "one-row-less", dims(-1, 0, 0)),
        shape("k", "one-column-less", dims(0, 0, -1)),
        shape("q_norm_weight", "one-short", dims(-1)),
        shape("q_norm_weight", "one-long", dims(1)),
        shape("q_norm_weight", "other-family", lambda draft, _: draft.fresh((768 - head_dim,))),
        shape("k_norm_weight", "one-short", dims(-1)),
        shape("k_norm_weight", "row", lambda _, array: array.view((1, array.size))),
        shape("rope.cos", "half-width", lambda draft, array: draft.fresh((array.shape[0], array.shape[1] // 2))),
        shape("rope.sin", "one-column-less", dims(0, -1)),
        shape("q_out", "one-row-less", dims(-1, 0, 0)),
        shape("q_out", "one-head-less", dims(0, -1, 0)),
        shape("q_out", "flat", lambda _, array: array.view((array.size,))),
    ]
    if "v" in names:
        cases += [shape("v", "one-row-less", dims(-1, 0, 0)), shape("v", "one-head-more", dims(0, 1, 0))]
    if "k_out" in names:
        cases += [shape("k_out", "one-row-less", dims(-1, 0, 0)), shape("k_out", "one-head-more", dims(0, 1, 0))]
    if "pool" in names:
        cases.append(shape("pool", "by-pages", lambda _, array: array.view((1, array.size))))
    if "page_row" in names:
        cases.append(shape("page_row", "matrix", lambda _, array: array.view((1, array.size))))
    if "positions" in names:
        cases += [
            shape("positions", "one-short", dims(-1)),
            shape("page_indptr", "one-short", dims(-1)),
            shape("page_indptr", "one-long", dims(1)),
            shape("page_indices", "matrix", lambda _, array: array.view((1, array.size))),
            shape("page_origins", "one-short", dims(-1)),
        ]
    return cases


def _is_q(output: str) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments[output] = draft.arguments["q"]

    return change


def _sharing_rows(output: str, rows: int) -> Change:
    """q and the output in one allocation; the last ``rows`` rows of q are the first of the output."""

    def change(draft: Draft) -> None:
        q = draft.arguments["q"]
        both = draft.fresh((2 * q.size,))
        draft.device.fill(both, POISON_BYTE)
        draft.arguments["q"] = both.view(q.shape)
        draft.device.write(draft.arguments["q"], draft.device.read(q))
        begin = q.size - rows * q.shape[1] * q.shape[2]
        draft.arguments[output] = both.view(q.shape, offset_elems=begin)

    return change


def _in_pool(name: str) -> Change:
    def change(draft: Draft) -> None:
        draft.arguments[name] = draft.pool_data.view(draft.arguments[name].shape)

    return change


def _plan_in(output: str) -> Change:
    """A plan whose positions lie where the output goes."""

    def change(draft: Draft) -> None:
        plan = PrefillPagedPlan.batch(draft.device, draft.requests, shape=draft.shape)
        for array in plan.buffers.by_name().values():
            draft.keep(array)
        as_int = draft.arguments[output].as_type(np.int32, plan.buffers.positions.shape)
        plan.buffers = replace(plan.buffers, positions=as_int)
        draft.replaced["plan"] = plan

    return change


def _attention_overlap_cases(entry: Entry) -> list[Spoiled]:
    cases = [
        Spoiled("no_overlap", "out-is-q", "out", _is_q("out")),
        Spoiled("no_overlap", "last-row-of-q", "out", _sharing_rows("out", 1), _sharing_rows("out", 0)),
        Spoiled("no_overlap", "out-in-pool", "out", _in_pool("out")),
        Spoiled("no_overlap", "lse-in-out", "out", _lse_in_out),
        Spoiled("no_overlap", "plan-in-out", "out", _plan_in("out")),
    ]
    if entry.takes_splits:

        def one_scratch(draft: Draft) -> None:
            draft.workspace = replace(draft.workspace, partial_sum=draft.workspace.partial_max)

        cases.append(Spoiled("no_overlap", "partials-are-one", "workspace.partial_max", one_scratch))
    return cases


def _merge_overlap_cases(entry: Entry) -> list[Spoiled]:
    def out_in_scratch(draft: Draft) -> None:
        out = draft.arguments["out"]
        draft.arguments["out"] = draft.workspace.partial_out.as_type(out.dtype, out.shape)

    return [
        Spoiled("no_overlap", "lse-in-out", "out", _lse_in_out),
        Spoiled("no_overlap", "out-in-partial_out", "out", out_in_scratch),
    ]


def _lse_in_out(draft: Draft) -> None:
    draft.arguments["lse"] = draft.arguments["out"].as_type(np.float32, draft.arguments["lse"].shape)


def _one_table(draft: Draft) -> None:
    draft.rope = RopeTables(draft.rope.cos, draft.rope.cos)


def _tables_of_one_allocation(shared_rows: int) -> Change:
    """Both tables in one allocation; the last rows of cos are the first of sin."""

    def change(draft: Draft) -> None:
        rows, width = draft.rope.cos.shape
        both = draft.fresh((2 * rows, width))
        first, second = both.view((rows, width)), both.view((rows, width), offset_elems=(rows - shared_rows) * width)
        # A right request has right tables.
        draft.device.write(first, draft.device.read(draft.rope.cos))
        draft.device.write(second, draft.device.read(draft.rope.sin))
        draft.rope = RopeTables(first, second)

    return change


def _prep_overlap_cases(entry: Entry) -> list[Spoiled]:
    def in_weights(draft: Draft) -> None:
        weight = draft.arguments["q_norm_weight"]
        draft.arguments["q_norm_weight"] = draft.arguments["q_out"].view(weight.shape)

    cases = [
        Spoiled("no_overlap", "q_out-is-q", "q_out", _is_q("q_out")),
        Spoiled("no_overlap", "last-row-of-q", "q_out", _sharing_rows("q_out", 1), _sharing_rows("q_out", 0)),
        Spoiled("no_overlap", "weight-in-q_out", "q_out", in_weights),
        Spoiled("rope_tables_apart", "one-array", "rope.sin", _one_table),
        Spoiled("rope_tables_apart", "last-row-of-cos", "rope.sin", _tables_of_one_allocation(1),
                _tables_of_one_allocation(0)),
    ]  # fmt: skip
    if not entry.has_pool:

        def k_out_in_k(draft: Draft) -> None:
            draft.arguments["k_out"] = draft.arguments["k"]

        def table_in_k_out(draft: Draft) -> None:
            rows = draft.rope.sin.shape[0]
            big = draft.fresh((max(rows * entry.head_dim, draft.arguments["k_out"].size),))
            draft.arguments["k_out"] = big.view(draft.arguments["k_out"].shape)
            draft.rope = RopeTables(draft.rope.cos, big.view((rows, entry.head_dim)))

        cases += [
            Spoiled("no_overlap", "k_out-is-k", "k_out", k_out_in_k),
            Spoiled("no_overlap", "table-in-k_out", "k_out", table_in_k_out),
        ]
    else:
        cases += [
            Spoiled("no_overlap", "k-in-pool", "pool", _in_pool("k")),
            Spoiled("no_overlap", "q_out-in-pool", "q_out", _in_pool("q_out")),
        ]
    if entry.metadata == "page_row":

        def row_in_q_out(draft: Draft) -> None:
            row = draft.page_row()
            as_int = draft.arguments["q_out"].as_type(np.int32, row.indices.shape)
            draft.replaced["page_row"] = replace(row, indices=as_int)

        cases.append(Spoiled("no_overlap", "page_row-in-q_out", "q_out", row_in_q_out))
    if entry.takes_plan:
        cases.append(Spoiled("no_overlap", "plan-in-q_out", "q_out", _plan_in("q_out")))
    return cases
