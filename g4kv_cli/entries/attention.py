"""The attention entries: paged softmax attention over what prep wrote, prefill and three decode forms.

All read q bf16 [tokens, num_qo_heads, head_dim] and the layer's pages through a PrefillPagedPlan, which also carries
``sm_scale`` and ``window_left``, and write ``out`` like q and, if asked, ``lse`` float32 [tokens, num_qo_heads], the
natural logarithm of the sum of exp(sm_scale * q.k). Rows of q behind the plan's tokens are not touched.

Key j is visible to the query at position i iff j <= i and (window_left < 0 or j >= i - window_left). Query head h
reads KV head h // (num_qo_heads / num_kv_heads); every group from 1 to 16 runs. A request without new tokens owns no
row. Scores are float32 sums of exact bf16 products on the tensor cores, weights are rounded to bf16 before they
multiply V, sums stay float32, and the result is rounded to bf16 once.

Decode has three forms for the same answer: (a) the prefill entries at one token a request, (b) batch_decode, one
block a request and KV head, (c) batch_decode_split, the keys of a request spread over ``num_splits`` blocks and then
merged. The same input gives the same bits, and in one form a request's bits do not depend on its companions.

Everything is checked on the host before the launch (ContractError; a card without the shared memory for a tile is
told so by DeviceUnavailable). The kernels have no bounds checks: the plan's recorded bounds are the only ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import BF16, FLOAT32, PagedPool, require_array, require_no_overlap
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.attention_table import (
    DECODE_TILE_ROWS,
    MERGE_COLUMNS,
    MERGE_THREADS,
    AttentionForm,
    AttentionKernel,
    choose_kernel,
    merge_symbol,
)
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles, require_plan
from g4kv_cli.model import rules
from g4kv_cli.model.checked import check_head_relation, check_pool, finite_f32, require_i32, require_type
from g4kv_cli.model.prefill_plan import PlanBounds, check_plan_use

MAX_SPLITS = 65535
"""Blocks of a grid's second axis."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitWorkspace:
    """Partial results of form (c), float32: partial_out [tokens, num_qo_heads, num_splits, head_dim], partial_max and
    partial_sum [tokens, num_qo_heads, num_splits]. Its contents mean nothing between calls."""

    partial_out: DeviceArray
    partial_max: DeviceArray
    partial_sum: DeviceArray

    @classmethod
    def allocate(
        cls, device: Device, *, tokens: int, num_qo_heads: int, num_splits: int, head_dim: int
    ) -> SplitWorkspace:
        """A workspace for this many token rows, heads and splits of one family."""
        rows = (tokens, num_qo_heads, num_splits)
        return cls(
            partial_out=device.allocate((*rows, head_dim), FLOAT32, "partial_out"),
            partial_max=device.allocate(rows, FLOAT32, "partial_max"),
            partial_sum=device.allocate(rows, FLOAT32, "partial_sum"),
        )


@dataclass(slots=True)
class _Request:
    """One call after its checks."""

    library: KernelLibrary
    kernel: AttentionKernel
    bounds: PlanBounds
    parameters: AttentionParameters
    inputs: dict[str, DeviceArray]
    outputs: dict[str, DeviceArray]


def batch_prefill_paged_window_hd256_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
    cta_tile_q: int | None = None,
) -> None:
    """A ragged batch of chunks with history, local family. ``cta_tile_q`` must name the plan's override, if any."""
    _prefill(library, 256, q, plan, pool, layer, out, lse, cta_tile_q)


def batch_prefill_paged_hd512_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
    cta_tile_q: int | None = None,
) -> None:
    """A ragged batch of chunks with history, global family. ``cta_tile_q`` must name the plan's override, if any."""
    _prefill(library, 512, q, plan, pool, layer, out, lse, cta_tile_q)


def batch_decode_paged_window_hd256_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
) -> None:
    """Form (b), local family: every request has one new token."""
    _decode(library, 256, q, plan, pool, layer, out, lse)


