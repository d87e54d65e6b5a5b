"""What somebody's code said, as part of one line of ours."""

from __future__ import annotations

MAX_CHARACTERS = 400


def one_line(text: str, *, last: bool = False) -> str:
    """The first line of a text that is not empty, or the ``last``; what a terminal would act on is a question mark."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[-1 if last else 0] if lines else ""
    shown = "".join(one if one.isprintable() else "?" for one in line)
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[: MAX_CHARACTERS - 3]}..."
