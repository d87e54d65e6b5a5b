"""Launches recorded once and replayed as one CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


class CapturedGraph:
    """Launches that were recorded by :meth:`CudaDevice.capture`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._driver = device._driver
        self._graph: Any = None
        self._executable: Any = None

    def finish(self, graph: Any) -> None:
        """Make the recorded graph executable (called at the end of the capture)."""
        self._graph = graph
        self._executable = self._device.call("instantiate a graph", self._driver.cuGraphInstantiate(graph, 0))

    def replay(self, times: int = 1) -> None:
        """Queue the whole graph ``times`` times."""
        if self._executable is None:
            raise ValueError("the graph is still being captured, or was closed")
        for _ in range(times):
            self._device.call(
                "launch a graph", self._driver.cuGraphLaunch(self._executable, self._device.stream.handle)
            )
            self._device.note_queued("a CUDA graph")

    def close(self) -> None:
        """Destroy the graph. Safe to call twice."""
        if self._executable is not None:
            self._driver.cuGraphExecDestroy(self._executable)
            self._driver.cuGraphDestroy(self._graph)
            self._executable = self._graph = None
