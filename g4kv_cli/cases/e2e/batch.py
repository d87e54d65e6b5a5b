"""One model served on a device: each step is one batch through all layers, host arithmetic between the launches.

A batch holds one model's requests: a launch has one head count and one set of norm weights, so requests of different
models can share a device and take turns, never a launch. The host's part is computed request by request, so no bit of
it depends on who else is in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from g4kv_cli.cases.e2e.caches import FamilyCache, PageList, as_split_rows
from g4kv_cli.cases.e2e.family_launches import FamilyLaunches
from g4kv_cli.cases.e2e.host_model import Projections, embed, finish_layer, logits_of, project
from g4kv_cli.cases.e2e.recorded_model import Array, Float32, Int64, RecordedLayer, RecordedModel
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import decode_entry
from g4kv_cli.errors import DeviceFault
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat, format_for
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.model.plan_request import PlanRequest

MakeCache = Callable[..., FamilyCache]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run serves. ``prefill_chunk`` 0: the whole prompt at once. ``bucket_width``: rows of every decode batch,
    padding included. ``decode_form`` is a label of the table; a family without it takes its preferred form.
    ``num_splits`` counts where the form takes splits. ``kv_format``: of the families that have it.
    """

    page_size: int = DEFAULT_PAGE_SIZE_TOKENS
    prefill_chunk: int = 0
    decode_form: str = "b"
    num_splits: int = 1
    bucket_width: int = 1
    num_requests: int = 1
    kv_format: KvFormat = SPLIT


@dataclass(slots=True, eq=False)
class Request:
    """One request: how many tokens are in its caches, and its pages by family."""

    name: str
    length: int = 0
    held: dict[str, PageList] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """New tokens of one request, from position ``request.length`` on."""

    request: Request
    ids: Int64


class Observer(Protocol):
    """Sees each layer of each request as it is computed."""

    def layer_done(
        self, request: Request, number: int, raw: Projections, q: Array, k: Array, v: Array, attention: Array
    ) -> None:
        """Rows of the request's new tokens; q, k, v as attention gets them of split rows. ``request.length`` is still
        the old one."""

    def stream(self, request: Request, number: int, rows: Float32) -> None:
        """The residual stream after ``number`` layers, float32 [tokens, hidden]."""


class NonFiniteStream(Exception):
    """A step that made something that is not a number: the rest of it would say nothing."""

    def __init__(self, request: Request, layer: int, token: int, dim: int) -> None:
        super().__init__(f"{request.name}: layer {layer}, token {token}")
        self.request, self.layer, self.token, self.dim = request, layer, token, dim


