"""PrefillPagedPlan: the metadata of a ragged batch on a device, at addresses that never change.

Built once and updated in place, so that a captured graph that reads it stays valid. An update either succeeds as a
whole or leaves the plan as it was, arrays included. What a use is compared with (``bounds``) is recorded only then.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import INT32, PagedBatch, require_array
from g4kv_cli.entries.entry import Target
from g4kv_cli.errors import G4kvError
from g4kv_cli.model import rules
from g4kv_cli.model.checked import require_i32, require_type
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.plan_use import check_capacity, check_one_token_each
from g4kv_cli.model.prefill_plan import (
    CTA_TILES_Q,
    CheckedPlan,
    Int32Array,
    PlanBounds,
    PlanCapacity,
    check_requests,
    lay_out,
)
from g4kv_cli.model.rules import rule

PLAN_SET = rule("plan_set", "was preallocated and holds no requests yet")

NO_ENTRY = -1
"""What stands in the unused tail of an array: a kernel that reads it traps on it."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanBuffers:
    """The plan's int32 arrays on its device; lengths are capacities, contents as PlanArrays says.

    Past what is in use, the running totals page_indptr and q_indptr repeat their last value (empty requests), all
    other arrays hold -1.
    """

    page_indices: DeviceArray
    page_indptr: DeviceArray
    page_origins: DeviceArray
    last_page_len: DeviceArray
    kv_lens: DeviceArray
    q_indptr: DeviceArray
    positions: DeviceArray
    token_requests: DeviceArray
    tile_requests: DeviceArray
    tile_indices: DeviceArray

    def by_name(self) -> dict[str, DeviceArray]:
        """The arrays by field name, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class _State:
    """What the arrays hold now, and the bounds of it; no bounds: nothing that may be used."""

    bounds: PlanBounds | None
    contents: Mapping[str, Int32Array]


class PrefillPagedPlan:
    """A plan on ``device``. Make one with ``single``, ``batch`` or ``preallocated``."""

    def __init__(self, device: Device, capacity: PlanCapacity) -> None:
        """Allocate the arrays; the plan holds no requests yet. See ``preallocated``."""
        self.device = require_type("device", device, Device)  # type: ignore[type-abstract]
        require_type("capacity", capacity, PlanCapacity)
        counts = {}
        for name in ("max_tokens", "max_requests", "max_pages", "max_tiles"):
            counts[name] = require_i32(name, getattr(capacity, name))
            rules.EXTENT_POSITIVE.require(counts[name] >= 1, name, counts[name], ">= 1")
        self.capacity = PlanCapacity(**counts)
        self._state = _State(None, MappingProxyType(_emptied(_lengths(self.capacity))))
        made: list[DeviceArray] = []
        try:
            for name, values in self._state.contents.items():
                made.append(device.allocate(values.shape, INT32, f"plan.{name}"))
                device.write(made[-1], values)
        except BaseException:
            _free_quietly(device, made)
            raise
        self.buffers = PlanBuffers(*made)

    @classmethod
    def single(
        cls,
        device: Device,
        *,
        start_pos: int,
        q_len: int,
        page_indices: Sequence[int],
        last_page_len: int,
        page_origin: int = 0,
        shape: PlanShape,
    ) -> PrefillPagedPlan:
        """A plan of one request with no room for more. Raises ContractError."""
        return cls.batch(device, [PlanRequest(start_pos, q_len, page_indices, last_page_len, page_origin)], shape=shape)

    @classmethod
    def batch(
        cls,
        device: Device,
        requests: Sequence[PlanRequest],
        *,
        shape: PlanShape,
        padding_page: int | None = None,
    ) -> PrefillPagedPlan:
        """A plan of these requests with no room for more.

        ``padding_page`` is the page of the pool that is reserved for padding: any number of requests whose row names
        nothing but that page may stand in the plan, at any of its slots, to fill up a bucket. What prep leaves in the
        page and what attention returns for those requests is unspecified; nothing else of the pool is touched.

        Raises ContractError before it allocates anything.
        """
        require_type("device", device, Device)  # type: ignore[type-abstract]
        checked = check_requests(requests, shape, plan_tiles(device, shape), padding_page)
        bounds = checked.bounds
        plan = cls(
            device,
            PlanCapacity(
                max_tokens=max(1, bounds.num_tokens),
                max_requests=bounds.num_requests,
                max_pages=bounds.num_pages,
                max_tiles=max(1, bounds.num_tiles),
            ),
        )
        try:
            plan._fill(checked)
        except BaseException:
            _free_quietly(device, plan.buffers.by_name().values())
            raise
        return plan

    @classmethod
    def preallocated(
        cls, device: Device, *, max_tokens: int, max_requests: int, max_pages: int, max_tiles: int
    ) -> PrefillPagedPlan:
        """Arrays of these lengths and no requests: every use is refused until an update. Raises ContractError."""
        return cls(device, PlanCapacity(max_tokens, max_requests, max_pages, max_tiles))

    @property
    def bounds(self) -> PlanBounds | None:
        """The bounds recorded at construction or by the last update that succeeded; None if there are none."""
        return self._state.bounds

    def pages(self) -> tuple[Int32Array, Int32Array]:
        """(page_indices, page_indptr) of the requests that it holds, on the host."""
        bounds, contents = self.require_set(), self._state.contents
        return contents["page_indices"][: bounds.num_pages], contents["page_indptr"][: bounds.num_requests + 1]

    def require_set(self) -> PlanBounds:
        """The recorded bounds. Raises ContractError (plan_set) where there are none."""
        bounds = self._state.bounds
        PLAN_SET.require(bounds is not None, "plan", "a plan without requests", "an updated plan")
        return bounds  # type: ignore[return-value]

    def update(self, requests: Sequence[PlanRequest], *, shape: PlanShape, padding_page: int | None = None) -> None:
        """Replace requests, shape and padding page (see ``batch``) in place, at the same addresses.

        Raises ContractError (those of check_requests and lay_out, capacity) or what the device raises; the plan
        then is what it was before. Only if the device refuses to take the old contents back as well, the plan holds
        no requests afterwards and refuses use.
        """
        self._fill(check_requests(requests, shape, plan_tiles(self.device, shape), padding_page))

    def decode_batch(self) -> PagedBatch:
        """The same requests as the decode entries of prep take them: one object serves prep and attention of a step.

        A view of the plan's arrays as they are now, not to be used after the next update. A captured graph takes the
        batch_prefill entries of prep, with the plan itself: they serve one token a request as well.

        Raises ContractError: plan_set, q_len_one.
        """
        bounds = self.require_set()
        check_one_token_each(bounds)
        extents = (
            ("positions", bounds.num_requests),
            ("page_indices", bounds.num_pages),
            ("page_indptr", bounds.num_requests + 1),
            ("page_origins", bounds.num_requests),
        )
        positions, indices, indptr, origins = (getattr(self.buffers, name).view((extent,)) for name, extent in extents)
        host_positions, host_indices, host_indptr, host_origins = (
            self._state.contents[name][:extent] for name, extent in extents
        )
        host = (host_positions, host_indices, host_indptr, host_origins)
        return PagedBatch(positions, indices, indptr, origins, host, bounds.padding_page)

    def free(self) -> None:
        """Return the arrays to the device; a later use is refused (not_freed)."""
        self.device.free_all(list(self.buffers.by_name().values()))

    def _fill(self, checked: CheckedPlan) -> None:
        check_capacity(checked.bounds, self.capacity)
        arrays = lay_out(checked)
        contents = _emptied(_lengths(self.capacity))
        for name, values in arrays.by_name().items():
            contents[name][: values.size] = values
        for name in ("page_indptr", "q_indptr"):
            contents[name][checked.bounds.num_requests :] = contents[name][checked.bounds.num_requests]
        old = self._state
        try:
            self._write(contents)
            self._state = _State(checked.bounds, MappingProxyType(contents))
        except BaseException:
            self._state = _State(None, old.contents)
            with suppress(Exception):  # the first error is the one to report; a plan not restored refuses use
                self._write(old.contents)
                self._state = old
            raise

    def _write(self, contents: Mapping[str, Int32Array]) -> None:
        for name, buffer in self.buffers.by_name().items():
            self.device.write(buffer, contents[name])


def plan_tiles(device: Device, shape: object) -> tuple[int, ...]:
    """The cta_tile_q that the device can run at the shape's head_dim, in order of preference for its page size; the
    usual ones where these are no numbers."""
    try:
        head_dim = operator.index(getattr(shape, "head_dim", None))  # type: ignore[arg-type]
        page_size = operator.index(getattr(shape, "page_size", None))  # type: ignore[arg-type]
    except TypeError:
        return CTA_TILES_Q
    # Late: the table's functions take plans.
    from g4kv_cli.entries.table import preferred_tiles

    return preferred_tiles(head_dim, Target.of(device), page_size) or CTA_TILES_Q


def require_plan(device: Device, plan: object) -> tuple[PlanBounds, dict[str, DeviceArray]]:
    """The bounds and the live arrays (by field name) of a plan that holds requests.

    Raises ContractError: argument_type, plan_set, and those of require_array.
    """
    given = require_type("plan", plan, PrefillPagedPlan)
    bounds = given.require_set()
    arrays = given.buffers.by_name()
    lengths = _lengths(given.capacity)
    for name, array in arrays.items():
        require_array(device, f"plan.{name}", array, INT32, (lengths[name],))
    return bounds, arrays


def _lengths(capacity: PlanCapacity) -> dict[str, int]:
    """Elements of each array, in the order of PlanBuffers."""
    return {
        "page_indices": capacity.max_pages,
        "page_indptr": capacity.max_requests + 1,
        "page_origins": capacity.max_requests,
        "last_page_len": capacity.max_requests,
        "kv_lens": capacity.max_requests,
        "q_indptr": capacity.max_requests + 1,
        "positions": capacity.max_tokens,
        "token_requests": capacity.max_tokens,
        "tile_requests": capacity.max_tiles,
        "tile_indices": capacity.max_tiles,
    }


def _emptied(lengths: Mapping[str, int]) -> dict[str, Int32Array]:
    """Contents without requests."""
    return {
        name: np.full(length, 0 if name.endswith("_indptr") else NO_ENTRY, np.int32) for name, length in lengths.items()
    }


def _free_quietly(device: Device, arrays: Iterable[DeviceArray]) -> None:
    """Give back what a failed construction made; its own error is the one to report."""
    for array in arrays:
        with suppress(G4kvError, ValueError):
            device.free(array)
