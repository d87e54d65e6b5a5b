"""The end-to-end cases: each recorded model under every way of serving it that must give the same verdict.

Requests of different models cannot share a launch (head counts and norm weights differ), so a batch has companions of
the same model, and different models take turns on one device, each with pools of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from g4kv_cli.cases.case import OfManyEntries, RunContext
from g4kv_cli.cases.e2e.batch import Settings
from g4kv_cli.cases.e2e.model_reader import read_model
from g4kv_cli.cases.e2e.recorded_model import RecordedModel
from g4kv_cli.entries.table import decode_forms
from g4kv_cli.model.geometry import Geometry, model_families
from g4kv_cli.model.kv_format import FOLDED, can_fold
from g4kv_cli.records.npz import npz_files
from g4kv_cli.records.run import CaseResult

ENTRY = "greedy_decode_replay"
PREFIX = "e2e"
END_TO_END_WEIGHT = 60.0
"""An end-to-end case takes as long as that many others."""
FIRST_STEPS = 12
"""Enough for the window's edge to pass the first key of a short prompt."""
BATCH_STEPS = 32
"""A batch with companions costs several times a lone request; by then each of them has come or gone."""
TURN_STEPS = 16
BUCKET_WIDTH = 4
PREFILL_CHUNKS = (1, 5, 16)
SPLITS = (1, 2, 5)
DECODE_NAMES = {"prefill": "prefill-entry", "decode-split": "splits"}
"""Forms whose cases are not called as the form is."""
PAGE_SIZES = (1, 64)


@dataclass(frozen=True, slots=True)
class ReplayCase(OfManyEntries):
    """Recorded models, replayed for ``steps`` steps. With several ``paths`` they take turns; ``companions`` is how many
    other requests of the same model are in the batch at a time."""

    id: str
    geometry: Geometry
    paths: tuple[Path, ...]
    settings: Settings
    steps: int
    companions: int = 0
    entry: str = ENTRY

    @property
    def weight(self) -> float:
        """See END_TO_END_WEIGHT."""
        return END_TO_END_WEIGHT

    def run(self, context: RunContext) -> CaseResult:
        """Run it; see run_replay_case."""
        from g4kv_cli.cases.e2e.execute import run_replay_case  # late: what runs a case knows the case

        return run_replay_case(self, context.library, context.rerun(self.id), dumps=context.dumps)


def replay_cases(path: Path) -> list[ReplayCase]:
    """The cases of a file or of a directory. Raises UsageError for a file that is not a complete recorded model."""
    models = [read_model(file) for file in npz_files(path, "--model-golden")]
    cases = [case for model in models for case in _cases_of(model)]
    for group in _groups(models):
        name = "+".join(model.name for model in group)
        cases.append(
            ReplayCase(
                id=f"{PREFIX}/turns/{name}",
                geometry=_named(group),
                paths=tuple(model.path for model in group),
                settings=Settings(bucket_width=2),
                steps=min(TURN_STEPS, *(model.num_steps for model in group)),
            )
        )
    return cases


def _cases_of(model: RecordedModel) -> Iterator[ReplayCase]:
    default = Settings()

    def case(name: str, steps: int | None = None, companions: int = 0, **changed: object) -> ReplayCase:
        return ReplayCase(
            id=f"{PREFIX}/{model.name}/{name}",
            geometry=_named([model]),
            paths=(model.path,),
            settings=dataclasses.replace(default, **changed),  # type: ignore[arg-type]
            steps=min(steps or model.num_steps, model.num_steps),
            companions=companions,
        )

    yield case("default")
    yield case(f"first{FIRST_STEPS}", steps=FIRST_STEPS)
    for chunk in PREFILL_CHUNKS:
        yield case(f"prefill/chunk{chunk}", prefill_chunk=chunk)
    for form in decode_forms():
        name = f"decode/{DECODE_NAMES.get(form.form, form.form)}"
        if form.takes_splits:
            for splits in SPLITS:
                yield case(f"{name}{splits}", decode_form=form.label, num_splits=splits)
        elif form.label != default.decode_form:
            yield case(name, decode_form=form.label)
    for page_size in PAGE_SIZES:
        yield case(f"page-size/{page_size}", page_size=page_size)
    # All at once, so that the ways of serving also meet each other.
    yield case("mixed/page1-chunk5-splits2", page_size=1, prefill_chunk=5, decode_form="c", num_splits=2)
    if any(can_fold(geometry) for geometry in model.families):
        yield case(FOLDED, kv_format=FOLDED)
        yield case(f"{FOLDED}/mixed/page1-chunk5-splits2", page_size=1, prefill_chunk=5, decode_form="c", num_splits=2,
                   kv_format=FOLDED)  # fmt: skip
        yield case(f"{FOLDED}/batch/3-requests", steps=BATCH_STEPS, companions=2, bucket_width=BUCKET_WIDTH,
                   num_requests=3, kv_format=FOLDED)  # fmt: skip
    for companions in (1, 2):
        yield case(f"batch/{companions + 1}-requests", steps=BATCH_STEPS, companions=companions,
                   bucket_width=BUCKET_WIDTH, num_requests=companions + 1)  # fmt: skip


def _groups(models: Sequence[RecordedModel]) -> Iterator[tuple[RecordedModel, ...]]:
    """Pairs of neighbours, and all three where there are three."""
    yield from itertools.pairwise(models)
    if len(models) >= 3:
        yield tuple(models[:3])


def _named(models: Sequence[RecordedModel]) -> Geometry:
    """The geometry under which results are shown: the models' names."""
    return dataclasses.replace(model_families(models[0].model)[0], name="+".join(model.name for model in models))
