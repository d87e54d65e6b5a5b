"""A call of so many rows that the offsets of q, out and the partial results leave 32 bits.

Only the first and the last request have keys and queries, and of them the first and the last KV head with its group. A
GPU computes all rows, those between from whatever is there; the emulated device runs the blocks at both ends of the
grid, over memory of which hardly a page is touched. The rows of the first and the last head of the first and the last
token are judged: a block at an end makes at least one of each token's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.arguments import call_arguments, make_plan, paged_pool
from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.inputs import AttentionTensors
from g4kv_cli.cases.attention.pool import places_of, write_rows
from g4kv_cli.cases.session import Session, Skip
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.attention_request import chosen_kernel
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.oracle.attention import ExpectedAttention
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS, POISON_BYTE, ROWS, Axes
from g4kv_cli.oracle.compare_attention import compare_attention

Array = npt.NDArray[Any]


def run_ends(session: Session, case: AttentionCase, tensors: AttentionTensors, expected: ExpectedAttention) -> None:
    """Run the case; ``tensors`` and ``expected`` are those of ``case.ends``."""
    device, geometry = session.device, case.geometry
    session.only_the_ends = True
    rows = _EndRows(session, case)
    pool = _upload_keys(session, case, tensors)
    shape = (case.num_tokens, geometry.num_qo_heads)
    q = rows.make((*shape, geometry.head_dim), "q")
    rows.write(q, tensors.q)
    out, lse = rows.make((*shape, geometry.head_dim), "out"), rows.make(shape, "lse", np.float32)
    scratch = None
    if case.row.takes_splits:
        parts = (*shape, case.num_splits)
        scratch = SplitWorkspace(
            rows.make((*parts, geometry.head_dim), "partial_out", np.float32),
            rows.make(parts, "partial_max", np.float32),
            rows.make(parts, "partial_sum", np.float32),
        )
    plan = make_plan(session, case)
    with device.only_the_ends():
        case.row(
            session.library,
            **call_arguments(case, plan, paged_pool(case, pool, case.requests), q, out, lse, scratch),
        )
    got = rows.read(out)
    session.digest.update(got.tobytes())
    session.lacks_rows = bool((bits(got) == POISON_BITS).all(axis=-1).any())
    _judge(session, case, got, expected, rows)


def require_memory(device: Device, case: AttentionCase) -> None:
    """Skip a GPU that has not the memory for the case's rows, pool and partial results."""
    geometry = case.geometry
    rows = case.num_tokens * geometry.num_qo_heads
    splits = case.num_splits if case.row.takes_splits else 0
    needed = case.pool_bytes + rows * geometry.head_dim * (2 * BF16.itemsize + 4 * splits)
    if device.info.kind == "cuda" and needed > device.limits.memory_bytes:
        have = device.limits.memory_bytes / 2**30
        raise Skip(f"rows, pool and partial results take {needed / 2**30:.1f} GiB, this GPU has {have:.1f} GiB")


def require_ends(library: KernelLibrary, case: AttentionCase) -> None:
    """Skip kernels whose blocks stay and go from tile to tile on the emulated device: its ends of a grid are no ends of
    the rows, and all rows are too many for it."""
    if library.device.info.kind == "cuda" or library.provider is not None:
        return
    kernel = chosen_kernel(case.row, library, case.cta_tile_q, case.layout, case.geometry.gqa_group)
    if kernel.resident_tiles:
        raise Skip(
            f"{kernel.symbol} has blocks that go from tile to tile, so that the emulated device cannot run those at "
            "both ends of the rows alone: this case needs a GPU"
        )


def _upload_keys(session: Session, case: AttentionCase, tensors: AttentionTensors) -> DeviceArray:
    """A pool in which the end heads of the end requests' keys stand; on a GPU, poison in all else."""
    device, image = session.device, case.image(session.library.pool_order)
    pool = session.keep(device.allocate((image.elements,), BF16, "pool", sparse=True))
    if device.info.kind == "cuda":
        device.fill(pool, POISON_BYTE)
    for index, request in enumerate(case.ends.requests):
        places = places_of(request, tensors.first_keys[index], case.page_size)
        heads = np.array([0, image.num_kv_heads - 1])
        write_rows(pool, case, image, (tensors.k[index], tensors.v[index]), places, heads)
    return pool


class _EndRows:
    """Arrays [tokens, heads, ...] of which the rows of the end requests and of their end KV heads' groups count."""

    def __init__(self, session: Session, case: AttentionCase) -> None:
        self.session, self.device = session, session.device
        self.group = case.geometry.gqa_group
        first, last = (request.q_len for request in case.ends.requests)
        self.tokens = [*range(first), *range(case.num_tokens - last, case.num_tokens)]

    def make(self, shape: tuple[int, ...], label: str, dtype: npt.DTypeLike = BF16) -> DeviceArray:
        """An array whose end rows are poison; on a GPU, all of it."""
        array = self.session.keep(self.device.allocate(shape, np.dtype(dtype), label, sparse=True))
        for part in (array,) if self.device.info.kind == "cuda" else self._parts(array):
            self.device.fill(part, POISON_BYTE)
        return array

    def write(self, array: DeviceArray, rows: Array) -> None:
        """Rows [end tokens, heads of both groups, ...]."""
        values = rows.reshape(-1, self.group, *rows.shape[2:])
        for part, value in zip(self._parts(array), values, strict=True):
            self.device.write(part, np.ascontiguousarray(value))

    def read(self, array: DeviceArray) -> Array:
        """As write takes them."""
        parts = [self.device.read(part) for part in self._parts(array)]
        return np.stack(parts).reshape(len(self.tokens), 2 * self.group, *array.shape[2:])

    def _parts(self, array: DeviceArray) -> list[DeviceArray]:
        """Both groups of each end token, in order."""
        heads, rest = array.shape[1], array.shape[2:]
        row = int(np.prod(rest, dtype=np.int64))
        firsts = [token * heads + head for token in self.tokens for head in (0, heads - self.group)]
        return [array.view((self.group, *rest), offset_elems=first * row) for first in firsts]


def _judge(session: Session, case: AttentionCase, got: Array, expected: ExpectedAttention, rows: _EndRows) -> None:
    """On the emulated device a row that is still poison was not run, but of the last token one has to be there."""
    ends = (0, got.shape[1] - 1)
    at = (np.array([0, 0, len(got) - 1, len(got) - 1]), np.array([*ends, *ends]))
    there = (bits(got[at]) != POISON_BITS).any(axis=-1)
    there[2:] |= not there[2:].any()
    there |= session.device.info.kind == "cuda"
    kept = tuple(index[there][:, None] for index in at)
    heads = np.where(kept[1][:, 0] == 0, 0, case.geometry.num_qo_heads - 1)
    named: dict[str, Any] = {"token": [rows.tokens[token] for token in kept[0][:, 0]], "head": heads}
    want = ExpectedAttention(
        expected.value[kept], expected.rounding.at(kept), expected.lse[kept], expected.lse_limit[kept]
    )
    session.compared("out", got[kept], want.value, want.rounding.limit)
    session.found(compare_attention("out", got[kept], want, Axes(ROWS, {}, named)))
