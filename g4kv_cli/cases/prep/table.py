"""The smoke table: every case of every prep entry, as data.

Each line names one thing that has gone wrong in such kernels. Tokens, page sizes, seeds and start positions are
spread over the lines so that each value occurs without a full cross product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from g4kv_cli.cases.prep.build import CaseBuilder, shuffler
from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.cases.prep.extremes import extreme_cases
from g4kv_cli.entries.prep_request import first_wide_token_count
from g4kv_cli.entries.table import entries_for, entry_for
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, MAX_PAGE_SIZE_TOKENS
from g4kv_cli.model.slots import derived_layout

DEFAULT_SEED = 1
PAGE_SIZES = (1, 2, 3, 16, 48, 64, 100, 256, MAX_PAGE_SIZE_TOKENS)
OTHER_EPS = 0.25
"""No model's: a kernel that has its own is far off."""


def prep_cases(
    geometry: Geometry, *, seed: int = DEFAULT_SEED, page_size: int | None = None, kv_format: KvFormat = SPLIT
) -> list[PrepCase]:
    """All cases of a geometry in a format that it has. ``page_size`` replaces the default and leaves only it in the
    page-size sweep."""
    table = _Table(geometry, seed, page_size, kv_format)
    forms = {
        "contiguous": table.contiguous,
        "prefill": table.prefill,
        "decode": table.decode,
        "batch_prefill": table.batch_prefill,
    }
    served = [entry.form for entry in entries_for(geometry, "prep")]
    cases = [case for form, made in forms.items() if form in served for case in made()]
    sizes = table.page_sizes
    return [*cases, *extreme_cases(geometry, seed, table.page_size, kv_format, page_sizes=sizes)]


