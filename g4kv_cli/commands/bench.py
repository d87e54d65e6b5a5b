"""``g4kv bench``: measure the kernels, decide between the decode forms, compare records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records
from g4kv_cli.bench.peers import PEERS, peer_status, select_peers
from g4kv_cli.bench.peers.manifest_peers import read_providers
from g4kv_cli.bench.roofline import H200_CEILINGS
from g4kv_cli.bench.run import Request, make_plan
from g4kv_cli.commands.bench_options import (
    DEFAULT_GEOMETRY,
    BenchOptions,
    bench_options,
    require_one_mode,
    require_rest,
)
from g4kv_cli.commands.bench_report import compared, exit_code_of, report_analysis, within
from g4kv_cli.commands.bench_run import measure
from g4kv_cli.errors import EXIT_FINDINGS, UsageError
from g4kv_cli.model.geometry import ATTENTION_SCALE, select_geometries
from g4kv_cli.model.workload import Workload
from g4kv_cli.records.bench import BenchRecord, read_bench_record
from g4kv_cli.records.files import require_directory_place, require_place
from g4kv_cli.records.run import DeviceInfo, RunInfo
from g4kv_cli.report.bench_console import BenchConsole
from g4kv_cli.report.bench_plots import missing_matplotlib
from g4kv_cli.report.output import outlive_reader


@click.command()
@bench_options
@click.pass_context
def bench(ctx: click.Context, /, **given: Any) -> int:
    """Time the kernels against the card's limits, and say which decode form to use where.

    Exit codes: 0 as expected; 1 a kernel is wrong or slower; 2 the request or a tool failed, or --from names a record
    whose run did not get to its end; 130 interrupted (the record keeps what was measured).
    """
    require_one_mode(ctx)
    options = BenchOptions(**given)
    _require_writable(options)
    console = BenchConsole()
    if options.list_peers:
        return _list_peers(console)
    if options.compare is not None:
        return _compare(console, *options.compare, options.threshold)
    if options.from_record is not None:
        return _report_record(console, options.from_record, options)
    request = _request_of(options)
    if options.dry_run:
        return _show_plan(console, options, request)
    require_rest(ctx, request.kinds)
    return measure(console, options, request)


def _require_writable(options: BenchOptions) -> None:
    """What was asked for can be made, which shows before a run of minutes, and outlives a reader that goes away."""
    if options.plots_directory is not None and (missing := missing_matplotlib()):
        raise UsageError(f"--plots {options.plots_directory}: {missing}")
    files = {"--json": options.json_path, "--html": options.html_path, "--dispatch": options.dispatch_path}
    for option, path in files.items():
        if path is not None:
            require_place(path, option)
    if options.plots_directory is not None:
        require_directory_place(options.plots_directory, "--plots")
    outlive_reader(options.html_path, options.plots_directory, options.dispatch_path)


def _request_of(options: BenchOptions) -> Request:
    asked = tuple(_timed(one) for one in options.asked.workloads) if options.asked else ()
    geometries = select_geometries(options.geometry or DEFAULT_GEOMETRY, options.tp) if not asked else ()
    return Request(
        workload=options.workload,
        geometries=geometries or tuple(one.geometry for one in asked),
        asked=asked,
        preset=options.preset,
        batches=options.batch or (),
        kv_lens=options.kv_len or (),
        splits=options.splits,
        peers=select_peers(options.peer),
        providers=read_providers(options.provider),
        with_baseline=options.alternates,
        kv_formats=options.kv_formats,
        page_size=options.page_size,
        enable_pdl=options.enable_pdl,
    )


def _timed(workload: Workload) -> Workload:
    """The workload, if the bench can check its results. Raises UsageError."""
    if workload.sm_scale != ATTENTION_SCALE:
        raise UsageError(
            f"{workload.name}: the bench runs attention at sm_scale {ATTENTION_SCALE}: leave the scale out"
        )
    return workload


def _list_peers(console: BenchConsole) -> int:
    found = [peer_status(peer) for peer in PEERS]
    console.peers([(one.peer.name, one.version or one.reason, one.peer.what) for one in found])
    return 0


def _compare(console: BenchConsole, a_path: Path, b_path: Path, threshold: float) -> int:
    """Two records: 1 if the second is slower, or did not get to its end."""
    a, b = (read_bench_record(path, "--compare") for path in (a_path, b_path))
    if a.overlaps != b.overlaps:
        raise UsageError(
            f"--compare {a_path} {b_path}: launches overlap in one of them alone (--pdl); compare like runs"
        )
    comparison = compare_records(a, b, str(a_path), str(b_path), threshold)
    if not any(cell.ratio is not None for cell in comparison.cells):
        raise UsageError(f"--compare {a_path} {b_path}: no cell has a time in both; name records of one plan")
    console.comparison(comparison)
    # Half a run that is not slower is no proof of the other half.
    return EXIT_FINDINGS if comparison.has_regression or b.ended != "finished" else 0


def _report_record(console: BenchConsole, path: Path, options: BenchOptions) -> int:
    """A record in place of a run: the same report and exit code."""
    analysis = analyse(read_bench_record(path, "--from"))
    record = analysis.record
    if record.overlaps and options.dispatch_path is not None:
        raise UsageError(f"--from {path}: its launches overlap (--pdl); --dispatch takes a record of those that do not")
    failure = report_analysis(console, analysis, options, with_start=True)
    code = compared(console, within(record, options.threshold), exit_code_of(record))
    if failure is not None:
        raise failure
    if code != EXIT_FINDINGS and record.ended != "finished":
        raise UsageError(
            f"--from {path}: the run did not get to its end ({record.ended}); what is shown is all that it measured, "
            "so run it again for the rest"
        )
    return code


def _show_plan(console: BenchConsole, options: BenchOptions, request: Request) -> int:
    """The cells with bytes, FLOPs and floors, on the ceilings of an H200."""
    options.baseline_record()
    if options.alternates:
        options.baseline_kernels()
    plan = make_plan(request)
    nowhere = RunInfo(DeviceInfo("emulated", "", ""), "", "", "", "", {}, "", 0)
    record = BenchRecord(nowhere, {}, H200_CEILINGS, plan.shapes, plan.cells)
    rows = {row.shape.id: row for row in analyse(record).rows}
    names = [[cell.configuration for cell in plan.cells if cell.shape == shape.id] for shape in plan.shapes]
    console.plan([rows[shape.id] for shape in plan.shapes], names, H200_CEILINGS)
    return 0
