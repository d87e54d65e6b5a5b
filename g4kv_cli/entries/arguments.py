"""The typed arguments of entries, and the checks of device arrays that every entry shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.model import rules
from g4kv_cli.model.checked import require_i32_vector, require_sequence, require_type
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.rules import rule

DEVICE_ARRAY = rule("device_array", "must be a device array")
SAME_DEVICE = rule("same_device", "lives on another device than the one that launches")
NOT_FREED = rule("not_freed", "was freed")
CONTIGUOUS = rule("contiguous", "must be row-contiguous")
ALIGNED = rule("aligned", "starts on an address that the kernel's accesses do not divide")
INSIDE_ALLOCATION = rule("inside_allocation", "reaches outside the memory it was made from")
NO_OVERLAP = rule("no_overlap", "shares memory with another argument while one of them is written")

BF16 = np.dtype(ml_dtypes.bfloat16)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
VECTOR_ACCESS_BYTES = 16

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RopeTables:
    """bf16 tables [rows, rotary_dim]; row p is position p, column d belongs to column d of the head.

    So the second half of a row repeats the first, as Hugging Face's rotary embedding returns it. ``cos_max_pos``
    says how many positions count (None: every row of ``cos``).
    """

    cos: DeviceArray
    sin: DeviceArray
    cos_max_pos: int | None = None


@dataclass(frozen=True, slots=True)
class PagedPool:
    """One family's pool: bf16 [pool_elems], and the layout it is read with.

    ``page_owner`` says in words whose a page is, for the report of a read that no request of a launch may make.
    """

    layout: KvLayout
    data: DeviceArray
    page_owner: Callable[[int], str] | None = None


@dataclass(frozen=True, slots=True)
class PageRow:
    """The pages of one request: int32 [pages]; index 0 is the request's page ``page_origin``.

    ``host`` is the same on the host, or None where the row was made on the device: then only the kernel's traps
    stand between a wrong id and the pool.
    """

    indices: DeviceArray
    host: Int32Array | None = None

    @classmethod
    def from_host(cls, device: Device, page_indices: Sequence[int]) -> PageRow:
        """Upload page ids. Raises ContractError (argument_type, integer, fits_i32)."""
        host = require_i32_vector("page_row", page_indices)
        require_type("device", device, Device)  # type: ignore[type-abstract]
        return cls(device.upload(host, "page_row"), host)

    @classmethod
    def from_device(cls, indices: DeviceArray) -> PageRow:
        """Wrap a row that a device made; its ids are unknown to the host."""
        return cls(indices)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Decode metadata, one token a request: token t uses page_indices[page_indptr[t] : page_indptr[t + 1]].

    positions int32 [tokens] (absolute), page_indices int32 [nnz], page_indptr int32 [tokens + 1], page_origins
    int32 [tokens] (logical page of a row's index 0). ``host`` holds the same four arrays, or None where they were
    made on the device. ``padding_page`` is the reserved page that the padding rows of a bucket share: any number of
    rows that name nothing else, at any of its slots. Tokens of one request that follow each other are one chunk, for
    the batch_prefill entries: here each would write what the next holds as history.
    """

    positions: DeviceArray
    page_indices: DeviceArray
    page_indptr: DeviceArray
    page_origins: DeviceArray
    host: tuple[Int32Array, Int32Array, Int32Array, Int32Array] | None = None
    padding_page: int | None = None

    @classmethod
    def from_host(
        cls,
        device: Device,
        *,
        positions: Sequence[int],
        page_lists: Sequence[Sequence[int]],
        page_origins: Sequence[int] | None = None,
        padding_page: int | None = None,
    ) -> PagedBatch:
        """Upload a batch. ``page_lists[t]`` are token t's resident pages.

        Raises ContractError (argument_type, integer, fits_i32); what the values say is checked at each launch.
        """
        require_type("device", device, Device)  # type: ignore[type-abstract]
        host_positions = require_i32_vector("positions", positions)
        rows = [
            require_i32_vector(f"page_lists[{token}]", pages)
            for token, pages in enumerate(require_sequence("page_lists", page_lists))
        ]
        origins = [0] * host_positions.size if page_origins is None else page_origins
        host = (
            host_positions,
            np.concatenate([np.empty(0, np.int32), *rows]),
            np.cumsum([0, *(row.size for row in rows)]).astype(np.int32),
            require_i32_vector("page_origins", origins),
        )
        return cls(
            positions=device.upload(host[0], "positions"),
            page_indices=device.upload(host[1], "page_indices"),
            page_indptr=device.upload(host[2], "page_indptr"),
            page_origins=device.upload(host[3], "page_origins"),
            host=host,
            padding_page=padding_page,
        )

    @classmethod
    def from_device(
        cls,
        positions: DeviceArray,
        page_indices: DeviceArray,
        page_indptr: DeviceArray,
        page_origins: DeviceArray,
        padding_page: int | None = None,
    ) -> PagedBatch:
        """Wrap arrays that a device made; their values are unknown to the host."""
        return cls(positions, page_indices, page_indptr, page_origins, padding_page=padding_page)


