"""wgmma as an asynchronous instruction: placeholders, groups and chains, and each rule broken and kept."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hopper_helper import ARCH, bf16_bits, floats, hopper_kernel, wgmma_call
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import DATA, compile_kernel, line_of

from g4kv_cli.device.emulated import EmulatorError, Fault, Kernel, Machine, Module, UnsupportedOpcode

# One warpgroup, N = 8; A is 64 x 16 and B is 8 x 16 (both K-major), filled by all threads.
SOURCE = """
extern "C" __global__ void kernel(const u16* a, const u16* b, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *ta = memory, *tb = memory + 8192;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  for (int i = threadIdx.x; i < 1024; i += 128) put(ta, i / 16 / 8 * 1024 + i / 16 % 8 * 128 + i % 16 * 2, a[i]);
  for (int i = threadIdx.x; i < 128; i += 128) put(tb, i / 16 * 128 + i % 16 * 2, b[i]);
  /*FENCE*/ proxy_fence();
  /*BARRIER*/ __syncthreads();
  float d[4] = {1, 1, 1, 1};
  u64 da = descriptor(at(ta), 16, 1024), db = descriptor(at(tb), 16, 1024);
  /*BODY*/
  for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}
"""
CALL = wgmma_call(8)
PLAIN = f"wgmma_fence(); {CALL} wgmma_commit(); wgmma_wait();"


def inputs() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Small integers in bf16: every sum is exact, so any order of summation gives the same."""
    rng = np.random.default_rng(11)
    a, b = (bf16_bits(rng.integers(-8, 9, (rows, 16)).astype(np.float32)) for rows in (64, 8))
    return a, b


def run(body: str = PLAIN, source: str = SOURCE, block: int = 128) -> tuple[list[Fault], npt.NDArray[np.float32]]:
    machine = Machine()
    a, b = inputs()
    addresses = [upload(machine, a, "a"), upload(machine, b, "b"), machine.allocate(64 * 8 * 4, "out")]
    kernel = hopper_kernel(source.replace("/*BODY*/", body))
    faults = faults_of(machine, kernel, *map(pointer, addresses), block=block, dynamic_shared_bytes=9216)
    return faults, read_as(machine, addresses[2], 512, np.float32).reshape(64, 8)


def product() -> npt.NDArray[np.float64]:
    a, b = inputs()
    return floats(a) @ floats(b).T


def test_one_product() -> None:
    faults, got = run()
    assert faults == []
    np.testing.assert_array_equal(got, product() + 1)


@pytest.mark.parametrize(
    ("flags", "scale", "offset"),
    [("1, 1, 1, 0, 0", 1, 1), ("0, 1, 1, 0, 0", 1, 0), ("1, -1, 1, 0, 0", -1, 1), ("1, -1, -1, 0, 0", 1, 1)],
)
def test_scales(flags: str, scale: int, offset: int) -> None:
    faults, got = run(f"wgmma_fence(); {wgmma_call(8, flags=flags)} wgmma_commit(); wgmma_wait();")
    assert faults == []
    np.testing.assert_array_equal(got, scale * product() + offset)


def test_chain_of_products_in_one_group() -> None:
    faults, got = run(f"wgmma_fence(); {CALL} {CALL} {CALL} wgmma_commit(); wgmma_wait();")
    assert faults == []
    np.testing.assert_array_equal(got, 3 * product() + 1)


@pytest.mark.parametrize(
    "waiting", ["", "wgmma_commit();", 'asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");']
)
def test_accumulators_read_before_their_wait_are_nan_and_reported(waiting: str) -> None:
    commit = "" if waiting == "wgmma_commit();" else "wgmma_commit();"
    faults, got = run(f"wgmma_fence(); {CALL} {commit} {waiting}")
    assert {fault.kind for fault in faults} == {"unfinished_product"}
    assert np.isnan(got).all()


GUARDED = """asm volatile("{{.reg .pred p; .reg .f32 f; setp.ne.s32 p, %2, 0; mov.f32 f, 0f40000000;\\n"
  "@p add.f32 f, %1, f; mov.b32 %0, f;}}" : "=f"(d[1]) : "f"(d[0]), "r"((int)({guard})) : "memory");"""


