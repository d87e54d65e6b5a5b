"""Our pools and page tables as paged attention of other libraries takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from g4kv_cli.bench.attention_problem import AttentionProblem
from g4kv_cli.bench.peers.torch_runnable import place_of, tensor_of

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def page_tiles(problem: AttentionProblem, device: CudaDevice) -> list[Any]:
    """Every pool as [page, K or V, slot, KV head, dim]."""
    shape = problem.shape
    rows = (-1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    return [tensor_of(pool.data, device).view(rows) for pool in problem.pools]


def page_halves(problem: AttentionProblem, device: CudaDevice) -> list[tuple[Any, Any]]:
    """K and V of every pool as strided views [page, slot, KV head, dim]."""
    return [(tiles[:, 0], tiles[:, 1]) for tiles in page_tiles(problem, device)]


def page_tables(problem: AttentionProblem, device: CudaDevice) -> tuple[Any, Any]:
    """Page table int32 [batch, resident pages], and keys in it int32 [batch]."""
    where = place_of(device)
    keys = problem.shape.kv_len - problem.origin * problem.shape.page_size
    return (
        torch.as_tensor(problem.pages, device=where),
        torch.full((problem.shape.batch,), keys, dtype=torch.int32, device=where),
    )
