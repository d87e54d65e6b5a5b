"""How a prep case is put together: pages drawn at random, origins and tables as the tables of cases name them."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from itertools import accumulate

from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.entries.table import entry_for
from g4kv_cli.inputs import InputKind
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat

SPARE_TABLE_ROWS = 3
MANY_PAGES = 4096


class CaseBuilder:
    """Makes cases of one geometry. No page that is drawn comes before ``first_page``."""

    def __init__(
        self, geometry: Geometry, seed: int, page_size: int, *, first_page: int = 0, kv_format: KvFormat = SPLIT
    ) -> None:
        self.geometry = geometry
        self.seed = seed
        self.page_size = page_size
        self.first_page = first_page
        self.kv_format = kv_format

    def draw(self, name: str, count: int) -> tuple[list[int], int]:
        """(different page ids in no order, pages of the pool): two of the pool's pages are nobody's."""
        num_pages = self.first_page + count + 2
        return drawn(name, range(self.first_page, num_pages), count), num_pages

    def made(
        self, form: str, name: str, kind: InputKind, positions: Sequence[int], placement: Placement | None, *,
        seed: int | None = None, rotary_dim: int | None = None, spare_rows: int = SPARE_TABLE_ROWS,
        against_contiguous: bool = False,
    ) -> PrepCase:  # fmt: skip
        """A case of these tokens."""
        return PrepCase(
            id=f"prep/{self.geometry.name}/{form}/{id_part(self.kv_format)}{name}",
            entry=entry_for(self.geometry, "prep", form).name,
            geometry=self.geometry,
            form=form,
            kind=kind,
            seed=self.seed if seed is None else seed,
            positions=tuple(positions),
            rotary_dim=self.geometry.rotary_dim if rotary_dim is None else rotary_dim,
            table_positions=max(positions) + 1 + spare_rows,
            placement=placement,
            against_contiguous=against_contiguous,
            kv_format=self.kv_format,
        )

    def contiguous_case(
        self, name: str, kind: InputKind, *, tokens: int, start: int = 0, seed: int | None = None,
        rotary_dim: int | None = None, spare_rows: int = SPARE_TABLE_ROWS,
    ) -> PrepCase:  # fmt: skip
        """Consecutive tokens, outputs without pages."""
        return self.made("contiguous", name, kind, range(start, start + tokens), None, seed=seed,
                         rotary_dim=rotary_dim, spare_rows=spare_rows)  # fmt: skip

    def prefill_case(
        self, name: str, kind: InputKind, *, tokens: int, start: int = 1, seed: int | None = None,
        page_size: int | None = None, origin: int = 0, rotary_dim: int | None = None,
        spare_rows: int = SPARE_TABLE_ROWS, placement: Placement | None = None, against_contiguous: bool = False,
    ) -> PrepCase:  # fmt: skip
        """Consecutive tokens of one request."""
        size = self.page_size if page_size is None else page_size
        if placement is None:
            covered = -(-(start + tokens) // size) - origin
            ids, num_pages = self.draw(name, covered)
            # The id behind the last page that is needed is out of range: it must never be read.
            placement = Placement(size, num_pages, 2, 1, (tuple(ids),), (origin,), unread=(num_pages,))
        return self.made(
            "prefill", name, kind, range(start, start + tokens), placement, seed=seed, rotary_dim=rotary_dim,
            spare_rows=spare_rows, against_contiguous=against_contiguous,
        )  # fmt: skip

    def decode_case(
        self, name: str, kind: InputKind, positions: Sequence[int], *, seed: int | None = None,
        page_size: int | None = None, origins: str = "zero", rotary_dim: int | None = None,
        spare_rows: int = SPARE_TABLE_ROWS, placement: Placement | None = None,
    ) -> PrepCase:  # fmt: skip
        """One token a request. ``origins``: rows hold all pages (zero), the token's own (last), or some (mixed)."""
        size = self.page_size if page_size is None else page_size
        if placement is None:
            logical = [position // size for position in positions]
            first = {
                "zero": [0 for _ in logical],
                "last": logical,
                "mixed": [page - page % (2 + token % 3) for token, page in enumerate(logical)],
            }[origins]
            lengths = [page - begin + 1 for page, begin in zip(logical, first, strict=True)]
            ids, num_pages = self.draw(name, sum(lengths))
            unread = (num_pages,) if kind == "closed-form" else ()
            rows = dealt(ids, lengths)
            placement = Placement(size, num_pages, 2, 1, rows, tuple(first), unread=unread)
        return self.made("decode", name, kind, positions, placement, seed=seed, rotary_dim=rotary_dim,
                         spare_rows=spare_rows)  # fmt: skip

    def batch_case(
        self, name: str, kind: InputKind, requests: tuple[tuple[int, int], ...], *, page_size: int | None = None,
        rotary_dim: int | None = None, padding_rows: int = 0, keeps_front: bool = False,
    ) -> PrepCase:  # fmt: skip
        """Chunks (start_pos, q_len) of several requests, with the pages that a window leaves them, or all."""
        size = self.page_size if page_size is None else page_size
        window_left = -1 if keeps_front else self.geometry.window_left
        origins = [0 if window_left < 0 else max(0, start - window_left) // size for start, _ in requests]
        lengths = [
            max(1, -(-(start + q_len) // size) - origin)
            for (start, q_len), origin in zip(requests, origins, strict=True)
        ]
        ids, num_pages = self.draw(name, sum(lengths))
        rows = dealt(ids, lengths)
        positions = [start + token for start, q_len in requests for token in range(q_len)]
        case = self.made(
            "batch_prefill", name, kind, positions, Placement(size, num_pages, 2, 1, rows, tuple(origins)),
            rotary_dim=rotary_dim,
        )  # fmt: skip
        return dataclasses.replace(case, requests=requests, padding_rows=padding_rows)


def id_part(kv_format: KvFormat) -> str:
    """What a case's id says of the format: nothing of split rows, which have no other word."""
    return "" if kv_format == SPLIT else f"{kv_format}/"


def drawn(name: str, pages: range, count: int) -> list[int]:
    """Some of the pages, in no order; of thousands those in front, in theirs: to draw them takes longer than a case."""
    return shuffler(name).sample(pages, count) if count < MANY_PAGES else list(pages[:count])


def dealt(pages: list[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Rows of these lengths, from the last page on."""
    taken, ends = pages[::-1], accumulate(lengths)
    return tuple(tuple(taken[end - length : end]) for length, end in zip(lengths, ends, strict=True))


def shuffler(name: str) -> random.Random:
    """Random numbers that depend on a case's name alone."""
    return random.Random(zlib.crc32(name.encode()))