@pytest.mark.parametrize(("guard", "lanes"), [("lane < 3", 12), ("row > 1000", 0)])
def test_an_accumulator_read_under_a_guard_before_its_wait(guard: str, lanes: int) -> None:
    look = GUARDED.format(guard=guard)
    faults, _ = run(f"wgmma_fence(); {CALL} wgmma_commit(); float e = d[1]; {look} wgmma_wait(); d[1] = e;")
    assert [(fault.kind, fault.lanes) for fault in faults] == [("unfinished_product", lanes)] * (lanes > 0)


def test_uncommitted_products_are_not_waited_for() -> None:
    faults, got = run(f"wgmma_fence(); {CALL} wgmma_wait();")
    assert {fault.kind for fault in faults} == {"unfinished_product"}
    assert np.isnan(got).all()


TWO = """
  float first[4], second[4];
  for (int i = 0; i < 4; ++i) { first[i] = 1; second[i] = 2; }
  wgmma_fence();
  FIRST wgmma_commit();
  SECOND wgmma_commit();
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  for (int i = 0; i < 4; ++i) d[i] = CHOSEN[i];
  REST
"""


@pytest.mark.parametrize("chosen", ["first", "second"])
def test_a_wait_that_leaves_one_group_open(chosen: str) -> None:
    # asm statements keep their order, so what is stored before the last wait is read before it.
    calls = {name: CALL.replace("d[", f"{name}[") for name in ("first", "second")}
    body = TWO.replace("FIRST", calls["first"]).replace("SECOND", calls["second"]).replace("CHOSEN", chosen)
    store = "for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];"
    faults, got = run(body.replace("REST", f"{store} return;"))
    assert {fault.kind for fault in faults} == (set() if chosen == "first" else {"unfinished_product"})
    if chosen == "first":
        np.testing.assert_array_equal(got, product() + 1)
    else:
        assert np.isnan(got).all()


def test_results_survive_lanes_that_go_apart_before_the_wait() -> None:
    apart = "if (threadIdx.x % 3 == 0) ((volatile u32*)memory)[2200] = threadIdx.x / 32;"
    faults, got = run(f"wgmma_fence(); {CALL} wgmma_commit(); {apart} wgmma_wait();")
    assert [fault.kind for fault in faults] == ["shared_race"]  # of the seeded word, between the warps
    np.testing.assert_array_equal(got, product() + 1)


def test_results_survive_warps_that_wait_for_an_mbarrier() -> None:
    source = SOURCE.replace("  /*FENCE*/", "  __shared__ u64 bar; if (threadIdx.x == 0) init(&bar, 1);\n  /*FENCE*/")
    pause = "if (threadIdx.x < 32) wait(&bar, 0); if (threadIdx.x == 64) arrive(&bar);"
    faults, got = run(f"wgmma_fence(); {CALL} wgmma_commit(); {pause} wgmma_wait();", source)
    assert faults == []
    np.testing.assert_array_equal(got, product() + 1)


