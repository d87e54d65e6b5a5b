"""A serving run on a device: prep writes what attention then reads, step by step, over the whole life of requests.

After each prep call q and the new K and V rows are read back, held against the prep oracle, and noted; attention is
held against float64 over what was noted. So an error of prep is prep's, and a row that changes later, or is read from
another place, is attention's or the pool's. The pool as a whole is compared after every step: written rows, NaN in all
else, released pages among it. Where attention of a decode step can begin while prep ends, both are launched once more
so, over rows that are poison again, and must leave the same bits. Last, all outputs must have the bits of a run that
releases no page before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.arguments import plan_requests, workspace
from g4kv_cli.cases.attention.pool import places_of
from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.serve.table import ServeCase, Step, Work, serving_steps
from g4kv_cli.cases.session import Session, run_session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import PagedPool, RopeTables
from g4kv_cli.entries.attention_request import begins_early
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import decode_entries, entry_for
from g4kv_cli.inputs import PrepInputs, make_inputs, table_of, turning_columns
from g4kv_cli.model.kv_format import FOLDED
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.pool_image import BLOCK_AXES, PoolImage
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.oracle.attention import attend, concatenate
from g4kv_cli.oracle.attention_suspects import AttentionSuspects, RequestRows
from g4kv_cli.oracle.bfloat16 import BF16, bits, round_to_bf16
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, ROWS, Axes, compare_bits, compare_values
from g4kv_cli.oracle.compare_attention import compare_attention
from g4kv_cli.oracle.prep_suspects import Part, PrepRows
from g4kv_cli.oracle.reference import Expected, expected_folded_query, expected_rotated, expected_value_rows
from g4kv_cli.records.run import CaseResult

Array = npt.NDArray[Any]

NUM_LAYERS, LAYER = 2, 1
PADDING_PAGE = 0
NUM_SPLITS = 3
K_WEIGHT_SCALE = 0.125
"""Normed q and k of weights near 1 make a softmax of one key; an eighth spreads it."""


@dataclass(slots=True, eq=False)
class _History:
    """One request: its raw projections, and the K and V rows that stand in the pool. [tokens, heads, head_dim]; of
    folded rows ``k`` has the columns of one, and ``turning`` says which."""

    inputs: PrepInputs
    k: Array
    v: Array
    turning: npt.NDArray[np.intp] | None = None

    @property
    def whole_k(self) -> Array:
        """K as scores take it: V in the columns that a folded row has not."""
        if self.turning is None:
            return self.k
        whole = self.v.copy()
        whole[..., self.turning] = self.k
        return whole


@dataclass(slots=True, kw_only=True)
class ServeSession(Session):
    """A serving run on the device."""

    case: ServeCase
    outputs: dict[tuple[int, str, int], Array] = field(default_factory=dict)
    """Attention output [tokens, heads, head_dim] by (step, batch, request)."""


def run_serve_case(
    case: ServeCase, library: KernelLibrary, rerun: str, dumps: DumpSettings | None = None
) -> CaseResult:
    """Run a serving case, once with and once without releasing pages; see run_session."""
    return run_session(
        case, rerun, library, lambda: ServeSession(library=library, case=case), _with_and_without_release, dumps=dumps
    )


def _with_and_without_release(session: ServeSession) -> None:
    _Run(session, release=True).run()
    if session.mismatches:
        return
    releasing, session.outputs = session.outputs, {}
    _Run(session, release=False).run()
    geometry = session.case.geometry
    forms = [entry_for(geometry, "attention", "prefill"), *session.served(decode_entries(geometry))]
    same_bits = session.promises("bits_with_released_pages", forms)
    for (step, batch, request), kept in session.outputs.items():
        session.digest.update(np.ascontiguousarray(kept).tobytes())
        if same_bits:
            operation = f"step {step}, {batch}: out without and with released pages, request {request}"
            session.compared(operation, releasing[step, batch, request], kept)
            session.found(compare_bits(operation, releasing[step, batch, request], kept, Axes(ROWS)))


class _Run:
    """One pass over the steps."""

    def __init__(self, session: ServeSession, *, release: bool) -> None:
        self.session, self.case, self.device = session, session.case, session.device
        self.geometry = session.case.geometry
        self.script = serving_steps(session.case, release=release)
        layout = derived_layout(self.geometry, self.case.page_size, NUM_LAYERS, self.case.kv_format)
        self.turning = turning_columns(self.geometry) if self.case.kv_format == FOLDED else None
        self.flat = np.full(layout.pool_elems(self.script.num_pages), POISON_BITS, np.uint16).view(BF16)
        """What the pool must hold, as it lies in memory."""
        self.image = PoolImage.of(layout, self.script.num_pages, session.library.pool_order)
        self.blocks = self.image.blocks(self.flat)
        """The same, K and V, [page][layer][slot][head][dim] each."""
        self.owners = {PADDING_PAGE: "a padding page"}
        self.pool = PagedPool(layout, session.upload(self.flat, "pool"), self._owner_words)
        self.histories = [self._history(index) for index in range(len(self.case.requests))]
        first = self.histories[0].inputs
        table_positions = max(request.total for request in self.case.requests)
        longest = max(self.histories, key=lambda history: len(history.inputs.positions)).inputs
        cos, sin = (table_of(rows, longest.positions, table_positions) for rows in (longest.cos, longest.sin))
        self.k_weight = (first.k_weight.astype(np.float32) * K_WEIGHT_SCALE).astype(BF16)
        self.q_weight = first.q_weight
        self.common: dict[str, Any] = {
            "q_norm_weight": session.upload(self.q_weight, "q_norm_weight"),
            "k_norm_weight": session.upload(self.k_weight, "k_norm_weight"),
            "rope": RopeTables(session.upload(cos, "cos"), session.upload(sin, "sin")),
            "rotary_dim": self.geometry.rotary_dim,
            "pool": self.pool,
            "layer": LAYER,
        }

    def run(self) -> None:
        """All steps, up to the first that goes wrong; the decode forms take turns."""
        forms = self.session.served(decode_entries(self.geometry))
        for step in self.script.steps:
            for work in step.cached:
                self._write_cached(work)
            self._poison(step.released)
            if any(work.kv.q_len for work in step.prefill):
                self._batch(step, entry_for(self.geometry, "attention", "prefill"), step.prefill)
            if step.decode:
                self._batch(step, forms[step.number % len(forms)], step.decode, is_decode=True)
            self._compare_pool(step)
            self._poison(step.ended)
            if self.session.mismatches:
                return

    # --- the pool between calls ---------------------------------------------------------------------------------

    def _history(self, index: int) -> _History:
        total = self.case.requests[index].total
        geometry = self.geometry
        inputs = make_inputs(
            geometry,
            "random",
            seed=self.case.seed + 100 * index,
            positions=range(total),
            rotary_dim=geometry.rotary_dim,
            table_positions=total,
            with_v=not geometry.k_eq_v,
        )
        k, v = (
            np.full((total, geometry.num_kv_heads, self.image.row_dim(kv)), POISON_BITS, np.uint16).view(BF16)
            for kv in (0, 1)
        )
        return _History(inputs, k, v, self.turning)

    def _write_cached(self, work: Work) -> None:
        """A prefix hit: another request's prep has written these rows, so they come from the oracle."""
        history, cached = self.histories[work.request], slice(0, work.kv.kv_len)
        k, v = self._expected_rows(history, cached)
        history.k[cached], history.v[cached] = round_to_bf16(k.value), round_to_bf16(v.value)
        first = work.kv.origin * self.case.page_size
        pages, slots = places_of(work.kv, first, self.case.page_size)
        for block, rows in zip(self.blocks, (history.k, history.v), strict=True):
            block[pages, LAYER, slots] = rows[first : work.kv.kv_len]
        for page in work.kv.pages:
            self._write_page(page)

    def _poison(self, pages: Sequence[int]) -> None:
        """What was given back is gone: NaN, until its next owner writes."""
        for page in pages:
            self.owners[page] = self._owner_words(page).replace("holds it", "has given it back")
            for block in self.blocks:
                bits(block)[page] = POISON_BITS
            self._write_page(page)

    def _owner_words(self, page: int) -> str:
        return self.owners.get(page, "nobody ever had it")

    def _write_page(self, page: int) -> None:
        if self.image.order.axes[0] != "page":
            self.device.write(self.pool.data, self.flat)  # a page lies in pieces
            return
        elements = self.flat.size // self.image.num_pages
        piece = slice(page * elements, (page + 1) * elements)
        self.device.write(self.pool.data.view((elements,), offset_elems=piece.start), self.flat[piece])

    def _compare_pool(self, step: Step) -> None:
        blocks = self.image.blocks(self.device.inspect(self.pool.data))
        for kv, (got, want) in enumerate(zip(blocks, self.blocks, strict=True)):
            # Padding rows have written to their page; what stands there is nobody's business.
            bits(want)[PADDING_PAGE] = bits(got)[PADDING_PAGE]
            operation = f"{'KV'[kv]} in the pool after step {step.number}"
            self.session.compared(operation, got, want)
            self.session.found(compare_bits(operation, got, want, Axes(BLOCK_AXES), "not what was written there"))

    # --- a batch: prep, then attention over it ------------------------------------------------------------------

    def _batch(self, step: Step, form: Entry, works: Sequence[Work], *, is_decode: bool = False) -> None:
        name = f"step {step.number}, {'decode' if is_decode else 'prefill'}"
        for work in (*step.prefill, *step.decode):
            self.owners |= dict.fromkeys(work.kv.pages, f"request {work.request} holds it")
        rows = _Rows(works)
        # A decode batch is padded to a power of two, for prep and attention alike.
        padding = _bucket(rows.count) - rows.count if is_decode else 0
        plan = PrefillPagedPlan.batch(
            self.device,
            [*plan_requests([work.kv for work in works], self.case.page_size),
             *[PlanRequest.padding(PADDING_PAGE)] * padding],
            shape=PlanShape.of(self.geometry, page_size=self.case.page_size),
            padding_page=PADDING_PAGE,
        )  # fmt: skip
        self.session.arrays.extend(plan.buffers.by_name().values())
        group = self.geometry.gqa_group
        library, layout = self.session.library, self.pool.layout
        before = self.flat.copy() if is_decode and begins_early(form, library, layout, group) else None
        prep = self._prep(name, works, rows, plan, padding, is_decode)
        attention = self._attend(name, step, form, works, rows, plan, prep.arguments["q_out"], is_decode)
        if before is not None:
            self._compare_overlapped(f"{name} ({form.form}) overlapping prep", prep, attention, before, rows)

    def _prep(
        self, name: str, works: Sequence[Work], rows: _Rows, plan: PrefillPagedPlan, padding: int, is_decode: bool
    ) -> _Launched:
        """Write the batch's K and V and its q_out."""
        q = self._raw(works, "q", padding)
        q_out = self.session.poisoned(q.shape, "q_out")
        arguments = self.common | {"q": q, "k": self._raw(works, "k", padding), "q_out": q_out}
        if not self.geometry.k_eq_v:
            arguments["v"] = self._raw(works, "v", padding)
        arguments |= {"batch": plan.decode_batch()} if is_decode else {"plan": plan}
        entry = entry_for(self.geometry, "prep", "decode" if is_decode else "batch_prefill")
        entry(self.session.library, **arguments)
        self._note(name, entry, works, rows, self.device.read(q_out)[: rows.count])
        return _Launched(entry, arguments)

    def _note(self, name: str, entry: Entry, works: Sequence[Work], rows: _Rows, q: Array) -> None:
        """Hold the new rows against the prep oracle, and note what stands in the pool."""
        blocks = self.image.blocks(self.device.inspect(self.pool.data))
        rounds_norm = self.session.library.contract_of(entry.name).rounds_norm
        for work, token in zip(works, rows.first_tokens, strict=True):
            if not work.kv.q_len:
                continue
            history, new = self.histories[work.request], slice(work.kv.start_pos, work.kv.kv_len)
            pages, slots = places_of(work.kv, work.kv.start_pos, self.case.page_size)
            got = [block[pages, LAYER, slots] for block in blocks]
            inputs = history.inputs
            expected_q = self._expected_queries(inputs, new, rounds_norm=rounds_norm)
            where = Axes(ROWS, {"request": work.request}, {"position": range(work.kv.start_pos, work.kv.kv_len)})
            given = PrepRows(
                inputs.q[new], inputs.k[new], None if inputs.v is None else inputs.v[new], self.q_weight,
                self.k_weight, inputs.cos[new], inputs.sin[new], inputs.positions[new], self.turning,
            )  # fmt: skip
            expected_k, expected_v = self._expected_rows(history, new, rounds_norm=rounds_norm)
            parts: tuple[tuple[str, Part, Array, Expected], ...] = (
                ("q_out", "q", q[token : token + work.kv.q_len], expected_q),
                ("K in the pool", "k", got[0], expected_k),
                ("V in the pool", "v", got[1], expected_v),
            )
            for what, part, values, expected in parts:
                whose = given.suspects(part)
                self.session.compared(f"{name}: {what}", values, expected.value, expected.limit)
                self.session.found(compare_values(f"{name}: {what}", values, expected, where, whose))
            history.k[new], history.v[new] = got
            for block, rows_written in zip(self.blocks, got, strict=True):
                block[pages, LAYER, slots] = rows_written

    def _expected_queries(self, inputs: PrepInputs, tokens: slice, *, rounds_norm: bool) -> Expected:
        q, cos, sin = inputs.q[tokens], inputs.cos[tokens], inputs.sin[tokens]
        if self.turning is None:
            return expected_rotated(q, self.q_weight, cos, sin, rounds_norm=rounds_norm)
        return expected_folded_query(q, self.q_weight, self.k_weight, cos, sin, self.turning)

    def _expected_rows(
        self, history: _History, tokens: slice, *, rounds_norm: bool = False
    ) -> tuple[Expected, Expected]:
        inputs = history.inputs
        cos, sin = inputs.cos[tokens], inputs.sin[tokens]
        k = expected_rotated(inputs.k[tokens], self.k_weight, cos, sin, rounds_norm=rounds_norm)
        v = expected_value_rows(inputs.value_source[tokens])
        return (k if self.turning is None else k.columns(self.turning)), v

    def _attend(
        self, name: str, step: Step, form: Entry, works: Sequence[Work], rows: _Rows, plan: PrefillPagedPlan,
        q_out: DeviceArray, is_decode: bool,
    ) -> _Launched:  # fmt: skip
        session, geometry = self.session, self.geometry
        out = session.poisoned(q_out.shape, "out")
        arguments: dict[str, Any] = {"q": q_out, "plan": plan, "pool": self.pool, "layer": LAYER, "out": out}
        if form.takes_splits:
            arguments["num_splits"] = NUM_SPLITS
            arguments["workspace"] = workspace(
                session, q_out.shape[0], geometry.num_qo_heads, NUM_SPLITS, geometry.head_dim
            )
        form(session.library, **arguments)
        q, got = (self.device.read(array)[: rows.count] for array in (q_out, out))
        parts, named, suspects = [], [], []
        roundings = session.library.contract_of(form.name).roundings(is_split=form.takes_splits)
        for work, token in zip(works, rows.first_tokens, strict=True):
            if not work.kv.q_len:
                continue
            history, tokens = self.histories[work.request], slice(token, token + work.kv.q_len)
            first = work.kv.first_seen(geometry.window_left)
            keys, k = slice(first, work.kv.kv_len), history.whole_k
            parts.append(
                attend(q[tokens], k[keys], history.v[keys], first_key=first,
                       window_left=geometry.window_left, sm_scale=1.0, roundings=roundings)
            )  # fmt: skip
            whole = slice(0, work.kv.kv_len)
            suspects.append(RequestRows(q[tokens], k[whole], history.v[whole], 0, work.request))
            named += [work.request] * work.kv.q_len
            session.outputs[step.number, "decode" if is_decode else "prefill", work.request] = got[tokens]
        expected = concatenate(parts)
        axes = Axes(ROWS, {}, {"request": named, "position": rows.positions})
        operation = f"{name} ({form.form}): out"
        whose = AttentionSuspects(suspects, geometry.window_left, 1.0, self.case.page_size)
        session.compared(operation, got, expected.value, expected.rounding.limit)
        session.found(compare_attention(operation, got, expected, axes, whose))
        return _Launched(form, arguments)

    def _compare_overlapped(
        self, operation: str, prep: _Launched, attention: _Launched, before: Array, rows: _Rows
    ) -> None:
        """Both calls again, attention beginning while prep ends, in a pool as it was ``before`` them."""
        session, out = self.session, attention.arguments["out"]
        want = self.device.read(out)[: rows.count]
        self.device.write(self.pool.data, before)
        for array in (prep.arguments["q_out"], out):
            self.device.fill(array, POISON_BYTE)
        prep.entry(session.library, **prep.arguments)
        attention.entry(session.library, **attention.arguments, enable_pdl=True)
        got = self.device.read(out)[: rows.count]
        session.compared(operation, got, want)
        session.found(compare_bits(operation, got, want, Axes(ROWS)))

    def _raw(self, works: Sequence[Work], name: str, padding: int) -> DeviceArray:
        """The raw rows of the batch's new tokens, and NaN rows behind them."""
        rows = [
            getattr(self.histories[work.request].inputs, name)[work.kv.start_pos : work.kv.kv_len] for work in works
        ]
        behind = np.full((padding, *rows[0].shape[1:]), POISON_BITS, np.uint16).view(BF16)
        return self.session.upload(np.concatenate([*rows, behind]), name)


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A call that was made."""

    entry: Entry
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the works' tokens stand in a batch."""

    works: Sequence[Work]

    @property
    def count(self) -> int:
        return sum(work.kv.q_len for work in self.works)

    @property
    def first_tokens(self) -> list[int]:
        ends = np.cumsum([0, *(work.kv.q_len for work in self.works)])
        return [int(end) for end in ends[:-1]]

    @property
    def positions(self) -> list[int]:
        return [position for work in self.works for position in range(work.kv.start_pos, work.kv.kv_len)]


def _bucket(tokens: int) -> int:
    """The next power of two: what a captured graph of a decode step is made for."""
    return 1 << (tokens - 1).bit_length()
