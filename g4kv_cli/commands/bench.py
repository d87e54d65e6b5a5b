"""``g4kv bench``: measure the kernels, decide between the decode forms, compare records."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from g4kv_cli.bench.analysis import analyse
from g4kv_cli.bench.compare import compare_records, compare_with_baseline
from g4kv_cli.bench.dispatch import dispatch_text
from g4kv_cli.bench.peers import PEERS, peer_status, select_peers
from g4kv_cli.bench.roofline import H200_CEILINGS
from g4kv_cli.bench.run import BenchRun, Request, clocks, free_name, make_plan, open_gpu, record_directory
from g4kv_cli.bench.sweep import SweepSettings
from g4kv_cli.bench.workloads import Preset, Workload
from g4kv_cli.cases.run_info import collect_run_info
from g4kv_cli.commands.options import device_options, kernels_option
from g4kv_cli.entries.entry import PORTABLE, Target
from g4kv_cli.entries.kernel_shapes import compile_sources
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, sources_of
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, UsageError
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.records.bench import BASELINE_SUFFIX, BenchRecord, Measurement, read_bench_record
from g4kv_cli.records.findings import Analysis, Comparison
from g4kv_cli.records.run import DeviceInfo, RunInfo
from g4kv_cli.report.bench_console import BenchConsole
from g4kv_cli.report.bench_html import write_html
from g4kv_cli.report.bench_plots import missing_matplotlib, write_plots
from g4kv_cli.report.bench_store import BenchStore
from g4kv_cli.report.files import write_whole
from g4kv_cli.report.output import outlive_reader

EXIT_INTERRUPTED = 130
BUILT_IN = "built-in"
DEFAULT_THRESHOLD = "5%"
_NO_DEVICE = DeviceInfo("emulated", "", "")
_file = click.Path(dir_okay=False, path_type=Path)


def _share(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """``5%`` or ``0.05``: a share above 0 and below 1."""
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise click.BadParameter(f"{value!r} is no share between 0 and 100 %; write 5% or 0.05", ctx, param)
    return share


def _counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``1,16,64``: counts of at least 1, in the order given."""
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = (0,)
    if not all(count >= 1 for count in found):
        raise click.BadParameter(f"{value!r} is no list of counts; write 1,16,64", ctx, param)
    return tuple(dict.fromkeys(found))


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of milliseconds", ctx, param)
    return value


_REPORT = frozenset(("html_path", "plots_directory", "dispatch_path", "quiet"))
_PLAN = frozenset(("workload", "geometry", "tp", "preset", "batch", "kv_len", "splits", "peer", "kernels", "baseline"))
_MODES: dict[str, frozenset[str]] = {
    "list_peers": frozenset(),
    "compare": frozenset(("threshold", "quiet")),
    "from_record": _REPORT | {"threshold"},
    "dry_run": _PLAN,
}
"""What is done in place of a run, and the options that mean something to it."""


def _require_one_mode(ctx: click.Context) -> None:
    """Raises UsageError for an option on the command line that the chosen mode would not heed."""
    options = {parameter.name: parameter.opts[0] for parameter in ctx.command.params if parameter.name}
    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    mode = next((name for name in _MODES if name in given), None)
    if mode is None:
        return
    stray = next((name for name in given if name != mode and name not in _MODES[mode]), None)
    if stray is not None:
        raise UsageError(f"{options[stray]} does not apply to {options[mode]}; leave one of them out")