MOVED = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry k(.param .u64 out)
{{
  .reg .f32 %f<12>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
  mov.u32 %r1, %tid.x;
  mad.lo.u32 %r2, %r1, 72, memory;
  mov.u64 %rd1, 0;
  {fill}
  fence.proxy.async;
  bar.sync 0;
  mov.u64 %rd2, 0x4000004000000000;
  mov.u64 %rd3, 0x4000004000000200;
  mov.f32 %f1, 0f3FC00000;
  mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, %rd2, %rd3, 1, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  mov.f32 %f5, %f3;
  mov.b32 %r3, %f5;
  {early}
  wgmma.wait_group.sync.aligned 0;
  ld.param.u64 %rd4, [out];
  mul.wide.u32 %rd5, %r1, 4;
  add.u64 %rd4, %rd4, %rd5;
  st.global.b32 [%rd4], %r3;
  ret;
}}
"""


@pytest.mark.parametrize(("early", "is_real"), [("", True), ("add.f32 %f6, %f5, %f5; mov.b32 %r3, %f6;", False)])
def test_results_reach_the_registers_they_were_moved_to(early: str, is_real: bool) -> None:
    fill = " ".join(f"st.shared.u64 [%r2 + {offset}], %rd1;" for offset in range(0, 72, 8))
    machine = Machine()
    out = machine.allocate(512, "out")
    kernel = Module(MOVED.format(fill=fill, early=early)).kernel("k")
    faults = faults_of(machine, kernel, pointer(out), block=128, dynamic_shared_bytes=9216)
    assert {fault.kind for fault in faults} == (set() if is_real else {"unfinished_product"})
    got = read_as(machine, out, 128, np.float32)
    # A and B are zero, so D is C = 1.5; arithmetic before the wait gives NaN for good.
    assert (got == 1.5).all() if is_real else np.isnan(got).all()


# Rules of shared operands.


def test_operands_written_without_a_proxy_fence() -> None:
    source = SOURCE.replace("/*FENCE*/ proxy_fence();", "")
    faults, _ = run(source=source)
    assert {fault.kind for fault in faults} == {"shared_race"}
    assert "wgmma of warpgroup 0 and warp 0 (st.shared.u16" in faults[0].message
    assert "without a fence.proxy.async" in faults[0].message


def test_operands_written_without_a_barrier() -> None:
    faults, _ = run(source=SOURCE.replace("/*BARRIER*/ __syncthreads();", ""))
    assert any("without a barrier between them" in fault.message for fault in faults)


@pytest.mark.parametrize("is_late", [True, False])
def test_operands_overwritten_before_the_wait(is_late: bool) -> None:
    write = "__syncthreads(); put(ta, threadIdx.x * 2, 0);"
    body = f"wgmma_fence(); {CALL} wgmma_commit(); {'' if is_late else write} wgmma_wait(); {write if is_late else ''}"
    faults, got = run(body)
    np.testing.assert_array_equal(got, product() + 1)
    if is_late:
        assert faults == []
    else:
        assert {fault.kind for fault in faults} == {"shared_race"}
        assert "write-after-read race: warp 0 and wgmma of warpgroup 0" in faults[0].message
        assert "whose group was not waited for" in faults[0].message


def test_descriptor_outside_of_shared_memory() -> None:
    (fault,) = run(PLAIN.replace("wgmma_fence();", "da += 8192 >> 4; wgmma_fence();", 1))[0]
    assert (fault.kind, fault.is_fatal) == ("shared_out_of_bounds", True)
    assert "wgmma.mma_async" in str(fault.opcode)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("da |= 1ull << 49;", "base offset"),
        ("da += 128 >> 4;", "1024-byte swizzle pattern"),
        ("da += 1ull << 32;", "strides"),
    ],
)
def test_descriptors_that_were_not_recorded_are_refused(change: str, reason: str) -> None:
    with pytest.raises(UnsupportedOpcode, match=reason):
        run(PLAIN.replace("wgmma_fence();", f"{change} wgmma_fence();", 1))


def test_part_of_a_warp() -> None:
    source = SOURCE.replace("  /*FENCE*/", "  if (threadIdx.x == 37) return;\n  /*FENCE*/").replace("__syncthreads", "")
    source = source.replace("/*BARRIER*/ ();", "")
    faults, _ = run(source=source)
    assert faults[-1].kind == "illegal_instruction"
    assert "only the lanes" in faults[-1].message


def test_warp_that_leaves_its_warpgroup_alone() -> None:
    faults, _ = run(f"if (threadIdx.x >= 96) return; {PLAIN}")
    assert [fault.kind for fault in faults] == ["divergent_barrier"]
    assert "warpgroup 0 executed 1, 1, 1, 0 wgmma" in faults[0].message


# Faults seeded in the recorded kernel.

GEMM = (DATA / "kd.cu").read_text()
ARRIVE = 'if(threadIdx.x==128) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"::"r"(sptr(&empty[s])));'
COMMIT = (
    'asm volatile("wgmma.commit_group.sync.aligned;"); asm volatile("wgmma.wait_group.sync.aligned 0;":::"memory");'
)


def gemm_faults(source: str, depth: int = 320) -> list[Fault]:
    machine = Machine()
    a = bf16_bits(np.ones((64, depth)))
    maps = [machine.tensor_map(upload(machine, a, name), (depth, 64), (64, 64)).pack() for name in "AB"]
    c = machine.allocate(64 * 64 * 4, "C")
    kernel = compile_kernel(source, ARCH, "wg")
    return faults_of(machine, kernel, *maps, pointer(c), int32(depth), block=256, dynamic_shared_bytes=32768)


def replaced(old: str, new: str) -> str:
    assert GEMM.count(old) == 1
    return GEMM.replace(old, new)


def test_recorded_kernel_is_clean() -> None:
    assert gemm_faults(GEMM) == []


@pytest.mark.parametrize("nbytes", ["16400", "16376"])
def test_recorded_kernel_with_wrong_expected_bytes(nbytes: str) -> None:
    faults = gemm_faults(replaced('"r"(16384)', f'"r"({nbytes})'))
    assert "deadlock" in [fault.kind for fault in faults] or "shared_race" in [fault.kind for fault in faults]
    if nbytes == "16400":
        (fault,) = faults
        assert (fault.kind, fault.block, fault.thread) == ("deadlock", (0, 0, 0), (128, 0, 0))
        assert fault.source_line == line_of(GEMM, "W2: mbarrier")


def test_recorded_kernel_without_its_empty_arrival() -> None:
    (fault,) = gemm_faults(replaced(ARRIVE, ""))
    assert fault.kind == "deadlock"
    assert fault.source_line in (line_of(GEMM, "W: mbarrier"), line_of(GEMM, "W2: mbarrier"))
    assert fault.thread in ((0, 0, 0), (128, 0, 0))


def test_recorded_kernel_that_releases_a_stage_before_its_products_are_done() -> None:
    faults = gemm_faults(
        replaced(COMMIT, COMMIT.split("; ")[0] + "; " + ARRIVE + COMMIT.split(";", 2)[2]).replace(
            "      " + ARRIVE, "", 1
        )
    )
    assert faults
    assert {fault.kind for fault in faults} == {"shared_race"}
    assert "write-after-read race: a bulk copy and wgmma of warpgroup 1" in faults[0].message


def test_recorded_kernel_whose_accumulators_nobody_waited_for() -> None:
    source = replaced('asm volatile("wgmma.wait_group.sync.aligned 0;":::"memory");', "")
    machine = Machine()
    a = bf16_bits(np.ones((64, 64)))
    maps = [machine.tensor_map(upload(machine, a, name), (64, 64), (64, 64)).pack() for name in "AB"]
    c = machine.allocate(64 * 64 * 4, "C")
    kernel = compile_kernel(source, ARCH, "wg")
    faults = faults_of(machine, kernel, *maps, pointer(c), int32(64), block=256, dynamic_shared_bytes=32768)
    assert {fault.kind for fault in faults} == {"unfinished_product"}
    assert np.isnan(read_as(machine, c, 4096, np.float32)).all()


# What is refused.


def module_with(statement: str) -> Kernel:
    text = f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a)
{{
  .reg .pred %p<4>; .reg .b16 %h<4>; .reg .f32 %f<40>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
  {statement}
  ret;
}}
"""
    return Module(text).kernel("k")


