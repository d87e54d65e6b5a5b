"""FlashInfer's paged wrappers on our pools as they are (NHD, [page][K, V][slot][head][dim]). Planning is not timed: a
server plans once a step, not once a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flashinfer
import torch

from g4kv_cli.bench.attention_problem import SM_SCALE, AttentionProblem
from g4kv_cli.bench.peers.paged_arguments import page_tiles
from g4kv_cli.bench.peers.torch_runnable import TorchRunnable, place_of, stream_of, tensor_of, torch_attention
from g4kv_cli.entries.provider import NotCovered

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

WORKSPACE_BYTES = 512 * 2**20
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""GQA groups that the decode kernel on CUDA cores is built for (FlashInfer 0.7)."""


def make_decode_cuda(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """The decode kernel on CUDA cores."""
    group = problem.geometry.gqa_group
    if group not in CUDA_CORE_GROUPS:
        raise NotCovered(f"the CUDA-core decode kernel has no GQA group of {group}")
    return _decode(configuration, problem, device, use_tensor_cores=False)


def make_decode_tensor(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """The prefill kernel (fa2) at one token a request, keys split as FlashInfer chooses."""
    return _decode(configuration, problem, device, use_tensor_cores=True)


def make_prefill_fa2(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """Prefill, fa2."""
    return _prefill(configuration, problem, device, "fa2")


def make_prefill_fa3(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """Prefill, fa3 (head_dim up to 256)."""
    if problem.shape.head_dim > 256:
        raise NotCovered(f"fa3 has no head_dim {problem.shape.head_dim}")
    return _prefill(configuration, problem, device, "fa3")


def _metadata(problem: AttentionProblem, device: CudaDevice) -> tuple[Any, Any, Any]:
    """page_indptr, page_indices, last_page_len: int32."""
    where = place_of(device)
    batch, per_request = problem.pages.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=where) * per_request
    indices = torch.as_tensor(problem.pages.reshape(-1), device=where)
    last = torch.full((batch,), problem.last_page_len, dtype=torch.int32, device=where)
    return indptr, indices, last


def _decode(
    configuration: str, problem: AttentionProblem, device: CudaDevice, *, use_tensor_cores: bool
) -> TorchRunnable:
    shape = problem.shape
    with torch.cuda.stream(stream_of(device)):
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place_of(device))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", use_tensor_cores=use_tensor_cores
        )

        def plan() -> None:
            wrapper.plan(
                *_metadata(problem, device),
                shape.num_qo_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.page_size,
                window_left=problem.geometry.window_left,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
                sm_scale=SM_SCALE,
            )
            device.synchronize()

        plan()
        if not use_tensor_cores:
            # The first run lets the kernel have more than 48 KB of shared memory. A plan before it asks how many blocks
            # fit, is told none, and does not split: 1024 keys of 12b-global took 7 times as long (FlashInfer 0.7.4).
            wrapper.run(tensor_of(problem.q, device), page_tiles(problem, device)[0])
            plan()
    return _runnable(configuration, problem, device, wrapper)


def _prefill(configuration: str, problem: AttentionProblem, device: CudaDevice, backend: str) -> TorchRunnable:
    shape = problem.shape
    where = place_of(device)
    with torch.cuda.stream(stream_of(device)):
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=where)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend=backend)
        q_indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device=where) * shape.tokens
        wrapper.plan(
            q_indptr,
            *_metadata(problem, device),
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            window_left=problem.geometry.window_left,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            sm_scale=SM_SCALE,
        )
        device.synchronize()
    return _runnable(configuration, problem, device, wrapper)


def _runnable(configuration: str, problem: AttentionProblem, device: CudaDevice, wrapper: Any) -> TorchRunnable:
    q, pools = tensor_of(problem.q, device), page_tiles(problem, device)
    out = torch.full_like(q, float("nan"))

    def run(pool: int) -> Any:
        return wrapper.run(q, pools[pool], out=out)

    return torch_attention(configuration, problem, device, run)
