"""The serving loop as data: requests that come, are prefilled in chunks, decode, lose their old pages, and go.

``serving_steps`` is the scheduler: pure arithmetic on positions and pages, so that a run can be told beforehand. The
release rule is model/slots.py's. cases/serve/run.py runs the steps on a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from g4kv_cli.cases.attention.case import KvRequest
from g4kv_cli.cases.case import OfManyEntries, RunContext
from g4kv_cli.cases.prep.build import id_part
from g4kv_cli.cases.serve.page_allocator import PageAllocator
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.slots import PADDING_PAGES, page_origin, pages_for
from g4kv_cli.records.run import CaseResult

SERVING_LOOP = "serving loop"
"""Stands for an entry: a run launches prep and attention in all their paged forms."""
SMALL_WINDOW = 48
CHUNK_TOKENS = 22
SMALL_PAGE_SIZE = 8
_MANY_PAGES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Comes at step ``arrival`` with a prompt, of which the first ``cached`` tokens are in the pool already (a prefix
    hit), and decodes ``new_tokens`` tokens."""

    arrival: int
    prompt: int
    new_tokens: int
    cached: int = 0

    @property
    def total(self) -> int:
        """Tokens at the end."""
        return self.prompt + self.new_tokens


@dataclass(frozen=True, slots=True)
class ServeCase(OfManyEntries):
    """One serving run. ``geometry.window`` is the window in force."""

    id: str
    entry: str
    geometry: Geometry
    seed: int
    requests: tuple[ServeRequest, ...]
    page_size: int
    chunk_tokens: int
    kv_format: KvFormat = SPLIT

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_serve_case."""
        from g4kv_cli.cases.serve.run import run_serve_case  # late: what runs a case knows the case

        return run_serve_case(self, context.library, context.rerun(self.id), context.dumps)


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a batch."""

    request: int
    kv: KvRequest


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that arrive in the pool from a prefix hit; pages given back, whose content is gone from then on; a ragged
    prefill batch; a decode batch; and the pages of the requests that end with it."""

    number: int
    cached: tuple[Work, ...]
    released: tuple[int, ...]
    prefill: tuple[Work, ...]
    decode: tuple[Work, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """All steps, the pages that the pool needs for them, and how many pages changed hands on the way."""

    steps: tuple[Step, ...]
    num_pages: int
    recycled: int


@dataclass(slots=True)
class _Active:
    """A request on its way."""

    number: int
    request: ServeRequest
    position: int
    origin: int = 0
    pages: list[int] = field(default_factory=list)


def serving_steps(case: ServeCase, *, release: bool) -> Script:
    """The script of a case. Without ``release`` a request keeps all its pages until it ends."""
    allocator = PageAllocator(_MANY_PAGES, PADDING_PAGES)
    active: list[_Active] = []
    steps: list[Step] = []
    window = case.geometry.window
    number = 0
    while active or any(request.arrival >= number for request in case.requests):
        cached, released = [], []
        for index, request in enumerate(case.requests):
            if request.arrival == number:
                one = _Active(index, request, request.cached)
                # A prefix hit brings the pages that are still seen.
                one.origin = page_origin(one.position, window, case.page_size) if release else 0
                active.insert(0, one)  # a newcomer is served first: it takes what was just given back
                if request.cached:
                    cached.append(Work(index, _grow(one, 0, allocator, case.page_size)))
        if release:
            for one in active:
                origin = page_origin(one.position, window, case.page_size)
                for _ in range(origin - one.origin):
                    released.append(one.pages.pop(0))
                    allocator.give_back(released[-1], one.number)
                one.origin = origin
        prefilling = [one for one in active if one.position < one.request.prompt]
        prefill, decode = [], []
        for one in active:
            rest = one.request.prompt - one.position
            if rest > 0:
                prefill.append(Work(one.number, _grow(one, min(rest, case.chunk_tokens), allocator, case.page_size)))
            else:
                if prefilling:
                    # A request that only decodes stands in the prefill batch without a token.
                    prefill.append(Work(one.number, _grow(one, 0, allocator, case.page_size)))
                decode.append(Work(one.number, _grow(one, 1, allocator, case.page_size)))
        for work in (*prefill, *decode):
            next(one for one in active if one.number == work.request).position += work.kv.q_len
        ended = [one for one in active if one.position >= one.request.total]
        for one in ended:
            active.remove(one)
            for page in one.pages:
                allocator.give_back(page, one.number)
        gone = tuple(page for one in ended for page in one.pages)
        steps.append(Step(number, tuple(cached), tuple(released), tuple(prefill), tuple(decode), gone))
        number += 1
    return Script(tuple(steps), allocator.high_water, allocator.recycled)


def _grow(one: _Active, q_len: int, allocator: PageAllocator, page_size: int) -> KvRequest:
    """The request with ``q_len`` more tokens, and pages for them."""
    kv_len = one.position + q_len
    while len(one.pages) < pages_for(kv_len, page_size) - one.origin:
        one.pages.append(allocator.take(one.number))
    return KvRequest(kv_len, q_len, one.origin, tuple(one.pages))


def serve_cases(
    geometry: Geometry, *, seed: int, page_size: int | None = None, kv_format: KvFormat = SPLIT
) -> Iterator[ServeCase]:
    """The serving runs of a geometry in a format that it has: several requests over a small window, and one across the
    model's own; without a window, in pages that only portable kernels read, and in others."""

    def case(
        name: str, window: int | None, size: int, num_kv_heads: int, requests: tuple[ServeRequest, ...]
    ) -> ServeCase:
        heads = geometry.with_heads(min(geometry.num_kv_heads, num_kv_heads), min(geometry.gqa_group, 4))
        return ServeCase(
            id=f"serve/{geometry.name}/{id_part(kv_format)}{name}",
            entry=SERVING_LOOP,
            geometry=dataclasses.replace(heads, window=window),
            seed=seed,
            requests=requests,
            page_size=size if page_size is None else page_size,
            chunk_tokens=CHUNK_TOKENS,
            kv_format=kv_format,
        )

    window = None if geometry.window is None else SMALL_WINDOW
    interleaved = ServeRequest(0, 58, 14), ServeRequest(1, 5, 9), ServeRequest(4, 61, 6), ServeRequest(11, 17, 5)
    yield case("interleaved", window, SMALL_PAGE_SIZE, 2, interleaved)
    if geometry.window is None:
        if page_size is None:
            yield case(f"interleaved/page{2 * SMALL_PAGE_SIZE}", None, 2 * SMALL_PAGE_SIZE, 2, interleaved)
    else:
        # The chunk crosses the window's edge; after four more tokens the first page goes, and its next owner comes.
        edge = geometry.window
        yield case(f"window{edge}", edge, 2 * SMALL_PAGE_SIZE, 1, (
            ServeRequest(0, edge + 12, 6, cached=edge - 2), ServeRequest(5, 3, 2)))  # fmt: skip