D4 = "{%f1, %f2, %f3, %f4}"


@pytest.mark.parametrize(
    "statement",
    [
        "@%p2 mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;",
        "mbarrier.pending_count.b64 %r1, %rd1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r2, %r3}], [%r4];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.im2col.bulk_group [%rd1, {%r2, %r3}], [%r1];",
        f"wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {D4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
        f"wgmma.mma_async.sync.aligned.m64n8k32.s32.e4m3.e4m3 {D4}, %rd1, %rd2, 1, 1, 1;",
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D4}, %rd1, %rd2, 1, 2, 1, 0, 0;",
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D4}, %rd1, %rd2, 1, 1, 1;",
        f"@%p1 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "setmaxnreg.inc.sync.aligned.u32 100;",
        "fence.proxy.tensormap::generic.release.warp;",
        "barrier.cluster.arrive.acquire.aligned;",
        "mapa.shared::cluster.u64 %rd1, %rd2, %r3;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b64 [%r1], {%rd1, %rd1, %rd1, %rd1}, [%r2];",
        "mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [%r1], 16;",
        "mbarrier.arrive.shared::cta.b64 %r1, [%r1];",
        "mbarrier.try_wait.parity.sc.cta.shared::cta.b64 %p1, [%r1], %r2;",
        "cp.async.mbarrier.arrive.noinc.shared::cluster.b64 [%r1];",
    ],
)
def test_what_is_not_known_completely_is_refused(statement: str) -> None:
    with pytest.raises(UnsupportedOpcode) as caught:
        module_with(statement)
    opcode = re.sub(r"^@%p\d ", "", statement).split(" ")[0].rstrip(";")
    assert caught.value.opcode.endswith(opcode)
    assert caught.value.ptx_line == 7


