"""The pages of one family's pool, handed out and taken back as a serving engine does it."""

from __future__ import annotations

import heapq

from g4kv_cli.errors import UsageError


class PageAllocator:
    """Pages 0 .. num_pages - 1; the first ``reserved`` are never handed out (padding rows write there).

    The lowest free page goes first, so that a page given back is soon another request's.
    """

    def __init__(self, num_pages: int, reserved: int) -> None:
        if not 0 <= reserved < num_pages:
            raise ValueError(f"{reserved} reserved pages of {num_pages} leave none to hand out")
        self._returned: list[int] = []
        """Pages given back, a heap; all of them lie in front of the first that nobody ever had."""
        self._first_unused, self._num_pages = reserved, num_pages
        self._owner: dict[int, int] = {}
        self._past_owners: dict[int, int] = {}
        self.reserved = reserved
        self.high_water = reserved
        """Pages that a pool needs for what was handed out so far, the reserved ones included."""
        self.recycled = 0
        """Pages handed out that another request had before."""

    def take(self, owner: int) -> int:
        """A page for a request. Raises UsageError if there is none."""
        if self._returned:
            page = heapq.heappop(self._returned)
        elif self._first_unused < self._num_pages:
            page, self._first_unused = self._first_unused, self._first_unused + 1
        else:
            raise UsageError(f"no page is free for request {owner}: give the pool more pages")
        if self._past_owners.get(page, owner) != owner:
            self.recycled += 1
        self._owner[page] = owner
        self.high_water = max(self.high_water, page + 1)
        return page

    def owner_words(self, page: int) -> str:
        """Whose a page is."""
        if page < self.reserved:
            return "a padding page"
        if page in self._owner:
            return f"request {self._owner[page]} holds it"
        if page in self._past_owners:
            return f"request {self._past_owners[page]} has given it back"
        return "nobody ever had it"

    def give_back(self, page: int, owner: int) -> None:
        """Take a page back. ValueError if that request does not hold it."""
        if self._owner.get(page) != owner:
            raise ValueError(f"request {owner} does not hold page {page}")
        del self._owner[page]
        self._past_owners[page] = owner
        heapq.heappush(self._returned, page)
