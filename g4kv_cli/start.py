"""The console script's first module, so that an interrupt is in hand before anything large is imported."""

from __future__ import annotations

from g4kv_cli.interrupts import InterruptEndsProcess


def main() -> None:
    """``g4kv``."""
    with InterruptEndsProcess():
        from g4kv_cli.main import main as run_main
    run_main()
