"""FlashAttention 3 and 4 and vLLM's Triton kernel, where they are installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from g4kv_cli.bench.attention_problem import SM_SCALE, AttentionProblem
from g4kv_cli.bench.peers.paged_arguments import page_halves, page_tables
from g4kv_cli.bench.peers.torch_runnable import TorchRunnable, tensor_of, torch_attention
from g4kv_cli.entries.provider import NotCovered

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def make_flash_attention_3(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """``flash_attn_with_kvcache`` with a page table; head_dim up to 256."""
    shape = problem.shape
    if shape.head_dim > 256:
        raise NotCovered(f"FlashAttention 3 has no head_dim {shape.head_dim}")
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    q = tensor_of(problem.q, device).view(shape.batch, shape.tokens, shape.num_qo_heads, shape.head_dim)
    halves, (table, lengths) = page_halves(problem, device), page_tables(problem, device)
    window = (problem.geometry.window_left, 0) if problem.geometry.window is not None else (-1, -1)

    def run(pool: int) -> Any:
        return attend(
            q,
            *halves[pool],
            cache_seqlens=lengths,
            page_table=table,
            softmax_scale=SM_SCALE,
            causal=True,
            window_size=window,
        )

    return torch_attention(configuration, problem, device, run)


def make_flash_attention_4(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """``flash_attn_varlen_func`` with a page table, keys split as it chooses for decode; head_dim up to 256."""
    shape = problem.shape
    if shape.head_dim > 256:
        raise NotCovered(f"FlashAttention 4 has no head_dim {shape.head_dim}")
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    q = tensor_of(problem.q, device).view(shape.batch, shape.tokens, shape.num_qo_heads, shape.head_dim)
    halves, (table, lengths) = page_halves(problem, device), page_tables(problem, device)
    window = (problem.geometry.window_left, 0) if problem.geometry.window is not None else (None, None)
    num_splits = 0 if shape.kind == "decode" else 1

    def run(pool: int) -> Any:
        found = attend(
            q,
            *halves[pool],
            seqused_k=lengths,
            page_table=table,
            softmax_scale=SM_SCALE,
            causal=True,
            window_size=window,
            num_splits=num_splits,
        )
        return found[0] if isinstance(found, tuple) else found

    return torch_attention(configuration, problem, device, run)


def make_vllm_triton(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """vLLM's ``unified_attention``."""
    shape = problem.shape
    attend = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    q = tensor_of(problem.q, device)
    out = torch.full_like(q, float("nan"))
    halves, (table, lengths) = page_halves(problem, device), page_tables(problem, device)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.tokens
    window = (problem.geometry.window_left, 0) if problem.geometry.window is not None else (-1, -1)

    def run(pool: int) -> Any:
        k, v = halves[pool]
        attend(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=shape.tokens,
            seqused_k=lengths,
            max_seqlen_k=int(shape.kv_len),
            softmax_scale=SM_SCALE,
            causal=True,
            window_size=window,
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out

    return torch_attention(configuration, problem, device, run)
