"""Cases on a device, one after another: a fresh device after each fault on the emulated one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from g4kv_cli.cases.any_case import SmokeCase, run_any, sources_of_case
from g4kv_cli.cases.e2e.any_case import is_end_to_end
from g4kv_cli.cases.standing import naming, words_of
from g4kv_cli.cases.timeout import DEFAULT_CASE_TIMEOUT_SECONDS, END_TO_END_TIMES, Patience
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.kernel_shapes import compile_sources
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.records.run import CaseResult


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a worker needs to run cases: picklable. ``device_spec`` is explicit (``cuda:0``, ``emulated:sm_80``);
    ``rerun`` is the command without ``--case``; ``case_timeout_seconds`` may be infinite."""

    device_spec: str
    kernels_directory: Path | None
    rerun: tuple[str, ...]
    case_timeout_seconds: float = DEFAULT_CASE_TIMEOUT_SECONDS

    def limit_seconds(self, case: SmokeCase) -> float:
        """The time of a case; an end-to-end one is many in one."""
        return self.case_timeout_seconds * (END_TO_END_TIMES if is_end_to_end(case.id) else 1)

    def rerun_command(self, case: SmokeCase) -> str:
        """The exact command line that runs just this case again."""
        return shlex.join([*self.rerun, "--case", case.id])

    def without_result(self, case: SmokeCase, reason: str) -> CaseResult:
        """A case that could not be run, or not to its end."""
        rerun = self.rerun_command(case)
        return CaseResult(case.id, case.entry, case.geometry.name, "error", 0.0, reason, rerun=rerun)


def device_spec_of(device: Device) -> str:
    """The explicit spec of an open device, so that a worker or a rerun gets the same one, whatever was asked for."""
    if device.info.kind == "emulated":
        return f"emulated:{device.info.arch}"
    return f"cuda:{getattr(device, 'ordinal', 0)}"


def compile_for(device: Device, kernels_directory: Path | None, cases: Sequence[SmokeCase]) -> None:
    """Compile every source that the cases need, so that a broken one is an error of the run, not of each case."""
    compile_sources(device, kernels_directory, (source for case in cases for source in sources_of_case(case)))


class CaseRunner:
    """Runs cases in this process. ``poisoned`` turns true when this process can run no more (a faulted GPU)."""

    def __init__(self, settings: RunSettings, device: Device | None = None) -> None:
        self.settings = settings
        self.poisoned = False
        self._library = KernelLibrary(device or open_device(settings.device_spec), settings.kernels_directory)
        self._case_id = ""
        self._patience = Patience()

    def run(self, case: SmokeCase) -> CaseResult:
        """Run one case; a fault of the device is the case's, and the next one starts on a fresh device."""
        refusal = self._patience.refusal(case.entry)
        if refusal:
            return self.settings.without_result(case, refusal)
        device, self._case_id = self._library.device, case.id
        device.limit_time(self.settings.limit_seconds(case))
        with naming(case.id):
            result = run_any(case, self._library, self.settings.rerun_command(case))
        device.limit_time(None)
        self._case_id = ""
        if result.status == "error" and device.is_lost:
            self._patience.note(case.entry)
        if case.trap is not None or device.is_lost or (result.status == "failed" and result.reason):
            self._replace_device()
        return result

    def standing(self) -> str:
        """The case in progress and where its kernel is; empty between cases."""
        return words_of(self._case_id, self._library.device) if self._case_id else ""

    def close(self) -> None:
        """Close the device."""
        self._library.device.close()

    def _replace_device(self) -> None:
        device = self._library.device
        if device.info.kind == "cuda":
            # A context that has faulted is lost for this process, whoever asks.
            self.poisoned = True
            return
        device.close()
        self._library = KernelLibrary(open_device(self.settings.device_spec), self.settings.kernels_directory)
