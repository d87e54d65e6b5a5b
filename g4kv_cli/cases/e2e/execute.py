"""One replay case on a device. Returns a CaseResult, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.e2e.batch import MakeCache, ModelBatch
from g4kv_cli.cases.e2e.caches import FamilyCache
from g4kv_cli.cases.e2e.family_launches import FamilyLaunches
from g4kv_cli.cases.e2e.judge import compare_runs
from g4kv_cli.cases.e2e.localise import localise
from g4kv_cli.cases.e2e.model_reader import read_model
from g4kv_cli.cases.e2e.recorded_model import RecordedModel
from g4kv_cli.cases.e2e.replay import Companion, Outcome, companions_of, finish, replay, take_turns
from g4kv_cli.cases.e2e.table import ReplayCase
from g4kv_cli.cases.session import Session, run_session
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import decode_entry, entry_for
from g4kv_cli.errors import G4kvError
from g4kv_cli.records.run import CaseResult


@dataclass(slots=True, kw_only=True)
class ReplayRun(Session):
    """A replay case on the device. ``make_cache`` and ``make_launches`` are replaced by tests of the gate itself."""

    case: ReplayCase
    make_cache: MakeCache = FamilyCache
    make_launches: Callable[..., FamilyLaunches] = FamilyLaunches

    @contextmanager
    def batch(self, model: RecordedModel, companions: tuple[Companion, ...] = ()) -> Iterator[ModelBatch]:
        """Caches and buffers for the model and its companions, given back in the end."""
        lengths = [len(one.prompt) + one.leaves - one.joins for one in companions]
        batch = ModelBatch(
            self.library,
            model,
            self.case.settings,
            context_tokens=max([len(model.prompt) + self.case.steps, model.num_positions, *lengths]),
            prompt_tokens=max([len(model.prompt), *(len(one.prompt) for one in companions)]),
            make_cache=self.make_cache,
            make_launches=self.make_launches,
        )
        try:
            yield batch
        finally:
            with suppress(G4kvError):  # after a fault the device is replaced, and its memory with it
                batch.free()


def run_replay_case(
    case: ReplayCase,
    library: KernelLibrary,
    rerun: str,
    make_cache: MakeCache = FamilyCache,
    make_launches: Callable[..., FamilyLaunches] = FamilyLaunches,
    dumps: DumpSettings | None = None,
) -> CaseResult:
    """Run a case; see run_session. A wrong replay comes with the layer, token and array where it goes wrong."""

    def make() -> ReplayRun:
        return ReplayRun(library=library, case=case, make_cache=make_cache, make_launches=make_launches)

    return run_session(case, rerun, library, make, _execute, dumps=dumps)


def _execute(run: ReplayRun) -> None:
    models = [read_model(path) for path in run.case.paths]
    if len(models) > 1:
        _take_turns(run, models)
        return
    (model,) = models
    companions = companions_of(model, run.case.companions, run.case.steps)
    outcome = _replay(run, model, companions)
    if _noted(run, model, outcome) and companions:
        _compare_with_alone(run, [outcome], [model])


def _take_turns(run: ReplayRun, models: list[RecordedModel]) -> None:
    """Several models on one device, one step of each in turn; then each alone, which must change no bit."""
    with ExitStack() as stack:
        batches = [stack.enter_context(run.batch(model)) for model in models]
        outcomes = take_turns([replay(batch, steps=run.case.steps) for batch in batches])
    right = [_noted(run, model, outcome) for model, outcome in zip(models, outcomes, strict=True)]
    if all(right):
        _compare_with_alone(run, outcomes, models)


def _replay(run: ReplayRun, model: RecordedModel, companions: tuple[Companion, ...] = ()) -> Outcome:
    with run.batch(model, companions) as batch:
        return finish(replay(batch, steps=run.case.steps, companions=companions))


def _noted(run: ReplayRun, model: RecordedModel, outcome: Outcome) -> bool:
    """Note the outcome's bits or findings; True if it was right."""
    for logits in outcome.logits:
        run.digest.update(logits.tobytes())
    if outcome.failed_step is None:
        return True
    run.mismatches.extend(outcome.mismatches)
    with run.batch(model) as batch:
        run.found(localise(batch, model, outcome.failed_step))
    return False


def _compare_with_alone(run: ReplayRun, outcomes: list[Outcome], models: list[RecordedModel]) -> None:
    label = run.case.settings.decode_form
    families = [family for model in models for family in model.families]
    forms = [row for one in families for row in (entry_for(one, "attention", "prefill"), decode_entry(one, label))]
    if not run.promises("batch_invariant", forms):
        return
    for model, outcome in zip(models, outcomes, strict=True):
        alone = _replay(run, model)
        note = f"{model.name}: the same form and bucket width, without the others"
        run.found(compare_runs(outcome.logits, alone.logits, note))
