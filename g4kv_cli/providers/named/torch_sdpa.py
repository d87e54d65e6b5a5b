"""Paged attention by torch's scaled_dot_product_attention: a request's keys are gathered, and what it does not see is
never touched. ``torch-sdpa.toml`` calls it, with tensors of a GPU or of the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional


def attention(
    q: Any, pool: Any, out: Any, page_indices: Any, page_indptr: Any, page_origins: Any, q_indptr: Any, kv_lens: Any,
    layer: int, sm_scale: float, window_left: int,
) -> None:  # fmt: skip
    """q, out [tokens, heads, head_dim] bf16; pool [page][layer][K, V][slot][head][head_dim]; the index arrays as
    PrefillPagedPlan has them, int32."""
    rows, pages, written = (torch.from_dlpack(tensor) for tensor in (q, pool, out))
    table, begins, origins, tokens, lengths = (
        torch.from_dlpack(tensor) for tensor in (page_indices, page_indptr, page_origins, q_indptr, kv_lens)
    )
    page_size = pages.shape[3]
    bounds = zip(begins.tolist()[:-1], begins.tolist()[1:], strict=True)
    spans = zip(tokens.tolist()[:-1], tokens.tolist()[1:], strict=True)
    with torch.inference_mode():
        for (begin, end), (first_row, last_row), origin, length in zip(
            bounds, spans, origins.tolist(), lengths.tolist(), strict=True
        ):
            if first_row == last_row:
                continue
            positions = torch.arange(length - (last_row - first_row), length, device=rows.device)
            first = origin * page_size
            if window_left >= 0:
                first = max(first, int(positions[0]) - window_left)
            keys = torch.arange(first, length, device=rows.device)
            ids = table[begin:end].long()[keys // page_size - origin]
            # [head][key][dim]
            k, v = (pages[ids, layer, side, keys % page_size].transpose(0, 1) for side in (0, 1))
            behind = positions[:, None] - keys[None, :]
            seen = behind >= 0 if window_left < 0 else (behind >= 0) & (behind <= window_left)
            found = functional.scaled_dot_product_attention(
                rows[first_row:last_row].transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=sm_scale,
                enable_gqa=rows.shape[1] != k.shape[0],
            )  # fmt: skip
            written[first_row:last_row] = found[0].transpose(0, 1)
