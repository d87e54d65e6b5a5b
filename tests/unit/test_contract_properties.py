"""Properties of the contract on random requests around its edges.

The predicates below say what is in range in the words of the contract: counting pages and slots one token at a time, in
Python integers, without a line of the code under test. The entries must agree with them, refuse with nothing but
ContractError, and what they accept must run on the emulated device without a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel
from g4kv_cli.entries import attention, prep
from g4kv_cli.entries.arguments import BF16, PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.errors import ContractError
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.prefill_plan import check_requests, lay_out

I32_MAX = 2**31 - 1
HEAD_DIM, QO_HEADS, KV_HEADS = 256, 2, 1
MAX_TOKENS = 6

many = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
few = settings(many, max_examples=20)


class CountingDevice(EmulatedDevice):
    """A launch is counted and nothing else."""

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.launch_count += 1


class NoKernels(KernelLibrary):
    """Kernels that are named and never compiled."""

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        return LoadedKernel(symbol, image=None, handle=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pool:
    """Extents and stored strides of a pool, right or not."""

    page_size: int
    num_layers: int
    num_pages: int
    layer: int
    extra_elems: int
    off_by: tuple[str, int]
    table_rows: int

    @property
    def layout(self) -> KvLayout:
        layout = KvLayout.derive(
            page_size=self.page_size, num_layers=self.num_layers, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        name, step = self.off_by
        return replace(layout, **{name: getattr(layout, name) + step})

    @property
    def elems(self) -> int:
        """Whole pages of K and V of all layers, and then some."""
        return self.num_pages * self.num_layers * 2 * self.page_size * KV_HEADS * HEAD_DIM + self.extra_elems

    @property
    def in_range(self) -> bool:
        return (
            self.off_by[1] == 0 and self.extra_elems == 0 and self.num_pages >= 1 and 0 <= self.layer < self.num_layers
        )


STRIDES = ("kv_block_len", "layer_stride", "page_stride")
STEPS = (1, -1, 2, -2, 4, 2**31, 2**32, -(2**32))
NUM_PAGES = 12

right_pools = st.builds(
    Pool,
    page_size=st.integers(1, 4),
    num_layers=st.integers(1, 2),
    num_pages=st.just(NUM_PAGES),
    layer=st.just(0),
    extra_elems=st.just(0),
    off_by=st.just(("page_stride", 0)),
    table_rows=st.integers(8, 12),
)
"""Pools within the contract."""


def spoil_pool(draw: st.DrawFn, pool: Pool) -> Pool:
    """One thing about the pool or the tables, on or over its edge."""
    edits = [
        {"layer": pool.num_layers - 1},
        {"layer": pool.num_layers},
        {"layer": -1},
        {"num_pages": draw(st.integers(0, NUM_PAGES))},
        {"extra_elems": draw(st.integers(1, 2 * HEAD_DIM))},
        {"off_by": (draw(st.sampled_from(STRIDES)), draw(st.sampled_from(STEPS)))},
        {"table_rows": draw(st.integers(1, 12))},
    ]
    return replace(pool, **draw(st.sampled_from(edits)))


def spoil_row(draw: st.DrawFn, row: Sequence[int]) -> list[int]:
    """A row of pages with an entry less, more or wrong."""
    at = draw(st.integers(0, max(0, len(row) - 1)))
    edits = [
        list(row[:-1]),
        list(row[1:]),
        [*row, draw(st.integers(0, NUM_PAGES - 1))],
        [*row[:at], draw(st.sampled_from([-1, NUM_PAGES - 1, NUM_PAGES, 2**31, 2**32, *row])), *row[at + 1 :]],
    ]
    return draw(st.sampled_from(edits))


def few_pages(draw: st.DrawFn, length: int) -> list[int]:
    """A row of pages that others, or itself, are likely to name too."""
    return [draw(st.sampled_from([-7, 0, 1, 2, 3])) for _ in range(length)]


class Desk:
    """Arrays of the largest request, and the calls."""

    def __init__(self, device: Device, library: KernelLibrary) -> None:
        self.device, self.library = device, library

    def array(self, *shape: int) -> DeviceArray:
        array = self.device.allocate(shape, BF16, "a test's array")
        self.device.fill(array, 0)
        return array

    def common(self, tokens: int, pool: Pool) -> dict[str, Any]:
        return {
            "q": self.array(tokens, QO_HEADS, HEAD_DIM),
            "k": self.array(tokens, KV_HEADS, HEAD_DIM),
            "v": self.array(tokens, KV_HEADS, HEAD_DIM),
            "q_norm_weight": self.array(HEAD_DIM),
            "k_norm_weight": self.array(HEAD_DIM),
            "rope": RopeTables(self.array(pool.table_rows, HEAD_DIM), self.array(pool.table_rows, HEAD_DIM)),
            "rotary_dim": HEAD_DIM,
            "pool": PagedPool(pool.layout, self.array(pool.elems)),
            "layer": pool.layer,
            "q_out": self.array(tokens, QO_HEADS, HEAD_DIM),
        }

    def accepts(self, call: Any) -> bool:
        """Whether the call launched once; a refusal must launch nothing. Any other exception is the test's failure."""
        launches = self.device.launch_count
        try:
            call()
        except ContractError:
            assert self.device.launch_count == launches
            return False
        assert self.device.launch_count == launches + 1
        return True


