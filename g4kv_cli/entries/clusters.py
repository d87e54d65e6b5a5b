"""Decode in thread block clusters: how a call's splits become clusters, and the launches.

A cluster serves one request and KV head, and its blocks merge what they found through shared memory. More splits than a
cluster has blocks are blocks on their own, or of one count several clusters; they leave partial results in the
workspace, and the merge behind them is launched while they still run. How keys are shared out
follows from ``num_splits`` and the request alone, so a request's bits do not depend on its companions.
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
from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.model.kv_layout import KvLayout

TILE_KEYS = 16
"""Keys of one copy; a page is a multiple of it."""
TILE_HEADS = 8
"""Query heads of one; a KV head's group has one or two."""
WHOLE_CARD_SPLITS = 112
"""14 clusters of 8, for a request that has the card to itself: as many as fit beside each other on 132
multiprocessors, with one to spare."""
LONG_SPLIT_ELEMS = 2**18
"""Elements of K and V of a split from which on it pays to take more of them."""
MOST_SOON_MERGED = 64
"""Splits of a request up to which a merge takes little longer than one of fewer."""
WHOLE_CARD_COUNTS = (2, 3, 4, 6, 8, 16, 32, 64, WHOLE_CARD_SPLITS)
"""Of which suggested_splits then takes one."""
MAX_CLUSTER_BLOCKS = 8
"""What every device with clusters takes."""
BOX_COLUMNS = 64
"""Columns of a copy's rows in shared memory: 128 bytes, the span of the swizzle."""


def cluster_blocks(num_splits: int, most: int) -> int:
    """Blocks of each cluster for this many splits: all of them if a cluster can have so many, else one; of
    WHOLE_CARD_SPLITS as many as a cluster can have.

    Where several clusters a request do not all fit at once they are much slower than blocks alone: of 132
    multiprocessors, 15 clusters of 8 take 120. Where they fit, there is less to merge behind them: on an H200, 32768
    folded keys of 12b-global took 19.4 us in 14 clusters of 8 and 20.0 us in 128 blocks alone, split ones, which blocks
    alone merge sooner, 25.0 and 23.3 us (results/nvidia-h200/2026-11-30-fb1ee45/bench.json).
    """
    if num_splits == WHOLE_CARD_SPLITS and num_splits % most == 0:
        return most
    return num_splits if num_splits <= most else 1


