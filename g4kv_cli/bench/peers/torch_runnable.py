"""What peers built on torch share: our memory as tensors, our stream as torch's, and a graph of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from g4kv_cli.bench.attention_problem import PEER_ROUNDINGS, AttentionProblem
from g4kv_cli.bench.samples import Samples, sample_replays
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.errors import DeviceUnavailable

if TYPE_CHECKING:
    from g4kv_cli.bench.prep_problem import PrepProblem
    from g4kv_cli.device.cuda import CudaDevice


class _Interface:
    """``__cuda_array_interface__`` of a DeviceArray; bf16 travels as int16."""

    def __init__(self, array: DeviceArray) -> None:
        typestr = "<i2" if array.dtype.itemsize == 2 else array.dtype.str
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": typestr,
            "data": (array.address, False),
            "version": 3,
            "strides": None,
        }


def tensor_of(array: DeviceArray, device: CudaDevice) -> Any:
    """The same memory as a torch tensor (bf16 for two-byte elements)."""
    found = torch.as_tensor(_Interface(array), device=f"cuda:{device.ordinal}")
    return found.view(torch.bfloat16) if array.dtype.itemsize == 2 else found


def place_of(device: CudaDevice) -> str:
    """The device's name for torch."""
    return f"cuda:{device.ordinal}"


def stream_of(device: CudaDevice) -> Any:
    """The device's stream for torch."""
    return torch.cuda.ExternalStream(int(device.stream.handle), device=f"cuda:{device.ordinal}")


def require_memory(device: CudaDevice, nbytes: int, what: str) -> None:
    """Raises DeviceUnavailable if torch cannot have so much beside the arena."""
    free = device.memory_bytes()[0]
    if nbytes > 0.8 * free:
        raise DeviceUnavailable(f"{what} takes {nbytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


class GraphedCalls:
    """``run(pool)`` queues one call; what is left to a subclass is ``check``."""

    def __init__(
        self,
        configuration: str,
        problem: AttentionProblem | PrepProblem,
        device: CudaDevice,
        run: Callable[[int], Any],
        keep: tuple[Any, ...] = (),
    ) -> None:
        self.configuration = configuration
        self._num_pools = len(problem.pools)
        self._device = device
        self._run = run
        self._keep: tuple[Any, ...] = keep
        self._stream = stream_of(device)
        self._all: Any = None
        self._single: Any = None

    def capture(self) -> None:
        """As GraphRunnable."""
        with torch.inference_mode():
            with torch.cuda.stream(self._stream):
                self._run(0)
            self._device.synchronize()
            graphs = []
            for pools in (range(self._num_pools), range(1)):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
                    for pool in pools:
                        self._run(pool)
                graphs.append(graph)
        self._all, self._single = graphs
        self._replay(self._all)
        self._replay(self._single)
        self._device.synchronize()

    def sample(self, count: int) -> Samples:
        """As GraphRunnable."""
        return sample_replays(self._device, lambda: self._replay(self._all), count).over(self._num_pools)

    def queue_single(self) -> None:
        """As GraphRunnable."""
        self._replay(self._single)

    def close(self) -> None:
        """Let go of graphs and tensors, and give torch's memory back."""
        self._all = self._single = None
        self._keep = ()
        self._run = _closed
        torch.cuda.empty_cache()

    def _replay(self, graph: Any) -> None:
        with torch.cuda.stream(self._stream):
            graph.replay()


class TorchRunnable(GraphedCalls):
    """Attention: ``run`` gives the output tensor [tokens, heads, head_dim] (any float type)."""

    def __init__(
        self,
        configuration: str,
        problem: AttentionProblem,
        device: CudaDevice,
        run: Callable[[int], Any],
        keep: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(configuration, problem, device, run, keep)
        self._problem = problem

    def check(self, *, fresh: bool) -> str:
        """As GraphRunnable."""
        pool = self._num_pools - 1 if fresh else 0
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            out = self._run(pool)
            self._device.synchronize()
            if self._all is not None:
                # The captured graph writes where it always does; the eager call must not hide that it is stale.
                self._all.replay()
            host: npt.NDArray[np.float32] = out.float().cpu().numpy()
        self._device.synchronize()
        shape = self._problem.shape
        out = host.reshape(self._problem.tokens, shape.num_qo_heads, shape.head_dim)
        return self._problem.check(out, pool, roundings=PEER_ROUNDINGS)


def _closed(_pool: int) -> Any:
    raise RuntimeError("the peer was closed")
