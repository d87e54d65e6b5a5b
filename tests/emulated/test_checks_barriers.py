"""Barriers with a thread count: who meets there must be who is counted, whichever warp comes first."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import faults_of, pointer, read_as
from nvrtc_helper import DIALECTS, compile_kernel, line_of

from g4kv_cli.device.emulated import Fault, Machine

SOURCE = """
#define SYNC(id, threads) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory")
#define ARRIVE(id, threads) asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory")
extern "C" __global__ void kernel(int* out) {
  SHARED
  int warp = threadIdx.x / 32;
  CODE
  out[blockIdx.x * 128 + threadIdx.x] = warp;
}
"""


def run(
    code: str, arch: str = "90", block: int = 128, shared: str = "__shared__ int row[128];"
) -> tuple[list[Fault], str]:
    source = SOURCE.replace("CODE", code).replace("SHARED", shared)
    machine = Machine()
    out = machine.allocate(2048, "out")
    faults = faults_of(machine, compile_kernel(source, arch), pointer(out), grid=2, block=block)
    written = read_as(machine, out, 128 + block, np.int32)
    np.testing.assert_array_equal(written[128:], np.arange(block) // 32)  # no such fault ends the launch
    return faults, source


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("shared", ["__shared__ int row[128]; row[threadIdx.x] = 0;", ""], ids=["shared", "none"])
def test_more_threads_at_once_than_a_barrier_counts(arch: str, shared: str) -> None:
    assert not run("SYNC(1 + warp / 2, 64);", arch, shared=shared)[0]
    (fault,), source = run("SYNC(1 + warp / 2, 32);   // MARK: barrier", arch, shared=shared)
    assert (fault.kind, fault.is_fatal, fault.lanes) == ("barrier_count", False, 256)
    assert fault.source_line == line_of(source, "MARK: barrier")
    assert (fault.block, fault.thread) == ((0, 0, 0), (0, 0, 0))
    line = fault.source_line
    assert "barrier 1 counts 32 threads, but 64 meet there" in fault.message
    assert f"warps 0, 1 at line {line}" in fault.message


@pytest.mark.parametrize("arch", DIALECTS)
def test_threads_that_come_after_a_barrier_was_full(arch: str) -> None:
    """The surplus warp could as well have come first: nothing orders the two."""
    parts = ("if (warp < 2) SYNC(1, 64);   // MARK: first", "", "if (warp >= 2) SYNC(1, 64);   // MARK: second")
    (fault,), source = run("\n".join(parts), arch)
    assert (fault.kind, fault.lanes) == ("barrier_count", 128)
    assert fault.source_line == line_of(source, "MARK: second")
    assert fault.thread == (64, 0, 0)
    assert "warp 2 arrives beside those that it counted" in fault.message
    assert f"at line {line_of(source, 'MARK: first')}" in fault.message
    # In order: after a barrier of the block; or after one that the first two have reached since.
    assert not run("\n".join((parts[0], "__syncthreads();", parts[2])), arch)[0]
    handed_on = "if (warp < 2) ARRIVE(2, 128); else SYNC(2, 128);"
    assert not run("\n".join((parts[0], handed_on, parts[2])), arch)[0]
    # One of the two is enough: it has met the other.
    by_one = "if (warp == 0) ARRIVE(2, 96); else if (warp >= 2) SYNC(2, 96);"
    assert not run("\n".join((parts[0], by_one, parts[2])), arch)[0]


RING = """
  for (int step = 0; step < 3; ++step) {
    if (warp < 2) { EMPTY; ARRIVE(1, 128); }   // MARK: producer
    else { SYNC(1, 128); FREE; }
  }
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_producer_that_arrives_again_before_its_consumers_came(arch: str) -> None:
    in_order = RING.replace("EMPTY", "if (step) SYNC(2, 128)").replace("FREE", "if (step < 2) ARRIVE(2, 128)")
    assert not run(in_order, arch)[0]
    faults, source = run(RING.replace("EMPTY", "").replace("FREE", ""), arch)
    assert {fault.kind for fault in faults} == {"barrier_count"}
    assert faults[0].source_line == line_of(source, "MARK: producer")
    assert "warp 0 arrives" in faults[0].message


@pytest.mark.parametrize("arch", DIALECTS)
def test_threads_that_count_a_barrier_differently(arch: str) -> None:
    code = "if (warp > 0) SYNC(1, 128); else SYNC(1, COUNT);"
    assert not run(code.replace("COUNT", "128"), arch)[0]
    faults, source = run(code.replace("COUNT", "96"), arch)
    assert faults[0].kind == "barrier_count"
    assert {"96", "128"} <= set(faults[0].message.split())
    assert faults[0].source_line == line_of(source, "SYNC(1, 96)")


def test_each_warp_may_have_a_barrier_of_its_own() -> None:
    assert not run("for (int step = 0; step < 3; ++step) SYNC(1 + warp, 32);")[0]


def test_meetings_of_an_asynchronous_kernel() -> None:
    """The same where mbarriers order warps too (the other set of clocks)."""
    head = """
  __shared__ unsigned long long bar;
  unsigned at = (unsigned)__cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" :: "r"(at) : "memory");
  __syncthreads();"""
    first = "if (warp < 2) { SYNC(1, 64); ARRIVAL }"
    second = "if (warp >= 2) { WAITING SYNC(1, 64); }   // MARK: second"
    arrival = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");'
    waiting = (
        '{ int done = 0; while (!done) asm volatile("{ .reg .pred p; '
        'mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }" '
        ': "=r"(done) : "r"(at) : "memory"); }'
    )
    code = f"{first}\n{second}".replace("ARRIVAL", arrival)
    assert not run(code.replace("WAITING", waiting), shared=head)[0]
    (fault,), source = run(code.replace("WAITING", ""), shared=head)
    assert (fault.kind, fault.source_line) == ("barrier_count", line_of(source, "MARK: second"))
