"""An attention case's pool: the rows that count, poison everywhere else.

Places are NumPy indices into ``pool[page][layer][K, V][slot][head][dim]``, a view of it if its axes lie in another
order in memory, never the offset formula under test. What is
poison (NaN): other layers, unreferenced pages, slots behind the last key, keys that no query of the request sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.inputs import AttentionTensors
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.model.pool_order import OWN_ORDER, POOL_AXES, PoolOrder
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, Axes, compare_bits
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]

UNSEEN_KEY_AND_VALUE = (64.0, 1024.0)


def places_of(request: KvRequest, first_key: int, page_size: int) -> tuple[Array, Array]:
    """(page ids, slots) of the keys from ``first_key`` to the request's last."""
    positions = np.arange(first_key, request.kv_len)
    row = np.asarray(request.pages, dtype=np.int64)
    return row[positions // page_size - request.origin], positions % page_size


class AttentionPool:
    """Makes the pool of a case on a device and tells afterwards whether anybody wrote to it."""

    def __init__(
        self,
        case: AttentionCase,
        tensors: AttentionTensors,
        order: PoolOrder = OWN_ORDER,
        *,
        unseen_keys_finite: bool = False,
    ) -> None:
        self.case, self.tensors, self.order = case, tensors, order
        self._unseen_keys_finite = unseen_keys_finite
        self._image: Array | None = None

    def upload(self, device: Device, into: DeviceArray | None = None) -> DeviceArray:
        """The pool, flat bf16 [pool_elems]; into an earlier one of the same size if given."""
        if self.case.is_sparse:
            return self._upload_rows(device)
        flat = np.full(math.prod(self.case.pool_shape), POISON_BITS, dtype=np.uint16)
        image = self.order.logical(flat, self.case.pool_shape)
        for index, request in enumerate(self.case.requests):
            if request.is_padding:
                continue
            pages, slots = places_of(request, self.tensors.first_keys[index], self.case.page_size)
            for kv, rows in enumerate((self.tensors.k[index], self.tensors.v[index])):
                image[pages, self.case.layer, kv, slots] = bits(rows)
            if self._unseen_keys_finite:
                self._fill_unseen(image, index)
        self._image = image.view(BF16)
        if into is None:
            return device.upload(flat.view(BF16), "pool")
        device.write(into, flat.view(BF16))
        return into

    def _fill_unseen(self, image: Array, index: int) -> None:
        """Large finite numbers in front of what the request sees, in pages that are there: a kernel that multiplies V
        by a weight of 0 passes, one that gives such a key any weight does not."""
        request = self.case.requests[index]
        positions = np.arange(request.origin * self.case.page_size, self.tensors.first_keys[index])
        pages = np.asarray(request.pages, np.int64)[positions // self.case.page_size - request.origin]
        for kv, value in enumerate(UNSEEN_KEY_AND_VALUE):
            image[pages, self.case.layer, kv, positions % self.case.page_size] = bits(np.array(value, BF16))

    def _upload_rows(self, device: Device) -> DeviceArray:
        """A pool that is never made on the host. What is not written is poison on a GPU, and uninitialised on the
        emulated device, which reports a read of it; in the pages of a request it is poison there too, since a kernel
        may copy more slots than it uses."""
        shape = self.case.pool_shape
        pool = device.allocate((int(np.prod(shape, dtype=np.int64)),), BF16, "pool", sparse=True)
        if device.info.kind == "cuda":
            device.fill(pool, POISON_BYTE)
        else:
            for page in sorted({page for request in self.case.requests for page in request.pages}):
                for begin, count in self.order.page_pieces(page, shape, self.case.layer):
                    device.fill(pool.view((count,), offset_elems=begin), POISON_BYTE)
        for index, request in enumerate(self.case.requests):
            pages, slots = places_of(request, self.tensors.first_keys[index], self.case.page_size)
            for kv, rows in enumerate((self.tensors.k[index], self.tensors.v[index])):
                heads = np.arange(shape[4])
                places = (pages[:, None], self.case.layer, kv, slots[:, None], heads, 0)
                begins = self.order.offsets(places, shape)
                for begin, row in zip(begins.reshape(-1).tolist(), rows.reshape(-1, shape[5]), strict=True):
                    device.write(pool.view(shape[5:], offset_elems=begin), np.ascontiguousarray(row))
        return pool

    def untouched(self, device: Device, pool: DeviceArray) -> Mismatch | None:
        """Attention only reads: no store to the pool, or (where the device cannot know) the same bits as before."""
        device.synchronize()
        written = device.written_ranges(pool)
        if written is not None:
            if not len(written):
                return None
            return _stored(self.case, self.order, int(written[0, 0]) // BF16.itemsize, len(written))
        if self._image is None:
            return None
        got = self.order.logical(device.read(pool), self.case.pool_shape)
        return compare_bits("pool after attention", got, self._image, Axes(POOL_AXES), "attention wrote to the pool")


def page_owner(requests: Sequence[KvRequest]) -> Callable[[int], str]:
    """Whose a page is, in words."""

    def owner(page: int) -> str:
        holders = [number for number, request in enumerate(requests) if page in request.pages]
        if not holders:
            return "nobody's, it holds poison"
        if all(requests[number].is_padding for number in holders):
            return "a padding page"
        return "of the case's request " + " and ".join(str(number) for number in holders)

    return owner


def other_pages(case: AttentionCase) -> AttentionCase:
    """The same requests with every page one id further: each page then holds what another one held."""
    moved = tuple(
        replace(request, pages=tuple((page + 1) % case.num_pages for page in request.pages))
        for request in case.requests
    )
    return replace(case, requests=moved)


def _stored(case: AttentionCase, order: PoolOrder, element: int, places: int) -> Mismatch:
    where = order.coordinates(element, case.pool_shape)
    first = {name: int(at) for name, at in zip(POOL_AXES, where, strict=True)}
    return Mismatch(
        operation="pool after attention",
        count=places,
        total=int(np.prod(case.pool_shape, dtype=np.int64)),
        first=first,
        first_got="a store",
        first_want="no store",
        worst=first,
        worst_got="a store",
        worst_want="no store",
        limit="bit-equal",
        note="attention wrote to the pool",
    )
