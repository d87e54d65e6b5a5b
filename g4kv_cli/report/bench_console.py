"""What ``g4kv bench`` shows: the plan, a table per geometry against the ceilings, the verdict, a comparison."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4kv_cli.entries.table import preferred_unsplit
from g4kv_cli.records.bench import PEER_PREFIX, BenchRecord, Ceilings, Shape
from g4kv_cli.records.findings import Analysis, CellVerdict, ComparedCell, Comparison, GeometryVerdict, Row
from g4kv_cli.report.bench_format import (
    burst_text,
    bytes_text,
    ceilings_text,
    columns_of,
    flops_text,
    share_text,
    signed_share_text,
    time_text,
)
from g4kv_cli.report.console import device_text, kernels_text
from g4kv_cli.report.format import count_text
from g4kv_cli.report.terminal import blocks, print_line, print_table, results_console

KV_LEN_WIDTH = 7
_STYLES = {"best": "bold green", "tie": "green", "best peer": "cyan", "": ""}
_CHANGES = {
    "slower": "bold red", "broken": "bold red", "faster": "bold green", "mended": "green", "undecided": "yellow",
}  # fmt: skip


class BenchConsole:
    """Writes to stdout; progress goes to stderr where that is a terminal."""

    def __init__(self, out: Console | None = None) -> None:
        self._out = out or results_console()
        self._progress_shown = False

    # --- before and during a run ---------------------------------------------------------------------------

    def start(self, record: BenchRecord) -> None:
        """Device, kernels, ceilings of this run."""
        run = record.run
        self._line("device   ", device_text(run))
        self._line("kernels  ", f"{kernels_text(run)}, commit {run.git_commit or 'none'}")
        if record.overlaps:
            self._line("launches ", "each begins while the one in front ends, where its kernel can (--pdl)")
        if record.ceilings is not None:
            self._line("ceilings ", ceilings_text(record.ceilings))
        if record.burst_ceilings is not None:
            self._line("in bursts", f" {burst_text(record)}")

    def progress(self, done: int, total: int, shape: str) -> None:
        """One line that is overwritten; nothing where stderr is no terminal."""
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K  {done} of {total} shapes, {shape}")
            sys.stderr.flush()
            self._progress_shown = True

    def end_progress(self) -> None:
        """Clear the line."""
        if self._progress_shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    # --- a finished run ------------------------------------------------------------------------------------

    def tables(self, analysis: Analysis) -> None:
        """One table for each workload of each geometry; ours and the best peers, each against its ceiling."""
        keys = dict.fromkeys((row.shape.pool, row.shape.kind) for row in analysis.rows)
        for pool, kind in keys:
            rows = [row for row in analysis.rows if (row.shape.pool, row.shape.kind) == (pool, kind)]
            self._out.print()
            print_table(self._out, measurement_table(f"{pool}, {kind}", rows), keys=2)

    def verdicts(self, verdicts: Sequence[GeometryVerdict]) -> None:
        """The winners per cell, the sentences, the rule."""
        for verdict in verdicts:
            self._out.print()
            batches = sorted({cell.shape.batch for cell in verdict.cells})
            for block in blocks([_batch_width(verdict, batch) for batch in batches], KV_LEN_WIDTH, self._out):
                if block.start:
                    self._out.print()
                print_table(self._out, verdict_table(verdict, [batches[index] for index in block]))
            for line in (*verdict.sentences, *rule_lines(verdict)):
                print_line(self._out, "  ", line)

    def missing(self, analysis: Analysis) -> None:
        """What has no time, and why."""
        if analysis.missing:
            self._out.print()
            self._out.print(Text("without a time", style="bold yellow"))
            for line in analysis.missing:
                print_line(self._out, "  ", line)

    def written(self, label: str, path: Path, note: str = "") -> None:
        """Where something was written, and what it lacks."""
        self._line(f"{label:<9}", f"{path}, {note}" if note else str(path))

    def comparison(self, comparison: Comparison) -> None:
        """Every cell that changed or is undecided, then the counts."""
        self._out.print()
        print_line(self._out, "A ", comparison.a_name, "dim")
        print_line(self._out, "B ", comparison.b_name, "dim")
        for note in comparison.notes:
            print_line(self._out, "  ", note, style="yellow")
        notable = [cell for cell in comparison.cells if cell.change not in ("same", "no time")]
        if notable:
            print_table(self._out, comparison_table(notable))
        print_line(self._out, "", comparison_summary(comparison), "bold")

    # --- without a run -------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], configurations: Sequence[Sequence[str]], ceilings: Ceilings) -> None:
        """The shapes with what they move and compute, their floors, and what would be timed."""
        self._line("ceilings ", f"{ceilings_text(ceilings)} ({ceilings.note})")
        table = _table(None)
        for name, right in (("shape", False), ("bytes", True), ("FLOPs", True), ("floor", True), ("bound by", False),
                            ("configurations", False)):  # fmt: skip
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "configurations")
        for row, names in zip(rows, configurations, strict=True):
            shape = row.shape
            moved = bytes_text(shape.read_bytes + shape.write_bytes)
            table.add_row(
                shape.id,
                moved,
                flops_text(shape.flops),
                time_text(row.floor_seconds),
                row.floor_bound,
                " ".join(names),
            )
        print_table(self._out, table)
        cells = sum(len(names) for names in configurations)
        self._out.print(Text(f"{count_text(len(rows), 'shape')}, {count_text(cells, 'cell')}", style="bold"))

    def peers(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Name, version or what to do, what it is."""
        table = _table(None)
        for name in ("peer", "here", "what"):
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        print_table(self._out, table)

    def _line(self, label: str, text: str) -> None:
        print_line(self._out, label, text)


