"""The attention table: every case of every attention entry of a geometry, as data.

Every form reads the same requests: prefill a chunk of each, the decode forms one token each. Each line names one thing
that has gone wrong in such kernels. The model's heads are used where heads matter; elsewhere one KV head with its group
stands for all, since the heads are blocks of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

from g4kv_cli.cases.attention.build import LARGE_TILE, SMALL_TILE, CaseBuilder, Chunk
from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.extremes import Extremes
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.table import entries_for
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, MAX_PAGE_SIZE_TOKENS
from g4kv_cli.model.slots import derived_layout

GROUPS = (1, 2, 4, 5, 6, 7, 8, 16)
SMALL_WINDOW = 40
ODD_WINDOW = 333
OFFSETS = 64
"""Consecutive lengths that meet every offset modulo the decode kernels' key tiles (16, 48, 64 keys)."""
PREFILL_OFFSETS = 128
"""The same of the prefill kernels (48, 64, 128 keys), for the first row of each 16 that a warp has."""
WARP_ROWS = 16
SWEEP_KEYS = 200
LONG_HISTORY = {256: 4200, 512: 1100}
"""By head_dim, keys of which each warp's share has more tiles than it looks up of the page table at once: 32 tiles of
16 keys, of eight warps or two."""
SPLIT_SWEEP = (1, 2, 3, 7, 16)
LARGE_PAGE = 256
PAGE_SIZES = (1, 2, 3, 16, 48, 64, 100, LARGE_PAGE, MAX_PAGE_SIZE_TOKENS)


def attention_cases(
    geometry: Geometry, *, seed: int, page_size: int | None = None, kv_format: KvFormat = SPLIT
) -> list[AttentionCase]:
    """All attention cases of one geometry in a format that it has. ``page_size`` replaces the default and leaves only
    it in the sweep."""
    table = _Table(geometry, seed, DEFAULT_PAGE_SIZE_TOKENS if page_size is None else page_size, kv_format)
    sizes = PAGE_SIZES if page_size is None else (page_size,)
    rows = entries_for(geometry, "attention")
    cases: list[AttentionCase] = []
    for entry in rows:
        if entry.one_token_each:
            cases.extend(table.decode(entry, sizes))
            if entry.takes_splits:
                cases.extend(table.splits(entry))
    for entry in rows:
        if not entry.one_token_each:
            cases.extend(table.prefill(entry, sizes))
    extremes = Extremes(geometry, seed, table.page_size, kv_format, page_sizes=sizes)
    for entry in rows:
        cases.extend(extremes.of(entry))
    # The merge has no pool, and so no format of its own.
    return cases if kv_format == SPLIT else [case for case in cases if case.check != "merge"]


