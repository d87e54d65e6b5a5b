"""What a GPU needs of the runner, tried without one: a process for each fault, and pools read piece by piece."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from provider_helper import engine_in

from g4kv_cli.cases import isolate, workers
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.isolate import OneByOne, _in_lanes, run_cases
from g4kv_cli.cases.prep import pool as pool_module
from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.cases.prep.pool import PoolCheck
from g4kv_cli.cases.run import RunSettings, device_spec_of
from g4kv_cli.cases.select import select_cases
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import POISON_BYTE

TABLE = gate_cases([GEOMETRIES["e2b-local"]])


def _cases(*ids: str) -> list[Case]:
    return select_cases(TABLE, ids)


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("emulated")
    yield opened
    opened.close()


def test_cases_in_a_worker_of_their_own() -> None:
    cases = _cases("trap/e2b-local/prefill/*", "prep/e2b-local/prefill/start/zero")
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"))
    results = list(_in_lanes(cases, settings, 1))
    assert [result.id for result in results] == [case.id for case in cases]
    assert {result.status for result in results} == {"passed"}


def test_workers_begin_before_the_first_result_is_asked_for_and_end_with_whoever_asks() -> None:
    """A progress bar's thread that begins behind the call is in no worker, and an error before the first result leaves
    none behind. In a process without threads, as the command's is: a test's may have some."""
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n[True, True]\npassed passed\n", "")


WORKERS = """
from multiprocessing import active_children
from g4kv_cli.cases import isolate
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.run import RunSettings
from g4kv_cli.cases.select import select_cases
from g4kv_cli.device.open import open_device
from g4kv_cli.model.geometry import GEOMETRIES

isolate.MIN_CASES_PER_JOB = 1
names = [f"prep/e2b-local/{name}" for name in ("contiguous/closed-form", "prefill/start/zero")]
cases = select_cases(gate_cases([GEOMETRIES["e2b-local"]]), names)
device, settings = open_device("emulated:sm_90"), RunSettings("emulated:sm_90", None, ("g4kv", "smoke"))
results = isolate.run_cases(cases, settings, device, 2)
workers = active_children()
print(len(workers))
del results
for worker in workers:
    worker.join(20)
print([worker.exitcode is not None for worker in workers])
print(*(result.status for result in isolate.run_cases(cases, settings, device, 2)))
"""


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that holds a lock would be missing in the copy, and the lock held for ever."""
    methods: list[str] = []
    get_context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: methods.append(name) or get_context(name))
    for threads in (1, 2):  # the test's own process may have some
        monkeypatch.setattr(threading, "active_count", lambda count=threads: count)
        workers.WorkerPool(RunSettings("emulated:sm_90", None, ("g4kv", "smoke")), 1, may_fork=True).shutdown()
    assert methods == ["fork", "spawn"]


def test_a_worker_that_dies_is_an_error_of_its_case() -> None:
    cases = _cases("prep/e2b-local/contiguous/closed-form", "prep/e2b-local/prefill/start/zero")
    settings = RunSettings("emulated:sm_7", None, ("g4kv", "smoke"))  # no worker can start on it
    results = list(_in_lanes(cases, settings, 1))
    assert [result.status for result in results] == ["error", "error"]
    assert "the worker process died" in results[0].reason
    assert results[1].rerun == "g4kv smoke --case prep/e2b-local/prefill/start/zero"


@pytest.mark.parametrize("one_by_one", [False, True], ids=["run_cases", "pytest"])
def test_host_code_that_crashes_is_an_error_of_its_case(tmp_path: Path, device: Device, one_by_one: bool) -> None:
    """A Python function that crashes its process, as a library's launcher may."""
    crash = "import os, signal\n    if len(positions) == 1: os.kill(os.getpid(), signal.SIGSEGV)\n    q_out[...] ="
    change = ("reference.py", "q_out[...] =", crash)
    manifest = engine_in(tmp_path, change) / "reference.toml"
    cases = _cases("prep/e2b-local/prefill/random/seed1/tokens1/page16", "prep/e2b-local/prefill/start/zero")
    assert len(cases) == 2
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), providers=(manifest,))
    if one_by_one:
        runner = OneByOne(settings, "emulated")
        results = [runner.run(case) for case in cases]
        runner.close()
    else:
        results = list(run_cases(cases, settings, device, 1))
    by_status = {result.status: result for result in results}
    assert set(by_status) == {"error", "passed"}
    assert by_status["error"].reason == (
        "the worker process died of SIGSEGV in python 'reference:prep': a fault of its own, or arguments that are not "
        "those it takes"
    )


