"""From what was asked for to a measured record: the plan of cells, the ceilings, the sweep."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from g4kv_cli.bench import peers as peer_registry
from g4kv_cli.bench.ceilings import measure_ceilings
from g4kv_cli.bench.cuda_backend import CudaBackend
from g4kv_cli.bench.harness import load_cuda_bench, run_in_cuda_bench, with_cold
from g4kv_cli.bench.peers.manifest_peers import provider_variants
from g4kv_cli.bench.sweep import NOT_REACHED, Sweep, SweepSettings
from g4kv_cli.bench.workloads import (
    Preset,
    Variant,
    Workload,
    decode_shape,
    mixed_batches,
    shapes_of,
    variants_of,
    with_baseline,
    with_pages,
    workload_shape,
)
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.entry import Target
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import require_served
from g4kv_cli.errors import DeviceUnavailable, UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat, format_for, require_format
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.model.workload import Workload as Asked
from g4kv_cli.providers.manifest_provider import ManifestProvider
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY, SHAPE_KINDS, Measurement, Shape, ShapeKind

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

H200 = Target("cuda", "sm_90", 227 * 1024)
"""The card of a plan without a device."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure. ``batches``, ``kv_lens`` and ``splits`` replace the preset's, where they are given."""

    workload: Workload
    geometries: tuple[Geometry, ...]
    preset: Preset
    batches: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()
    splits: tuple[int, ...] | None = None
    peers: tuple[peer_registry.Peer, ...] = ()
    providers: tuple[ManifestProvider, ...] = ()
    with_baseline: bool = False
    asked: tuple[Asked, ...] = ()
    """Batches of the user's own in place of the workload's shapes."""
    kv_formats: tuple[KvFormat, ...] = (SPLIT,)
    page_size: int = DEFAULT_PAGE_SIZE_TOKENS
    enable_pdl: bool = False

    @property
    def kinds(self) -> frozenset[ShapeKind]:
        """Of the shapes that are measured."""
        if self.asked:
            return frozenset(workload_shape(one).kind for one in self.asked)
        return frozenset(kind for kind in SHAPE_KINDS if self.workload in (kind, "all"))


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells of a run in order: shapes, measurements as planned, and the variants of our kernels and of manifests by
    shape and configuration."""

    shapes: tuple[Shape, ...]
    cells: tuple[Measurement, ...]
    variants: Mapping[str, Mapping[str, Variant]]
    asked: Mapping[str, Asked] = field(default_factory=dict)
    """Batches of unequal requests by shape id."""


def make_plan(request: Request, target: Target = H200) -> Plan:
    """Every shape with every configuration. Raises UsageError for overrides that the workload does not have."""
    if (request.batches or request.kv_lens or request.splits is not None) and request.workload != "decode":
        raise UsageError("--batch, --kv-len and --splits go with g4kv bench decode alone")
    if request.enable_pdl and request.workload != "decode":
        raise UsageError("--pdl goes with g4kv bench decode alone")
    if SPLIT not in request.kv_formats:
        _require_folded(request)
    shapes: list[Shape] = []
    asked: dict[str, Asked] = {}
    for one in request.asked:
        require_served(one.geometry)
        shapes.append(workload_shape(one))
        asked[shapes[-1].id] = one
    for geometry in request.geometries if not request.asked else ():
        require_served(geometry)
        for kv_format in request.kv_formats:
            if format_for(geometry, kv_format) == kv_format:
                found = _overridden(request, geometry, kv_format)
                found = found or shapes_of(request.workload, geometry, request.preset, kv_format)
                shapes += [with_pages(shape, request.page_size) for shape in found]
        mixes = request.workload in ("prefill", "all") and SPLIT in request.kv_formats
        for mixed in mixed_batches(geometry, request.preset, request.page_size) if mixes else ():
            shapes.append(workload_shape(mixed))
            asked[shapes[-1].id] = mixed
    if not shapes:
        names = ", ".join(geometry.name for geometry in request.geometries)
        raise UsageError(f"no {request.workload} shape of {names} stays within its max_positions: give --kv-len")
    geometries = {geometry.name: geometry for geometry in request.geometries}
    variants: dict[str, dict[str, Variant]] = {}
    cells: list[Measurement] = []
    for shape in shapes:
        splits = asked[shape.id].splits if shape.id in asked else request.splits
        ours = variants_of(shape, geometries[shape.geometry], target, splits, enable_pdl=request.enable_pdl)
        unalternated = ours
        if request.with_baseline:
            ours = with_baseline(ours, BASELINE_SUFFIX)
        variants[shape.id] = {one.name: one for one in ours}
        cells += [_planned(shape, one.name, one.form, one.num_splits) for one in ours]
        for provider in request.providers:
            theirs = provider_variants(provider, shape, unalternated)
            variants[shape.id] |= theirs
            cells += [_planned(shape, name, one.form, one.num_splits) for name, one in theirs.items()]
        cells += [_planned(shape, name, "peer", 1) for name in peer_registry.configurations_of(request.peers, shape)]
        cells += [_planned(shape, COPY, COPY, 1)] if shape.kind == "prep" else []
    return Plan(tuple(shapes), tuple(cells), variants, asked)


def _require_folded(request: Request) -> None:
    """Raises UsageError for what has no shapes of folded rows alone."""
    require_format(request.geometries, FOLDED)
    others = ["--peer"] if request.peers else []
    others += [f"--provider {one.name}" for one in request.providers if FOLDED not in one.manifest.contract.kv_formats]
    if others:
        raise UsageError(f"{others[0]} reads whole rows of K: say --kv-format both, or leave one of the two out")


def _overridden(request: Request, geometry: Geometry, kv_format: KvFormat) -> list[Shape]:
    """Decode shapes of the given batches and lengths; the preset's where only one of the two is given."""
    if not (request.batches or request.kv_lens):
        return []
    usual = shapes_of("decode", geometry, request.preset, kv_format)
    batches = request.batches or tuple(dict.fromkeys(shape.batch for shape in usual)) or (1,)
    lengths = request.kv_lens or tuple(dict.fromkeys(shape.kv_len for shape in usual))
    if max(lengths) > geometry.max_positions:
        raise UsageError(
            f"--kv-len {max(lengths)} is past the {geometry.max_positions} positions of {geometry.name}: give no more"
        )
    return [decode_shape(geometry, batch, kv_len, kv_format) for kv_len in lengths for batch in batches]


