"""A recorded tiny model: its weights, and what another implementation's greedy decode made of them.

Linear weights are ``[out, in]`` and kept as float64 (exact: they are bf16 values); bf16 arrays are what the kernels
get. L layers, P prompt tokens, S steps: step 0 is the prefill, step t feeds token t - 1 at position P + t - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.model.geometry import Geometry

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

TRACE_PARTS = ("q_raw", "k_raw", "v_raw", "q", "k", "v", "attn")
"""Arrays of one layer's trace, in the order in which they are computed."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLayer:
    """One layer. ``geometry`` is its family's, with the recorded heads and window; ``family_layer`` its number inside
    the family's pool. ``v_proj`` is None in K=V layers."""

    geometry: Geometry
    family_layer: int
    input_norm: Float64
    post_attention_norm: Float64
    pre_feedforward_norm: Float64
    post_feedforward_norm: Float64
    layer_scalar: float
    q_proj: Float64
    k_proj: Float64
    v_proj: Float64 | None
    o_proj: Float64
    q_norm: Array
    k_norm: Array
    gate_proj: Float64
    up_proj: Float64
    down_proj: Float64


@dataclass(frozen=True, slots=True, eq=False)
class RecordedModel:
    """One checked file.

    ``embedding`` float64 [vocabulary, hidden]; ``logits`` float32 [S, vocabulary] and ``prompt_logits`` [P,
    vocabulary] of the float32 run; ``max_limit`` and ``rms_limit`` are rule B's; ``hidden`` float32 [P + S - 1, L + 1,
    hidden] of the bf16 run; ``traces[step, layer]`` float32 arrays by part, of the step's last row.
    """

    path: Path
    name: str
    model: str
    layers: tuple[RecordedLayer, ...]
    embedding: Float64
    embedding_scale: float
    final_norm: Float64
    logit_softcap: float
    prompt: Int64
    tokens: Int64
    logits: Float32
    prompt_logits: Float32
    max_limit: float
    rms_limit: float
    hidden: Float32
    traces: Mapping[tuple[int, int], Mapping[str, Float32]]

    @property
    def num_steps(self) -> int:
        """Recorded steps, the prefill included."""
        return len(self.tokens)

    @property
    def num_positions(self) -> int:
        """Positions that are ever fed; the last token is not."""
        return len(self.prompt) + self.num_steps - 1

    @property
    def trace_steps(self) -> tuple[int, ...]:
        """The steps that have traces."""
        return tuple(sorted({step for step, _ in self.traces}))

    @property
    def families(self) -> tuple[Geometry, ...]:
        """The geometry of each family, in the order of the layers."""
        return tuple({layer.geometry.name: layer.geometry for layer in self.layers}.values())

    def layers_of(self, geometry: Geometry) -> int:
        """Layers of this family in the recorded model."""
        return sum(layer.geometry == geometry for layer in self.layers)
