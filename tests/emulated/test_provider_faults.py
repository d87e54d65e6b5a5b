# ruff: noqa: E501
"""Faults of attention and prep kernels that public reports tell of, planted in an engine's kernels: each turns the
right case red, and says where.

A kernel is compiled once with all its faults in it; an argument of the launch chooses one (0: none). What a foreign
kernel cannot do wrong, because the host never asks it to (impossible last_page_len, a slot that another request holds, pages of
another family's pool, a second write of shared layers), is the reject catalogue's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from provider_helper import Change, engine_in, run_cases_of, run_these

from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.select import select_cases
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.records.run import CaseResult


@dataclass(frozen=True)
class Fault:
    """``right`` in the kernel's source becomes ``wrong``; an expression, or a statement (which ends in ``;``). ``says``:
    a pattern of the operation or the reason that the case is told with."""

    name: str
    case: str
    right: str
    wrong: str
    says: str

    @property
    def geometry(self) -> str:
        return self.case.split("/")[1]


WEIGHTED = "x * scale * __bfloat162float((is_q ? q_weight : k_weight)[dim])"
STORE_V = "v_pool[place] = __float2bfloat16(x * scale);\n    return;"
STORE_K_AS_V = "if (is_k && kKeyIsValue) v_pool[place] = __float2bfloat16(x * scale);"
STORE_K = "k_pool[place] = __float2bfloat16(turned);"
STORE_Q = "q_out[(token * num_qo_heads + head) * kDim + dim] = __float2bfloat16(turned);"
STORE_OUT = "out[(token * num_qo_heads + head) * kDim + dim] = __float2bfloat16(value / all);"
FIRST = "window_left < 0 ? 0 : max(0, position - window_left)"
PAGE_OF_KEY = "key / page_size - origins[request]"
NEXT_ROW = "[((token + 1) * num_qo_heads + head) * kDim + dim]"
VALUE = "weight * __bfloat162float(v_pool[place + c])"
COPY_OF_QUERY = "query[c] = __bfloat162float(q[(token * num_qo_heads + head) * kDim + lane * kColumns + c]);"
LOOK_AHEAD = "if (c == 0 && table[int64_t(request) * table_width + {page}] > 0x40000000) total = 1.0f;"
PREP, DECODE, PREFILL = "prep/12b-local/decode", "attention/12b-local/decode", "attention/12b-local/prefill"
K_EQ_V = "prep/12b-global/decode/closed-form"

# fmt: off
KERNEL_FAULTS = [
    Fault("heads behind the first do not turn", f"{PREP}/closed-form", "dim < rotary_dim", "dim < rotary_dim && head == 0", "q_out"),
    Fault("rotary_dim taken for head_dim", f"{PREP}/rotary64", "dim < rotary_dim", "dim < kDim", "q_out|out_of_bounds|uninit"),
    Fault("pairs (d, d + 64)", f"{PREP}/closed-form", "rotary_dim / 2", "64", "q_out"),
    Fault("weights of 1 + w", f"{PREP}/closed-form", WEIGHTED, "x * scale * (1.0f + __bfloat162float((is_q ? q_weight : k_weight)[dim]))", "q_out"),
    Fault("V is not normed", f"{PREP}/random/seed2/tokens2/page16", STORE_V, "v_pool[place] = __float2bfloat16(x);\n    return;", "V in the pool"),
    Fault("V is normed with K's weight", f"{PREP}/closed-form", STORE_V, "v_pool[place] = __float2bfloat16(x * scale * __bfloat162float(k_weight[dim]));\n    return;", "V in the pool"),
    Fault("V is K behind its weight", K_EQ_V, STORE_K_AS_V, f"if (is_k && kKeyIsValue) v_pool[place] = __float2bfloat16({WEIGHTED});", "V in the pool"),
    Fault("V is turned", K_EQ_V, STORE_K, f"{STORE_K} if (kKeyIsValue) v_pool[place] = __float2bfloat16(turned);", "V in the pool"),
    Fault("one stride of heads for Q and K", f"{PREP}/closed-form", "is_q ? num_qo_heads : num_kv_heads", "num_qo_heads", "K in the pool|out_of_bounds"),
    Fault("page * stride in 32 bits, prep", f"{PREP}/pool/past-uint32", "slot / page_size * stride_page", "int32_t(slot / page_size * stride_page)", "in the pool|out_of_bounds"),
    Fault("positions in 16 bits, prep", f"{PREP}/position/past-16-bits", "int64_t(positions[token])", "int64_t(positions[token] & 0xffff)", "q_out|uninit"),
    Fault("page ids in 16 bits, prep", f"{PREP}/pool/page-ids-past-16-bits", "slots[token]", "slots[token] & (page_size << 16) - 1", "in the pool|out_of_bounds"),
    Fault("slot by a mask, prep", f"{PREP}/page-size/100", "slot % page_size", "(slot & (page_size - 1))", "in the pool"),
    Fault("a row over its neighbour's, prep", f"{PREP}/closed-form", STORE_Q, f"{STORE_Q} if (token + 1 < gridDim.x) q_out{NEXT_ROW} = __float2bfloat16(turned);", "block_write_conflict"),
    Fault("token * width in 32 bits, prep", f"{PREP}/rows/past-int32", STORE_Q, "q_out[int32_t((token * num_qo_heads + head) * kDim + dim)] = __float2bfloat16(turned);", "q_out|out_of_bounds"),
    Fault("token * width in 32 bits", f"{DECODE}/rows/past-int32", COPY_OF_QUERY, COPY_OF_QUERY.replace("(token", "int32_t((token").replace("+ c]", "+ c)]"), "out|out_of_bounds|uninit"),
    Fault("one page for a tile of keys", f"{DECODE}/page-size/3", PAGE_OF_KEY, "(key / 16 * 16 < first ? first : key / 16 * 16) / page_size - origins[request]", "out"),
    Fault("0 times what stands behind the last key", f"{DECODE}/ragged", VALUE, f"{VALUE} + 0.0f * {VALUE.replace('+ c', '+ c + ((key + 1) % page_size > 0 ? stride_slot : 0)')}", "out"),
    Fault("a key too many in the window", f"{DECODE}/needle/window40", FIRST, "window_left < 0 ? 0 : max(0, position - window_left - 1)", "out"),
    Fault("a key too few in the window", f"{DECODE}/needle/window40", FIRST, "window_left < 0 ? 0 : max(0, position - window_left + 1)", "out"),
    Fault("no window", f"{DECODE}/needle/window40", FIRST, "0", "out"),
    Fault("the window by tiles", f"{DECODE}/window40/spread", FIRST, "window_left < 0 ? 0 : max(0, position - window_left) / 16 * 16", "out"),
    Fault("0 times what stands in front of the window", f"{DECODE}/window40/spread", VALUE, f"{VALUE} + 0.0f * {VALUE.replace('+ c', '+ c - (key % page_size > 0 ? stride_slot : 0)')}", "out"),
    Fault("page * stride in 32 bits", f"{DECODE}/pool/past-uint32", "page * stride_page", "int32_t(page * stride_page)", "out"),
    Fault("a page more where kv_len fills its last", f"{DECODE}/needle/window1024", COPY_OF_QUERY, f"{COPY_OF_QUERY} " + LOOK_AHEAD.format(page="(position + 1) / page_size - origins[request]"), "out_of_bounds"),
    Fault("the table past a row's end for a partial tile", f"{DECODE}/kv-len-one", COPY_OF_QUERY, f"{COPY_OF_QUERY} " + LOOK_AHEAD.format(page="(position / 32 * 32 + 31) / page_size - origins[request]"), "out_of_bounds"),
    Fault("requests below a page", f"{DECODE}/ragged", "key <= position", "key <= (position + 1 < page_size ? -1 : position)", "out"),
    Fault("groups by a shift", f"{DECODE}/group/5", "head / group * stride_head", "(head >> (31 - __clz(group))) * stride_head", "foreign_read|out"),
    Fault("released pages forgotten", f"{PREFILL}/small-tile/chunk-past-the-window", PAGE_OF_KEY, "key / page_size", "out|out_of_bounds"),
    Fault("64 entries of the table", f"{DECODE}/needle/window1024", PAGE_OF_KEY, f"({PAGE_OF_KEY}) & 63", "out|foreign_read"),
    Fault("page ids in 16 bits", f"{DECODE}/pool/page-ids-past-16-bits", "page * stride_page", "(page & 0xffff) * stride_page", "foreign_read"),
    Fault("positions in 16 bits", f"{DECODE}/kv-len/past-16-bits", "positions[token] /* here */", "positions[token] & 0xffff", "out"),
    Fault("slot by a mask", f"{DECODE}/page-size/100", "key % page_size", "(key & (page_size - 1))", "out"),
    Fault("keys dealt by the size of the batch", f"{DECODE}/companions", "first + warp", "first + (warp + gridDim.x) % kWarps", "companions|alone"),
    Fault("rows behind a tile's last, again", f"{DECODE}/ragged", STORE_OUT, f"{STORE_OUT} if (token + 1 < gridDim.x) out{NEXT_ROW} = __float2bfloat16(value / all);", "block_write_conflict"),
    Fault("a barrier for fewer threads", f"{DECODE}/kv-len-one", "__syncthreads(); /* merge */", 'asm volatile("bar.sync 1, 224;");', "barrier"),
    Fault("no barrier before the merge", f"{DECODE}/kv-len-one", "__syncthreads(); /* merge */", ";", "shared_race"),
    Fault("a log-sum-exp to base 2", f"{DECODE}/ragged", "largest + logf(all)", "(largest + logf(all)) * 1.442695f", "lse"),
]
SPLIT_FAULTS = [
    Fault("the first rows of a split's tile", "attention/12b-local/decode-split/needle/window40", "first + blockIdx.z * chunk", "(first + blockIdx.z * chunk) / 16 * 16", "out"),
    Fault("scratch of an empty split", "attention/12b-local/decode-split/splits/one-not-empty", "weight > 0.0f", "weight >= 0.0f", "out|uninit"),
    Fault("(-inf) - (-inf) in an empty split", "attention/12b-local/decode-split/splits/one-not-empty", "begin < end ? most + logf(total) : kNothing", "(begin < end ? most : most - most) + logf(total)", "out|lse|part_lse"),
    Fault("a merge in place by two blocks", "attention/12b-local/decode-split/ragged", "if (lse != nullptr && dim == 0) lse[row] = most + logf(total);", "if (threadIdx.x == 0) const_cast<float*>(part_lse)[row * splits] = most + logf(total); if (lse != nullptr && dim == 0) lse[row] = most + logf(total);", "out|conflict|race"),
    Fault("rows of partials at a fixed stride", "attention/12b-local/decode-split/ragged", "int64_t(blockIdx.x) * gridDim.y + blockIdx.y", "int64_t(blockIdx.x) * 2 + blockIdx.y", "out"),
]
# fmt: on


def with_faults(source: str, faults: Sequence[Fault]) -> str:
    """The source with every fault in it, chosen by the number (from 1) that a kernel's last argument has."""
    sites: dict[str, list[int]] = {}
    for number, fault in enumerate(faults, start=1):
        sites.setdefault(fault.right, []).append(number)
    for place, right in enumerate(sites):
        assert source.count(right) == 1, (right, source.count(right))
        source = source.replace(right, f"@{place}@")
    for place, (right, numbers) in enumerate(sites.items()):
        if re.search(r";( /\*.*\*/)?$", right):
            chain = "".join(f"if (fault == {one}) {{ {faults[one - 1].wrong} }} else " for one in numbers)
            source = source.replace(f"@{place}@", f"{chain}{{ {right} }}")
        else:
            chain = "".join(f"fault == {one} ? ({faults[one - 1].wrong}) : " for one in numbers)
            source = source.replace(f"@{place}@", f"({chain}({right}))")
    return source


