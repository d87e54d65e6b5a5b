"""What is left of ``g4kv smoke`` and its workers when it is interrupted or terminated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# A process started in the background may ignore the signal, and its children with it: as at a terminal instead.
_HEED = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from g4kv_cli.main import main\n"
    "if __name__ == '__main__': main()\n"
)


@contextmanager
def _running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A smoke with two workers that has finished some cases, in a process group of its own."""
    script, record = tmp_path / "run.py", tmp_path / "run.json"
    script.write_text(_HEED, encoding="utf-8")
    words = ["smoke", "--geometry", "12b-local", "--device", "emulated", "--jobs", "2", "-q", "--json", str(record)]
    process = subprocess.Popen(
        [sys.executable, str(script), *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while not record.exists() or not json.loads(record.read_text(encoding="utf-8"))["cases"]:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield process, record
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _workers(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _require_gone(workers: list[int]) -> None:
    until = time.monotonic() + 10
    while any(map(_is_running, workers)):
        assert time.monotonic() < until, "a worker is still there"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_or_twice_ends_everything(times: int, tmp_path: Path) -> None:
    with _running(tmp_path) as (process, record):
        workers = _workers(process.pid)
        assert len(workers) >= 2
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (130, -signal.SIGINT)
        if times == 1:
            assert "Traceback" not in errors
        _require_gone(workers)
    held = json.loads(record.read_text(encoding="utf-8"))
    assert held["ended"] != "finished"
    assert 0 < len(held["cases"]) < held["planned"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_a_terminated_run_leaves_no_workers(tmp_path: Path) -> None:
    with _running(tmp_path) as (process, record):
        workers = _workers(process.pid)
        assert len(workers) >= 2
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
        _require_gone(workers)
    assert json.loads(record.read_text(encoding="utf-8"))["ended"] == "still running, or killed"
