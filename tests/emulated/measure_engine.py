"""How much faster the engine runs launches than the interpreter: CPU seconds of both, in one process.

    python tests/emulated/measure_engine.py --geometry 12b-local

takes the options of ``g4kv smoke``, runs its cases with every launch on both emulators, and prints a line a kernel.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from typing import Any

os.environ["G4KV_EMULATOR"] = "both"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from g4kv_cli.device.emulated.engine.launch import EngineRun
from g4kv_cli.device.emulated.launcher import Launcher
from g4kv_cli.main import main

SPENT: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
"""Launches, seconds of the engine, seconds of the interpreter, by kernel."""


def timed(function: Any, column: int, name_of: Any) -> Any:
    def run(*arguments: Any) -> Any:
        name = name_of(*arguments)
        begin = time.process_time()
        try:
            return function(*arguments)
        finally:
            SPENT[name][column] += time.process_time() - begin
            SPENT[name][0] += column == 1

    return run


def report() -> None:
    """Print the table, the kernel that takes the interpreter longest first."""
    rows = sorted(SPENT.items(), key=lambda item: -item[1][2])
    total = [sum(column) for column in zip(*SPENT.values(), strict=True)] if SPENT else [0.0, 0.0, 0.0]
    print(f"{'kernel':64} launches  engine s  interpreter s  ratio")
    for name, (launches, engine, interpreter) in [*rows, ("all", total)]:
        ratio = interpreter / engine if engine else 0.0
        print(f"{name:64} {launches:8.0f} {engine:9.3f} {interpreter:14.3f} {ratio:6.1f}")


if __name__ == "__main__":
    EngineRun.execute = timed(EngineRun.execute, 1, lambda run: run.program.name)  # type: ignore[method-assign]
    Launcher._interpret = timed(Launcher._interpret, 2, lambda _, request: request.kernel.name)  # type: ignore[method-assign]
    sys.argv = [
        "g4kv",
        "smoke",
        "--device",
        "emulated",
        "--jobs",
        "1",
        "--quiet",
        "--case-timeout",
        "600",
        *sys.argv[1:],
    ]
    try:
        main()
    finally:
        report()