class ModelBatch:
    """A recorded model, its caches and buffers on a device. ``make_cache`` is FamilyCache but for tests."""

    def __init__(
        self,
        library: KernelLibrary,
        model: RecordedModel,
        settings: Settings,
        *,
        context_tokens: int,
        prompt_tokens: int,
        make_cache: MakeCache = FamilyCache,
        make_launches: Callable[..., FamilyLaunches] = FamilyLaunches,
    ) -> None:
        self.library, self.model, self.settings = library, model, settings
        self.observer: Observer | None = None
        self._admitted = 0
        step_tokens = settings.prefill_chunk or prompt_tokens
        self.families: dict[str, FamilyLaunches] = {}
        for seed, geometry in enumerate(model.families):
            cache = make_cache(
                library.device,
                geometry,
                num_layers=model.layers_of(geometry),
                page_size=settings.page_size,
                context_tokens=context_tokens,
                step_tokens=step_tokens,
                num_requests=settings.num_requests,
                seed=seed,
                order=library.pool_order,
                kv_format=format_for(geometry, settings.kv_format),
            )
            self.families[geometry.name] = make_launches(
                library,
                cache,
                [(layer.q_norm, layer.k_norm) for layer in model.layers if layer.geometry == geometry],
                rope_positions=[range(context_tokens)],
                cos_max_pos=context_tokens,
                max_rows=max(settings.num_requests * step_tokens, settings.bucket_width),
                max_requests=max(settings.num_requests, settings.bucket_width),
                num_splits=settings.num_splits if decode_entry(geometry, settings.decode_form).takes_splits else 0,
            )

    def admit(self, name: str) -> Request:
        """A new request without tokens."""
        self._admitted += 1
        return Request(name, held={family: PageList(self._admitted) for family in self.families})

    def retire(self, request: Request) -> None:
        """End a request and give its pages back."""
        for name, family in self.families.items():
            family.cache.release_all(request.held[name])

    def prefill(self, work: Sequence[Work]) -> list[Float32]:
        """Logits of all new tokens of each request, float32 [tokens, vocabulary]; one ragged batch.

        Raises NonFiniteStream, and DeviceFault as the entries do.
        """
        for family in self.families.values():
            self._take_pages(family, work)
            family.prepare_prefill(
                [family.cache.plan_request(self._pages(family, one), one.request.length, len(one.ids)) for one in work]
            )
        return self._forward(work, padding_rows=0, is_decode=False)

    def decode(self, work: Sequence[Work]) -> list[Float32]:
        """The same for one new token each, in a bucket of ``bucket_width`` rows."""
        padding_rows = self.settings.bucket_width - len(work)
        for family in self.families.values():
            self._take_pages(family, work)
            cache = family.cache
            requests = [cache.plan_request(self._pages(family, one), one.request.length, 1) for one in work]
            family.prepare_decode([*requests, *[PlanRequest.padding(cache.padding_page)] * padding_rows])
        return self._forward(work, padding_rows=padding_rows, is_decode=True)

    def free(self) -> None:
        """Give all device memory back."""
        for family in self.families.values():
            family.free()

    def _take_pages(self, family: FamilyLaunches, work: Iterable[Work]) -> None:
        for one in work:
            family.cache.extend(self._pages(family, one), one.request.length + len(one.ids))

    def _pages(self, family: FamilyLaunches, work: Work) -> PageList:
        return work.request.held[family.geometry.name]

    def _forward(self, work: Sequence[Work], *, padding_rows: int, is_decode: bool) -> list[Float32]:
        with np.errstate(invalid="ignore", over="ignore"):  # a wrong kernel's NaN is judged, not warned of
            streams = [embed(self.model, one.ids) for one in work]
            self._observe_streams(work, 0, streams)
            for number, layer in enumerate(self.model.layers):
                raw = [project(layer, stream) for stream in streams]
                rows = self._attend(layer, number, raw, padding_rows, is_decode)
                bounds = np.cumsum([0, *(len(one.ids) for one in work)])
                attention = [rows[begin:end] for begin, end in itertools.pairwise(bounds)]
                self._observe_layer(work, number, layer, raw, bounds, attention)
                streams = [finish_layer(layer, stream, part) for stream, part in zip(streams, attention, strict=True)]
                self._observe_streams(work, number + 1, streams)
                _require_finite(work, number, streams)
            logits = [logits_of(self.model, stream) for stream in streams]
        for one in work:
            one.request.length += len(one.ids)
            for name, family in self.families.items():
                family.cache.release_front(one.request.held[name], one.request.length)
        return logits

    def _attend(
        self, layer: RecordedLayer, number: int, raw: Sequence[Projections], padding_rows: int, is_decode: bool
    ) -> Array:
        family = self.families[layer.geometry.name]
        q, k = (_stacked([getattr(one, part) for one in raw], padding_rows) for part in ("q", "k"))
        values = [one.v for one in raw if one.v is not None]
        v = _stacked(values, padding_rows) if values else None
        try:
            if is_decode:
                return family.decode(layer.family_layer, q, k, v, self.settings.decode_form)
            return family.prefill(layer.family_layer, q, k, v)
        except DeviceFault as fault:
            raise DeviceFault([f"layer {number}: {fault.reports[0]}", *fault.reports[1:]], fault.kinds) from fault

    def _observe_streams(self, work: Sequence[Work], number: int, streams: Sequence[Float32]) -> None:
        if self.observer is not None:
            for one, rows in zip(work, streams, strict=True):
                self.observer.stream(one.request, number, rows)

    def _observe_layer(
        self,
        work: Sequence[Work],
        number: int,
        layer: RecordedLayer,
        raw: Sequence[Projections],
        bounds: Array,
        attention: Sequence[Array],
    ) -> None:
        if self.observer is None:
            return
        family = self.families[layer.geometry.name]
        q = family.rotated_queries()
        for index, one in enumerate(work):
            length = one.request.length
            k, v = family.cache.stored(
                self._pages(family, one), layer.family_layer, range(length, length + len(one.ids))
            )
            rows = q[bounds[index] : bounds[index + 1]]
            if family.cache.kv_format == FOLDED:
                rows, k = as_split_rows(layer.geometry, layer.k_norm, rows, k, v)
            self.observer.layer_done(one.request, number, raw[index], rows, k, v, attention[index])


def _require_finite(work: Sequence[Work], number: int, streams: Sequence[Float32]) -> None:
    for one, stream in zip(work, streams, strict=True):
        finite = np.isfinite(stream)
        if not finite.all():
            row, dim = (int(at) for at in np.unravel_index(int(np.argmin(finite)), stream.shape))
            raise NonFiniteStream(one.request, number, one.request.length + row, dim)


def _stacked(parts: Sequence[Array], padding_rows: int) -> Array:
    """Rows of all requests, and zeros for the padding rows of the bucket."""
    first = parts[0]
    if not padding_rows:
        return first if len(parts) == 1 else np.concatenate(parts)
    return np.concatenate([*parts, np.zeros((padding_rows, *first.shape[1:]), first.dtype)])