def _table(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def place_text(shape: Shape) -> str:
    """The shape without its kind and geometry."""
    return shape.id.split("/", 2)[2]


def measurement_table(title: str, rows: Sequence[Row]) -> Table:
    """Shape and configuration, the columns of bench_format, standing."""
    table, columns = _table(title), columns_of(rows)
    for name in ("shape", "configuration"):
        table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before = ""
    for row in rows:
        item, style = row.measurement, _STYLES.get(row.standing, "")
        place = place_text(row.shape)
        shown = place if place != before else ""
        before = place
        name = item.configuration
        if item.graph is None:
            table.add_row(shown, name, item.status, *[""] * len(columns), style="yellow")
            continue
        table.add_row(shown, name, *(column.text(row) for column in columns), row.standing, style=style)
    return table


def verdict_table(verdict: GeometryVerdict, batches: Sequence[int]) -> Table:
    """kv_len down, these batches across; in a cell the lines of cell_lines."""
    table = _table(f"{verdict.pool}: which decode form")
    table.add_column("kv_len", justify="right", no_wrap=True)
    for batch in batches:
        table.add_column(f"batch {batch}", no_wrap=True)
    kv_lens = list(dict.fromkeys(cell.shape.kv_len for cell in verdict.cells))
    for kv_len in kv_lens:
        found = {cell.shape.batch: cell for cell in verdict.cells if cell.shape.kv_len == kv_len}
        cells = ("\n".join(cell_lines(found[batch])) if batch in found else "" for batch in batches)
        table.add_row(str(kv_len), *cells)
        if kv_len != kv_lens[-1]:
            table.add_row()
    return table


def _batch_width(verdict: GeometryVerdict, batch: int) -> int:
    lines = [line for cell in verdict.cells if cell.shape.batch == batch for line in cell_lines(cell)]
    return max(map(len, (f"batch {batch}", *lines)))


def cell_lines(cell: CellVerdict) -> list[str]:
    """``c16 10.9 us``, the other kind's margin ``unsplit +48.0 %``, the best peer's time over ours
    ``flashinfer-tc 1.04x``; undecided, ``~b 38.1 us`` and no margin."""
    lines = [f"{'' if cell.decided else '~'}{cell.configuration} {time_text(cell.seconds)}"]
    if cell.margin is not None and cell.decided:
        lines.append(f"{'unsplit' if cell.is_split else 'split'} {signed_share_text(cell.margin)}")
    if cell.peer_seconds is not None:
        lines.append(f"{cell.best_peer.removeprefix(PEER_PREFIX)} {cell.peer_seconds / cell.seconds:.2f}x")
    return lines


def rule_lines(verdict: GeometryVerdict) -> list[str]:
    """The rule in words with what it costs; and what ~ means, if a cell has it."""
    lines = []
    rule = verdict.rule
    if rule is not None:
        lines.append(
            f"rule: num_splits = the largest power of two up to min({rule.target_blocks} / (batch x "
            f"{verdict.num_kv_heads}), visible keys / {rule.min_keys_per_split}); below 2 use {preferred_unsplit()}. "
            f"It loses {share_text(rule.mean_loss)} on average, {share_text(rule.worst_loss)} at most "
            f"({rule.worst_shape})"
        )
    undecided = [cell for cell in verdict.cells if not cell.decided]
    if undecided:
        lines.append(
            f"~ undecided: split and unsplit are within the noise of each other ({count_text(len(undecided), 'cell')})"
        )
    return lines


def comparison_table(cells: Sequence[ComparedCell]) -> Table:
    """One row a cell."""
    table = _table(None)
    for name, right in (("cell", False), ("A", True), ("B", True), ("B over A", True), ("", False), ("why", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "why")
    for cell in cells:
        table.add_row(
            cell.id,
            "" if cell.a_seconds is None else time_text(cell.a_seconds),
            "" if cell.b_seconds is None else time_text(cell.b_seconds),
            "" if cell.ratio is None else signed_share_text(cell.ratio),
            cell.change,
            cell.reason,
            style=_CHANGES.get(cell.change, ""),
        )
    return table


def comparison_summary(comparison: Comparison) -> str:
    """``120 cells: 2 slower, 1 faster, 114 same, 3 undecided (threshold 5 %)``."""
    counts: dict[str, int] = {}
    for cell in comparison.cells:
        counts[cell.change] = counts.get(cell.change, 0) + 1
    order = ("slower", "broken", "faster", "mended", "same", "undecided", "only in A", "only in B", "no time")
    text = ", ".join(f"{counts[name]} {name}" for name in order if name in counts)
    return f"{count_text(len(comparison.cells), 'cell')}: {text} (threshold {100 * comparison.threshold:g} %)"
