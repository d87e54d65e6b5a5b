"""The trap table: metadata that only a device knows, contradicting itself, and the line of the kernel that must trap.

The host's checks stand in front of all of this. Each case goes round them the way a wrong scheduler on the device
would: with metadata made on the device, with a plan's arrays overwritten after the update, or with a parameter struct
that is changed after everything was checked.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from g4kv_cli.cases.case import OfOneEntry, RunContext
from g4kv_cli.cases.reject.entries import example_geometry
from g4kv_cli.cases.reject.request import Change, Draft
from g4kv_cli.cases.reject.valid import (
    DECODE_ORIGINS,
    DECODE_PAGES,
    DECODE_POSITIONS,
    NUM_PAGES,
    PAGE_ROW,
    PAGE_SIZE,
    PLAN_REQUESTS,
    PREFILL_TOKENS,
    START_POS,
    TABLE_POSITIONS,
    plan_positions,
)
from g4kv_cli.device.interface import LoadedKernel
from g4kv_cli.entries.arguments import PagedBatch, PageRow
from g4kv_cli.entries.entry import Entry, Metadata
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, entry_for, entry_named
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.records.run import CaseResult

I32_MIN, I32_MAX = -(2**31), 2**31 - 1

POSITION = "no such row in the RoPE tables"
REQUEST = "no such row"
CSR_ROW = "a row outside the array"
ORIGIN = "a page before the resident ones"
ROW_END = "the row ends before the token's page"
PAGE_ID = "no such page in the pool"
TRAP_COMMENTS = (POSITION, REQUEST, CSR_ROW, ORIGIN, ROW_END, PAGE_ID)
"""The comment at the end of each trap's line in the kernel's source: what a reported line is held against."""

Slot = tuple[int, int]


SMOKE_NAMES = {
    "prefill": {
        "page-id-negative": ("page_id_range", "negative"),
        "page-id-past-pool": ("page_id_range", "num_pages"),
    },
    "decode": {
        "position-negative": ("position_range", "negative"),
        "position-past-table": ("position_range", "past-the-tables"),
        "page-id-negative": ("page_id_range", "negative"),
        "page-id-past-pool": ("page_id_range", "num_pages"),
        "row-begin-negative": ("page_indptr", "begin-negative"),
        "row-ends-before-it-begins": ("page_indptr", "reversed"),
        "row-past-the-array": ("page_indptr", "past-the-array"),
        "origin-negative": ("page_origin", "negative"),
        "origin-past-position": ("page_origin", "past-the-position"),
        "row-too-short": ("page_coverage", "row-one-short"),
    },
    "batch_prefill": {
        "request-negative": ("request_range", "negative"),
        "request-past-the-batch": ("request_range", "past-the-plan"),
    },
}
"""What smoke runs of the table, by form: one of each kind, under the names of its own ids."""


@dataclass(frozen=True, slots=True)
class TrapCase(OfOneEntry):
    """One contradiction. ``comment`` ends the source line of the trap that must fire; ``tokens`` (blocks in x) are
    those it can fire for; ``others`` are the (page, slot) that tokens in order may have written before it did."""

    entry: str
    geometry: Geometry
    rule: str
    variant: str
    comment: str
    tokens: tuple[int, ...]
    others: frozenset[Slot]
    change: Change
    smoke_name: str = ""

    @property
    def id(self) -> str:
        """``trap/<entry>/<rule>/<variant>``; in smoke ``trap/<geometry>/<form>/<name>``."""
        if self.smoke_name:
            return f"trap/{self.geometry.name}/{self.row.form}/{self.smoke_name}"
        return f"trap/{self.entry}/{self.rule}/{self.variant}"

    @property
    def traps(self) -> bool:
        """It passes by a trap."""
        return True

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_trap_case."""
        from g4kv_cli.cases.trap.check import run_trap_case  # late: what runs a case knows the case

        return run_trap_case(self, context.library, context.rerun(self.id), context.dumps)

    def __reduce__(self) -> tuple[Callable[..., TrapCase], tuple[str, Geometry, str, str, str]]:
        """What is changed is a function of the table: another process takes it from there."""
        return _case_of, (self.entry, self.geometry, self.rule, self.variant, self.smoke_name)


class PokedLibrary(KernelLibrary):
    """A library whose launches carry other parameters than the entry checked."""

    def __init__(self, library: KernelLibrary, parameters: dict[str, int]) -> None:
        super().__init__(library.device, library.kernels_directory, provider=library.provider)
        self._library = library
        self._changed = parameters

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        """The kernel of the library it stands for."""
        return self._library.kernel(source_name, symbol, arch_specific=arch_specific)

    def pack(self, parameters: ctypes.Structure) -> bytes:
        """The struct with its fields changed; the entry's own stays as it is."""
        packed = type(parameters).from_buffer_copy(parameters)
        for name, value in self._changed.items():
            setattr(packed, name, value)
        return bytes(packed)