class _Table(CaseBuilder):
    """The cases of one geometry."""

    # --- one token a request ----------------------------------------------------------------------------------

    def decode(self, form: Entry, page_sizes: Sequence[int]) -> Iterator[AttentionCase]:
        """Every decode form on the same requests."""
        size, splits = self.span, 3 if form.takes_splits else 1
        lengths: Sequence[int]
        for name, window, lengths in self._needle_lengths():
            yield self.case(form, f"needle/{name}", _ones(lengths), kind="needles", geometry=self.one_head,
                            window=window, num_splits=splits)  # fmt: skip
        if self.window is not None:
            lengths = (SMALL_WINDOW - 1, *range(SMALL_WINDOW, SMALL_WINDOW + 18), 2 * SMALL_WINDOW, 150)
            yield self.case(form, f"window{SMALL_WINDOW}/spread", _ones(lengths), geometry=self.one_head,
                            window=SMALL_WINDOW, num_splits=splits)  # fmt: skip
        # Sub-page requests beside longer ones, whole pages and one more or less: all heads of the model.
        ragged = (1, 3, size - 1, size, size + 1, 2 * size, 3 * size - 1, 3 * size + 1, 2)
        yield self.case(form, "ragged", _ones(length for length in ragged if length), num_splits=splits, num_layers=2)
        yield self.case(form, "kv-len-one", _ones((1,)), num_splits=splits)
        yield self.case(form, "padding/poisoned-page", _ones((2 * size + 1, 5, size)), padding=5,
                        geometry=self.one_head, num_splits=splits)  # fmt: skip
        yield self.case(form, "rows-behind-the-tokens", _ones((size + 3, 7)), geometry=self.one_head,
                        padding_rows=3, num_splits=splits)  # fmt: skip
        for page_size in page_sizes:
            lengths = (page_size, page_size + 1, 2 * page_size + page_size // 2 + 1, 1)
            yield self.case(form, f"page-size/{page_size}", _ones(lengths), geometry=self.one_head,
                            page_size=page_size, window=_window_of(page_size), num_splits=splits)  # fmt: skip
        for group in GROUPS:
            yield self.case(form, f"group/{group}", _ones((size + 4, 3)), geometry=self.geometry.with_heads(2, group),
                            num_splits=splits)  # fmt: skip
        yield from self._values(form, _ones((3 * size + 5, 100, 9)), splits)
        yield self.case(form, "pages/permuted", _ones((5 * size + 3, 4 * size)), geometry=self.one_head,
                        check="permuted", num_splits=splits)  # fmt: skip
        yield self.case(form, "companions", _ones((2 * size, 70, 5, 3 * size + 1)), geometry=self.one_head,
                        check="alone", num_splits=splits)  # fmt: skip
        yield self.case(form, "plan/refilled-smaller", _ones((4 * size, 3, size + 1, 90)), geometry=self.one_head,
                        check="refill", num_splits=splits)  # fmt: skip
        yield self.case(form, "plan/graph-replay", _ones((4 * size, 3, size + 1, 90)), padding=4,
                        geometry=self.one_head, check="graph", num_splits=splits)  # fmt: skip
        yield self.case(form, "long-history", _ones((LONG_HISTORY[self.geometry.head_dim], 70)), geometry=self.one_head,
                        window=None)  # fmt: skip
        yield self._large_pool(form, splits)
        if not form.takes_splits:
            yield self.case(form, f"kv-sweep/1-{SWEEP_KEYS}", _ones(range(1, SWEEP_KEYS + 1)), geometry=self.one_head)
            lengths = (2 * size + 3, 50, 1, 4 * size)
            yield self.case(form, "forms-agree", _ones(lengths), geometry=self.geometry.with_heads(2), check="forms",
                            kind="needles")  # fmt: skip

    def splits(self, form: Entry) -> Iterator[AttentionCase]:
        """What only several splits of one request can get wrong."""
        size = self.span
        for splits in _sweep_splits(self.geometry):
            yield self.case(form, f"kv-sweep/1-{SWEEP_KEYS}/splits{splits}", _ones(range(1, SWEEP_KEYS + 1)),
                            geometry=self.one_head, num_splits=splits)  # fmt: skip
        yield self.case(form, "splits/more-than-pages", _ones((2 * size, size + 1, 3)), geometry=self.one_head,
                        num_splits=40)  # fmt: skip
        yield self.case(form, "splits/one-not-empty", _ones((9, 16, 1)), geometry=self.geometry.with_heads(2),
                        num_splits=5)  # fmt: skip
        for name, empty in (("first", (0, 1)), ("last", (4, 5)), ("all-but-one", (0, 1, 2, 4, 5)), ("none", ())):
            yield self.case(form, f"merge/empty-{name}", _ones((6 * 16, 40, 90)), geometry=self.geometry.with_heads(2),
                            num_splits=6, check="merge", empty_splits=empty)  # fmt: skip

    # --- chunks -----------------------------------------------------------------------------------------------

    def prefill(self, form: Entry, page_sizes: Sequence[int]) -> Iterator[AttentionCase]:
        """Chunks with history, through the small tile (the decode kernel's) and the large one."""
        size, one = self.span, self.one_head
        group = self.geometry.gqa_group
        chunks: Sequence[Chunk]
        for name, tile in (("small-tile", SMALL_TILE), ("large-tile", LARGE_TILE)):
            tokens = -(-tile // group) + 3  # more than one tile, the last one ragged
            for window_name, window, chunks in self._needle_chunks(tokens):
                yield self.case(form, f"{name}/needle/{window_name}", chunks, kind="needles", geometry=one,
                                window=window, tile=tile)  # fmt: skip
            if tile == LARGE_TILE:
                yield self._every_offset(form, f"{name}/needle/every-offset", tile)
            ragged = ((2, 2), (3 * size, 1), (size, 0), (size + 1, size + 1), (2 * size + tokens, tokens), (1, 1))
            yield self.case(form, f"{name}/ragged", ragged, geometry=self.geometry.with_heads(2), tile=tile,
                            num_layers=2)  # fmt: skip
            yield self.case(form, f"{name}/kv-sweep/1-{SWEEP_KEYS}", _sweep_chunks(tokens), geometry=one, tile=tile)
            chunks = ((3 * size + 5, min(tokens, 40)), (4 * size, 2), (5, 5))
            yield self.case(form, f"{name}/companions", chunks, geometry=one, tile=tile, check="alone")
            yield self.case(form, f"{name}/pages/permuted", chunks, geometry=one, tile=tile, check="permuted")
            yield self.case(form, f"{name}/plan/refilled-smaller", chunks, geometry=one, tile=tile, check="refill")
            for other in GROUPS:
                yield self.case(form, f"{name}/group/{other}", ((size + 4, 6), (3, 3)), tile=tile,
                                geometry=self.geometry.with_heads(1, other))  # fmt: skip
            if self.window is not None:
                chunks = ((SMALL_WINDOW + tokens, tokens), (90, 2), (SMALL_WINDOW, 5))
                yield self.case(form, f"{name}/window{SMALL_WINDOW}/spread", chunks, geometry=one, window=SMALL_WINDOW,
                                tile=tile)  # fmt: skip
                # The chunk alone is longer than the window, and pages in front of it are gone.
                yield self.case(form, f"{name}/chunk-past-the-window", ((170, 3 * SMALL_WINDOW // 2), (75, 75)),
                                geometry=one, window=SMALL_WINDOW, kind="needles", tile=tile)  # fmt: skip
        yield self.case(form, "model-heads", ((size + 3, 5), (size, 0), (2 * size, 1), (3, 3)), num_layers=2)
        yield self.case(form, "empty-requests-around", ((size, 0), (3, 0), (size + 5, 6), (1, 0)), geometry=one)
        yield self.case(form, "rows-behind-the-tokens", ((size + 3, 4),), geometry=one, padding_rows=3)
        yield self.case(form, "padding/poisoned-page", ((size + 3, 4), (5, 1)), padding=3, geometry=one)
        yield from self._values(form, ((3 * size + 5, 6), (100, 3), (9, 9)), 1)
        for page_size in page_sizes:
            chunks = ((2 * page_size + page_size // 2 + 1, min(page_size + 2, 40)), (page_size, 1))
            yield self.case(form, f"page-size/{page_size}", chunks, geometry=one, page_size=page_size,
                            window=_window_of(page_size))  # fmt: skip
        yield self._large_pool(form, 1)

    # --- what several forms share -----------------------------------------------------------------------------

    def _needle_lengths(self) -> Iterator[tuple[str, int | None, list[int]]]:
        """(name, window, kv_lens): the window's edge at every offset in a tile, and the lengths around W and 2 W."""
        if self.window is None:
            yield "causal", None, [*range(1, OFFSETS + 1), 2 * OFFSETS + 1]
            return
        yield f"window{SMALL_WINDOW}", SMALL_WINDOW, [*range(1, SMALL_WINDOW + OFFSETS + 2)]
        for window in (ODD_WINDOW, self.window):
            yield f"window{window}", window, [window - 1, *range(window, window + 17), 2 * window]

    def _needle_chunks(self, tokens: int) -> Iterator[tuple[str, int | None, list[Chunk]]]:
        """The same for chunks of ``tokens`` tokens: every row of a tile has its own edges."""
        if self.window is None:
            yield "causal", None, [(tokens + start, tokens) for start in (0, 1, 7, 16, 33, 63, 118)]
            return
        starts = [0, SMALL_WINDOW - 2, SMALL_WINDOW, *range(60, 77), 2 * SMALL_WINDOW]
        yield f"window{SMALL_WINDOW}", SMALL_WINDOW, [(start + tokens, tokens) for start in starts]
        yield f"window{ODD_WINDOW}", ODD_WINDOW, [(ODD_WINDOW + start, tokens) for start in (tokens - 2, 50, 333)]
        # The first row's window begins on a tile's edge, those of the others inside the tile.
        chunks = [(self.window - 1 + tokens, tokens), (self.window + tokens // 2, tokens), (2 * self.window, 2)]
        yield f"window{self.window}", self.window, chunks

    def _every_offset(self, form: Entry, name: str, tile: int) -> AttentionCase:
        """One head, so that rows are tokens: the rows that a warp begins with have their edges at every offset."""
        window = None if self.window is None else SMALL_WINDOW
        first = 0 if window is None else window
        starts = range(first, first + WARP_ROWS)
        return self.case(form, name, [(start + PREFILL_OFFSETS, PREFILL_OFFSETS) for start in starts],
                         kind="needles", geometry=self.geometry.with_heads(1, 1), window=window,
                         tile=tile)  # fmt: skip

    def _values(self, form: Entry, chunks: Sequence[Chunk], splits: int) -> Iterator[AttentionCase]:
        """Magnitudes and scales."""
        yield self.case(form, "scores/to-80", chunks, kind="large", geometry=self.one_head, num_splits=splits)
        # Longer than any kernel's step, so that maxima of earlier steps are left far behind.
        long = [(kv_len + 3 * PREFILL_OFFSETS, q_len) for kv_len, q_len in chunks]
        yield self.case(form, "scores/to-80/long", long, kind="large", geometry=self.one_head, num_splits=splits)
        yield self.case(form, "scores/all-equal", chunks, kind="equal", geometry=self.one_head, num_splits=splits)
        # No score is near 0, where a maximum may have begun; with splits, some of them are empty.
        yield self.case(form, "scores/far-below-zero", chunks, kind="low", geometry=self.one_head, num_splits=splits)
        # Nothing but the sum of the weights makes lse, which is then exact.
        yield self.case(form, "scores/zero-queries", chunks, kind="zero", geometry=self.one_head, num_splits=splits)
        for scale in (0.0625, 2.5):
            yield self.case(form, f"sm-scale/{scale}", chunks, geometry=self.one_head, sm_scale=scale,
                            num_splits=splits)  # fmt: skip

    def _large_pool(self, form: Entry, splits: int) -> AttentionCase:
        """A pool whose element offsets leave int32 (uint32 in decode), with all of the model's layers."""
        geometry, size, layers = self.geometry, self.page_size, self.geometry.num_kv_layers
        bits = 32 if form.one_token_each and not form.takes_splits else 31
        straddling = (1 << bits) // derived_layout(geometry, size, kv_format=self.kv_format).page_stride
        pages = (straddling - 1, straddling + 2, straddling)
        q_len = 1 if form.one_token_each else 3
        request = KvRequest(2 * size + 1 + size // 2, q_len, 0, pages)
        name = f"pool/past-{'u' if bits == 32 else ''}int32"
        return self.made(form, name, (request,), geometry=geometry, page_size=size, num_pages=straddling + 3,
                         num_layers=layers, layer=layers - 1, window=self.window, num_splits=splits)  # fmt: skip


def _window_of(page_size: int) -> int:
    """The window over pages of this size, 0 for the geometry's own: few keys of a large page, whatever their slots."""
    return 0 if page_size <= LARGE_PAGE else SMALL_WINDOW


def _sweep_splits(geometry: Geometry) -> tuple[int, ...]:
    """Split counts of the long sweep. At head_dim 512 it takes several times as long, and a geometry does two of them,
    by its name alone; the models together do them all."""
    if geometry.head_dim == 256:
        return SPLIT_SWEEP
    first = zlib.crc32(f"{geometry.model}-{geometry.family}".encode())
    return tuple(SPLIT_SWEEP[(first + step) % len(SPLIT_SWEEP)] for step in (0, 3))


def _ones(kv_lens: Iterable[int]) -> list[Chunk]:
    return [(kv_len, 1) for kv_len in kv_lens]


def _sweep_chunks(tokens: int) -> list[Chunk]:
    """Chunks of a request each, end to end: their queries cover every length of the sweep once."""
    starts = range(0, SWEEP_KEYS, tokens)
    return [(min(start + tokens, SWEEP_KEYS), min(tokens, SWEEP_KEYS - start)) for start in starts]
