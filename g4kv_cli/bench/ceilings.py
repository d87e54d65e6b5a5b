"""What plain kernels reach on this card in this run: copy, read, launch, and a bf16 GEMM where a library is there."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from g4kv_cli.bench.samples import sample_replays
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.records.bench import Ceilings

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

SOURCE = "ceilings.cu"
THREADS = 256
ACCESSES = (2, 4, 8)
"""Of 16 bytes, in flight a thread: the compiled variants."""
VECTOR_BYTES = 16
MAX_COPY_BYTES = 4 * 2**30
EMPTY_LAUNCHES = 500
SAMPLES = 9


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


def measure_ceilings(library: KernelLibrary, device: CudaDevice, arena: DeviceArray) -> Ceilings:
    """Medians over the arena's own random data (zeros would flatter the card). The arena stays as it is."""
    nbytes = min(MAX_COPY_BYTES, arena.nbytes, device.memory_bytes()[0] // 2) // VECTOR_BYTES * VECTOR_BYTES
    source = arena.view((nbytes // arena.dtype.itemsize,))
    scratch = device.allocate(source.shape, arena.dtype, "ceilings scratch")
    try:
        copies = [
            _median_seconds(device, partial(queue_copy, library, source, scratch, accesses)) for accesses in ACCESSES
        ]
        reads = [
            _median_seconds(device, partial(queue_read, library, source, scratch, accesses)) for accesses in ACCESSES
        ]
        with device.capture() as graph:
            for _ in range(EMPTY_LAUNCHES):
                queue_empty(library)
        empty = _median_seconds(device, graph.replay) / EMPTY_LAUNCHES
        graph.close()
    finally:
        device.free(scratch)
    gemm, note = _gemm_flops_per_second()
    size = f"{nbytes / 2**30:.2f} GiB"
    return Ceilings(
        read_bytes_per_second=nbytes / min(reads),
        copy_bytes_per_second=2 * nbytes / min(copies),
        gemm_flops_per_second=gemm,
        launch_seconds=empty,
        note=f"{size} of random bf16 read, copied (read + written); empty kernels in a graph; {note}",
    )


def _median_seconds(device: CudaDevice, work: Callable[[], object]) -> float:
    work()
    return statistics.median(sample_replays(device, work, SAMPLES))


def _gemm_flops_per_second(extent: int = 8192) -> tuple[float, str]:
    """torch's bf16 GEMM on random data; (0, why) without torch."""
    try:
        import torch
    except ImportError:
        return 0.0, "no bf16 GEMM: torch is not installed"
    if not torch.cuda.is_available():
        return 0.0, "no bf16 GEMM: torch sees no GPU"
    try:
        left, right = (torch.randn(extent, extent, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        times = []
        for index in range(SAMPLES + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.mm(left, right, out=out)
            end.record()
            end.synchronize()
            if index >= 2:
                times.append(begin.elapsed_time(end) * 1e-3)
        del left, right, out
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return 0.0, f"no bf16 GEMM: torch says {str(error).splitlines()[0]}"
    return 2.0 * extent**3 / statistics.median(times), f"bf16 GEMM {extent}^3 by torch {torch.__version__}"
