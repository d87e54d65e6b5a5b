"""A run: every configuration of every shape checked, timed in alternating rounds, checked again, and written down.

The sweep knows no CUDA: a Backend opens shapes, and what it gives can be called, checked and sampled. One bad cell does
not end a run: what does not fit is skipped, what fails is written down, and only a device that faulted (its memory is
gone) or the user ends it; all that was finished stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from g4kv_cli.bench.roofline import is_impossible
from g4kv_cli.bench.samples import (
    LONG_ROUNDS,
    Samples,
    burst_replays,
    is_long,
    sample_burst,
    sample_round,
    timing_of_samples,
)
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import DeviceFault, DeviceUnavailable, G4kvError
from g4kv_cli.records.bench import Ceilings, Measurement, Shape, ShapeKind

NOT_REACHED = "the run ended before it"
REST_SECONDS: Mapping[ShapeKind, float] = MappingProxyType({"decode": 0.0, "prefill": 0.2, "prep": 0.0})
"""Power sets the clock of prefill alone: the others wait for memory, and have so many cells that rests would be most of
a run."""
STEADY_NOISE = 0.02
"""Rounds whose median is more uncertain than this (Timing.noise) are followed by others, up to twice as many in all."""
MAX_REASON = 300


class Runnable(Protocol):
    """One configuration at an open shape."""

    configuration: str

    def check(self, *, fresh: bool) -> str:
        """Run once on poisoned output and check it: empty if right. ``fresh``: on another pool."""

    def capture(self) -> None:
        """Record one call for every pool as one graph, and a single call as another."""

    def sample(self, count: int) -> Samples:
        """Seconds a call of ``count`` replays back to back, each over all pools; after one replay not counted."""

    def queue_single(self) -> None:
        """Queue one call on the first pool (the harness's unit of work)."""


class OpenShape(Protocol):
    """A shape whose data is on the device."""

    pools: int
    rotating_bytes: int
    checked_rows: int

    def make(self, configuration: str) -> Runnable:
        """Raises NotCovered if this one is not here or does not take the shape, and what the device raises."""

    def renew_inputs(self) -> None:
        """Other inputs at the same addresses."""

    def close(self) -> None:
        """Free everything."""


class Backend(Protocol):
    """Where shapes are opened."""

    cache_bytes: int

    def open(self, shape: Shape) -> OpenShape:
        """Raises DeviceUnavailable if the memory is not there."""


class RunEnded(Exception):
    """Nothing more can be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """``rounds`` rounds over the configurations of a shape, each sampled for about ``seconds_per_round``; where they
    leave a median more uncertain than STEADY_NOISE, up to as many again. Then ``bursts``, a rest before each, of the
    shapes that have one: ``rest_seconds``, or, if it is None, REST_SECONDS. Of configurations whose replays are long
    there are LONG_ROUNDS rounds and bursts at most."""

    rounds: int = 4
    seconds_per_round: float = 0.02
    bursts: int = 9
    rest_seconds: float | None = None

    def rest_of(self, kind: ShapeKind) -> float:
        """Seconds of rest before a burst of these shapes; 0: they have no bursts."""
        return REST_SECONDS[kind] if self.rest_seconds is None else self.rest_seconds


@dataclass(slots=True)
class _Open:
    """The shape in work."""

    shape: Shape
    data: OpenShape | None = None
    runnables: dict[str, Runnable] = field(default_factory=dict)
    samples: dict[str, list[Samples]] = field(default_factory=dict)
    bursts: dict[str, list[Samples]] = field(default_factory=dict)
    burst_calls: dict[str, int] = field(default_factory=dict)
    results: dict[str, Measurement] = field(default_factory=dict)

    @property
    def pools(self) -> int:
        """Calls of a replay."""
        return max(1, self.data.pools if self.data is not None else 1)


class Sweep:
    """Runs planned cells in order. ``cells``: measurements as planned (status missing), those of a shape together."""

    def __init__(
        self,
        backend: Backend,
        shapes: Sequence[Shape],
        cells: Sequence[Measurement],
        ceilings: Ceilings,
        settings: SweepSettings,
        put: Callable[[Sequence[Measurement]], None],
        interrupted: Callable[[], bool] = lambda: False,
        *,
        burst_ceilings: Ceilings | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``put`` takes finished measurements; ``interrupted`` is asked between steps; ``sleep`` rests."""
        self.cells = tuple(cells)
        self.ended = ""
        self._backend = backend
        self._shapes = {shape.id: shape for shape in shapes}
        self._ceilings = ceilings
        self._burst_ceilings = burst_ceilings
        self._sleep = sleep
        self._settings = settings
        self._put = put
        self._interrupted = interrupted
        self._open: _Open | None = None

    def run_cell(self, index: int, harness: Callable[[Runnable], None] | None = None) -> str:
        """Measure cell ``index``; empty, or why it has no time. ``harness`` then times its unit of work once more.

        Raises RunEnded when nothing more can be measured.
        """
        if self.ended:
            raise RunEnded(self.ended)
        cell = self.cells[index]
        try:
            self._raise_if_interrupted()
            if self._open is None or self._open.shape.id != cell.shape:
                self._close_shape()
                self._open_shape(self._shapes[cell.shape])
            current = self._current()
            runnable = current.runnables.get(cell.configuration)
            if runnable is not None and harness is not None:
                try:
                    harness(runnable)
                except DeviceFault as fault:
                    self._note_fault(cell.configuration, fault)
                    raise
                except Exception as error:  # a cell's failure is written down, whatever it is
                    self._fail(cell.configuration, error)
            result = current.results[cell.configuration]
            if index + 1 == len(self.cells) or self.cells[index + 1].shape != cell.shape:
                result = self._close_shape().get(cell.configuration, result)
        except DeviceFault as fault:
            self._end(f"the device faulted: {fault}", memory_is_gone=True)
            raise RunEnded(self.ended) from fault
        except RunEnded as ended:
            self._end(str(ended), memory_is_gone=False)
            raise
        # Inside of a shape a sound cell is still "missing": it is measured once the second check is passed.
        return "" if result.status in ("measured", "missing") else f"{result.status}: {result.reason}"

    def run_all(self) -> None:
        """Every cell without a harness. Ends early, without an error, where RunEnded says so (``ended``)."""
        try:
            for index in range(len(self.cells)):
                self.run_cell(index)
        except RunEnded:
            return

    def _open_shape(self, shape: Shape) -> None:
        """Data, checks, graphs, rounds: everything but the harness and the second check."""
        current = self._open = _Open(shape)
        planned = [cell for cell in self.cells if cell.shape == shape.id]
        current.results = {cell.configuration: cell for cell in planned}
        try:
            current.data = self._backend.open(shape)
        except DeviceFault:
            raise
        except Exception as error:  # as below
            for cell in planned:
                self._fail(cell.configuration, error)
            return
        for cell in planned:
            self._raise_if_interrupted()
            self._prepare(cell.configuration)
        self._sample_rounds()
        self._sample_bursts()

    def _prepare(self, configuration: str) -> None:
        """A wrong kernel never gets as far as a graph."""
        current = self._current()
        data = current.data
        if data is None:
            return
        try:
            runnable = data.make(configuration)
            wrong = runnable.check(fresh=False)
            if wrong:
                self._finish(configuration, status="wrong", reason=wrong)
                return
            runnable.capture()
        except DeviceFault as fault:
            self._note_fault(configuration, fault)
            raise
        except NotCovered as why:
            self._finish(configuration, status="not covered", reason=str(why))
        except Exception as error:  # as above
            self._fail(configuration, error)
        else:
            current.runnables[configuration] = runnable
            current.samples[configuration] = []

    def _sample_rounds(self) -> None:
        """Every configuration once a round, in turning order, so that drift of the card hits all alike."""
        current = self._current()
        for number in range(2 * self._settings.rounds):
            if number >= self._settings.rounds and _are_steady(current):
                return
            order = _sampled_in(current, number)
            for configuration in order if number % 2 == 0 else reversed(order):
                self._sample(configuration, self._sample_round)

    def _sample_bursts(self) -> None:
        """As many bursts of every configuration, in turning order."""
        current = self._current()
        if not self._settings.rest_of(current.shape.kind):
            return
        for number in range(self._settings.bursts):
            order = _sampled_in(current, number)
            for configuration in order if number % 2 == 0 else reversed(order):
                self._sample(configuration, self._sample_burst)

    def _sample(self, configuration: str, step: Callable[[_Open, Runnable], None]) -> None:
        self._raise_if_interrupted()
        current = self._current()
        try:
            step(current, current.runnables[configuration])
        except DeviceFault as fault:
            self._note_fault(configuration, fault)
            raise
        except Exception as error:  # as above
            self._fail(configuration, error)

    def _sample_round(self, current: _Open, runnable: Runnable) -> None:
        found = sample_round(runnable.sample, current.pools, self._settings.seconds_per_round)
        current.samples[runnable.configuration].append(found)

    def _sample_burst(self, current: _Open, runnable: Runnable) -> None:
        name = runnable.configuration
        replays = burst_replays(timing_of_samples(current.samples[name]).median, current.pools)
        rest = self._settings.rest_of(current.shape.kind)
        current.bursts.setdefault(name, []).append(sample_burst(runnable.sample, replays, rest, self._sleep))
        current.burst_calls[name] = replays * current.pools

    def _close_shape(self) -> dict[str, Measurement]:
        """The second check, on other inputs; then the measurements are final: they are given back by configuration."""
        current, self._open = self._open, None
        if current is None:
            return {}
        try:
            if current.data is not None and current.runnables:
                current.data.renew_inputs()
            for configuration, runnable in list(current.runnables.items()):
                current.results[configuration] = self._judged(current, configuration, runnable)
        finally:
            self._put(list(current.results.values()))
        if current.data is not None:
            current.runnables.clear()
            current.data.close()
        return current.results

    def _judged(self, current: _Open, configuration: str, runnable: Runnable) -> Measurement:
        planned = current.results[configuration]
        try:
            wrong = runnable.check(fresh=True)
        except DeviceFault as fault:
            current.results[configuration] = replace(planned, status="failed", reason=f"device fault: {fault}")
            raise
        except Exception as error:  # as above
            return replace(planned, status="failed", reason=_sentence(error))
        if wrong:
            return replace(planned, status="wrong", reason=f"after timing, with fresh inputs: {wrong}")
        return self._with_time(current, planned)

    def _with_time(self, current: _Open, planned: Measurement) -> Measurement:
        data, name = current.data, planned.configuration
        timing = timing_of_samples(current.samples[name])
        burst = timing_of_samples(current.bursts[name]) if name in current.bursts else None
        pools = data.pools if data is not None else 0
        rotating = data.rotating_bytes if data is not None else 0
        cached = min(rotating, self._backend.cache_bytes) // max(pools, 1)
        for found, ceilings in ((timing, self._ceilings), (burst, self._burst_ceilings)):
            if found and ceilings and is_impossible(found.median, current.shape, ceilings, cached):
                reason = f"{found.median * 1e6:.2f} us is under the floor of this run: an error of the measurement"
                return replace(planned, status="impossible", reason=reason)
        return replace(
            planned,
            status="measured",
            reason="",
            graph=timing,
            burst=burst,
            burst_calls=current.burst_calls.get(name, 0),
            pools=pools,
            rotating_bytes=rotating,
            checked_rows=data.checked_rows if data is not None else 0,
        )

    def _end(self, why: str, *, memory_is_gone: bool) -> None:
        """Keep what the shape in work has found, and leave the rest as planned."""
        self.ended = why
        current, self._open = self._open, None
        if current is None:
            return
        self._put([item for item in current.results.values() if item.status != "missing"])
        if current.data is not None and not memory_is_gone:
            current.runnables.clear()
            current.data.close()

    def _note_fault(self, configuration: str, fault: DeviceFault) -> None:
        """The cell at fault, for the record; the fault itself ends the run."""
        self._finish(configuration, status="failed", reason=f"device fault: {fault}")

    def _current(self) -> _Open:
        if self._open is None:
            raise RuntimeError("no shape is open")
        return self._open

    def _fail(self, configuration: str, error: Exception) -> None:
        # Memory that is not there is no fault of the kernel.
        status = "skipped" if isinstance(error, DeviceUnavailable) else "failed"
        self._finish(configuration, status=status, reason=_sentence(error))

    def _finish(self, configuration: str, *, status: str, reason: str) -> None:
        current = self._current()
        current.runnables.pop(configuration, None)
        planned = current.results[configuration]
        current.results[configuration] = replace(planned, status=status, reason=reason)  # type: ignore[arg-type]

    def _raise_if_interrupted(self) -> None:
        if self._interrupted():
            raise RunEnded("interrupted")


def _is_long(current: _Open, configuration: str) -> bool:
    """False before the first round."""
    samples = current.samples[configuration]
    return bool(samples) and is_long(timing_of_samples(samples).median, current.pools)


def _sampled_in(current: _Open, number: int) -> list[str]:
    """The configurations of round or burst ``number``."""
    return [name for name in current.runnables if number < LONG_ROUNDS or not _is_long(current, name)]


def _are_steady(current: _Open) -> bool:
    """Of those that other rounds would have."""
    others = [name for name in current.runnables if not _is_long(current, name)]
    return all(timing_of_samples(current.samples[name]).noise <= STEADY_NOISE for name in others)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > MAX_REASON:  # a compiler's log, say
        text = f"{text[:MAX_REASON]} ..."
    return text if isinstance(error, G4kvError) else f"{type(error).__name__}: {text}" if text else type(error).__name__
