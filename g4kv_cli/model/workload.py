"""Requests of one's own: what a file (workload_file.py) or one line (request_text.py) asks for, laid out on pages.

A workload is one call's batch: requests ``kv_len`` keys long of which the last ``q_len`` are new, on one pool of one
family. Its rows of pages are given or follow a rule; what the window leaves behind is released as a server does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import INT32_MAX, SPARSE_POOL_BYTES, KvLayout
from g4kv_cli.model.slots import page_origin, pages_for

PageRule = Literal["contiguous", "permuted"]
PAGE_RULES: tuple[PageRule, ...] = ("contiguous", "permuted")
MAX_REQUESTS = 4096
MAX_SPLITS = 65535
SPARE_PAGES = 2
"""Of a pool whose size is not given, so many pages are nobody's."""
MAX_POOL_BYTES = 1 << 39
DEFAULT_SPLITS = (3,)

Fault = Callable[[str, str], UsageError]
"""(key, what is wrong) -> the error, with the place in the file or line."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as it was asked for. ``pages``: ids, or how they are chosen; ``origin`` None: what is released is."""

    kv_len: int
    q_len: int
    pages: tuple[int, ...] | PageRule
    origin: int | None
    fault: Fault


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload as it was asked for. ``values``: the same as plain JSON values."""

    name: str
    requests: tuple[RequestSpec, ...]
    page_size: int
    splits: tuple[int, ...]
    padding: int
    released: bool
    page_seed: int
    num_pages: int | None
    num_layers: int | None
    sm_scale: float
    values: Any
    fault: Fault


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """``kv_len`` keys, the last ``q_len`` of them new; ``pages[i]`` is the logical page ``origin + i``."""

    kv_len: int
    q_len: int
    origin: int
    pages: tuple[int, ...]

    @property
    def start_pos(self) -> int:
        """Position of the first new token."""
        return self.kv_len - self.q_len


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch on its pages. ``padding`` requests of one token use ``padding_page``, and nobody else does."""

    name: str
    geometry: Geometry
    requests: tuple[PagedRequest, ...]
    page_size: int
    num_pages: int
    num_layers: int
    splits: tuple[int, ...]
    padding: int
    padding_page: int | None
    sm_scale: float

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(request.q_len for request in self.requests)

    @property
    def one_token_each(self) -> bool:
        """True if every request has one new token, as the decode forms take them."""
        return all(request.q_len == 1 for request in self.requests)

    def several_tokens(self) -> str:
        """Which request has not one new token, in words."""
        at = next(at for at, request in enumerate(self.requests) if request.q_len != 1)
        return f"request {at} has {self.requests[at].q_len}"


def lay_out(spec: WorkloadSpec, geometry: Geometry) -> Workload:
    """Give all requests their pages. Raises UsageError, naming the place, for what contradicts itself or geometry."""
    size = spec.page_size
    origins = [_origin(request, spec, geometry) for request in spec.requests]
    lengths = [pages_for(request.kv_len, size) - origin for request, origin in zip(spec.requests, origins, strict=True)]
    if not sum(request.q_len for request in spec.requests):
        raise spec.fault("requests", "no request has a new token: there is nothing to compute")
    taken = set(_given_pages(spec))
    padding_page = None
    if spec.padding:
        padding_page = _free_run(taken, 1)
        taken.add(padding_page)
    rows = _contiguous_rows(spec, lengths, taken)
    permuted = [at for at, request in enumerate(spec.requests) if request.pages == "permuted"]
    needed = sum(lengths[at] for at in permuted)
    least = max([len(taken) + needed, *(page + 1 for page in taken)])
    num_pages = least + SPARE_PAGES if spec.num_pages is None else spec.num_pages
    if num_pages < least:
        raise spec.fault("num_pages", f"{num_pages} pages are too few: these rows need a pool of {least}")
    num_layers = _num_layers(spec, geometry, num_pages)
    pool_bytes = _pool_bytes(spec, geometry, num_pages, num_layers)
    if num_pages > INT32_MAX or pool_bytes > MAX_POOL_BYTES:
        words = f"a pool of {num_pages} pages takes {pool_bytes / 2**30:,.0f} GiB, more than any device has"
        raise spec.fault("num_pages", words)
    drawn = random.Random(spec.page_seed).sample(range(num_pages), needed + len(taken))
    free = [page for page in drawn if page not in taken]
    for at in permuted:
        rows[at] = tuple(free.pop() for _ in range(lengths[at]))
    return Workload(
        name=spec.name,
        geometry=geometry,
        requests=tuple(
            PagedRequest(one.kv_len, one.q_len, origin, row)
            for one, origin, row in zip(spec.requests, origins, rows, strict=True)
        ),
        page_size=size,
        num_pages=num_pages,
        num_layers=num_layers,
        splits=spec.splits,
        padding=spec.padding,
        padding_page=padding_page,
        sm_scale=spec.sm_scale,
    )


