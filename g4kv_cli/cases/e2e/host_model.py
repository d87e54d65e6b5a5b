"""What the replay computes on the host: everything of the model but prep and attention, in NumPy.

Formulas: transformers 5.24.0, models/gemma4 (plain norm weights, norm before each residual add, tanh GELU, the whole
stream scaled by layer_scalar, tied head with a final softcap). Values are float32 and stay so; each product, norm and
function is computed in float64 and rounded once, so that the bits hardly depend on this machine's math libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from g4kv_cli.cases.e2e.recorded_model import Array, Float32, Float64, Int64, RecordedLayer, RecordedModel
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.prep import rms_norm


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """Raw rows of one layer as a kernel gets them, bf16 [tokens, heads, head_dim]; ``v`` is None in K=V layers."""

    q: Array
    k: Array
    v: Array | None


def embed(model: RecordedModel, ids: Int64) -> Float32:
    """The scaled embeddings, float32 [tokens, hidden]: the start of the residual stream."""
    return (model.embedding[ids] * model.embedding_scale).astype(np.float32)


def project(layer: RecordedLayer, stream: Float32) -> Projections:
    """q, k and v of the stream's rows, rounded to bf16 once."""
    x = _norm(stream, layer.input_norm)
    geometry = layer.geometry

    def rows(weight: Float64, heads: int) -> Array:
        return _linear(x, weight).astype(BF16).reshape(len(x), heads, geometry.head_dim)

    return Projections(
        rows(layer.q_proj, geometry.num_qo_heads),
        rows(layer.k_proj, geometry.num_kv_heads),
        None if layer.v_proj is None else rows(layer.v_proj, geometry.num_kv_heads),
    )


def finish_layer(layer: RecordedLayer, stream: Float32, attention: Array) -> Float32:
    """The stream after the layer; ``attention`` [tokens, num_qo_heads, head_dim]."""
    flat = attention.astype(np.float32).reshape(len(stream), -1)
    stream = stream + _norm(_linear(flat, layer.o_proj), layer.post_attention_norm)
    x = _norm(stream, layer.pre_feedforward_norm)
    x = _linear(_gelu_tanh(_linear(x, layer.gate_proj)) * _linear(x, layer.up_proj), layer.down_proj)
    stream = stream + _norm(x, layer.post_feedforward_norm)
    return stream * np.float32(layer.layer_scalar)


def logits_of(model: RecordedModel, stream: Float32) -> Float32:
    """float32 [tokens, vocabulary]; the head is the unscaled embedding."""
    x = _norm(stream, model.final_norm)
    cap = model.logit_softcap
    return (cap * np.tanh(_linear(x, model.embedding).astype(np.float64) / cap)).astype(np.float32)


def _linear(x: Float32, weight: Float64) -> Float32:
    # Not a BLAS product: these are small, and its threads wait for each other far longer than they compute.
    product: Float32 = np.einsum("tk,ok->to", x.astype(np.float64), weight).astype(np.float32)
    return product


def _norm(x: Float32, weight: Float64) -> Float32:
    return rms_norm(x, weight).astype(np.float32)


def _gelu_tanh(x: Float32) -> Float32:
    wide = x.astype(np.float64)
    gelu: Float32 = (0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))).astype(np.float32)
    return gelu
