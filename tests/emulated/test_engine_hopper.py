"""Kernels for sm_90 on the native engine: the same bytes as the interpreter's, and every broken rule found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hopper_helper import hopper_kernel, run_small, seeded
from launch_helper import faults_of, int32, pointer, read_as, upload
from nvrtc_helper import compile_kernel
from seeding import seed
from smoke_helper import chosen, smoke
from test_hopper_clusters import EXCHANGE, run
from test_hopper_copies import RING, run_ring
from test_hopper_programs import PIPELINED, run_ragged
from test_hopper_wgmma import CALL, PLAIN, SOURCE, TWO
from test_hopper_wgmma import run as multiply

from g4kv_cli.device.emulated import Machine
from g4kv_cli.device.emulated.launcher import LaunchCounts, Launcher
from g4kv_cli.device.emulated.request import LaunchOutcome, LaunchRequest
from g4kv_cli.entries.table import kernel_variants


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, LaunchCounts]:
    """How the launches of the test ran, by machine."""
    counts: dict[int, LaunchCounts] = {}
    plain = Launcher.run

    def watched(launcher: Launcher, request: LaunchRequest) -> LaunchOutcome:
        counts[id(launcher)] = launcher.counts
        return plain(launcher, request)

    monkeypatch.setattr(Launcher, "run", watched)
    return counts


def only_compared(counts: dict[int, LaunchCounts]) -> bool:
    """Whether every launch ran on both emulators, and none was handed back."""
    found = list(counts.values())
    return bool(found) and all(each.compared and not each.interpreted and not each.replayed for each in found)


LOCAL, GLOBAL = "attention/12b-local", "attention/12b-global"


@pytest.mark.parametrize(
    ("cases", "options"),
    [
        ((f"{LOCAL}/prefill/large-tile/group/2", f"{GLOBAL}/prefill/large-tile/group/2"), ()),
        (tuple(f"{at}/{form}/group/8" for at in (LOCAL, GLOBAL) for form in ("decode", "decode-split")), ()),
        ((f"{GLOBAL}/decode/folded/group/8", f"{GLOBAL}/decode-split/folded/group/8"), ("--kv-format", "folded")),
    ],
    ids=["prefill", "decode", "folded"],
)
def test_both_emulators_store_the_same(
    cases: tuple[str, ...],
    options: tuple[str, ...],
    counted: dict[int, LaunchCounts],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    geometries = ("--geometry", "12b-local,12b-global", "--device", "emulated:sm_90", "--variant", "sm_90a,portable")
    code, record = smoke(tmp_path / "run.json", *geometries, *options, *chosen(cases))
    assert code == 0
    kernels = {name for case in record["cases"] for name in case["kernels"]}
    assert any("hopper" in name or "pairs" in name for name in kernels)
    assert only_compared(counted), counted


@pytest.fixture
def prefill_in_clusters() -> Iterator[None]:
    """The form whose blocks are in clusters, which the table has for GPUs alone, in place of the one that stands
    alone."""
    forms = {name: kernel for name, kernel in kernel_variants().items() if "prefill" in name and "cluster" in name}
    before = {name: kernel.device_kinds for name, kernel in forms.items()}
    for name, kernel in forms.items():
        object.__setattr__(kernel, "device_kinds", ("emulated",) if name.endswith("cluster2") else ("cuda",))
    yield
    for name, kernel in forms.items():
        object.__setattr__(kernel, "device_kinds", before[name])


TWO_TILES = ("--geometry", "12b-global", "--variant", "sm_90a", "--shape", "kv=34 q=33 heads=2/1 page=16", "--case",
             "attention/*/prefill/*/large-tile/spread")  # fmt: skip
"""Two tiles of one request: each block brings half of the keys to both."""


@pytest.mark.usefixtures("prefill_in_clusters")
def test_blocks_that_bring_keys_to_each_other(
    counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    code, record = smoke(tmp_path / "run.json", *TWO_TILES)
    assert code == 0
    assert record["cases"][0]["kernels"] == ["batch_prefill_paged_hd512_tile64_cluster2"]
    assert only_compared(counted), counted


@pytest.mark.usefixtures("prefill_in_clusters")
def test_a_block_does_not_end_before_the_other_has_told_its_barriers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "interpreter")  # the engine does not look who may have ended
    edits = (("prefill_hopper_loops.cuh", "  wait_until_used(shared + Shape::kValuesUsed, ring);\n", ""),)
    kernels = seed(tmp_path / "kernels", edits)
    code, _ = smoke(tmp_path / "run.json", "--kernels", str(kernels), *TWO_TILES)
    assert code == 1
    assert "of the block of rank 1, which may have ended by then" in capsys.readouterr().out


TURNED = """
extern "C" __global__ void kernel(const u32* in, u32* out) {
  __shared__ __align__(16) u32 tile[128];
  u32 v[4], t;
  for (int i = 0; i < 4; ++i) v[i] = in[i * 32 + threadIdx.x];
  asm volatile("stmatrix.sync.aligned.m8n8.x4FORM.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(at(tile + threadIdx.x * 4)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(tile[i * 32 + threadIdx.x]));
    out[i * 32 + threadIdx.x] = t;
  }
}
"""


@pytest.mark.parametrize("form", ["", ".trans"])
def test_matrices_stored_and_turned(
    form: str, counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    machine = Machine()
    given = np.random.default_rng(5).integers(0, 1 << 32, 128, np.uint32)
    source, out = upload(machine, given, "in"), machine.allocate(512, "out")
    kernel = hopper_kernel(TURNED.replace("FORM", form))
    assert faults_of(machine, kernel, pointer(source), pointer(out)) == []
    halves = given.view(np.uint16).reshape(4, 8, 8)
    want = halves if form else halves.transpose(0, 2, 1)
    np.testing.assert_array_equal(read_as(machine, out, 256, np.uint16), want.reshape(-1))
    assert only_compared(counted), counted


def _right(body: str, init: str | None = None) -> Callable[[], bool]:
    return lambda: run_small(body, init) == []


_SHARE = """
  if (threadIdx.x < 32) { tile[threadIdx.x] = threadIdx.x; __syncwarp(); if (threadIdx.x == 0) arrive(&other); }
  else { WAIT u32 value = tile[threadIdx.x - 32]; out[threadIdx.x] = value; }"""
_FIRST = "tile[threadIdx.x] = 3; __syncthreads();"
_READ = "if (tile[threadIdx.x] == 77777) arrive(&bar);"
_OVER = f"""
  {_FIRST}
  if (threadIdx.x >= 32) {{ EARLY }}
  if (threadIdx.x == 0) {{ expect(&other, 1024); load2(tile, &map, 0, 0, &other); }}
  if (threadIdx.x >= 32) {{ LATER }}
  wait(&other, 0);"""
_HANDED = """
  if (threadIdx.x < 32) { tile[threadIdx.x] = 1; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
  else { asm volatile("bar.sync 1, 64;" ::: "memory"); out[threadIdx.x] = tile[threadIdx.x - 32]; }
  if (threadIdx.x == 0) arrive(&other);"""
_STORED = """
  for (int k = threadIdx.x; k < 256; k += 64) tile[k] = 3 * k;
  FENCE
  __syncthreads();
  if (threadIdx.x == 0) { store2(&map, 0, 8, tile); commit(); WAIT }"""
RIGHT: dict[str, Callable[[], bool]] = {
    "a ring of copies": lambda: run_ring(RING)[0] == [],
    "products one after another": lambda: (
        multiply(f"wgmma_fence(); {CALL} {CALL} wgmma_commit(); wgmma_wait();")[0] == []
    ),
    "a group that stays open": lambda: (
        multiply(
            TWO.replace("FIRST", CALL.replace("(d[", "(first["))
            .replace("SECOND", CALL.replace("(d[", "(second["))
            .replace("CHOSEN", "first")
            .replace("REST", "wgmma_wait();")
        )[0]
        == []
    ),
    "a pipeline that ends in bulk stores": lambda: np.array_equal(*run_ragged(PIPELINED)),
    "a bulk store": _right(_STORED.replace("FENCE", "proxy_fence();").replace("WAIT", "wait_read(); tile[0] = 1;")),
    "blocks of a cluster": lambda: run(EXCHANGE)[0] == [],
    "an arrival without a wait": _right(_HANDED),
    "an mbarrier that orders": _right(_SHARE.replace("WAIT", "wait(&other, 0);")),
    "more arrivals than one phase has": _right("for (int i = 0; i < 3; ++i) if (threadIdx.x == 40) arrive(&other);"),
    "a lane for which its warp waits": _right(
        "if (threadIdx.x == 0) { expect(&other, 1024); load2(tile, &map, 0, 0, &other); wait(&other, 0); }\n"
        "__syncwarp(); if (threadIdx.x < 32 && tile[threadIdx.x] == 77777) arrive(&bar);"
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_not_handed_back(
    name: str, counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    assert RIGHT[name]()
    assert only_compared(counted), counted


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "bytes expected by half": (lambda: run_ring(seeded(RING, "EXPECT", "expect(&full[s], 2048);")), "unsure"),
    "bytes that never come": (lambda: run_ring(seeded(RING, "EXPECT", "expect(&full[s], 4112);")), "unsure"),
    "a phase not waited for": (lambda: run_ring(seeded(RING, "FULL", "")), "shared uninitialised"),
    "a stage filled before it was read": (lambda: run_ring(seeded(RING, "EMPTY", "")), "mbarrier"),
    "a copy to what others read": (
        lambda: run_small(_OVER.replace("EARLY", _READ).replace("LATER", "")),
        "shared race",
    ),
    "a copy not waited for": (lambda: run_small(_OVER.replace("EARLY", "").replace("LATER", _READ)), "shared race"),
    "a product not waited for": (lambda: multiply(f"wgmma_fence(); {CALL} wgmma_commit();"), "unsure"),
    "operands not shown to wgmma": (
        lambda: multiply(PLAIN, SOURCE.replace("/*FENCE*/ proxy_fence();", "")),
        "shared race",
    ),
    "stores to another block not waited for": (
        lambda: run("got[threadIdx.x] = 7; release(); meet();" + EXCHANGE.replace("wait(&bar, 0);", "")),
        "shared race",
    ),
    "stores to another block over its own": (lambda: run("got[threadIdx.x] = 7;" + EXCHANGE), "shared race"),
    "another block's mbarrier before it is there": (lambda: run(EXCHANGE.replace("meet();", "")), "mbarrier"),
    "a bulk store of what was not shown": (
        lambda: run_small(_STORED.replace("FENCE", "").replace("WAIT", "wait_store();")),
        "shared race",
    ),
    "a bulk store that nobody waits for": (
        lambda: run_small(_STORED.replace("FENCE", "proxy_fence();").replace("WAIT", "")),
        "unfinished copy",
    ),
    "what a bulk store still reads": (
        lambda: run_small(_STORED.replace("FENCE", "proxy_fence();").replace("WAIT", "tile[0] = 1; wait_store();")),
        "shared race",
    ),
    "an arrival that orders nothing after it": (
        lambda: run_small(_HANDED.replace('"memory"); }\n  else', '"memory"); tile[threadIdx.x] = 2; }\n  else')),
        "shared race",
    ),
    "an mbarrier not waited for": (lambda: run_small(_FIRST + _SHARE.replace("WAIT", "")), "shared race"),
    "an mbarrier that nothing shows": (lambda: run_ring(seeded(RING, "BARRIER", "")), "shared race"),
    "an mbarrier overwritten": (lambda: run_small("if (threadIdx.x == 0) { bar = 0; arrive(&bar); }"), "mbarrier"),
    "a copy that nobody waits for": (
        lambda: run_small("if (threadIdx.x == 0) { expect(&other, 1024); load2(tile, &map, 0, 0, &other); }"),
        "unfinished copy",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_rule_is_found(name: str, counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "native")
    launch, kind = WRONG[name]
    launch()
    (counts,) = counted.values()
    assert counts.replayed == {kind: 1}
    assert counts.cleared == 0


BYTES = """
extern "C" __global__ void kernel(const u32* in, u32* out, int words) {
  __shared__ __align__(128) u32 tile[512];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&bar, 4 * words);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(at(tile + 8 * blockIdx.x)), "l"(in + 512 * blockIdx.x), "r"(4 * words), "r"(at(&bar)) : "memory");
  }
  wait(&bar, 0);
  for (int k = threadIdx.x; k < words; k += 32) tile[8 * blockIdx.x + k] += 7;
  proxy_fence();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        :: "l"(out + 512 * blockIdx.x), "r"(at(tile + 8 * blockIdx.x)), "r"(4 * words) : "memory");
    commit();
    wait_store();
  }
}
"""


def test_bytes_are_brought_and_stored(counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    machine, words = Machine(), 488
    given = np.random.default_rng(6).integers(0, 1 << 31, (3, 512), np.uint32)
    source, out = upload(machine, given, "in"), upload(machine, np.zeros_like(given), "out")
    assert faults_of(machine, hopper_kernel(BYTES), pointer(source), pointer(out), int32(words), grid=3) == []
    got = read_as(machine, out, given.size, np.uint32).reshape(given.shape)
    np.testing.assert_array_equal(got[:, :words], given[:, :words] + 7)
    assert not got[:, words:].any()
    assert only_compared(counted), counted


def test_a_cluster_of_plain_blocks(counted: dict[int, LaunchCounts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that run together have shared memory of their own, whatever number they have."""
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    source = """
    extern "C" __global__ void kernel(unsigned* out) {
      __shared__ unsigned row[64];
      unsigned rank, ranks, x, y, most, number = blockIdx.y * gridDim.x + blockIdx.x;
      asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
      asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
      asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(y));
      asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(most));
      row[threadIdx.x] = rank * 1000 + ranks * 100 + threadIdx.x + 10000 * x + 100000 * y + 1000000 * most;
      __syncthreads();
      out[number * 64 + threadIdx.x] = row[63 - threadIdx.x];
    }
    """
    machine = Machine()
    out = machine.allocate(4 * 64 * 24, "out")
    machine.launch(compile_kernel(source, "90a"), (6, 4, 1), (64, 1, 1), [pointer(out)], cluster=(3, 2, 1))
    got = read_as(machine, out, 64 * 24, np.uint32).reshape(4, 6, 64)
    ranks = [[x % 3 + 3 * (y % 2) for x in range(6)] for y in range(4)]
    places = [[10000 * (x % 3) + 100000 * (y // 2) + 2000000 for x in range(6)] for y in range(4)]
    want = np.array(ranks) * 1000 + 600 + np.array(places)
    np.testing.assert_array_equal(got, want[:, :, None] + 63 - np.arange(64))
    assert only_compared(counted), counted


WIDE = """
extern "C" __global__ void kernel(u32* out) {
  __shared__ __align__(16) u32 tile[1024];
  tile[threadIdx.x] = 3 * threadIdx.x + blockIdx.x;
  proxy_fence();
  __syncthreads();
  if (threadIdx.x) return;
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      :: "l"(out + 1024 * blockIdx.x), "r"(at(tile)), "r"(4096) : "memory");
  commit();
  wait_store();
}
"""


@pytest.mark.parametrize(("blocks", "native"), [(8, 1), (16, 0)])
def test_a_cluster_with_more_agents_than_a_mark_can_name(
    blocks: int, native: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "native")
    machine = Machine()
    out = machine.allocate(4096 * blocks, "out")
    kernel = hopper_kernel(WIDE)
    assert faults_of(machine, kernel, pointer(out), grid=blocks, block=1024, cluster=(blocks, 1, 1)) == []
    got = read_as(machine, out, 1024 * blocks, np.uint32).reshape(blocks, 1024)
    np.testing.assert_array_equal(got, 3 * np.arange(1024) + np.arange(blocks)[:, None])
    assert (machine.counts.native, machine.counts.interpreted, machine.counts.replayed) == (native, 1 - native, {})
