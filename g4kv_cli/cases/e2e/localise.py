"""Where a wrong replay goes wrong: the recorded tokens are fed, and each layer is held against the recorded bf16 run.

An error of layer l reaches later layers and later tokens, never an earlier layer: the lowest layer with a residual row
off its limit is the place, and its first such token the time. Which of q, k, v and attention it was is said twice: by
the recorded traces, and by recomputing that token's rows in float64 from the inputs that the kernels got.
"""

from __future__ import annotations

import numpy as np

from g4kv_cli.cases.e2e.batch import ModelBatch, Request
from g4kv_cli.cases.e2e.host_model import Projections
from g4kv_cli.cases.e2e.recorded_model import TRACE_PARTS, Array, Float32, RecordedModel
from g4kv_cli.cases.e2e.replay import replay
from g4kv_cli.inputs import rope_rows
from g4kv_cli.model.geometry import ATTENTION_SCALE
from g4kv_cli.oracle.attention import attend
from g4kv_cli.oracle.prep import rms_norm, rotate_half_rope
from g4kv_cli.records.run import Mismatch

ROW_LIMIT = 0.06
"""Relative root mean square of a residual row against the recorded bf16 run: twice the noise of a right kernel."""
TRACE_LIMIT = 0.05
"""The same of a traced array."""
RECOMPUTED_LIMIT = 0.01
"""The same of an array against float64 on the kernel's own inputs: rounding to bf16 makes 0.002 of it."""

_RAW = ("q_raw", "k_raw", "v_raw")
_VERDICTS = {
    "q": "q is off: prep (norm or rotation of Q)",
    "k": "k is off: prep (norm, rotation or slot of K)",
    "v": "v is off: prep (norm, source or slot of V)",
    "attn": "q, k and v are right, attention is off: the attention kernel, or the pages and plan it read",
}


def relative_rms(got: Array, want: Array) -> float:
    """Root mean square of the error over that of ``want``; infinite where something is not a number."""
    error = np.square(got.astype(np.float64) - want.astype(np.float64)).mean()
    relative = float(np.sqrt(error / max(np.square(want.astype(np.float64)).mean(), np.finfo(np.float64).tiny)))
    return relative if np.isfinite(relative) else float("inf")


def localise(batch: ModelBatch, model: RecordedModel, failed_step: int) -> Mismatch:
    """Feed a fresh batch the recorded tokens up to the failed step, and say where the first difference is."""
    recorder = _Recorder(model)
    batch.observer = recorder
    for step in replay(batch, steps=failed_step + 1, tokens=model.tokens):
        recorder.step = step + 1
    return recorder.finding()


