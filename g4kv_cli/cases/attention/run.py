"""One attention case on one device: fill the pages, poison the rest and every output, launch, compare per row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.arguments import (
    call_arguments,
    make_plan,
    paged_pool,
    plan_requests,
    plan_shape,
    workspace,
)
from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.ends import require_ends, require_memory, run_ends
from g4kv_cli.cases.attention.golden import check_recorded, recorded_tensors
from g4kv_cli.cases.attention.inputs import AttentionTensors, expected_attention
from g4kv_cli.cases.attention.merge import launch_merge
from g4kv_cli.cases.attention.pool import AttentionPool, other_pages
from g4kv_cli.cases.attention.prepared import prepared
from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.session import Session, Skip, require_coverage, run_session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.entries.entry import Entry, Target
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.entries.table import entries_for, prefill_tiles
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.oracle.attention import ExpectedAttention
from g4kv_cli.oracle.attention_suspects import AttentionSuspects, RequestRows
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, ROWS, Axes, compare_bits, compare_untouched
from g4kv_cli.oracle.compare_attention import compare_attention, compare_float32_bits, compare_lse
from g4kv_cli.oracle.suspects import Suspects
from g4kv_cli.records.run import CaseResult, Status

Array = npt.NDArray[Any]


@dataclass(slots=True, kw_only=True)
class AttentionSession(Session):
    """An attention case on the device."""

    case: AttentionCase
    tensors: AttentionTensors
    expected: ExpectedAttention

    @property
    def contract(self) -> Contract:
        """What the kernels of the case's entry promise."""
        return self.library.contract_of(self.case.entry)


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What one call left: ``out`` bf16 [tokens + padding_rows, num_qo_heads, head_dim], ``lse`` float32 likewise,
    without a row where it is not wanted."""

    out: Array
    lse: Array


def run_attention_case(
    case: AttentionCase, library: KernelLibrary, rerun: str, dumps: DumpSettings | None = None
) -> CaseResult:
    """Run an attention case; see run_session."""

    def make() -> AttentionSession:
        device = library.device
        if case.check == "graph" and device.info.kind != "cuda":
            raise Skip("CUDA graphs need a CUDA device")
        if case.check == "graph" and library.provider is not None:
            raise NotCovered("a graph keeps one call's metadata, which a manifest makes anew for each call")
        contract = require_coverage(library, case, (request.origin for request in case.requests))
        if case.check == "ends":
            require_memory(device, case)
        fitting = _with_a_tile_of(case, Target.of(device))
        if case.check == "ends":
            require_ends(library, fitting)
        with_inputs = fitting.ends if case.check == "ends" else fitting
        if case.golden is None:
            tensors, expected = prepared(with_inputs, contract)
        else:
            tensors = recorded_tensors(fitting)
            expected = expected_attention(fitting, tensors, contract=contract)
        return AttentionSession(library=library, case=fitting, tensors=tensors, expected=expected)

    lacking: Status = "not covered" if case.is_asked else "error"
    return run_session(case, rerun, library, make, _execute, lacking=lacking, dumps=dumps)


def _with_a_tile_of(case: AttentionCase, target: Target) -> AttentionCase:
    """The case with the largest tile of a card that has not the shared memory for the one it names."""
    tiles = prefill_tiles(case.geometry.head_dim, target)
    if case.cta_tile_q is None or case.cta_tile_q in tiles or not tiles:
        return case
    return dataclasses.replace(case, cta_tile_q=tiles[-1])


def _execute(session: AttentionSession) -> None:
    case = session.case
    if case.check == "ends":
        run_ends(session, case, session.tensors, session.expected)
        return
    for number, (k, v) in enumerate(zip(session.tensors.k, session.tensors.v, strict=True)):
        session.given(f"k[{number}]", k)
        session.given(f"v[{number}]", v)
    session.given("first_keys", np.array(session.tensors.first_keys))
    pool_check = make_pool(session, case)
    pool = session.keep(pool_check.upload(session.device))
    if case.check == "refill":
        outputs = _refilled(session, pool)
    elif case.check == "graph":
        outputs = _replayed(session, pool)
    elif case.check == "merge":
        outputs = Outputs(*(session.device.read(array) for array in launch_merge(session, case, session.tensors)))
    else:
        outputs = call(session, case, pool, session.tensors.q, make_plan(session, case))
    judge(session, outputs)
    session.found(pool_check.untouched(session.device, pool))
    session.digest.update(outputs.out.tobytes())
    session.digest.update(outputs.lse.tobytes())
    if case.golden is not None:
        for mismatch in check_recorded(case, session.tensors, session.expected, outputs.out, _axes(case)):
            session.found(mismatch)
    if case.check == "alone":
        _compare_alone(session, pool, outputs)
    elif case.check == "permuted":
        moved = other_pages(case)
        make_pool(session, moved).upload(session.device, pool)
        _same_bits(session, "out with other pages", outputs, call(session, moved, pool, session.tensors.q))
    elif case.check == "forms":
        _run_other_forms(session, pool)


def make_pool(session: AttentionSession, case: AttentionCase) -> AttentionPool:
    """The pool of a case as the kernels want it."""
    finite = session.contract.unseen_keys == "finite"
    return AttentionPool(case, session.tensors, session.library.pool_order, unseen_keys_finite=finite)


def judge(session: AttentionSession, outputs: Outputs, of: str = "") -> None:
    """Hold the outputs of the case's requests against the oracle, and the rows behind them against the poison. ``of``
    says in findings whose outputs they are."""
    case, expected = session.case, session.expected
    judged = _judged_tokens(case)
    axes = _axes(case)
    want = expected.of_tokens(judged)
    suspects = _suspects(session, judged)
    session.compared(f"out{of}", outputs.out[judged], want.value, want.rounding.limit)
    session.found(compare_attention(f"out{of}", outputs.out[judged], want, axes, suspects))
    lse_axes = dataclasses.replace(axes, names=ROWS[:2])
    if case.wants_lse and "lse" in session.contract.outputs:
        session.compared(f"lse{of}", outputs.lse[judged], want.lse, want.lse_limit)
        session.found(compare_lse(f"lse{of}", outputs.lse[judged], want.lse, want.lse_limit, lse_axes))
    if case.padding_rows:
        operation = f"out{of}, rows behind the tokens"
        session.found(compare_untouched(operation, outputs.out, slice(case.num_tokens), Axes(ROWS)))


def _suspects(session: AttentionSession, judged: npt.NDArray[np.intp]) -> Suspects:
    """Whose value a wrong row could be; tokens count those that are judged."""
    case, tensors, token = session.case, session.tensors, 0
    requests = []
    for number, request in enumerate(case.requests):
        q = tensors.q[token : token + request.q_len]
        requests.append(RequestRows(q, tensors.k[number], tensors.v[number], tensors.first_keys[number], number))
        token += request.q_len
    suspects = AttentionSuspects(requests, case.window_left, case.sm_scale, case.page_size)
    return lambda token, head: suspects(int(judged[token]), head)


def call(
    session: AttentionSession,
    case: AttentionCase,
    pool: DeviceArray,
    q_rows: Array,
    plan: PrefillPagedPlan | None = None,
) -> Outputs:
    """One call of the case's entry. ``q_rows`` [tokens, ..]; all outputs and scratch hold poison before it."""
    return prepare(session, case, pool, q_rows, make_plan(session, case) if plan is None else plan).run()


