"""What ``g4kv provider check`` shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from g4kv_cli.providers.check import ManifestCheck
from g4kv_cli.report.format import count_text


def write_check(name: str, file: Path, declared: Sequence[str], found: ManifestCheck) -> None:
    """Entries with the line that serves them, statements, notes, and last the problems."""
    out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    out.print(Text.assemble(("provider ", "dim"), f"{name}, {file}"))
    for statement in declared:
        out.print(Text.assemble(("declared ", "dim"), statement))
    for one in found.served:
        mark = ("  served  ", "green") if one.line else ("  -       ", "yellow")
        out.print(Text.assemble(mark, f"{one.entry}{f'  (line {one.line})' if one.line else ''}"))
    for note in found.notes:
        out.print(Text.assemble(("note     ", "yellow"), note))
    for problem in found.problems:
        out.print(Text.assemble(("wrong    ", "bold red"), f"{file}:{problem}"))
    count = sum(1 for one in found.served if one.line)
    summary = f"{count} of {count_text(len(found.served), 'entry').replace('entrys', 'entries')} served"
    out.print(Text(f"{summary}, {count_text(len(found.problems), 'problem')}"))