def require_array(
    device: Device, field: str, value: object, dtype: np.dtype[np.generic], shape: tuple[int | None, ...]
) -> DeviceArray:
    """``value`` as a live, contiguous, aligned array of ``device`` inside its allocation; None in ``shape`` is any
    extent. bf16 arrays are read 16 bytes at a time and aligned so, others to their element.

    Raises ContractError: device_array, not_freed, same_device, dtype, shape, contiguous, aligned, inside_allocation.
    """
    is_array = isinstance(value, DeviceArray)
    DEVICE_ARRAY.require(is_array, field, type(value).__name__, "DeviceArray (Device.upload makes one)")
    array: DeviceArray = value  # type: ignore[assignment]
    NOT_FREED.require(not array.allocation.freed, field, "a freed array", "a live one")
    SAME_DEVICE.require(
        array.device is device, field, f"memory of another {array.device.info.kind} device", "memory of this one"
    )
    rules.DTYPE.require(array.dtype == dtype, field, array.dtype, dtype)
    wanted = "[" + ", ".join("any" if extent is None else str(extent) for extent in shape) + "]"
    same_shape = len(array.shape) == len(shape) and all(
        got >= 0 and want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    rules.SHAPE.require(same_shape, field, list(array.shape), wanted)
    CONTIGUOUS.require(array.is_contiguous, field, f"strides {array.strides_bytes} bytes", "contiguous rows")
    alignment = VECTOR_ACCESS_BYTES if dtype in (BF16, FLOAT32) else dtype.itemsize
    ALIGNED.require(
        array.address % alignment == 0, field, f"address {array.address:#x}", f"a multiple of {alignment} bytes"
    )
    begin, end = array.offset_bytes, array.offset_bytes + array.nbytes
    INSIDE_ALLOCATION.require(
        begin >= 0 and end <= array.allocation.nbytes,
        field,
        f"bytes {begin}..{end}",
        f"inside the {array.allocation.nbytes} bytes of {array.label}",
    )
    return array


def require_host_copy(field: str, host: object, array: DeviceArray) -> Int32Array:
    """``host`` as the int32 vector of ``array``'s length that it says it is. Raises ContractError (host_copy)."""
    is_copy = isinstance(host, np.ndarray) and host.dtype == INT32 and host.shape == array.shape
    got = f"{host.dtype} {list(host.shape)}" if isinstance(host, np.ndarray) else type(host).__name__
    rules.HOST_COPY.require(is_copy, field, got, f"int32 {list(array.shape)}")
    return host  # type: ignore[return-value]


def require_no_overlap(outputs: Mapping[str, DeviceArray], inputs: Mapping[str, DeviceArray]) -> None:
    """No output may share a byte with an input or with another output. Raises ContractError (no_overlap)."""
    spans = [(name, array.address, array.address + array.nbytes) for name, array in {**outputs, **inputs}.items()]
    for index, (name, begin, end) in enumerate(spans[: len(outputs)]):
        for other, other_begin, other_end in spans[index + 1 :]:
            apart = end <= other_begin or other_end <= begin or begin == end or other_begin == other_end
            NO_OVERLAP.require(apart, name, f"memory of {other}", "memory of its own")
