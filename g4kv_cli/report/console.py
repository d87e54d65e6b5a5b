"""What ``g4kv smoke`` shows: where it runs, one line per entry and geometry, failures in full, the summary."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from g4kv_cli.entries.table import kernel_variants
from g4kv_cli.records.run import CaseResult, Mismatch, RunInfo, summarise
from g4kv_cli.report.format import coordinate_text, count_text, digest_text, seconds_text, summary_text
from g4kv_cli.report.terminal import print_entry, print_line, results_console

PROGRESS_AFTER_SECONDS = 1.0

NAME_WIDTH = 63
_TURNS = "turns"
_COLORS = {"passed": "green", "failed": "bold red", "error": "bold red", "skipped": "yellow", "not covered": "yellow"}


class SmokeConsole:
    """Shows a run as it goes. ``quiet`` leaves the device line, failures, skips and the summary.

    ``recorded``: the file or directory whose recordings are run. What is shown is then told by file.
    """

    def __init__(self, total: int, *, quiet: bool = False, recorded: Path | None = None) -> None:
        self._out = results_console()
        self._quiet = quiet
        self._total = total
        self._done: list[CaseResult] = []
        self._group: list[CaseResult] = []
        self._heading = ""
        self._recorded = recorded
        self._files: set[str] = set()
        self._begin = time.perf_counter()
        self._progress: Progress | None = None
        self._run: RunInfo | None = None
        self._may_show_progress = sys.stderr is not None and sys.stderr.isatty() and not quiet

    def start(self, run: RunInfo) -> None:
        """The first lines: where it runs and why there; which kernels; the seed, or the recordings."""
        self._line("device   ", device_text(run))
        if not self._quiet:
            seed = "" if self._recorded is not None else f", seed {run.seed}"
            self._line("kernels  ", f"{kernels_text(run)}{seed}")
            if self._recorded is not None:
                self._line("recorded ", str(self._recorded))
            for statement in run.declared:
                self._line("declared ", statement)
        self._run = run

    def add(self, result: CaseResult) -> None:
        """One more case is done."""
        if self._group and self._group_of(self._group[0]) != self._group_of(result):
            self._close_group()
        self._group.append(result)
        self._done.append(result)
        self._show_progress()

    def finish(self, seconds: float | None = None) -> None:
        """The last group and the closing summary. ``seconds``: how long it took, where that was not now."""
        self._close_group()
        self._stop_progress()
        write_unused_waivers(self._out, self._run, self._done)
        summary = summarise(self._done)
        good = summary.passed == len(self._done)
        if seconds is None:
            seconds = time.perf_counter() - self._begin
        text = (
            f"{summary_text(summary, every=True)} of {count_text(len(self._done), 'case')}"
            f"{self._files_text()} in {seconds_text(seconds)}"
        )
        failed = summary.failed or summary.error
        print_line(self._out, "", text, "bold green" if good else "bold red" if failed else "bold yellow")

    def abort(self) -> None:
        """Clear the progress bar; the error that ended the run follows."""
        self._stop_progress()

    def _close_group(self) -> None:
        if not self._group:
            return
        group, self._group = self._group, []
        with self._paused_progress():
            self._write_group(group)

    def _write_group(self, group: Sequence[CaseResult]) -> None:
        uncovered = [result for result in group if result.status == "not covered"]
        notable = [result for result in group if result.status not in ("passed", "not covered")]
        if not self._quiet:
            heading, name = self._group_of(group[0])
            if heading != self._heading:
                self._heading = heading
                self._out.print(Text(heading, style="bold"))
            bad = any(result.status in ("failed", "error") for result in group)
            mark = Text("  FAIL  ", style="bold red") if bad else Text("  ok    ", style="green")
            if len(uncovered) == len(group):
                mark = Text("  -     ", style="yellow")
            seconds = sum(result.seconds for result in group)
            counts = summary_text(summarise(list(group)))
            print_entry(self._out, mark, name, f"{counts}, {seconds_text(seconds)}", NAME_WIDTH)
            self._write_variants(group)
        told: set[str] = set()
        again = 0
        for result in notable:
            if is_told_again(result, told):
                again += 1
            else:
                write_result(self._out, result)
        if again:
            line = f"the same in {count_text(again, 'case')} more: see --json or --junit"
            print_line(self._out, "    ERROR  ", line, label_style=_COLORS["error"])
        # Said once for all the cases it holds for: a provider's reasons are few and its uncovered cases many.
        write_uncovered(self._out, group)

    def _group_of(self, result: CaseResult) -> tuple[str, str]:
        """(heading, name) of the line that counts this case: geometry and entry, or of a recording, its file and what
        was done with it."""
        kind, *words = result.id.split("/")
        if self._recorded is None:
            return result.geometry, f"{result.entry}, traps" if kind == "trap" else result.entry
        files = _files_of(words)
        self._files.update(files)
        if kind == "golden":
            return f"{files[0]}, {result.geometry}", result.entry
        return ", ".join(files), f"replayed, {words[1] if words[0] != _TURNS else 'in turns'}"

    def _files_text(self) -> str:
        return f" from {count_text(len(self._files), 'file')}" if self._recorded is not None else ""

    def _write_variants(self, group: Sequence[CaseResult]) -> None:
        """How many of the cases each kernel ran in, where those are not the portable ones alone."""
        known = kernel_variants()
        counts = Counter(name for result in group for name in result.kernels)
        if any(name in known and known[name].arch for name in counts):
            words = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            self._line("          by kernel: ", words)

    def _line(self, label: str, text: str) -> None:
        print_line(self._out, label, text)

    # --- progress ------------------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        if not self._may_show_progress:
            return
        if self._progress is None:
            if time.perf_counter() - self._begin < PROGRESS_AFTER_SECONDS:
                return
            self._progress = Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.add_task("cases", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=len(self._done))

    @contextmanager
    def _paused_progress(self) -> Iterator[None]:
        """The bar is on stderr, results are on stdout: on one terminal they must take turns."""
        running = self._progress is not None
        if self._progress is not None:
            self._progress.stop()
        yield
        if running and self._progress is not None:
            self._progress.start()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _files_of(words: Sequence[str]) -> list[str]:
    """The recorded files that an id names behind its first word: one, or several that take turns."""
    stems = words[1].split("+") if words[0] == _TURNS else [words[0]]
    return [f"{stem}.npz" for stem in stems]


def device_text(run: RunInfo) -> str:
    """``emulated sm_90 (H200 limits), NVRTC 13.5, no CUDA driver``; of a GPU, kind, name, arch and driver first."""
    device = run.device
    words = [device.name if device.name.startswith(device.kind) else f"{device.kind}, {device.name}"]
    words += [device.arch] if device.arch not in device.name else []
    words += [f"driver {device.driver}"] if device.driver else []
    words += [f"NVRTC {run.nvrtc}", device.reason]
    return ", ".join(word for word in words if word)


def kernels_text(run: RunInfo) -> str:
    """``built in, sources 10e0daa0bb89``: whose kernels, and a digest that tells two runs apart by eye."""
    where = run.provider or run.kernels_directory or "built in"
    return f"{where}, {'manifests' if run.provider else 'sources'} {digest_text(run.kernels_digest)}"


def write_result(out: Console, result: CaseResult) -> None:
    """A case that did not pass, in full, with the command that runs just it."""
    out.print(Text.assemble((f"    {result.status.upper()}  ", _COLORS[result.status]), result.id))
    for line in result_lines(result):
        text = line.lstrip()
        print_line(out, " " * (6 + len(line) - len(text)), text)
    if result.dump:
        out.print(Text.assemble(("      dumped ", "dim"), result.dump))
    if result.rerun and result.status != "skipped":
        out.print(Text.assemble(("      again  ", "dim"), result.rerun))


def is_told_again(result: CaseResult, told: set[str]) -> bool:
    """Whether an error has the very words of one in ``told``, which it is added to: what keeps one case from running,
    such as a wrong name in a manifest, often keeps all of them."""
    if result.status != "error" or result.dump:
        return False
    again = result.reason in told
    told.add(result.reason)
    return again


def write_uncovered(out: Console, results: Sequence[CaseResult]) -> None:
    """What was not covered, wholly or in part: a line for each reason."""
    whole = Counter(result.reason for result in results if result.status == "not covered")
    parts = Counter(reason for result in results for reason in result.left_out)
    for counts, how in ((whole, ""), (parts, " in part")):
        for reason, count in counts.items():
            line = f"{count_text(count, 'case')}{how}: {reason}"
            print_line(out, "    NOT COVERED  ", line, label_style="yellow")


def write_unused_waivers(out: Console, run: RunInfo | None, results: Sequence[CaseResult]) -> None:
    """Waivers that tolerated nothing. Only the emulated device makes reports that a waiver could be for."""
    if run is None or run.device.kind != "emulated":
        return
    used = {waiver for result in results for waiver in result.waived}
    for waiver in run.waivers:
        if waiver not in used:
            print_line(
                out, "unused   ", f"waiver that tolerated nothing in these cases: {waiver}", label_style="yellow"
            )


def result_lines(result: CaseResult) -> list[str]:
    """What is wrong with a case: the reason, and each mismatch."""
    return [*result.reason.splitlines(), *(line for one in result.mismatches for line in mismatch_lines(one))]


def mismatch_lines(mismatch: Mismatch) -> list[str]:
    """What is wrong, how often, the first place, the worst place, the limit."""
    lines = [
        f"{mismatch.operation}: {mismatch.count:,} of {mismatch.total:,} elements",
        f"  first  {coordinate_text(mismatch.first)}: got {mismatch.first_got}, want {mismatch.first_want}",
    ]
    if mismatch.first_row_equals:
        lines.append(f"         that row equals {mismatch.first_row_equals}")
    if mismatch.worst != mismatch.first:
        lines.append(
            f"  worst  {coordinate_text(mismatch.worst)}: got {mismatch.worst_got}, want {mismatch.worst_want}"
        )
        if mismatch.worst_row_equals:
            lines.append(f"         that row equals {mismatch.worst_row_equals}")
    lines.append(f"  limit  {mismatch.limit}")
    if mismatch.note:
        lines.append(f"  note   {mismatch.note}")
    return lines
