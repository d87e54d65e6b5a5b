"""A configuration's calls as CUDA graphs: checked, recorded, sampled. One for our entries, manifests and peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from g4kv_cli.bench.samples import Samples, sample_replays

if TYPE_CHECKING:
    from g4kv_cli.bench.clock import ClockProbe
    from g4kv_cli.device.cuda import CudaDevice

Array = npt.NDArray[Any]


class Graph(Protocol):
    """Recorded calls."""

    def replay(self) -> None:
        """Queue all of them."""

    def close(self) -> None:
        """Destroy the graph."""


class Call(Protocol):
    """One configuration's call. ``renewed_in_place``: renewed inputs keep their addresses, so a graph sees them."""

    renewed_in_place: bool

    def queue(self, pool: int) -> None:
        """Queue one call that works on this pool, into the device's stream."""

    def poison(self) -> None:
        """Fill the output with a pattern that no result has."""

    def output(self) -> Array:
        """The output of what was queued last, as the problem's check takes it."""


@dataclass(slots=True)
class GraphRunnable:
    """A call as two graphs: one call for every pool, and a single call. ``probe`` reads the clock of samples."""

    configuration: str
    device: CudaDevice
    call: Call
    wrong: Callable[[Array, int], str]
    pools: int
    probe: ClockProbe | None = None
    _all: Graph | None = None
    _single: Graph | None = None

    def check(self, *, fresh: bool) -> str:
        """Eagerly on pool 0; fresh, the timed graph itself, whose last call is on the last pool."""
        pool = self.pools - 1 if fresh else 0
        self.call.poison()
        if fresh and self._all is not None and self.call.renewed_in_place:
            self._all.replay()
        else:
            self.call.queue(pool)
        self.device.synchronize()
        return self.wrong(self.call.output(), pool)

    def capture(self) -> None:
        """Both graphs, each replayed once."""
        with self.record() as single:
            self.call.queue(0)
        with self.record() as every:  # the later one: the call's output is then of it
            for pool in range(self.pools):
                self.call.queue(pool)
        self._all, self._single = every, single
        every.replay()
        single.replay()
        self.device.synchronize()

    def record(self) -> AbstractContextManager[Graph]:
        """What is queued in the ``with`` body becomes a graph."""
        return self.device.capture()

    def sample(self, count: int) -> Samples:
        """Replays between events, back to back behind one that is not counted: the host is never waited for."""
        if self._all is None:
            raise RuntimeError("nothing was captured")
        return sample_replays(self.device, self._all.replay, count, self.probe).over(self.pools)

    def queue_single(self) -> None:
        """One call on pool 0, as a graph."""
        if self._single is None:
            raise RuntimeError("nothing was captured")
        self._single.replay()

    def close(self) -> None:
        """Destroy the graphs."""
        for graph in (self._all, self._single):
            if graph is not None:
                graph.close()
        self._all = self._single = None
