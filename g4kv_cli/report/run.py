"""What ``g4kv run`` shows and writes down: the launch, what was found, and what the arrays hold afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.emulator.report import Report
from g4kv_cli.records.files import write_whole
from g4kv_cli.records.run import SCHEMA_VERSION, DeviceInfo
from g4kv_cli.report.format import count_text, seconds_text
from g4kv_cli.report.terminal import print_line, results_console

SHOWN_ELEMENTS = 6
NO_CHECKS = "a GPU checks nothing but wild addresses; g4kv run --device emulated does"


@dataclass(frozen=True, slots=True)
class ArrayOutcome:
    """An array argument after the launch. ``stored``: whether the kernel stored to it."""

    name: str
    spec: str
    array: npt.NDArray[Any]
    stored: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What was asked for. Extents are (x, y, z), ``shared_bytes`` dynamic shared memory of a block."""

    source: str
    kernel: str
    device: DeviceInfo
    nvrtc: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    seed: int
    arguments: tuple[tuple[str, str], ...]
    options: tuple[str, ...]


def print_start(record: RunRecord) -> None:
    """Where it runs, which kernel, and the launch."""
    out = results_console()
    compiler = f", NVRTC {record.nvrtc}" if record.nvrtc else ""
    print_line(out, "device   ", f"{record.device.name}{compiler}, {record.device.reason}")
    print_line(out, "kernel   ", f"{record.kernel} of {record.source}")
    shape = f"grid {_extent(record.grid)}, block {_extent(record.block)}"
    if record.cluster != (1, 1, 1):
        shape += f", cluster {_extent(record.cluster)}"
    print_line(out, "launch   ", f"{shape}, {record.shared_bytes:,} bytes of dynamic shared memory, seed {record.seed}")


def print_outcome(
    report: Report | None, arrays: Sequence[ArrayOutcome], findings: Sequence[str], seconds: float
) -> None:
    """Findings, what was stored, the counts; without a report, what ran was a GPU."""
    out = results_console()
    for text in report.printed.splitlines() if report is not None else ():
        print_line(out, "  printf  ", text)
    for text in findings:
        print_line(out, "  FOUND  ", text, label_style="bold red")
    for note in report.to_json()["notes"] if report is not None else ():
        print_line(out, "  note   ", note["text"])
    for each in arrays:
        state = "stored to" if each.stored else "not stored to"
        print_line(
            out, f"  {each.name}  ", f"{each.array.dtype} {list(each.array.shape)}, {state}: {summary(each.array)}"
        )
    if report is not None:
        counts = report.counts
        done = f"{count_text(counts.thread_instructions, 'thread instruction')}, {counts.stored_bytes:,} bytes stored"
        if counts.contracted:
            done += (
                f", {count_text(counts.contracted, 'sum')} fused with products as ptxas does, which the PTX leaves open"
            )
        for kind, count in report.ignored.items():
            done += f", {count_text(count, 'finding')} of kind {kind} ignored"
        if report.ended_by is not None:
            done += f", ended by {report.ended_by.kind}"
    else:
        done = NO_CHECKS
    text = f"{count_text(len(findings), 'finding')} in {seconds_text(seconds)}; {done}"
    print_line(out, "", text, "bold red" if findings else "bold green" if report is not None else "bold yellow")


def summary(array: npt.NDArray[Any]) -> str:
    """First elements, extremes and mean, and how many are not finite."""
    if array.size == 0:
        return "empty"
    if array.dtype.names is not None or (array.dtype.kind in "VSU" and not _is_number(array)):
        return f"{array.nbytes} bytes"
    flat = array.reshape(-1)
    values = flat.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    first = " ".join(_element(value) for value in flat[:SHOWN_ELEMENTS])
    words = [f"{first}{' ...' if flat.size > SHOWN_ELEMENTS else ''}"]
    finite = values[np.isfinite(values)]
    if finite.size and array.dtype.kind != "c":
        words.append(f"from {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}")
    if finite.size != values.size:
        words.append(f"{values.size - finite.size:,} of {values.size:,} not finite")
    return "; ".join(words)


def write_record(
    path: Path,
    record: RunRecord,
    ended: str,
    report: Report | None = None,
    arrays: Sequence[ArrayOutcome] = (),
    findings: Sequence[str] = (),
) -> None:
    """The JSON record at ``path``, whole. ``ended`` is ``finished``, or how it stands."""
    stored = {each.name: each for each in arrays}
    content = {
        "schema_version": SCHEMA_VERSION,
        "device": dataclasses.asdict(record.device),
        "nvrtc": record.nvrtc,
        "source": record.source,
        "options": list(record.options),
        "kernel": record.kernel,
        "grid": list(record.grid),
        "block": list(record.block),
        "cluster": list(record.cluster),
        "dynamic_shared_bytes": record.shared_bytes,
        "seed": record.seed,
        "arguments": [_argument(name, spec, stored.get(name)) for name, spec in record.arguments],
        "findings": list(findings),
        "launch": None if report is None else report.to_json(),
        "ended": ended,
    }
    write_whole(path, json.dumps(content, indent=2) + "\n", "--json")


def _argument(name: str, spec: str, outcome: ArrayOutcome | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "spec": spec}
    if outcome is not None:
        array = outcome.array
        found.update(dtype=str(array.dtype), shape=list(array.shape), stored=outcome.stored)
        found["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def _is_number(array: npt.NDArray[Any]) -> bool:
    """bfloat16 and the like are numbers of NumPy's kind V."""
    try:
        array.reshape(-1)[:1].astype(np.float64)
    except (TypeError, ValueError):
        return False
    return True


def _element(value: Any) -> str:
    return str(value) if np.asarray(value).dtype.kind in "biuc" else f"{float(value):.6g}"


def _extent(extent: tuple[int, int, int]) -> str:
    """Without the ones behind."""
    x, y, z = extent
    return f"{x} x {y} x {z}" if z > 1 else f"{x} x {y}" if y > 1 else str(x)
