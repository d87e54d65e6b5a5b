"""Decode in thread block clusters: how a call's splits become clusters, and the launches.

A cluster serves one request and KV head, or with more splits than a cluster has blocks, one share of its keys. Its
blocks merge what they found through shared memory; only clusters that share a request need the workspace and a merge
behind them, which is launched while they still run. How keys are shared out follows from ``num_splits`` and the request
alone, so a request's bits do not depend on its companions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.device.interface import Device, DeviceArray, PagedReads
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.entry import KernelVariant
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.workspace import MERGE_COLUMNS
from g4kv_cli.model.kv_layout import KvLayout

TILE_KEYS = 16
"""Keys of one copy; a page is a multiple of it."""
BOX_COLUMNS = 64
"""Columns of a copy's rows in shared memory: 128 bytes, the span of the swizzle."""


def cluster_blocks(num_splits: int, most: int) -> int:
    """Blocks of each cluster for this many splits: all of them, else their largest divisor that a cluster can have."""
    return next(blocks for blocks in range(min(num_splits, most), 0, -1) if num_splits % blocks == 0)


def suggested_splits(device: Device, *, num_requests: int, num_kv_heads: int, visible_keys: int) -> int:
    """``num_splits`` for decode in clusters, by rule: a power of two; 1 is form (b).

    About one block for every other multiprocessor: that many already read at the memory's rate, and more have to be
    merged. Two where half the multiprocessors have a request and KV head already; a tile of keys for each at least.
    By measurements on an H200 at 128 to 32768 keys, where it is within a few percent of the best.
    """
    units = max(1, num_requests * num_kv_heads)
    half = max(1, device.limits.multiprocessors // 2)
    if units > half:
        return 1
    most = max(1, min(max(2, half // units), -(-visible_keys // TILE_KEYS)))
    return 1 << (most.bit_length() - 1)


def launch_in_clusters(
    library: KernelLibrary,
    kernel: KernelVariant,
    merge_kernels: Sequence[KernelVariant],
    parameters: AttentionParameters,
    *,
    num_requests: int,
    pool: DeviceArray,
    layout: KvLayout,
    must_write: Sequence[DeviceArray],
    paged_reads: PagedReads,
) -> None:
    """One launch, or with several clusters a request the clusters' and the merge of their partial results.

    ``parameters.num_splits`` are the call's splits; the workspace stands in the parameters if there are several.
    """
    blocks = cluster_blocks(parameters.num_splits, kernel.max_cluster_blocks)
    clusters = parameters.num_splits // blocks
    parameters.num_splits = clusters
    pages = kv_map(pool, layout)
    most_requests = library.device.limits.max_grid[2] // clusters
    for requests, share in _shares(parameters, num_requests, most_requests, layout.head_dim):
        launch(
            library,
            kernel.source,
            kernel.symbol,
            grid=(blocks, parameters.num_kv_heads, requests * clusters),
            block=(kernel.threads, 1, 1),
            arguments=(share, pages),
            dynamic_shared_bytes=kernel.alone_shared_bytes if blocks == 1 else kernel.shared_bytes,
            must_write=must_write if clusters == 1 and requests == num_requests else (),
            cluster=(blocks, 1, 1),
            paged_reads=(paged_reads,),
            arch_specific=bool(kernel.arch),
        )
    if clusters > 1:
        merge = next(one for one in merge_kernels if one.arch == kernel.arch)
        launch(
            library,
            merge.source,
            merge.symbol,
            grid=(num_requests * parameters.num_qo_heads, layout.head_dim // MERGE_COLUMNS, 1),
            block=(merge.threads, 1, 1),
            arguments=(parameters,),
            must_write=must_write,
            overlap=True,
            arch_specific=bool(merge.arch),
        )


def _shares(
    parameters: AttentionParameters, num_requests: int, most: int, head_dim: int
) -> Iterator[tuple[int, AttentionParameters]]:
    """The requests in shares that a grid's third axis holds: how many, and parameters that begin at the first."""
    rows = parameters.num_qo_heads
    # Bytes from one request to the next of each array that has a place for every request.
    strides = {
        "q": rows * head_dim * 2,
        "out": rows * head_dim * 2,
        "lse": rows * 4,
        "page_indptr": 4,
        "page_origins": 4,
        "kv_lens": 4,
        "partial_out": rows * parameters.num_splits * head_dim * 4,
        "partial_max": rows * parameters.num_splits * 4,
        "partial_sum": rows * parameters.num_splits * 4,
    }
    for first in range(0, num_requests, most):
        share = AttentionParameters.from_buffer_copy(parameters)
        for name, stride in strides.items():
            address = getattr(parameters, name)
            setattr(share, name, address + first * stride if address else 0)
        yield min(most, num_requests - first), share


def kv_map(pool: DeviceArray, layout: KvLayout) -> Argument:
    """The pool as the kernels' copies see it: a box is 16 slots of one K or V block and head, all its columns.

    [page][layer, K or V][kv head and column block][slot][64 columns], from the innermost on.
    """
    bytes_each = pool.dtype.itemsize
    head_columns = layout.head_dim // BOX_COLUMNS
    shape = TensorMapShape(
        extents=(
            BOX_COLUMNS,
            layout.page_size,
            layout.num_kv_heads * head_columns,
            layout.num_layers * 2,
            pool.size // layout.page_stride,
        ),
        strides_bytes=(
            layout.num_kv_heads * layout.head_dim * bytes_each,
            BOX_COLUMNS * bytes_each,
            layout.kv_block_len * bytes_each,
            layout.page_stride * bytes_each,
        ),
        box=(BOX_COLUMNS, TILE_KEYS, head_columns, 1, 1),
    )
    return pool.device.tensor_map(pool, shape)
