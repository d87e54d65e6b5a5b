"""The whole model in wide arithmetic, attention included, without caches: what any token sequence must give.

The recorded float32 run is met to 1e-4 by these formulas; the replay needs them where there is no recording.
"""

from __future__ import annotations

import numpy as np

from g4kv_cli.cases.e2e.recorded_model import Float32, Float64, Int64, RecordedLayer, RecordedModel
from g4kv_cli.oracle.attention import visible_keys
from g4kv_cli.oracle.prep import rms_norm, rotate_half_rope


def reference_logits(model: RecordedModel, ids: Int64) -> Float32:
    """float32 [tokens, vocabulary] of a sequence from position 0 on; nothing is rounded on the way."""
    stream = model.embedding[ids] * model.embedding_scale
    for layer in model.layers:
        x = rms_norm(stream, layer.input_norm)
        attended = _attention(layer, x)
        stream = stream + rms_norm(attended @ layer.o_proj.T, layer.post_attention_norm)
        x = rms_norm(stream, layer.pre_feedforward_norm)
        gate = x @ layer.gate_proj.T
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        stream = stream + rms_norm((gelu * (x @ layer.up_proj.T)) @ layer.down_proj.T, layer.post_feedforward_norm)
        stream = stream * layer.layer_scalar
    cap = model.logit_softcap
    logits = cap * np.tanh(rms_norm(stream, model.final_norm) @ model.embedding.T / cap)
    return logits.astype(np.float32)


def _attention(layer: RecordedLayer, x: Float64) -> Float64:
    """[tokens, num_qo_heads * head_dim]."""
    geometry, tokens = layer.geometry, np.arange(len(x))

    def rows(weight: Float64, heads: int) -> Float64:
        return (x @ weight.T).reshape(len(x), heads, geometry.head_dim)

    angles = (tokens.astype(np.float32)[:, None] * geometry.inv_freq()).astype(np.float64)
    cos, sin = (np.concatenate([part, part], axis=-1) for part in (np.cos(angles), np.sin(angles)))
    k_raw = rows(layer.k_proj, geometry.num_kv_heads)
    v_raw = k_raw if layer.v_proj is None else rows(layer.v_proj, geometry.num_kv_heads)
    q = rotate_half_rope(rms_norm(rows(layer.q_proj, geometry.num_qo_heads), layer.q_norm), cos, sin)
    k = rotate_half_rope(rms_norm(k_raw, layer.k_norm), cos, sin)
    k, v = (np.repeat(part, geometry.gqa_group, axis=1) for part in (k, rms_norm(v_raw, None)))

    scores = np.einsum("qhd,khd->hqk", q, k)
    scores[:, ~visible_keys(tokens, tokens, geometry.window_left)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Float64 = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return attended
