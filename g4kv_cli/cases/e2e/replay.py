"""The free-running replay of one recorded request, alone or with companions that come and go.

``replay`` is a generator that pauses after each step, so that several models can take turns on one device. It ends at
the first step that is wrong: what follows a wrong step says nothing more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from g4kv_cli.cases.e2e.batch import ModelBatch, NonFiniteStream, Request, Work
from g4kv_cli.cases.e2e.judge import judge_logits, judge_token, non_finite
from g4kv_cli.cases.e2e.recorded_model import Float32, Int64, RecordedModel
from g4kv_cli.cases.e2e.reference import reference_logits
from g4kv_cli.errors import DeviceFault
from g4kv_cli.records.run import Mismatch


@dataclass(frozen=True, slots=True, eq=False)
class Companion:
    """Another request of the same model: in the batch from step ``joins`` up to, not including, ``leaves``."""

    name: str
    prompt: Int64
    joins: int
    leaves: int


@dataclass(slots=True, eq=False)
class Outcome:
    """How a replay ended. ``logits[t]``: those of step t (step 0: all prompt rows); ``failed_step`` None if right."""

    logits: list[Float32] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    failed_step: int | None = None


@dataclass(slots=True, eq=False)
class _Guest:
    """A companion in the batch: the tokens it was fed, and the logits it got for each of them."""

    companion: Companion
    request: Request
    fed: list[int]
    logits: list[Float32]

    def next_token(self) -> int:
        return int(self.logits[-1][-1].argmax())


def replay(
    batch: ModelBatch, *, steps: int, companions: Sequence[Companion] = (), tokens: Int64 | None = None
) -> Generator[int, None, Outcome]:
    """Prefill and ``steps - 1`` decode steps; yields the step that is done. With ``tokens`` these are fed, in place of
    the run's own choice, and nothing is judged."""
    run = _Replay(batch, steps, companions, tokens)
    outcome = run.outcome
    for step in range(steps):
        try:
            run.step(step)
        except DeviceFault as fault:
            raise DeviceFault([f"step {step}, {fault.reports[0]}", *fault.reports[1:]], fault.kinds) from fault
        except NonFiniteStream as error:
            outcome.mismatches.append(non_finite(step, error.request.name, error.layer, error.token, error.dim))
        if outcome.mismatches:
            outcome.failed_step = step
            break
        yield step
    run.end()
    return outcome


def finish(generator: Generator[int, None, Outcome]) -> Outcome:
    """Run a replay to its end."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def take_turns(generators: Sequence[Generator[int, None, Outcome]]) -> list[Outcome]:
    """Run several replays, one step of each in turn, to their ends."""
    outcomes: list[Outcome | None] = [None] * len(generators)
    while any(outcome is None for outcome in outcomes):
        for index, generator in enumerate(generators):
            if outcomes[index] is None:
                try:
                    next(generator)
                except StopIteration as end:
                    outcomes[index] = end.value
    return [outcome for outcome in outcomes if outcome is not None]


def companions_of(model: RecordedModel, count: int, steps: int) -> tuple[Companion, ...]:
    """Up to ``count`` companions at a time. One leaves mid-way and another takes its pages; where there are two, they
    join in one step, as a ragged batch."""
    early = min(2, max(1, steps // 3))
    late = max(early + 1, steps // 2)
    first = Companion("companion 1", model.tokens[19::-1], early, late)
    second = Companion("companion 2", model.tokens[24:35], early, steps)
    third = Companion("companion 3", np.concatenate([model.tokens[40:43], model.prompt[::-1]]), late, steps)
    return {0: (), 1: (first, third), 2: (first, second, third)}[count]


class _Replay:
    def __init__(self, batch: ModelBatch, steps: int, companions: Sequence[Companion], tokens: Int64 | None) -> None:
        self.batch, self.model, self.steps = batch, batch.model, steps
        self.companions, self.tokens = companions, tokens
        self.request = batch.admit("the recorded request")
        self.guests: list[_Guest] = []
        self.outcome = Outcome()
        self.next_token = 0

    def step(self, step: int) -> None:
        if step == 0:
            logits = self._prefill()
            want, first_position = self.model.prompt_logits, 0
        else:
            first_position = self.request.length
            self._admit(step)
            logits = self._decode()
            want = self.model.logits[step : step + 1]
        self.outcome.logits.append(logits)
        self.next_token = int(logits[-1].argmax())
        if self.tokens is not None:
            self.next_token = int(self.tokens[step])
        else:
            operation = "logits of the prompt" if step == 0 else "logits"
            self._found(judge_logits(self.model, operation, logits, want, first_position, step))
            position = self.request.length - 1
            self._found(judge_token(step, position, self.next_token, int(self.model.tokens[step])))
        for guest in [guest for guest in self.guests if guest.companion.leaves == step + 1]:
            self._dismiss(guest, step)

    def end(self) -> None:
        """Give back the pages of everybody who is still there."""
        for guest in self.guests:
            self.batch.retire(guest.request)
        self.batch.retire(self.request)

    def _prefill(self) -> Float32:
        prompt, size = self.model.prompt, self.batch.settings.prefill_chunk or len(self.model.prompt)
        return np.concatenate(
            [
                self.batch.prefill([Work(self.request, prompt[begin : begin + size])])[0]
                for begin in range(0, len(prompt), size)
            ]
        )

    def _admit(self, step: int) -> None:
        """Companions that join together are prefilled in one ragged batch."""
        joining = [
            _Guest(companion, self.batch.admit(companion.name), companion.prompt.tolist(), [])
            for companion in self.companions
            if companion.joins == step
        ]
        if joining:
            prompts = [Work(guest.request, guest.companion.prompt) for guest in joining]
            for guest, logits in zip(joining, self.batch.prefill(prompts), strict=True):
                guest.logits.append(logits)
            self.guests += joining

    def _decode(self) -> Float32:
        """The recorded request's row comes behind its companions', so it moves when one joins or leaves."""
        work = [Work(guest.request, np.array([guest.next_token()])) for guest in self.guests]
        work.append(Work(self.request, np.array([self.next_token])))
        *others, own = self.batch.decode(work)
        for guest, one, logits in zip(self.guests, work, others, strict=False):
            guest.fed.append(int(one.ids[0]))
            guest.logits.append(logits)
        return own

    def _dismiss(self, guest: _Guest, step: int) -> None:
        """A companion has no recording: it is held against the float32 formula, fed the same tokens."""
        if self.tokens is None:
            want = reference_logits(self.model, np.array(guest.fed))
            got = np.concatenate(guest.logits)
            self._found(judge_logits(self.model, f"logits of {guest.companion.name}", got, want, 0, step))
        self.guests.remove(guest)
        self.batch.retire(guest.request)

    def _found(self, mismatch: Mismatch | None) -> None:
        if mismatch is not None:
            self.outcome.mismatches.append(mismatch)
