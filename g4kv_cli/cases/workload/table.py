"""The cases of a workload: each entry of its geometry on these requests, or why it cannot take them.

All attention entries get the same keys and queries, once spread and once with needles at the edges of what each query
sees, so that right results of all of them mean that the forms agree; one case holds them side by side. Each is also
held against itself: with other pages, and with each request alone. Prep entries get signs that name every element, and
random rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4kv_cli.cases.attention.build import LARGE_TILE, SMALL_TILE
from g4kv_cli.cases.attention.case import AttentionCase, Check, KeyKind, KvRequest
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.prep.build import SPARE_TABLE_ROWS, id_part
from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.cases.workload.uncovered import UncoveredCase
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.table import entries_for, require_served
from g4kv_cli.inputs import InputKind
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.workload import Workload

_PREP_KINDS: tuple[InputKind, ...] = ("closed-form", "random")


def workload_cases(workload: Workload, *, seed: int, kv_format: KvFormat = SPLIT) -> list[Case]:
    """Every case of a workload over pools of a format that its geometry has. Raises UsageError for a geometry that no
    kernel serves."""
    require_served(workload.geometry)
    made = _Table(workload, seed, kv_format)
    cases: list[Case] = []
    for entry in entries_for(workload.geometry):
        if kv_format not in entry.kv_formats:
            continue
        reason = _refusal(entry, workload)
        if reason:
            place = "prep" if entry.is_prep else "attention"
            case_id = f"{place}/{workload.geometry.name}/{entry.form}/{id_part(kv_format)}{workload.name}"
            cases.append(UncoveredCase(case_id, entry.name, workload.geometry, reason))
        elif entry.is_prep:
            cases.extend(made.prep(entry))
        elif entry.operation == "merge":
            cases.extend(made.merge(entry))
        else:
            cases.extend(made.attention(entry))
    return cases


def _refusal(entry: Entry, workload: Workload) -> str:
    """Why the entry cannot take these requests; empty if it can."""
    rows = len(workload.requests) + workload.padding
    if entry.metadata in ("none", "page_row") and entry.is_prep and rows != 1:
        return f"the {entry.form} form takes the tokens of one request, this is a batch of {rows}"
    one_each = entry.one_token_each or entry.metadata == "batch" or entry.operation == "merge"
    if one_each and not workload.one_token_each:
        return f"the {entry.form} form takes one new token a request, {workload.several_tokens()}"
    return ""


class _Table:
    """The cases of one workload."""

    def __init__(self, workload: Workload, seed: int, kv_format: KvFormat) -> None:
        self.kv_format = kv_format
        self.workload, self.geometry, self.seed = workload, workload.geometry, seed
        self.requests = tuple(KvRequest(one.kv_len, one.q_len, one.origin, one.pages) for one in workload.requests)
        page = workload.padding_page
        if page is not None:
            self.requests += (KvRequest(1, 1, 0, (page,), is_padding=True),) * workload.padding

    # --- attention --------------------------------------------------------------------------------------------

    def attention(self, entry: Entry) -> Iterator[AttentionCase]:
        """Of each tile that a chunk can take, or each count of splits."""
        if entry.takes_splits:
            for splits in self.workload.splits:
                yield from self._of_form(entry, f"splits{splits}/", num_splits=splits)
        elif entry.takes_tile:
            yield from self._of_form(entry, "small-tile/", tile=SMALL_TILE)
            yield from self._of_form(entry, "large-tile/", tile=LARGE_TILE)
        else:
            yield from self._of_form(entry, "")
            yield self._case(entry, "forms-agree", "spread", "forms")

    def merge(self, entry: Entry) -> Iterator[AttentionCase]:
        """The merge alone, of the same keys dealt out to the splits."""
        for splits in self.workload.splits:
            yield self._case(entry, f"splits{splits}", "spread", "merge", num_splits=splits)

    def _of_form(
        self, entry: Entry, name: str, *, num_splits: int = 1, tile: int | None = None
    ) -> Iterator[AttentionCase]:
        spread = self._case(entry, f"{name}spread", "spread", "permuted", num_splits=num_splits, tile=tile)
        yield spread
        alone: Check = "alone" if len(self.workload.requests) > 1 else "oracle"
        yield self._case(entry, f"{name}needles", "needles", alone, num_splits=num_splits, tile=tile)

    def _case(
        self, entry: Entry, name: str, kind: KeyKind, check: Check, *, num_splits: int = 1, tile: int | None = None
    ) -> AttentionCase:
        workload, geometry = self.workload, self.geometry
        case = AttentionCase(
            id=f"attention/{geometry.name}/{entry.form}/{id_part(self.kv_format)}{workload.name}/{name}",
            entry=entry.name,
            geometry=geometry,
            form=entry.form,
            kind=kind,
            seed=self.seed,
            requests=self.requests,
            page_size=workload.page_size,
            num_pages=workload.num_pages,
            num_layers=workload.num_layers,
            layer=workload.num_layers - 1,
            window_left=geometry.window_left,
            sm_scale=workload.sm_scale,
            num_splits=num_splits,
            cta_tile_q=tile,
            check=check,
            is_asked=True,
            kv_format=self.kv_format,
        )
        # The pages of a pool that is never made on the host stay where they are.
        return replace(case, check="oracle") if check == "permuted" and case.is_sparse else case

    # --- prep -------------------------------------------------------------------------------------------------

    def prep(self, entry: Entry) -> Iterator[PrepCase]:
        """The new tokens' rows to where their keys lie."""
        for kind in _PREP_KINDS:
            yield self._prep_case(entry, kind)

    def _prep_case(self, entry: Entry, kind: InputKind) -> PrepCase:
        workload, geometry = self.workload, self.geometry
        positions = [position for one in self.requests for position in range(one.start_pos, one.kv_len)]
        placement = None
        if entry.has_pool:
            unread = (workload.num_pages,) if kind == "closed-form" and not entry.takes_plan else ()
            placement = Placement(
                workload.page_size,
                workload.num_pages,
                workload.num_layers,
                workload.num_layers - 1,
                tuple(one.pages for one in self.requests),
                tuple(one.origin for one in self.requests),
                unread=unread,
                padding_page=workload.padding_page,
            )
        case = PrepCase(
            id=f"prep/{geometry.name}/{entry.form}/{id_part(self.kv_format)}{workload.name}/{kind}",
            entry=entry.name,
            geometry=geometry,
            form=entry.form,
            kind=kind,
            seed=self.seed,
            positions=tuple(positions),
            rotary_dim=geometry.rotary_dim,
            table_positions=max(positions) + 1 + SPARE_TABLE_ROWS,
            placement=placement,
            requests=tuple((one.start_pos, one.q_len) for one in self.requests) if entry.takes_plan else (),
            kv_format=self.kv_format,
        )
        # The same rows through the contiguous form, where there is one, must have the same bits.
        has_twin = any(other.metadata == "none" for other in entries_for(geometry, "prep"))
        return replace(case, against_contiguous=entry.metadata == "page_row" and has_twin and not case.is_sparse)
