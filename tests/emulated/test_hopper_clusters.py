"""Thread block clusters: their registers and barrier, stores and arrivals in another block, copies to several."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hopper_helper import hopper_kernel
from launch_helper import faults_of, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import EmulatorError, Fault, LaunchConfigurationError, Machine

WRAPPERS = """
__device__ __forceinline__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 ranks() { u32 r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 of_rank(const void* p, u32 r) {
  u32 m; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(m) : "r"(at(p)), "r"(r)); return m; }
__device__ __forceinline__ void push(u32 to, u32 value, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
      :: "r"(to), "r"(value), "r"(bar) : "memory"); }
__device__ __forceinline__ void arrive_there(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void expect_there(u32 bar, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;"
      :: "r"(bar), "r"(n) : "memory"); }
__device__ __forceinline__ void announce_there(u32 bar, u32 n) {
  asm volatile("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" :: "r"(bar), "r"(n) : "memory"); }
__device__ __forceinline__ void load_all(void* dst, const TensorMap* map, u64* b, u16 ranks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" :: "r"(at(dst)), "l"(map), "r"(0), "r"(4), "r"(at(b)), "h"(ranks) : "memory"); }
"""
SOURCE = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, u32* out) {
  __shared__ __align__(1024) u32 tile[256];
  __shared__ u64 bar;
  __shared__ u32 got[64];
  if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
  __syncthreads();
  BODY
}
"""
EXCHANGE = """
  relaxed();
  if (threadIdx.x == 0) expect(&bar, 4 * ranks());
  meet();
  const u32 r = threadIdx.x;
  if (r < ranks()) push(of_rank(&got[rank()], r), 100 * rank() + r, of_rank(&bar, r));
  wait(&bar, 0);
  if (r < ranks()) out[blockIdx.x * ranks() + r] = got[r];
"""
"""Every block stores a word into every block of its cluster."""


def run(body: str, source: str = SOURCE, **options: Any) -> tuple[list[Fault], npt.NDArray[np.uint32]]:
    """Faults of 8 blocks of 64 threads in clusters of 4, and the first words of the output."""
    machine = Machine()
    tensor = upload(machine, np.arange(2048).astype(np.uint32), "tensor")
    out = upload(machine, np.zeros(512, np.uint32), "out")
    box = machine.tensor_map(tensor, (32, 64), (32, 8), 4, None, 0)
    kernel = hopper_kernel(WRAPPERS + source.replace("BODY", body))
    settings = {"grid": 8, "block": 64, "cluster": (4, 1, 1)} | options
    faults = faults_of(machine, kernel, box.pack(), pointer(out), **settings)
    return faults, read_as(machine, out, 512, np.uint32)


@pytest.mark.parametrize("options", [{}, {"reverse_blocks": True}, {"chunk_threads": 64}], ids=str)
def test_blocks_store_into_each_other(options: dict[str, Any]) -> None:
    faults, out = run(EXCHANGE, **options)
    assert faults == []
    want = [[100 * sender + receiver for sender in range(4)] for _ in range(2) for receiver in range(4)]
    assert out[:32].reshape(8, 4).tolist() == want


@pytest.mark.parametrize(
    ("right", "wrong", "kind", "words"),
    [
        ("init_fence();", "", "mbarrier_misuse", "no fence.mbarrier_init and barrier of the cluster show the mbarrier"),
        ("  meet();\n", "", "mbarrier_misuse", "no fence.mbarrier_init and barrier of the cluster show the mbarrier"),
        ("  wait(&bar, 0);\n", "", "shared_race", "whose mbarrier phase was not waited for"),
        ("4 * ranks()", "4 * ranks() + 4", "deadlock", "4 transaction bytes are missing"),
        ("4 * ranks()", "4 * ranks() - 4", "deadlock", "4 transaction bytes more than expected"),
        ("of_rank(&bar, r));", "at(&bar));", "illegal_instruction", "is in another block than the bytes"),
        ("of_rank(&got[rank()], r)", "of_rank(&got[rank()], r + 1)", "illegal_instruction", "rank 4 of a cluster of 4"),
        ("  relaxed();\n", "  relaxed(); relaxed();\n", "divergent_barrier", "arrives again without having waited"),
        ("  relaxed();\n", "", "divergent_barrier", "waits without having arrived"),
        (
            "  wait(&bar, 0);\n",
            "  if (rank() == 0) return;\n  wait(&bar, 0);\n",
            "unfinished_copy",
            "the block ended before",
        ),
        (
            "  relaxed();\n",
            '  if (rank() == 1 && r0 >= 32) asm volatile("bar.sync 1, 64;" ::: "memory");\n  relaxed();\n',
            "deadlock",
            "the cluster's barrier waits for threads that cannot run (32 of rank 1)",
        ),
    ],
    ids=lambda value: "".join(filter(str.isalnum, str(value)))[:24],
)  # fmt: skip
def test_each_rule_of_a_cluster(right: str, wrong: str, kind: str, words: str) -> None:
    source = "  const u32 r0 = threadIdx.x;" + EXCHANGE
    whole = SOURCE.replace("BODY", source)
    assert whole.count(right) == 1
    faults, _ = run("", whole.replace(right, wrong))
    found = [fault for fault in faults if fault.kind == kind]
    assert found, faults
    assert words in found[0].message


@pytest.mark.parametrize(("arrival", "is_ordered"), [("release();", True), ("relaxed();", False)])
def test_what_was_stored_before_a_relaxed_arrival_is_not_ordered(arrival: str, is_ordered: bool) -> None:
    faults, _ = run("got[threadIdx.x] = 7;" + EXCHANGE.replace("relaxed();", arrival))
    assert [fault.kind for fault in faults] == [] if is_ordered else ["shared_race"]
    if not is_ordered:
        assert "write-after-write" in faults[0].message
        assert "of rank " in faults[0].message


def test_an_arrival_at_another_block_is_waited_for_there() -> None:
    body = """
  release();
  meet();
  if (rank() == 3 && threadIdx.x == 0) arrive_there(of_rank(&bar, 1));
  if (rank() == 1) wait(&bar, 0);
  out[blockIdx.x] = rank();
"""
    faults, out = run(body)
    assert faults == []
    assert out[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    faults, _ = run(body.replace("of_rank(&bar, 1)", "of_rank(&bar, 2)"))
    ended, deadlock = faults
    assert (ended.kind, deadlock.kind) == ("ended_block_access", "deadlock")
    assert "of the block of rank 2, which may have ended by then" in ended.message
    assert "1 of 1 arrivals and 0 transaction bytes are missing" in deadlock.message
    assert deadlock.block[0] in (1, 5)


def test_one_block_announces_what_all_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
  release();
  meet();
  const u32 r = threadIdx.x;
  if (rank() == 0 && r < ranks()) { announce_there(of_rank(&bar, r), 4); expect_there(of_rank(&bar, r), 12); }
  if (r < ranks()) push(of_rank(&got[rank()], r), 100 * rank() + r, of_rank(&bar, r));
  wait(&bar, 0);
  if (r < ranks()) out[blockIdx.x * ranks() + r] = got[r];
"""
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    faults, out = run(body)
    assert faults == []
    want = [[100 * sender + receiver for sender in range(4)] for _ in range(2) for receiver in range(4)]
    assert out[:32].reshape(8, 4).tolist() == want
    faults, _ = run(body.replace("12)", "16)"))
    assert [fault.kind for fault in faults] == ["deadlock"]
    assert "0 of 1 arrivals and 4 transaction bytes are missing" in faults[0].message


def test_a_copy_to_several_blocks_counts_in_each() -> None:
    body = """
  relaxed();
  if (threadIdx.x == 0 && rank() != 2) expect(&bar, 1024);
  meet();
  if (rank() == 1 && threadIdx.x == 0) load_all(tile, &map, &bar, 0b1011);
  if (rank() != 2) { wait(&bar, 0); out[blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x]; }
  release();
  meet();
"""
    faults, out = run(body)
    assert faults == []
    rows = out.reshape(8, 64)
    for block in range(8):
        want = np.arange(128, 192) if block % 4 != 2 else np.zeros(64)
        assert rows[block].tolist() == want.tolist()
    faults, _ = run(body.replace("0b1011", "0b0011"))
    assert [fault.kind for fault in faults] == ["deadlock"]
    faults, _ = run(body.replace("0b1011", "0b11011"))
    assert "rank 4 of a cluster of 4 blocks" in faults[0].message


def test_registers_of_a_cluster_with_two_axes() -> None:
    names = ("cluster_ctarank", "cluster_nctarank", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_nctaid.x",
             "cluster_nctaid.y", "clusterid.x", "clusterid.y", "nclusterid.x", "nclusterid.y")  # fmt: skip
    reads = "\n".join(
        f'  asm volatile("mov.u32 %0, %%{name};" : "=r"(v)); to[{at}] = v;' for at, name in enumerate(names)
    )
    kernel = compile_kernel(
        'extern "C" __global__ void kernel(unsigned* out) {\n'
        f"  unsigned v, *to = out + (blockIdx.y * gridDim.x + blockIdx.x) * {len(names)};\n{reads}\n}}\n",
        "90a",
    )
    machine = Machine()
    out = upload(machine, np.zeros(6 * 4 * len(names), np.uint32), "out")
    machine.launch(kernel, (6, 4, 1), (1, 1, 1), [pointer(out)], cluster=(3, 2, 1))
    got = read_as(machine, out, 6 * 4 * len(names), np.uint32).reshape(4, 6, len(names))
    for y in range(4):
        for x in range(6):
            want = [x % 3 + 3 * (y % 2), 6, x % 3, y % 2, 3, 2, x // 3, y // 2, 2, 2]
            assert got[y, x].tolist() == want


def test_a_kernel_may_say_its_clusters_itself() -> None:
    source = 'extern "C" __global__ void __cluster_dims__(3, 2, 1) kernel(unsigned* out) {\n'
    source += '  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(out[blockIdx.y * gridDim.x + blockIdx.x]));\n}\n'
    machine, kernel = Machine(), compile_kernel(source, "90a")
    for given in ((1, 1, 1), (3, 2, 1)):
        out = upload(machine, np.zeros(6 * 4, np.uint32), "out")
        machine.launch(kernel, (6, 4, 1), (1, 1, 1), [pointer(out)], cluster=given)
        got = read_as(machine, out, 6 * 4, np.uint32).reshape(4, 6)
        assert got.tolist() == [[x % 3 + 3 * (y % 2) for x in range(6)] for y in range(4)]
    with pytest.raises(
        LaunchConfigurationError, match=r"clusters of \(2, 1, 1\) blocks, the kernel was compiled for \(3"
    ):
        machine.launch(kernel, (6, 4, 1), (1, 1, 1), [pointer(out)], cluster=(2, 1, 1))
    with pytest.raises(LaunchConfigurationError, match="do not fill the grid"):
        machine.launch(kernel, (6, 3, 1), (1, 1, 1), [pointer(out)])


def test_a_grid_may_count_clusters() -> None:
    source = 'extern "C" __global__ void __block_size__((32, 1, 1), (2, 3, 1)) kernel(unsigned* out) {\n'
    source += "  out[(blockIdx.y * gridDim.x + blockIdx.x) * 32 + threadIdx.x] = gridDim.y * 100 + blockIdx.y;\n}\n"
    machine = Machine()
    out = machine.allocate(4 * 32 * 24, "out")
    report = machine.launch(compile_kernel(source), (2, 2, 1), (32, 1, 1), [pointer(out)])
    assert report.blocks == 24
    np.testing.assert_array_equal(read_as(machine, out, 768, np.uint32), 600 + np.repeat(np.arange(6), 128))


def test_what_a_launch_of_clusters_must_be() -> None:
    kernel = compile_kernel('extern "C" __global__ void kernel() {}\n', "90a")
    older = compile_kernel('extern "C" __global__ void kernel() {}\n', "80")
    for one, grid, cluster, words in (
        (kernel, 6, 4, "do not fill the grid"),
        (kernel, 32, 32, "32 blocks in a cluster, at most 16 are allowed"),
        (older, 4, 2, "sm_80 has no thread block clusters"),
    ):
        with pytest.raises(LaunchConfigurationError, match=words):
            Machine().launch(one, (grid, 1, 1), (32, 1, 1), [], cluster=(cluster, 1, 1))
    with pytest.raises(EmulatorError, match="only some blocks of a cluster are to run"):
        Machine().launch(kernel, (4, 1, 1), (32, 1, 1), [], cluster=(2, 1, 1), chosen=range(3))


AGAIN = """
  __shared__ u64 next;
  if (threadIdx.x == 0) init(&next, 1);
  relaxed();
  if (threadIdx.x == 0) expect(&bar, 4 * ranks());
  meet();
  const u32 r = threadIdx.x;
  if (r < ranks()) push(of_rank(&tile[rank()], r), 100 * rank() + r, of_rank(&bar, r));
  wait(&bar, 0);
  const u32 found = tile[threadIdx.x & 3];
  FENCE
  __syncthreads();
  if (threadIdx.x == 0) { USE }
  if (r < ranks()) out[64 + blockIdx.x * ranks() + r] = found;
"""
COPY_AGAIN = "expect(&next, 1024); load2(tile, &map, 0, 8, &next); wait(&next, 0); out[blockIdx.x] = tile[5];"
USES = {
    "a bulk copy to them": (COPY_AGAIN, "write-after-write race"),
    "a bulk store of them": ("store2(&map, 0, 8 * blockIdx.x, tile); commit(); wait_store();", "read-after-write race"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("emulator", ["native", "interpreter"])
def test_words_of_other_blocks_have_to_be_shown_to_the_asynchronous_proxy(
    use: str, emulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier orders what st.async brought before the copy; only a fence makes that hold between the proxies."""
    monkeypatch.setenv("G4KV_EMULATOR", emulator)
    body, words = USES[use]
    fill = "for (int k = threadIdx.x + 4; k < 256; k += 64) tile[k] = k; proxy_fence(); __syncthreads();"
    faults, _ = run(fill + AGAIN.replace("USE", body).replace("FENCE", "proxy_fence();"))
    assert faults == []
    faults, _ = run(fill + AGAIN.replace("USE", body).replace("FENCE", ""))
    assert {fault.kind for fault in faults} == {"shared_race"}
    assert words in faults[0].message
    assert "without a fence.proxy.async between them" in faults[0].message


BETWEEN = """
  __shared__ __align__(16) u32 row[64];
  relaxed();
  if (threadIdx.x == 0) expect(&bar, BYTES);
  meet();
  row[threadIdx.x] = 1000 * rank() + threadIdx.x;
  FENCE
  __syncthreads();
  const u32 next = (rank() + 1) % ranks();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(of_rank(tile + 16, next)), "r"(at(row)), "r"(256), "r"(of_rank(&bar, WHOSE)) : "memory");
  WAIT
  out[blockIdx.x * 64 + threadIdx.x] = tile[16 + threadIdx.x];
  LATER
"""


def between(**changes: str) -> str:
    parts = {
        "BYTES": "256",
        "FENCE": "proxy_fence();",
        "WHOSE": "next",
        "WAIT": "wait(&bar, 0);",
        "LATER": "",
    } | changes
    return re.sub("|".join(parts), lambda found: parts[found[0]], BETWEEN)


def test_a_bulk_copy_into_the_next_block() -> None:
    faults, out = run(between())
    assert faults == []
    senders = np.array([4 * (block // 4) + (block - 1) % 4 for block in range(8)]) % 4
    assert out[:512].reshape(8, 64).tolist() == (1000 * senders[:, None] + np.arange(64)).tolist()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"FENCE": ""}, "shared_race"),
        ({"WAIT": ""}, "shared_race"),
        ({"BYTES": "512"}, "deadlock"),
        ({"WHOSE": "rank()"}, "illegal_instruction"),
        ({"LATER": "row[threadIdx.x] = 5;"}, "shared_race"),
    ],
    ids=str,
)
def test_bulk_copies_into_the_next_block_that_are_wrong(change: dict[str, str], kind: str) -> None:
    faults, _ = run(between(**change))
    assert kind in {fault.kind for fault in faults}
