"""``g4kv reject``: every contradictory request fails on the host before any launch, and the kernels trap behind it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from g4kv_cli.cases.reject.run import RejectCase, RejectRunner, reject_cases
from g4kv_cli.cases.reject.valid import SEED
from g4kv_cli.cases.run import device_spec_of
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.trap.isolate import TrapSettings, run_here, run_traps
from g4kv_cli.cases.trap.table import TrapCase, trap_cases
from g4kv_cli.commands.options import (
    case_timeout_option,
    case_timeout_words,
    device_options,
    kernels_option,
    require_two_files,
)
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.kernel_shapes import compile_sources
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entry_named, sources_of
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, UsageError
from g4kv_cli.records.run import CaseResult, summarise
from g4kv_cli.report.reject import RejectConsole
from g4kv_cli.report.result_files import ResultFiles

MAX_DEFAULT_JOBS = {"emulated": 2, "cuda": 8}
"""Trap processes at once. On a GPU they mostly wait for a context to come up."""
SECONDS_BETWEEN_RECORDS = 0.5

_file = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Selection:
    """The cases of a run."""

    rejects: list[RejectCase]
    traps: list[TrapCase]

    @property
    def entries(self) -> list[str]:
        """Entries that the cases call, each once."""
        return list(dict.fromkeys([*(case.entry for case in self.rejects), *(case.entry for case in self.traps)]))

    @property
    def ids(self) -> list[str]:
        """All case ids, in the order they run."""
        return [*(case.id for case in self.rejects), *(case.id for case in self.traps)]


@click.command()
@device_options
@click.option("--case", multiple=True, metavar="ID", help="Only this case, or those a glob matches; repeatable.")
@click.option("--list", "list_only", is_flag=True, help="List the case ids and run nothing.")
@click.option("--host-only", is_flag=True, help="Leave out the traps: only what the host must refuse.")
@kernels_option
@click.option("--json", "json_path", type=_file, metavar="FILE", help="Write a record, again and again as it runs.")
@click.option("--junit", "junit_path", type=_file, metavar="FILE", help="Write JUnit XML.")
@click.option("--jobs", type=click.IntRange(1), help="Trap processes at once.  [default: up to 2, on a GPU up to 8]")
@case_timeout_option
@click.option("--no-isolate", is_flag=True, help="Run a trap in this process, for a debugger; needs one --case.")
@click.option("-q", "--quiet", is_flag=True, help="Only the device, what did not pass, and the summary.")
def reject(
    device: str,
    require_gpu: bool,
    case: tuple[str, ...],
    list_only: bool,
    host_only: bool,
    kernels: Path | None,
    json_path: Path | None,
    junit_path: Path | None,
    jobs: int | None,
    case_timeout: float,
    no_isolate: bool,
    quiet: bool,
) -> int:
    """Check that contradictory requests are refused: on the host before any launch, and by traps behind it.

    Each case spoils one thing in a valid request of one entry. It passes only if the error has the rule's code and
    names the field, nothing was launched, every buffer is bit-equal to what it was, and the same request just inside
    the limit launches and writes exactly its rows. A trap case hands the kernel what the host would refuse, in a
    process of its own; it passes only if that trap stops it before its block writes to the pool.

    \b
    In CI, without a GPU, in seconds:
      g4kv reject --junit reject.xml
    On a GPU runner, where a missing GPU must fail:
      g4kv reject --require-gpu --junit reject.xml --json reject.json
    One rule, one entry, one case:
      g4kv reject --case 'reject/*/page_id_range/*'
      g4kv reject --case '*/qkv_norm_rope_paged_decode_hd256_plain_into/*'
      g4kv reject --case trap/qkv_norm_rope_paged_decode_hd256_plain_into/page_indptr/reversed

    Exit codes: 0 all passed; 1 something was not refused, or a kernel did not trap; 2 the request or a tool failed.
    """
    selection = _select(case, host_only)
    if list_only:
        click.echo("\n".join(selection.ids))
        return 0
    if no_isolate and (selection.rejects or len(selection.traps) != 1):
        raise UsageError("--no-isolate runs one trap in this process: name it with --case")

    require_two_files(json_path, junit_path)
    planned = len(selection.rejects) + len(selection.traps)
    opened = open_device(device, require_gpu)
    try:
        run = collect_run_info(opened, kernels, SEED)
        compile_sources(opened, kernels, sources_of(entry_named(name) for name in selection.entries))
        files = ResultFiles(
            json_path, junit_path, run, planned, command="reject", seconds_between_records=SECONDS_BETWEEN_RECORDS
        )
        results: list[CaseResult] = []
        console = RejectConsole(quiet=quiet)
        console.start(run)
        try:
            for result in _run(selection, opened, kernels, jobs, case_timeout, no_isolate):
                results.append(result)
                files.add(result)
                console.add(result)
        finally:
            files.finish()
        console.finish()
    finally:
        opened.close()
    files.require_whole()
    return _exit_code(results)


def _select(wanted: Sequence[str], host_only: bool) -> Selection:
    table: list[RejectCase | TrapCase] = [*reject_cases(), *([] if host_only else trap_cases())]
    chosen = select_cases(table, wanted, "g4kv reject --list shows all ids")
    return Selection(
        [case for case in chosen if isinstance(case, RejectCase)],
        [case for case in chosen if isinstance(case, TrapCase)],
    )


def _run(
    selection: Selection, opened: Device, kernels: Path | None, jobs: int | None, case_timeout: float, no_isolate: bool
) -> Iterator[CaseResult]:
    spec = device_spec_of(opened)
    rerun = _rerun(spec, kernels, case_timeout)
    if selection.rejects:
        # Memory of another device, whatever this one is.
        foreign = open_device("emulated")
        try:

            def replace() -> KernelLibrary:
                return KernelLibrary(open_device(spec), kernels)

            is_emulated = opened.info.kind == "emulated"
            runner = RejectRunner(
                KernelLibrary(opened, kernels), foreign, rerun, replace if is_emulated else None, case_timeout
            )
            yield from runner.run_all(selection.rejects)
        finally:
            foreign.close()
    settings = TrapSettings(spec, kernels, case_timeout)
    if no_isolate:
        yield from run_here(selection.traps, settings, rerun)
    else:
        yield from run_traps(selection.traps, settings, jobs or _default_jobs(opened.info.kind), rerun)


def _rerun(spec: str, kernels: Path | None, case_timeout: float) -> Callable[[str], str]:
    """The command that runs one case again on the same device."""
    words = ["g4kv", "reject", "--device", spec, *(["--kernels", str(kernels)] if kernels is not None else [])]
    words += case_timeout_words(case_timeout)
    return lambda case_id: shlex.join([*words, "--case", case_id])


def _default_jobs(kind: str) -> int:
    cores = os.cpu_count() or 1
    with suppress(AttributeError):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return min(MAX_DEFAULT_JOBS[kind], cores)


def _exit_code(results: Sequence[CaseResult]) -> int:
    summary = summarise(list(results))
    if summary.failed:
        return EXIT_FINDINGS
    return EXIT_FAILURE if summary.error else 0
