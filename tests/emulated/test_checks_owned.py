"""Reads of pages that are somebody else's: legal memory to a kernel, and a fault all the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_helper import hopper_kernel, line, where
from launch_helper import faults_of, int32, pointer, upload
from nvrtc_helper import DIALECTS, compile_kernel, line_of
from seeding import seed
from smoke_helper import chosen, smoke

from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.pool import page_owner
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.serve.page_allocator import PageAllocator
from g4kv_cli.device.emulated import Fault, Machine, OwnedReads
from g4kv_cli.device.emulated.checks import owned_reads
from g4kv_cli.model.geometry import GEOMETRIES

CELL_BYTES, CELLS = 1024, 6

_COPY = (
    'asm volatile("cp.async.ca.shared.global [%0], [%1], BYTES;\\n cp.async.wait_all;" :: "r"((unsigned)'
    '__cvta_generic_to_shared(&stage[threadIdx.x * STEP])), "l"(pool + cell * 256 + threadIdx.x * STEP)); '
    "value = stage[threadIdx.x * STEP];"
)
LOADS = {
    "load": "value = pool[cell * 256 + (int)threadIdx.x];",
    "wide load": "value = ((const int4*)pool)[cell * 64 + threadIdx.x].y;",
    "one address": "value = ((volatile const int*)pool)[cell * 256 + 3];",
    "copy": _COPY.replace("BYTES", "4").replace("STEP", "1"),
    "wide copy": _COPY.replace(".ca.", ".cg.").replace("BYTES", "16").replace("STEP", "4"),
    "part of a copy": _COPY.replace("BYTES", "8, 4").replace("STEP", "2"),
}

SOURCE = """
extern "C" __global__ void kernel(const int* pool, const int* reads, int count, int* out) {
  __shared__ __align__(16) int stage[128];
  int sum = 0;
  for (int i = 0; i < count; ++i) {
    int cell = reads[blockIdx.x * count + i], value;
    LOAD  // MARK: read
    sum += value;
  }
  out[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""


def run(
    load: str,
    reads: list[list[int]],
    owned: list[list[int]],
    arch: str = "90",
    one_owner_a_block: bool = True,
    machine: Machine | None = None,
) -> tuple[list[Fault], str]:
    """``reads[block]``: cells that a block reads in turn; ``owned[r]``: cells of owner r."""
    source = SOURCE.replace("LOAD", LOADS[load])
    machine = machine or Machine()
    # The pool is a part of its allocation, as a family's may be.
    memory = upload(machine, np.arange((CELLS + 2) * CELL_BYTES // 4, dtype=np.int32), "memory")
    pool = memory + CELL_BYTES
    rule = OwnedReads(
        pool,
        CELLS * CELL_BYTES,
        CELL_BYTES,
        np.array([cell for cells in owned for cell in cells], np.int64),
        np.cumsum([0, *(len(cells) for cells in owned)]),
        one_owner_a_block,
        lambda offset: f"cell {offset // CELL_BYTES}",
        lambda cell: f"nobody's number {cell}",
        "cell",
        "request",
    )
    table = upload(machine, np.array(reads, np.int32), "reads")
    out = machine.allocate(4096, "out")
    kernel = compile_kernel(source, arch)
    arguments = (pointer(pool), pointer(table), int32(len(reads[0])), pointer(out))
    return faults_of(machine, kernel, *arguments, grid=len(reads), owned_reads=[rule]), source


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("load", LOADS)
def test_a_cell_that_no_owner_has(load: str, arch: str) -> None:
    assert not run(load, [[0, 2], [3, 4]], [[0, 2], [4, 3]], arch)[0]
    (fault,), source = run(load, [[0, 2], [3, 5]], [[0, 2], [4, 3]], arch)
    assert (fault.kind, fault.is_fatal, fault.block) == ("foreign_read", False, (1, 0, 0))
    assert fault.source_line == line_of(source, "MARK: read")
    assert "of cell 5, which no request of the launch has: nobody's number 5" in fault.message
    assert (fault.label, fault.lanes) == ("memory", 32)


@pytest.mark.parametrize("load", LOADS)
def test_a_block_that_reads_two_owners_cells(load: str) -> None:
    owned = [[0, 2], [4, 3], [1]]
    (fault,), source = run(load, [[0, 2], [3, 2]], owned)
    assert (fault.kind, fault.block) == ("foreign_read", (1, 0, 0))
    assert fault.source_line == line_of(source, "MARK: read")
    assert "cell 2, which request 0 of the launch has" in fault.message
    assert fault.message.endswith("by a block that reads cell 3 of request 1 of the launch too")
    # A persistent block may serve several, and whose turn it is nobody knows; a stranger's cell it still may not read.
    assert not run(load, [[0, 2], [3, 2]], owned, one_owner_a_block=False)[0]
    assert len(run(load, [[0, 2], [3, 5]], owned, one_owner_a_block=False)[0]) == 1


def test_the_order_of_blocks_and_requests_is_the_kernels() -> None:
    assert not run("load", [[1, 1], [4, 3], [2, 0]], [[0, 2], [4, 3], [1]])[0]


def test_owners_may_share_a_cell() -> None:
    shared = [[0, 1], [0, 2]]
    assert not run("load", [[0, 1], [0, 2]], shared)[0]
    assert not run("load", [[1, 0], [2, 0]], shared)[0]
    (fault,), _ = run("load", [[0, 1, 2]], shared)
    assert "cell 2, which request 1 of the launch has" in fault.message
    assert "cell 1 of request 0" in fault.message


def test_memory_beside_the_range_is_not_its_business() -> None:
    assert not run("load", [[-1, 0], [CELLS, 0]], [[0]])[0]


def test_too_many_owners_for_the_memory_leave_the_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_reads, "_MAX_OWNED_FLAGS", 3)
    assert not run("load", [[0, 2], [3, 2]], [[0, 2], [4, 3]])[0]
    assert len(run("load", [[0, 2], [3, 5]], [[0, 2], [4, 3]])[0]) == 1


BULK = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, const int* reads, int* out) {
  __shared__ __align__(1024) u16 tile[8 * 64];
  __shared__ u64 full;
  if (threadIdx.x == 0) { init(&full, 1); init_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&full, 1024);
    load2(tile, &map, 0, reads[blockIdx.x] * 8, &full);                       // MARK: read
  }
  wait(&full, 0);
  out[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x];
}
"""


def test_a_bulk_copy_of_a_cell_that_no_owner_has() -> None:
    for cells, bad in (([0, 4], False), ([0, 5], True)):
        machine = Machine()
        pool = upload(machine, np.zeros((CELLS * 8, 64), np.uint16), "pool")
        tensor_map = machine.tensor_map(pool, (64, CELLS * 8), (64, 8), swizzle_bytes=0)
        rule = OwnedReads(
            pool,
            CELLS * CELL_BYTES,
            CELL_BYTES,
            np.array([0, 4]),
            np.array([0, 1, 2]),
            True,
            str,
            str,
            "cell",
            "request",
        )
        table, out = upload(machine, np.array(cells, np.int32), "reads"), machine.allocate(4096, "out")
        kernel, arguments = hopper_kernel(BULK), (tensor_map.pack(), pointer(table), pointer(out))
        faults = faults_of(machine, kernel, *arguments, grid=2, owned_reads=[rule])
        assert [(fault.kind, fault.block) for fault in faults] == ([("foreign_read", (1, 0, 0))] if bad else [])
        if bad:
            assert where(faults[0])[0] == line(BULK, "read")


@pytest.mark.parametrize("load", ["load", "wide load", "one address", "wide copy"])
@pytest.mark.parametrize("owners", [3, 70])
def test_the_engine_sees_it_itself(load: str, owners: int) -> None:
    """What it finds is run again by the interpreter; what it does not find nobody else looks at."""
    owned = [[0, 2], *[[1]] * (owners - 2), [4, 3]]
    clean, torn, stranger = Machine(), Machine(), Machine()
    assert not run(load, [[0, 2], [3, 4], [1, 1]], owned, machine=clean)[0]
    assert clean.counts.native == 1
    # The torn block begins with the cell that the block before it read last.
    assert len(run(load, [[0, 2], [3, 4], [4, 0]], owned, machine=torn)[0]) == 1
    assert len(run(load, [[0, 2], [3, 5]], owned, machine=stranger)[0]) == 1
    for machine in (torn, stranger):
        assert machine.counts.replayed == {"foreign read": 1}
        assert machine.counts.cleared == 0


# --- through the entries ------------------------------------------------------------------------------------------

TILE = "attention_tile.cuh"
KEY_PAGE = "p.page_indptr[tile.request] + logical_page - p.page_origins[tile.request]];"


KEY_PLACE = "return kv_row_offset(p.layout, page, p.layer, false, slot, tile.kv_head);"


def _smoke(tmp_path: Path, old: str, new: str, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    """The cases with a copy of the tile's source in which another page is read."""
    directory, record = tmp_path / "kernels", tmp_path / "run.json"
    _, results = smoke(record, "--kernels", str(seed(directory, ((TILE, old, new),), cases)), *chosen(cases))
    return list(results["cases"])


def test_another_requests_page_is_told_from_ones_own(tmp_path: Path) -> None:
    """Of a batch, each row's third page is the next row's."""
    case = "attention/e2b-local/decode/ragged"
    row_after = KEY_PAGE.replace("logical_page -", "(logical_page == 2 ? 3 : logical_page) -")
    (result,) = _smoke(tmp_path, KEY_PAGE, row_after, (case,))
    assert result["status"] == "failed"
    assert "foreign_read" in result["reason"]
    place = r"page \d+ \(layer 1, K, slot \d+, head 0, dim \d+\), which request \d+ of the launch has"
    assert re.search(f"{place}, by a block that reads page \\d+ of request \\d+ of the launch too", result["reason"])
    assert f"{TILE}:" in result["reason"]


def _read_elsewhere(page: int) -> str:
    """A key early in each page but the first is looked for in this one."""
    return KEY_PLACE.replace(", page,", f", logical_page > 0 && slot == 2 ? {page} : page,")


@pytest.mark.parametrize("form", ["decode", "decode-split", "prefill/small-tile", "prefill/large-tile"])
def test_a_page_that_nobody_has(tmp_path: Path, form: str) -> None:
    (case,) = select_cases(gate_cases([GEOMETRIES["e2b-local"]]), (f"attention/e2b-local/{form}/ragged",))
    assert isinstance(case, AttentionCase)
    page = min(set(range(case.num_pages)) - {page for request in case.requests for page in request.pages})
    (result,) = _smoke(tmp_path, KEY_PLACE, _read_elsewhere(page), (case.id,))
    assert result["status"] == "failed"
    place = f"page {page} (layer 1, K, slot 2, head 0, dim 0)"
    assert f"{place}, which no request of the launch has: nobody's, it holds poison" in result["reason"]


def test_the_padding_page_of_a_serving_run(tmp_path: Path) -> None:
    (result,) = _smoke(tmp_path, KEY_PLACE, _read_elsewhere(0), ("serve/e2b-local/interleaved",))
    assert result["status"] == "failed"
    assert "which no request of the launch has: a padding page" in result["reason"]


def test_whose_a_page_is_in_words() -> None:
    requests = (KvRequest(20, 1, 0, (3, 4)), KvRequest(20, 1, 0, (3, 5)), KvRequest(1, 1, 0, (7,), is_padding=True))
    owner = page_owner(requests)
    assert [owner(page) for page in (3, 5, 7, 0)] == [
        "of the case's request 0 and 1", "of the case's request 1", "a padding page", "nobody's, it holds poison"
    ]  # fmt: skip
    allocator = PageAllocator(4, 1)
    first, second = allocator.take(8), allocator.take(9)
    allocator.give_back(first, 8)
    assert [allocator.owner_words(page) for page in (0, first, second, 3)] == [
        "a padding page", "request 8 has given it back", "request 9 holds it", "nobody ever had it"
    ]  # fmt: skip
