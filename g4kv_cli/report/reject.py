"""What ``g4kv reject`` shows: where it runs, what was not refused as it should be, and two tables on one screen."""

from __future__ import annotations

import sys
import time
from collections import Counter

from rich.console import Console
from rich.text import Text

from g4kv_cli.records.run import CaseResult, RunInfo, summarise
from g4kv_cli.report.console import device_text, kernels_text, write_result
from g4kv_cli.report.format import count_text, seconds_text, summary_text

RULE_COLUMNS = 3
MAX_SHOWN_FAILURES = 20
_RULE_WIDTH = 20
_TRAP = "trap"


class RejectConsole:
    """Shows a run: failures as they come, then the tables. ``quiet`` leaves the device line, failures and summary."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._done: list[CaseResult] = []
        self._begin = time.perf_counter()
        self._shown_failures = 0

    def start(self, run: RunInfo) -> None:
        """The first lines: where it runs and why there, and which kernels."""
        self._line("device   ", device_text(run))
        if not self._quiet:
            self._line("kernels  ", kernels_text(run))

    def add(self, result: CaseResult) -> None:
        """One more case is done."""
        self._done.append(result)
        if result.status == "passed":
            return
        self._shown_failures += 1
        if self._shown_failures <= MAX_SHOWN_FAILURES:
            write_result(self._out, result)

    def finish(self) -> None:
        """The tables and the closing line."""
        hidden = self._shown_failures - MAX_SHOWN_FAILURES
        if hidden > 0:
            self._out.print(Text(f"    and {count_text(hidden, 'case')} more that did not pass: see --json or --junit"))
        if not self._quiet:
            self._rules()
            self._entries()
        summary = summarise(self._done)
        good = summary.passed == len(self._done)
        traps = sum(_is_trap(result) for result in self._done)
        kinds = f"{count_text(len(self._done) - traps, 'host rejection')}, {count_text(traps, 'trap')}"
        seconds = seconds_text(time.perf_counter() - self._begin)
        text = f"{summary_text(summary, every=True)}: {kinds} in {seconds}"
        self._out.print(Text(text, style="bold green" if good else "bold red"))

    def abort(self) -> None:
        """Nothing is in the way of the error that ended the run."""

    def _rules(self) -> None:
        """Rules in columns: cases on the host, then traps behind it."""
        rules = list(dict.fromkeys(rule_of(result) for result in self._done))
        head = f"{'rule':<{_RULE_WIDTH}}{'host':>5}{'trap':>5}"
        rows = -(-len(rules) // RULE_COLUMNS)
        self._out.print(Text("   ".join([head] * min(RULE_COLUMNS, len(rules))), style="dim"))
        for row in range(rows):
            line = Text()
            for rule in rules[row::rows]:
                line.append("   " if line else "")
                line.append_text(self._rule_cell(rule))
            self._out.print(line)

    def _rule_cell(self, rule: str) -> Text:
        results = [result for result in self._done if rule_of(result) == rule]
        bad = any(result.status != "passed" for result in results)
        count = Counter(_is_trap(result) for result in results)
        text = f"{rule:<{_RULE_WIDTH}}{_number(count[False]):>5}{_number(count[True]):>5}"
        return Text(text, style="bold red" if bad else "")

    def _entries(self) -> None:
        entries = list(dict.fromkeys(result.entry for result in self._done))
        width = max((len(entry) for entry in entries), default=0)
        self._out.print(Text(f"{'':<8}{'entry':<{width}}  {'heads of':<16}{'host':>5}{'trap':>5}", style="dim"))
        for entry in entries:
            results = [result for result in self._done if result.entry == entry]
            bad = sum(result.status != "passed" for result in results)
            mark = Text("  FAIL  " if bad else "  ok    ", style="bold red" if bad else "green")
            count = Counter(_is_trap(result) for result in results)
            text = f"{entry:<{width}}  {results[0].geometry:<16}{_number(count[False]):>5}{_number(count[True]):>5}"
            self._out.print(mark + Text(text + (f"  {bad} did not pass" if bad else "")))

    def _line(self, label: str, text: str) -> None:
        self._out.print(Text(label, style="dim") + Text(text))


def rule_of(result: CaseResult) -> str:
    """The rule's code in a case id: ``reject/<entry>/<rule>/<variant>``."""
    return result.id.split("/")[2]


def _is_trap(result: CaseResult) -> bool:
    return result.id.startswith(f"{_TRAP}/")


def _number(count: int) -> str:
    return str(count) if count else "-"