def trap_cases(geometries: Sequence[Geometry] | None = None) -> list[TrapCase]:
    """Every trap of every form of prep, entry by entry, each entry at one of the geometries that it serves."""
    # The attention kernels have no traps: the host's checks of plan and pool are all there is.
    return [
        case
        for entry in entries("prep")
        if (geometry := example_geometry(entry, geometries)) is not None
        for case in _cases_of(entry.name, geometry).values()
    ]


def smoke_traps(geometries: Sequence[Geometry], *, once_an_entry: bool) -> list[TrapCase]:
    """One trap of each kind for every geometry, or once for each entry: its first geometry then stands for the rest."""
    cases: list[TrapCase] = []
    seen: set[str] = set()
    for geometry in geometries:
        for form, names in SMOKE_NAMES.items():
            entry = entry_for(geometry, "prep", form).name
            if once_an_entry and entry in seen:
                continue
            seen.add(entry)
            cases.extend(_case_of(entry, geometry, *names[name], name) for name in names)
    return cases


@cache
def _cases_of(name: str, geometry: Geometry) -> dict[tuple[str, str], TrapCase]:
    entry = entry_named(name)
    tables: dict[Metadata, Callable[[Entry, Geometry], list[TrapCase]]] = {
        "none": _contiguous_cases,
        "page_row": _prefill_cases,
        "batch": _decode_cases,
        "plan": _plan_cases,
    }
    return {(case.rule, case.variant): case for case in tables[entry.metadata](entry, geometry)}


def _case_of(name: str, geometry: Geometry, rule: str, variant: str, smoke_name: str) -> TrapCase:
    return dataclasses.replace(_cases_of(name, geometry)[rule, variant], smoke_name=smoke_name)


def _contiguous_cases(entry: Entry, geometry: Geometry) -> list[TrapCase]:
    last = TABLE_POSITIONS - PREFILL_TOKENS
    return [
        TrapCase(entry.name, geometry, "position_range", variant, POSITION, tokens, frozenset(), _poke(start_pos=start))
        for variant, start, tokens in (
            ("negative", -1, (0,)),
            ("past-the-tables", last + 1, (PREFILL_TOKENS - 1,)),
            ("lowest-i32", I32_MIN, tuple(range(PREFILL_TOKENS))),
            ("largest-i32", I32_MAX - PREFILL_TOKENS + 1, tuple(range(PREFILL_TOKENS))),
        )
    ]


