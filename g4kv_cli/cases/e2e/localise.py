"""Where a wrong replay goes wrong: the recorded tokens are fed, and each layer is held against the recorded bf16 run.

An error of layer l reaches later layers and later tokens, never an earlier layer: the lowest layer with a residual row
off its limit is the place, and its first such token the time. In the traced steps the layer's q, k, v and attention
then say what it was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from g4kv_cli.cases.e2e.batch import ModelBatch, Request
from g4kv_cli.cases.e2e.host_model import Projections
from g4kv_cli.cases.e2e.recorded_model import TRACE_PARTS, Array, Float32, RecordedModel
from g4kv_cli.cases.e2e.replay import replay
from g4kv_cli.records import Mismatch

ROW_LIMIT = 0.06
"""Relative root mean square of a residual row against the recorded bf16 run: twice the noise of a right kernel."""
TRACE_LIMIT = 0.05
"""The same of a traced array."""

_RAW = ("q_raw", "k_raw", "v_raw")


def relative_rms(got: Array, want: Array) -> float:
    """Root mean square of the error over that of ``want``; infinite where something is not a number."""
    error = np.square(got.astype(np.float64) - want.astype(np.float64)).mean()
    relative = float(np.sqrt(error / max(np.square(want.astype(np.float64)).mean(), np.finfo(np.float64).tiny)))
    return relative if np.isfinite(relative) else float("inf")


def localise(make_batch: Callable[[], ModelBatch], model: RecordedModel, failed_step: int) -> Mismatch:
    """Feed the recorded tokens up to the failed step, and on to the next traced step that shows which array is off."""
    batch = make_batch()
    recorder = _Recorder(model)
    batch.observer = recorder
    last_traced = max((step for step in model.trace_steps if step >= failed_step), default=failed_step)
    recorder.step = 0
    for step in replay(batch, steps=max(failed_step, last_traced) + 1, tokens=model.tokens):
        if step >= failed_step and recorder.explained():
            break
        recorder.step = step + 1
    batch.free()
    return recorder.finding()


class _Recorder:
    """Collects the errors of residual rows by (layer, token), and those of the traced arrays."""

    def __init__(self, model: RecordedModel) -> None:
        self.model = model
        self.step = 0
        self.rows: dict[tuple[int, int], float] = {}
        self.traces: dict[tuple[int, int], dict[str, float]] = {}

    def layer_done(
        self, request: Request, number: int, raw: Projections, q: Array, k: Array, v: Array, attention: Array
    ) -> None:
        """Compare the step's last row if it is traced; chunks before the last overwrite nothing that counts."""
        trace = self.model.traces.get((self.step, number))
        if trace is not None:
            got = {"q_raw": raw.q, "k_raw": raw.k, "v_raw": raw.v, "q": q, "k": k, "v": v, "attn": attention}
            self.traces[self.step, number] = {
                part: relative_rms(rows[-1], trace[part])
                for part in TRACE_PARTS
                if part in trace and (rows := got[part]) is not None
            }

    def stream(self, request: Request, number: int, rows: Float32) -> None:
        """Compare each row. ``number`` 0 is the embedding; row n is the stream after layer n - 1."""
        for token, row in enumerate(rows, request.length):
            self.rows[number - 1, token] = relative_rms(row, self.model.hidden[token, number])

    def explained(self) -> bool:
        """A layer is named, and a traced step shows one of its arrays off."""
        where = self._first()
        return where is not None and any(
            layer == where[0] and max(errors.values()) > TRACE_LIMIT for (_, layer), errors in self.traces.items()
        )

    def finding(self) -> Mismatch:
        """What is printed: the place, then the traced arrays."""
        wrong = {where: error for where, error in self.rows.items() if error > ROW_LIMIT}
        where = self._first()
        if where is None:
            where = max(self.rows, key=lambda at: self.rows[at])
        worst = max(wrong or self.rows, key=lambda at: self.rows[at])
        operation = f"first residual row off with recorded tokens fed: layer {where[0]}, token {where[1]}"
        if not wrong:
            operation = "no residual row is off its limit with recorded tokens fed"
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
            note="\n         ".join(self._trace_lines(where[0])),
        )

    def _first(self) -> tuple[int, int] | None:
        return min((where for where, error in self.rows.items() if error > ROW_LIMIT), default=None)

    def _trace_lines(self, layer: int) -> list[str]:
        lines = [f"traced arrays of layer {layer}, limit {TRACE_LIMIT}:"]
        suspects: list[str] = []
        for (step, number), errors in sorted(self.traces.items()):
            if number != layer:
                continue
            texts = [f"{part} {error:.3f}{' OFF' if error > TRACE_LIMIT else ''}" for part, error in errors.items()]
            lines.append(f"step {step:<2} {', '.join(texts)}")
            suspects = suspects or [part for part, error in errors.items() if error > TRACE_LIMIT]
        return [*lines, _verdict(suspects)]


def _verdict(off: list[str]) -> str:
    """What the first array that is off means."""
    if not off:
        return "no traced array is off: the fault shows at other steps only"
    part = off[0]
    if part in _RAW:
        return f"{part} is off: the fault lies before this layer"
    if part == "attn":
        return "q, k and v of the row are right, attention is off: the attention kernel, or the pages and plan it read"
    words = {"q": "norm or rotation of Q", "k": "norm, rotation or slot of K", "v": "norm, source or slot of V"}[part]
    return f"{part} is off: prep ({words})"
