"""The seam where other kernels come in: a request that has passed every check and has launched nothing yet.

The built-in kernels are the provider of a library that names none. A provider gets the same request, in names, and
launches what it has for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from g4kv_cli.device.interface import Device, DeviceArray, HostArray, PagedReads
from g4kv_cli.entries.contract import Contract
from g4kv_cli.entries.entry import Entry
from g4kv_cli.errors import G4kvError
from g4kv_cli.model.pool_order import PoolOrder
from g4kv_cli.model.prefill_plan import PlanBounds


class NotCovered(G4kvError):
    """A provider states that it does not serve this request; the text is its reason."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRequest:
    """A request after its checks.

    numbers: every scalar of the call by its field name (``num_kv_heads``, ``window_left``, ..).
    arrays: device arrays by the entry's argument names without their group (``q``, ``pool``, ``cos``, ``kv_lens``,
        ``partial_out``); an optional array that was not given is not there. Outputs have the rows to be written.
    metadata: reads the host's copy of the call's index arrays, int32, as long as what is in use.
    outputs: the names of arrays that the call has to fill; the pool, where it is written, is not among them.
    padding_page: the page that several tokens may write, whose contents are unspecified afterwards.
    paged_reads: which pages the requests may read, of a pool in the built-in order of axes.
    """

    entry: Entry
    device: Device
    numbers: Mapping[str, int | float]
    arrays: Mapping[str, DeviceArray]
    metadata: Callable[[], Mapping[str, HostArray]]
    outputs: tuple[str, ...]
    padding_page: int | None = None
    paged_reads: PagedReads | None = None


class Provider(Protocol):
    """Whose kernels serve the entries of a library."""

    name: str
    pool_order: PoolOrder

    def contract_of(self, entry: str) -> Contract:
        """What is stated of the kernels that serve an entry. Raises NotCovered if none do."""

    def launch(self, request: CheckedRequest) -> None:
        """Queue whatever the request needs. Raises NotCovered before any launch, CompileError or DeviceFault."""


def numbers_of(parameters: ctypes.Structure) -> dict[str, int | float]:
    """Every scalar of a built-in parameter struct by its field's name, the layout's fields among them; ``overlaps`` is
    about the built-in kernels alone."""
    found: dict[str, int | float] = {}
    for name, kind, *_ in parameters._fields_:
        value = getattr(parameters, name)
        if isinstance(value, ctypes.Structure):
            found |= numbers_of(value)
        elif kind is not ctypes.c_uint64 and name != "overlaps":  # addresses are uint64: they are arrays, not numbers
            found[name] = value
    return found


def host_copy(device: Device, array: DeviceArray) -> HostArray:
    """What an index array holds, read once a call."""
    copy = device.peek(array)
    return device.read(array) if copy is None else copy


def plan_metadata(device: Device, bounds: PlanBounds, arrays: Mapping[str, DeviceArray]) -> dict[str, HostArray]:
    """The plan's arrays that are about requests, pages and tokens, as long as what is in use."""
    requests, tokens = bounds.num_requests, bounds.num_tokens
    lengths = {
        "page_indices": bounds.num_pages,
        "page_indptr": requests + 1,
        "page_origins": requests,
        "last_page_len": requests,
        "kv_lens": requests,
        "q_indptr": requests + 1,
        "positions": tokens,
        "token_requests": tokens,
    }
    return {name: host_copy(device, arrays[name])[:length] for name, length in lengths.items()}
