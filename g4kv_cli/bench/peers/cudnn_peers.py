"""cuDNN's scaled dot product attention on our pools as they are: page tables, window, bottom-right causal mask."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import cudnn
import torch

from g4kv_cli.bench.attention_problem import SM_SCALE, AttentionProblem
from g4kv_cli.bench.peers.paged_arguments import page_halves, page_tables
from g4kv_cli.bench.peers.torch_runnable import TorchRunnable, place_of, stream_of, tensor_of, torch_attention
from g4kv_cli.entries.provider import NotCovered

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def library() -> str:
    """The cuDNN that the frontend has loaded."""
    return f"cuDNN {cudnn.backend_version_string()}"


def make_sdpa(configuration: str, problem: AttentionProblem, device: CudaDevice) -> TorchRunnable:
    """One graph for the shape, as cuDNN's heuristics choose. Raises NotCovered where cuDNN has no kernel for it."""
    shape = problem.shape
    q = tensor_of(problem.q, device).view(shape.batch, shape.tokens, shape.num_qo_heads, shape.head_dim)
    halves = page_halves(problem, device)
    table, keys = page_tables(problem, device)
    out = torch.full_like(q, float("nan"))
    counts = [torch.full_like(keys, shape.tokens), keys]
    lengths = [count.view(-1, 1, 1, 1) for count in counts]
    pages = table.view(shape.batch, 1, -1, 1)
    handle = _handle(int(device.stream.handle))
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    # cuDNN's order is [batch or page, head, token or slot, dim].
    given = [graph.tensor_like(tensor) for tensor in (_heads_first(q), *map(_heads_first, halves[0]), pages, *lengths)]
    q_in, k_in, v_in, pages_in, q_len, kv_len = given
    window = problem.geometry.window
    result, _ = graph.sdpa(
        q=q_in,
        k=k_in,
        v=v_in,
        generate_stats=False,
        attn_scale=SM_SCALE,
        use_padding_mask=True,
        seq_len_q=q_len,
        seq_len_kv=kv_len,
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_left_bound=window,
        diagonal_band_right_bound=0,
        paged_attention_k_table=pages_in,
        paged_attention_v_table=pages_in,
        paged_attention_max_seq_len_kv=table.shape[1] * shape.page_size,
    )
    shown = _heads_first(out)
    result.set_output(True).set_dim(list(shown.shape)).set_stride(list(shown.stride()))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise NotCovered(f"{library()}: {' '.join(str(error).split())}") from error
    with torch.cuda.stream(stream_of(device)):
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=place_of(device))
    device.synchronize()

    def run(pool: int) -> Any:
        k, v = map(_heads_first, halves[pool])
        tensors = {q_in: _heads_first(q), k_in: k, v_in: v, pages_in: pages, q_len: lengths[0], kv_len: lengths[1]}
        graph.execute({**tensors, result: shown}, workspace, handle=handle)
        return out

    return torch_attention(configuration, problem, device, run)


@cache
def _handle(stream: int) -> Any:
    """cuDNN's handle for a stream."""
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, stream)
    return handle


def _heads_first(tensor: Any) -> Any:
    """[n, tokens, heads, dim] as [n, heads, tokens, dim], the same memory."""
    return tensor.transpose(1, 2)
