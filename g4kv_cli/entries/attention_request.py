"""What the attention entries share: the checks of a request on the host, the choice of its kernel, and its launches.

A function here is an entry's signature: it takes the entry's row first, and rows of the same signature share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from g4kv_cli.device.arguments import Argument
from g4kv_cli.device.interface import DeviceArray, PagedReads
from g4kv_cli.entries.arguments import BF16, FLOAT32, PagedPool, require_array, require_no_overlap
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.clusters import launch_in_clusters
from g4kv_cli.entries.entry import Entry, KernelVariant, choose_variant
from g4kv_cli.entries.kv_boxes import kv_box_maps, query_box_map
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.paged_reads import paged_reads
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles, require_plan
from g4kv_cli.entries.provider import CheckedRequest, numbers_of, plan_metadata
from g4kv_cli.entries.workspace import MERGE_COLUMNS, SplitWorkspace
from g4kv_cli.model.checked import check_head_relation, check_pool, require_i32, require_type
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import check_sm_scale
from g4kv_cli.model.plan_use import check_one_token_each, check_plan_use
from g4kv_cli.model.prefill_plan import PlanBounds
from g4kv_cli.model.rules import rule

GQA_GROUP = rule("gqa_group", "is more query heads a KV head than a tile of packed rows holds")
NUM_SPLITS = rule("num_splits", "must be at least 1 and at most what a grid's second axis holds")
WORKSPACE = rule("workspace", "is smaller than these tokens, heads, splits and head_dim need")

MAX_GQA_GROUP = 16
"""Query heads that share a KV head at most: the packed rows of the smallest tile."""
MAX_SPLITS = 65535
"""Blocks of a grid's second axis."""
RESULTS = ("out", "lse")
PARTIALS = ("workspace.partial_out", "workspace.partial_max", "workspace.partial_sum")


@dataclass(slots=True)
class _Request:
    """One call after its checks."""

    library: KernelLibrary
    entry: Entry
    kernel: KernelVariant | None
    bounds: PlanBounds
    layout: KvLayout
    parameters: AttentionParameters
    inputs: dict[str, DeviceArray]
    outputs: dict[str, DeviceArray]
    paged_reads: PagedReads
    overlap: bool = False
    """Whether the kernel may begin before the launch in front has ended, if it can."""