@click.command()
@click.argument("workload", type=click.Choice(["decode", "prefill", "prep", "all"]), default="decode")
@click.option(
    "--geometry",
    default="12b-local",
    show_default=True,
    metavar="NAME[,NAME...]",
    help="12b-local, 31b-global, ..., a model (12b), or all.",
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Heads of one of N ranks.")
@click.option(
    "--preset",
    type=click.Choice(["quick", "decode-forms", "full"]),
    default="decode-forms",
    show_default=True,
    help="How many shapes.",
)
@click.option("--batch", callback=_counts, metavar="N[,N...]", help="Decode: these batch sizes, not the preset's.")
@click.option("--kv-len", callback=_counts, metavar="N[,N...]", help="Decode: these lengths, not the preset's.")
@click.option("--splits", callback=_counts, metavar="N[,N...]", help="Decode: these split counts for form c.")
@device_options
@kernels_option
@click.option(
    "--baseline",
    metavar="built-in|portable|DIR|RECORD.json",
    help="Hold the run against other kernels, round by round in turn, or against a record.",
)
@click.option("--peer", multiple=True, metavar="NAME", help="Also time torch-sdpa, flashinfer-tc, ..., torch, or all.")
@click.option("--list-peers", is_flag=True, help="List the peers and what is installed.")
@click.option("--dry-run", is_flag=True, help="Show the cells with bytes, FLOPs and floors, and time nothing.")
@click.option("--from", "from_record", type=_file, metavar="RECORD.json", help="Report a record in place of a run.")
@click.option(
    "--compare", nargs=2, type=_file, metavar="A.json B.json", help="Compare two records: exit 1 if B is slower."
)
@click.option(
    "--threshold",
    callback=_share,
    default=DEFAULT_THRESHOLD,
    show_default=True,
    metavar="SHARE",
    help="Changes up to this are none.",
)
@click.option(
    "--json",
    "json_path",
    type=_file,
    metavar="FILE",
    help="Where the record goes.  [default: results/GPU/DATE-COMMIT/bench.json]",
)
@click.option("--html", "html_path", type=_file, metavar="FILE", help="Write one self-contained page with the plots.")
@click.option(
    "--plots",
    "plots_directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the plots as PNG.",
)
@click.option("--dispatch", "dispatch_path", type=_file, metavar="FILE", help="Write the verdict as a table to load.")
@click.option("--no-cold", is_flag=True, help="Time graph replays only: no cold and warm times, no cuda-bench.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=SweepSettings().rounds,
    show_default=True,
    help="Rounds over the configurations of a shape; up to twice as many where they scatter by more than 2 % around "
    "their median.",
)
@click.option(
    "--round-ms",
    type=click.FloatRange(min=0.1),
    default=SweepSettings().seconds_per_round * 1e3,
    callback=_finite,
    show_default=True,
    help="Milliseconds of samples a round and configuration.",
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=1, show_default=True, help="Seed of the data.")
@click.option("-q", "--quiet", is_flag=True, help="Only the verdict, what is missing, and comparisons.")
@click.pass_context
def bench(
    ctx: click.Context,
    workload: str,
    geometry: str,
    tp: int,
    preset: str,
    batch: tuple[int, ...] | None,
    kv_len: tuple[int, ...] | None,
    splits: tuple[int, ...] | None,
    device: str,
    require_gpu: bool,
    kernels: Path | None,
    baseline: str | None,
    peer: tuple[str, ...],
    list_peers: bool,
    dry_run: bool,
    from_record: Path | None,
    compare: tuple[Path, Path] | None,
    threshold: float,
    json_path: Path | None,
    html_path: Path | None,
    plots_directory: Path | None,
    dispatch_path: Path | None,
    no_cold: bool,
    rounds: int,
    round_ms: float,
    seed: int,
    quiet: bool,
) -> int:
    """Time the kernels against the card's limits, and say which decode form to use where.

    Exit codes: 0 as expected; 1 a kernel is wrong or slower; 2 the request or a tool failed, or --from names a record
    whose run did not get to its end; 130 interrupted (the record keeps what was measured).
    """
    _require_one_mode(ctx)
    console = BenchConsole()
    outputs = _Outputs(html_path, plots_directory, dispatch_path)
    if plots_directory is not None and (missing := missing_matplotlib()):
        raise UsageError(f"--plots {plots_directory}: {missing}")
    outlive_reader(html_path, plots_directory, dispatch_path)
    if list_peers:
        console.peers([_peer_row(status) for status in map(peer_status, PEERS)])
        return 0
    if compare is not None:
        a, b = (read_bench_record(path, "--compare") for path in compare)
        comparison = compare_records(a, b, str(compare[0]), str(compare[1]), threshold)
        if not any(cell.ratio is not None for cell in comparison.cells):
            raise UsageError(
                f"--compare {compare[0]} {compare[1]}: no cell has a time in both; name records of one plan"
            )
        console.comparison(comparison)
        # Half a run that is not slower is no proof of the other half.
        return EXIT_FINDINGS if comparison.has_regression or b.ended != "finished" else 0
    if from_record is not None:
        analysis = analyse(read_bench_record(from_record, "--from"))
        failure = _report(console, analysis, outputs, quiet=quiet, with_start=True)
        code = _compared(console, _within(analysis.record, threshold), _exit_code(analysis.record))
        if failure is not None:
            raise failure
        if code != EXIT_FINDINGS and analysis.record.ended != "finished":
            raise UsageError(
                f"--from {from_record}: the run did not get to its end ({analysis.record.ended}); what is shown is all "
                "that it measured, so run it again for the rest"
            )
        return code

    request = Request(
        workload=cast(Workload, workload),
        geometries=select_geometries(geometry, tp),
        preset=cast(Preset, preset),
        batches=batch or (),
        kv_lens=kv_len or (),
        splits=splits,
        peers=select_peers(peer),
        with_baseline=baseline is not None and not _is_record(baseline),
    )
    if dry_run:
        if request.with_baseline:
            _baseline_kernels(cast(str, baseline), kernels)
        _show_plan(console, request)
        return 0
    old_record = read_bench_record(Path(baseline), "--baseline") if baseline and _is_record(baseline) else None
    opened = open_gpu(device)
    try:
        libraries = [KernelLibrary(opened, kernels)]
        if request.with_baseline:
            libraries.append(KernelLibrary(opened, *_baseline_kernels(cast(str, baseline), kernels)))
        for library in libraries:
            compile_sources(opened, library.kernels_directory, sources_of(entries()))
        plan = make_plan(request, Target.of(opened))
        before = clocks()
        run = BenchRun(plan, request, opened, libraries, seed=seed, cold=not no_cold)
        info = _with_versions(collect_run_info(opened, kernels, seed))
        record = BenchRecord(
            run=info,
            settings={
                "workload": workload,
                "preset": preset,
                "rounds": rounds,
                "seconds_per_round": round_ms * 1e-3,
                "cold": not no_cold,
                "baseline": baseline or "",
            },
            ceilings=run.ceilings,
            shapes=plan.shapes,
            measurements=plan.cells,
            peers=tuple(_peer_entry(one) for one in map(peer_status, request.peers)),
            clocks=(before,) if before else (),
            ended="still running, or killed",
        )
        path = json_path or _record_path(info)
        store = BenchStore(record, path)
        if not quiet:
            console.start(info, run.ceilings)
        done: set[str] = set()

        def put(measurements: Any) -> None:
            store.put(measurements)
            done.update(item.shape for item in measurements)
            if measurements:
                console.progress(len(done), len(plan.shapes), measurements[0].shape)

        measured = run.measure(SweepSettings(rounds, round_ms * 1e-3), put)
        console.end_progress()
        after = clocks()
        store.update(
            replace(
                store.record,
                measurements=tuple(measured.measurements),
                clocks=tuple(text for text in (before, after) if text),
                ended=measured.ended,
            )
        )
        if measured.ended == "finished":
            run.close()
    finally:
        opened.close()
    analysis = analyse(store.record)
    failure = _report(console, analysis, outputs, quiet=quiet, with_start=False)
    if not quiet:
        console.written("record", path)
    if old_record is None:
        against = _within(store.record, threshold)
    else:
        against = compare_records(old_record, store.record, cast(str, baseline), str(path), threshold)
    code = _compared(console, against, _exit_code(store.record))
    if code != EXIT_FINDINGS and store.record.ended == "interrupted":
        sys.stderr.write("g4kv: interrupted\n")
        code = EXIT_INTERRUPTED
    store.require_whole()
    if failure is not None:
        raise failure
    return code


def _within(record: BenchRecord, threshold: float) -> Comparison | None:
    """The two halves of a record whose run alternated with other kernels."""
    if not any(item.configuration.endswith(BASELINE_SUFFIX) for item in record.measurements):
        return None
    return compare_with_baseline(record, str(record.settings.get("baseline") or "the other kernels"), threshold)


def _compared(console: BenchConsole, comparison: Comparison | None, code: int) -> int:
    """Show the comparison, if there is one; the exit code with its verdict."""
    if comparison is None:
        return code
    console.comparison(comparison)
    return code or (EXIT_FINDINGS if comparison.has_regression else 0)


class _Outputs:
    """Files beside the record."""

    def __init__(self, html: Path | None, plots: Path | None, dispatch: Path | None) -> None:
        self.html, self.plots, self.dispatch = html, plots, dispatch


def _report(
    console: BenchConsole, analysis: Analysis, outputs: _Outputs, *, quiet: bool, with_start: bool
) -> UsageError | None:
    """Tables, verdict, what is missing; then the files. The first of them that could not be written, for the end."""
    if with_start and not quiet:
        console.start(analysis.record.run, analysis.record.ceilings)
    if not quiet:
        console.tables(analysis)
    console.verdicts(analysis.verdicts)
    console.missing(analysis)
    failure: UsageError | None = None
    for write in (_write_dispatch, _write_plots, _write_page):
        try:
            write(console, analysis, outputs)
        except UsageError as error:
            failure = failure or error
    return failure


def _write_dispatch(console: BenchConsole, analysis: Analysis, outputs: _Outputs) -> None:
    if outputs.dispatch is not None:
        write_whole(outputs.dispatch, dispatch_text(analysis), "--dispatch")
        console.written("dispatch", outputs.dispatch)


def _write_plots(console: BenchConsole, analysis: Analysis, outputs: _Outputs) -> None:
    if outputs.plots is not None:
        for path in write_plots(analysis, outputs.plots, "--plots"):
            console.written("plot", path)


def _write_page(console: BenchConsole, analysis: Analysis, outputs: _Outputs) -> None:
    if outputs.html is not None:
        write_html(analysis, outputs.html, "--html")
        missing = missing_matplotlib()
        console.written("page", outputs.html, f"without plots: {missing}" if missing else "")


def _show_plan(console: BenchConsole, request: Request) -> None:
    plan = make_plan(request)
    empty = RunInfo(_NO_DEVICE, "", "", "", "", {}, "", 0)
    record = BenchRecord(empty, {}, H200_CEILINGS, plan.shapes, plan.cells)
    rows = {row.shape.id: row for row in analyse(record).rows}
    names = [[cell.configuration for cell in plan.cells if cell.shape == shape.id] for shape in plan.shapes]
    console.plan([rows[shape.id] for shape in plan.shapes], names, H200_CEILINGS)


def _with_versions(info: RunInfo) -> RunInfo:
    """The run's head with the versions of what else took part."""
    found = dict(info.versions)
    for package in ("cuda-bench", "torch", *dict.fromkeys(peer.distribution for peer in PEERS)):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return replace(info, versions=found)


def _is_record(baseline: str) -> bool:
    return baseline not in (BUILT_IN, PORTABLE) and Path(baseline).is_file()


def _baseline_kernels(baseline: str, kernels: Path | None) -> tuple[Path | None, str]:
    """The baseline's directory and variant, as a KernelLibrary takes them."""
    if baseline == PORTABLE:
        return kernels, PORTABLE
    if baseline == BUILT_IN:
        if kernels is None:
            raise UsageError("--baseline built-in compares with other kernels: name them with --kernels DIR")
        return None, ""
    path = Path(baseline)
    if not path.is_dir():
        raise UsageError(
            f"--baseline {baseline}: neither a directory of kernels nor a record; or say built-in or portable"
        )
    return path, ""


def _record_path(info: RunInfo) -> Path:
    directory = record_directory(Path("results"), info.device.name, info.date, info.git_commit)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; say where with --json FILE") from error
    return free_name(directory, "bench")


def _peer_row(status: Any) -> tuple[str, str, str]:
    return (status.peer.name, status.version or status.reason, status.peer.what)


def _peer_entry(status: Any) -> dict[str, str]:
    return {"name": status.peer.name, "version": status.version, "reason": status.reason, "what": status.peer.what}


def _exit_code(record: BenchRecord) -> int:
    """1: a kernel of ours is wrong or faulted; 2: the run or a cell of ours failed otherwise."""
    ours = [item for item in record.measurements if item.form != "peer"]

    def any_of(*statuses: str) -> list[Measurement]:
        return [item for item in ours if item.status in statuses]

    if any_of("wrong", "impossible") or "faulted" in record.ended:
        return EXIT_FINDINGS
    if any_of("failed", "missing"):
        return EXIT_FAILURE
    return 0