def batch_decode_paged_hd512_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
) -> None:
    """Form (b), global family: every request has one new token."""
    _decode(library, 512, q, plan, pool, layer, out, lse)


def batch_decode_split_paged_window_hd256_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    num_splits: int,
    workspace: SplitWorkspace,
    lse: DeviceArray | None = None,
) -> None:
    """Form (c), local family: each request's visible keys in ``num_splits`` chunks of whole 16-key tiles, merged."""
    _decode_split(library, 256, q, plan, pool, layer, out, lse, num_splits, workspace)


def batch_decode_split_paged_hd512_into(
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    num_splits: int,
    workspace: SplitWorkspace,
    lse: DeviceArray | None = None,
) -> None:
    """Form (c), global family: each request's visible keys in ``num_splits`` chunks of whole 16-key tiles, merged."""
    _decode_split(library, 512, q, plan, pool, layer, out, lse, num_splits, workspace)


def _check(
    library: KernelLibrary,
    form: AttentionForm,
    head_dim: int,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None,
    cta_tile_q: int | None,
    one_token_each: bool = False,
) -> _Request:
    """What every attention entry checks, and its parameters so far."""
    device = require_type("library", library, KernelLibrary).device
    array = require_array(device, "q", q, BF16, (None, None, head_dim))
    bounds, arrays = require_plan(device, plan)
    shape = bounds.shape
    num_qo_heads, num_kv_heads = check_head_relation(array.shape[1], shape.num_kv_heads)
    rules.GQA_GROUP.require(
        num_qo_heads <= DECODE_TILE_ROWS * num_kv_heads,
        "q heads",
        f"{num_qo_heads} for {num_kv_heads} KV heads",
        f"at most {DECODE_TILE_ROWS} a KV head",
    )
    scale_log2 = finite_f32(shape.sm_scale * math.log2(math.e))
    rules.SM_SCALE.require(
        scale_log2 is not None and scale_log2 > 0,
        "plan.sm_scale",
        shape.sm_scale,
        "positive, and finite times log2(e)",
    )
    checked_pool = require_type("pool", pool, PagedPool)
    data = require_array(device, "pool", checked_pool.data, BF16, (None,))
    geometry = check_pool(
        layout=checked_pool.layout,
        layer=layer,
        pool_elems=data.size,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
    )
    check_plan_use(
        bounds,
        head_dim=head_dim,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        rows=array.shape[0],
        geometry=geometry,
        tiles=plan_tiles(device, shape),
        cta_tile_q=None if cta_tile_q is None else require_i32("cta_tile_q", cta_tile_q),
    )
    rules.Q_LEN_ONE.require(
        not one_token_each or bounds.min_q_len == bounds.max_q_len == 1,
        "plan",
        f"requests of {bounds.min_q_len} to {bounds.max_q_len} new tokens",
        "1 each",
    )
    outputs = {"out": require_array(device, "out", out, BF16, array.shape)}
    if lse is not None:
        outputs["lse"] = require_array(device, "lse", lse, FLOAT32, array.shape[:2])
    kernel = choose_kernel(form, head_dim, bounds.cta_tile_q, device.limits.max_shared_bytes_per_block)
    parameters = AttentionParameters(
        q=array.address,
        out=out.address,
        lse=0 if lse is None else lse.address,
        pool=data.address,
        page_indices=arrays["page_indices"].address,
        page_indptr=arrays["page_indptr"].address,
        page_origins=arrays["page_origins"].address,
        kv_lens=arrays["kv_lens"].address,
        layout=geometry.layout.parameters(),
        layer=geometry.layer,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        num_tiles=bounds.num_tiles,
        num_splits=1,
        window_left=shape.window_left,
        scale_log2=scale_log2,
    )
    inputs = {"q": array, "pool": data, **{f"plan.{name}": buffer for name, buffer in arrays.items()}}
    return _Request(library, kernel, bounds, parameters, inputs, outputs)


