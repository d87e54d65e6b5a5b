"""Paged caches as a server keeps them: one pool a family, pages from an allocator, fronts released by the window.

The allocator's numbers are shuffled, so a request's pages stand in no order. A released page is poisoned (NaN in every
element) at once, so that a kernel that still reads it shows. The pool has no page to spare: a page that is not given
back ends the run.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np

from g4kv_cli.cases.e2e.recorded_model import Array
from g4kv_cli.cases.serve.page_allocator import PageAllocator
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.kv_pool import PoisonedPool
from g4kv_cli.inputs import turning_columns
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.plan_request import PlanRequest
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.model.slots import (
    PADDING_PAGES,
    max_resident_pages,
    page_origin,
    pages_for,
)


@dataclass(slots=True)
class PageList:
    """Resident pages of request ``owner`` in one pool; index 0 is its logical page ``origin``."""

    owner: int
    origin: int = 0
    pages: list[int] = field(default_factory=list)


class FamilyCache:
    """The pool of one family, for requests of up to ``context_tokens`` that grow by up to ``step_tokens`` at a time."""

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        *,
        num_layers: int,
        page_size: int,
        context_tokens: int,
        step_tokens: int,
        num_requests: int,
        seed: int,
        order: PoolOrder = OWN_ORDER,
        kv_format: KvFormat = SPLIT,
    ) -> None:
        self.kv_format = kv_format
        self.device, self.geometry, self.page_size = device, geometry, page_size
        resident = max_resident_pages(context_tokens, geometry.window, page_size, step_tokens)
        self.num_pages = num_requests * resident + PADDING_PAGES
        self.max_row_pages = resident
        self.store = PoisonedPool(
            device, geometry, num_pages=self.num_pages, page_size=page_size, num_layers=num_layers, order=order,
            kv_format=kv_format,
        )  # fmt: skip
        self.pool = dataclasses.replace(self.store.pool, page_owner=self._owner_words)
        self.allocator = PageAllocator(self.num_pages, reserved=PADDING_PAGES)
        self._page_ids = list(range(self.num_pages))
        random.Random(seed).shuffle(self._page_ids)
        self.padding_page = self._page_ids[0]

    def origin(self, frontier: int) -> int:
        """The first logical page that a query at ``frontier`` or later may still see."""
        return page_origin(frontier, self.geometry.window, self.page_size)

    def extend(self, held: PageList, kv_len: int) -> None:
        """Take the pages that ``kv_len`` tokens need."""
        while held.origin + len(held.pages) < pages_for(kv_len, self.page_size):
            held.pages.append(self._page_ids[self.allocator.take(held.owner)])

    def release_front(self, held: PageList, frontier: int) -> None:
        """Give back every page that no query from ``frontier`` on sees."""
        while held.origin < self.origin(frontier):
            self.give_back(held.pages.pop(0), held.owner)
            held.origin += 1

    def release_all(self, held: PageList) -> None:
        """The request is over."""
        while held.pages:
            self.give_back(held.pages.pop(), held.owner)

    def give_back(self, page: int, owner: int) -> None:
        """Poison a page and let the allocator hand it out again."""
        self.poison(page)
        self.allocator.give_back(self._page_ids.index(page), owner)

    def _owner_words(self, page: int) -> str:
        return self.allocator.owner_words(self._page_ids.index(page))

    def poison(self, page: int) -> None:
        """Fill a page with NaN."""
        self.store.poison(page)

    def plan_request(self, held: PageList, start_pos: int, q_len: int) -> PlanRequest:
        """What a plan says of the next ``q_len`` tokens; their pages are taken already."""
        return PlanRequest.of(kv_len=start_pos + q_len, q_len=q_len, pages=held.pages, page_size=self.page_size)

    def stored(self, held: PageList, layer: int, positions: range) -> tuple[Array, Array]:
        """K and V of these positions as they lie in the pool, bf16 [positions, num_kv_heads, columns]; no later one has
        been written."""
        return self.store.read(self.plan_request(held, positions.start, len(positions)), layer, positions)


def as_split_rows(geometry: Geometry, k_weight: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """q [tokens, num_qo_heads, head_dim] and K [tokens, num_kv_heads, head_dim] of folded rows as split ones would be:
    K's weight goes from the query back to K, which is V times it in the columns that do not turn."""
    turning = turning_columns(geometry)
    factor = k_weight.astype(np.float32)
    factor[turning] = 1.0
    whole = v.astype(np.float32) * factor
    whole[..., turning] = k.astype(np.float32)
    return (q.astype(np.float32) / np.where(factor == 0, 1, factor)).astype(q.dtype), whole.astype(k.dtype)
