"""What ``g4kv bench`` shows of a record, and the files that it writes beside it."""

from __future__ import annotations

from g4kv_cli.bench.compare import compare_with_baseline
from g4kv_cli.bench.dispatch import dispatch_text
from g4kv_cli.commands.bench_options import BenchOptions
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, UsageError
from g4kv_cli.records.bench import BASELINE_SUFFIX, PEER_PREFIX, BenchRecord, Measurement
from g4kv_cli.records.files import write_whole
from g4kv_cli.records.findings import Analysis, Comparison
from g4kv_cli.report.bench_console import BenchConsole
from g4kv_cli.report.bench_html import write_html
from g4kv_cli.report.bench_plots import missing_matplotlib, write_plots


def report_analysis(
    console: BenchConsole, analysis: Analysis, options: BenchOptions, *, with_start: bool
) -> UsageError | None:
    """Tables, verdict, what is missing; then the files. The first of them that could not be written, for the end."""
    if with_start and not options.quiet:
        console.start(analysis.record)
    if not options.quiet:
        console.tables(analysis)
    console.verdicts(analysis.verdicts)
    console.missing(analysis)
    failure: UsageError | None = None
    for write in (_write_dispatch, _write_plots, _write_page):
        try:
            write(console, analysis, options)
        except UsageError as error:
            failure = failure or error
    return failure


def _write_dispatch(console: BenchConsole, analysis: Analysis, options: BenchOptions) -> None:
    if options.dispatch_path is not None:
        write_whole(options.dispatch_path, dispatch_text(analysis), "--dispatch")
        console.written("dispatch", options.dispatch_path)


def _write_plots(console: BenchConsole, analysis: Analysis, options: BenchOptions) -> None:
    if options.plots_directory is not None:
        for path in write_plots(analysis, options.plots_directory, "--plots"):
            console.written("plot", path)


def _write_page(console: BenchConsole, analysis: Analysis, options: BenchOptions) -> None:
    if options.html_path is not None:
        write_html(analysis, options.html_path, "--html")
        missing = missing_matplotlib()
        console.written("page", options.html_path, f"without plots: {missing}" if missing else "")


def within(record: BenchRecord, threshold: float) -> Comparison | None:
    """The two halves of a record whose run alternated with other kernels."""
    if not any(item.configuration.endswith(BASELINE_SUFFIX) for item in record.measurements):
        return None
    return compare_with_baseline(record, str(record.settings.get("baseline") or "the other kernels"), threshold)


def compared(console: BenchConsole, comparison: Comparison | None, code: int) -> int:
    """Show the comparison, if there is one; the exit code with its verdict."""
    if comparison is None:
        return code
    console.comparison(comparison)
    return code or (EXIT_FINDINGS if comparison.has_regression else 0)


def exit_code_of(record: BenchRecord) -> int:
    """1: a kernel of ours or of a manifest is wrong or faulted; 2: the run or a cell of theirs failed otherwise."""
    judged = [f"{PEER_PREFIX}{peer['name']}" for peer in record.peers if peer.get("manifest")]
    ours = [
        item for item in record.measurements if item.form != "peer" or item.configuration.partition("/")[0] in judged
    ]

    def any_of(*statuses: str) -> list[Measurement]:
        return [item for item in ours if item.status in statuses]

    if any_of("wrong", "impossible") or "faulted" in record.ended:
        return EXIT_FINDINGS
    if any_of("failed", "missing"):
        return EXIT_FAILURE
    return 0