def _prefill(
    library: KernelLibrary,
    head_dim: int,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None,
    cta_tile_q: int | None,
) -> None:
    bounds, arrays = require_plan(require_type("library", library, KernelLibrary).device, plan)
    form: AttentionForm = "decode" if bounds.cta_tile_q == DECODE_TILE_ROWS else "prefill"
    request = _check(library, form, head_dim, q, plan, pool, layer, out, lse, cta_tile_q)
    parameters = request.parameters
    parameters.q_indptr = arrays["q_indptr"].address
    parameters.tile_requests = arrays["tile_requests"].address
    parameters.tile_indices = arrays["tile_indices"].address
    _launch(request, blocks=bounds.num_tiles)


def _decode(
    library: KernelLibrary,
    head_dim: int,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None,
) -> None:
    request = _check(library, "decode", head_dim, q, plan, pool, layer, out, lse, None, one_token_each=True)
    _launch(request, blocks=request.bounds.num_requests)


def _decode_split(
    library: KernelLibrary,
    head_dim: int,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None,
    num_splits: int,
    workspace: SplitWorkspace,
) -> None:
    request = _check(library, "decode_split", head_dim, q, plan, pool, layer, out, lse, None, one_token_each=True)
    splits = require_i32("num_splits", num_splits)
    rules.NUM_SPLITS.require(1 <= splits <= MAX_SPLITS, "num_splits", splits, f"1..{MAX_SPLITS}")
    rows = (request.bounds.num_tokens, request.parameters.num_qo_heads, splits)
    require_type("workspace", workspace, SplitWorkspace)
    for name, shape in (
        ("partial_out", (*rows, head_dim)),
        ("partial_max", rows),
        ("partial_sum", rows),
    ):
        scratch = require_array(
            library.device, f"workspace.{name}", getattr(workspace, name), FLOAT32, (None,) * len(shape)
        )
        fits = scratch.shape[0] >= shape[0] and scratch.shape[1:] == shape[1:]
        rules.WORKSPACE.require(fits, f"workspace.{name}", list(scratch.shape), f"{list(shape)}, or more rows")
        request.outputs[f"workspace.{name}"] = scratch
        setattr(request.parameters, name, scratch.address)
    request.parameters.num_splits = splits
    _launch(request, blocks=request.bounds.num_requests)
    launch(
        library,
        request.kernel.source,
        merge_symbol(head_dim),
        grid=(request.bounds.num_tokens * request.parameters.num_qo_heads, head_dim // MERGE_COLUMNS, 1),
        block=(MERGE_THREADS, 1, 1),
        arguments=(request.parameters,),
        must_write=_written(request, ("out", "lse")),
    )


def _launch(request: _Request, *, blocks: int) -> None:
    """Overlap is the last check; then the launch. No block, no launch: a plan whose requests have no new token."""
    require_no_overlap(request.outputs, request.inputs)
    if blocks == 0:
        return
    kernel, parameters = request.kernel, request.parameters
    splits = kernel.form == "decode_split"
    launch(
        request.library,
        kernel.source,
        kernel.symbol,
        grid=(blocks * parameters.num_kv_heads, parameters.num_splits, 1),
        block=(kernel.threads, 1, 1),
        arguments=(parameters,),
        dynamic_shared_bytes=kernel.shared_bytes,
        must_write=_written(
            request,
            ("workspace.partial_out", "workspace.partial_max", "workspace.partial_sum") if splits else ("out", "lse"),
        ),
    )


def _written(request: _Request, names: tuple[str, ...]) -> tuple[DeviceArray, ...]:
    """The rows of these outputs that a launch has to fill: those of the plan's tokens."""
    tokens = request.bounds.num_tokens
    return tuple(array.view((tokens, *array.shape[1:])) for name, array in request.outputs.items() if name in names)
