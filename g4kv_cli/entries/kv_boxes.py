"""Tensor maps for kernels that read a layer's pages, and queries, by bulk tensor copies."""

from __future__ import annotations

from g4kv_cli.device.arguments import Argument, TensorMapShape
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.attention_parameters import AttentionParameters

BOX_SLOTS = 16
"""Slots of a page that one copy moves: a page size has to be a multiple."""
BLOCK_COLUMNS = 64
"""Columns of a box: 128 bytes, the longest row of a swizzle."""
VALUE_BOX_COLUMN_BLOCKS = 4


def query_box_map(q: DeviceArray, parameters: AttentionParameters, *, tokens: int, rows: int) -> Argument:
    """Map of the queries of the plan's tokens, [column block][token][query head][64 columns].

    A box is a tile of ``rows`` packed rows of a KV head, whole: the tokens of which the group's heads make so many.
    A group that does not divide them has no such box, and gets a map of single rows, for nobody. Raises ContractError.
    """
    _, heads, head_dim = q.shape
    group = heads // parameters.num_kv_heads
    column_blocks, itemsize = head_dim // BLOCK_COLUMNS, q.dtype.itemsize
    # q[token][head][column block][column]: strides of head, token and column block
    strides = (head_dim * itemsize, heads * head_dim * itemsize, BLOCK_COLUMNS * itemsize)
    box = (BLOCK_COLUMNS, group, rows // group, column_blocks) if rows % group == 0 else (BLOCK_COLUMNS, 1, 1, 1)
    return q.device.tensor_map(q, TensorMapShape((BLOCK_COLUMNS, heads, tokens, column_blocks), strides, box))


def kv_box_maps(pool: DeviceArray, parameters: AttentionParameters) -> tuple[Argument, Argument]:
    """Maps of K and of V of the parameters' layer, [page][KV head, column block][slot][64 columns].

    A box of K is BOX_SLOTS slots of one column block, and so is one of V in the folded format, where V's columns are
    K's too; of split rows a box of V has four column blocks. Each map starts at its block of the layer, so that page
    offsets beyond 32 bits are the copy engine's business. Raises ContractError.
    """
    layout = parameters.layout
    itemsize = pool.dtype.itemsize

    def box_map(first: int, columns: int, box_column_blocks: int) -> Argument:
        column_blocks, pages = columns // BLOCK_COLUMNS, pool.size // layout.page_stride
        extents = (BLOCK_COLUMNS, layout.page_size, layout.num_kv_heads * column_blocks, pages)
        # pool[page][layer][K, V][slot][kv_head][column block][column]: strides of slot, column block and page
        strides = (
            layout.num_kv_heads * columns * itemsize,
            BLOCK_COLUMNS * itemsize,
            layout.page_stride * itemsize,
        )
        box = (BLOCK_COLUMNS, BOX_SLOTS, box_column_blocks, 1)
        return pool.device.tensor_map(pool.view((1,), offset_elems=first), TensorMapShape(extents, strides, box))

    first_k = parameters.layer * layout.layer_stride
    value_blocks = VALUE_BOX_COLUMN_BLOCKS if layout.k_dim == layout.head_dim else 1
    return (
        box_map(first_k, layout.k_dim, 1),
        box_map(first_k + layout.kv_block_len, layout.head_dim, value_blocks),
    )