class _Table(CaseBuilder):
    """The cases of one geometry."""

    def __init__(self, geometry: Geometry, seed: int, page_size: int | None, kv_format: KvFormat) -> None:
        size = DEFAULT_PAGE_SIZE_TOKENS if page_size is None else page_size
        super().__init__(geometry, seed, size, kv_format=kv_format)
        self.page_sizes = PAGE_SIZES if page_size is None else (page_size,)
        # Production rotates the whole head; the others test the pass-through tail, whose width need not be aligned.
        # Folded rows are of production's rotation alone.
        self.partial_rotary_dims: tuple[int, ...] = (64, 6, 250) if geometry.head_dim == 256 else (128, 6, 250)
        if kv_format != SPLIT:
            self.partial_rotary_dims = ()

    # --- the three forms -------------------------------------------------------------------------------------

    def contiguous(self) -> Iterator[PrepCase]:
        """Q and K to contiguous outputs."""
        yield self.contiguous_case("closed-form", "closed-form", tokens=7, start=1)
        for index, tokens in enumerate(self._token_counts("contiguous")):
            seed = self.seed + index
            yield self.contiguous_case(f"random/seed{seed}/tokens{tokens}", "random", tokens=tokens, seed=seed)
        yield self.contiguous_case("near-eps/tokens5", "tiny", tokens=5)
        yield _with_another_eps(self.contiguous_case("eps/another", "random", tokens=5))
        yield self.contiguous_case("large/tokens5", "large", tokens=5)
        for rotary_dim in self.partial_rotary_dims:
            yield self.contiguous_case(f"rotary{rotary_dim}", "random", tokens=3, start=5, rotary_dim=rotary_dim)
        yield self.contiguous_case("start/last-of-table", "random", tokens=3, start=90, spare_rows=0)

    def prefill(self) -> Iterator[PrepCase]:
        """One request's tokens to the pool, slots from start_pos + token."""
        size = self.page_size
        # Positions 1 .. 2.5 pages: pages [3, 7, 5] of 9; the 9 behind them is out of range and must never be used.
        closed = Placement(size, 9, 2, 1, ((3, 7, 5),), (0,), unread=(9,))
        begin, end = (1, 5 * size // 2 + 1) if size <= 64 else (2 * size - 20, 2 * size + 20)
        yield self.prefill_case("closed-form", "closed-form", start=begin, tokens=end - begin, placement=closed)
        # The serving form: all of the model's layers in the page, one of them written.
        layers = self.geometry.num_kv_layers
        serving = Placement(size, 4, layers, layers // 2, ((2, 0),), (0,), unread=(4,))
        yield self.prefill_case(
            "serving/untouched", "random", start=max(size - 3, 0), tokens=min(6, size + 1), placement=serving,
            against_contiguous=self.geometry.head_dim == 256,
        )  # fmt: skip
        for index, tokens in enumerate(self._token_counts("prefill")):
            seed = self.seed + index
            yield self.prefill_case(f"random/seed{seed}/tokens{tokens}/page{size}", "random", tokens=tokens, seed=seed)
        yield self.prefill_case("near-eps/tokens5", "tiny", tokens=5, start=3)
        yield _with_another_eps(self.prefill_case("eps/another", "random", tokens=5, start=3))
        yield self.prefill_case("large/tokens5", "large", tokens=5, start=3)
        for rotary_dim in self.partial_rotary_dims:
            yield self.prefill_case(f"rotary{rotary_dim}", "random", tokens=3, start=5, rotary_dim=rotary_dim)
        for rotary_dim in self.partial_rotary_dims[:1]:
            yield self.prefill_case("closed-form/rotary-partial", "closed-form", tokens=4, start=2,
                                    rotary_dim=rotary_dim)  # fmt: skip
            wide = self._first_wide_tokens("prefill")
            yield self.prefill_case(f"rotary{rotary_dim}/tokens{wide}", "random", tokens=wide, rotary_dim=rotary_dim)
        yield self.prefill_case("start/zero", "random", tokens=3, start=0)
        yield self.prefill_case("start/mid-page", "random", tokens=size + 2, start=size + size // 2)
        yield self.prefill_case("start/last-of-table", "random", tokens=3, start=3 * size + 90, spare_rows=0)
        for page_size in self.page_sizes:
            yield self.prefill_case(
                f"page-size/{page_size}", "random", tokens=5, start=page_size - 1, page_size=page_size
            )
        last = Placement(size, 5, 2, 0, ((4, 0),), (0,))
        yield self.prefill_case("pool/last-page", "random", tokens=2, start=size - 1, placement=last)
        start = 7 * size - 2
        yield self.prefill_case(
            "page-origin/window-crossing", "random", tokens=size + 3, start=start, origin=start // size
        )
        yield from self._large_pools("prefill")

    def decode(self) -> Iterator[PrepCase]:
        """A batch of one-token requests."""
        size = self.page_size
        # Unordered positions, origins of their own, rows of different lengths, and all three RoPE turns.
        mixed = (2 * size + 1, 0, size, 5 * size + 3 % size, 3, size // 2, 9 * size)
        yield self.decode_case("closed-form", "closed-form", mixed, origins="mixed")
        for index, tokens in enumerate(self._token_counts("decode")):
            seed = self.seed + index
            yield self._random_decode(tokens, seed)
        yield self.decode_case("near-eps/tokens5", "tiny", mixed[:5], origins="mixed")
        yield _with_another_eps(self.decode_case("eps/another", "random", mixed[:5], origins="mixed"))
        yield self.decode_case("large/tokens5", "large", mixed[:5], origins="mixed")
        for rotary_dim in self.partial_rotary_dims:
            yield self.decode_case(f"rotary{rotary_dim}", "random", mixed[:3], rotary_dim=rotary_dim)
        yield self.decode_case("position/first-and-last-of-table", "random", (95, 0), spare_rows=0)
        for page_size in self.page_sizes:
            positions = (page_size, page_size - 1, 2 * page_size + page_size // 2)
            yield self.decode_case(f"page-size/{page_size}", "random", positions, page_size=page_size)
        yield self.decode_case("pool/last-page", "random", (size, size // 2), placement=Placement(
            size, 4, 2, 0, ((1, 3), (2,)), (0, 0)))  # fmt: skip
        yield self.decode_case("origins/different", "random", (4 * size, 4 * size + 1, 9 * size - 1), origins="last")
        yield self._padded_decode()
        yield from self._large_pools("decode")

    def batch_prefill(self) -> Iterator[PrepCase]:
        """Chunks of several requests in one launch, by a plan."""
        size = self.page_size
        # A chunk inside a page, one that crosses pages, a single token, one without any, one from position 0 on.
        ragged = ((1, 2), (size - 1, size + 2), (3 * size, 1), (size, 0), (0, 3))
        yield self.batch_case("closed-form", "closed-form", ragged)
        yield self.batch_case(f"random/seed{self.seed}", "random", ragged)
        yield self.batch_case("near-eps", "tiny", ragged)
        yield _with_another_eps(self.batch_case("eps/another", "random", ragged))
        yield self.batch_case("large", "large", ragged)
        for rotary_dim in self.partial_rotary_dims[:1]:
            yield self.batch_case(f"rotary{rotary_dim}", "random", ragged[:2], rotary_dim=rotary_dim)
        yield self.batch_case("one-request", "random", ((size // 2, size + 1),))
        yield self.batch_case("padding/rows-behind-the-tokens", "random", ragged, padding_rows=3)
        yield self._padded_batch()
        for page_size in self.page_sizes:
            requests = ((page_size - 1, 3), (2 * page_size, 1))
            yield self.batch_case(f"page-size/{page_size}", "random", requests, page_size=page_size)
        if self.geometry.window is not None:
            # The plan demands every page that a query still sees; those before it are gone.
            start = self.geometry.window + 3 * size + size // 2
            yield self.batch_case("page-origin/window-crossing", "random", ((start, size), (1, 2)))

    # --- how one case is put together ------------------------------------------------------------------------

    def _token_counts(self, form: str) -> list[int]:
        wide = self._first_wide_tokens(form)
        # The kernels change to several head rows a warp at a size of their own: both sides of it are run.
        return list(dict.fromkeys((1, 2, 5, self.page_size, self.page_size + 1, 257, max(wide, 257))))

    def _first_wide_tokens(self, form: str) -> int:
        entry = entry_for(self.geometry, "prep", form)
        return first_wide_token_count(entry, self.geometry.num_qo_heads, self.geometry.num_kv_heads)

    def _random_decode(self, tokens: int, seed: int) -> PrepCase:
        # Many requests take small pages, one page each, so that the pool stays small enough to compare whole.
        size = self.page_size if tokens < 100 else min(self.page_size, 2)
        name = f"random/seed{seed}/tokens{tokens}/page{size}"
        positions = [shuffler(f"{name}/{token}").randrange(4 * size) for token in range(tokens)]
        return self.decode_case(name, "random", positions, seed=seed, page_size=size, origins="last")

    def _padded_decode(self) -> PrepCase:
        """Three requests and the five padding rows of their bucket, all at position 0 of the reserved page 0."""
        size = self.page_size
        positions = (size + 2 % size, 1, 3 * size - 1, 0, 0, 0, 0, 0)
        rows = ((4, 2), (1,) if size > 1 else (1, 6), (3, 5, 7), (0,), (0,), (0,), (0,), (0,))
        placement = Placement(size, 8, 2, 1, rows, (0,) * len(rows), padding_page=0)
        return self.decode_case("padding/shared-page", "random", positions, placement=placement)

    def _padded_batch(self) -> PrepCase:
        """Two requests and padding before, between and behind them, at several slots of the reserved page 0."""
        size = self.page_size
        requests = ((0, 1), (size - 1, 3), (0, 1), (size, 1), (0, min(2, size)), (size - 1, 1))
        rows = ((0,), (2, 5, 1)[: -(-(size + 2) // size)], (0,), (4, 3), (0,), (0,))
        positions = [start + token for start, q_len in requests for token in range(q_len)]
        placement = Placement(size, 6, 2, 1, rows, (0,) * len(rows), padding_page=0)
        case = self.made("batch_prefill", "padding/shared-page", "random", positions, placement)
        return dataclasses.replace(case, requests=requests)

    def _large_pools(self, form: str) -> Iterator[PrepCase]:
        """Pools whose element offsets leave int32 (prefill) and uint32 (decode), with all of the model's layers.

        Three tokens' pages: one before the edge, the one that straddles it, and the last of the pool.
        """
        size, layers = self.page_size, self.geometry.num_kv_layers
        edge_bits = 31 if form == "prefill" else 32
        straddling = (1 << edge_bits) // derived_layout(self.geometry, size, kv_format=self.kv_format).page_stride
        num_pages = straddling + 3
        ids = (straddling - 1, num_pages - 1, straddling)
        name = f"pool/past-{'int32' if edge_bits == 31 else 'uint32'}"
        if form == "prefill":
            placement = Placement(size, num_pages, layers, layers - 1, (ids,), (0,), unread=(num_pages,))
            yield self.prefill_case(name, "random", tokens=size + 2, start=size - 1, placement=placement)
        else:
            rows = tuple((page,) for page in ids)
            placement = Placement(size, num_pages, layers, layers - 1, rows, (0, 1, 2))
            yield self.decode_case(name, "random", (size - 1, size, 2 * size), placement=placement)


def _with_another_eps(case: PrepCase) -> PrepCase:
    return dataclasses.replace(case, eps=OTHER_EPS)
