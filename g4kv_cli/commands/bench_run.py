"""A measured run of ``g4kv bench``: devices and kernels, the record as it grows, and what it comes to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records
from g4kv_cli.bench.peers import PEERS, PeerStatus, library_of, peer_status
from g4kv_cli.bench.peers.manifest_peers import provider_entry
from g4kv_cli.bench.run import (
    BenchRun,
    Measured,
    Plan,
    Request,
    clocks,
    free_name,
    make_plan,
    open_gpu,
    record_directory,
)
from g4kv_cli.bench.samples import LONG_REPLAY_SECONDS, LONG_ROUNDS
from g4kv_cli.bench.sweep import REST_SECONDS
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.commands.bench_options import BenchOptions
from g4kv_cli.commands.bench_report import compared, exit_code_of, report_analysis, within
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.entry import Target
from g4kv_cli.entries.kernel_shapes import compile_sources
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, sources_of
from g4kv_cli.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, UsageError
from g4kv_cli.records.bench import BenchRecord
from g4kv_cli.records.run import RunInfo
from g4kv_cli.report.bench_console import BenchConsole
from g4kv_cli.report.bench_store import BenchStore


def measure(console: BenchConsole, options: BenchOptions, request: Request) -> int:
    """Measure every cell of the plan; the command's exit code."""
    old_record = options.baseline_record()
    if options.alternates:
        options.baseline_kernels()
    opened = open_gpu(options.device)
    try:
        plan = make_plan(request, Target.of(opened))
        libraries = _compiled(opened, options, plan)
        before = clocks()
        run = BenchRun(
            plan, request, opened, libraries, seed=options.seed, cold=not options.no_cold, settings=options.sampling
        )
        record = _planned_record(options, request, run, opened, before)
        path = options.json_path or _record_path(record.run)
        store = BenchStore(record, path)
        if not options.quiet:
            console.start(record)
        measured = _measured(console, options, plan, run, store)
        _close_record(store, measured, before)
        if measured.ended == "finished":
            run.close()
    finally:
        opened.close()
    failure = report_analysis(console, analyse(store.record), options, with_start=False)
    if not options.quiet:
        console.written("record", path)
    if old_record is None:
        against = within(store.record, options.threshold)
    else:
        against = compare_records(old_record, store.record, str(options.baseline), str(path), options.threshold)
    code = compared(console, against, exit_code_of(store.record))
    if code != EXIT_FINDINGS and store.record.ended == "interrupted":
        sys.stderr.write("g4kv: interrupted\n")
        code = EXIT_INTERRUPTED
    store.require_whole()
    if failure is not None:
        raise failure
    return code


def _compiled(opened: Device, options: BenchOptions, plan: Plan) -> Sequence[KernelLibrary]:
    """The kernels under test, and behind them the baseline's if the run takes turns with others; what the plan calls is
    compiled before anything is measured."""
    libraries = [KernelLibrary(opened, options.kernels, options.variant)]
    if options.alternates:
        libraries.append(KernelLibrary(opened, *options.baseline_kernels()))
    called = {variant.entry for variants in plan.variants.values() for variant in variants.values()}
    sources = sources_of(entry for entry in entries() if entry.name in called)
    for library in libraries:
        compile_sources(opened, library.kernels_directory, sources, library.variant)
    return libraries


def _planned_record(
    options: BenchOptions, request: Request, run: BenchRun, opened: Device, clocks_before: str
) -> BenchRecord:
    """The record before the first cell is measured."""
    return BenchRecord(
        run=_with_versions(collect_run_info(opened, options.kernels, options.seed)),
        settings={
            "workload": options.workload,
            "preset": options.preset,
            "rounds": options.rounds,
            "seconds_per_round": options.round_ms * 1e-3,
            "bursts": options.bursts,
            "rest_seconds": {kind: options.sampling.rest_of(kind) for kind in REST_SECONDS},
            "long_replays": {"seconds": LONG_REPLAY_SECONDS, "rounds": LONG_ROUNDS},
            "cold": not options.no_cold,
            "baseline": options.baseline or "",
            "variant": options.variant,
            "kv_format": options.kv_format,
            "page_size": options.page_size,
            "enable_pdl": options.enable_pdl,
            **({"asked": options.asked.values()} if options.asked else {}),
        },
        ceilings=run.ceilings,
        shapes=run.plan.shapes,
        measurements=run.plan.cells,
        peers=(
            *(_peer_entry(one) for one in map(peer_status, request.peers)),
            *(provider_entry(provider) for provider in request.providers),
        ),
        clocks=(clocks_before,) if clocks_before else (),
        ended="still running, or killed",
        burst_ceilings=run.burst_ceilings,
    )


def _measured(console: BenchConsole, options: BenchOptions, plan: Plan, run: BenchRun, store: BenchStore) -> Measured:
    """Measure; each shape is in the store as soon as it is done."""
    done: set[str] = set()

    def put(measurements: Any) -> None:
        store.put(measurements)
        done.update(item.shape for item in measurements)
        if measurements:
            console.progress(len(done), len(plan.shapes), measurements[0].shape)

    measured = run.measure(put)
    console.end_progress()
    return measured


def _close_record(store: BenchStore, measured: Measured, clocks_before: str) -> None:
    """The record with all there is, and how the run ended."""
    store.update(
        replace(
            store.record,
            measurements=tuple(measured.measurements),
            clocks=tuple(text for text in (clocks_before, clocks()) if text),
            ended=measured.ended,
        )
    )


def _with_versions(info: RunInfo) -> RunInfo:
    """The run's head with the versions of what else took part."""
    found = dict(info.versions)
    for package in ("cuda-bench", "torch", *dict.fromkeys(peer.distribution for peer in PEERS)):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return replace(info, versions=found)


def _record_path(info: RunInfo) -> Path:
    directory = record_directory(Path("results"), info.device.name, info.date, info.git_commit)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; say where with --json FILE") from error
    return free_name(directory, "bench")


def _peer_entry(status: PeerStatus) -> dict[str, str]:
    entry = {"name": status.peer.name, "version": status.version, "reason": status.reason, "what": status.peer.what}
    library = library_of(status)
    return {**entry, "library": library} if library else entry