@dataclass(slots=True, eq=False)
class Call:
    """A call that can be made again: its arguments on the device."""

    session: AttentionSession
    entry: Entry
    arguments: dict[str, Any]
    out: DeviceArray
    lse: DeviceArray

    def launch(self) -> None:
        """Queue it."""
        self.entry(self.session.library, **self.arguments)

    def run(self) -> Outputs:
        """Queue it and read what it left."""
        self.launch()
        return self.read()

    def read(self) -> Outputs:
        """What stands in the outputs."""
        return Outputs(self.session.device.read(self.out), self.session.device.read(self.lse))


def prepare(
    session: AttentionSession, case: AttentionCase, pool: DeviceArray, q_rows: Array, plan: PrefillPagedPlan
) -> Call:
    """The arguments of the case's entry."""
    geometry = case.geometry
    rows = len(q_rows) + case.padding_rows
    padding = np.full((case.padding_rows, *q_rows.shape[1:]), POISON_BITS, dtype=np.uint16).view(BF16)
    out = session.poisoned((rows, *q_rows.shape[1:]), "out")
    lse = session.poisoned((rows if case.wants_lse else 0, geometry.num_qo_heads), "lse", np.float32)
    q = session.upload(np.concatenate([q_rows, padding]), "q")
    scratch = None
    if case.row.takes_splits:
        scratch = workspace(session, rows, geometry.num_qo_heads, case.num_splits, geometry.head_dim)
    paged = paged_pool(case, pool, _holders(session, case))
    arguments = call_arguments(case, plan, paged, q, out, lse if case.wants_lse else None, scratch)
    return Call(session, case.row, arguments, out, lse)


def _holders(session: AttentionSession, case: AttentionCase) -> tuple[KvRequest, ...]:
    """The requests whose keys lie in the pool: a call of some of them has the others' pages beside its own."""
    everybody = session.case.requests
    return everybody if set(case.requests) <= set(everybody) else case.requests


# --- checks beside the oracle ------------------------------------------------------------------------------------


def _compare_alone(session: AttentionSession, pool: DeviceArray, outputs: Outputs) -> None:
    """Each request in a batch of its own has the bits that it has among its companions."""
    case, token = session.case, 0
    for index, request in enumerate(case.requests):
        rows = slice(token, token + request.q_len)
        token += request.q_len
        if not request.q_len or request.is_padding:
            continue
        alone = dataclasses.replace(case, requests=(request,), padding_rows=0)
        got = call(session, alone, pool, session.tensors.q[rows])
        batch = Outputs(outputs.out[rows], outputs.lse[rows])
        if session.contract.batch_invariant:
            _same_bits(session, f"out of request {index} alone", batch, got)
        else:
            want = session.expected.of_tokens(np.arange(rows.start, rows.stop))
            session.compared(f"out of request {index} alone", got.out, want.value, want.rounding.limit)
            session.found(compare_attention(f"out of request {index} alone", got.out, want, Axes(ROWS)))


