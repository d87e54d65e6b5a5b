"""How an attention case is put together: pages drawn at random, heads, windows and splits as the tables name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from g4kv_cli.cases.attention.case import AttentionCase, KeyKind, KvRequest
from g4kv_cli.cases.case import MAX_SPAN
from g4kv_cli.cases.prep.build import dealt, drawn, id_part
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.table import entry_for
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat

LARGE_TILE = 64
"""Or the largest that the card has the shared memory for."""
SMALL_TILE = 16

Chunk = tuple[int, int]
"""(kv_len, q_len)."""


class CaseBuilder:
    """Makes cases of one geometry."""

    def __init__(self, geometry: Geometry, seed: int, page_size: int, kv_format: KvFormat = SPLIT) -> None:
        self.geometry = geometry
        self.one_head = geometry.with_heads(1)
        self.seed = seed
        self.page_size = page_size
        self.span = min(page_size, MAX_SPAN)
        self.window = geometry.window
        self.kv_format = kv_format

    def case(
        self, form: Entry, name: str, chunks: Iterable[Chunk], *, kind: KeyKind = "spread",
        geometry: Geometry | None = None, window: int | None = 0, page_size: int | None = None, num_layers: int = 1,
        padding: int = 0, tile: int | None = None, first_page: int = 0, keeps_front: bool = False, **rest: Any,
    ) -> AttentionCase:  # fmt: skip
        """A case whose pages are drawn at random, none before ``first_page``. ``window`` 0 takes the geometry's own;
        ``padding`` requests read a reserved page of poison. With ``keeps_front`` rows hold the pages that have left the
        window too."""
        size = self.page_size if page_size is None else page_size
        window = self.window if window == 0 else window
        listed = [(kv_len, min(q_len, kv_len)) for kv_len, q_len in chunks]
        resident = None if keeps_front else window
        origins = [_origin(chunk, resident, size, keep_unseen=kind == "needles") for chunk in listed]
        lengths = [-(-kv_len // size) - origin for (kv_len, _), origin in zip(listed, origins, strict=True)]
        reserved = first_page + (1 if padding else 0)
        num_pages = sum(lengths) + reserved + 2
        ids = drawn(name, range(reserved, num_pages), sum(lengths))
        requests = [
            KvRequest(kv_len, q_len, origin, row)
            for (kv_len, q_len), origin, row in zip(listed, origins, dealt(ids, lengths), strict=True)
        ]
        # A bucket's padding, as an engine makes it (all at position 0), and two at another slot.
        kv_lens = [1 if number < padding - 2 else min(3, size) for number in range(padding)]
        requests += [KvRequest(kv_len, 1, 0, (0,), is_padding=True) for kv_len in kv_lens]
        return self.made(form, name, tuple(requests), geometry=geometry or self.geometry, page_size=size,
                         num_pages=num_pages, num_layers=num_layers, layer=num_layers - 1, window=window, kind=kind,
                         cta_tile_q=tile, **rest)  # fmt: skip

    def made(
        self, form: Entry, name: str, requests: tuple[KvRequest, ...], *, geometry: Geometry,
        window: int | None, kind: KeyKind = "spread", **rest: Any,
    ) -> AttentionCase:  # fmt: skip
        """A case of these requests."""
        return AttentionCase(
            id=f"attention/{self.geometry.name}/{form.form}/{id_part(self.kv_format)}{name}",
            entry=entry_for(geometry, "merge", "merge").name if rest.get("check") == "merge" else form.name,
            geometry=geometry,
            form=form.form,
            kind=kind,
            seed=self.seed,
            requests=requests,
            window_left=-1 if window is None else window - 1,
            kv_format=self.kv_format,
            **rest,
        )


def _origin(chunk: Chunk, window: int | None, page_size: int, *, keep_unseen: bool) -> int:
    """The first page that any query of the chunk sees, or the page of the key before it."""
    if window is None:
        return 0
    kv_len, q_len = chunk
    first_seen = max(0, kv_len - q_len - (window - 1))
    return max(0, first_seen - (1 if keep_unseen else 0)) // page_size