def _kernels_with_faults(folder: Path) -> None:
    file = folder / "kernels.cu"
    source = file.read_text()
    # Two texts that stand in it twice.
    source = source.replace("position = positions[token];", "position = positions[token] /* here */;")
    source = source.replace("  __syncthreads();\n  float largest", "  __syncthreads(); /* merge */\n  float largest")
    source = with_faults(source, KERNEL_FAULTS)
    source = source.replace("int page_size) {", "int page_size, int fault) {")
    file.write_text(source.replace("int64_t, int64_t, int64_t, int)", "int64_t, int64_t, int64_t, int, int)"))


def _splits_with_faults(folder: Path) -> None:
    file = folder / "split.cu"
    source = with_faults(file.read_text(), SPLIT_FAULTS)
    for old in ("int page_size) {", "int splits) {"):
        source = source.replace(old, old.replace(")", ", int fault)"))
    source = source.replace("int64_t, int64_t, int64_t, int)", "int64_t, int64_t, int64_t, int, int)")
    file.write_text(source.replace("__nv_bfloat16*, float*, int)", "__nv_bfloat16*, float*, int, int)"))


def _with_fault(folder: Path, manifest: str, number: int) -> Path:
    """The manifest whose launches choose this fault."""
    file = folder / manifest
    text = file.read_text()
    for last in ('"i32 page_size"]', '"i32 num_splits"]'):
        text = text.replace(last, last.replace("]", f', "i32 {number}"]'))
    chosen = folder / f"{number}-{manifest}"
    chosen.write_text(text)
    return chosen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine with all faults in its kernels."""
    made = engine_in(tmp_path_factory.mktemp("engine"))
    _kernels_with_faults(made)
    _splits_with_faults(made)
    return made


def _require_red(result: CaseResult, says: str, status: str = "failed") -> None:
    assert result.status == status, result
    told = [result.reason, *(f"{one.operation}: {one.note}" for one in result.mismatches)]
    assert any(re.search(says, text) for text in told), told


@pytest.mark.seeded_faults
@pytest.mark.parametrize("number", range(1, len(KERNEL_FAULTS) + 1), ids=lambda at: KERNEL_FAULTS[at - 1].name)
def test_a_fault_of_a_kernel_turns_its_case_red(folder: Path, number: int) -> None:
    fault = KERNEL_FAULTS[number - 1]
    (result,) = run_cases_of([_with_fault(folder, "kernels.toml", number)], [fault.case], fault.geometry)
    _require_red(result, fault.says)


@pytest.mark.seeded_faults
@pytest.mark.parametrize("number", range(1, len(SPLIT_FAULTS) + 1), ids=lambda at: SPLIT_FAULTS[at - 1].name)
def test_a_fault_of_splits_and_their_merge_turns_its_case_red(folder: Path, number: int) -> None:
    fault = SPLIT_FAULTS[number - 1]
    (result,) = run_cases_of([_with_fault(folder, "split.toml", number)], [fault.case], fault.geometry)
    _require_red(result, fault.says)


@pytest.mark.parametrize(("manifest", "faults"), [("kernels.toml", KERNEL_FAULTS), ("split.toml", SPLIT_FAULTS)])
def test_without_a_fault_all_those_cases_pass(folder: Path, manifest: str, faults: list[Fault]) -> None:
    for geometry in dict.fromkeys(fault.geometry for fault in faults):
        cases = list(dict.fromkeys(fault.case for fault in faults if fault.geometry == geometry))
        results = run_cases_of([_with_fault(folder, manifest, 0)], cases, geometry)
        assert {result.id: result.status for result in results} == dict.fromkeys((one.id for one in results), "passed")
        assert len(results) == len(cases)


# --- the manifest ---------------------------------------------------------------------------------------------------


def _toml(old: str, new: str, file: str = "kernels.toml") -> Change:
    return (file, old, new)


TABLE = 'table = "i32 padded_rows(page_indices, page_indptr, fill=-1)"'
SLOTS = "page * page_size + position % page_size"
BANDS = "num_qo_heads + (kKeyIsValue ? 1 : 2) * num_kv_heads"
BY_CHANGE = 'by_change = "i32 running_total(diff(token_requests) > 0)"'


@pytest.mark.parametrize(
    ("changes", "case", "says"),
    [
        ([_toml('"f32 eps"', '"f32 eps * 100"')], f"{PREP}/near-eps/tokens5", "q_out"),
        ([_toml('"i32 window_left"', '"i32 window_left + 1"')], f"{DECODE}/needle/window40", "out"),
        ([_toml('"ptr q_norm_weight", "ptr k_norm_weight"', '"ptr k_norm_weight", "ptr q_norm_weight"')],
         f"{PREP}/closed-form", "q_out"),
        ([_toml('"i32 num_qo_heads"', '"i32 num_qo_heads - 1"')], f"{PREP}/closed-form", "q_out|pool|out_of_bounds"),
        ([_toml('block = ["head_dim"]', 'block = ["head_dim // 2"]')], f"{PREP}/closed-form", "q_out"),
        # Requests told apart by a change of their number: one without a token is not counted.
        ([_toml(TABLE, f"{TABLE}\n{BY_CHANGE}"), _toml('"ptr token_requests"', '"ptr by_change"')],
         f"{PREFILL}/empty-requests-around", "out|out_of_bounds"),
        # The rows that pad a batch go to a page that is somebody's.
        ([_toml(SLOTS, f"{SLOTS} + (page == page[-1]) * page_size")], f"{PREP}/padding/shared-page", "pool|out_of_bounds"),
        # Scratch as the other family needs it.
        ([_toml("f32 rows * head_dim", "f32 rows * 256", "split.toml")], "attention/12b-global/decode-split/ragged",
         "out_of_bounds"),
        # Tokens times heads along an axis of a grid that ends at 65,535.
        ([("kernels.cu", "token = blockIdx.x;\n  const int band = blockIdx.y", f"token = blockIdx.y / ({BANDS});\n  const int band = blockIdx.y % ({BANDS})"),
          _toml('grid = ["tokens", "num_qo_heads + (1 if k_eq_v else 2) * num_kv_heads"]', 'grid = [1, "tokens * (num_qo_heads + (1 if k_eq_v else 2) * num_kv_heads)"]')],
         f"{PREP}/rows/past-int32", r"kernels\.toml:\d+: .*grid: has more blocks than the device takes"),
        # The plan of the first call for every call.
        ([("reference.py", BEGIN := "    page_size = pool.shape[3]\n",
           BEGIN + "    page_indices = _first.setdefault('row', page_indices.copy())\n"),
          ("reference.py", "def attention(", "_first: dict = {}\n\n\ndef attention(")],
         f"{DECODE}/pages/permuted", "out"),
    ],
    ids=["eps", "window", "weights", "heads", "block", "empty-requests", "padding", "workspace", "grid", "stale-plan"],
)  # fmt: skip
def test_a_fault_of_the_engines_host_side_turns_its_case_red(
    tmp_path: Path, changes: list[Change], case: str, says: str
) -> None:
    engine_in(tmp_path, *changes)
    name = next((name for name, *_ in changes if name.endswith(".toml")), "reference.toml")
    (result,) = run_cases_of([tmp_path / name], [case], case.split("/")[1])
    assert result.status in ("failed", "error"), result
    _require_red(result, says, result.status)


def test_a_card_without_the_shared_memory_is_told(tmp_path: Path) -> None:
    more = _toml('block = ["head_dim"]', 'block = ["head_dim"]\nshared = "150 * 1024"')
    manifest = engine_in(tmp_path, more) / "kernels.toml"
    cases = select_cases(gate_cases(select_geometries("12b-local", 1)), [f"{PREP}/closed-form"])
    assert run_these([manifest], cases)[0].status == "passed"
    runner = CaseRunner(RunSettings("emulated:sm_86", None, ("g4kv", "smoke"), providers=(manifest,)))
    try:
        result = runner.run(cases[0])
    finally:
        runner.close()
    _require_red(result, "shared", "error")