def test_host_code_that_ends_and_prints_as_it_likes(
    tmp_path: Path, device: Device, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it prints is no part of the run's output, an interrupt of its own not the user's, one line is one line."""
    odd = (
        "import os; os.write(1, b'\\xff\\x1b[2J{'); print('words')\n"
        "    if len(positions) == 1: raise KeyboardInterrupt('by itself')\n"
        "    raise type('Odd', (BaseException,), {})('\\x1b[31mred\\nand more')\n    q_out[...] ="
    )
    manifest = engine_in(tmp_path, ("reference.py", "q_out[...] =", odd)) / "reference.toml"
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), providers=(manifest,))
    cases = _cases("prep/e2b-local/prefill/random/seed1/tokens1/page16", "prep/e2b-local/prefill/start/zero")
    results = list(run_cases(cases, settings, device, 1))
    assert {result.status for result in results} == {"error"}
    reasons = sorted(result.reason.rpartition(": ")[2] for result in results)
    assert reasons == ["?[31mred", "by itself"], reasons
    shown = capfd.readouterr()
    assert (shown.out, "words" in shown.err) == ("", True)


def test_host_code_that_does_not_end_is_an_error_of_its_case(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "import time\n    while len(positions) == 1: time.sleep(1)\n    q_out[...] ="
    manifest = engine_in(tmp_path, ("reference.py", "q_out[...] =", hang)) / "reference.toml"
    cases = _cases("prep/e2b-local/prefill/random/seed1/tokens1/page16", "prep/e2b-local/prefill/start/zero")
    monkeypatch.setattr(isolate, "MIN_CASES_PER_JOB", 1)  # as if there were cases enough for two processes
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), 2.0, providers=(manifest,))
    by_status = {result.status: result for result in run_cases(cases, settings, device, 2)}
    assert set(by_status) == {"error", "passed"}
    assert by_status["error"].reason == "not finished after 2 s: python 'reference:prep' does not end"


def test_host_code_that_lets_nothing_else_run_is_given_up_from_outside(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it holds the interpreter's lock, no thread of its process can end it."""
    hang = "import ctypes\n    if len(positions) == 1: ctypes.PyDLL(None).sleep(60)\n    q_out[...] ="
    manifest = engine_in(tmp_path, ("reference.py", "q_out[...] =", hang)) / "reference.toml"
    monkeypatch.setattr(isolate, "SECONDS_TO_START_AND_ANSWER", 3.0)
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), 0.5, providers=(manifest,))
    (result,) = run_cases(_cases("prep/e2b-local/prefill/random/seed1/tokens1/page16"), settings, device, 1)
    assert result.status == "error"
    assert "the worker process does not answer" in result.reason


@pytest.mark.parametrize("chunk_bytes", [4096, 10_000, 1 << 30])
def test_a_pool_read_in_pieces_is_compared_whole(
    device: Device, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(pool_module, "_READ_CHUNK_BYTES", chunk_bytes)
    (case,) = _cases("prep/e2b-local/prefill/closed-form")
    assert isinstance(case, PrepCase)
    assert case.placement is not None
    check = PoolCheck(case, case.placement)
    layout, place = case.layout_of(case.placement), case.placement
    shape = (place.num_pages, layout.num_layers, 2, layout.page_size, layout.num_kv_heads, layout.head_dim)
    pool = device.allocate((int(np.prod(shape)),), BF16, "pool")
    device.fill(pool, POISON_BYTE)
    assert check._stray_in_chunks(device, pool) == ()

    # The tokens' own rows may hold anything; pool[page][layer][K, V][slot][head][dim]
    for page, slot in zip(check.pages, check.slots, strict=True):
        begin = int(np.ravel_multi_index((page, 1, 1, slot, 0, 0), shape))
        device.write(pool.view((256,), offset_elems=begin), np.ones(256, BF16))
    assert check._stray_in_chunks(device, pool) == ()

    for where in ((8, 0, 1, 15, 0, 255), (2, 1, 0, 4, 0, 7)):
        offset = int(np.ravel_multi_index(where, shape))
        device.write(pool.view((1,), offset_elems=offset), np.ones(1, BF16))
    (found,) = check._stray_in_chunks(device, pool)
    assert (found.count, found.first_got) == (2, "0x3f80")
    assert found.first == {"page": 2, "layer": 1, "slot": 4, "head": 0, "dim": 7}
    assert found.operation == "K in the pool, outside the call's slots"


@pytest.mark.parametrize("asked", ["emulated", "emulated:sm_80"])
def test_the_spec_that_a_worker_opens(asked: str) -> None:
    opened = open_device(asked)
    again = open_device(device_spec_of(opened))
    assert again.info.arch == opened.info.arch == (asked.partition(":")[2] or "sm_90")
    for one in (opened, again):
        one.close()
