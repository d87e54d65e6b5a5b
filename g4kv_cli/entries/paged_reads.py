"""What the requests of a plan may read of a pool, and the words for what they may not."""

from __future__ import annotations

from functools import partial

from g4kv_cli.device.interface import PagedReads
from g4kv_cli.entries.arguments import PagedPool
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.model.kv_layout import KvLayout


def paged_reads(pool: PagedPool, plan: PrefillPagedPlan, *, one_request_a_block: bool) -> PagedReads:
    """The pages of each request of the plan."""
    page_indices, page_indptr = plan.pages()
    return PagedReads(
        pool.data,
        pool.layout.page_bytes,
        page_indices,
        page_indptr,
        one_request_a_block,
        partial(_place, pool.layout),
        pool.page_owner or _unknown,
    )


def _place(layout: KvLayout, offset_bytes: int) -> str:
    at = layout.coordinates(offset_bytes // layout.element_bytes)
    return f"page {at.page} (layer {at.layer}, {at.kv.upper()}, slot {at.slot}, head {at.head}, dim {at.dim})"


def _unknown(_page: int) -> str:
    return "a page of the pool"
