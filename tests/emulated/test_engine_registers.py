"""What threads know of themselves and of their warp, carries, and parts of registers, on the native engine: the
interpreter's bytes and counts."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Kernel, Machine

pytestmark = pytest.mark.usefixtures("_needs_engine")
WORDS = 4096
HEAD = """extern "C" __global__ void kernel(int* out, const int* in, int n) {
  const int t = threadIdx.x, b = blockIdx.x;
"""

BODIES = {
    "carries": """
  unsigned low = in[t] * 0x1234567u, high = t, more = n;
  unsigned long long wide = (unsigned long long)low << 32 | 0xfffffff0u, upper = t, c = 0x9fffffffffffull * in[t];
  for (int k = 0; k < n; k++) if ((t ^ k) & 1) {
    asm volatile("add.cc.u32 %0, %0, %3; addc.cc.u32 %1, %1, %4; addc.u32 %2, %2, 0;"
                 : "+r"(low), "+r"(high), "+r"(more) : "r"(low ^ 0x9fffffffu), "r"(0xfffffff0u + k));
    asm volatile("sub.cc.s32 %0, %0, %3; subc.cc.u32 %1, %1, %4; subc.u32 %2, %2, 0;"
                 : "+r"(low), "+r"(high), "+r"(more) : "r"(low * 5), "r"(k == 4 ? high : 7u));
    asm volatile("mad.lo.cc.u32 %0, %0, %3, %4; madc.hi.cc.s32 %1, %1, %3, %4; madc.lo.u32 %2, %2, %3, %4;"
                 : "+r"(low), "+r"(high), "+r"(more) : "r"(low | 1), "r"(0xfffffff0u + k));
    asm volatile("mad.lo.cc.u64 %0, %0, %2, %3; madc.hi.u64 %1, %1, %2, %3;"
                 : "+l"(wide), "+l"(upper) : "l"(c), "l"(c + k));
    asm volatile("sub.cc.u64 %0, %0, %2; subc.u64 %1, %1, %3;" : "+l"(wide), "+l"(upper) : "l"(c), "l"(upper >> 1));
  }
  out[b * 48 + t] = low ^ high * 3 ^ more * 5 ^ (int)(wide >> 17) ^ (int)upper;""",
    "votes": """
  const int v = in[t] % 5;
  unsigned leader = 0, is_leader = 0, any = 0, all = 0, same = 0, wide = 0;
  const unsigned members = __ballot_sync(__activemask(), t % 3 != 1);
  if (t % 3 != 1) {
    asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p; }"
                 : "=r"(leader), "=r"(is_leader) : "r"(members));
    any = __match_any_sync(members, v);
    int holds; all = __match_all_sync(members, v < 9 ? t / 32 : v, &holds); same = holds;
    wide = __match_any_sync(members, ((long long)v << 33) + (v & 1)) ^ __match_all_sync(members, (long long)v, &holds);
  }
  out[b * 288 + t] = leader | is_leader << 8 | same << 9; out[b * 288 + 48 + t] = any; out[b * 288 + 96 + t] = all;
  out[b * 288 + 144 + t] = wide;""",
    "parts": """
  const unsigned long long q = (unsigned long long)in[t] * 0x9e3779b97f4a7c15ull;
  unsigned short h0, h1, h2, h3, l, h; unsigned long long back; unsigned bytes; unsigned char c0, c3;
  asm volatile("mov.b64 {%0, %1, %2, %3}, %4;" : "=h"(h0), "=h"(h1), "=h"(h2), "=h"(h3) : "l"(q));
  asm volatile("mov.b64 %0, {%1, %2, %3, %4};" : "=l"(back) : "h"(h3), "h"(h0), "h"(h2), "h"(h1));
  asm volatile("{ .reg .b16 a, b, c, d; mov.b32 {a, b, c, d}, %1; mov.b32 %0, {d, b, a, c}; }"
               : "=r"(bytes) : "r"(in[t]));
  asm volatile("{ .reg .b16 a; mov.b16 a, %2; mov.b16 {a, %0}, a; mov.b16 %1, {%0, a}; }" : "=h"(l), "=h"(h) : "h"(h1));
  out[b * 192 + t] = (int)(back >> 32) ^ (int)back; out[b * 192 + 48 + t] = bytes;
  out[b * 192 + 96 + t] = h << 16 | l;""",
    "spaces": """
  __shared__ int own[4]; __shared__ const void* there[4]; int mine = t;
  if (t == 0) { there[0] = own; there[1] = in; there[2] = (const void*)&table; there[3] = (const void*)64ull; }
  __syncthreads();
  int found = 0;
  for (int k = 0; k < 5; k++) {
    const void* p = k < 4 ? there[(t + k) % 4] : (const void*)&mine;
    found = found * 16 + __isGlobal(p) + 2 * __isShared(p) + 4 * __isConstant(p) + 8 * __isLocal(p);
  }
  out[b * 48 + t] = found + mine;""",
    "signed bytes": """
  const char4 c = ((const char4*)in)[t]; short4 s; int x, y;
  asm volatile("{ .reg .b16 p, q; ld.global.v2.s8 {p, q}, [%2]; cvt.s32.s16 %0, p; cvt.s32.s16 %1, q; }"
               : "=r"(x), "=r"(y) : "l"((const char*)in + 4 * t));
  asm volatile("ld.global.v4.s16 {%0, %1, %2, %3}, [%4];"
               : "=h"(s.x), "=h"(s.y), "=h"(s.z), "=h"(s.w) : "l"((const short*)in + 4 * t));
  out[b * 48 + t] = c.x * c.w + x * 3 + y * 5 + s.x * s.w - s.z;""",
    "one for all": """
  int same;
  asm volatile("ldu.global.u32 %0, [%1];" : "=r"(same) : "l"(in + 3 * b + 1));
  out[b * 48 + t] = same;""",
    "processor": 'unsigned id; asm volatile("mov.u32 %0, %%smid;" : "=r"(id)); out[b * 48 + t] = id * 3;',
}


@pytest.fixture
def _needs_engine() -> None:
    engine()


def kernel_of(body: str) -> Kernel:
    kernel = compile_kernel(f"__constant__ int table[4] = {{1, 2, 3, 4}};\n{HEAD}{body}\n}}", "90")
    assert (kernel.not_native_for, kernel.called_for) == ((), ())
    return kernel


def machine_in(mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, list[bytes], int]:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    machine = Machine()
    out = upload(machine, np.zeros(WORDS, np.int32), "out")
    given = upload(machine, (np.arange(256, dtype=np.int64) * 2654435761 % (1 << 32)).astype(np.uint32), "in")
    return machine, [pointer(out), pointer(given), int32(9)], out


@pytest.mark.parametrize("name", BODIES)
def test_registers_have_the_interpreters_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(BODIES[name])
    machine, arguments, out = machine_in("both", monkeypatch)
    assert faults_of(machine, kernel, *arguments, grid=3, block=48) == []
    assert machine.counts.compared == 1
    assert len(np.unique(read_as(machine, out, WORDS, np.int32))) > 2


CLOCKS = """
  const long long begin = clock64();
  int turns = 0;
  while (clock64() - begin < 50 * n) turns++;
  unsigned long long now, later; unsigned low;
  asm volatile("mov.u64 %0, %%globaltimer; mov.u64 %1, %%globaltimer;" : "=l"(now), "=l"(later));
  asm volatile("mov.u32 %0, %%clock;" : "=r"(low));
  out[b * 48 + t] = (now < later) + 2 * (turns > 0) + 4 * (low > (unsigned)begin);
"""


def test_a_clock_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two emulators have clocks of their own, so that such a launch is not compared."""
    kernel = kernel_of(CLOCKS)
    for mode, counted in (("native", (1, 0)), ("interpreter", (0, 1)), ("both", (0, 1))):
        machine, arguments, out = machine_in(mode, monkeypatch)
        launch_on(machine, kernel, *arguments, grid=2, block=48)
        assert (machine.counts.native, machine.counts.interpreted) == counted
        assert (read_as(machine, out, 96, np.int32) == 7).all()
