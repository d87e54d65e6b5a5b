"""wgmma on tiles of every swizzle against an NVIDIA H200 (30 Nov 2026): data/hw/wgmma_swizzles.npz.

For K-major (00) and MN-major (11) operands: ``image`` is the shared memory, A from 0 and B from 16384 on; each row of
``descriptors`` is of one m64n16k16 without accumulation, ``out`` its registers [register, thread].
"""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import pointer
from nvrtc_helper import DATA

from g4kv_cli.device.emulated import Machine, Module

REGISTERS = ", ".join(f"%f{number}" for number in range(8))
STORES = "\n".join(f"st.global.f32 [%rd9+{512 * number}], %f{number};" for number in range(8))
KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 image, .param .u64 descriptors, .param .u64 out)
{{
.reg .b64 %rd<12>; .reg .b32 %r<12>; .reg .f32 %f<8>; .reg .pred %p<3>;
.shared .align 1024 .b8 tiles[32768];
ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [descriptors]; ld.param.u64 %rd3, [out];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, tiles; mov.u32 %r4, %r1;
AGAIN: mul.wide.u32 %rd4, %r4, 16; add.s64 %rd5, %rd1, %rd4; shl.b32 %r5, %r4, 4; add.s32 %r5, %r5, %r3;
ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd5]; st.shared.v4.u32 [%r5], {{%r6, %r7, %r8, %r9}};
add.s32 %r4, %r4, 128; setp.lt.u32 %p1, %r4, 2048; @%p1 bra AGAIN;
mul.wide.u32 %rd6, %r2, 16; add.s64 %rd6, %rd2, %rd6; ld.global.u64 %rd7, [%rd6]; ld.global.u64 %rd8, [%rd6+8];
fence.proxy.async; bar.sync 0; wgmma.fence.sync.aligned; setp.ne.u32 %p2, %r1, %r1;
wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{registers}}}, %rd7, %rd8, %p2, 1, 1, {major}, {major};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd9, %r2, 4096; add.s64 %rd9, %rd3, %rd9; mul.wide.u32 %rd10, %r1, 4; add.s64 %rd9, %rd9, %rd10;
{stores}
ret;
}}
"""


@pytest.mark.parametrize("major", [0, 1])
def test_tiles_of_every_swizzle_give_the_recorded_bits(major: int) -> None:
    with np.load(DATA / "wgmma_swizzles.npz") as stored:
        image, descriptors, out = (stored[f"{name}.{major}{major}"] for name in ("image", "descriptors", "out"))
    assert {int(descriptor) >> 62 for descriptor in descriptors[:, 0]} == {0, 1, 2, 3}
    machine = Machine()
    addresses = []
    for name, values in (("image", image), ("descriptors", descriptors), ("out", np.zeros_like(out))):
        addresses.append(machine.allocate(values.nbytes, name))
        machine.write(addresses[-1], values)
    kernel = Module(KERNEL.format(registers=REGISTERS, stores=STORES, major=major)).kernel("kernel")
    machine.launch(kernel, (len(descriptors), 1, 1), (128, 1, 1), [pointer(address) for address in addresses])
    got = machine.read(addresses[2], out.nbytes).view(np.uint32).reshape(out.shape)
    np.testing.assert_array_equal(got, out)
