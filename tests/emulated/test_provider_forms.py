"""What other engines' kernels need, through smoke's cases: pools with gaps, packed keys, K and V in forms of their own,
buffers that are worked on in place, block tables from position 0, arrays of block addresses, lists of tokens, structs.
And each turned into something else is found where it is wrong.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from provider_helper import engine_in, run_cases_of, run_these

from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.select import select_cases
from g4kv_cli.commands.asked import Asked
from g4kv_cli.commands.smoke import Request, cases_of
from g4kv_cli.errors import DeviceFault
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.providers.check import check_manifest
from g4kv_cli.providers.images import ImageStore
from g4kv_cli.providers.read import read_manifest

PREP = "prep/12b-local/decode/closed-form"
PADDED = "prep/12b-local/decode/padding/shared-page"
CHUNKS = "prep/12b-local/batch_prefill/closed-form"
DECODE = "attention/12b-local/decode/pages/permuted"
NEEDLE = "attention/12b-local/decode/needle/window40"
GAPS = '[pool]\naxes = "layer page head slot dim"\nalignment = 16\n[pool.strides]\nslot = 264\n\n[image.'


def test_packed_keys_and_a_buffer_that_is_worked_on_in_place(tmp_path: Path) -> None:
    cases = [PREP, PADDED, CHUNKS, DECODE]
    results = run_cases_of([engine_in(tmp_path) / "packed.toml"], cases)
    assert len(results) >= len(cases)
    assert {result.status for result in results} == {"passed"}, results


def test_tensor_maps_of_launches_that_the_manifest_makes(tmp_path: Path) -> None:
    (result,) = run_cases_of([engine_in(tmp_path) / "maps.toml"], ["attention/12b-local/decode/page-size/3"])
    assert result.status == "passed", result


@pytest.mark.parametrize(
    ("old", "new", "status", "says"),
    [
        ('"2 * stride_page"], box', '"4 * stride_page"], box', "failed", "out"),
        ("pool + 2 * v_offset", "pool + 2 * v_offset + 16", "failed", "out"),
        ("pool + 2 * v_offset", "pool + 2 * v_offset + 2", "error",
         "maps.toml:16: the tensor map of 'pool + 2 * v_offset + 2'"),
        ('["2 * stride_head", "2 * stride_slot"', '["2 * stride_head + 8", "2 * stride_slot"', "error",
         "must be multiples of 16 below 2^40"),
        # The launch may begin before the one in front has ended.
        ('griddepcontrol.wait;', '', "failed", "overlap_without_wait: the launch may begin before"),
        ("page_size <= 128", "page_size <= 8", "not covered", "two pages lie in shared memory"),
        ("arch >= 90", "arch >= 100", "not covered", "bulk tensor copies are Hopper's"),
    ],
    ids=["stride", "address", "alignment", "strides-of-16", "no-wait", "too-large", "arch"],
)  # fmt: skip
def test_a_tensor_map_of_something_else_is_found(tmp_path: Path, old: str, new: str, status: str, says: str) -> None:
    file = "maps.cu" if "wait" in old else "maps.toml"
    (result,) = run_cases_of([engine_in(tmp_path, (file, old, new)) / "maps.toml"], [DECODE])
    told = [result.reason, *(one.operation for one in result.mismatches)]
    assert result.status == status, told
    assert any(says in text for text in told), told


HANDLE = """\
[image.engine]
library = "libengine.so"

[[entry]]
name = "batch_decode_paged_*_hd256_*"
[entry.arrays]
table = "i32 padded_rows(page_indices, page_indptr, fill=-1)"
locks = "i32 zeros(count)"
[entry.workspace]
scratch = "f32 count // 4"
[[entry.prepare]]
image = "engine"
call = "plan"
arguments = ["ptr kv_lens", "i32 requests"]
returns = "ptr handle"
[[entry.prepare]]
image = "engine"
call = "scratch_bytes"
arguments = ["ptr handle"]
returns = "i64 count"
[[entry.launch]]
image = "engine"
call = "run"
arguments = ["ptr handle", "ptr scratch", "ptr locks", "i64 count"]
returns = "void"
"""


def test_what_a_function_returns_goes_to_those_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle and a size of scratch, asked for once; the attention itself is then the kernels'."""
    called: list[tuple[str, list[Any]]] = []
    sizes: dict[str, int] = {}

    def call(
        _self: ImageStore, _image: str, function: str, arguments: list[Any], returns: str, device: Any, *_: Any
    ) -> Any:
        called.append((function, [argument.value for argument in arguments]))
        sizes.update({one.label: one.nbytes for one in device._allocations if one.label in ("scratch", "locks")})
        return {"plan": 0x7F00_0000_1000, "scratch_bytes": 96}.get(function)

    monkeypatch.setattr(ImageStore, "call", call)
    functions = SimpleNamespace(functions=("plan", "scratch_bytes", "run"))
    monkeypatch.setattr("g4kv_cli.providers.check.read_library", lambda _path: functions)
    monkeypatch.setattr("g4kv_cli.providers.check.stand_in_for", lambda _path: None)
    manifest = engine_in(tmp_path) / "handle.toml"
    (tmp_path / "libengine.so").write_bytes(b"")
    head, launch = (tmp_path / "kernels.toml").read_text().split("[[entry]]")[0], "[[entry.launch]]"
    kernel = (tmp_path / "kernels.toml").read_text().rpartition(launch)[2]
    manifest.write_text(f"{head}{HANDLE}{launch}{kernel}")
    assert check_manifest(read_manifest(manifest)).problems == ()
    (result,) = run_cases_of([manifest], [DECODE])
    assert result.status == "passed", result
    names = [function for function, _ in called]
    assert names[:3] == ["plan", "scratch_bytes", "run"]
    assert called[1][1] == [0x7F00_0000_1000]
    assert called[2][1][::3] == [0x7F00_0000_1000, 96]
    assert sizes == {"scratch": 24 * 4, "locks": 96 * 4}
    manifest.write_text(manifest.read_text().replace('"ptr handle", "ptr scratch"', '"ptr handel", "ptr scratch"'))
    (problem,) = check_manifest(read_manifest(manifest)).problems
    assert "no 'handel' here (nearest: handle)" in problem


