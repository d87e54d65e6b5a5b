"""Which slot a token takes, which pages a windowed request still holds, and how large the two pools get.

The rules are those of a serving engine with one pool per family. ``frontier`` is the next position to be
computed: all positions before it are in the pool. A local query at position q sees the keys j with
``q - window < j <= q``.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry, model_families
from g4kv_cli.model.kv_format import SPLIT, KvFormat, format_for, k_dim_of
from g4kv_cli.model.kv_layout import INT32_MAX, KvLayout

PADDING_PAGES = 1
"""One page of each pool is reserved for the padding of a batch, however much of it there is: it goes nowhere else."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens from position 0 on span; 0 tokens span none."""
    return -(-tokens // page_size)


def page_origin(frontier: int, window: int | None, page_size: int) -> int:
    """The first resident page of a request; 0 without a window. No query at ``frontier`` or later can see a key of the
    pages before it.

    A page's last key is ``(page + 1) * page_size - 1``; serving keeps the page until that key is at least
    ``window + 1`` behind the frontier, one position longer than strictly needed. The origin is whole pages, so
    ``position % page_size`` stays the slot; only the row of page ids shifts.
    """
    return 0 if window is None else max(0, frontier - window) // page_size


def max_resident_pages(context_tokens: int, window: int | None, page_size: int, step_tokens: int = 1) -> int:
    """The most pages one request ever holds on its way from 0 to ``context_tokens`` tokens.

    A step appends up to ``step_tokens`` tokens (1 in decode, the chunk in chunked prefill) and pages are
    released before it, by the frontier of then: ``kv_len = n`` meets ``frontier = n - step_tokens``, hence

        resident(n) = ceil(n / page_size) - max(0, n - step_tokens - window) // page_size,   1 <= n <= context

    Up to ``n = window + step_tokens + page_size - 1`` nothing is released and the count only grows. There
    ``frontier - window`` lies in the last slot of the oldest page, which cannot go yet: the window straddles
    one page more than ``window / page_size``. From then on each page gained is a page released, so that count
    is the maximum: ``ceil(min(context, window + step_tokens + page_size - 1) / page_size)``.
    """
    if window is None:
        return pages_for(context_tokens, page_size)
    return pages_for(min(context_tokens, window + step_tokens + page_size - 1), page_size)


@dataclass(frozen=True, slots=True)
class FamilyPool:
    """The pool of one family for a number of request slots, all at full context."""

    geometry: Geometry
    layout: KvLayout
    pages_per_slot: int
    slots: int

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the reserved padding page included."""
        return self.slots * self.pages_per_slot + PADDING_PAGES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.layout.pool_bytes(self.num_pages)


@dataclass(frozen=True, slots=True)
class ModelPools:
    """The pools of one model on one tensor-parallel rank, one a family."""

    model: str
    context_tokens: int
    slots: int
    page_size: int
    step_tokens: int
    families: tuple[FamilyPool, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.pool_bytes for pool in self.families)

    @property
    def windowed(self) -> FamilyPool | None:
        """The pool whose pages are released behind the window; None in a model without one."""
        return next((pool for pool in self.families if pool.geometry.window is not None), None)

    @property
    def uncapped_local_bytes(self) -> int:
        """Bytes the windowed pool would take if it kept every page; 0 in a model without one."""
        pages = self.slots * pages_for(self.context_tokens, self.page_size) + PADDING_PAGES
        return 0 if self.windowed is None else self.windowed.layout.pool_bytes(pages)


def derived_layout(
    geometry: Geometry, page_size: int, num_layers: int | None = None, kv_format: KvFormat = SPLIT
) -> KvLayout:
    """The geometry's layout; ``num_layers`` defaults to the layers of the family that own K/V.

    Layers that read the K/V of an earlier layer (E2B, E4B) own no block: they are not counted. Raises UsageError where
    the geometry has no such format.
    """
    return KvLayout.derive(
        page_size=page_size,
        num_layers=geometry.num_kv_layers if num_layers is None else num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        k_dim=k_dim_of(geometry, kv_format),
    )


def model_pools(
    model: str,
    *,
    context_tokens: int,
    slots: int,
    page_size: int,
    step_tokens: int = 1,
    tp: int = 1,
    families: tuple[Geometry, ...] | None = None,
    kv_format: KvFormat = SPLIT,
) -> ModelPools:
    """The pools of a model for ``slots`` requests of up to ``context_tokens`` tokens each. ``families`` are those of a
    model that is not built in, for a rank. In the folded format are those of them that have it.

    Local pages are capped by the window (``max_resident_pages``), global pages are all kept, each pool has
    the reserved padding page. Raises UsageError if a number is out of range for the model.
    """
    families = model_families(model, tp) if families is None else families
    max_positions = min(geometry.max_positions for geometry in families)
    for name, value in (("--context", context_tokens), ("--slots", slots), ("--step-tokens", step_tokens)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if context_tokens > max_positions:
        raise UsageError(f"--context {context_tokens} is past the {max_positions} positions of {model}: give no more")
    if step_tokens > context_tokens:
        raise UsageError(f"--step-tokens {step_tokens} is more than the context of {context_tokens} tokens")

    def pool(geometry: Geometry) -> FamilyPool:
        layout = derived_layout(geometry, page_size, kv_format=format_for(geometry, kv_format))
        pages = max_resident_pages(context_tokens, geometry.window, page_size, step_tokens)
        made = FamilyPool(geometry, layout, pages, slots)
        if made.num_pages > INT32_MAX:
            raise UsageError(
                f"--slots {slots} takes {made.num_pages} pages of {geometry.name}, and page ids are int32: give fewer "
                "--slots, a shorter --context, or a larger --page-size"
            )
        return made

    return ModelPools(model, context_tokens, slots, page_size, step_tokens, tuple(map(pool, families)))
