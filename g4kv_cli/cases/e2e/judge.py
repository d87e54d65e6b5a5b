"""Rule B: a replay that is float32 outside the kernels chooses the recorded tokens and stays near the recorded logits.

Against the recorded float32 run: every element of a step's (and of a prompt row's) logits within 1.5 times the largest
gap between the recorded bf16 and float32 runs, each row's root mean square within 1.5 times the largest such gap of a
step. Twice the limit is below every recorded margin, so no token can flip inside it.
"""

from __future__ import annotations

import numpy as np

from g4kv_cli.cases.e2e.recorded_model import Float32, RecordedModel
from g4kv_cli.records.run import Mismatch


def judge_logits(
    model: RecordedModel, operation: str, got: Float32, want: Float32, first_position: int, step: int
) -> Mismatch | None:
    """Rows of logits [rows, vocabulary], row 0 at ``first_position``. None if all are within the limits."""
    error = np.abs(got.astype(np.float64) - want)
    rms = np.sqrt(np.square(error).mean(axis=1))
    wrong = ~((error <= model.max_limit) & (rms <= model.rms_limit)[:, None])  # a NaN is never within
    if not wrong.any():
        return None
    first, worst = (
        tuple(int(at) for at in np.unravel_index(index, error.shape))
        for index in (int(np.argmax(wrong)), int(np.argmax(np.where(wrong, error, -1))))
    )
    limit = f"largest error <= {model.max_limit:.3g}, root mean square of a row <= {model.rms_limit:.3g} (rule B)"
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(wrong)),
        total=got.size,
        first=_at(step, first_position + first[0], first[1]),
        first_got=f"{got[first]:.5g}",
        first_want=f"{want[first]:.5g}",
        worst=_at(step, first_position + worst[0], worst[1]),
        worst_got=f"{got[worst]:.5g}",
        worst_want=f"{want[worst]:.5g}",
        limit=limit,
        note=f"largest error {error.max():.3g}, root mean square of the worst row {rms.max():.3g}",
    )


def judge_token(step: int, position: int, got: int, want: int) -> Mismatch | None:
    """The greedy token of a step."""
    if got == want:
        return None
    at = {"step": step, "position": position}
    return Mismatch("greedy token", 1, 1, at, str(got), str(want), at, str(got), str(want), "equal")


def non_finite(step: int, request: str, layer: int, token: int, dim: int) -> Mismatch:
    """A residual stream that is not a number any more, at the first such element of the first such layer."""
    at = {"step": step, "layer": layer, "token": token, "dim": dim}
    return Mismatch(
        f"residual stream of {request}: non-finite", 1, 1, at, "NaN or infinity", "a number", at, "NaN or infinity",
        "a number", "finite", "the step ends here",
    )  # fmt: skip


def compare_runs(got: list[Float32], want: list[Float32], note: str) -> Mismatch | None:
    """Logits of two runs that must agree in every bit, step by step."""
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        different = one.view(np.uint32) != other.view(np.uint32)
        if different.any():
            row, token = (int(at) for at in np.unravel_index(int(np.argmax(different)), one.shape))
            return _mismatch(
                "logits of the same request, alone and accompanied", int(np.count_nonzero(different)), one.size,
                {"step": step, "row": row, "token_id": token}, one[row, token], other[row, token], "bit-equal", note,
            )  # fmt: skip
    return None


def _at(step: int, position: int, token_id: int) -> dict[str, int]:
    return {"step": step, "position": position, "token_id": token_id}


def _mismatch(
    operation: str, count: int, total: int, at: dict[str, int], got: object, want: object, limit: str, note: str = ""
) -> Mismatch:
    texts = f"{got:.9g}", f"{want:.9g}"
    return Mismatch(operation, count, total, at, *texts, at, *texts, limit, note)