@pytest.mark.parametrize(("frees", "is_over"), [(False, True), (True, False)])
def test_what_host_code_keeps_on_a_device_ends_its_process_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frees: bool, is_over: bool
) -> None:
    """An engine's own scratch, allocated once: on the device behind a fault it would be nowhere."""

    def call(
        _self: ImageStore, _image: str, _function: str, _arguments: Any, _returns: str, device: Any, *_: Any
    ) -> Any:
        address = device.allocate_bytes(64, "cudaMalloc")
        if frees:
            assert device.free_address(address)
        raise DeviceFault(["shared_race: a test"], ["shared_race"])

    monkeypatch.setattr(ImageStore, "call", call)
    (engine_in(tmp_path) / "libengine.so").write_bytes(b"")
    settings = RunSettings("emulated:sm_90", None, ("g4kv", "smoke"), providers=(tmp_path / "engine.toml",))
    runner = CaseRunner(settings)
    (case,) = select_cases(gate_cases(select_geometries("12b-local", 1)), [DECODE])
    assert runner.run(case).status == "failed"
    assert runner.poisoned is is_over
    runner.close()


@pytest.mark.parametrize("name", ["pointers.toml", "tokens.toml", "mask.toml"])
def test_block_addresses_lists_of_tokens_and_masks(tmp_path: Path, name: str) -> None:
    results = run_cases_of([engine_in(tmp_path) / name], [DECODE])
    assert {result.status for result in results} == {"passed"}, results


@pytest.mark.parametrize("name", ["packed.toml", "pointers.toml", "tokens.toml", "mask.toml"])
def test_pages_in_front_of_the_window_that_are_gone(tmp_path: Path, name: str) -> None:
    asked = Asked(None, "kv=70 window=40 heads=2/1 origin=1", "12b-local")
    cases = [case for case in cases_of(Request(asked=asked)) if "/decode/" in case.id and "attention" in case.id]
    results = run_these([engine_in(tmp_path) / name], cases)
    by_form = {result.id.rpartition("/")[2]: result.status for result in results}
    assert by_form == {"spread": "passed", "needles": "passed", "forms-agree": "not covered"}, results


def test_a_store_of_attention_is_found(tmp_path: Path) -> None:
    """One block, which alone reads what it stores to: nothing but the store itself is wrong."""
    store = "if (!row) const_cast<T*>(where.v)[where.page(0, 1) * where.v_stride_page + 1] = where.v[0]; attend"
    folder = engine_in(
        tmp_path,
        (
            "others.cu",
            "  attend<Packed, 256>",
            f"  const int row = blockIdx.x + blockIdx.y + threadIdx.x;\n  {store}<Packed, 256>",
        ),
    )
    asked = Asked(None, "kv=20 window=40 heads=1/1", "12b-local")
    results = run_these(
        [folder / "packed.toml"],
        [case for case in cases_of(Request(asked=asked)) if "/decode/" in case.id and "spread" in case.id],
    )
    assert [result.status for result in results] == ["failed"]
    assert results[0].reason.startswith("pool_write: attention stored to the pool, first at page "), results[0].reason


