"""What ``g4kv kernels`` shows: one row a kernel and arch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from g4kv_cli.report.format import count_text
from g4kv_cli.report.terminal import print_table, results_console

_Unit = TypeVar("_Unit")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel on an arch. Registers, stack and spills a thread; shared memory a block; ``cubin_bytes`` of its source.

    ``blocks_per_sm`` and ``occupancy`` (share of an SM's warps) are upper bounds, ``bound`` what sets them.
    """

    arch: str
    source: str
    kernel: str
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    cubin_bytes: int
    blocks_per_sm: int
    occupancy: float
    bound: str


def while_compiling(units: Sequence[_Unit]) -> Iterator[_Unit]:
    """The units one after another, with a bar on a terminal: all kernels of all archs take minutes at first."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    yield from track(units, "compiling", console=Console(stderr=True), transient=True, disable=not shown)


def kernel_table(rows: Sequence[KernelRow]) -> Table:
    """Registers, memory and the occupancy bound; rows that spill stand out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in (
        ("arch", False), ("kernel", False), ("threads", True), ("registers", True), ("spills", True), ("stack", True),
        ("shared", True), ("cubin", True), ("blocks/SM", True), ("warps", True), ("bound by", False),
    ):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    before = ""
    for row in rows:
        table.add_row(
            row.arch if row.arch != before else "",
            row.kernel,
            str(row.threads),
            str(row.registers),
            f"{row.spill_bytes} B",
            f"{row.stack_bytes} B",
            f"{(row.static_shared_bytes + row.dynamic_shared_bytes) / 1024:.1f} KiB",
            f"{row.cubin_bytes / 1024:.0f} KiB",
            str(row.blocks_per_sm),
            f"{100 * row.occupancy:.0f} %",
            row.bound,
            style="bold red" if row.spill_bytes else "yellow" if row.blocks_per_sm == 0 else "",
        )
        before = row.arch
    return table


def print_kernels(rows: Sequence[KernelRow]) -> None:
    """The table and a closing line."""
    out = results_console()
    print_table(out, kernel_table(rows), keys=2)
    out.print(summary(rows))


def summary(rows: Sequence[KernelRow]) -> str:
    """``31 kernels on 1 arch, none spills``."""
    archs = len({row.arch for row in rows})
    spilling = sum(row.spill_bytes > 0 for row in rows)
    said = f"{spilling} spill" if spilling else "none spills"
    return f"{count_text(len(rows), 'kernel')} on {count_text(archs, 'arch')}, {said}"


def kernels_json(rows: Sequence[KernelRow], nvrtc: str, kernels_digest: str) -> str:
    """The rows in bytes."""
    record: dict[str, Any] = {
        "schema_version": 1,
        "kind": "g4kv-kernels",
        "nvrtc": nvrtc,
        "kernels_digest": kernels_digest,
        "kernels": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=1) + "\n"
