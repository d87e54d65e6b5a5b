"""Cases on a device, one after another: a fresh device after each fault on the emulated one."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from g4kv_cli.cases.case import Case, RunContext
from g4kv_cli.cases.dump import DumpSettings
from g4kv_cli.cases.standing import naming, words_of
from g4kv_cli.cases.timeout import DEFAULT_CASE_TIMEOUT_SECONDS, MAX_TIME_LIMITS, Patience
from g4kv_cli.compiler.cache import cache_directory
from g4kv_cli.device.interface import Device, TimeLimit
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.kernel_shapes import compile_sources
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries
from g4kv_cli.providers.load import load_providers
from g4kv_cli.providers.manifest import HOST_KINDS
from g4kv_cli.providers.read import read_manifest
from g4kv_cli.records.run import CaseResult


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a worker needs to run cases: picklable. ``device_spec`` is explicit (``cuda:0``, ``emulated:sm_80``);
    ``rerun`` is the command without ``--case``; ``case_timeout_seconds`` may be infinite; ``providers`` are manifests
    whose kernels run in place of the built-in ones."""

    device_spec: str
    kernels_directory: Path | None
    rerun: tuple[str, ...]
    case_timeout_seconds: float = DEFAULT_CASE_TIMEOUT_SECONDS
    variant: str = ""
    providers: tuple[Path, ...] = ()
    dumps: DumpSettings | None = None

    def limit_seconds(self, case: Case) -> float:
        """The time of a case; a heavy one is many in one."""
        return self.case_timeout_seconds * min(max(1.0, case.weight), MAX_TIME_LIMITS)

    @property
    def calls_host_code(self) -> bool:
        """Whether a provider has host code of its own, which can end a process. Raises UsageError."""
        manifests = [read_manifest(file) for file in self.providers]
        return any(image.kind in HOST_KINDS for manifest in manifests for image in manifest.images.values())

    def rerun_command(self, case: Case) -> str:
        """The exact command line that runs just this case again."""
        return shlex.join([*self.rerun, "--case", case.id])

    def without_result(self, case: Case, reason: str) -> CaseResult:
        """A case that could not be run, or not to its end."""
        rerun = self.rerun_command(case)
        return CaseResult(case.id, case.entry, case.geometry.name, "error", 0.0, reason, rerun=rerun)


def device_spec_of(device: Device) -> str:
    """The explicit spec of an open device, so that a worker or a rerun gets the same one, whatever was asked for."""
    if device.info.kind == "emulated":
        return f"emulated:{device.info.arch}"
    return f"cuda:{getattr(device, 'ordinal', 0)}"


def compile_for(device: Device, kernels_directory: Path | None, cases: Sequence[Case], variant: str = "") -> None:
    """Compile every source that the cases need, so that a broken one is an error of the run, not of each case."""
    compile_sources(device, kernels_directory, (source for case in cases for source in case.sources), variant)


def compile_libraries(device: Device, providers: Sequence[Path], cases: Sequence[Case]) -> None:
    """Compile what the cases call of manifests' sources with host code, once and here: it may take longer than a case
    may, and a source that does not compile is an error of the run, as is a pool that overlaps itself. Raises
    CompileError, or UsageError."""
    loaded = load_providers(providers)
    if loaded is None:
        return
    loaded.require_good_pools([case.geometry for case in cases])
    if cache_directory() is None:
        return
    names, dimensions = {case.entry for case in cases}, {case.geometry.head_dim for case in cases}
    table = entries()
    has_others = not names <= {entry.name for entry in table}  # such as a serving run, which calls any of them
    for entry in table:
        if entry.name in names or (has_others and entry.head_dim in dimensions):
            loaded.compile_libraries(entry, device)


class CaseRunner:
    """Runs cases in this process. ``poisoned`` turns true when this process can run no more (a faulted GPU)."""

    def __init__(self, settings: RunSettings, device: Device | None = None) -> None:
        self.settings = settings
        self.poisoned = False
        self._provider = load_providers(settings.providers)
        self._context = self._on(device or open_device(settings.device_spec))
        self._case_id = ""
        self._patience = Patience()

    def run(self, case: Case) -> CaseResult:
        """Run one case; a fault of the device is the case's, and the next one starts on a fresh device."""
        refusal = self._patience.refusal(case.entry)
        if refusal:
            return self.settings.without_result(case, refusal)
        device, self._case_id = self._context.library.device, case.id
        device.limit_time(self.settings.limit_seconds(case))
        with naming(case.id):
            result = case.run(self._context)
        limit = device.time_limit
        if result.status != "passed" and limit is not None and time.monotonic() >= limit.deadline:
            self._patience.note(case.entry)
        device.limit_time(None)
        self._case_id = ""
        if self._provider is not None:
            result = dataclasses.replace(result, waived=self._provider.take_waived())
        if case.traps or device.is_lost or (result.status == "failed" and result.reason):
            self._replace_device()
        return result

    @property
    def time_limit(self) -> TimeLimit | None:
        """That of the case in progress; None between cases, and where there is none."""
        return self._context.library.device.time_limit

    def standing(self) -> str:
        """The case in progress and where its kernel is; empty between cases."""
        return words_of(self._case_id, self._context.library.device) if self._case_id else ""

    def close(self) -> None:
        """Close the device and what cases keep on it."""
        self._context.close()

    def _on(self, device: Device) -> RunContext:
        library = KernelLibrary(device, self.settings.kernels_directory, self.settings.variant, self._provider)
        return RunContext(library, self.settings.rerun, self.settings.dumps)

    def _replace_device(self) -> None:
        device = self._context.library.device
        if device.info.kind == "cuda":
            # A context that has faulted is lost for this process, whoever asks.
            self.poisoned = True
            return
        # An engine's host code has pointers into the device that goes: only a new process begins without them.
        self.poisoned = self.settings.calls_host_code and device.holds_host_state
        self._context.close()
        self._context = self._on(open_device(self.settings.device_spec))
