"""Programs whose threads wait for each other, or learn who is last, run on the native engine: the interpreter's bytes
and counts, and what orders their accesses is judged as it judges it."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from hopper_helper import hopper_kernel
from judged_groups import RIGHT_GROUPS
from judged_mbarriers import RIGHT_MBARRIERS
from judged_programs import WORDS, Program
from judged_right import RIGHT
from judged_waiting import SPINNING
from judged_wrong import WRONG
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, Machine, launcher
from g4kv_cli.device.emulated.engine import state as engine_state

pytestmark = pytest.mark.usefixtures("_needs_engine")
NATIVE = (
    "spin lock between lanes",
    "spin lock between lanes, released inside the loop",
    "spin lock between warps",
    "spin lock of all threads of all blocks",
    "scan with look-back, tiles by ticket",
    "scan with look-back, tiles from behind",
    "flag between blocks, producer last",
    "flag by acquire and release, with backoff",
    "a spin that counts its turns",
    "grid barrier, polled by an atomic",
    "grid barrier of large blocks",
    "the last block resets the counter",
    "a last block by fence and ticket",
    "a last block whose threads fenced before the barrier",
    "a counter under a lock",
    "a later warp that waits for a volatile shared flag",
    "the last warp of a block by a shared ticket",
    "a compare-and-swap makes sure of a plain load",
)
PROGRAMS = {program.name: program for program in (*SPINNING, *RIGHT, *RIGHT_GROUPS)}


@pytest.fixture
def _needs_engine() -> None:
    engine()


def launch(program: Program, mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Fault], Machine]:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    values = [np.full(WORDS, -1, np.int32), np.arange(WORDS, dtype=np.int32), np.zeros(WORDS, np.int32)]
    places = [upload(machine, value, name) for value, name in zip(values, ("out", "in", "aux"), strict=True)]
    kernel = compile_kernel(program.source)
    options = {"grid": program.grid, "block": program.block, "cooperative": kernel.synchronises_grid}
    return faults_of(machine, kernel, *map(pointer, places), int32(200), **options), machine


@pytest.mark.parametrize("name", NATIVE)
def test_waits_and_tickets_run_natively(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, machine = launch(PROGRAMS[name], "both", monkeypatch)
    assert (faults, machine.counts.compared, machine.counts.replayed) == ([], 1, {})


@pytest.mark.parametrize("program", RIGHT_MBARRIERS, ids=lambda program: program.name)
def test_what_is_right_beside_mbarriers_is_so_on_both(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds nothing, or what may be right after all, which the interpreter clears."""
    faults, machine = launch(program, "both", monkeypatch)
    assert (faults, machine.counts.compared + machine.counts.cleared) == ([], 1)


UNORDERED = [
    program
    for program in WRONG
    if {"global_race", "block_write_conflict", "shared_race"} & set(program.kinds) and not program.out_is_new
]


@pytest.mark.parametrize("program", UNORDERED, ids=lambda program: program.name)
def test_what_nothing_orders_is_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told by the interpreter, to which the engine gives the launch."""
    faults, machine = launch(program, "native", monkeypatch)
    assert {fault.kind for fault in faults} & set(program.kinds)
    assert machine.counts.native == 0


def test_blocks_that_never_run_together_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step of two blocks did is not the work of the two after them."""
    source = """extern "C" __global__ void kernel(int* out, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x; out[i % n] = i; }"""
    found = []
    for mode in ("native", "interpreter"):
        monkeypatch.setenv("G4KV_EMULATOR", mode)
        machine = Machine()
        out = upload(machine, np.zeros(128, np.int32), "out")
        arguments = pointer(out), int32(64)
        found.append(faults_of(machine, compile_kernel(source), *arguments, grid=4, chunk_threads=64))
    assert found[0] == found[1]
    assert found[0]


MATRICES = """
extern "C" __global__ void kernel(u32* out, u32* tickets) {
  __shared__ __align__(16) u32 tile[128];
  const u32 t = threadIdx.x;
  tile[t] = tile[t + 64] = 0;
  __syncthreads();
  const u32 ticket = atomicAdd(tickets, 1);
  if (t < 32)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};"
        :: "r"(at(tile + 4 * t)), "r"(ticket) : "memory");
  SYNC
  if (t >= 32) out[t] = tile[t] + ticket;
}
"""


@pytest.mark.parametrize(("between", "kinds"), [("", {"shared_race"}), ("__syncthreads();", set())])
def test_matrices_that_a_warp_stores_for_another(
    between: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "native")
    machine = Machine()
    places = [upload(machine, np.zeros(64, np.int32), name) for name in ("out", "tickets")]
    kernel = hopper_kernel(MATRICES.replace("SYNC", between))
    faults = faults_of(machine, kernel, *map(pointer, places), block=64)
    assert {fault.kind for fault in faults} == kinds


def test_a_launch_that_would_write_down_too_much_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "TRACE_BYTES", 1 << 12)
    launcher._engine.cache_clear()  # an engine that has no room yet
    program = PROGRAMS["a last block by fence and ticket"]
    kernel = compile_kernel(program.source)
    monkeypatch.setattr(kernel.program, "writes_too_much", False)  # so that it is as before afterwards
    faults, machine = launch(program, "native", monkeypatch)
    assert (faults, machine.counts.native, machine.counts.replayed) == ([], 0, {"stores that meet": 1})
    assert kernel.program is not None
    assert kernel.program.writes_too_much
