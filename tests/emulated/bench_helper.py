"""The emulated device in the guise of a CUDA one, for g4kv bench: kernels really run, only the clock is made up."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from g4kv_cli.bench import cuda_backend, samples
from g4kv_cli.bench import run as bench_run
from g4kv_cli.commands import bench_run as bench_command
from g4kv_cli.commands.bench import bench
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.records.bench import Ceilings


class FakeGraph:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.launches: list[tuple[LoadedKernel, Launch]] = []

    def replay(self, times: int = 1) -> None:
        for _ in range(times):
            for kernel, launch in self.launches:
                self._device.launch(kernel, launch)

    def close(self) -> None:
        self.launches = []


class FakeCuda(EmulatedDevice):
    """An emulated device that captures graphs and has a clock; ``seconds`` of a launch by the kernel's name."""

    def __init__(self, seconds: Callable[[LoadedKernel], float]) -> None:
        super().__init__("sm_80", "a test")  # whose kernels need no clusters: the emulated device has none
        self.info = dataclasses.replace(self.info, kind="cuda", name="Test GPU")
        self.now = 0.0
        self._seconds = seconds
        self._capturing: FakeGraph | None = None
        self.ordinal = 0
        self.stream = types.SimpleNamespace(handle=1)
        self._device_handle = 0
        self._driver = types.SimpleNamespace(
            CUdevice_attribute=types.SimpleNamespace(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE=1),
            cuDeviceGetAttribute=lambda _what, _device: (0, 1000),
            cuEventCreate=lambda _flags: (0, [0.0]),
            cuEventRecord=lambda event, _stream: (0, event.__setitem__(0, self.now)),
            cuEventElapsedTime=lambda begin, end: (0, (end[0] - begin[0]) * 1e3),
            cuEventDestroy=lambda _event: (0,),
        )

    def call(self, _what: str, returned: tuple[Any, ...]) -> Any:
        return returned[1] if len(returned) > 1 else None

    def memory_bytes(self) -> tuple[int, int]:
        return 40_000_000, 40_000_000

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        if self._capturing is not None:
            self._capturing.launches.append((kernel, launch))
            return
        if kernel.name != "ceiling_clock":  # which stands outside of what is timed
            self.now += self._seconds(kernel)
        super().launch(kernel, launch)

    def close(self) -> None:
        """Each command closes its device; a test goes on with this one."""

    @contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        self._capturing = graph = FakeGraph(self)
        try:
            yield graph
        finally:
            self._capturing = None

    def elapsed_seconds(self, work: Callable[[], object]) -> float:
        begin = self.now
        work()
        return self.now - begin


def seconds_by_name(kernel: LoadedKernel) -> float:
    """Split kernels take 10 us, their merge 2, all others 20."""
    return 2e-6 if "merge" in kernel.name else 10e-6 if "split" in kernel.name else 20e-6


def fake_cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeCuda:
    """The device that g4kv bench opens in this test, which runs in ``folder``."""
    fake = FakeCuda(seconds_by_name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("G4KV_GIT_COMMIT", "0123456789abcdef")  # not a commit that moves between two commands
    monkeypatch.setattr(cuda_backend, "MIN_ARENA_ELEMS", 2**12)
    monkeypatch.setattr(cuda_backend, "MAX_POOLS", 2)
    monkeypatch.setattr(samples, "SAMPLES_TO_ESTIMATE", 1)
    monkeypatch.setattr(samples, "MIN_SAMPLES", 1)
    monkeypatch.setattr(samples, "MAX_SAMPLES", 2)
    monkeypatch.setattr(samples, "BURST_CALLS", 2)
    wanted = Ceilings(4.7e12, 4.28e12, 0.0, 1e-6, "a test")
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda *_arguments: (wanted, None))
    monkeypatch.setattr(bench_command, "open_gpu", lambda _spec: fake)
    monkeypatch.setattr(bench_command, "clocks", lambda: "1980 MHz")
    return fake


def invoke(*arguments: str) -> Result:
    # One of eight ranks: one KV head.
    fast = ["--tp", "8", "--no-cold", "--rounds", "2", "--round-ms", "0.1", "--rest", "0"]
    return CliRunner().invoke(bench, [*fast, *arguments], standalone_mode=False, catch_exceptions=False)
