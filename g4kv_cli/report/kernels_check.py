"""What ``g4kv kernels --check`` shows: a line a kernel, a line for each thing that is not emulated, and for which
instructions the interpreter runs a kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from g4kv_cli.device.support import KernelSupport, Unsupported
from g4kv_cli.report.format import count_text
from g4kv_cli.report.terminal import print_line, results_console


def print_check(name: str, found: Sequence[tuple[str, KernelSupport]]) -> None:
    """All kernels, those first that can run as they stand in the file."""
    out = results_console()
    shows_arch = len({arch for arch, _ in found}) > 1
    for arch, support in found:
        title = f"{support.kernel}, {arch}" if shows_arch else support.kernel
        if not support.unsupported:
            out.print(Text.assemble(("  ok    ", "green"), title))
            if support.interpreted_for:
                print_line(out, "        ", f"interpreted, which is slower, for {', '.join(support.interpreted_for)}")
            if support.called_for:
                print_line(out, "        ", f"large launches are interpreted for {', '.join(support.called_for)}")
            continue
        out.print(Text.assemble(("  no    ", "bold red"), title))
        for thing in support.unsupported:
            print_line(out, "        ", line_of(thing))
    refused = sum(bool(support.unsupported) for _, support in found)
    said = f"{refused} cannot run on the emulated device" if refused else "the emulated device can run all of them"
    out.print(f"{name}: {count_text(len(found), 'kernel')}, {said}")


def line_of(thing: Unsupported) -> str:
    """``mma.hpp:91 (inlined at line 12)  'wmma.load...'  reason``; the PTX line where there is no source line."""
    place = f"PTX line {thing.ptx_line}"
    if thing.source_line is not None:
        place = f"{thing.source_file or 'source'}:{thing.source_line}"
        if thing.call_line is not None:
            place += f" (inlined at line {thing.call_line})"
    return f"{place}  {thing.opcode}" + (f"  {thing.reason}" if thing.reason else "")


def check_json(name: str, found: Sequence[tuple[str, KernelSupport]]) -> str:
    """The same as a record."""
    record: dict[str, Any] = {
        "schema_version": 1,
        "kind": "g4kv-kernels-check",
        "file": name,
        "kernels": [{"arch": arch, **asdict(support)} for arch, support in found],
    }
    return json.dumps(record, indent=1) + "\n"
