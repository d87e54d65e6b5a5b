"""Cases at the far ends of what a prep call can ask for: positions, rows of pages and page ids past 8 to 16 bits.

Pools are sparse or small, and most cases have one KV head with its group. Where a model has few KV heads, or one, an
exchange of heads shows only with more of them: five are no multiple of what a warp serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from g4kv_cli.cases.case import MAX_SPAN
from g4kv_cli.cases.prep.build import CaseBuilder
from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.entries.prep_request import first_wide_token_count
from g4kv_cli.entries.table import entries_for, entry_for
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat

BITS = (12, 15, 16)
"""Positions are run across these powers of two."""
LONG_ROW_PAGES = 300
PAST_UINT16 = 1 << 16
MANY_KV_HEADS = 5
TOKENS = 4
FEW_REQUESTS = 100
KV_HEADS_OF_MANY_ROWS = 64
GROUP_OF_MANY_ROWS = 16
MANY_ROWS = "rows/past-int32"


def extreme_cases(
    geometry: Geometry, seed: int, page_size: int, kv_format: KvFormat = SPLIT, *, page_sizes: Collection[int]
) -> Iterator[PrepCase]:
    """The extreme cases of one geometry, form by form. ``page_sizes``: what other sizes a case may have."""

    def builder(heads: Geometry, first_page: int = 0) -> CaseBuilder:
        return CaseBuilder(heads, seed, page_size, first_page=first_page, kv_format=kv_format)

    one_head = geometry.with_heads(1)
    table = _Table(
        near=builder(one_head),
        past=builder(one_head, PAST_UINT16),
        heads=builder(geometry.with_heads(MANY_KV_HEADS)),
        rows=builder(geometry.with_heads(KV_HEADS_OF_MANY_ROWS, GROUP_OF_MANY_ROWS)),
        has_small_pages=1 in page_sizes,
    )
    forms = {entry.form for entry in entries_for(geometry, "prep")}
    for form, cases in (
        ("contiguous", table.contiguous),
        ("prefill", table.prefill),
        ("decode", table.decode),
        ("batch_prefill", table.batch_prefill),
    ):
        if form in forms:
            yield from cases()


class _Table:
    """``near`` draws pages from the first on, ``past`` from where 16 bits end; ``heads`` has many KV heads, ``rows`` so
    many heads that few tokens have rows past int32; ``has_small_pages``: a case may have pages of one token."""

    def __init__(
        self, near: CaseBuilder, past: CaseBuilder, heads: CaseBuilder, rows: CaseBuilder, has_small_pages: bool
    ) -> None:
        self.near, self.past, self.heads, self.rows = near, past, heads, rows
        self.has_small_pages = has_small_pages
        # The last token's row of q begins where int32 ends, or behind that.
        self.many_tokens = (1 << 31) // (rows.geometry.num_qo_heads * rows.geometry.head_dim) + 1
        self.size = near.page_size
        # A row of so many pages is far into the request, and a few tokens cross into its last page.
        self.long_start = LONG_ROW_PAGES * self.size - 2

    def contiguous(self) -> Iterator[PrepCase]:
        for bits in BITS:
            yield self.near.contiguous_case(f"position/past-{bits}-bits", "random", tokens=TOKENS, start=_across(bits))
        yield self.heads.contiguous_case(_heads(), "closed-form", tokens=TOKENS)
        yield self.heads.contiguous_case(_heads(wide=True), "random", tokens=self._wide("contiguous"))
        yield _of_ends(self.rows.contiguous_case(MANY_ROWS, "random", tokens=self.many_tokens))

    def prefill(self) -> Iterator[PrepCase]:
        for bits in BITS:
            start = _across(bits)
            yield self.near.prefill_case(f"position/past-{bits}-bits", "random", tokens=TOKENS, start=start,
                                         origin=start // self.size)  # fmt: skip
        yield self.near.prefill_case("long-row", "random", tokens=TOKENS, start=self.long_start)
        yield self.past.prefill_case("pool/page-ids-past-16-bits", "random", tokens=TOKENS, start=max(self.size - 2, 0))
        yield self.heads.prefill_case(_heads(), "closed-form", tokens=TOKENS)
        yield self.heads.prefill_case(_heads(wide=True), "random", tokens=self._wide("prefill"))
        if self.heads.kv_format == SPLIT:  # folded rows are of the whole head's rotation alone
            yield self.heads.prefill_case(f"{_heads(wide=True)}/rotary-partial", "random", tokens=self._wide("prefill"),
                                          rotary_dim=self.heads.geometry.head_dim // 4)  # fmt: skip
        yield _of_ends(self.rows.prefill_case(MANY_ROWS, "random", tokens=self.many_tokens))

    def decode(self) -> Iterator[PrepCase]:
        positions = [_across(bits) + step for bits in BITS for step in (1, 2)]
        positions.append(self.near.geometry.max_positions - 1)
        yield self.near.decode_case("position/past-16-bits", "random", positions, origins="last")
        yield self.near.decode_case("long-row", "random", (self.long_start + 2, 3, self.long_start))
        if self.has_small_pages:  # the second request's row of pages begins behind 65,536 entries
            yield self.near.decode_case("page-rows/past-16-bits", "random", (_across(16) + TOKENS, 20), page_size=1)
        yield self.past.decode_case("pool/page-ids-past-16-bits", "random", (self.size, 1, 3 * self.size))
        yield self.heads.decode_case(_heads(), "closed-form", (2 * self.size + 1, 0, self.size, 3))
        wide = self._wide("decode")
        # Many requests take small pages, one page each.
        size = self.size if wide < FEW_REQUESTS else min(self.size, 2)
        yield self.heads.decode_case(_heads(wide=True), "random", range(wide), page_size=size, origins="last")
        if self.size <= MAX_SPAN:
            tokens = range(self.many_tokens)
            yield _of_ends(self.rows.decode_case(MANY_ROWS, "random", tokens, origins="last"))

    def batch_prefill(self) -> Iterator[PrepCase]:
        far = tuple((_across(bits), TOKENS) for bits in BITS)
        yield self.near.batch_case("position/past-16-bits", "random", far)
        long_row = ((self.long_start, TOKENS), (1, 2))
        yield self.near.batch_case("long-row", "random", long_row, keeps_front=True)
        if self.has_small_pages:
            rows = ((_across(16) + TOKENS, TOKENS), (19, 2))
            yield self.near.batch_case("page-rows/past-16-bits", "random", rows, page_size=1, keeps_front=True)
        yield self.past.batch_case("pool/page-ids-past-16-bits", "random", ((self.size - 1, 2), (0, 1)))
        yield self.heads.batch_case(_heads(), "closed-form", ((1, 2), (self.size - 1, 3)))
        yield self.heads.batch_case(_heads(wide=True), "random", ((3, 2), (0, self._wide("batch_prefill"))))
        yield _of_ends(self.rows.batch_case(MANY_ROWS, "random", ((0, self.many_tokens),)))

    def _wide(self, form: str) -> int:
        """Tokens from which on a warp serves several head rows."""
        geometry = self.heads.geometry
        entry = entry_for(geometry, "prep", form)
        return first_wide_token_count(entry, geometry.num_qo_heads, geometry.num_kv_heads)


def _across(bits: int) -> int:
    """The start of tokens of which some lie before that power of two and some behind."""
    return (1 << bits) - TOKENS // 2


def _of_ends(case: PrepCase) -> PrepCase:
    return replace(case, judges_ends=True)


def _heads(*, wide: bool = False) -> str:
    return f"kv-heads{MANY_KV_HEADS}/{'many-tokens' if wide else 'few-tokens'}"