def _run_other_forms(session: AttentionSession, pool: DeviceArray) -> None:
    """Every other form on the same requests, each against the oracle: two right results may differ by the sum of both
    limits, so holding them against each other would say nothing more. A form that the kernels at hand do not serve is
    noted; NotCovered if that is all of them."""
    case, compared = session.case, 0
    unserved = (NotCovered, DeviceUnavailable) if case.is_asked else (NotCovered,)
    for entry in entries_for(case.geometry, "attention"):
        for num_splits in (2, 5) if entry.takes_splits else (1,):
            if entry.name == case.entry:
                continue
            other = dataclasses.replace(case, form=entry.form, entry=entry.name, num_splits=num_splits)
            try:
                got = call(session, other, pool, session.tensors.q)
            except unserved as why:
                session.left_out[str(why)] = None
                continue
            compared += 1
            # What its kernels promise may be less than what those of the case's entry do.
            contract = session.library.contract_of(entry.name)
            held = session
            if contract != STRICT:
                expected = expected_attention(other, session.tensors, contract=contract)
                held = dataclasses.replace(session, expected=expected)
            judge(held, got, f" of {entry.form}")
            session.digest.update(got.out.tobytes())
    if not compared:
        raise NotCovered("; ".join(session.left_out))


def _refilled(session: AttentionSession, pool: DeviceArray) -> Outputs:
    """All requests through a preallocated plan, then half of them: the arrays still hold what the others left."""
    case = session.case
    plan = _preallocated(session)
    _fill(plan, case)
    whole = call(session, case, pool, session.tensors.q, plan)
    half = dataclasses.replace(case, requests=case.requests[: len(case.requests) // 2])
    _fill(plan, half)
    q = session.tensors.q[: half.num_tokens]
    _same_bits(
        session, "out of a plan refilled with less", call(session, half, pool, q), call(session, half, pool, q, plan)
    )
    return whole


def _replayed(session: AttentionSession, pool: DeviceArray) -> Outputs:
    """A graph captured while the plan held the requests in reverse, replayed after an update in place.

    As many requests and tiles as before: a graph keeps its grid, and only the arrays change.
    """
    case = session.case
    device: Any = session.device
    plan = _preallocated(session)
    _fill(plan, dataclasses.replace(case, requests=case.requests[::-1]))
    captured = prepare(session, case, pool, np.ascontiguousarray(session.tensors.q[::-1]), plan)
    captured.run()
    with device.capture() as graph:
        captured.launch()
    try:
        _fill(plan, case)
        device.write(captured.arguments["q"], session.tensors.q)
        device.fill(captured.out, POISON_BYTE)
        device.fill(captured.lse, POISON_BYTE)
        graph.replay()
        replayed = captured.read()
    finally:
        graph.close()
    judged = _judged_tokens(case)
    fresh, again = (
        Outputs(one.out[judged], one.lse[judged]) for one in (call(session, case, pool, session.tensors.q), replayed)
    )
    _same_bits(session, "out of a replayed graph", fresh, again)
    return replayed


def _fill(plan: PrefillPagedPlan, case: AttentionCase) -> None:
    plan.update(plan_requests(case.requests, case.page_size), shape=plan_shape(case), padding_page=case.padding_page)


def _preallocated(session: AttentionSession) -> PrefillPagedPlan:
    """A plan with room to spare in each of its arrays."""
    case = session.case
    plan = PrefillPagedPlan.preallocated(
        session.device,
        max_tokens=case.num_tokens + 5,
        max_requests=len(case.requests) + 2,
        max_pages=sum(len(request.pages) for request in case.requests) + 3,
        max_tiles=case.num_tokens * case.geometry.gqa_group + len(case.requests),
    )
    session.arrays.extend(plan.buffers.by_name().values())
    return plan


def _same_bits(session: AttentionSession, operation: str, want: Outputs, got: Outputs) -> None:
    session.compared(operation, got.out, want.out)
    session.found(compare_bits(operation, got.out, want.out, Axes(ROWS)))
    session.found(compare_float32_bits(operation.replace("out", "lse", 1), got.lse, want.lse, Axes(ROWS[:2])))


def _judged_tokens(case: AttentionCase) -> npt.NDArray[np.intp]:
    """Tokens whose output counts: all but those of padding requests."""
    counts = np.repeat([not request.is_padding for request in case.requests], [r.q_len for r in case.requests])
    return np.flatnonzero(counts)


def _axes(case: AttentionCase) -> Axes:
    kept = _judged_tokens(case)
    lengths = [request.q_len for request in case.requests]
    positions = np.concatenate([np.arange(request.start_pos, request.kv_len) for request in case.requests])
    where = {"position": positions, "request": np.repeat(np.arange(len(lengths)), lengths)}
    return Axes(ROWS, {}, {name: values[kept] for name, values in where.items()})
