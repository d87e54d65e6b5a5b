"""Prep by libraries: one torch.compile of the formula, and FlashInfer's calls one after the other.

Both read the problem's rows, write q_out and the pool (or k_out) where our entries do, and get the same RoPE tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from g4kv_cli.bench.peers.torch_runnable import TorchRunnable, place_of, stream_of, tensor_of, torch_prep
from g4kv_cli.bench.prep_problem import PrepProblem
from g4kv_cli.oracle.prep import EPS

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def normed(x: Any, weight: Any | None) -> Any:
    """RMS norm over the last axis in float32; ``weight`` None: none (V)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return scaled if weight is None else scaled * weight.float()


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate-half RoPE of float32 [tokens, heads, head_dim] by tables [tokens, rotary_dim]; later columns pass."""
    rotary_dim = cos.shape[-1]
    turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    left, right = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None].float() + torch.cat([-right, left], dim=-1) * sin[:, None].float()
    return torch.cat([turned, passing], dim=-1)


def prep_formula(
    inputs: tuple[Any, Any, Any | None],
    weights: tuple[Any, Any],
    tables: tuple[Any, Any],
    positions: Any,
    outputs: tuple[Any, Any],
    places: tuple[Any, Any] | None,
    raw_k_is_v: bool,
) -> None:
    """Norm and rotate Q and K, norm V, and put them where they belong.

    ``outputs``: q_out [tokens, q heads, head_dim], and the pool [pages, 2, slots, KV heads, head_dim], or without
    ``places`` (page and slot of each token, int64 [tokens]) k_out [tokens, KV heads, head_dim].
    """
    q, k, v = inputs
    cos, sin = tables[0][positions], tables[1][positions]
    q_out, kv_out = outputs
    q_out.copy_(rotated(normed(q, weights[0]), cos, sin))
    keys = rotated(normed(k, weights[1]), cos, sin)
    if places is None:
        kv_out.copy_(keys)
        return
    page, slot = places
    kv_out[page, 0, slot] = keys.to(kv_out.dtype)
    kv_out[page, 1, slot] = normed(k if raw_k_is_v else v, None).to(kv_out.dtype)


def make_compiled(configuration: str, problem: PrepProblem, device: CudaDevice) -> TorchRunnable:
    """The formula through torch.compile, for this shape alone."""
    # Each shape is compiled anew; dynamo would give up on the ninth.
    torch.compiler.reset()
    function = torch.compile(prep_formula, dynamic=False)
    weights, tables, positions, places = _constants(problem, device)
    raw_k_is_v = problem.entry.value_source != "raw_v"

    def run(pool: int) -> None:
        inputs = problem.inputs(pool)
        q, k = (tensor_of(array, device) for array in inputs[:2])
        v = None if inputs[2] is None else tensor_of(inputs[2], device)
        function((q, k, v), weights, tables, positions, _outputs(problem, device, pool), places, raw_k_is_v)

    return torch_prep(configuration, problem, device, run)


def make_flashinfer_chain(configuration: str, problem: PrepProblem, device: CudaDevice) -> TorchRunnable:
    """Norms, RoPE in place, append: five launches, bf16 between them."""
    rmsnorm = importlib.import_module("flashinfer").rmsnorm
    rope = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
    append: Callable[..., None] = importlib.import_module("flashinfer.page").append_paged_kv_cache
    weights, tables, positions, _ = _constants(problem, device)
    shape, where = problem.shape, place_of(device)
    head_dim, half = shape.head_dim, tables[0].shape[-1] // 2
    is_decode = problem.entry.metadata == "batch"
    with torch.cuda.stream(stream_of(device)):
        # [positions][cos of the first half, sin of the first half], float32
        cache = torch.cat([table[:, :half].float() for table in tables], dim=-1).contiguous()
        ones = torch.ones(head_dim, dtype=torch.bfloat16, device=where)
        keys = torch.empty((shape.tokens, shape.num_kv_heads, head_dim), dtype=torch.bfloat16, device=where)
        values = torch.empty_like(keys)
        requests = shape.tokens if is_decode else 1
        last = int(problem.positions.max()) % shape.page_size + 1
        indptr = torch.arange(requests + 1, dtype=torch.int32, device=where) * (len(problem.pages) // requests)
        lasts = torch.full((requests,), last, dtype=torch.int32, device=where)
        indices = torch.as_tensor(problem.pages, device=where)
        owners = torch.arange(shape.tokens, dtype=torch.int32, device=where) * is_decode
        at = positions.int()
        device.synchronize()

    def run(pool: int) -> None:
        inputs = problem.inputs(pool)
        q, k = (tensor_of(array, device) for array in inputs[:2])
        q_out, kv_out = _outputs(problem, device, pool)
        k_out = kv_out if problem.entry.metadata == "none" else keys
        rmsnorm(q.view(-1, head_dim), weights[0], EPS, out=q_out.view(-1, head_dim))
        rmsnorm(k.view(-1, head_dim), weights[1], EPS, out=k_out.view(-1, head_dim))
        rope(positions, q_out.view(shape.tokens, -1), k_out.view(shape.tokens, -1), head_dim, cache, is_neox=True)
        if problem.entry.metadata == "none":
            return
        v = k if inputs[2] is None else tensor_of(inputs[2], device)
        rmsnorm(v.view(-1, head_dim), ones, EPS, out=values.view(-1, head_dim))
        append(keys, values, owners, at, kv_out, indices, indptr, lasts, kv_layout="NHD")

    return torch_prep(configuration, problem, device, run)


def _constants(
    problem: PrepProblem, device: CudaDevice
) -> tuple[tuple[Any, Any], tuple[Any, Any], Any, tuple[Any, Any] | None]:
    """Weights, (cos, sin), positions int64 [tokens], and (page, slot) int64 [tokens] or None."""
    where = place_of(device)
    weights = tuple(tensor_of(array, device) for array in problem.weight_arrays)
    tables = (tensor_of(problem.rope.cos, device), tensor_of(problem.rope.sin, device))
    places = None
    if problem.entry.metadata != "none":
        page, slot = (torch.as_tensor(values, device=where) for values in problem.places())
        places = (page, slot)
    return (weights[0], weights[1]), tables, torch.as_tensor(problem.positions, device=where), places


def _outputs(problem: PrepProblem, device: CudaDevice, pool: int) -> tuple[Any, Any]:
    """q_out, and k_out or the pool [pages, 2, slots, KV heads, head_dim], of a set."""
    shape = problem.shape
    q_out = tensor_of(problem.q_outs[pool], device)
    if problem.entry.metadata == "none":
        return q_out, tensor_of(problem.k_outs[pool], device)
    rows = (-1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    return q_out, tensor_of(problem.pools[pool].data, device).view(rows)
