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

On sm_90 forms (b) and (c) run in thread block clusters (entries/clusters.py), and prefill's tiles of 64 rows on
warpgroups, where the pages allow it (a multiple of 16 tokens), elsewhere on the portable kernels;
``KernelLibrary(..., variant="portable")`` takes these everywhere, and ``variant="sm_90a"`` refuses what they would have
to serve. Either way the bits are the form's own, and differ between the two. At head_dim 256 the keys of a short
request are shared out between the two blocks of a cluster and merged in a fixed order; the request alone decides
whether and where. These blocks start while the launch before them ends, and wait for that before they read anything.
With ``enable_pdl`` (programmatic dependent launch) decode's blocks do so too, and read before they wait: of what a call
reads, the launch in front, and whatever has not ended when that lets the next begin, may write q and the newest key and
value of each request, nothing else. Prep's decode forms write no more and begin when all before them has ended. The
bits are the same; the portable kernels, which cannot, begin when the launch in front has ended.
The emulated device runs them if they are named; of prefill at head_dim 512 the form without clusters.

Everything is checked on the host before the launch (ContractError; a card without the shared memory for a tile is
told so by DeviceUnavailable). The kernels have no bounds checks: the plan's recorded bounds are the only ones.
Each entry's signature is that of its form in entries/attention_request.py, without the row.
"""

from __future__ import annotations

from collections.abc import Callable

from g4kv_cli.entries.attention_request import MAX_SPLITS, decode, decode_split, merge, prefill
from g4kv_cli.entries.public import public, public_row
from g4kv_cli.entries.workspace import SplitWorkspace

__all__ = [
    "MAX_SPLITS",
    "SplitWorkspace",
    "batch_decode_paged_hd512_into",
    "batch_decode_paged_window_hd256_into",
    "batch_decode_split_paged_hd512_into",
    "batch_decode_split_paged_window_hd256_into",
    "batch_prefill_paged_hd512_into",
    "batch_prefill_paged_window_hd256_into",
    "merge_splits_hd256_into",
    "merge_splits_hd512_into",
]

batch_prefill_paged_window_hd256_into = public(prefill, "batch_prefill_paged_window_hd256_into")
batch_prefill_paged_hd512_into = public(prefill, "batch_prefill_paged_hd512_into")
batch_decode_paged_window_hd256_into = public(decode, "batch_decode_paged_window_hd256_into")
batch_decode_paged_hd512_into = public(decode, "batch_decode_paged_hd512_into")
batch_decode_split_paged_window_hd256_into = public(decode_split, "batch_decode_split_paged_window_hd256_into")
batch_decode_split_paged_hd512_into = public(decode_split, "batch_decode_split_paged_hd512_into")
merge_splits_hd256_into = public(merge, "merge_splits_hd256_into")
merge_splits_hd512_into = public(merge, "merge_splits_hd512_into")


def __getattr__(name: str) -> Callable[..., None]:
    """Rows of the table that stand above by no name of their own."""
    return public_row(__name__, ("attention", "merge"), name)
