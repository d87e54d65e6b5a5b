"""An attention case as data: requests and where their keys lie, the form that reads them, and what decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from g4kv_cli.cases.case import OfOneEntry, RunContext
from g4kv_cli.cases.prep.case import BF16_BYTES
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import SPARSE_POOL_BYTES, KvLayout
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.records.run import CaseResult

KeyKind = Literal["spread", "needles", "large", "equal", "rising", "low", "zero"]
"""spread: scores around +-2, so that many keys count. needles: the oldest and the newest key that a query sees outweigh
all others, and the keys just outside outweigh those. large: scores up to 80. equal: one key, repeated. rising: each
score a little above the one before: every tile has a new maximum, and the factor of what stands is close to 1. low: all
scores around -200 or half of it, by the head, but for one key of every other request. zero: queries of zeros."""

Check = Literal["oracle", "alone", "permuted", "refill", "graph", "forms", "merge", "ends"]
"""Every check holds the output against the oracle. Besides: ``alone``: each request run alone has the same bits;
``permuted``: other pages, same bits; ``refill``: a plan filled again with fewer requests, same bits as a fresh one;
``graph``: a CUDA graph captured before an update in place, same bits as a fresh plan; ``forms``: all forms on the same
keys; ``merge``: the merge kernel alone, on partial results made on the host; ``ends``: so many rows that only those of
the first and the last request and KV head have inputs, and are looked at."""


@dataclass(frozen=True, slots=True)
class KvRequest:
    """``kv_len`` keys, the last ``q_len`` of them also queries; ``pages[i]`` is the logical page ``origin + i``.

    The output of a ``is_padding`` request is nobody's business: its page, which all of them share, holds poison.
    """

    kv_len: int
    q_len: int = 1
    origin: int = 0
    pages: tuple[int, ...] = ()
    is_padding: bool = False

    @property
    def start_pos(self) -> int:
        """Position of the first query."""
        return self.kv_len - self.q_len

    def first_seen(self, window_left: int) -> int:
        """The oldest key that any of the queries sees."""
        return 0 if window_left < 0 else max(0, self.start_pos - window_left)


@dataclass(frozen=True, slots=True)
class AttentionCase(OfOneEntry):
    """One case. ``geometry`` says the heads in use, which may be a share of the model's. ``num_splits`` counts where
    the entry takes splits; ``cta_tile_q`` None leaves the tile to the plan. ``padding_rows`` stand behind the tokens in
    q and out; ``empty_splits`` saw no key (merge check). ``wants_lse``: log-sum-exp is asked for. ``golden`` names
    a recording that replaces ``kind`` and ``seed``. ``is_asked``: the user described the request; where no kernel at
    hand takes it, it is not covered, where a case of the tables would be an error. ``kv_format``: of the pool.
    """

    id: str
    entry: str
    geometry: Geometry
    form: str
    kind: KeyKind
    seed: int
    requests: tuple[KvRequest, ...]
    page_size: int
    num_pages: int
    num_layers: int
    layer: int
    window_left: int
    sm_scale: float = 1.0
    num_splits: int = 1
    cta_tile_q: int | None = None
    padding_rows: int = 0
    check: Check = "oracle"
    empty_splits: tuple[int, ...] = ()
    wants_lse: bool = True
    golden: Path | None = None
    is_asked: bool = False
    kv_format: KvFormat = SPLIT

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_attention_case."""
        from g4kv_cli.cases.attention.run import run_attention_case  # late: what runs a case knows the case

        return run_attention_case(self, context.library, context.rerun(self.id), context.dumps)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(request.q_len for request in self.requests)

    @property
    def ends(self) -> AttentionCase:
        """The case with its first and its last request and KV head alone."""
        heads = self.geometry.with_heads(2)
        return replace(self, geometry=heads, requests=(self.requests[0], self.requests[-1]))

    @property
    def padding_page(self) -> int | None:
        """The reserved page that the padding requests share; None without any."""
        return next((request.pages[0] for request in self.requests if request.is_padding), None)

    @property
    def layout(self) -> KvLayout:
        """What the entry is told of the pool."""
        return derived_layout(self.geometry, self.page_size, self.num_layers, self.kv_format)

    def image(self, order: PoolOrder = OWN_ORDER) -> PoolImage:
        """The pool as it is filled, and looked at afterwards."""
        return PoolImage.of(self.layout, self.num_pages, order)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.image().elements * BF16_BYTES

    @property
    def is_sparse(self) -> bool:
        """True if the pool is too large to be made on the host."""
        return self.pool_bytes > SPARSE_POOL_BYTES
