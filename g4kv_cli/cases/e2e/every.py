"""Every end-to-end case: replays of recorded models, and long walks without one."""

from __future__ import annotations

from pathlib import Path

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.e2e.far import far_cases
from g4kv_cli.cases.e2e.table import PREFIX, replay_cases

_MODELS = Path("tests", "golden", "greedy")
CHECKOUT_MODELS = Path(__file__).resolve().parents[3] / _MODELS
"""The recorded models of a source checkout; an installed package has none, and looks in the working directory."""


def end_to_end_cases(models: Path | None = None, *, with_walks: bool = True) -> list[Case]:
    """The replays of a file or directory of recorded models (of the checkout's own unless given), and the long walks,
    which need none. Raises UsageError as replay_cases does."""
    cases: list[Case] = []
    found = models or next((place for place in (CHECKOUT_MODELS, _MODELS) if place.is_dir()), None)
    if found is not None:
        cases.extend(replay_cases(found))
    return [*cases, *far_cases()] if with_walks else cases


def is_end_to_end(case_id: str) -> bool:
    """True for the id, or the glob, of an end-to-end case."""
    return case_id.startswith(f"{PREFIX}/")
