"""The long-context companion of the replays, without a model: the real window, and the last positions there are.

A recorded model is at home below position 90 and has a window of 16 or 21. Here one request of random rows walks
through a layer of a real geometry (one rank's heads): from position 0 across the real window, and again up to the last
position of the model. After each prep call q, K and V are held against the prep oracle at their absolute positions, and
each attention output against float64 attention over the rows that were noted then; released fronts are poisoned.

A far request begins where its window begins, as if the rest had been served and released. The global family has no
window, so a far query would need all keys from position 0 on: there its far positions are met under a window of
``FAR_GLOBAL_WINDOW`` keys, which the kernels take like any other, and its whole history only over the near walk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from g4kv_cli.cases.case import OfManyEntries, RunContext
from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.e2e.caches import FamilyCache, PageList
from g4kv_cli.cases.e2e.family_launches import FamilyLaunches
from g4kv_cli.cases.e2e.recorded_model import Array
from g4kv_cli.cases.e2e.table import END_TO_END_WEIGHT
from g4kv_cli.cases.session import Session, run_session
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import decode_entries, entry_for
from g4kv_cli.errors import G4kvError
from g4kv_cli.inputs import rope_rows
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS as PAGE_SIZE
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.slots import pages_for
from g4kv_cli.oracle.attention import attend
from g4kv_cli.oracle.attention_suspects import AttentionSuspects, RequestRows
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import ROWS, Axes, compare_values
from g4kv_cli.oracle.compare_attention import compare_attention
from g4kv_cli.oracle.prep_suspects import Part, PrepRows
from g4kv_cli.oracle.reference import Expected, expected_rotated, expected_value_rows
from g4kv_cli.records.run import CaseResult

ENTRY = "long_context_walk"
PREFIX = "e2e/far"
SEED = 20
FAR_GLOBAL_WINDOW = 64
NEAR_GLOBAL_TOKENS = 320
WRITE_CHUNK = 256
"""Tokens of a prep call whose queries nobody asks."""
ATTENTION_CHUNK = 48
"""Not a multiple of the page: chunks begin and end inside pages."""
SCORE_DEVIATION = 3.0
"""Of q.k: a few of a thousand keys make most of a row, so that a key too many or too few shows."""
NUM_SPLITS = 5

RANKS = (("12b-local", 8), ("12b-global", 8), ("e4b-local", 2), ("e4b-global", 2))
"""Geometries and the tensor-parallel ranks that leave one KV head."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Positions from ``start`` on: ``written`` tokens by prep alone, ``asked`` tokens in chunks with attention, then
    ``decoded`` decode steps, one in each form."""

    start: int
    written: int
    asked: int
    decoded: int

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + self.written + self.asked + self.decoded


@dataclass(frozen=True, slots=True)
class FarCase(OfManyEntries):
    """One walk of one layer. The geometry's window is the one that the walk is made under."""

    id: str
    geometry: Geometry
    walk: Walk
    entry: str = ENTRY

    @property
    def weight(self) -> float:
        """See END_TO_END_WEIGHT."""
        return END_TO_END_WEIGHT

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_far_case."""
        return run_far_case(self, context.library, context.rerun(self.id), context.dumps)


def far_cases() -> list[FarCase]:
    """A near and a far walk of each geometry."""
    cases = []
    for name, ranks in RANKS:
        geometry = GEOMETRIES[name].for_rank(ranks)
        forms = len(decode_entries(geometry))
        near = Walk(0, NEAR_GLOBAL_TOKENS, ATTENTION_CHUNK, forms)
        if geometry.window is not None:
            # Attention starts before the window's edge meets key 0, and ends two pages after the first release.
            near = Walk(0, geometry.window - ATTENTION_CHUNK // 2, 2 * ATTENTION_CHUNK, forms)
        cases.append(FarCase(f"{PREFIX}/{name}/from-zero", geometry, near))
        if geometry.window is None:
            geometry = dataclasses.replace(geometry, window=FAR_GLOBAL_WINDOW)
        cases.append(FarCase(f"{PREFIX}/{name}/last-positions", geometry, _far_walk(geometry)))
    return cases


def _far_walk(geometry: Geometry) -> Walk:
    """Up to the last position of all; the first query sees a whole window of written keys."""
    window = geometry.window or 0
    forms = len(decode_entries(geometry))
    tokens = window + ATTENTION_CHUNK + forms
    start = (geometry.max_positions - tokens) // PAGE_SIZE * PAGE_SIZE
    return Walk(start, geometry.max_positions - ATTENTION_CHUNK - forms - start, ATTENTION_CHUNK, forms)


@dataclass(slots=True, kw_only=True)
class FarRun(Session):
    """A walk on the device."""

    case: FarCase


def run_far_case(case: FarCase, library: KernelLibrary, rerun: str, dumps: DumpSettings | None = None) -> CaseResult:
    """Run a case; see run_session."""
    return run_session(case, rerun, library, lambda: FarRun(library=library, case=case), _execute, dumps=dumps)


def _execute(run: FarRun) -> None:
    walker, walk = _Walker(run), run.case.walk
    try:
        walker.write(walk.written)
        for count in _chunks(walk.asked, ATTENTION_CHUNK):
            walker.ask(count)
        forms = run.served(decode_entries(run.case.geometry))
        for number in range(walk.decoded):
            walker.decode(forms[number % len(forms)])
    finally:
        with suppress(G4kvError):  # after a fault the device is replaced, and its memory with it
            walker.launches.free()


def _chunks(tokens: int, size: int) -> list[int]:
    return [min(size, tokens - begin) for begin in range(0, tokens, size)]


class _Walker:
    """One request; ``k`` and ``v`` note what prep has stored, from the walk's first position on."""

    def __init__(self, run: FarRun) -> None:
        self.run, self.geometry = run, run.case.geometry
        geometry, walk = self.geometry, run.case.walk
        self.at = walk.start
        self.held = PageList(1, walk.start // PAGE_SIZE)
        self.random = np.random.Generator(np.random.PCG64([SEED, walk.start, geometry.head_dim]))
        weights = 1 + 0.25 * self.random.standard_normal((2, geometry.head_dim))
        weights[1] *= SCORE_DEVIATION / np.sqrt(geometry.head_dim)
        self.q_weight, self.k_weight = weights.astype(np.float32).astype(BF16)
        self.cache = FamilyCache(
            run.device, geometry, num_layers=2, page_size=PAGE_SIZE, context_tokens=walk.end, step_tokens=WRITE_CHUNK,
            num_requests=1, seed=SEED, order=run.library.pool_order,
        )  # fmt: skip
        # Two layers lie in a page, and the second is used: the first stays poison.
        self.layer = 1
        self.launches = FamilyLaunches(
            run.library, self.cache, [(self.q_weight, self.k_weight)] * 2,
            rope_positions=[range(walk.start, walk.end)], cos_max_pos=walk.end, max_rows=WRITE_CHUNK, max_requests=1,
            num_splits=NUM_SPLITS,
        )  # fmt: skip
        rows = (0, geometry.num_kv_heads, geometry.head_dim)
        self.k, self.v = np.empty(rows, BF16), np.empty(rows, BF16)

    def write(self, tokens: int) -> None:
        """Prep alone, in chunks."""
        for count in _chunks(tokens, WRITE_CHUNK):
            raw = self._begin(count, self.launches.prepare_write)
            self.launches.write_prefill(self.layer, *raw)
            self._note(raw, "prefill")
            self._advance(count)

    def ask(self, tokens: int) -> None:
        """A chunk with attention."""
        raw = self._begin(tokens, lambda request: self.launches.prepare_prefill([request]))
        out = self.launches.prefill(self.layer, *raw)
        form = entry_for(self.geometry, "attention", "prefill")
        self._check(out, self._note(raw, "prefill"), form, "prefill")
        self._advance(tokens)

    def decode(self, form: Entry) -> None:
        """One token."""
        raw = self._begin(1, lambda request: self.launches.prepare_decode([request]))
        out = self.launches.decode(self.layer, *raw, form.label)
        self._check(out, self._note(raw, "decode"), form, f"decode form ({form.label})")
        self._advance(1)

    def _begin(self, tokens: int, prepare: Callable[[PlanRequest], None]) -> tuple[Array, Array, Array | None]:
        """Raw rows of the next tokens; their pages and metadata are ready."""
        geometry = self.geometry
        self.cache.extend(self.held, self.at + tokens)
        prepare(self.cache.plan_request(self.held, self.at, tokens))

        def rows(heads: int) -> Array:
            return self.random.standard_normal((tokens, heads, geometry.head_dim), dtype=np.float32).astype(BF16)

        q, k = rows(geometry.num_qo_heads), rows(geometry.num_kv_heads)
        return q, k, None if geometry.k_eq_v else rows(geometry.num_kv_heads)

    def _note(self, raw: tuple[Array, Array, Array | None], prep: str) -> Array:
        """Hold what prep (of this form) made against its oracle, and note K and V. Returns q as attention gets it."""
        q_raw, k_raw, v_raw = raw
        span = range(self.at, self.at + len(q_raw))
        positions = np.arange(span.start, span.stop)
        cos, sin = rope_rows(self.geometry, positions, self.geometry.rotary_dim)
        q = self.launches.rotated_queries()
        k, v = self.cache.stored(self.held, self.layer, span)
        axes = self._axes(positions)
        contract = self.run.library.contract_of(entry_for(self.geometry, "prep", prep).name)
        rounds_norm = contract.rounds_norm
        given = PrepRows(q_raw, k_raw, v_raw, self.q_weight, self.k_weight, cos, sin, positions)
        parts: tuple[tuple[str, Part, Array, Expected], ...] = (
            ("q_out", "q", q, expected_rotated(q_raw, self.q_weight, cos, sin, rounds_norm=rounds_norm)),
            ("K in the pool", "k", k, expected_rotated(k_raw, self.k_weight, cos, sin, rounds_norm=rounds_norm)),
            ("V in the pool", "v", v, expected_value_rows(k_raw if v_raw is None else v_raw)),
        )
        for name, part, got, expected in parts:
            self.run.compared(name, got, expected.value, expected.limit)
            self.run.found(compare_values(name, got, expected, axes, given.suspects(part)))
            self.run.digest.update(np.ascontiguousarray(got).tobytes())
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        return q

    def _check(self, out: Array, q: Array, form: Entry, words: str) -> None:
        """Attention over the rows that were noted when prep wrote them."""
        left, start = self.geometry.window_left, self.run.case.walk.start
        first = start if left < 0 else max(start, self.at - left)
        kept = slice(first - start, None)
        roundings = self.run.library.contract_of(form.name).roundings(is_split=form.takes_splits)
        want = attend(
            q, self.k[kept], self.v[kept], first_key=first, window_left=left, sm_scale=1.0, roundings=roundings
        )
        axes = self._axes(range(self.at, self.at + len(q)))
        rows = RequestRows(q, self.k, self.v, start, 0)
        whose = AttentionSuspects([rows], left, 1.0, PAGE_SIZE)
        self.run.compared(f"attention, {words}", out, want.value, want.rounding.limit)
        self.run.found(compare_attention(f"attention, {words}", out, want, axes, whose))
        self.run.digest.update(out.tobytes())

    def _axes(self, positions: Sequence[int] | Array) -> Axes:
        return Axes(ROWS, per_token={"position": positions})

    def _advance(self, tokens: int) -> None:
        self.at += tokens
        self.cache.release_front(self.held, self.at)
        resident = pages_for(self.at, PAGE_SIZE) - self.held.origin
        if resident != len(self.held.pages):
            raise ValueError(f"{len(self.held.pages)} pages are held where {resident} are resident")
