"""Launches that overlap the one in front of them: what that one writes is read after a wait for it, or behind one."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from launch_helper import faults_of, launch_on, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Kernel, Machine

WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
NEXT = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
WORDS = 96


@cache
def kernel(body: str) -> Kernel:
    source = f"""
extern "C" __global__ void kernel(const int* old, const int* fresh, int* out) {{
  __shared__ int shared[{WORDS}];
  __shared__ unsigned long long bar;
  const int t = threadIdx.x;
  int value = 0;
  {body}
  out[t] = value + shared[0];
}}
"""
    return compile_kernel(source)


START = "shared[t] = 0; __syncthreads();"
WRITER = kernel(f"{START} value = old[t];")
IN_BULK = """
  const unsigned at = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(shared);
  if (t == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(at) : "memory");
    BEFORE
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" :: "r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
        :: "r"(to), "l"(fresh), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra L; }" :: "r"(at) : "memory");
"""
RIGHT = {
    "waits first": f"{START} {WAIT} value = fresh[t];",
    "what is older, early": f"{START} value = old[t]; {WAIT} value += fresh[t];",
    "behind a barrier": f"{START} if (t == 0) {{ {WAIT} }} __syncthreads(); value = fresh[t];",
    "behind a barrier of its warp": f"{START} if (t % 32 == 0) {{ {WAIT} }} __syncwarp(); value = fresh[t];",
    "copied after the wait": IN_BULK.replace("BEFORE", WAIT),
    "behind an mbarrier": IN_BULK.replace("BEFORE", WAIT) + "value = fresh[t];",
}
WRONG = {
    "reads first": (f"{START} value = fresh[t]; {WAIT}", 0, WORDS),
    "some lanes wait": (f"{START} if (t % 2) {{ {WAIT} }} value = fresh[t];", 0, WORDS // 2),
    "one warp waits": (f"{START} if (t < 32) {{ {WAIT} }} value = fresh[t];", 32, WORDS - 32),
    "copied before the wait": (IN_BULK.replace("BEFORE", "") + WAIT, 0, 8),
}


def started(machine: Machine) -> tuple[int, int, int]:
    """Addresses of what is old, of what a launch has just written, and of room for results."""
    old, fresh, out = (
        upload(machine, np.full(WORDS, number, np.int32), name) for number, name in enumerate(("old", "fresh", "out"))
    )
    launch_on(machine, WRITER, pointer(old), pointer(old), pointer(fresh), block=WORDS)
    return old, fresh, out


def launched(machine: Machine, body: str, old: int, fresh: int, out: int, *, overlap: bool = True) -> list[str]:
    arguments = [pointer(address) for address in (old, fresh, out)]
    return [str(one) for one in faults_of(machine, kernel(body), *arguments, block=WORDS, overlap=overlap)]


@pytest.mark.parametrize("name", RIGHT)
def test_reads_after_a_wait(name: str) -> None:
    machine = Machine()
    assert launched(machine, RIGHT[name], *started(machine)) == []


@pytest.mark.parametrize("name", WRONG)
def test_reads_before_a_wait(name: str) -> None:
    machine = Machine()
    body, thread, count = WRONG[name]
    old, fresh, out = started(machine)
    (fault,) = faults_of(machine, kernel(body), *map(pointer, (old, fresh, out)), block=WORDS, overlap=True)
    assert (fault.kind, fault.thread[0], fault.lanes) == ("read_before_wait", thread, count)
    assert "of 'fresh' + " in fault.message
    assert "which the launch in front may still be writing" in fault.message


@pytest.mark.parametrize("name", WRONG)
def test_without_overlap_nothing_is_early(name: str) -> None:
    machine = Machine()
    assert launched(machine, WRONG[name][0], *started(machine), overlap=False) == []


def test_a_copy_on_the_host_comes_between() -> None:
    machine = Machine()
    old, fresh, out = started(machine)
    machine.write(old, np.zeros(WORDS, np.int32))
    assert launched(machine, WRONG["reads first"][0], old, fresh, out) == []


@pytest.mark.parametrize(
    ("between", "count"),
    [(f"{START} {NEXT} {WAIT} value = old[t];", 1), (f"{START} {WAIT} {NEXT} value = old[t];", 0)],
)
def test_the_launch_before_the_one_in_front(between: str, count: int) -> None:
    """One that lets the next begin before it has waited itself lets it begin before the one in front of both ends."""
    machine = Machine()
    old, fresh, out = started(machine)
    other = upload(machine, np.zeros(WORDS, np.int32), "other")
    launch_on(machine, WRITER, *map(pointer, (old, old, fresh)), block=WORDS)
    launch_on(machine, kernel(between), *map(pointer, (old, old, other)), block=WORDS, overlap=True)
    assert len(launched(machine, WRONG["reads first"][0], old, fresh, out)) == count
