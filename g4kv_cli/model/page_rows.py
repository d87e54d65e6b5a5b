"""Who holds which slot in a batch: the rules of its page rows, the same for a plan, a decode batch and a single row.

A row names the resident pages of one request::

    row[i] is the logical page page_origin + i
    position p takes slot p % page_size of row[p // page_size - page_origin]
    start_pos .. kv_len - 1 are the positions of this call's new tokens, which it writes; the earlier ones are history

So the slots of a page that one request takes are ``[0, history)`` from before and ``[history, taken)`` written now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.model.rules import rule

Integers = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]

PADDING_PAGE = rule("padding_page", "names the reserved padding page beside pages of its own")
PAGE_UNIQUE = rule("page_unique", "names a page twice: two of its positions would be one slot")
PAGE_POSITION = rule("page_position", "names a page that holds other positions of another request")
SLOT_HISTORY = rule("slot_history", "writes a slot that holds an earlier token of another request")
SLOT_UNIQUE = rule("slot_unique", "takes the slot of another token of the same call")


@dataclass(frozen=True, slots=True, eq=False)
class PageRows:
    """CSR rows of page ids, integer arrays: page_indices [entries], page_indptr [rows + 1]; page_origins, start_pos
    and kv_len [rows]. Entries behind the page of position kv_len - 1 are not looked at, and neither are ids outside
    the pool: whoever reads an entry has checked it, and prep does not read the pages of history.
    """

    page_indices: Integers
    page_indptr: Integers
    page_origins: Integers
    start_pos: Integers
    kv_len: Integers


def check_page_rows(
    rows: PageRows, *, page_size: int, num_pages: int, padding_page: int | None, name_of: Callable[[int], str]
) -> None:
    """Refuse rows that contradict themselves or each other. ``name_of`` says how an error calls a row.

    A row of nothing but the ``padding_page`` is padding: any number of them may take any of its slots. Pages that
    several rows name are a shared prefix: they hold the same positions of each (keys are rotated for where they stand),
    and nobody writes to what another one holds there.

    Raises ContractError: padding_page, page_unique, page_position, slot_history, slot_unique.
    """
    has_padding = padding_page is not None and bool((rows.page_indices == padding_page).any())
    if not has_padding and not _repeats(rows.page_indices):
        return  # most batches: one sort, microseconds for some thousand pages
    entries = _Entries.of(rows, page_size, num_pages)
    if padding_page is not None:
        entries = _without_padding(entries, padding_page, len(rows.start_pos), name_of)
    if _repeats(entries.page):
        _check_shared(entries.take(np.argsort(entries.page, kind="stable")), name_of)


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Entries of rows that hold something, in the order of the rows; all arrays [entries]."""

    page: Integers
    row: Integers
    first_position: Integers
    history: Integers
    taken: Integers

    @classmethod
    def of(cls, rows: PageRows, page_size: int, num_pages: int) -> _Entries:
        row = np.repeat(np.arange(len(rows.start_pos)), np.diff(rows.page_indptr))
        # page_indices[page_indptr[row] + index]
        index = np.arange(len(row)) - rows.page_indptr[row]
        first_position = (rows.page_origins[row].astype(np.int64) + index) * page_size
        history = np.clip(rows.start_pos[row] - first_position, 0, page_size)
        taken = np.clip(rows.kv_len[row] - first_position, 0, page_size)
        is_page = (rows.page_indices >= 0) & (rows.page_indices < num_pages)
        entries = cls(rows.page_indices, row, first_position, history, taken)
        return entries.take(np.flatnonzero((taken > 0) & is_page))

    def take(self, which: npt.NDArray[np.intp]) -> _Entries:
        return _Entries(
            self.page[which], self.row[which], self.first_position[which], self.history[which], self.taken[which]
        )


def _without_padding(entries: _Entries, padding_page: int, num_rows: int, name_of: Callable[[int], str]) -> _Entries:
    """The entries of the rows that are no padding."""
    is_padding = entries.page == padding_page
    padding = np.bincount(entries.row[is_padding], minlength=num_rows)
    own = np.bincount(entries.row[~is_padding], minlength=num_rows)
    mixed = np.flatnonzero((padding > 0) & (own > 0))
    row = int(mixed[0]) if mixed.size else 0
    PADDING_PAGE.require(not mixed.size, name_of(row), f"page {padding_page} and others", "one or the other")
    return entries.take(np.flatnonzero(~is_padding))


def _check_shared(entries: _Entries, name_of: Callable[[int], str]) -> None:
    """Entries sorted by page, those of one page in the order of their rows."""
    page, row, history = entries.page, entries.row, entries.history
    is_first = np.concatenate([[True], page[1:] != page[:-1]])
    again = _first(np.concatenate([[False], ~is_first[1:] & (row[1:] == row[:-1])]))
    PAGE_UNIQUE.require(
        again is None, name_of(int(row[again or 0])), f"page {page[again or 0]} twice", "each page once"
    )

    position = entries.first_position
    elsewhere = _first(np.concatenate([[False], ~is_first[1:] & (position[1:] != position[:-1])]))
    at = elsewhere or 0
    PAGE_POSITION.require(
        elsewhere is None,
        name_of(int(row[at])),
        f"page {page[at]} from position {position[at]} on",
        f"from position {position[at - 1]} on, as another has it",
    )

    group = np.cumsum(is_first) - 1
    longest = np.maximum.reduceat(history, np.flatnonzero(is_first))[group]
    written = entries.taken > history
    # The lowest slot written is ``history``; the own history ends there, so a longer one is another request's.
    over = _first(written & (longest > history))
    at = over or 0
    SLOT_HISTORY.require(
        over is None,
        name_of(int(row[at])),
        f"page {page[at]}, slot {history[at]}, of which another holds {longest[at]} slots",
        "a slot that no other request has filled",
    )

    # Whoever writes to a shared page now begins at the end of the longest history: two of them at the same slot.
    writers = np.bincount(group, weights=written)[group]
    both = np.flatnonzero(written & (writers > 1))
    at = int(both[1]) if both.size else 0
    SLOT_UNIQUE.require(
        not both.size,
        name_of(int(row[at])),
        f"page {page[at]}, slot {history[at]} for two tokens",
        "a slot of its own for each token",
    )


def _repeats(pages: Integers) -> bool:
    """True if a page is named twice."""
    ordered = np.sort(pages)
    return bool((ordered[1:] == ordered[:-1]).any())


def _first(found: Mask) -> int | None:
    """Index of the first True."""
    return int(np.argmax(found)) if found.any() else None