@pytest.mark.parametrize(
    "statement",
    [
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], %r2, %r3;",
        "mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [%r1], 2;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 128;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%r1 + 128], [%rd1, {%r2, 0}], [%r4], %rd3;",
        "setmaxnreg.dec.sync.aligned.u32 24;",
        "prefetch.tensormap [%rd1];",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%rd1, {%r2, %r3}], [%r4], %h1;",
        "barrier.cluster.arrive.aligned;",
        "mbarrier.arrive.shared::cluster.b64 _, [%r1];",
        "mapa.shared::cluster.u32 %r1, %r2, %r3;",
        "barrier.cluster.wait;",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r1], {%f1, %f2}, [%r2];",
    ],
)
def test_what_is_known(statement: str) -> None:
    assert module_with(statement).name == "k"


# The tensor map.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"box": (72, 8)}, "longer than the 128-byte swizzle"),
        ({"box": (4, 8)}, "no multiple of 16"),
        ({"box": (64, 300)}, "1 to 256"),
        ({"box": (64,)}, "2 box sizes"),
        ({"swizzle_bytes": 16}, "swizzle of 16 bytes"),
        ({"extents": (100, 8)}, "strides"),
        ({"element_bytes": 3}, "elements of 3 bytes"),
        ({"extents": (64, 0)}, "extents"),
        ({"extents": (64, 2, 2, 2, 2, 2), "box": (64, 1, 1, 1, 1, 1)}, "6 dimensions"),
    ],
)
def test_tensor_maps_that_the_driver_would_refuse(changes: dict[str, Any], reason: str) -> None:
    machine = Machine()
    address = machine.allocate(65536, "tensor")
    good: dict[str, Any] = {"extents": (64, 32), "box": (64, 8), "element_bytes": 2, "swizzle_bytes": 128}
    assert len(machine.tensor_map(address, **good).pack()) == 128
    with pytest.raises(EmulatorError, match=reason):
        machine.tensor_map(address, **{**good, **changes})
    with pytest.raises(EmulatorError, match="multiple of 16"):
        machine.tensor_map(address + 8, **good)
    with pytest.raises(EmulatorError, match="leaves every allocation"):
        machine.tensor_map(address + 65536, **good)


def test_wrong_size_of_a_tensor_map_parameter() -> None:
    kernel = hopper_kernel('extern "C" __global__ void kernel(const __grid_constant__ TensorMap map) {}')
    assert kernel.parameters[0].nbytes == 128
    with pytest.raises(EmulatorError, match="64 bytes"):
        launch_on(Machine(), kernel, bytes(64))


def test_an_mma_that_reads_an_accumulator_before_the_wait_gets_nan_too() -> None:
    read = (
        'asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %6}, '
        '{%7, %7}, {%0, %1, %2, %3};" : "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3]) : "r"(__float_as_uint(d[0])), '
        '"r"(__float_as_uint(d[1])), "r"(0u), "r"(0x3f803f80u) : "memory");'
    )
    taken = "for (int i = 0; i < 4; ++i) d[i] = e[i];"
    faults, got = run(f"float e[4] = {{}}; wgmma_fence(); {CALL} wgmma_commit(); {read} wgmma_wait(); {taken}")
    assert {fault.kind for fault in faults} == {"unfinished_product"}
    assert np.isnan(got).all()
    faults, got = run(f"float e[4] = {{}}; wgmma_fence(); {CALL} wgmma_commit(); wgmma_wait(); {read} {taken}")
    assert faults == []
    assert np.isfinite(got).all()