def prefill(
    entry: Entry,
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
    """A ragged batch of chunks with history, one block a tile of the plan and KV head."""
    request = _check(entry, library, q, plan, pool, layer, out, lse, cta_tile_q)
    for name in ("q_indptr", "tile_requests", "tile_indices"):
        setattr(request.parameters, name, request.inputs[f"plan.{name}"].address)
    _launch(request, blocks=request.bounds.num_tiles, must_write=RESULTS)


def decode(
    entry: Entry,
    library: KernelLibrary,
    *,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
    enable_pdl: bool = False,
) -> None:
    """One new token a request, one block a request and KV head."""
    request = _check(entry, library, q, plan, pool, layer, out, lse, None)
    request.overlap = require_type("enable_pdl", enable_pdl, bool)
    _launch(request, blocks=request.bounds.num_requests, must_write=RESULTS)


def decode_split(
    entry: Entry,
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
    enable_pdl: bool = False,
) -> None:
    """One new token a request, its keys over ``num_splits`` blocks a KV head; then the merge."""
    request = _check(entry, library, q, plan, pool, layer, out, lse, None)
    request.overlap = require_type("enable_pdl", enable_pdl, bool)
    parameters = request.parameters
    rows = (request.bounds.num_tokens, parameters.num_qo_heads)
    request.outputs |= _check_workspace(entry, library, parameters, workspace, num_splits, rows)
    if request.kernel is not None and request.kernel.max_cluster_blocks:
        _launch(request, blocks=request.bounds.num_requests, must_write=RESULTS)
        return
    _launch(request, blocks=request.bounds.num_requests, must_write=PARTIALS)
    if library.provider is None:
        _launch_merge(library, entry.merge_kernels, entry.head_dim, rows, parameters, _written(request, RESULTS))


def merge(
    entry: Entry,
    library: KernelLibrary,
    *,
    workspace: SplitWorkspace,
    num_splits: int,
    out: DeviceArray,
    lse: DeviceArray | None = None,
    sm_scale: float = 1.0,
) -> None:
    """The partial results of ``num_splits`` splits as one: out bf16 [tokens, num_qo_heads, head_dim].

    A split that saw no key has partial_max -infinity, and its partial_out does not count. ``partial_max`` holds scores
    before ``sm_scale``. No tokens is a valid request that launches nothing.
    """
    device = require_type("library", library, KernelLibrary).device
    array = require_array(device, "out", out, BF16, (None, None, entry.head_dim))
    rows = (require_i32("out tokens", array.shape[0]), require_i32("out heads", array.shape[1]))
    outputs = {"out": array}
    if lse is not None:
        outputs["lse"] = require_array(device, "lse", lse, FLOAT32, rows)
    parameters = AttentionParameters(
        out=array.address,
        lse=0 if lse is None else lse.address,
        num_qo_heads=rows[1],
        num_kv_heads=rows[1],
        scale_log2=check_sm_scale(sm_scale)[1],
    )
    inputs = _check_workspace(entry, library, parameters, workspace, num_splits, rows)
    require_no_overlap(outputs, inputs)
    if not rows[0] or not rows[1]:
        return
    if library.provider is not None:
        numbers = {"tokens": rows[0], "num_qo_heads": rows[1], "num_kv_heads": rows[1], "sm_scale": sm_scale}
        numbers |= {"num_splits": parameters.num_splits, "scale_log2": parameters.scale_log2}
        arrays = {name.removeprefix("workspace."): array for name, array in {**inputs, **outputs}.items()}
        library.provider.launch(CheckedRequest(entry, device, numbers, arrays, dict, tuple(outputs)))
        return
    kernel = choose_variant(entry, device, forced=library.variant)
    _launch_merge(library, (kernel,), entry.head_dim, rows, parameters, tuple(outputs.values()))


def chosen_kernel(
    entry: Entry, library: KernelLibrary, tile_rows: int | None, layout: KvLayout, group: int
) -> KernelVariant:
    """The built-in kernel that a call launches, as the library's owner asked. Raises DeviceUnavailable."""
    return choose_variant(
        entry,
        library.device,
        tile_rows=tile_rows,
        page_size=layout.page_size,
        group=group,
        kv_format=layout.kv_format,
        forced=library.variant,
        replaced=None if library.kernels_directory is None else library.replaced_files,
    )


def begins_early(entry: Entry, library: KernelLibrary, layout: KvLayout, group: int) -> bool:
    """Whether ``enable_pdl`` changes how a call is launched: the built-in kernel that it takes can begin while the
    launch in front ends. Raises DeviceUnavailable."""
    if library.provider is not None or not entry.takes_pdl:
        return False
    return bool(chosen_kernel(entry, library, None, layout, group).max_cluster_blocks)


def _check(
    entry: Entry,
    library: KernelLibrary,
    q: DeviceArray,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    layer: int,
    out: DeviceArray,
    lse: DeviceArray | None,
    cta_tile_q: int | None,
) -> _Request:
    """What every attention entry checks, and its parameters so far."""
    head_dim = entry.head_dim
    device = require_type("library", library, KernelLibrary).device
    array = require_array(device, "q", q, BF16, (None, None, head_dim))
    bounds, arrays = require_plan(device, plan)
    shape = bounds.shape
    num_qo_heads, num_kv_heads = check_head_relation(array.shape[1], shape.num_kv_heads)
    GQA_GROUP.require(
        num_qo_heads <= MAX_GQA_GROUP * num_kv_heads,
        "q heads",
        f"{num_qo_heads} for {num_kv_heads} KV heads",
        f"at most {MAX_GQA_GROUP} a KV head",
    )
    checked_pool = require_type("pool", pool, PagedPool)
    data = require_array(device, "pool", checked_pool.data, BF16, (None,))
    geometry = check_pool(
        layout=checked_pool.layout,
        layer=layer,
        pool_elems=data.size,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        kv_formats=entry.kv_formats,
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
    if entry.one_token_each:
        check_one_token_each(bounds)
    outputs = {"out": require_array(device, "out", out, BF16, array.shape)}
    if lse is not None:
        outputs["lse"] = require_array(device, "lse", lse, FLOAT32, array.shape[:2])
    kernel = None
    if library.provider is None:
        group = num_qo_heads // num_kv_heads
        kernel = chosen_kernel(entry, library, bounds.cta_tile_q, geometry.layout, group)
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
        scale_log2=bounds.scale_log2,
    )
    inputs = {"q": array, "pool": data, **{f"plan.{name}": buffer for name, buffer in arrays.items()}}
    alone = kernel is not None and kernel.one_request_a_block
    reads = paged_reads(checked_pool, plan, one_request_a_block=alone)
    return _Request(library, entry, kernel, bounds, geometry.layout, parameters, inputs, outputs, reads)


def _check_workspace(
    entry: Entry,
    library: KernelLibrary,
    parameters: AttentionParameters,
    workspace: SplitWorkspace,
    num_splits: int,
    rows: tuple[int, int],
) -> dict[str, DeviceArray]:
    """The workspace's arrays for [tokens, heads] ``rows``, by the names that errors give them; fills the parameters."""
    splits = require_i32("num_splits", num_splits)
    NUM_SPLITS.require(1 <= splits <= MAX_SPLITS, "num_splits", splits, f"1..{MAX_SPLITS}")
    parameters.num_splits = splits
    found = {}
    given = require_type("workspace", workspace, SplitWorkspace).by_name()
    for name, array in given.items():
        shape = (*rows, splits, entry.head_dim) if name == "partial_out" else (*rows, splits)
        field = f"workspace.{name}"
        scratch = require_array(library.device, field, array, FLOAT32, (None,) * len(shape))
        needed = math.prod(shape)
        WORKSPACE.require(scratch.size >= needed, field, f"{scratch.size} elements", f">= {needed} for {list(shape)}")
        # Packed from the first element on, whatever extents it was allocated with.
        found[field] = scratch.view(shape)
        setattr(parameters, name, scratch.address)
    return found


def _launch(request: _Request, *, blocks: int, must_write: Sequence[str]) -> None:
    """Overlap is the last check; then the launch. No block, no launch: a plan whose requests have no new token."""
    require_no_overlap(request.outputs, request.inputs)
    if blocks == 0:
        return
    kernel, parameters = request.kernel, request.parameters
    if request.library.provider is not None:
        request.library.require_format(request.entry.name, request.layout.kv_format)
        request.library.provider.launch(_handed_on(request))
        return
    if kernel is None:
        raise RuntimeError("a request of the built-in kernels without a kernel")
    if kernel.max_cluster_blocks:
        launch_in_clusters(
            request.library,
            kernel,
            request.entry.merge_kernels,
            parameters,
            num_requests=blocks,
            pool=request.inputs["pool"],
            layout=request.layout,
            must_write=_written(request, must_write),
            paged_reads=request.paged_reads,
            overlap=request.overlap,
        )
        return
    arguments: tuple[AttentionParameters | Argument, ...] = (parameters,)
    if kernel.cluster_tiles or kernel.resident_tiles:
        arguments += kv_box_maps(request.inputs["pool"], parameters)
    if kernel.resident_tiles:
        parameters.num_splits = kernel.split_tiles if _may_split(kernel, request.bounds) else 0
        tokens = request.bounds.num_tokens
        arguments += (query_box_map(request.inputs["q"], parameters, tokens=tokens, rows=kernel.tile_rows),)
    launch(
        request.library,
        kernel.source,
        kernel.symbol,
        grid=_grid(request.library, kernel, blocks, parameters),
        block=(kernel.threads, 1, 1),
        arguments=arguments,
        cluster=(_cluster(kernel, parameters), 1, 1),
        dynamic_shared_bytes=kernel.shared_bytes,
        must_write=_written(request, must_write),
        overlap=bool(kernel.resident_tiles),
        paged_reads=(request.paged_reads,),
        arch_specific=bool(kernel.arch),
    )


def _grid(
    library: KernelLibrary, kernel: KernelVariant, tiles: int, parameters: AttentionParameters
) -> tuple[int, int, int]:
    """One block a tile (or request) and KV head along x, in whole clusters, and a split along y; or as many as stay."""
    heads = parameters.num_kv_heads
    cluster = _cluster(kernel, parameters)
    if kernel.resident_tiles:
        units = -(-tiles // kernel.resident_tiles) * heads * cluster
        return min(-(-units // cluster), library.device.limits.multiprocessors // cluster) * cluster, 1, 1
    return -(-tiles // cluster) * cluster * heads, parameters.num_splits, 1


def _cluster(kernel: KernelVariant, parameters: AttentionParameters) -> int:
    """Blocks of a cluster. Of blocks that stay, two share out a short request's keys where the plan has one."""
    if kernel.resident_tiles:
        return 2 if parameters.num_splits else 1
    return max(1, kernel.cluster_tiles)


def _may_split(kernel: KernelVariant, bounds: PlanBounds) -> bool:
    """False if no request of the plan is as short as the kernel splits keys for."""
    shape = bounds.shape
    tiles = -(-max(bounds.min_q_len, 1) * (shape.num_qo_heads // shape.num_kv_heads) // kernel.tile_rows)
    return tiles * shape.num_kv_heads <= kernel.split_tiles


def _launch_merge(
    library: KernelLibrary,
    kernels: Sequence[KernelVariant],
    head_dim: int,
    rows: tuple[int, int],
    parameters: AttentionParameters,
    must_write: Sequence[DeviceArray],
) -> None:
    kernel = kernels[0]
    launch(
        library,
        kernel.source,
        kernel.symbol,
        grid=(rows[0] * rows[1], head_dim // MERGE_COLUMNS, 1),
        block=(kernel.threads, 1, 1),
        arguments=(parameters,),
        must_write=must_write,
    )


def _handed_on(request: _Request) -> CheckedRequest:
    """The request as other kernels get it: rows are those of the plan's tokens, index arrays what is in use."""
    bounds, device = request.bounds, request.library.device
    numbers: dict[str, int | float] = numbers_of(request.parameters)
    numbers |= {"tokens": bounds.num_tokens, "requests": bounds.num_requests, "cta_tile_q": bounds.cta_tile_q}
    numbers["sm_scale"] = bounds.shape.sm_scale
    arrays = {name.rpartition(".")[2]: array for name, array in {**request.inputs, **request.outputs}.items()}
    for name in ("q", *RESULTS):
        if name in arrays:
            arrays[name] = arrays[name].view((bounds.num_tokens, *arrays[name].shape[1:]))
    outputs = tuple(name for name in RESULTS if name in arrays)
    return CheckedRequest(
        request.entry,
        device,
        numbers,
        arrays,
        lambda: plan_metadata(device, bounds, arrays),
        outputs,
        paged_reads=request.paged_reads,
    )


def _written(request: _Request, names: Sequence[str]) -> tuple[DeviceArray, ...]:
    """The rows of these outputs that a launch has to fill: those of the plan's tokens."""
    tokens = request.bounds.num_tokens
    return tuple(array.view((tokens, *array.shape[1:])) for name, array in request.outputs.items() if name in names)
