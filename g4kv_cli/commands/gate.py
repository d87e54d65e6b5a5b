"""The one loop of smoke and reject: open a device, compile, run the cases, show and write each result as it comes."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
from click.core import ParameterSource

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.dump import DumpSettings, prepare_directory
from g4kv_cli.cases.isolate import run_cases, run_here
from g4kv_cli.cases.run import RunSettings, compile_for, compile_libraries, device_spec_of
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.commands.options import case_timeout_words, require_one_origin, require_two_files
from g4kv_cli.device.open import open_device
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, UsageError
from g4kv_cli.providers.load import load_providers
from g4kv_cli.providers.named import provider_word
from g4kv_cli.records.run import CaseResult, RunInfo, ShardInfo, summarise
from g4kv_cli.report.json import NO_SETTINGS
from g4kv_cli.report.result_files import ResultFiles

MAX_DEFAULT_JOBS = {"emulated": 2, "cuda": 8}
"""Worker processes; on a GPU of cases that trap, which mostly wait for a context to come up."""
MANY_CASES = 1000
SECONDS_BETWEEN_RECORDS = 0.5
"""The record of many short cases is not rewritten after each."""
_WRITTEN = {"json_path": "--json", "junit_path": "--junit", "dump": "--dump"}


class GateConsole(Protocol):
    """What shows a run."""

    def start(self, run: RunInfo) -> None: ...
    def add(self, result: CaseResult) -> None: ...
    def finish(self, seconds: float | None = None) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options that both commands have. ``here``: all in this process, for a debugger."""

    command: str
    device: str
    require_gpu: bool
    kernels: Path | None
    variant: str
    jobs: int | None
    case_timeout: float
    json_path: Path | None
    junit_path: Path | None
    providers: tuple[Path, ...] = ()
    here: bool = False
    shard: ShardInfo | None = None
    dumps: DumpSettings | None = None

    def rerun(self, device_spec: str) -> list[str]:
        """The words of the command that runs on the same device with the same kernels, up to ``--case``."""
        words = ["g4kv", self.command, "--device", device_spec]
        words += ["--kernels", str(self.kernels)] if self.kernels is not None else []
        words += ["--variant", self.variant] if self.variant else []
        words += [word for file in self.providers for word in ("--provider", provider_word(file))]
        return words + case_timeout_words(self.case_timeout)

    def settings(self, device_spec: str, rerun: Sequence[str] = ()) -> RunSettings:
        """What runs a case; ``rerun`` are words of the command's own."""
        return RunSettings(
            device_spec=device_spec,
            kernels_directory=self.kernels,
            rerun=(*self.rerun(device_spec), *rerun),
            case_timeout_seconds=self.case_timeout,
            variant=self.variant,
            providers=self.providers,
            dumps=self.dumps,
        )


def run_gate(
    cases: Sequence[Case],
    options: GateOptions,
    console: GateConsole,
    *,
    seed: int,
    rerun: Sequence[str] = (),
    settings: Mapping[str, Any] = NO_SETTINGS,
    before: Callable[[RunInfo], None] = lambda run: None,
    judge: Callable[[CaseResult], CaseResult] = lambda result: result,
) -> int:
    """Run the cases; the command's exit code.

    ``rerun``: words of the command's own, behind the common ones. ``settings`` stand in the record. ``before`` may
    refuse the run once it is known where and with what it would be made; ``judge`` has the last word on a result.
    """
    require_two_files(options.json_path, options.junit_path)
    require_one_origin(options.providers, options.kernels, options.variant)
    opened, made = open_device(options.device, options.require_gpu), False
    try:
        run = collect_run_info(opened, options.kernels, seed, options.providers)
        before(run)
        if options.dumps is not None:
            made = prepare_directory(options.dumps.directory)
            options = dataclasses.replace(options, dumps=options.dumps.of(run))
        if not options.providers:
            compile_for(opened, options.kernels, cases, options.variant)
        else:
            compile_libraries(opened, options.providers, cases)
        spec = device_spec_of(opened)
        how = options.settings(spec, rerun)
        seconds_between = SECONDS_BETWEEN_RECORDS if len(cases) > MANY_CASES else 0.0
        files = ResultFiles(
            options.json_path, options.junit_path, run, len(cases), command=options.command,
            seconds_between_records=seconds_between, settings=settings, shard=options.shard,
        )  # fmt: skip
        results: list[CaseResult] = []
        jobs = _jobs(options.jobs, opened.info.kind, cases)
        running = run_here(cases, how, opened) if options.here else run_cases(cases, how, opened, jobs)
        console.start(run)
        interrupted_at = ""
        try:
            for result in map(judge, running):
                results.append(result)
                files.add(result)
                console.add(result)
        except BaseException as error:
            console.abort()
            interrupted_at = str(error) if isinstance(error, KeyboardInterrupt) else ""
            raise
        finally:
            files.finish(interrupted_at)
        console.finish()
    finally:
        opened.close()
        if made and options.dumps is not None:
            with suppress(OSError):  # it holds dumps
                options.dumps.directory.rmdir()
    files.require_whole()
    require_dumps(results)
    return exit_code_of_results(results)


def list_cases(cases: Sequence[Case], options: GateOptions) -> int:
    """Print the ids. A manifest that the run would not take is not taken here either, and no file is written."""
    context = click.get_current_context()
    for name, option in _WRITTEN.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{option} does not apply to --list, which runs nothing; leave one of them out")
    require_one_origin(options.providers, options.kernels, options.variant)
    load_providers(options.providers)
    click.echo("\n".join(case.id for case in cases))
    return 0


def require_dumps(results: Sequence[CaseResult]) -> None:
    """Raises UsageError if the arrays of a case could not be written down."""
    failed = [result for result in results if result.dump_error]
    if failed:
        more = f" (and {len(failed) - 1} more cases)" if len(failed) > 1 else ""
        raise UsageError(f"{failed[0].dump_error}{more}")


def _jobs(asked: int | None, kind: str, cases: Sequence[Case]) -> int:
    """Worker processes: the usual number, or as many as were asked for and can have work at once: one a core on the
    emulated device, where each computes, and one a case that traps on a GPU, where each waits."""
    cores = os.cpu_count() or 1
    with suppress(AttributeError):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    if asked is None:
        return min(MAX_DEFAULT_JOBS[kind], cores)
    return min(asked, cores if kind == "emulated" else max(1, sum(case.traps for case in cases)))


def exit_code_of_results(results: Sequence[CaseResult]) -> int:
    """The command's exit code; says on stderr where nothing was checked."""
    summary = summarise(list(results))
    if summary.failed:
        return EXIT_FINDINGS
    if summary.error:
        return EXIT_FAILURE
    if not summary.passed and summary.not_covered:
        sys.stderr.write("g4kv: error: the kernels at hand cover none of these cases, so nothing was checked\n")
        return EXIT_FINDINGS
    if not summary.passed:
        sys.stderr.write("g4kv: error: every case was skipped, so nothing was checked\n")
        return EXIT_FAILURE
    return 0
