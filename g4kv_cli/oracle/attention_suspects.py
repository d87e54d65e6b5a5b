"""The usual mistakes of an attention kernel, as rows in float64: what one query would get with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.attention import Products, multiply, visible_keys, weigh
from g4kv_cli.oracle.suspects import Suspect

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_MAX_OTHER_REQUESTS = 64
_MAX_LOST_PAGES = 32
"""Pages that are left out for a try: those whose keys weigh most, for without the others little changes."""
_MAX_ELEMENTS = 1 << 25
"""Of K, for one suspect: beyond that it takes too long to try them all."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """One request: ``q`` [q_len, num_qo_heads, head_dim]; ``k``, ``v`` [keys, num_kv_heads, head_dim], row 0 at
    position ``first_key``; the last query stands at the last key. ``name`` is its number in messages."""

    q: Array
    k: Array
    v: Array
    first_key: int
    name: int

    @property
    def key_positions(self) -> npt.NDArray[np.int64]:
        return self.first_key + np.arange(len(self.k))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSuspects:
    """Suspects of the rows of a batch: call it with a token (counted over all requests) and a head. ``page_size`` in
    tokens; pages begin at multiples of it."""

    requests: Sequence[RequestRows]
    window_left: int
    sm_scale: float
    page_size: int

    def __call__(self, token: int, head: int) -> Iterator[Suspect]:
        for request in self.requests:
            if token < len(request.q):
                return _Row(self, request, token, head).suspects()
            token -= len(request.q)
        raise IndexError("no request has this token")


class _Row:
    """One query and what it could have been given."""

    def __init__(self, batch: AttentionSuspects, request: RequestRows, token: int, head: int) -> None:
        self.batch, self.request = batch, request
        self.q = request.q[token, head]
        self.num_kv_heads = request.k.shape[1]
        self.kv_head = head * self.num_kv_heads // request.q.shape[1]
        self.k, self.v = request.k[:, self.kv_head], request.v[:, self.kv_head]
        self.position = request.first_key + len(request.k) - len(request.q) + token
        self.seen = self._seen(request, batch.window_left)
        self.multiplied: dict[int, tuple[Array, Products]] = {}
        """By id of the keys, which are kept so that no other array gets it."""

    def _seen(self, request: RequestRows, window_left: int) -> Flags:
        seen: Flags = visible_keys(np.array([self.position]), request.key_positions, window_left)[0]
        return seen

    def suspects(self) -> Iterator[Suspect]:
        yield from self._other_masks()
        yield from self._other_rows()
        yield from self._other_scales()
        yield from self._other_owners()
        yield from self._lost_pages()

    def _of(self, words: str, k: Array, v: Array, which: Flags, sm_scale: float | None = None) -> Iterator[Suspect]:
        if not 0 < np.count_nonzero(which) * self.q.size <= _MAX_ELEMENTS:
            return
        scale = self.batch.sm_scale if sm_scale is None else sm_scale
        products = self._products(k, which)
        sees = np.ones(products.dots.shape, np.bool_)

        def of(columns: slice) -> tuple[Float64, Float64]:
            value, rounding, _, _ = weigh(products, sees, v[which, columns][None], scale)
            return value[0, 0], rounding.limit[0, 0]

        yield Suspect(words, of)

    def _products(self, k: Array, which: Flags) -> Products:
        """Of the query with these keys. Most suspects see keys that another one sees too, so all are multiplied once,
        unless there are too many."""
        if k.size > _MAX_ELEMENTS:
            return multiply(self.q[None, None], k[which][None])
        if id(k) not in self.multiplied:
            self.multiplied[id(k)] = (k, multiply(self.q[None, None], k[None]))
        return self.multiplied[id(k)][1].of_keys(which)

    def _other_masks(self) -> Iterator[Suspect]:
        distance = self.position - self.request.key_positions
        left, everything = self.batch.window_left, np.ones(distance.size, np.bool_)
        masks = [
            ("without the mask of later keys", distance <= left if left >= 0 else everything),
            ("with the next key too", self.seen | (distance == -1)),
            ("without the query's own key", self.seen & (distance != 0)),
        ]
        if left >= 0:
            masks += [
                ("with a window one key longer", self._seen(self.request, left + 1)),
                ("with a window one key shorter", self._seen(self.request, left - 1) if left else self.seen),
                ("without the window", self._seen(self.request, -1)),
                ("without any mask", everything),
            ]
        for words, which in masks:
            if (which != self.seen).any():
                yield from self._of(words, self.k, self.v, which)

    def _other_rows(self) -> Iterator[Suspect]:
        yield from self._of("with V in place of K", self.v, self.v, self.seen)
        yield from self._of("with K in place of V", self.k, self.k, self.seen)
        for by, words in ((1, "with the V row of the key before"), (-1, "with the V row of the key behind")):
            yield from self._of(words, self.k, np.roll(self.v, by, axis=0), self.seen)

    def _other_scales(self) -> Iterator[Suspect]:
        scale, root = self.batch.sm_scale, float(np.sqrt(self.q.size))
        if scale != 1:
            yield from self._of("without sm_scale", self.k, self.v, self.seen, 1.0)
            yield from self._of("with sm_scale twice", self.k, self.v, self.seen, scale * scale)
        yield from self._of("with 1 / sqrt(head_dim) as one more scale", self.k, self.v, self.seen, scale / root)
        yield from self._of("with equal weights", self.k, self.v, self.seen, float(np.finfo(np.float32).tiny))

    def _other_owners(self) -> Iterator[Suspect]:
        for other in range(self.num_kv_heads):
            if other != self.kv_head:
                k, v = self.request.k[:, other], self.request.v[:, other]
                yield from self._of(f"with KV head {other}", k, v, self.seen)
                yield from self._of(f"with V of KV head {other}", self.k, v, self.seen)
        others = [request for request in self.batch.requests if request is not self.request]
        for request in others[:_MAX_OTHER_REQUESTS]:
            k, v = request.k[:, self.kv_head], request.v[:, self.kv_head]
            own = self._seen(request, self.batch.window_left)
            yield from self._of(f"with the keys of request {request.name}", k, v, own)
            last = request.key_positions[-1:]
            its = visible_keys(last, request.key_positions, self.batch.window_left)[0]
            if (its != own).any():
                yield from self._of(f"with the keys that the last query of request {request.name} sees", k, v, its)

    def _lost_pages(self) -> Iterator[Suspect]:
        """The pages that weigh most, each left out."""
        pages = self.request.key_positions // self.batch.page_size
        numbers, place = np.unique(pages, return_inverse=True)
        if numbers.size < 2:
            return
        scores = self.batch.sm_scale * (self.k.astype(np.float32) @ self.q.astype(np.float32))
        weights = np.where(self.seen, np.exp(scores - scores[self.seen].max()), 0)
        shares = np.bincount(place.reshape(-1), weights, numbers.size)
        for at in np.argsort(-shares, kind="stable")[:_MAX_LOST_PAGES]:
            without = self.seen & (pages != numbers[at])
            if (without != self.seen).any():
                yield from self._of(f"without the keys of its logical page {int(numbers[at])}", self.k, self.v, without)
