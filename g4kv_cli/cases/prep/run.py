"""One case on one device: upload, poison, launch, compare everything. Returns a CaseResult, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.cases.prep.ends import EndRows
from g4kv_cli.cases.prep.pool import PoolCheck
from g4kv_cli.cases.prep.problem import Problem, build_problem
from g4kv_cli.cases.session import Session, require_coverage, run_session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.entries.table import entry_for, entry_named
from g4kv_cli.inputs import PrepInputs, table_of, turning_columns
from g4kv_cli.model.kv_format import FOLDED
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import (
    POISON_BITS,
    POISON_BYTE,
    ROWS,
    Axes,
    compare_bits,
    compare_untouched,
    compare_values,
)
from g4kv_cli.oracle.prep_suspects import Part, PrepRows
from g4kv_cli.oracle.reference import Expected
from g4kv_cli.records.run import CaseResult

Array = npt.NDArray[Any]

SPARSE_TABLE_BYTES = 32 << 20
"""RoPE tables above this are not built on the host: only the rows that are named are written."""


@dataclass(slots=True, kw_only=True)
class _Run(Session):
    """A prep case on the device."""

    case: PrepCase
    problem: Problem


def run_prep_case(case: PrepCase, library: KernelLibrary, rerun: str, dumps: DumpSettings | None = None) -> CaseResult:
    """Run a case; see run_session. A case whose pool exceeds the GPU's memory is skipped, with the two numbers."""

    def make() -> _Run:
        contract = require_coverage(library, case, () if case.placement is None else case.placement.origins)
        return _Run(
            library=library, case=case, problem=build_problem(case.ends if case.judges_ends else case, contract)
        )

    return run_session(case, rerun, library, make, _execute, dumps=dumps)


def _execute(run: _Run) -> None:
    case, problem = run.case, run.problem
    if case.judges_ends:
        _run_ends(run, EndRows(run, len(case.positions)))
        return
    arguments = _inputs_on_device(run, problem.inputs)
    q_out = run.poisoned((len(case.positions) + case.padding_rows, *problem.inputs.q.shape[1:]), "q_out")
    arguments["q_out"] = q_out
    if case.placement is None:
        _contiguous(run, arguments, q_out)
    else:
        _paged(run, arguments, q_out, case.placement)


def _contiguous(run: _Run, arguments: dict[str, Any], q_out: DeviceArray) -> None:
    k_out = run.poisoned(run.problem.inputs.k.shape, "k_out")
    entry_named(run.case.entry)(run.library, **arguments, start_pos=run.case.positions[0], k_out=k_out)
    _check_rows(run, "q_out", "q", run.device.read(q_out), run.problem.q)
    _check_rows(run, "k_out", "k", run.device.read(k_out), run.problem.k)


def _paged(run: _Run, arguments: dict[str, Any], q_out: DeviceArray, placement: Placement) -> None:
    case, device, problem = run.case, run.device, run.problem
    check = PoolCheck(case, placement, run.library.pool_order)
    pool = run.keep(check.allocate(device))
    paged = arguments | _pool_arguments(run, placement, pool) | _metadata(run, placement)
    if run.problem.inputs.v is not None:
        paged["v"] = run.upload(_padded(run, run.problem.inputs.v), "v")
    entry_named(case.entry)(run.library, **paged)

    rows = device.read(q_out)
    q = rows[: len(case.positions)]
    if case.padding_rows:
        run.found(compare_untouched("q_out, padding rows", rows, slice(len(case.positions)), Axes(ROWS)))
    stored = check.read(device, pool)
    _check_rows(run, "q_out", "q", q, problem.q)
    _check_pool_rows(run, check, "k", stored.k, problem.k)
    _check_pool_rows(run, check, "v", stored.v, problem.v)
    run.mismatches.extend(stored.untouched)
    run.digest.update(stored.digest)
    if case.against_contiguous:
        _compare_with_contiguous(run, arguments, q, stored.k, check)


def _pool_arguments(run: _Run, placement: Placement, pool: DeviceArray) -> dict[str, Any]:
    return {"pool": PagedPool(run.case.layout_of(placement), pool), "layer": placement.layer}


