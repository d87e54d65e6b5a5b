"""Each rule of mbarriers on a kernel that breaks it, and what they order; a kernel has two of them and 64 threads."""

from __future__ import annotations

import pytest
from hopper_helper import run_small


@pytest.mark.parametrize(
    ("body", "init", "words"),
    [
        ("if (threadIdx.x == 0) arrive(&bar);", "", "are no mbarrier"),
        ("wait(&bar, 1);", "", "are no mbarrier"),
        ("arrive(&other); if (threadIdx.x == 0) expect(&bar, 2000000);", None, "transaction bytes expected"),
        ("if (threadIdx.x == 0) init(&bar, 1);", None, "init of an mbarrier that was not invalidated"),
        ("if (threadIdx.x == 0) { bar = 0; arrive(&bar); }", None, "have been overwritten"),
        (
            "if (threadIdx.x == 0) expect(&bar, 16); __syncthreads(); if (threadIdx.x < 2) arrive(&bar);",
            None,
            "more arrivals than the current phase still waits for",
        ),
        ("", "init(&bar, 0);", "arrival count 0"),
        (
            "if (threadIdx.x == 0) { invalidate(&bar); arrive(&bar); }",
            None,
            "are no mbarrier",
        ),
    ],
)
def test_misuse_of_an_mbarrier(body: str, init: str | None, words: str) -> None:
    fault = run_small(body, init)[-1]
    assert (fault.kind, fault.is_fatal) == ("mbarrier_misuse", True)
    assert words in fault.message


@pytest.mark.parametrize(
    "body",
    [
        "if (threadIdx.x < 2) arrive(&bar); wait(&bar, 0);",
        "for (int i = 0; i < 2; ++i) { if (threadIdx.x % 32 == 0) arrive(&bar); wait(&bar, i); }",
        "wait(&bar, 1);",  # the phase before the first counts as complete
        "if (threadIdx.x == 0) { invalidate(&bar); init(&bar, 9); }",
        "for (int i = 0; i < 3; ++i) if (threadIdx.x == 40) arrive(&other);",
    ],
)
def test_right_use_of_an_mbarrier(body: str) -> None:
    assert run_small(body) == []


def test_arrivals_order_what_came_before_them() -> None:
    body = """
  if (threadIdx.x < 32) { tile[threadIdx.x] = threadIdx.x; __syncwarp(); ARRIVE }
  else { WAIT out[threadIdx.x] = tile[threadIdx.x - 32]; }"""
    arrival, waiting = "if (threadIdx.x < 2) arrive(&bar);", "wait(&bar, 0);"
    assert run_small(body.replace("ARRIVE", arrival).replace("WAIT", waiting)) == []
    faults = run_small(body.replace("ARRIVE", arrival).replace("WAIT", ""))
    assert "shared_race" in [fault.kind for fault in faults]
    late = "tile[64] = 1; if (threadIdx.x < 2) arrive(&bar); tile[threadIdx.x] = 5;"
    (fault,) = run_small(body.replace("ARRIVE", late).replace("WAIT", waiting))
    assert fault.kind == "shared_race"
    assert "warp 0 and warp 1" in fault.message


def test_barriers_of_the_older_kinds_order_too() -> None:
    body = """
  if (threadIdx.x < 32) { tile[threadIdx.x] = threadIdx.x; ARRIVE arrive(&other); }
  else { WAIT u32 value = tile[threadIdx.x - 32]; out[threadIdx.x] = value; }"""
    arrival = 'asm volatile("bar.arrive 1, 64;" ::: "memory"); if (threadIdx.x == 0)'
    waiting = 'asm volatile("bar.sync 1, 64;" ::: "memory");'
    assert run_small(body.replace("ARRIVE", arrival).replace("WAIT", waiting)) == []
    both = 'asm volatile("bar.sync 1, 64;" ::: "memory"); if (threadIdx.x == 0)'
    assert run_small(body.replace("ARRIVE", both).replace("WAIT", waiting)) == []
    # What follows the arrival is not ordered.
    late = arrival.replace("if (", "tile[threadIdx.x] = 9; if (")
    (fault,) = run_small(body.replace("ARRIVE", late).replace("WAIT", waiting))
    assert fault.kind == "shared_race"


def test_atomics_meet_atomics_only() -> None:
    body = """
  if (threadIdx.x == 0) tile[0] = 0;
  __syncthreads();
  atomicAdd(&tile[0], 1);
  BARRIER
  out[threadIdx.x] = tile[0];
  if (threadIdx.x == 0) arrive(&other);"""
    assert run_small(body.replace("BARRIER", "__syncthreads();")) == []
    faults = run_small(body.replace("BARRIER", ""))
    assert {fault.kind for fault in faults} == {"shared_race"}
    assert "atomic" in faults[0].message


def test_many_mbarriers() -> None:
    body = """
  __shared__ u64 many[40];
  if (threadIdx.x < 32) for (int i = 0; i < 2; ++i) if (i * 32 + threadIdx.x < 40) init(&many[i * 32 + threadIdx.x], 1);
  __syncthreads();
  if (threadIdx.x >= 32) {
    tile[threadIdx.x] = threadIdx.x;
    arrive(&many[threadIdx.x - 32]);
  } else {
    wait(&many[threadIdx.x], 0);
    u32 value = tile[threadIdx.x + 32];
    out[threadIdx.x] = value;
  }"""
    assert run_small(body) == []
    assert run_small(body.replace("wait(&many[threadIdx.x], 0);", "wait(&many[threadIdx.x], 1);")) != []


def test_a_wait_that_only_peeks_does_not_hang() -> None:
    body = """
  if (threadIdx.x < 32) { wait(&other, 0); if (threadIdx.x < 2) arrive(&bar); }
  else {
    int done = peek(&bar, 0);
    if (threadIdx.x == 32) arrive(&other);   // only now can the phase end
    if (!done) wait(&bar, 0);
    out[threadIdx.x] = done;
  }"""
    assert run_small(body) == []


def test_a_warp_waits_for_its_lane_at_an_mbarrier() -> None:
    body = """
  if (threadIdx.x == 0) {{ expect(&other, 1024); load2(tile, &map, 0, 0, &other); wait(&other, 0); }}
  {} u32 value = tile[threadIdx.x]; out[threadIdx.x] = value;"""
    assert run_small(body.format("__syncwarp();"), block=32) == []
    assert run_small(body.format(""), block=32) != []
    (fault,) = run_small("if (threadIdx.x == 0) wait(&other, 0); __syncwarp();", block=32)
    assert (fault.kind, fault.thread) == ("deadlock", (0, 0, 0))
    # A lane that has exited is never waited for, in the mask or not.
    assert (
        run_small("if (threadIdx.x == 3) return; if (threadIdx.x == 0) wait(&other, 1); __syncwarp();", block=32) == []
    )
    assert run_small("if (threadIdx.x == 3) return; __syncwarp(0xfffffff7); wait(&other, 1);", block=32) == []


def test_waits_of_both_kinds_in_one_deadlock() -> None:
    (fault,) = run_small("if (threadIdx.x < 32) wait(&bar, 0); __syncthreads();")
    assert fault.kind == "deadlock"
    assert "2 of 2 arrivals and 0 transaction bytes are missing" in fault.message
    assert fault.lanes == 32
