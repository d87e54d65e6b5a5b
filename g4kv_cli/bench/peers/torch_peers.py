"""torch's own attention. Its keys are contiguous, [batch][KV head][key][dim], which spares it the page table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional

from g4kv_cli.bench.attention_problem import SM_SCALE, AttentionProblem
from g4kv_cli.bench.peers.torch_runnable import (
    TorchRunnable,
    place_of,
    require_memory,
    stream_of,
    tensor_of,
    torch_attention,
)
from g4kv_cli.entries.provider import NotCovered

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def contiguous_keys(problem: AttentionProblem, device: CudaDevice) -> list[tuple[Any, Any]]:
    """K and V of the keys that a decode query (or a chunk) can see, of every pool: [batch, KV heads, keys, dim]."""
    shape = problem.shape
    each = 2 * shape.batch * shape.visible_keys * shape.num_kv_heads * shape.head_dim * 2
    require_memory(device, (len(problem.pools) + 1) * each, "contiguous keys")
    first = shape.kv_len - shape.visible_keys - problem.origin * shape.page_size
    pages = torch.as_tensor(problem.pages.astype("int64"), device=place_of(device))
    found = []
    with torch.cuda.stream(stream_of(device)):
        for pool in problem.pools:
            # [page][K, V][slot][head][dim], one layer
            tiles = tensor_of(pool.data, device).view(-1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
            both = []
            for is_v in (0, 1):
                rows = tiles[:, is_v][pages].flatten(1, 2)[:, first : first + shape.visible_keys]
                both.append(rows.transpose(1, 2).contiguous())
            found.append((both[0], both[1]))
        device.synchronize()
    return found


def make_sdpa(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """Decode: the query heads of a KV head as rows of one head, no mask. Prefill: only where plain causal is right."""
    shape, keys = problem.shape, None
    if shape.kind == "prefill":
        windowed = problem.geometry.window is not None and problem.geometry.window < shape.kv_len
        if shape.kv_len != shape.tokens or windowed:
            raise NotCovered("SDPA needs a dense mask for a window or for history: torch-flex has them")
    keys = contiguous_keys(problem, device)
    q = tensor_of(problem.q, device)
    group = problem.geometry.gqa_group
    if shape.kind == "decode":
        rows = q.view(shape.batch, shape.num_kv_heads, group, shape.head_dim)

        def decode(pool: int) -> Any:
            return functional.scaled_dot_product_attention(rows, *keys[pool], scale=SM_SCALE)

        return torch_attention(configuration, problem, device, decode)
    queries = q.view(1, shape.tokens, shape.num_qo_heads, shape.head_dim).transpose(1, 2)

    def prefill(pool: int) -> Any:
        out = functional.scaled_dot_product_attention(
            queries, *keys[pool], is_causal=True, scale=SM_SCALE, enable_gqa=group > 1
        )
        return out.transpose(1, 2)

    return torch_attention(configuration, problem, device, prefill)


def make_flex(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """``flex_attention`` through torch.compile, for this shape alone; blocks outside of the window are left out."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    shape, window = problem.shape, problem.geometry.window or problem.shape.kv_len
    ahead = shape.visible_keys - shape.tokens

    def is_seen(_batch: Any, _head: Any, token: Any, key: Any) -> Any:
        behind = token + ahead - key
        return (behind >= 0) & (behind < window)

    torch.compiler.reset()  # dynamo would give up on the ninth shape
    keys = contiguous_keys(problem, device)
    mask = flex.create_block_mask(is_seen, None, None, shape.tokens, shape.visible_keys, device=place_of(device))
    device.synchronize_context("make a block mask")
    q = tensor_of(problem.q, device)
    queries = q.view(1, shape.tokens, shape.num_qo_heads, shape.head_dim).transpose(1, 2)
    attend = torch.compile(flex.flex_attention, dynamic=False)

    def run(pool: int) -> Any:
        found = attend(queries, *keys[pool], block_mask=mask, scale=SM_SCALE, enable_gqa=problem.geometry.gqa_group > 1)
        return found.transpose(1, 2)

    return torch_attention(configuration, problem, device, run)


def make_bmm(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """Scores in float32, a softmax, weights in bf16: three kernels that a library runs well."""
    shape = problem.shape
    keys = contiguous_keys(problem, device)
    flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in keys]
    rows = tensor_of(problem.q, device).view(-1, problem.geometry.gqa_group, shape.head_dim)

    def run(pool: int) -> Any:
        k, v = flat[pool]
        scores = torch.bmm(rows, k.transpose(1, 2), out_dtype=torch.float32)
        return torch.bmm(torch.softmax(scores * SM_SCALE, dim=-1).to(torch.bfloat16), v)

    return torch_attention(configuration, problem, device, run)
