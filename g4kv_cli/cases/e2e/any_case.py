"""Every end-to-end case, and how each kind of them is run."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from g4kv_cli.cases.e2e.execute import run_replay_case
from g4kv_cli.cases.e2e.far import FarCase, far_cases, run_far_case
from g4kv_cli.cases.e2e.table import PREFIX, ReplayCase, replay_cases
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.records.run import CaseResult

EndToEndCase: TypeAlias = ReplayCase | FarCase

_MODELS = Path("tests", "golden", "greedy")
CHECKOUT_MODELS = Path(__file__).resolve().parents[3] / _MODELS
"""Where the package runs from a checkout; an installed one looks in the working directory."""
"""Recorded models that come with a source checkout; an installed package has none."""


def end_to_end_cases(models: Path | None = None, *, with_walks: bool = True) -> list[EndToEndCase]:
    """The replays of a file or directory of recorded models (of the checkout's own unless given), and the long walks,
    which need none. Raises UsageError as replay_cases does."""
    cases: list[EndToEndCase] = []
    found = models or next((place for place in (CHECKOUT_MODELS, _MODELS) if place.is_dir()), None)
    if found is not None:
        cases.extend(replay_cases(found))
    return [*cases, *far_cases()] if with_walks else cases


def is_end_to_end(case_id: str) -> bool:
    """True for the id, or the glob, of an end-to-end case."""
    return case_id.startswith(f"{PREFIX}/")


def run_end_to_end(case: EndToEndCase, library: KernelLibrary, rerun: str) -> CaseResult:
    """Run a case of either kind."""
    if isinstance(case, FarCase):
        return run_far_case(case, library, rerun)
    return run_replay_case(case, library, rerun)
