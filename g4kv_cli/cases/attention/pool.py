"""An attention case's pool: the rows that count, poison everywhere else.

Places are NumPy indices into ``pool[page][layer][K, V][slot][head][dim]``, a view of it if its axes lie in another
order in memory (model/pool_image.py), never the offset formula under test. What is poison (NaN): other layers,
unreferenced pages, slots behind the last key, keys that no query of the request sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.inputs import AttentionTensors, stored_rows
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.model.pool_image import BLOCK_AXES, PoolImage
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
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
        self.case, self.tensors, self.image = case, tensors, case.image(order)
        self._unseen_keys_finite = unseen_keys_finite
        self._contents: Array | None = None

    def upload(self, device: Device, into: DeviceArray | None = None) -> DeviceArray:
        """The pool, flat bf16 [pool_elems]; into an earlier one of the same size if given."""
        if self.case.is_sparse:
            return self._upload_rows(device)
        pool = device.allocate((self.image.elements,), BF16, "pool") if into is None else into
        self._contents = device.compose(pool, self._compose)
        return pool

    def _compose(self, flat: Array) -> None:
        """The whole pool, bf16 [pool_elems]."""
        flat = bits(flat)
        flat.fill(POISON_BITS)
        blocks = self.image.blocks(flat)
        for index, request in enumerate(self.case.requests):
            if request.is_padding:
                continue
            pages, slots = places_of(request, self.tensors.first_keys[index], self.case.page_size)
            rows_of_both = stored_rows(self.case, self.tensors.k[index], self.tensors.v[index])
            for block, rows in zip(blocks, rows_of_both, strict=True):
                block[pages, self.case.layer, slots] = bits(rows)
            if self._unseen_keys_finite:
                self._fill_unseen(blocks, index)

    def _fill_unseen(self, blocks: tuple[Array, Array], index: int) -> None:
        """Large finite numbers in front of what the request sees, in pages that are there: a kernel that multiplies V
        by a weight of 0 passes, one that gives such a key any weight does not."""
        request = self.case.requests[index]
        positions = np.arange(request.origin * self.case.page_size, self.tensors.first_keys[index])
        pages = np.asarray(request.pages, np.int64)[positions // self.case.page_size - request.origin]
        for block, value in zip(blocks, UNSEEN_KEY_AND_VALUE, strict=True):
            block[pages, self.case.layer, positions % self.case.page_size] = bits(np.array(value, BF16))

    def _upload_rows(self, device: Device) -> DeviceArray:
        """A pool that is never made on the host. What is not written is poison on a GPU, and uninitialised on the
        emulated device, which reports a read of it; in the pages of a request it is poison there too, since a kernel
        may copy more slots than it uses."""
        pool = device.allocate((self.image.elements,), BF16, "pool", sparse=True)
        if device.info.kind == "cuda":
            device.fill(pool, POISON_BYTE)
        else:
            for page in sorted({page for request in self.case.requests for page in request.pages}):
                for begin, count in self.image.page_pieces(page, self.case.layer):
                    device.fill(pool.view((count,), offset_elems=begin), POISON_BYTE)
        for index, request in enumerate(self.case.requests):
            pages, slots = places_of(request, self.tensors.first_keys[index], self.case.page_size)
            write_rows(
                pool, self.case, self.image, (self.tensors.k[index], self.tensors.v[index]), (pages, slots),
                np.arange(self.image.num_kv_heads),
            )  # fmt: skip
        return pool

    def untouched(self, device: Device, pool: DeviceArray) -> Mismatch | None:
        """Attention only reads: no store to the pool, or (where the device cannot know) the same bits as before."""
        device.synchronize()
        written = device.written_ranges(pool)
        if written is not None:
            if not len(written):
                return None
            return _stored(self.image, int(written[0, 0]) // BF16.itemsize, len(written))
        if self._contents is None:
            return None
        both = zip(self.image.blocks(device.read(pool)), self.image.blocks(self._contents), strict=True)
        for kv, (got, want) in enumerate(both):
            axes = Axes(BLOCK_AXES, {"kv": kv})
            found = compare_bits("pool after attention", got, want, axes, "attention wrote to the pool")
            if found is not None:
                return found
        return None


def write_rows(
    pool: DeviceArray,
    case: AttentionCase,
    image: PoolImage,
    k_and_v: tuple[Array, Array],
    places: tuple[Array, Array],
    heads: Array,
) -> None:
    """Write rows [keys, heads, head_dim] of K and V, one by one, to these pages and slots of the case's layer."""
    pages, slots = places
    for kv, rows in enumerate(stored_rows(case, *k_and_v)):
        begins = image.offsets((pages[:, None], case.layer, slots[:, None], heads, 0), kv)
        columns = image.row_dim(kv)
        for begin, row in zip(begins.reshape(-1).tolist(), rows.reshape(-1, columns), strict=True):
            pool.device.write(pool.view((columns,), offset_elems=begin), np.ascontiguousarray(row))


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


def _stored(image: PoolImage, element: int, places: int) -> Mismatch:
    first = image.coordinate(element)
    return Mismatch(
        operation="pool after attention",
        count=places,
        total=image.elements,
        first=first,
        first_got="a store",
        first_want="no store",
        worst=first,
        worst_got="a store",
        worst_want="no store",
        limit="bit-equal",
        note="attention wrote to the pool",
    )
