"""What the prep entries share: the checks of a request on the host, and the shape of its one launch.

Everything is checked before the launch, in the order of the rules (model/rules.py): rows, weights and tables,
positions, the pool, the page metadata, and last that nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import DeviceArray, HostArray
from g4kv_cli.entries.arguments import (
    BF16,
    INT32,
    Int32Array,
    PagedBatch,
    PagedPool,
    PageRow,
    RopeTables,
    require_array,
    require_host_copy,
    require_no_overlap,
)
from g4kv_cli.entries.entry import Entry, choose_variant
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan, plan_tiles, require_plan
from g4kv_cli.entries.prep_parameters import PrepParameters
from g4kv_cli.entries.provider import CheckedRequest, host_copy, numbers_of, plan_metadata
from g4kv_cli.model import rules
from g4kv_cli.model.checked import CheckedGeometry, check_pool, finite_f32, require_i32, require_sequence, require_type
from g4kv_cli.model.kv_format import SPLIT, KvFormat
from g4kv_cli.model.page_rows import PageRows, check_page_rows
from g4kv_cli.model.plan_use import check_plan_use
from g4kv_cli.model.prefill_plan import PlanBounds
from g4kv_cli.model.rules import rule

EPS = rule("eps", "must be finite in float32 and not negative")
ROTARY_DIM = rule("rotary_dim", "must be even, at least 2 and at most head_dim")
FOLDED_ROTATION = rule("folded_rotation", "must be head_dim for folded rows: pairs (d, d + head_dim / 2)")
ROPE_TABLES_APART = rule("rope_tables_apart", "lies in the other table's memory: sines are no cosines")
ROPE_TABLE = rule("rope_table", "is shorter than cos_max_pos rows of rotary_dim")
PAGE_INDPTR = rule("page_indptr", "must start at 0, never fall, and end at the number of page indices")

WARP_THREADS = 32
WIDE_LAUNCH_ELEMS = 2**21
"""From this many input elements on a warp serves several head rows instead of one: fewer loads of tables and weights,
where there are warps enough. Measured on an H200: below it one row a warp is faster, above it four or eight."""


@dataclass(slots=True)
class PrepRequest:
    """One call while it is being checked: the arrays by name and the parameter struct as it fills."""

    library: KernelLibrary
    entry: Entry
    tokens: int
    num_qo_heads: int
    num_kv_heads: int
    cos_max_pos: int
    inputs: dict[str, DeviceArray]
    outputs: dict[str, DeviceArray]
    parameters: PrepParameters
    bounds: PlanBounds | None = None
    padding_page: int | None = None
    kv_format: KvFormat = SPLIT


def first_wide_token_count(entry: Entry, num_qo_heads: int, num_kv_heads: int) -> int:
    """The fewest tokens for which the entry launches the variant with several head rows a warp."""
    return -(-WIDE_LAUNCH_ELEMS // ((num_qo_heads + entry.kv_bands * num_kv_heads) * entry.head_dim))


def check_rows(
    library: KernelLibrary,
    entry: Entry,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray | None,
    q_norm_weight: DeviceArray,
    k_norm_weight: DeviceArray,
    rope: RopeTables,
    rotary_dim: int,
    q_out: DeviceArray,
    eps: float,
) -> PrepRequest:
    """What every prep entry shares: rows, weights, tables."""
    device, head_dim = require_type("library", library, KernelLibrary).device, entry.head_dim
    require_array(device, "q", q, BF16, (None, None, head_dim))
    tokens = require_i32("q tokens", q.shape[0])
    num_qo_heads = require_i32("q heads", q.shape[1])
    require_array(device, "k", k, BF16, (tokens, None, head_dim))
    num_kv_heads = require_i32("k heads", k.shape[1])
    rules.EXTENT_POSITIVE.require(num_kv_heads >= 1, "k heads", num_kv_heads, ">= 1")
    rules.Q_HEADS_MULTIPLE.require(
        num_qo_heads >= 1 and num_qo_heads % num_kv_heads == 0,
        "q heads",
        num_qo_heads,
        f"a positive multiple of {num_kv_heads}",
    )
    inputs = {"q": q, "k": k, "q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
    if not entry.has_v_input and v is not None:
        raise TypeError(f"{entry.name} takes no v: V is made of the raw K")
    if entry.has_v_input:
        inputs["v"] = require_array(device, "v", v, BF16, (tokens, num_kv_heads, head_dim))
    require_array(device, "q_norm_weight", q_norm_weight, BF16, (head_dim,))
    require_array(device, "k_norm_weight", k_norm_weight, BF16, (head_dim,))

    rotary = require_i32("rotary_dim", rotary_dim)
    ROTARY_DIM.require(2 <= rotary <= head_dim and rotary % 2 == 0, "rotary_dim", rotary_dim, f"even, 2..{head_dim}")
    require_type("rope", rope, RopeTables)
    require_array(device, "rope.cos", rope.cos, BF16, (None, rotary))
    require_array(device, "rope.sin", rope.sin, BF16, (None, rotary))
    begin, end, length = rope.cos.address, rope.sin.address, min(rope.cos.nbytes, rope.sin.nbytes)
    apart = not length or end >= begin + rope.cos.nbytes or begin >= end + rope.sin.nbytes
    ROPE_TABLES_APART.require(apart, "rope.sin", "memory of rope.cos", "memory of its own")
    cos_max_pos = require_i32("rope.cos_max_pos", rope.cos.shape[0] if rope.cos_max_pos is None else rope.cos_max_pos)
    rules.EXTENT_POSITIVE.require(cos_max_pos >= 1, "rope.cos_max_pos", cos_max_pos, ">= 1")
    for name, table in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        ROPE_TABLE.require(table.shape[0] >= cos_max_pos, name, f"{table.shape[0]} rows", f">= {cos_max_pos}")
        inputs[name] = table

    require_array(device, "q_out", q_out, BF16, (tokens, num_qo_heads, head_dim))
    checked_eps = finite_f32(eps)
    EPS.require(checked_eps is not None and checked_eps >= 0, "eps", eps, "finite, >= 0")
    parameters = PrepParameters(
        q=q.address,
        k=k.address,
        v=v.address if v is not None else 0,
        q_weight=q_norm_weight.address,
        k_weight=k_norm_weight.address,
        cos=rope.cos.address,
        sin=rope.sin.address,
        q_out=q_out.address,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        rotary_dim=rotary,
        cos_max_pos=cos_max_pos,
        eps=checked_eps,
    )
    return PrepRequest(
        library, entry, tokens, num_qo_heads, num_kv_heads, cos_max_pos, inputs, {"q_out": q_out}, parameters
    )


def check_start(request: PrepRequest, start_pos: int) -> int:
    start = require_i32("start_pos", start_pos)
    rules.START_POS.require(start >= 0, "start_pos", start, ">= 0")
    rules.POSITION_RANGE.require(
        start + request.tokens <= request.cos_max_pos,
        "start_pos",
        f"{start} + {request.tokens} tokens",
        f"<= {request.cos_max_pos}",
    )
    request.parameters.start_pos = start
    return start


def _check_pool(request: PrepRequest, pool: PagedPool, layer: int) -> CheckedGeometry:
    require_type("pool", pool, PagedPool)
    data = require_array(request.library.device, "pool", pool.data, BF16, (None,))
    checked = check_pool(
        layout=pool.layout,
        layer=layer,
        pool_elems=data.size,
        head_dim=request.entry.head_dim,
        num_kv_heads=request.num_kv_heads,
        kv_formats=request.entry.kv_formats,
    )
    request.kv_format = checked.layout.kv_format
    rotary_dim = request.parameters.rotary_dim
    FOLDED_ROTATION.require(
        request.kv_format == SPLIT or rotary_dim == request.entry.head_dim,
        "rotary_dim",
        rotary_dim,
        request.entry.head_dim,
    )
    request.outputs["pool"] = data
    parameters = request.parameters
    parameters.pool = data.address
    parameters.layer = checked.layer
    parameters.num_pages = checked.num_pages
    parameters.layout = checked.layout.parameters()
    return checked


def launch_paged_prefill(
    request: PrepRequest, start_pos: int, pool: PagedPool, layer: int, page_row: PageRow, page_origin: int
) -> None:
    start = check_start(request, start_pos)
    checked = _check_pool(request, pool, layer)
    page_size = checked.layout.page_size
    require_type("page_row", page_row, PageRow)
    indices = require_array(request.library.device, "page_row", page_row.indices, INT32, (None,))
    row_pages = require_i32("page_row length", indices.shape[0])
    origin = require_i32("page_origin", page_origin)
    first_page = start // page_size
    rules.PAGE_ORIGIN.require(0 <= origin <= first_page, "page_origin", origin, f"0..{first_page}")
    if request.tokens:
        needed = (start + request.tokens - 1) // page_size - origin + 1
        rules.PAGE_COVERAGE.require(row_pages >= needed, "page_row", f"{row_pages} pages", f">= {needed}")
        if page_row.host is not None:
            ids = require_host_copy("page_row.host", page_row.host, indices)
            _require_page_ids("page_row", ids, np.arange(first_page - origin, needed), checked.num_pages)
            end = start + request.tokens
            check_page_rows(
                PageRows(ids, *(np.array(values) for values in ([0, ids.size], [origin], [start], [end]))),
                page_size=page_size,
                num_pages=checked.num_pages,
                padding_page=None,
                name_of=lambda _: "page_row",
            )
    request.inputs["page_row"] = indices
    request.parameters.page_indices = indices.address
    request.parameters.page_row_len = row_pages
    request.parameters.page_origin = origin
    launch_checked(request, ())


def launch_paged_decode(request: PrepRequest, batch: PagedBatch, pool: PagedPool, layer: int) -> None:
    device, tokens, parameters = request.library.device, request.tokens, request.parameters
    checked = _check_pool(request, pool, layer)
    require_type("batch", batch, PagedBatch)
    arrays = {
        "positions": require_array(device, "positions", batch.positions, INT32, (tokens,)),
        "page_indices": require_array(device, "page_indices", batch.page_indices, INT32, (None,)),
        "page_indptr": require_array(device, "page_indptr", batch.page_indptr, INT32, (tokens + 1,)),
        "page_origins": require_array(device, "page_origins", batch.page_origins, INT32, (tokens,)),
    }
    parameters.page_row_len = require_i32("page_indices length", batch.page_indices.shape[0])
    parameters.num_requests = tokens
    padding: int | None = None
    if batch.padding_page is not None:
        padding = require_i32("padding_page", batch.padding_page)
        rules.PAGE_ID_RANGE.require(
            0 <= padding < checked.num_pages, "padding_page", padding, f"0..{checked.num_pages - 1}"
        )
    if batch.host is not None:
        held = require_sequence("batch.host", batch.host)
        rules.HOST_COPY.require(len(held) == len(arrays), "batch.host", f"{len(held)} arrays", len(arrays))
        copies = [
            require_host_copy(f"batch.host[{index}]", host, array)
            for index, (host, array) in enumerate(zip(held, arrays.values(), strict=True))
        ]
        _check_decode_metadata(request, copies, checked, padding)
    for name, array in arrays.items():
        request.inputs[name] = array
        setattr(parameters, name, array.address)
    request.padding_page = padding
    launch_checked(request, _shared_memory(pool, checked, padding))


def launch_paged_batch_prefill(
    request: PrepRequest, plan: PrefillPagedPlan, pool: PagedPool, layer: int, cta_tile_q: int | None
) -> None:
    device, parameters = request.library.device, request.parameters
    bounds, arrays = require_plan(device, plan)
    tile = None if cta_tile_q is None else require_i32("cta_tile_q", cta_tile_q)
    checked = _check_pool(request, pool, layer)
    check_plan_use(
        bounds,
        head_dim=request.entry.head_dim,
        num_qo_heads=request.num_qo_heads,
        num_kv_heads=request.num_kv_heads,
        rows=request.tokens,
        geometry=checked,
        tiles=plan_tiles(device, bounds.shape),
        max_positions=request.cos_max_pos,
        cta_tile_q=tile,
    )
    for name in ("page_indices", "positions", "token_requests", "page_indptr", "page_origins"):
        setattr(parameters, name, arrays[name].address)
    request.inputs |= {f"plan.{name}": array for name, array in arrays.items()}
    # Capacities, not what is in use: a captured launch has to stay right for every later update of the plan. The
    # unused tails hold -1 and empty rows, on which the kernel traps.
    parameters.page_row_len = plan.capacity.max_pages
    parameters.num_requests = plan.capacity.max_requests
    request.tokens, request.bounds = bounds.num_tokens, bounds
    request.padding_page = bounds.padding_page
    launch_checked(request, _shared_memory(pool, checked, bounds.padding_page))


def _shared_memory(pool: PagedPool, checked: CheckedGeometry, padding_page: int | None) -> tuple[DeviceArray, ...]:
    """What several tokens may write: the padding page, where there is one."""
    stride = checked.layout.page_stride
    # pool[page][..]
    return () if padding_page is None else (pool.data.view((stride,), offset_elems=padding_page * stride),)


def _check_decode_metadata(
    request: PrepRequest, copies: Sequence[Int32Array], checked: CheckedGeometry, padding_page: int | None
) -> None:
    """The metadata as the host knows it. Vectorised: a batch costs microseconds, not a loop over tokens."""
    positions, page_indices, page_indptr, page_origins = copies
    indptr_holds = (
        page_indptr[0] == 0 and bool(np.all(np.diff(page_indptr) >= 0)) and page_indptr[-1] == page_indices.size
    )
    PAGE_INDPTR.require(indptr_holds, "page_indptr", _short(page_indptr), f"0..{page_indices.size}, rising")
    if request.tokens == 0:
        return
    token = int(np.argmax((positions < 0) | (positions >= request.cos_max_pos)))
    position = int(positions[token])
    rules.POSITION_RANGE.require(
        0 <= position < request.cos_max_pos, f"positions[{token}]", position, f"0..{request.cos_max_pos - 1}"
    )
    logical_pages = positions // checked.layout.page_size
    token = int(np.argmax((page_origins < 0) | (page_origins > logical_pages)))
    origin, last = int(page_origins[token]), int(logical_pages[token])
    rules.PAGE_ORIGIN.require(0 <= origin <= last, f"page_origins[{token}]", origin, f"0..{last}")
    row_pages, needed = np.diff(page_indptr), logical_pages - page_origins + 1
    token = int(np.argmax(row_pages < needed))
    rules.PAGE_COVERAGE.require(
        row_pages[token] >= needed[token],
        f"page_indices of token {token}",
        f"{row_pages[token]} pages",
        f">= {needed[token]}",
    )
    used = page_indptr[:-1] + logical_pages - page_origins
    _require_page_ids("page_indices", page_indices, used, checked.num_pages)
    check_page_rows(
        PageRows(page_indices, page_indptr, page_origins, positions, positions + 1),
        page_size=checked.layout.page_size,
        num_pages=checked.num_pages,
        padding_page=padding_page,
        name_of=lambda token: f"page_indices of token {token}",
    )


def _require_page_ids(field: str, ids: Int32Array, used: npt.NDArray[np.integer], num_pages: int) -> None:
    """The ids at the indices ``used`` exist in the pool; entries that the call does not use may hold anything."""
    page_ids = ids[used]
    worst = int(np.argmax((page_ids < 0) | (page_ids >= num_pages)))
    index, page = int(used[worst]), int(page_ids[worst])
    rules.PAGE_ID_RANGE.require(0 <= page < num_pages, f"{field}[{index}]", page, f"0..{num_pages - 1}")


def _short(values: Int32Array) -> str:
    listed = ", ".join(map(str, values[:8].tolist()))
    return f"[{listed}, ...]" if values.size > 8 else f"[{listed}]"


def launch_checked(request: PrepRequest, may_collide: tuple[DeviceArray, ...]) -> None:
    """Overlap is the last check; then the shape of the launch, and the launch."""
    require_no_overlap(request.outputs, request.inputs)
    if request.tokens == 0:
        return
    if request.library.provider is not None:
        request.library.require_format(request.entry.name, request.kv_format)
        request.library.provider.launch(_handed_on(request))
        return
    entry, num_qo_heads, num_kv_heads = request.entry, request.num_qo_heads, request.num_kv_heads
    wide = request.tokens >= first_wide_token_count(entry, num_qo_heads, num_kv_heads)
    few, many = sorted({kernel.rows_per_warp for kernel in entry.kernels})
    rows = many if wide else few
    kernel = choose_variant(entry, request.library.device, rows_per_warp=rows, kv_format=request.kv_format)
    groups = -(-num_qo_heads // rows) + entry.kv_bands * -(-num_kv_heads // rows)
    blocks = -(-groups // (kernel.threads // WARP_THREADS))
    warps = -(-groups // blocks)  # the same in every block of a token, but for the last
    launch(
        request.library,
        kernel.source,
        kernel.symbol,
        grid=(request.tokens, blocks, 1),
        block=(WARP_THREADS * warps, 1, 1),
        arguments=(request.parameters,),
        must_write=[
            array.view((request.tokens, *array.shape[1:])) for name, array in request.outputs.items() if name != "pool"
        ],
        may_collide=may_collide,
    )


def _handed_on(request: PrepRequest) -> CheckedRequest:
    """The request as other kernels get it: rows are those of its tokens, index arrays what is in use."""
    tokens, device = request.tokens, request.library.device
    arrays = {name.rpartition(".")[2]: array for name, array in {**request.inputs, **request.outputs}.items()}
    for name in ("q", "k", "v", "q_out", "k_out"):
        if name in arrays:
            arrays[name] = arrays[name].view((tokens, *arrays[name].shape[1:]))
    outputs = tuple(name for name in ("q_out", "k_out") if name in arrays)

    def metadata() -> dict[str, HostArray]:
        if request.bounds is not None:
            return plan_metadata(device, request.bounds, arrays)
        names = ("page_row", "positions", "page_indices", "page_indptr", "page_origins")
        return {name: host_copy(device, arrays[name]) for name in names if name in arrays}

    parameters = request.parameters
    packed = type(parameters).from_buffer_copy(request.library.pack(parameters))
    numbers = {**numbers_of(packed), "tokens": tokens, "requests": tokens}
    if request.bounds is not None:
        numbers["requests"] = request.bounds.num_requests
    return CheckedRequest(request.entry, device, numbers, arrays, metadata, outputs, request.padding_page)