def _planned(shape: Shape, configuration: str, form: str, num_splits: int) -> Measurement:
    return Measurement(
        id=f"{shape.id}/{configuration}",
        shape=shape.id,
        configuration=configuration,
        form=form,
        status="missing",
        reason=NOT_REACHED,
        num_splits=num_splits,
    )


def open_gpu(spec: str) -> CudaDevice:
    """The CUDA device that ``--device`` names. Raises DeviceUnavailable where there is none: nothing else can time."""
    try:
        opened = open_device(spec)
    except DeviceUnavailable as error:
        why = str(error)
    else:
        if opened.info.kind == "cuda":
            return cast("CudaDevice", opened)
        why = opened.info.reason
        opened.close()
    raise DeviceUnavailable(
        f"g4kv bench times kernels, and timing needs a CUDA GPU: {why}; without one there are --dry-run, --compare "
        "and --from RECORD.json"
    )


@dataclass(slots=True)
class Measured:
    """How a run went: ``ended`` is ``finished`` or why not."""

    ended: str
    measurements: list[Measurement]


class BenchRun:
    """A run on a device. ``close`` gives the memory back."""

    def __init__(
        self,
        plan: Plan,
        request: Request,
        device: CudaDevice,
        libraries: Sequence[KernelLibrary],
        *,
        seed: int,
        cold: bool,
        settings: SweepSettings,
    ) -> None:
        """Allocates the arena and measures the ceilings. ``libraries``: the kernels, and a baseline's behind them."""
        if cold:
            load_cuda_bench()
        self.plan = plan
        self.device = device
        self._cold = cold
        geometries = {geometry.name: geometry for geometry in request.geometries}
        self.backend = CudaBackend(
            device, libraries, geometries, plan.shapes, plan.variants, seed=seed, providers=request.providers,
            workloads=plan.asked,
        )  # fmt: skip
        self._settings = settings
        rest = max(settings.rest_of(shape.kind) for shape in plan.shapes)
        self.ceilings, self.burst_ceilings = measure_ceilings(
            libraries[0], device, self.backend.arena.data, self.backend.probe, settings, rest
        )

    def measure(self, put: Callable[[Sequence[Measurement]], None]) -> Measured:
        """Every cell; ``put`` gets the measurements of each shape as it is done."""
        done: dict[str, Measurement] = {}

        def keep(measurements: Sequence[Measurement]) -> None:
            done.update({item.id: item for item in measurements})
            put(measurements)

        with _interrupts() as interrupted:
            sweep = Sweep(
                self.backend, self.plan.shapes, self.plan.cells, self.ceilings, self._settings, keep, interrupted,
                burst_ceilings=self.burst_ceilings,
            )  # fmt: skip
            if self._cold:
                timings = run_in_cuda_bench(sweep, self.device)
            else:
                timings = {}
                sweep.run_all()
        cells = [done.get(cell.id, cell) for cell in self.plan.cells]
        return Measured(sweep.ended or "finished", with_cold(cells, timings))

    def close(self) -> None:
        """Return the arena; quiet after a fault, when the memory is gone with the context."""
        self.backend.close()


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that the sweep asks between steps; a second one interrupts at once."""
    seen: list[int] = []

    def note(_number: int, _frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def clocks() -> str:
    """What nvidia-smi says about clocks, power, heat and throttling; empty where there is none."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split()) if done.returncode == 0 else ""


def record_directory(root: Path, gpu: str, date: str, commit: str) -> Path:
    """``results/nvidia-h200/2026-11-29-5ba78a5``."""
    card = "-".join("".join(letter if letter.isalnum() else " " for letter in gpu.lower()).split())
    dirty = "-dirty" if commit.endswith("-dirty") else ""
    short = commit.removesuffix("-dirty")[:7] or "no-commit"
    return root / card / f"{date[:10]}-{short}{dirty}"


def free_name(directory: Path, stem: str) -> Path:
    """``bench.json``, or ``bench-2.json`` and so on: a record is written once and never edited."""
    path = directory / f"{stem}.json"
    number = 2
    while path.exists():
        path = directory / f"{stem}-{number}.json"
        number += 1
    return path
