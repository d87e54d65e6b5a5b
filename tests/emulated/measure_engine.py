"""How much faster launches are on the engine than on the interpreter: CPU seconds of both, in one process.

    python tests/emulated/measure_engine.py --geometry 12b-local

takes the options of ``g4kv smoke``, runs its cases on one emulator after the other, and prints a line a kernel. All of
a launch is counted, its set-up and its checks at the end included; launches that the engine hands back are not.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from g4kv_cli.device.emulated.launcher import Launcher
from g4kv_cli.device.emulated.request import LaunchOutcome, LaunchRequest
from g4kv_cli.main import main

SPENT: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
"""Launches and seconds on each emulator, by kernel."""


def watch(mode: str) -> None:
    """Time the launches of the run that follows."""
    os.environ["G4KV_EMULATOR"] = mode
    run = Launcher._run

    def timed(launcher: Launcher, request: LaunchRequest) -> LaunchOutcome:
        begin = time.process_time()
        outcome = run(launcher, request)
        if not outcome.faults:
            row = SPENT[request.kernel.name]
            row[f"{mode} launches"] += 1
            row[mode] += time.process_time() - begin
        return outcome

    Launcher._run = timed  # type: ignore[method-assign]
    sys.argv = ["g4kv", "smoke", "--device", "emulated", "--jobs", "1", "--quiet", *ARGUMENTS]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        Launcher._run = run  # type: ignore[method-assign]


def report() -> None:
    """Print the table, the kernel that takes the interpreter longest first."""
    total: dict[str, float] = defaultdict(float)
    for row in SPENT.values():
        for key, value in row.items():
            total[key] += value
    print(f"{'kernel':56} launches  engine s  interpreter s  ratio")
    for name, row in [*sorted(SPENT.items(), key=lambda item: -item[1]["interpreter"]), ("all", total)]:
        ratio = row["interpreter"] / row["native"] if row["native"] else 0.0
        print(f"{name:56} {row['native launches']:8.0f} {row['native']:9.3f} {row['interpreter']:14.3f} {ratio:6.1f}")


if __name__ == "__main__":
    ARGUMENTS = sys.argv[1:]
    watch("native")  # compiles kernels and fills caches
    SPENT.clear()
    watch("native")
    watch("interpreter")
    report()
