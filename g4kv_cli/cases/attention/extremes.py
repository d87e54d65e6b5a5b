"""Cases at the far ends of what a call can ask for: long rows of pages, high page ids and positions, many splits.

Pools are sparse or small, and windows short, so that few keys are read however far out they lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from g4kv_cli.cases.attention.build import LARGE_TILE, SMALL_TILE, CaseBuilder
from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.case import MAX_SPAN
from g4kv_cli.entries.attention_request import MAX_GQA_GROUP
from g4kv_cli.entries.clusters import WHOLE_CARD_SPLITS
from g4kv_cli.entries.entry import Entry
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat

MANY_SPLITS = 128
"""As many as the bench tries."""
MORE_SPLITS = 200
"""A caller may ask for any number."""
KEYS_OF_A_SPLIT = 16
"""Keys are dealt out to the splits in whole tiles of so many."""
SHARED_KEYS = 29 * KEYS_OF_A_SPLIT - 3
"""Where WHOLE_CARD_SPLITS splits are 14 clusters, ten of them have keys."""
PAST_UINT16 = 1 << 16
FAR_WINDOW = 40
FAR_KV_LENS = ((1 << 15) + 33, (1 << 16) + 7)
"""Positions that 15 and 16 bits do not hold."""
RISING_KEYS = 1100
"""More than 64 pages of 16."""
CHUNK_TOKENS = 3
LONG_CHUNK = 64
MANY_TILES = 64
"""Of the small tile, which holds a token of MAX_GQA_GROUP heads."""
PAST_UINT8 = 1 << 8
SHORT_WINDOW = 5
HISTORY, WINDOW_OF_TILES = 120, 101
"""More keys than a tile's step has; the oldest key of some tile's first token begins a step, and is hidden from the
next."""
SPLITS = 3
KV_HEADS_OF_MANY_ROWS = 512


class Extremes(CaseBuilder):
    """The extreme cases of one geometry. ``page_sizes``: what other sizes than its own a case may have."""

    def __init__(
        self, geometry: Geometry, seed: int, page_size: int, kv_format: KvFormat, *, page_sizes: Collection[int]
    ) -> None:
        super().__init__(geometry, seed, page_size, kv_format)
        self.page_sizes = page_sizes

    def of(self, form: Entry) -> Iterator[AttentionCase]:
        """Those of one entry, through each kind of tile that a chunk can take."""
        if form.takes_splits:
            yield from self._many_splits(form)
        if form.one_token_each:
            yield from self._of_tile(form, "", 1, None)
            return
        for name, tile in (("small-tile/", SMALL_TILE), ("large-tile/", LARGE_TILE)):
            yield from self._of_tile(form, name, CHUNK_TOKENS, tile)

    def _of_tile(self, form: Entry, tile_name: str, tokens: int, tile: int | None) -> Iterator[AttentionCase]:
        one, size = self.one_head, self.span
        splits = SPLITS if form.takes_splits else 1
        if self.window is not None:
            lengths = ((1, 1), (17, tokens), (2 * size, tokens))
            yield self.case(form, f"{tile_name}window1/needle", lengths, kind="needles", geometry=one, window=1,
                            tile=tile, num_splits=splits)  # fmt: skip
        yield self.case(form, f"{tile_name}scores/rising", ((RISING_KEYS, tokens),), kind="rising", geometry=one,
                        tile=tile, num_splits=splits)  # fmt: skip
        yield self.case(form, f"{tile_name}lse/not-wanted", ((size + 3, tokens), (40, 1)), wants_lse=False,
                        geometry=self.geometry.with_heads(2), tile=tile, num_splits=splits)  # fmt: skip
        # The first request keeps the pages that have left its window: its last key is far into a long row.
        last = self.geometry.max_positions
        far = ((FAR_KV_LENS[0], tokens), (60, 1))
        yield self.case(form, f"{tile_name}kv-len/past-15-bits/long-row", far, geometry=one, window=FAR_WINDOW,
                        tile=tile, num_splits=splits, keeps_front=True)  # fmt: skip
        yield self.case(form, f"{tile_name}kv-len/past-16-bits", ((FAR_KV_LENS[1], tokens), (last, 1)), geometry=one,
                        window=FAR_WINDOW, tile=tile, num_splits=splits)  # fmt: skip
        if 1 in self.page_sizes:  # the second request's row of pages begins behind 65,536 entries
            yield self.case(form, f"{tile_name}page-rows/past-16-bits", ((FAR_KV_LENS[1], tokens), (60, tokens)),
                            geometry=one, window=FAR_WINDOW, page_size=1, tile=tile, num_splits=splits,
                            keeps_front=True)  # fmt: skip
        yield self.case(form, f"{tile_name}pool/page-ids-past-16-bits", ((3 * size + 2, tokens), (size + 5, 1)),
                        geometry=one, tile=tile, num_splits=splits, first_page=PAST_UINT16)  # fmt: skip
        if not form.one_token_each:
            heads = self.geometry.with_heads(1, MAX_GQA_GROUP)
            rows = MANY_TILES + 2
            yield self.case(form, f"{tile_name}tiles/past-{MANY_TILES}", ((rows + HISTORY, rows), (40, 2)),
                            geometry=heads, window=WINDOW_OF_TILES, tile=tile)  # fmt: skip
            if tile == SMALL_TILE and self.kv_format == SPLIT:
                yield self.case(form, f"{tile_name}tiles/past-8-bits", ((PAST_UINT8 + 2, PAST_UINT8 + 2), (40, 2)),
                                geometry=heads, window=SHORT_WINDOW, tile=tile)  # fmt: skip
            requests = PAST_UINT16 // LONG_CHUNK + 2
            yield self.case(form, f"{tile_name}tokens/past-16-bits", ((LONG_CHUNK + 2, LONG_CHUNK),) * requests,
                            check="ends", geometry=self.geometry.with_heads(2), tile=tile)  # fmt: skip
        if self.page_size <= MAX_SPAN:
            yield self._many_rows(form, tile_name, tokens, tile, 2 if form.takes_splits else 1)

    def _many_rows(self, form: Entry, tile_name: str, tokens: int, tile: int | None, splits: int) -> AttentionCase:
        """So many heads that few requests are enough, in pools of which two pages are touched."""
        geometry = self.geometry.with_heads(KV_HEADS_OF_MANY_ROWS, MAX_GQA_GROUP)
        row = geometry.num_qo_heads * geometry.head_dim
        requests = (1 << 31) // (row * tokens) + 1
        return self.case(form, f"{tile_name}rows/past-int32", ((tokens + 2, tokens),) * requests, check="ends",
                         geometry=geometry, tile=tile, num_splits=splits)  # fmt: skip

    def _many_splits(self, form: Entry) -> Iterator[AttentionCase]:
        """No split of these is empty, but for the last ones of the request beside the long one."""
        keys = MANY_SPLITS * KEYS_OF_A_SPLIT
        window = None if self.window is None else keys
        yield self.case(form, f"splits/{MANY_SPLITS}-not-empty", ((keys, 1), (keys // 3, 1)), window=window,
                        geometry=self.geometry.with_heads(1, 2), num_splits=MANY_SPLITS)  # fmt: skip
        yield self.case(form, f"splits/{WHOLE_CARD_SPLITS}-in-clusters", ((SHARED_KEYS, 1), (60, 1)), window=window,
                        geometry=self.geometry.with_heads(1, 2), num_splits=WHOLE_CARD_SPLITS)  # fmt: skip
        for splits in (MANY_SPLITS, MORE_SPLITS):
            yield self.case(form, f"merge/{splits}-not-empty", ((2 * splits + 5, 1),), check="merge",
                            geometry=self.geometry.with_heads(2), num_splits=splits)  # fmt: skip
        yield self.case(form, "merge/lse-not-wanted", ((96, 1), (40, 1)), check="merge", wants_lse=False, num_splits=6,
                        geometry=self.geometry.with_heads(2))  # fmt: skip
