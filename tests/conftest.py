"""Fixtures of all tests. Kernels compile into pytest's own cache directory, never into the user's."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from g4kv_cli.errors import DeviceUnavailable

# As the command does, before NumPy is there: threads of its linear algebra only spin beside the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

gc.set_threshold(10_000, 10, 10)
"""Thousands of tests stay from their collection on; to look through them so often took a tenth of a run's time."""

GPU_REQUIRED = os.environ.get("G4KV_REQUIRE_GPU", "") not in ("", "0")


FAULTS_APART = 6
"""Of each list of seeded faults a default run takes every sixth: each costs a compilation and a run of kernels."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-faults", action="store_true", help="seed every fault into the kernels, not every sixth")

    parser.addoption(
        "--all-archs",
        action="store_true",
        help="assemble, and run emulated, for every architecture, not one of each kind",
    )


def pytest_configure(config: pytest.Config) -> None:
    """No asserts of the package are rewritten.

    pytest marks whole packages that have a plugin for it: each process of a run would parse and compile all modules
    of ours anew, past what the installation compiled.
    """
    marked = getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set())
    marked.discard("g4kv_cli")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test's seeded faults run every sixth, and of architectures some, unless all are asked for."""
    if not config.getoption("--all-archs"):
        for item in items:
            if item.get_closest_marker("more_archs") is not None:
                item.add_marker(pytest.mark.skip(reason="this architecture runs with pytest --all-archs"))
    if config.getoption("--all-faults"):
        return
    seen: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("seeded_faults") is None:
            continue
        test = item.nodeid.partition("[")[0]
        place = seen[test] = seen.get(test, -1) + 1
        if place % FAULTS_APART:
            reason = f"one seeded fault in {FAULTS_APART} runs, this one with pytest --all-faults"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What was collected is no garbage until the end: the collector looks at it no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """No setting of the caller's reaches a test; compiled kernels are kept from one test run to the next."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("G4KV_")]:
            patch.delenv(name)
        patch.setenv("G4KV_EMULATOR_THREADS", "1")  # as in all workers: the other core has one of its own
        patch.delenv("COLUMNS", raising=False)  # a caller's terminal
        patch.setenv("G4KV_CACHE_DIR", str(request.config.cache.mkdir("g4kv-kernels")))
        yield


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache for one test."""
    directory = tmp_path / "kernel-cache"
    monkeypatch.setenv("G4KV_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def forms_a_b_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as if these were all decode forms: for tests whose cells and times are theirs."""
    from g4kv_cli.entries import table

    known = tuple(entry for entry in table.ENTRIES if entry.label in ("", "a", "b", "c"))
    monkeypatch.setattr(table, "ENTRIES", known)


@pytest.fixture
def cuda_device() -> Iterator[object]:
    """The first CUDA GPU. Without one the test is skipped with the reason, or fails under G4KV_REQUIRE_GPU=1."""
    from g4kv_cli.device.cuda import CudaDevice

    try:
        device = CudaDevice(0, "a test")
    except DeviceUnavailable as error:
        if GPU_REQUIRED:
            pytest.fail(f"G4KV_REQUIRE_GPU is set, but: {error}")
        pytest.skip(f"needs a CUDA GPU: {error}")
    yield device
    device.close()


@pytest.fixture
def run_g4kv(capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``g4kv ARGUMENTS`` in this process: one of its own, which test_output.py starts, takes half a second more."""
    from g4kv_cli.main import run

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = run(arguments)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, shown.out, shown.err)

    return run_here