def _metadata(run: _Run, placement: Placement) -> dict[str, Any]:
    """Where the tokens go, as the entry takes it."""
    metadata = entry_named(run.case.entry).metadata
    if metadata == "page_row":
        start_pos, origin = run.case.positions[0], placement.origins[0]
        return {"start_pos": start_pos, "page_row": _page_row(run, placement), "page_origin": origin}
    return {"batch": _batch(run, placement)} if metadata == "batch" else {"plan": _plan(run, placement)}


def _run_ends(run: _Run, rows: EndRows) -> None:
    """The first and the last of many tokens."""
    case, device, problem = run.case, run.device, run.problem
    run.only_the_ends = True
    inputs, place = problem.inputs, case.ends.placement
    arguments = _tables_on_device(run, inputs)
    given = {"q": inputs.q, "k": inputs.k} | ({} if inputs.v is None else {"v": inputs.v})
    arguments |= {name: rows.upload(values, name) for name, values in given.items()}
    q_out = arguments["q_out"] = rows.make(inputs.q.shape[1:], "q_out")
    check, pool, k_out = None, None, None
    if case.placement is None or place is None:
        k_out = arguments["k_out"] = rows.make(inputs.k.shape[1:], "k_out")
        arguments["start_pos"] = case.positions[0]
    else:
        check = PoolCheck(case.ends, place, run.library.pool_order)
        pool = run.keep(check.allocate(device))
        arguments |= _pool_arguments(run, case.placement, pool) | _metadata(run, case.placement)
    with device.only_the_ends():
        entry_named(case.entry)(run.library, **arguments)
    for one in problem.q:
        rows.judge("q_out", rows.read(q_out), one, must_be_there=True)
    if k_out is not None:
        for one in problem.k:
            rows.judge("k_out", rows.read(k_out), one, must_be_there=False)
    if check is not None and pool is not None:
        device.synchronize()
        written = device.written_ranges(pool)
        for kv, expected in enumerate((problem.k, problem.v)):
            stored = check.read_rows(device, pool, kv, written)
            for one in expected:
                rows.judge(f"{'KV'[kv]} in the pool", stored, one, must_be_there=False)


def _compare_with_contiguous(run: _Run, arguments: dict[str, Any], q: Array, k: Array, check: PoolCheck) -> None:
    """The serving form must give the bits of the contiguous oracle form, where the kernels at hand have one."""
    contiguous = entry_for(run.case.geometry, "prep", "contiguous")
    try:
        run.library.contract_of(contiguous.name)
    except NotCovered as why:
        run.left_out[str(why)] = None
        return
    q_out = run.poisoned(q.shape, "q_out of the contiguous form")
    k_out = run.poisoned(run.problem.inputs.k.shape, "k_out of the contiguous form")
    contiguous(run.library, **arguments | {"q_out": q_out, "k_out": k_out, "start_pos": run.case.positions[0]})
    twins = (("q_out", q, run.device.read(q_out), _token_axes(run)),
             ("K in the pool", k, run.device.read(k_out), check.row_axes))  # fmt: skip
    for name, got, want, axes in twins:
        run.compared(f"{name} against the contiguous form", got, want)
        run.found(compare_bits(f"{name} against the contiguous form", got, want, axes))


def _check_rows(run: _Run, operation: str, part: Part, got: Array, expected: tuple[Expected, ...]) -> None:
    suspects = _given(run).suspects(part)
    for one in expected:
        run.compared(operation, got, one.value, one.limit)
        run.found(compare_values(operation, got, one, _token_axes(run), suspects))
    run.digest.update(np.ascontiguousarray(got).tobytes())


def _check_pool_rows(run: _Run, check: PoolCheck, part: Part, got: Array, expected: tuple[Expected, ...]) -> None:
    kept = check.compared_tokens
    suspects = _given(run, kept).suspects(part)
    for one in expected:
        limits = Expected(
            one.value[kept], one.limit[kept], one.limit_text, one.rms_limit,
            None if one.magnitude is None else one.magnitude[kept],
        )  # fmt: skip
        run.compared(f"{part.upper()} in the pool", got[kept], limits.value, limits.limit)
        run.found(compare_values(f"{part.upper()} in the pool", got[kept], limits, check.row_axes, suspects))


