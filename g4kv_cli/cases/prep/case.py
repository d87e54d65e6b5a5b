"""A case as data: inputs, the entry that runs, where its tokens go, and what decides. Picklable, so that a worker
process can run it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from g4kv_cli.cases.case import OfOneEntry, RunContext
from g4kv_cli.inputs import InputKind
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.kv_layout import SPARSE_POOL_BYTES, KvLayout
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.model.slots import derived_layout
from g4kv_cli.oracle.prep import EPS
from g4kv_cli.records.run import CaseResult

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a paged call writes. ``rows`` holds page ids, one row a request; row index i is the request's page
    ``origins[..] + i``. The ids ``unread`` (out of range) follow each row and must never be used.
    ``padding_page``, if any, is shared by padding rows: what stands in their slots afterwards is unspecified."""

    page_size: int
    num_pages: int
    num_layers: int
    layer: int
    rows: tuple[tuple[int, ...], ...]
    origins: tuple[int, ...]
    unread: tuple[int, ...] = ()
    padding_page: int | None = None


@dataclass(frozen=True, slots=True)
class PrepCase(OfOneEntry):
    """One case. ``placement`` is None in the contiguous form; ``against_contiguous`` also asks for the Q and K bits of
    the contiguous entry; ``golden`` names a file of recorded vectors that replaces ``kind`` and ``seed``. ``requests``
    (start_pos, q_len) are those of a ragged batch, and ``padding_rows`` the rows of q, k, v and q_out behind them.
    With ``judges_ends`` only the first and the last token have inputs, and are looked at. ``kv_format``: of the pool.
    ``eps``: of the norm, which a caller may give.
    """

    id: str
    entry: str
    geometry: Geometry
    form: str
    kind: InputKind
    seed: int
    positions: tuple[int, ...]
    rotary_dim: int
    table_positions: int
    placement: Placement | None = None
    against_contiguous: bool = False
    golden: Path | None = None
    requests: tuple[tuple[int, int], ...] = ()
    padding_rows: int = 0
    judges_ends: bool = False
    kv_format: KvFormat = SPLIT
    eps: float = EPS

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_prep_case."""
        from g4kv_cli.cases.prep.run import run_prep_case  # late: what runs a case knows the case

        return run_prep_case(self, context.library, context.rerun(self.id), context.dumps)

    @property
    def ends(self) -> PrepCase:
        """The case with its first and its last token alone."""
        place, requests = self.placement, self.requests
        if place is not None and self.form != "prefill":
            first, last = self.token_rows[0], self.token_rows[-1]
            rows, origins = (place.rows[first], place.rows[last]), (place.origins[first], place.origins[last])
            place = replace(place, rows=rows, origins=origins)
        positions = (self.positions[0], self.positions[-1])
        if requests:
            requests = tuple((position, 1) for position in positions)
        return replace(self, positions=positions, requests=requests, placement=place)

    @property
    def token_rows(self) -> tuple[int, ...]:
        """The row of page ids that each token uses."""
        if self.form == "batch_prefill":
            return tuple(row for row, (_, q_len) in enumerate(self.requests) for _ in range(q_len))
        return tuple(range(len(self.positions))) if self.form == "decode" else (0,) * len(self.positions)

    def page_and_slot(self) -> tuple[list[int], list[int]]:
        """(page id, slot) of each token. ValueError if the placement has no page for one."""
        place = self.placement
        if place is None:
            raise ValueError(f"{self.id} writes to no pool")
        pages, slots = [], []
        for position, row in zip(self.positions, self.token_rows, strict=True):
            index = position // place.page_size - place.origins[row]
            if not 0 <= index < len(place.rows[row]):
                raise ValueError(f"{self.id}: position {position} lies outside the pages of row {row}")
            pages.append(place.rows[row][index])
            slots.append(position % place.page_size)
        return pages, slots

    @property
    def has_v_input(self) -> bool:
        """False where V is made from raw K (and in the contiguous form, which makes no V)."""
        return self.form != "contiguous" and not self.geometry.k_eq_v

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, 0 without one."""
        return 0 if self.placement is None else self.image_of(self.placement).elements * BF16_BYTES

    def layout_of(self, place: Placement) -> KvLayout:
        """What the entry is told of the pool."""
        return derived_layout(self.geometry, place.page_size, place.num_layers, self.kv_format)

    def image_of(self, place: Placement, order: PoolOrder = OWN_ORDER) -> PoolImage:
        """The pool as the check of it sees it."""
        return PoolImage.of(self.layout_of(place), place.num_pages, order)

    @property
    def is_sparse(self) -> bool:
        """True if the pool is too large to be filled, read and compared as one host array."""
        return self.pool_bytes > SPARSE_POOL_BYTES
