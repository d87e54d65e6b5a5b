"""Programs whose copies (cp.async) go where another is still in flight to."""

from __future__ import annotations

from judged_programs import COPIES, Program

WRONG_COPIES = (
    Program(
        "a stage is filled again before it was waited for",
        """
  __shared__ alignas(16) int stages[2][128];
  int sum = 0;
  for (int i = 0; i < 2; i++) { copy16(&stages[i][4 * t], in + 128 * i + 4 * t); commit(); }
  for (int i = 0; i < 4; i++) {
    copy16(&stages[i % 2][4 * t], in + 128 * (i + 2) + 4 * t); commit();
    wait<2>();
    sum += stages[i % 2][4 * t];
  }
  wait<0>();
  out[t] = sum;""",
        before=COPIES,
        kinds=("unfinished_copy",),
    ),
    Program(
        "a second copy to one place that nobody committed",
        """
  __shared__ alignas(16) int stage[128];
  copy16(stage + 4 * t, in + 4 * t); commit();
  copy16(stage + 4 * t, in + 128 + 4 * t);
  wait<0>();
  out[t] = stage[4 * t];""",
        before=COPIES,
        kinds=("unfinished_copy",),
    ),
)
