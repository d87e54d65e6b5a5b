"""Smoke's cases for pytest: what the options choose, where they run, and each result in smoke's words."""

from __future__ import annotations

import math
from pathlib import Path

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.isolate import OneByOne
from g4kv_cli.cases.prep.table import DEFAULT_SEED
from g4kv_cli.cases.run import compile_libraries, device_spec_of
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.cases.timeout import DEFAULT_CASE_TIMEOUT_SECONDS
from g4kv_cli.commands.asked import Asked
from g4kv_cli.commands.gate import GateOptions
from g4kv_cli.commands.smoke import Request, cases_of
from g4kv_cli.device.open import open_device
from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import CaseResult
from g4kv_cli.report.console import device_text, kernels_text, result_lines


class CasesUnderPytest:
    """The chosen cases and what runs them. ``header``: lines on where they run and with whose kernels."""

    def __init__(
        self,
        *,
        providers: tuple[Path, ...] = (),
        geometry: str | None = None,
        case: tuple[str, ...] = (),
        device: str = "auto",
        require_gpu: bool = False,
        case_timeout: float | None = None,
        workload: Path | None = None,
        shape: str | None = None,
    ) -> None:
        """Raises UsageError, or DeviceUnavailable."""
        seconds = DEFAULT_CASE_TIMEOUT_SECONDS if case_timeout is None else case_timeout
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"--g4kv-case-timeout must be a number of seconds, 0 for never, got {seconds}")
        request = Request(geometry=geometry, case=case, asked=Asked(workload, shape, geometry))
        self.cases: list[Case] = cases_of(request)
        options = GateOptions("smoke", device, require_gpu, None, "", 1, seconds or math.inf, None, None, providers)
        opened = open_device(device, require_gpu)
        try:
            run = collect_run_info(opened, None, DEFAULT_SEED, providers)
            compile_libraries(opened, providers, self.cases)
            spec, kind = device_spec_of(opened), opened.info.kind
        finally:
            opened.close()
        kernels = f"g4kv kernels  {kernels_text(run)}, seed {run.seed}"
        declared = [f"g4kv declared {statement}" for statement in run.declared]
        self.header = (f"g4kv device   {device_text(run)}", kernels, *declared)
        self._runner = OneByOne(options.settings(spec, request.rerun()), kind)

    def run(self, case: Case) -> tuple[CaseResult, str]:
        """The result, and what g4kv smoke would show of it had it not passed. Raises CompileError."""
        result = self._runner.run(case)
        lines = [f"{result.status.upper()}  {result.id}", *(f"  {line}" for line in result_lines(result))]
        return result, "\n".join([*lines, f"  again  {result.rerun}"])

    def close(self) -> None:
        """Close the device."""
        self._runner.close()