@contextmanager
def counting_desk() -> Iterator[Desk]:
    device = CountingDevice()
    yield Desk(device, NoKernels(device))
    device.close()


@contextmanager
def emulated_desk() -> Iterator[Desk]:
    device = EmulatedDevice()
    yield Desk(device, KernelLibrary(device))
    device.close()


@dataclass(frozen=True)
class Row:
    """One request's row of pages: the positions start..end-1 are new."""

    origin: int
    pages: Sequence[int]
    start: int
    end: int


def rows_in_range(rows: Sequence[Row], page_size: int, num_pages: int, padding_page: int | None) -> bool:
    """Nobody writes where another request has a token, no request takes a slot twice, and a page that several have is
    at the same positions of each; padding is free to."""
    holders: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    begins: dict[int, set[int]] = {}
    for number, row in enumerate(rows):
        taken = []
        logical_pages: dict[int, set[int]] = {}
        for position in range(row.origin * page_size, row.end):
            page = row.pages[position // page_size - row.origin]
            # History is not read by prep: what is no page of the pool is nobody's.
            if 0 <= page < num_pages:
                taken.append((page, position % page_size, position >= row.start))
                logical_pages.setdefault(page, set()).add(position // page_size)
        pages = {page for page, _, _ in taken}
        if padding_page in pages:
            if len(pages) > 1:
                return False
            continue
        for page, slot, is_new in taken:
            holders.setdefault((page, slot), []).append((number, is_new))
        for page, found in logical_pages.items():
            begins.setdefault(page, set()).update(found)
    if any(len(found) > 1 for found in begins.values()):
        return False
    for held in holders.values():
        requests = [number for number, _ in held]
        if len(requests) > len(set(requests)):
            return False
        if len(requests) > 1 and any(is_new for _, is_new in held):
            return False
    return True


def tokens_in_range(
    tokens: Sequence[tuple[int, int, Sequence[int]]], pool: Pool, padding_page: int | None = None
) -> bool:
    """Every token (position, origin, row) has a table row and a page of the pool, and its row agrees with the others;
    as requests of one new token each."""
    if padding_page is not None and not 0 <= padding_page < pool.num_pages:
        return False
    if not all(token_in_range(position, origin, row, pool) for position, origin, row in tokens):
        return False
    rows = [Row(origin, row, position, position + 1) for position, origin, row in tokens]
    return rows_in_range(rows, pool.page_size, pool.num_pages, padding_page)


def token_in_range(position: int, origin: int, row: Sequence[int], pool: Pool) -> bool:
    # Entries that are not read may hold anything that an int32 array can hold.
    if any(not -I32_MAX - 1 <= page <= I32_MAX for page in row):
        return False
    if not 0 <= position < pool.table_rows:
        return False
    page = position // pool.page_size
    if not 0 <= origin <= page:
        return False
    if page - origin >= len(row):
        return False
    return 0 <= row[page - origin] < pool.num_pages


def prefill_call(desk: Desk, pool: Pool, tokens: int, start: int, row: list[int], origin: int) -> Any:
    arguments = desk.common(tokens, pool)

    def call() -> None:
        prep.qkv_norm_rope_paged_prefill_hd256_plain_into(
            desk.library,
            **arguments,
            start_pos=start,
            page_row=PageRow.from_host(desk.device, row),
            page_origin=origin,
        )

    return call


Prefill = tuple[Pool, int, int, list[int], int]


@st.composite
def right_prefills(draw: st.DrawFn) -> Prefill:
    """Requests inside the contract and near its edges: the last table row, the last page, unread entries."""
    pool = draw(right_pools)
    tokens = draw(st.integers(1, MAX_TOKENS))
    start = draw(st.sampled_from([0, 1, pool.table_rows - tokens]))
    first, last = start // pool.page_size, (start + tokens - 1) // pool.page_size
    origin = draw(st.integers(max(0, first - 1), first))
    used = draw(st.permutations(range(NUM_PAGES)))[: last - first + 1]
    row = [-7] * (first - origin) + list(used) + draw(st.lists(st.just(10**6), max_size=1))
    return pool, tokens, start, row, origin


@st.composite
def nearly_right_prefills(draw: st.DrawFn) -> Prefill:
    pool, tokens, start, row, origin = draw(right_prefills())
    step = draw(st.sampled_from(STEPS))
    match draw(st.sampled_from(["nothing", "pool", "start", "row", "row", "few pages", "origin", "tokens"])):
        case "pool":
            pool = spoil_pool(draw, pool)
        case "start":
            start += step
        case "row":
            row = spoil_row(draw, row)
        case "few pages":
            row = few_pages(draw, len(row))
        case "origin":
            origin += step
        case "tokens":
            tokens = draw(st.integers(1, MAX_TOKENS))
    return pool, tokens, start, row, origin


@settings(many, max_examples=300)
@given(request=nearly_right_prefills())
def test_prefill_agrees_with_the_contract(request: Prefill) -> None:
    pool, tokens, start, row, origin = request
    in_range = (
        pool.in_range
        and all(token_in_range(start + token, origin, row, pool) for token in range(tokens))
        and rows_in_range([Row(origin, row, start, start + tokens)], pool.page_size, pool.num_pages, None)
    )
    event("accepted" if in_range else "refused")
    with counting_desk() as desk:
        assert desk.accepts(prefill_call(desk, pool, tokens, start, row, origin)) == in_range


@few
@given(request=right_prefills())
def test_what_prefill_accepts_runs_without_a_fault(request: Prefill) -> None:
    with emulated_desk() as desk:
        assert desk.accepts(prefill_call(desk, *request))


Token = tuple[int, int, list[int]]


@st.composite
def right_tokens(draw: st.DrawFn) -> tuple[Pool, list[Token]]:
    """Decode tokens (position, origin, row) inside the contract, each in a page of its own."""
    pool = draw(right_pools)
    free = list(draw(st.permutations(range(NUM_PAGES))))
    tokens: list[Token] = []
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.sampled_from([0, 1, pool.page_size, pool.table_rows - 1]))
        page = position // pool.page_size
        origin = draw(st.integers(0, page))
        # What stands before and behind the page of the token is not read.
        row = [-7] * (page - origin) + [free.pop()] + draw(st.lists(st.just(10**6), max_size=1))
        tokens.append((position, origin, row))
    return pool, tokens


Decode = tuple[Pool, list[Token], "int | None"]


@st.composite
def padded_tokens(draw: st.DrawFn) -> Decode:
    """Tokens and the padding rows of their bucket, at any slots of one page."""
    pool, tokens = draw(right_tokens())
    if not draw(st.booleans()):
        return pool, tokens, None
    used = {page for _, _, row in tokens for page in row}
    padding_page = min(page for page in range(NUM_PAGES) if page not in used)
    for position in draw(st.lists(st.integers(0, 2 * pool.page_size - 1), min_size=1, max_size=3)):
        row = [padding_page] * (position // pool.page_size + 1)
        tokens.insert(draw(st.integers(0, len(tokens))), (position, 0, row))
    return pool, tokens, padding_page


@st.composite
def nearly_right_tokens(draw: st.DrawFn) -> Decode:
    pool, tokens, padding_page = draw(padded_tokens())
    at = draw(st.integers(0, len(tokens) - 1))
    position, origin, row = tokens[at]
    step = draw(st.sampled_from(STEPS))
    places = ["nothing", "pool", "position", "row", "row", "few pages", "few pages", "origin", "clash", "padding"]
    match draw(st.sampled_from(places)):
        case "pool":
            pool = spoil_pool(draw, pool)
        case "position":
            tokens[at] = (position + step, origin, row)
        case "row":
            tokens[at] = (position, origin, spoil_row(draw, row))
        case "few pages":
            tokens = [(position, origin, few_pages(draw, len(row))) for position, origin, row in tokens]
        case "origin":
            tokens[at] = (position, origin + step, row)
        case "clash":
            tokens[at] = tokens[0]
        case "padding":
            padding_page = draw(st.sampled_from([None, -1, 0, row[-1], NUM_PAGES - 1, NUM_PAGES]))
    return pool, tokens, padding_page


def decode_call(desk: Desk, pool: Pool, tokens: Sequence[Token], padding_page: int | None) -> Any:
    arguments = desk.common(len(tokens), pool)

    def call() -> None:
        batch = PagedBatch.from_host(
            desk.device,
            positions=[position for position, _, _ in tokens],
            page_lists=[row for _, _, row in tokens],
            page_origins=[origin for _, origin, _ in tokens],
            padding_page=padding_page,
        )
        prep.qkv_norm_rope_paged_decode_hd256_plain_into(desk.library, **arguments, batch=batch)

    return call


@settings(many, max_examples=400)
@given(request=nearly_right_tokens())
def test_decode_agrees_with_the_contract(request: Decode) -> None:
    pool, tokens, padding_page = request
    in_range = pool.in_range and tokens_in_range(tokens, pool, padding_page)
    event("accepted" if in_range else "refused")
    with counting_desk() as desk:
        assert desk.accepts(decode_call(desk, pool, tokens, padding_page)) == in_range


@few
@given(request=padded_tokens())
def test_what_decode_accepts_runs_without_a_fault(request: Decode) -> None:
    with emulated_desk() as desk:
        assert desk.accepts(decode_call(desk, *request))


Plan = tuple[Pool, list[PlanRequest], int, "int | None"]


@st.composite
def right_requests(draw: st.DrawFn) -> Plan:
    """Requests of a plan that holds them: (pool, requests, window_left, padding_page). A page is handed out once, or
    shared by requests that have filled it both."""
    page_size = draw(st.integers(1, 4))
    window_left = draw(st.sampled_from([-1, 0, 1, 5]))
    padding_page, *free = draw(st.permutations(range(NUM_PAGES)))
    requests: list[PlanRequest] = []
    for _ in range(draw(st.integers(1, 3))):
        start, q_len = draw(st.integers(0, 8)), draw(st.integers(0, 3))
        if start + q_len == 0:
            q_len = 1
        first_seen = 0 if window_left < 0 else max(0, start - window_left)
        # A page of its own at least is left to the request.
        origin = draw(st.integers(0, min(first_seen, start + q_len - 1) // page_size))
        pages = -(-(start + q_len) // page_size) - origin
        shared: list[int] = []
        if requests and draw(st.booleans()):
            other = draw(st.sampled_from(requests))
            # Whole pages of history of both, at the same positions.
            full = min(start // page_size - origin, other.start_pos // page_size - other.page_origin)
            if origin == other.page_origin:
                shared = list(other.page_indices[: draw(st.integers(0, max(0, full)))])
        if pages - len(shared) > len(free):
            continue
        row, free = shared + free[: pages - len(shared)], free[pages - len(shared) :]
        last = (start + q_len - 1) % page_size + 1
        requests.append(PlanRequest(start, q_len, row, last, origin))
    requests = requests or [PlanRequest(0, 1, [free[0]], 1)]
    pool = Pool(page_size, 1, NUM_PAGES, 0, 0, ("page_stride", 0), 12)
    for kv_len in draw(st.lists(st.integers(1, 2 * page_size), max_size=3)):
        q_len = draw(st.integers(0, kv_len))
        row = [padding_page] * -(-kv_len // page_size)
        padding = PlanRequest(kv_len - q_len, q_len, row, (kv_len - 1) % page_size + 1)
        requests.insert(draw(st.integers(0, len(requests))), padding)
    return pool, requests, window_left, padding_page


def plan_in_range(requests: Sequence[PlanRequest], page_size: int, window_left: int, padding_page: int | None) -> bool:
    """The plan contract, one request and one token at a time."""
    if padding_page is not None and padding_page < 0:
        return False
    rows = []
    for request in requests:
        start, q_len, row = request.start_pos, request.q_len, list(request.page_indices)
        if not (0 <= start <= I32_MAX and 0 <= q_len <= I32_MAX and start + q_len <= I32_MAX):
            return False
        if not row or any(not 0 <= page <= I32_MAX for page in row):
            return False
        if not 1 <= request.last_page_len <= page_size:
            return False
        if not 0 <= request.page_origin <= start // page_size:
            return False
        # Fill the pages before the last one, then the last one as far as is said: that must be every key.
        resident = sum([page_size] * (len(row) - 1)) + request.last_page_len
        if resident + request.page_origin * page_size != start + q_len:
            return False
        released = request.page_origin * page_size
        seen_by_first = 0 if window_left == -1 else start - window_left
        if released > max(0, seen_by_first):
            return False
        rows.append(Row(request.page_origin, row, start, start + q_len))
    return rows_in_range(rows, page_size, I32_MAX, padding_page)


@st.composite
def nearly_right_requests(draw: st.DrawFn) -> Plan:
    pool, requests, window_left, padding_page = draw(right_requests())
    at = draw(st.integers(0, len(requests) - 1))
    places = ["start_pos", "q_len", "last_page_len", "page_origin", "page_indices", "few pages", "padding", "nothing"]
    match draw(st.sampled_from(places)):
        case "page_indices":
            row = requests[at].page_indices
            others = [[requests[0].page_indices[0], *row[1:]], [*row[:-1], requests[0].page_indices[-1]]]
            edits = [spoil_row(draw, row), *others]
            requests[at] = replace(requests[at], page_indices=draw(st.sampled_from(edits)))
        case "few pages":
            requests = [
                replace(request, page_indices=[draw(st.integers(0, 4)) for _ in request.page_indices])
                for request in requests
            ]
        case "padding":
            row = requests[at].page_indices
            padding_page = draw(st.sampled_from([None, -1, row[0], row[-1], 0]))
        case "nothing":
            pass
        case name:
            step = draw(st.sampled_from([1, -1, pool.page_size, -pool.page_size, 2**32, -(2**32)]))
            requests[at] = replace(requests[at], **{name: getattr(requests[at], name) + step})
    return pool, requests, window_left, padding_page


def shape_of(pool: Pool, window_left: int) -> PlanShape:
    return PlanShape(QO_HEADS, KV_HEADS, HEAD_DIM, pool.page_size, window_left=window_left)


@settings(many, max_examples=600)
@given(request=nearly_right_requests())
def test_plans_agree_with_the_contract(request: Plan) -> None:
    pool, requests, window_left, padding_page = request
    try:
        lay_out(check_requests(requests, shape_of(pool, window_left), padding_page=padding_page))
        accepted = True
    except ContractError:
        accepted = False
    event("accepted" if accepted else "refused")
    assert accepted == plan_in_range(requests, pool.page_size, window_left, padding_page)


@few
@given(request=right_requests())
def test_what_a_plan_accepts_runs_without_a_fault(request: Plan) -> None:
    pool, requests, window_left, padding_page = request
    tokens = sum(item.q_len for item in requests)
    with emulated_desk() as desk:
        arguments = desk.common(max(1, tokens), pool)
        plan = PrefillPagedPlan.batch(
            desk.device, requests, shape=shape_of(pool, window_left), padding_page=padding_page
        )
        prep.qkv_norm_rope_paged_batch_prefill_hd256_plain_into(desk.library, **arguments, plan=plan)
        assert desk.device.launch_count == (1 if tokens else 0)


@few
@given(request=right_requests())
def test_what_a_plan_accepts_is_attended_to_without_a_fault(request: Plan) -> None:
    """The device tells a read of a page that is not the request's own, of memory nobody wrote, or out of bounds."""
    pool, requests, window_left, padding_page = request
    tokens = sum(item.q_len for item in requests)
    with emulated_desk() as desk:
        q, out = (desk.array(max(1, tokens), QO_HEADS, HEAD_DIM) for _ in range(2))
        plan = PrefillPagedPlan.batch(
            desk.device, requests, shape=shape_of(pool, window_left), padding_page=padding_page
        )
        pages = PagedPool(pool.layout, desk.array(pool.elems))
        attention.batch_prefill_paged_window_hd256_into(desk.library, q=q, plan=plan, pool=pages, layer=0, out=out)
        assert desk.device.launch_count == (1 if tokens else 0)