def suggested_splits(
    device: Device,
    *,
    num_requests: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    visible_keys: int,
    k_dim: int | None = None,
) -> int:
    """``num_splits`` for decode in clusters, by rule; 1 is form (b). ``k_dim``: columns of a row of K in the pool,
    head_dim where none are given.

    A block a (request, KV head) where these take more than half the multiprocessors. Else about 5 blocks for every 9:
    that many already read at the memory's rate, and more have to be merged. One cluster is merged sooner than blocks
    alone, so it takes their place while a block would have fewer than 16 or 32 keys for each request and KV head.

    With more than 8 query heads a KV head a block computes about as long as it reads: long histories get as many blocks
    as start together, and where these leave a quarter of the multiprocessors over the longest get two for each of them,
    one after the other. Of split rows blocks alone, which take a tile at a time, are soon merged: short histories get
    one for each tile of keys instead of a cluster, and those with two tiles for each of twice as many get these, or
    four where that takes the place of a cluster or makes more than MOST_SOON_MERGED. On an H200, of 12b-global 512 keys
    took 5.5 us in 32 of them and 6.2 us in 16, 1024 keys of 4 requests 8.7 us in 32 each and 9.1 us in 16, and 8192
    keys of one request 11.3 us in 128 and 12.4 us in 64. Of split rows form (b) computes longer still where it has a
    multiprocessor to itself: it is left to more requests and KV heads than there are multiprocessors, and to short
    histories.

    In the record of an H200 that cluster_blocks names, the 136 shapes of 12b and 31b, with 128 to 131072 keys, took at
    most 2.9 % longer than with the best of the counts that bench tries.
    """
    units = max(1, num_requests * num_kv_heads)
    multiprocessors, tiles = device.limits.multiprocessors, max(1, -(-visible_keys // TILE_KEYS))
    computes = num_qo_heads > TILE_HEADS * num_kv_heads
    elems = visible_keys * (head_dim + (head_dim if k_dim is None else k_dim))
    if 2 * units > multiprocessors:
        lags = computes and units <= multiprocessors and k_dim in (None, head_dim)
        return 2 if lags and elems >= 2 * LONG_SPLIT_ELEMS else 1
    enough = multiprocessors * 5 // 9 // units
    if enough < 2 and not (computes and k_dim in (None, head_dim)) and elems < LONG_SPLIT_ELEMS:
        return 1
    few = max(2, enough)
    if few > MAX_CLUSTER_BLOCKS:
        few = _power_of_two(few)
        if computes and k_dim in (None, head_dim):
            few = min(few, _power_of_two(tiles))
            soon_merged = MAX_CLUSTER_BLOCKS < few <= MOST_SOON_MERGED // 2
            few *= 2 if tiles >= (4 if soon_merged else 8) * few else 1
        elif visible_keys < few * units * TILE_KEYS * (1 if computes else 2):
            few = MAX_CLUSTER_BLOCKS
    few = min(few, tiles)
    if not computes or elems < _power_of_two(few) * LONG_SPLIT_ELEMS:
        return few
    fitting = [count for count in WHOLE_CARD_COUNTS if count <= tiles and _fit_at_once(count, units, multiprocessors)]
    most, twice = max([few, *fitting]), _power_of_two(2 * multiprocessors // units)
    fills = twice > MAX_CLUSTER_BLOCKS and 10 * twice * units >= 18 * multiprocessors
    leaves_a_quarter = 4 * most * units < 3 * multiprocessors
    return twice if fills and leaves_a_quarter and elems >= twice * 8 * LONG_SPLIT_ELEMS else most


def _power_of_two(number: int) -> int:
    """The largest that is no larger."""
    return 1 << (number.bit_length() - 1)


def _fit_at_once(num_splits: int, units: int, multiprocessors: int) -> bool:
    """Whether the blocks all start together. Clusters of more than two leave multiprocessors over: of 132, 15 clusters
    of 8 take 120, 30 of 4 as many, and 21 of 6 take 126."""
    blocks, cluster = units * num_splits, cluster_blocks(num_splits, MAX_CLUSTER_BLOCKS)
    return blocks <= multiprocessors and (cluster <= 2 or blocks <= multiprocessors * 9 // 10)


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
    overlap: bool,
) -> None:
    """One launch, or with several clusters a request the clusters' and the merge of their partial results.

    ``parameters.num_splits`` are the call's splits; the workspace stands in the parameters if there are several. With
    ``overlap`` the first of them may begin before the launch in front has ended; q, and each request's newest key and
    value, are read after that, everything else before.
    """
    blocks = cluster_blocks(parameters.num_splits, kernel.max_cluster_blocks)
    if blocks == 1 and kernel.alone is not None:
        kernel = kernel.alone
    clusters = parameters.num_splits // blocks
    parameters.num_splits = clusters
    parameters.overlaps = overlap
    maps = kv_maps(pool, layout)
    most_requests = library.device.limits.max_grid[2] // clusters
    for requests, share in _shares(parameters, num_requests, most_requests, layout.head_dim):
        launch(
            library,
            kernel.source,
            kernel.symbol,
            grid=(blocks, parameters.num_kv_heads, requests * clusters),
            block=(kernel.threads, 1, 1),
            arguments=(share, *maps),
            dynamic_shared_bytes=kernel.alone_shared_bytes if blocks == 1 else kernel.shared_bytes,
            must_write=must_write if clusters == 1 and requests == num_requests else (),
            cluster=(blocks, 1, 1),
            overlap=overlap,
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


def kv_maps(pool: DeviceArray, layout: KvLayout) -> tuple[Argument, ...]:
    """The pool as the kernels' copies see it: a box is 16 slots of one K or V block and head, all its columns.

    Split, one map of both: [page][layer, K or V][kv head and column block][slot][64 columns], from the innermost on.
    Folded, whose rows of K are shorter, a map of K and one of V: [page][layer][kv head and column block][slot][64
    columns]. The cache fetches what a box row needs and no more: fetching its neighbour along took 6 % longer on an
    H200 from 268 MB of keys on.
    """
    if layout.kv_format == SPLIT:
        return (_kv_map(pool, layout, layout.head_dim, blocks=layout.num_layers * 2, stride=layout.kv_block_len),)
    values = pool.view((pool.size - layout.kv_block_len,), offset_elems=layout.kv_block_len)
    return tuple(
        _kv_map(array, layout, columns, blocks=layout.num_layers, stride=layout.layer_stride)
        for array, columns in ((pool, layout.k_dim), (values, layout.head_dim))
    )


def _kv_map(array: DeviceArray, layout: KvLayout, columns: int, *, blocks: int, stride: int) -> Argument:
    """A map of so many blocks a page, ``stride`` elements apart, of rows of so many columns."""
    bytes_each = array.dtype.itemsize
    head_columns = columns // BOX_COLUMNS
    shape = TensorMapShape(
        extents=(
            BOX_COLUMNS,
            layout.page_size,
            layout.num_kv_heads * head_columns,
            blocks,
            -(-array.size // layout.page_stride),
        ),
        strides_bytes=(
            layout.num_kv_heads * columns * bytes_each,
            BOX_COLUMNS * bytes_each,
            stride * bytes_each,
            layout.page_stride * bytes_each,
        ),
        box=(BOX_COLUMNS, TILE_KEYS, head_columns, 1, 1),
        l2_bytes=BOX_COLUMNS * bytes_each,
    )
    return array.device.tensor_map(array, shape)