class _Recorder:
    """The errors of residual rows by (layer, token), those of the traced arrays, and each layer's rows by part."""

    def __init__(self, model: RecordedModel) -> None:
        self.model = model
        self.step = 0
        self.rows: dict[tuple[int, int], float] = {}
        self.traces: dict[tuple[int, int], dict[str, float]] = {}
        self.layers: list[dict[str, list[Array]]] = [{} for _ in model.layers]

    def layer_done(
        self, request: Request, number: int, raw: Projections, q: Array, k: Array, v: Array, attention: Array
    ) -> None:
        """Note the rows, and compare the last one if the step is traced (of chunks, the last one's counts)."""
        v_raw = raw.k if raw.v is None else raw.v
        got = {"q_raw": raw.q, "k_raw": raw.k, "v_raw": v_raw, "q": q, "k": k, "v": v, "attn": attention}
        for part, rows in got.items():
            self.layers[number].setdefault(part, []).extend(rows)
        trace = self.model.traces.get((self.step, number))
        if trace is not None:
            self.traces[self.step, number] = {
                part: relative_rms(got[part][-1], trace[part]) for part in TRACE_PARTS if part in trace
            }

    def stream(self, request: Request, number: int, rows: Float32) -> None:
        """Compare each row. ``number`` 0 is the embedding; row n is the stream after layer n - 1."""
        for token, row in enumerate(rows, request.length):
            self.rows[number - 1, token] = relative_rms(row, self.model.hidden[token, number])

    def finding(self) -> Mismatch:
        """What is printed: the place, and which of its arrays are off."""
        wrong = {where: error for where, error in self.rows.items() if error > ROW_LIMIT}
        worst = max(self.rows, key=lambda at: self.rows[at])
        if wrong:
            where = min(wrong)
            operation = f"first residual row off with recorded tokens fed: layer {where[0]}, token {where[1]}"
        else:
            where = self._first_recomputed() or worst
            operation = f"no residual row off with recorded tokens fed, see layer {where[0]}, token {where[1]}"
        return Mismatch(
            operation=operation,
            count=len(wrong),
            total=len(self.rows),
            first={"layer": where[0], "token": where[1]},
            first_got=f"{self.rows[where]:.3f}",
            first_want=f"<= {ROW_LIMIT}",
            worst={"layer": worst[0], "token": worst[1]},
            worst_got=f"{self.rows[worst]:.3f}",
            worst_want=f"<= {ROW_LIMIT}",
            limit=f"relative root mean square of a row against the recorded bf16 run <= {ROW_LIMIT}",
            note="\n               ".join(self._array_lines(*where)),
        )

    def _first_recomputed(self) -> tuple[int, int] | None:
        """The first (layer, token) of which an array does not follow from its inputs."""
        for number, rows in enumerate(self.layers):
            for token in range(len(rows["q"])):
                if max(self._recomputed(number, token).values()) > RECOMPUTED_LIMIT:
                    return number, token
        return None

    def _array_lines(self, layer: int, token: int) -> list[str]:
        if layer < 0:
            return ["the embedding is off: the host's arithmetic or the model file, no kernel ran yet"]
        lines = [
            f"recorded trace of layer {layer}, step {step}: {_texts(errors, TRACE_LIMIT)}"
            for (step, number), errors in sorted(self.traces.items())
            if number == layer
        ]
        own = self._recomputed(layer, token)
        lines.append(f"recomputed from its inputs, token {token}: {_texts(own, RECOMPUTED_LIMIT)}")
        off = [part for part, error in own.items() if error > RECOMPUTED_LIMIT]
        return [
            *lines,
            _VERDICTS[off[0]] if off else "this token's arrays follow from their inputs: look at other tokens",
        ]

    def _recomputed(self, number: int, token: int) -> dict[str, float]:
        """Errors of the token's q, k, v and attention against float64; attention over the K and V that prep stored."""
        layer, rows = self.model.layers[number], self.layers[number]
        geometry = layer.geometry
        cos, sin = rope_rows(geometry, np.array([token]), geometry.rotary_dim)
        q, k, v, attention = (np.stack(rows[part]) for part in ("q", "k", "v", "attn"))
        raw = {part: rows[part][token][None] for part in _RAW}
        first = 0 if geometry.window is None else max(0, token - geometry.window_left)
        seen = slice(first, token + 1)
        want = {
            "q": rotate_half_rope(rms_norm(raw["q_raw"], layer.q_norm), cos, sin),
            "k": rotate_half_rope(rms_norm(raw["k_raw"], layer.k_norm), cos, sin),
            "v": rms_norm(raw["v_raw"], None),
            "attn": attend(
                q[token : token + 1], k[seen], v[seen], first_key=first, window_left=geometry.window_left,
                sm_scale=ATTENTION_SCALE,
            ).value,
        }  # fmt: skip
        got = {"q": q, "k": k, "v": v, "attn": attention}
        return {part: relative_rms(got[part][token], value[0]) for part, value in want.items()}


def _texts(errors: dict[str, float], limit: float) -> str:
    shown = (f"{part} {error:.3f}{' OFF' if error > limit else ''}" for part, error in errors.items())
    return f"{', '.join(shown)} (limit {limit})"
