"""A configuration's graphs with calls that make a new output each time, as torch's do."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from g4kv_cli.bench.graph_runnable import GraphRunnable


class ListGraph:
    """Steps that were recorded, to be done again."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.closed = False

    def replay(self) -> None:
        for step in self.steps:
            step()

    def close(self) -> None:
        self.closed = True


class NewOutputs:
    """Each queued call has an output of its own, which holds ``value`` + pool once the call was run."""

    renewed_in_place = True

    def __init__(self) -> None:
        self.value = 100.0
        self.out = np.zeros(1)
        self.recording: ListGraph | None = None
        self.poisoned = 0

    def queue(self, pool: int) -> None:
        out = self.out = np.zeros(1)

        def step() -> None:
            out[0] = self.value + pool

        if self.recording is None:
            step()
        else:
            self.recording.steps.append(step)

    def poison(self) -> None:
        self.out[0] = np.nan
        self.poisoned += 1

    def output(self) -> Any:
        return self.out


class ListRunnable(GraphRunnable):
    @contextmanager
    def record(self) -> Iterator[ListGraph]:
        graph = self.call.recording = ListGraph()  # type: ignore[attr-defined]
        yield graph
        self.call.recording = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("pools", [1, 3])
def test_the_second_check_reads_what_the_timed_graph_wrote(pools: int) -> None:
    call = NewOutputs()

    def wrong(out: Any, pool: int) -> str:
        return "" if out[0] == call.value + pool else f"{out[0]}"

    device: Any = types.SimpleNamespace(synchronize=lambda: None)
    runnable = ListRunnable("peer:x", device, call, wrong, pools)
    assert runnable.check(fresh=False) == ""
    runnable.capture()
    call.value = 200.0  # renewed inputs
    assert runnable.check(fresh=True) == ""
    assert call.poisoned == 2
    # A graph that does nothing leaves the poison.
    assert isinstance(runnable._all, ListGraph)
    runnable._all.steps.clear()
    assert runnable.check(fresh=True) == "nan"
    graphs = (runnable._all, runnable._single)
    runnable.close()
    assert [graph.closed for graph in graphs] == [True, True]  # type: ignore[union-attr]
