"""What plain kernels reach on this card in this run: copy, read, launch, and a bf16 GEMM where a library is there.

They are sampled as the cells are that they are held against: in rounds without pauses, and in bursts where cells are.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from g4kv_cli.bench.clock import ClockProbe
from g4kv_cli.bench.samples import (
    Samples,
    burst_replays,
    sample_burst,
    sample_replays,
    sample_round,
    timing_of_samples,
)
from g4kv_cli.bench.sweep import SweepSettings
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.records.bench import Ceilings, Timing

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

SOURCE = "ceilings.cu"
THREADS = 256
ACCESSES = (2, 4, 8)
"""Of 16 bytes, in flight a thread: the compiled variants."""
VECTOR_BYTES = 16
MAX_COPY_BYTES = 4 * 2**30
EMPTY_LAUNCHES = 500
GEMM_EXTENT = 8192


class CeilingParameters(ctypes.Structure):
    """Twin of ``struct CeilingParams`` (kernels/ceilings.cu): device addresses, and vectors of 16 bytes."""

    _fields_ = (("source", ctypes.c_uint64), ("destination", ctypes.c_uint64), ("vectors", ctypes.c_int64))


def queue_copy(library: KernelLibrary, source: DeviceArray, destination: DeviceArray, accesses: int = 4) -> None:
    """Copy ``source`` over the first bytes of ``destination``. ValueError unless whole, aligned vectors fit."""
    _queue(library, "ceiling_copy", accesses, source, destination, destination.nbytes)


def queue_read(library: KernelLibrary, source: DeviceArray, scratch: DeviceArray, accesses: int = 4) -> None:
    """Read all of ``source``; ``scratch`` [>= 16 bytes] keeps the reads alive."""
    _queue(library, "ceiling_read", accesses, source, scratch, None)


def _queue(
    library: KernelLibrary,
    name: str,
    accesses: int,
    source: DeviceArray,
    destination: DeviceArray,
    capacity_bytes: int | None,
) -> None:
    whole = source.nbytes % VECTOR_BYTES == 0 and source.address % VECTOR_BYTES == 0
    if not whole or destination.address % VECTOR_BYTES or destination.nbytes < VECTOR_BYTES:
        raise ValueError("source and destination must be whole vectors of 16 bytes, aligned to them")
    if capacity_bytes is not None and capacity_bytes < source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {capacity_bytes}")
    vectors = source.nbytes // VECTOR_BYTES
    launch(
        library,
        SOURCE,
        f"{name}_{accesses}",
        grid=(-(-vectors // (THREADS * accesses)), 1, 1),
        block=(THREADS, 1, 1),
        arguments=(CeilingParameters(source.address, destination.address, vectors),),
    )


def queue_empty(library: KernelLibrary) -> None:
    """A launch of one block that does nothing."""
    launch(library, SOURCE, "ceiling_empty", grid=(1, 1, 1), block=(32, 1, 1), arguments=(CeilingParameters(),))


@dataclass(frozen=True, slots=True)
class _Work:
    """A plain kernel: ``run`` queues it once."""

    device: CudaDevice
    run: Callable[[], object]
    probe: ClockProbe | None

    def sample(self, count: int) -> Samples:
        return sample_replays(self.device, self.run, count, self.probe)

    def without_pauses(self, settings: SweepSettings) -> Timing:
        self.run()
        rounds = [sample_round(self.sample, 1, settings.seconds_per_round) for _ in range(settings.rounds)]
        return timing_of_samples(rounds)

    def in_bursts(self, bursts: int, rest_seconds: float, usual: Timing) -> Timing:
        replays = burst_replays(usual.median, 1)
        return timing_of_samples([sample_burst(self.sample, replays, rest_seconds, time.sleep) for _ in range(bursts)])


def measure_ceilings(
    library: KernelLibrary,
    device: CudaDevice,
    arena: DeviceArray,
    probe: ClockProbe | None,
    settings: SweepSettings,
    rest_seconds: float,
) -> tuple[Ceilings, Ceilings | None]:
    """Medians over the arena's own random data (zeros would flatter the card), without pauses and, where cells have a
    rest, in bursts. The arena stays as it is."""
    nbytes = min(MAX_COPY_BYTES, arena.nbytes, device.memory_bytes()[0] // 2) // VECTOR_BYTES * VECTOR_BYTES
    source = arena.view((nbytes // arena.dtype.itemsize,))
    scratch = device.allocate(source.shape, arena.dtype, "ceilings scratch")
    with device.capture() as graph:
        for _ in range(EMPTY_LAUNCHES):
            queue_empty(library)
    gemm, gemm_note = _gemm(device)
    kinds: list[list[Callable[[], object]]] = [
        [partial(queue_copy, library, source, scratch, accesses) for accesses in ACCESSES],
        [partial(queue_read, library, source, scratch, accesses) for accesses in ACCESSES],
        [graph.replay],
        [] if gemm is None else [gemm],
    ]
    try:
        best = [_fastest([_Work(device, run, probe) for run in runs], settings) for runs in kinds if runs]
        size = f"{nbytes / 2**30:.2f} GiB of random bf16 read, copied (read + written); empty kernels in a graph"
        usual = _ceilings(nbytes, [timing for timing, _ in best], f"{size}; {gemm_note}")
        if not rest_seconds:
            return usual, None
        bursts = [work.in_bursts(settings.bursts, rest_seconds, timing) for timing, work in best]
        note = f"the same in {settings.bursts} bursts, {rest_seconds:g} s of rest before each"
        return usual, _ceilings(nbytes, bursts, note)
    finally:
        graph.close()
        device.free(scratch)


def _fastest(works: Sequence[_Work], settings: SweepSettings) -> tuple[Timing, _Work]:
    return min(((work.without_pauses(settings), work) for work in works), key=lambda one: one[0].median)


def _ceilings(nbytes: int, timings: Sequence[Timing], note: str) -> Ceilings:
    """Of a copy, a read, EMPTY_LAUNCHES empty kernels, and a GEMM if there is one."""
    copy, read, empty, *gemms = timings
    return Ceilings(
        read_bytes_per_second=nbytes / read.median,
        copy_bytes_per_second=2 * nbytes / copy.median,
        gemm_flops_per_second=2.0 * GEMM_EXTENT**3 / gemms[0].median if gemms else 0.0,
        launch_seconds=empty.median / EMPTY_LAUNCHES,
        gemm_clock_hz=(gemms[0].clock_hz or 0.0) if gemms else 0.0,
        note=note,
    )


def _gemm(device: CudaDevice) -> tuple[Callable[[], object] | None, str]:
    """torch's bf16 GEMM on random data, in the device's stream; (None, why) without torch."""
    try:
        import torch
    except ImportError:
        return None, "no bf16 GEMM: torch is not installed"
    if not torch.cuda.is_available():
        return None, "no bf16 GEMM: torch sees no GPU"
    where, extent = f"cuda:{device.ordinal}", GEMM_EXTENT
    try:
        left, right = (torch.randn(extent, extent, device=where, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        torch.cuda.synchronize(where)
        stream = torch.cuda.ExternalStream(int(device.stream.handle), device=where)

        def multiply() -> None:
            with torch.cuda.stream(stream):
                torch.mm(left, right, out=out)

        multiply()
    except RuntimeError as error:
        return None, f"no bf16 GEMM: torch says {str(error).splitlines()[0]}"
    return multiply, f"bf16 GEMM {extent}^3 by torch {torch.__version__}"
