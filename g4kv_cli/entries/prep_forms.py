"""The signatures of prep, one function a form: the entry's row first, then what a caller gives.

Common to all: ``q`` bf16 [tokens, num_qo_heads, head_dim] and ``k`` bf16 [tokens, num_kv_heads, head_dim] raw
projections, ``v`` like k where the entry takes one of its own, norm weights bf16 [head_dim], tables as RopeTables says,
and ``q_out`` like q, which is written. See entries/prep.py for what is computed.
"""

from __future__ import annotations

from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import BF16, PagedBatch, PagedPool, PageRow, RopeTables, require_array
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.prep_request import (
    check_rows,
    check_start,
    launch_checked,
    launch_paged_batch_prefill,
    launch_paged_decode,
    launch_paged_prefill,
)

RMS_NORM_EPS = 1e-6
"""rms_norm_eps of every Gemma 4 size."""


def contiguous(
    entry: Entry,
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    q_out: DeviceArray,
    k_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """Token t has position start_pos + t; K goes to ``k_out``, like k."""
    request = check_rows(library, entry, q, k, None, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    shape = (request.tokens, request.num_kv_heads, entry.head_dim)
    request.outputs["k_out"] = require_array(library.device, "k_out", k_out, BF16, shape)
    request.parameters.k_out = k_out.address
    check_start(request, start_pos)
    launch_checked(request, ())


def paged_prefill(
    entry: Entry,
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray | None = None,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    start_pos: int,
    pool: PagedPool,
    layer: int,
    page_row: PageRow,
    page_origin: int = 0,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """Token t has position p = start_pos + t, page page_row[p // page_size - page_origin] and slot p % page_size."""
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_prefill(request, start_pos, pool, layer, page_row, page_origin)


def paged_decode(
    entry: Entry,
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray | None = None,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    batch: PagedBatch,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
) -> None:
    """Each token is its own request with its position, CSR row of pages and page origin."""
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_decode(request, batch, pool, layer)


def paged_batch_prefill(
    entry: Entry,
    library: KernelLibrary,
    *,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray | None = None,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    q_out: DeviceArray,
    eps: float = RMS_NORM_EPS,
    cta_tile_q: int | None = None,
) -> None:
    """Token i of the plan is row i of q, k, v and q_out; rows past the plan's tokens are neither read nor written.

    ``cta_tile_q`` is the override that the plan was made with, None where its tile was derived.
    """
    request = check_rows(library, entry, q, k, v, q_norm_weight, k_norm_weight, rope, rotary_dim, q_out, eps)
    launch_paged_batch_prefill(request, plan, pool, layer, cta_tile_q)
