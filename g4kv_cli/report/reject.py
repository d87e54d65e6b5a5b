"""What ``g4kv reject`` shows: where it runs, what was not refused as it should be, and two tables on one screen."""

from __future__ import annotations

import time
from collections import Counter

from rich.table import Table
from rich.text import Text

from g4kv_cli.records.run import CaseResult, RunInfo, summarise
from g4kv_cli.report.console import (
    device_text,
    is_told_again,
    kernels_text,
    write_result,
    write_uncovered,
    write_unused_waivers,
)
from g4kv_cli.report.format import count_text, seconds_text, summary_text
from g4kv_cli.report.terminal import print_line, print_table, results_console, terminal_width

RULE_COLUMNS = 3
MAX_SHOWN_FAILURES = 20
_RULE_WIDTH = 20
_TRAP = "trap"
_AS_EXPECTED = ("passed", "not covered")


class RejectConsole:
    """Shows a run: failures as they come, an error that many cases have once, then the tables. ``quiet`` leaves the
    device line, failures and summary."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = results_console()
        self._quiet = quiet
        self._done: list[CaseResult] = []
        self._begin = time.perf_counter()
        self._failures = self._shown_failures = 0
        self._told_errors: set[str] = set()
        self._run: RunInfo | None = None

    def start(self, run: RunInfo) -> None:
        """The first lines: where it runs and why there, and which kernels."""
        self._line("device   ", device_text(run))
        if not self._quiet:
            self._line("kernels  ", kernels_text(run))
            for statement in run.declared:
                self._line("declared ", statement)
        self._run = run

    def add(self, result: CaseResult) -> None:
        """One more case is done."""
        self._done.append(result)
        if result.status in _AS_EXPECTED:
            return
        self._failures += 1
        if not is_told_again(result, self._told_errors) and self._shown_failures < MAX_SHOWN_FAILURES:
            self._shown_failures += 1
            write_result(self._out, result)

    def finish(self, seconds: float | None = None) -> None:
        """The tables and the closing line. ``seconds``: how long it took, where that was not now."""
        hidden = self._failures - self._shown_failures
        if hidden > 0:
            self._out.print(Text(f"    and {count_text(hidden, 'case')} more that did not pass: see --json or --junit"))
        if not self._quiet:
            self._rules()
            self._entries()
        write_uncovered(self._out, self._done)
        write_unused_waivers(self._out, self._run, self._done)
        summary = summarise(self._done)
        good = summary.passed == len(self._done)
        traps = sum(_is_trap(result) for result in self._done)
        kinds = f"{count_text(len(self._done) - traps, 'host rejection')}, {count_text(traps, 'trap')}"
        took = seconds_text(time.perf_counter() - self._begin if seconds is None else seconds)
        text = f"{summary_text(summary, every=True)}: {kinds} in {took}"
        bad = summary.failed or summary.error
        print_line(self._out, "", text, "bold green" if good else "bold red" if bad else "bold yellow")

    def abort(self) -> None:
        """Nothing is in the way of the error that ended the run."""

    def _rules(self) -> None:
        """Rules in columns: cases on the host, then traps behind it."""
        rules = list(dict.fromkeys(rule_of(result) for result in self._done))
        head = f"{'rule':<{_RULE_WIDTH}}{'host':>5}{'trap':>5}"
        width = terminal_width(self._out)
        columns = RULE_COLUMNS if width is None else min(RULE_COLUMNS, max(1, (width + 3) // (len(head) + 3)))
        rows = -(-len(rules) // columns)
        self._out.print(Text("   ".join([head] * min(columns, len(rules))), style="dim"))
        for row in range(rows):
            line = Text()
            for rule in rules[row::rows]:
                line.append("   " if line else "")
                line.append_text(self._rule_cell(rule))
            self._out.print(line)

    def _rule_cell(self, rule: str) -> Text:
        results = [result for result in self._done if rule_of(result) == rule]
        bad = any(result.status not in _AS_EXPECTED for result in results)
        count = Counter(_is_trap(result) for result in results)
        text = f"{rule:<{_RULE_WIDTH}}{_number(count[False]):>5}{_number(count[True]):>5}"
        return Text(text, style="bold red" if bad else "")

    def _entries(self) -> None:
        by_entry: dict[str, list[CaseResult]] = {}
        for result in self._done:
            by_entry.setdefault(result.entry, []).append(result)
        bad = {entry: sum(one.status not in _AS_EXPECTED for one in results) for entry, results in by_entry.items()}
        uncovered = {entry: sum(one.status == "not covered" for one in results) for entry, results in by_entry.items()}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name, right in (("        entry", False), ("heads of", False), ("host", True), ("trap", True)):
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        if any(bad.values()) or any(uncovered.values()):
            table.add_column("", no_wrap=True)
        for entry, results in by_entry.items():
            mark = ("  FAIL  ", "bold red") if bad[entry] else ("  ok    ", "green")
            if uncovered[entry] == len(results):
                mark = ("  -     ", "yellow")
            count = Counter(_is_trap(result) for result in results)
            cells = [results[0].geometry, _number(count[False]), _number(count[True])]
            notes = [f"{bad[entry]} did not pass"] if bad[entry] else []
            notes += [f"{uncovered[entry]} not covered"] if uncovered[entry] else []
            note = [", ".join(notes)] if notes else []
            table.add_row(Text.assemble(mark, entry), *cells, *note)
        print_table(self._out, table)

    def _line(self, label: str, text: str) -> None:
        print_line(self._out, label, text)


def rule_of(result: CaseResult) -> str:
    """The rule's code in a case id: ``reject/<entry>/<rule>/<variant>``."""
    return result.id.split("/")[2]


def _is_trap(result: CaseResult) -> bool:
    return result.id.startswith(f"{_TRAP}/")


def _number(count: int) -> str:
    return str(count) if count else "-"