def _prefill_cases(entry: Entry, geometry: Geometry) -> list[TrapCase]:
    whole_row = (2, 6, 0, 5, 1)
    first, second = PAGE_ROW
    last = TABLE_POSITIONS - PREFILL_TOKENS
    over_the_boundary = (1, 2, 3, 4)
    """Tokens of the base request in its second page."""

    def case(
        rule: str,
        variant: str,
        comment: str,
        tokens: tuple[int, ...],
        *,
        row: Sequence[int] = PAGE_ROW,
        start: int = START_POS,
        origin: int = 0,
        length: int | None = None,
    ) -> TrapCase:
        others = frozenset(
            (row[(start + token) // PAGE_SIZE - origin], (start + token) % PAGE_SIZE)
            for token in range(PREFILL_TOKENS)
            if token not in tokens
        )
        poke = _poke(start_pos=start, page_origin=origin, page_row_len=len(row) if length is None else length)

        def change(draft: Draft) -> None:
            indices = draft.keep(draft.device.upload(np.array(row, np.int32), "page_row"))
            draft.replaced["page_row"] = PageRow.from_device(indices)
            poke(draft)

        return TrapCase(entry.name, geometry, rule, variant, comment, tokens, others, change)

    return [
        case("position_range", "negative", POSITION, (0,), row=whole_row, start=-1),
        case("position_range", "past-the-tables", POSITION, (4,), row=whole_row, start=last + 1),
        case("page_origin", "negative", ORIGIN, (0, 1, 2, 3, 4), origin=-1),
        case("page_origin", "past-the-position", ORIGIN, (0,), origin=1, row=(2, 6)),
        case("page_coverage", "row-one-short", ROW_END, over_the_boundary, length=1),
        case("page_coverage", "no-row", ROW_END, (0, 1, 2, 3, 4), length=0),
        case("page_id_range", "negative", PAGE_ID, over_the_boundary, row=(first, -1)),
        case("page_id_range", "num_pages", PAGE_ID, over_the_boundary, row=(first, NUM_PAGES)),
        case("page_id_range", "lowest-i32", PAGE_ID, (0,), row=(I32_MIN, second)),
        case("page_id_range", "largest-i32", PAGE_ID, (0,), row=(I32_MAX, second)),
    ]


_CSR_DEFECTS: tuple[tuple[str, str, str, str, int, int], ...] = (
    # rule, variant, comment, array, index (of a token or a row), value
    ("page_indptr", "begin-negative", CSR_ROW, "page_indptr", 0, -1),
    ("page_indptr", "lowest-i32", CSR_ROW, "page_indptr", 0, I32_MIN),
    ("page_indptr", "reversed", CSR_ROW, "page_indptr", -1, 1),
    ("page_indptr", "end-negative", CSR_ROW, "page_indptr", -1, -1),
    ("page_indptr", "past-the-array", CSR_ROW, "page_indptr", -1, 7),
    ("page_indptr", "largest-i32", CSR_ROW, "page_indptr", -1, I32_MAX),
    ("page_origin", "negative", ORIGIN, "page_origins", -1, -1),
    ("page_origin", "past-the-position", ORIGIN, "page_origins", -1, 3),
    ("page_origin", "largest-i32", ORIGIN, "page_origins", -1, I32_MAX),
    ("page_id_range", "negative", PAGE_ID, "page_indices", -1, -1),
    ("page_id_range", "num_pages", PAGE_ID, "page_indices", -1, NUM_PAGES),
    ("page_id_range", "lowest-i32", PAGE_ID, "page_indices", -1, I32_MIN),
    ("page_id_range", "largest-i32", PAGE_ID, "page_indices", -1, I32_MAX),
)
"""Defects of CSR metadata that only the first request (index 0) or the last one (index -1) meets."""


def _decode_cases(entry: Entry, geometry: Geometry) -> list[TrapCase]:
    last = len(DECODE_POSITIONS) - 1
    slots = [
        (pages[position // PAGE_SIZE - origin], position % PAGE_SIZE)
        for position, pages, origin in zip(DECODE_POSITIONS, DECODE_PAGES, DECODE_ORIGINS, strict=True)
    ]

    def case(rule: str, variant: str, comment: str, name: str, index: int, value: int, token: int) -> TrapCase:
        def change(draft: Draft) -> None:
            batch = draft.batch()
            array = getattr(batch, name)
            values = draft.device.read(array)
            values[index] = value
            draft.device.write(array, values)
            draft.replaced["batch"] = PagedBatch.from_device(
                batch.positions, batch.page_indices, batch.page_indptr, batch.page_origins
            )

        others = frozenset(slot for number, slot in enumerate(slots) if number != token)
        return TrapCase(entry.name, geometry, rule, variant, comment, (token,), others, change)

    cases = [case("position_range", variant, POSITION, "positions", 1, value, 1) for variant, value in _WRONG_POSITIONS]
    cases += [case(*defect, token=0 if defect[4] == 0 else last) for defect in _CSR_DEFECTS]
    # One page where the last token needs two: the row of the token before it takes over the other.
    cases.append(case("page_coverage", "row-one-short", ROW_END, "page_indptr", last + 1, 5, last))
    cases.append(case("page_coverage", "no-row", ROW_END, "page_indptr", last + 1, 4, last))
    return cases


_WRONG_POSITIONS = (
    ("negative", -1),
    ("past-the-tables", TABLE_POSITIONS),
    ("lowest-i32", I32_MIN),
    ("largest-i32", I32_MAX),
)


def _plan_cases(entry: Entry, geometry: Geometry) -> list[TrapCase]:
    requests = [number for number, request in enumerate(PLAN_REQUESTS) for _ in range(request.q_len)]
    last_token, last_request = len(requests) - 1, len(PLAN_REQUESTS) - 1
    slots = []
    for token, position in enumerate(plan_positions(PLAN_REQUESTS)):
        request = PLAN_REQUESTS[requests[token]]
        slots.append((request.page_indices[position // PAGE_SIZE - request.page_origin], position % PAGE_SIZE))

    def case(
        rule: str, variant: str, comment: str, name: str, index: int, value: int, tokens: tuple[int, ...]
    ) -> TrapCase:
        def change(draft: Draft) -> None:
            array = getattr(draft.plan().buffers, name)
            values = draft.device.read(array)
            values[index] = value
            draft.device.write(array, values)

        others = frozenset(slot for token, slot in enumerate(slots) if token not in tokens)
        return TrapCase(entry.name, geometry, rule, variant, comment, tokens, others, change)

    first_request = tuple(token for token, number in enumerate(requests) if number == 0)
    cases = [
        case("position_range", variant, POSITION, "positions", 3, value, (3,)) for variant, value in _WRONG_POSITIONS
    ]
    cases += [
        case("request_range", variant, REQUEST, "token_requests", 2, value, (2,))
        for variant, value in (
            ("negative", -1),
            ("past-the-plan", last_request + 1),
            ("lowest-i32", I32_MIN),
            ("largest-i32", I32_MAX),
        )
    ]
    cases += [case(*defect, first_request if defect[4] == 0 else (last_token,)) for defect in _CSR_DEFECTS]
    cases.append(case("page_coverage", "row-one-short", ROW_END, "page_indptr", last_request + 1, 4, (last_token,)))
    cases.append(case("page_coverage", "no-row", ROW_END, "page_indptr", last_request + 1, 3, (last_token,)))
    return cases


def _poke(**parameters: int) -> Change:
    def change(draft: Draft) -> None:
        draft.library = PokedLibrary(draft.bench.library, parameters)

    return change
