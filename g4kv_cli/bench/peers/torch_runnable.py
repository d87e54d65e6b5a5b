"""What peers built on torch share: our memory as tensors, our stream as torch's, and a graph of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from g4kv_cli.bench.attention_problem import PEER_ROUNDINGS, AttentionProblem
from g4kv_cli.bench.graph_runnable import GraphRunnable
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


class TorchGraph:
    """A graph that torch recorded, with the memory of the tensors that were made in it."""

    def __init__(self, stream: Any) -> None:
        self.graph: Any = torch.cuda.CUDAGraph()
        self._stream = stream

    def replay(self) -> None:
        """As Graph."""
        with torch.cuda.stream(self._stream):
            self.graph.replay()

    def close(self) -> None:
        """As Graph."""
        self.graph = None


class TorchCall:
    """``run(pool)`` queues one call and gives the output tensor [tokens, heads, head_dim] (any float type)."""

    renewed_in_place = True

    def __init__(self, problem: AttentionProblem, device: CudaDevice, run: Callable[[int], Any]) -> None:
        self._rows = (problem.tokens, problem.shape.num_qo_heads, problem.shape.head_dim)
        self._run, self._stream = run, stream_of(device)
        self._out: Any = None

    def queue(self, pool: int) -> None:
        """One call on this pool."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._out = self._run(pool)

    def poison(self) -> None:
        """NaN, where a call has been."""
        if self._out is not None:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._out.fill_(float("nan"))

    def output(self) -> npt.NDArray[Any]:
        """float32 [tokens, heads, head_dim]; of the graph of all pools, where that was recorded last."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            host: npt.NDArray[np.float32] = self._out.float().cpu().numpy()
        return host.reshape(self._rows)


class TorchPrepCall:
    """``run(pool)`` writes into the problem's own outputs. Renewed rows lie elsewhere: a graph reads the old ones."""

    renewed_in_place = False

    def __init__(self, problem: PrepProblem, device: CudaDevice, run: Callable[[int], Any]) -> None:
        self._problem, self._run, self._stream = problem, run, stream_of(device)
        self._pool = 0

    def queue(self, pool: int) -> None:
        """One call on this set."""
        self._pool = pool
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._run(pool)

    def poison(self) -> None:
        """As PrepProblem."""
        self._problem.poison()

    def output(self) -> npt.NDArray[Any]:
        """As PrepProblem.check takes it."""
        return self._problem.written(self._pool)


class TorchRunnable(GraphRunnable):
    """As GraphRunnable; torch records the graphs, as it has to know whose memory is whose."""

    @contextmanager
    def record(self) -> Iterator[TorchGraph]:
        """As GraphRunnable."""
        recorded = TorchGraph(stream_of(self.device))
        with torch.cuda.graph(recorded.graph, stream=recorded._stream, capture_error_mode="relaxed"):
            yield recorded

    def close(self) -> None:
        """Let go of graphs and tensors, and give torch's memory back."""
        super().close()
        del self.call, self.wrong
        torch.cuda.empty_cache()


def torch_attention(
    configuration: str, problem: AttentionProblem, device: CudaDevice, run: Callable[[int], Any]
) -> TorchRunnable:
    """``run`` as TorchCall has it; the check allows for one more rounding than ours."""
    wrong = partial(problem.check, roundings=PEER_ROUNDINGS)
    return TorchRunnable(configuration, device, TorchCall(problem, device, run), wrong, len(problem.pools))


def torch_prep(
    configuration: str, problem: PrepProblem, device: CudaDevice, run: Callable[[int], Any]
) -> TorchRunnable:
    """``run`` as TorchPrepCall has it."""
    wrong = partial(problem.check, is_peer=True)
    return TorchRunnable(configuration, device, TorchPrepCall(problem, device, run), wrong, len(problem.pools))