def _origin(request: RequestSpec, spec: WorkloadSpec, geometry: Geometry) -> int:
    """The request's first resident page."""
    size, start = spec.page_size, request.kv_len - request.q_len
    spans = pages_for(request.kv_len, size)
    if request.kv_len > geometry.max_positions:
        words = f"{request.kv_len} is past the {geometry.max_positions} positions of {geometry.name}"
        raise request.fault("kv_len", words)
    first_seen = 0 if geometry.window is None else max(0, start - geometry.window_left)
    if request.origin is not None:
        origin, key = request.origin, "page_origin"
    elif isinstance(request.pages, tuple):
        origin, key = spans - len(request.pages), "pages"
    else:
        return page_origin(start, geometry.window, size) if spec.released else 0
    if isinstance(request.pages, tuple) and (origin < 0 or len(request.pages) != spans - origin):
        words = f"{len(request.pages)} pages of {size}, but {request.kv_len} keys take {spans} from the first on"
        raise request.fault(
            "pages", words if request.origin is None else f"{words}, {spans - origin} from page {origin}"
        )
    if not 0 <= origin <= first_seen // size:
        words = f"page {origin} is the first that is there, and the oldest key that a query sees, {first_seen}, is in "
        raise request.fault(key, f"{words}page {first_seen // size}")
    return origin


def _given_pages(spec: WorkloadSpec) -> dict[int, int]:
    """Page ids that rows name, and by which request."""
    found: dict[int, int] = {}
    for number, request in enumerate(spec.requests):
        for at, page in enumerate(request.pages if isinstance(request.pages, tuple) else ()):
            if page in found:
                words = f"page {page} is of request {found[page]} already: each request has keys of its own here"
                raise request.fault(f"pages[{at}]", words)
            found[page] = number
    return found


def _contiguous_rows(spec: WorkloadSpec, lengths: Sequence[int], taken: set[int]) -> list[tuple[int, ...]]:
    """The rows that are given and the contiguous ones, from the front on; the others are empty. Fills ``taken``."""
    rows: list[tuple[int, ...]] = [one.pages if isinstance(one.pages, tuple) else () for one in spec.requests]
    for number, request in enumerate(spec.requests):
        if request.pages == "contiguous":
            begin = _free_run(taken, lengths[number])
            rows[number] = tuple(range(begin, begin + lengths[number]))
            taken.update(rows[number])
    return rows


def _free_run(taken: set[int], length: int) -> int:
    """The first page of the first so many in a row that nobody has."""
    begin = 0
    for page in sorted(taken):
        if page >= begin + length:
            break
        begin = max(begin, page + 1)
    return begin


def _num_layers(spec: WorkloadSpec, geometry: Geometry, num_pages: int) -> int:
    if spec.num_layers is not None:
        return spec.num_layers
    # With two, of which the second is used, a call that takes the wrong one shows.
    return 2 if _pool_bytes(spec, geometry, num_pages, 2) <= SPARSE_POOL_BYTES else 1


def _pool_bytes(spec: WorkloadSpec, geometry: Geometry, num_pages: int, num_layers: int) -> int:
    layout = KvLayout.derive(
        page_size=spec.page_size,
        num_layers=num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
    )
    return layout.pool_bytes(num_pages)