def _given(run: _Run, tokens: Any = slice(None)) -> PrepRows:
    """What the call was given, for the suspects of a wrong row; those tokens only."""
    inputs, geometry = run.problem.inputs, run.case.geometry
    v = None if inputs.v is None else inputs.v[tokens]
    turning = turning_columns(geometry) if run.case.kv_format == FOLDED else None
    return PrepRows(
        inputs.q[tokens], inputs.k[tokens], v, inputs.q_weight, inputs.k_weight, inputs.cos[tokens],
        inputs.sin[tokens], inputs.positions[tokens], turning,
    )  # fmt: skip


def _token_axes(run: _Run) -> Axes:
    return Axes(ROWS, per_token={"position": run.case.positions})


def _inputs_on_device(run: _Run, inputs: PrepInputs) -> dict[str, Any]:
    rows = {"q": run.upload(_padded(run, inputs.q), "q"), "k": run.upload(_padded(run, inputs.k), "k")}
    return rows | _tables_on_device(run, inputs)


def _tables_on_device(run: _Run, inputs: PrepInputs) -> dict[str, Any]:
    return {
        "q_norm_weight": run.upload(inputs.q_weight, "q_norm_weight"),
        "k_norm_weight": run.upload(inputs.k_weight, "k_norm_weight"),
        "rope": RopeTables(_table(run, inputs, inputs.cos, "cos"), _table(run, inputs, inputs.sin, "sin")),
        "rotary_dim": inputs.rotary_dim,
        "eps": run.case.eps,
    }


def _padded(run: _Run, rows: Array) -> Array:
    """The rows with NaN rows behind them that nobody may use."""
    if not run.case.padding_rows:
        return rows
    padding = np.full((run.case.padding_rows, *rows.shape[1:]), POISON_BITS, dtype=np.uint16).view(BF16)
    return np.concatenate([rows, padding])


def _table(run: _Run, inputs: PrepInputs, rows: Array, label: str) -> DeviceArray:
    """A RoPE table with NaN (or, in a large table on the emulated device, nothing) in the rows nobody may read."""
    shape = (inputs.table_positions, inputs.rotary_dim)
    if shape[0] * shape[1] * BF16.itemsize <= SPARSE_TABLE_BYTES:
        return run.upload(table_of(rows, inputs.positions, inputs.table_positions), label)
    table = run.keep(run.device.allocate(shape, BF16, label, sparse=True))
    if run.device.info.kind == "cuda":
        run.device.fill(table, POISON_BYTE)
    for row, position in zip(rows, inputs.positions, strict=True):
        run.device.write(table.view((shape[1],), offset_elems=int(position) * shape[1]), np.ascontiguousarray(row))
    return table


def _page_row(run: _Run, placement: Placement) -> PageRow:
    ids = [*placement.rows[0], *placement.unread]
    if not placement.unread:
        row = PageRow.from_host(run.device, ids)
        run.keep(row.indices)
        return row
    # The host would refuse the out-of-range id; the kernel must simply not use it.
    return PageRow.from_device(run.upload(np.asarray(ids, dtype=np.int32), "page_row"))


def _batch(run: _Run, placement: Placement) -> PagedBatch:
    rows = [[*row, *placement.unread] for row in placement.rows]
    if not placement.unread:
        batch = PagedBatch.from_host(
            run.device,
            positions=run.case.positions,
            page_lists=rows,
            page_origins=placement.origins,
            padding_page=placement.padding_page,
        )
        for array in (batch.positions, batch.page_indices, batch.page_indptr, batch.page_origins):
            run.keep(array)
        return batch
    indptr = np.cumsum([0, *(len(row) for row in rows)])

    def upload(values: Any, label: str) -> DeviceArray:
        return run.upload(np.asarray(values, dtype=np.int32), label)

    return PagedBatch.from_device(
        upload(run.case.positions, "positions"),
        upload([page for row in rows for page in row], "page_indices"),
        upload(indptr, "page_indptr"),
        upload(placement.origins, "page_origins"),
        padding_page=placement.padding_page,
    )


def _plan(run: _Run, placement: Placement) -> PrefillPagedPlan:
    size = placement.page_size
    requests = [
        PlanRequest.of(kv_len=start + q_len, q_len=q_len, pages=row, page_size=size)
        for (start, q_len), row in zip(run.case.requests, placement.rows, strict=True)
    ]
    shape = PlanShape.of(run.case.geometry, page_size=size)
    plan = PrefillPagedPlan.batch(run.device, requests, shape=shape, padding_page=placement.padding_page)
    run.arrays.extend(plan.buffers.by_name().values())
    return plan