def test_a_pool_with_gaps_gives_the_same_bits(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    other = tmp_path / "gaps.toml"
    other.write_text(manifest.read_text().replace("[image.", GAPS, 1))
    own, gaps = (run_cases_of([file], [PREP, PADDED, DECODE]) for file in (manifest, other))
    assert [result.status for result in gaps] == ["passed"] * 3, gaps
    assert [result.output_digest for result in own] == [result.output_digest for result in gaps]


FAULTS = (
    ("packed.toml", "dim/8 slot dim%8", "dim/8 dim%8 slot", PREP, "K in the pool"),
    ("packed.toml", '"layer page head dim slot"', '"layer page slot head dim"', PREP, "V in the pool"),
    ("packed.toml", "qkv[:, :num_qo_heads]", "qkv[:, 1:1 + num_qo_heads]", PREP, "q_out"),
    ("packed.toml", "concatenate(q, k, v, axis=1)", "concatenate(q, v, k, axis=1)", PREP, "K in the pool"),
    ("packed.toml", "cos[:, :half], sin[:, :half]", "sin[:, :half], cos[:, :half]", PREP, "q_out"),
    ("packed.toml", "where(at < 0, 0, held)", "where(at < 0, 0, held + 1)", DECODE, "out"),
    ("packed.toml", '"f32 sm_scale", "i32 window_left"', '"i32 window_left", "f32 sm_scale"', DECODE, "out"),
    ("pointers.toml", "(k_offset + first)", "(v_offset + first)", DECODE, "out"),
    ("tokens.toml", "at % page_size", "(at ^ 1) % page_size", DECODE, "out"),
    ("mask.toml", "request * cells + cell", "request * cells + maximum(cell, 1) - 1", DECODE, "out"),
    ("mask.toml", "kv_lens - 1 - window_left", "kv_lens - window_left", NEEDLE, "out"),
    ("mask.toml", "i64 v_stride_dim", "i64 v_stride_dim - page_size", DECODE, "out"),
)  # fmt: skip
"""A file, text in it, what stands in its place, the case that goes red, and what it says."""


@pytest.mark.seeded_faults
@pytest.mark.parametrize(("file", "old", "new", "case", "says"), FAULTS)
def test_a_form_that_is_another_is_found(tmp_path: Path, file: str, old: str, new: str, case: str, says: str) -> None:
    (result,) = run_cases_of([engine_in(tmp_path, (file, old, new)) / file], [case])
    assert result.status == "failed", result
    told = [result.reason, *(one.operation for one in result.mismatches)]
    assert any(says in text for text in told), told


@pytest.mark.parametrize(
    ("change", "case", "status", "says"),
    [
        (("v_cache[page", "v_cache[page + 1", "others.cu"), PREP, "failed", "'v_pool' + "),
        (('"layer page head dim slot"', '"layer page head dim slot"\nstrides = { head = 3 }', "packed.toml"), PREP,
         "error", "packed.toml:15: the pool overlaps itself: one head is 3 elements"),
        (("dim/8 slot dim%8", "dim/24 slot dim%24", "packed.toml"), PREP, "not covered",
         "a pool with dim/24 needs a dim of a multiple of 24, got 256"),
        (("qkv[:, :num_qo_heads]", "qkv[:, :num_kv_heads]", "packed.toml"), PREP, "error", "results: q_out is ["),
        (('[entry.results]\nq_out', "[entry.results]\nk_out", "packed.toml"), PREP, "error",
         "results: 'k_out' is no output of the call; it has q_out"),
        (('axes = "layer page head dim slot"', 'axes = "layer page head dim slot"\noffsets = "int32"', "packed.toml"),
         PREP, "passed", ""),
    ],
)  # fmt: skip
def test_what_a_form_does_not_hold(
    tmp_path: Path, change: tuple[str, str, str], case: str, status: str, says: str
) -> None:
    old, new, file = change
    (result,) = run_cases_of([engine_in(tmp_path, (file, old, new)) / "packed.toml"], [case])
    told = [result.reason, *(one.operation for one in result.mismatches)]
    assert result.status == status, told
    assert not says or any(says in text for text in told), told


def test_a_store_into_a_gap_is_found(tmp_path: Path) -> None:
    folder = engine_in(tmp_path, ("kernels.cu", "v_pool[place] = ", "v_pool[place + 8] = "))
    manifest = folder / "kernels.toml"
    manifest.write_text(manifest.read_text().replace("[image.", GAPS, 1))
    (result,) = run_cases_of([manifest], [PREP])
    assert result.status == "failed"
    assert result.reason.startswith("pool_gap_write: "), result.reason
    assert "elements stored where pool has a gap, the first at element" in result.reason


def test_scratch_that_is_more_than_there_is_is_not_covered(tmp_path: Path) -> None:
    scratch = ("tokens.toml", "[[entry.launch]]", '[entry.workspace]\nspare = "f32 1 << 45"\n[[entry.launch]]')
    (result,) = run_cases_of([engine_in(tmp_path, scratch) / "tokens.toml"], [DECODE])
    assert result.status == "not covered", result
    assert result.reason.startswith("the host has not the memory for spare: 140737488355328 bytes asked"), result.reason


def test_a_pool_that_is_too_large_to_be_copied_is_not_covered(tmp_path: Path) -> None:
    (result,) = run_cases_of([engine_in(tmp_path) / "packed.toml"], ["prep/12b-local/decode/pool/past-uint32"])
    assert (result.status, "too many to be copied into the engine's form" in result.reason) == ("not covered", True)
