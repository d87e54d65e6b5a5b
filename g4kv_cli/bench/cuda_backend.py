"""Shapes on a CUDA device: pools that rotate, and the configurations that work on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from g4kv_cli.bench import peers
from g4kv_cli.bench.attention_problem import AttentionProblem, attention_problem, pool_elems_of
from g4kv_cli.bench.attention_runs import attention_call
from g4kv_cli.bench.clock import ClockProbe
from g4kv_cli.bench.copies import CopyRunnable, copied_elems
from g4kv_cli.bench.graph_runnable import Call, GraphRunnable
from g4kv_cli.bench.noise_data import NoiseArena
from g4kv_cli.bench.peers.manifest_peers import make_manifest_runnable
from g4kv_cli.bench.prep_problem import PrepProblem, input_elems, prep_call
from g4kv_cli.bench.sweep import Runnable
from g4kv_cli.bench.workloads import Variant
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.workload import Workload
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY, PEER_PREFIX, Shape

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice
    from g4kv_cli.providers.manifest_provider import ManifestProvider

MIN_POOLS, MAX_POOLS = 2, 48
CACHE_ROUNDS = 5
"""Pools rotate through this many times the L2 cache, where MAX_POOLS of them are as large. One pool alone, however
large, would leave its end in the cache for the next call; two do not."""
MIN_ARENA_ELEMS = 2**31
"""4 GiB: smaller copies and reads do not reach the card's rate (0.25 GiB: a tenth less on an H200)."""
MEMORY_SHARE = 0.6
"""Of the free memory for the arena; the rest is for workspaces, outputs and peers."""


class CudaShape:
    """An open shape. ``libraries``: the kernels under test, and a baseline's if there is one."""

    def __init__(
        self,
        problem: AttentionProblem | PrepProblem,
        device: CudaDevice,
        variants: Mapping[str, Variant],
        libraries: Sequence[KernelLibrary],
        touched_bytes: int,
        first_allocation: int,
        providers: Sequence[ManifestProvider] = (),
        probe: ClockProbe | None = None,
    ) -> None:
        """Everything that the device allocated from number ``first_allocation`` on goes with the shape."""
        self.problem = problem
        self.device = device
        self.pools = len(problem.pools)
        self.rotating_bytes = self.pools * touched_bytes
        self.checked_rows = len(problem.rows)
        self._variants = variants
        self._libraries = libraries
        self._first_allocation = first_allocation
        self._providers = {f"{PEER_PREFIX}{provider.name}": provider for provider in providers}
        self._probe = probe
        self._runnables: list[GraphRunnable] = []

    def make(self, configuration: str) -> Runnable:
        """Raises NotCovered for a peer that is not here or does not take the shape, and for what a manifest lacks."""
        variant = self._variants.get(configuration)
        provider = self._providers.get(configuration.partition("/")[0])
        runnable: GraphRunnable
        if provider is not None and variant is not None:
            runnable = make_manifest_runnable(provider, variant, self.problem, self.device)
        elif configuration == COPY:
            runnable = CopyRunnable(self.problem.shape, self.device, self._libraries[0], self.problem.arena, self.pools)
        elif variant is None:
            runnable = peers.make_runnable(configuration, self.problem, self.device)
        else:
            library = self._libraries[-1 if configuration.endswith(BASELINE_SUFFIX) else 0]
            call: Call
            if isinstance(self.problem, AttentionProblem):
                call = attention_call(self.problem, library, variant)
            else:
                call = prep_call(self.problem, library)
            runnable = GraphRunnable(configuration, self.device, call, self.problem.check, self.pools)
        runnable.probe = self._probe
        self._runnables.append(runnable)
        return runnable

    def renew_inputs(self) -> None:
        """Other queries or rows."""
        self.problem.renew_queries()

    def close(self) -> None:
        """Graphs first, then every array that was made for this shape."""
        for runnable in self._runnables:
            runnable.close()
        self._runnables.clear()
        self.device.synchronize()
        for allocation in list(self.device._allocations[self._first_allocation :]):
            self.device.free(DeviceArray(allocation, 0, (allocation.nbytes,), np.dtype(np.uint8), (1,)))


class CudaBackend:
    """Opens shapes in one arena of random data."""

    def __init__(
        self,
        device: CudaDevice,
        libraries: Sequence[KernelLibrary],
        geometries: Mapping[str, Geometry],
        shapes: Sequence[Shape],
        variants: Mapping[str, Mapping[str, Variant]],
        *,
        seed: int,
        providers: Sequence[ManifestProvider] = (),
        workloads: Mapping[str, Workload] = MappingProxyType({}),
    ) -> None:
        """``variants``: ours and the ``providers``', by shape id and configuration; ``workloads``: batches that are no
        equals, by shape id. Allocates the arena for the largest shape that fits."""
        self.device = device
        self.cache_bytes = l2_cache_bytes(device)
        self._libraries = libraries
        self._geometries = geometries
        self._variants = variants
        self._seed = seed
        self._providers = providers
        self._workloads = workloads
        self._limit_elems = int(device.memory_bytes()[0] * MEMORY_SHARE) // 2
        wanted = [self._pools_of(shape) * self._pool_elems(shape) for shape in shapes]
        self.probe = ClockProbe(libraries[0])
        self.arena = NoiseArena(libraries[0], max([min(MIN_ARENA_ELEMS, self._limit_elems // 2), *wanted]), seed=seed)

    def open(self, shape: Shape) -> CudaShape:
        """Raises DeviceUnavailable if not one pool fits."""
        geometry = self._geometries[shape.geometry]
        pools, elems = self._pools_of(shape), self._pool_elems(shape)
        if pools == 0:
            raise DeviceUnavailable(
                f"one pool takes {2 * elems / 2**30:.1f} GiB, the bench uses {2 * self._limit_elems / 2**30:.1f} GiB"
            )
        problem: AttentionProblem | PrepProblem
        first_allocation = len(self.device._allocations)
        if shape.kind == "prep":
            problem = PrepProblem.make(shape, geometry, self.arena, pools, seed=self._seed)
        else:
            asked = self._workloads.get(shape.id)
            problem = attention_problem(shape, geometry, self.arena, pools, seed=self._seed, workload=asked)
        touched = shape.read_bytes + (shape.write_bytes if shape.kind == "prep" else 0)
        variants = self._variants[shape.id]
        return CudaShape(
            problem, self.device, variants, self._libraries, touched, first_allocation, self._providers, self.probe
        )

    def close(self) -> None:
        """Return the arena."""
        self.arena.close()
        self.probe.close()

    def _pool_elems(self, shape: Shape) -> int:
        geometry = self._geometries[shape.geometry]
        if shape.kind == "prep":
            return max(input_elems(shape), copied_elems(shape))
        return pool_elems_of(shape, geometry, self._workloads.get(shape.id))

    def _pools_of(self, shape: Shape) -> int:
        """As many as it takes to rotate through the cache several times, if the memory has them."""
        touched = shape.read_bytes + (shape.write_bytes if shape.kind == "prep" else 0)
        wanted = min(MAX_POOLS, max(MIN_POOLS, -(-CACHE_ROUNDS * self.cache_bytes // max(touched, 1))))
        return int(min(wanted, self._limit_elems // max(self._pool_elems(shape), 1)))


def l2_cache_bytes(device: CudaDevice) -> int:
    """What the driver says."""
    driver = device._driver
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    return int(device.call("ask for the L2 cache", driver.cuDeviceGetAttribute(attribute, device._device_handle)))
