"""The replay's own arithmetic, judgement and page keeping, without a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from g4kv_cli.cases.e2e.caches import FamilyCache, PageList
from g4kv_cli.cases.e2e.every import end_to_end_cases, is_end_to_end
from g4kv_cli.cases.e2e.host_model import embed, finish_layer, logits_of, project
from g4kv_cli.cases.e2e.judge import compare_runs, judge_logits, judge_token, non_finite
from g4kv_cli.cases.e2e.localise import relative_rms
from g4kv_cli.cases.e2e.model_reader import read_model
from g4kv_cli.cases.e2e.recorded_model import RecordedModel
from g4kv_cli.cases.e2e.reference import reference_logits
from g4kv_cli.cases.e2e.replay import companions_of
from g4kv_cli.cases.e2e.table import replay_cases
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.table import decode_forms
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import BF16

MODELS = Path(__file__).resolve().parent.parent / "golden" / "greedy"
NAMES = ("12b_p7", "31b_p40", "e4b_p23")


@pytest.fixture(scope="module")
def e4b() -> RecordedModel:
    return read_model(MODELS / "e4b_p23.npz")


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("emulated")
    yield opened
    opened.close()


# --- formulas, against what another implementation recorded --------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_recorded_float32_run(name: str) -> None:
    model = read_model(MODELS / f"{name}.npz")
    prompt = len(model.prompt)
    logits = reference_logits(model, np.concatenate([model.prompt, model.tokens[:-1]]))
    assert np.abs(logits[:prompt] - model.prompt_logits).max() < 1e-4
    assert np.abs(logits[prompt - 1 :] - model.logits).max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_host_part_follows_the_recorded_stream(name: str) -> None:
    """Raw projections of recorded streams are the traced ones, and the traced attention leads to the next stream."""
    model = read_model(MODELS / f"{name}.npz")
    for step in model.trace_steps:
        row = len(model.prompt) - 1 + step
        for number, layer in enumerate(model.layers):
            stream, trace = model.hidden[row : row + 1, number], model.traces[step, number]
            raw = project(layer, stream)
            assert (raw.v is None) == layer.geometry.k_eq_v == ("v_raw" not in trace)
            for part, got in (("q_raw", raw.q), ("k_raw", raw.k), ("v_raw", raw.v)):
                if got is not None:
                    assert relative_rms(got[0], trace[part]) < 0.005, (step, number, part)
            after = finish_layer(layer, stream, trace["attn"][None])
            assert relative_rms(after[0], model.hidden[row, number + 1]) < 0.01, (step, number)


def test_embedding_and_head(e4b: RecordedModel) -> None:
    assert relative_rms(embed(e4b, e4b.prompt), e4b.hidden[: len(e4b.prompt), 0]) < 0.005
    logits = logits_of(e4b, e4b.hidden[: len(e4b.prompt), -1])
    assert np.abs(logits - e4b.prompt_logits).max() < e4b.max_limit
    assert np.abs(logits_of(e4b, np.full((1, 32), 1e4, np.float32))).max() <= 30


# --- rule B ----------------------------------------------------------------------------------------------------------


def test_recorded_logits_pass(e4b: RecordedModel) -> None:
    assert judge_logits(e4b, "logits", e4b.prompt_logits.copy(), e4b.prompt_logits, 0, 0) is None
    assert judge_token(3, 26, 5, 5) is None


def test_one_element_past_the_largest_error(e4b: RecordedModel) -> None:
    got = e4b.prompt_logits.astype(np.float64)
    got[4, 17] += 0.999 * e4b.max_limit
    assert judge_logits(e4b, "logits", got.astype(np.float32), e4b.prompt_logits, 0, 0) is None
    got[4, 17] = e4b.prompt_logits[4, 17] - 1.001 * e4b.max_limit
    found = judge_logits(e4b, "logits", got.astype(np.float32), e4b.prompt_logits, 0, 0)
    assert found is not None
    assert (found.count, found.total) == (1, 23 * 128)
    assert found.first == found.worst == {"step": 0, "position": 4, "token_id": 17}
    assert "(rule B)" in found.limit


def test_a_row_past_the_root_mean_square_alone(e4b: RecordedModel) -> None:
    want = e4b.logits[7:8]
    signs = np.where(np.arange(128) % 2, 1, -1)
    assert 1.01 * e4b.rms_limit < e4b.max_limit
    assert judge_logits(e4b, "logits", want + np.float32(0.99 * e4b.rms_limit) * signs, want, 30, 7) is None
    found = judge_logits(e4b, "logits", want + np.float32(1.01 * e4b.rms_limit) * signs, want, 29, 7)
    assert found is not None
    assert found.count == 128
    assert found.first == {"step": 7, "position": 29, "token_id": 0}


def test_what_is_no_number_is_never_within(e4b: RecordedModel) -> None:
    got = e4b.logits[:1].copy()
    got[0, 3] = np.nan
    found = judge_logits(e4b, "logits", got, e4b.logits[:1], 22, 0)
    assert found is not None
    assert relative_rms(got, e4b.logits[:1]) == np.inf
    assert non_finite(2, "a request", 1, 24, 5).first == {"step": 2, "layer": 1, "token": 24, "dim": 5}


def test_another_token(e4b: RecordedModel) -> None:
    found = judge_token(3, 26, 5, 6)
    assert found is not None
    assert (found.first, found.first_got, found.first_want) == ({"step": 3, "position": 26}, "5", "6")


def test_two_runs_agree_in_every_bit_or_not(e4b: RecordedModel) -> None:
    one = [e4b.prompt_logits, e4b.logits[1:2]]
    other = [e4b.prompt_logits.copy(), e4b.logits[1:2].copy()]
    assert compare_runs(one, other, "") is None
    other[1][0, 9] = np.nextafter(other[1][0, 9], np.float32(np.inf))
    found = compare_runs(one, other, "a note")
    assert found is not None
    assert found.first == {"step": 1, "row": 0, "token_id": 9}
    assert (found.count, found.limit, found.note) == (1, "bit-equal", "a note")


# --- pages -----------------------------------------------------------------------------------------------------------


def _cache(device: Device, **changed: int) -> FamilyCache:
    geometry = dataclasses.replace(GEOMETRIES["e4b-local"], window=16, num_kv_heads=1, num_qo_heads=1)
    sizes = {"num_layers": 1, "page_size": 16, "context_tokens": 96, "step_tokens": 1, "num_requests": 2} | changed
    return FamilyCache(device, geometry, seed=3, **sizes)


def _is_poison(cache: FamilyCache, page: int) -> bool:
    stride = cache.pool.layout.page_stride
    rows = cache.device.read(cache.pool.data.view((stride,), offset_elems=page * stride))
    return bool((rows.view(np.uint16) == 0xFFFF).all())


def test_a_front_is_released_poisoned_and_recycled(device: Device) -> None:
    cache = _cache(device)
    # 16 keys of window and pages of 16 slots: a request holds two pages at most, and one is for padding rows.
    assert cache.num_pages == 2 * 2 + 1
    held, other = PageList(1), PageList(2)
    cache.extend(held, 32)
    assert len(held.pages) == 2
    assert cache.padding_page not in held.pages
    first = held.pages[0]
    stride = cache.pool.layout.page_stride
    device.write(cache.pool.data.view((stride,), offset_elems=first * stride), np.ones(stride, BF16))
    cache.release_front(held, 31)
    assert (held.origin, held.pages[0]) == (0, first)
    assert not _is_poison(cache, first)
    # (0 + 1) * 16 + 16 <= 32: the query at 32 sees keys 17 .. 32, all of them in pages 1 and 2.
    cache.release_front(held, 32)
    assert held.origin == 1
    assert first not in held.pages
    assert _is_poison(cache, first)
    cache.extend(held, 33)
    cache.extend(other, 32)
    assert first in held.pages + other.pages
    with pytest.raises(UsageError, match="no page is free"):
        cache.extend(other, 33)
    cache.release_all(other)
    cache.extend(held, 49)
    assert len(held.pages) == 3


def test_pages_stand_in_no_order(device: Device) -> None:
    cache = _cache(device, num_requests=8)
    held = PageList(1)
    cache.extend(held, 256)
    steps = np.diff(held.pages)
    assert len(set(held.pages)) == 16
    assert not (steps == 1).all()
    assert (steps < 0).any()


@pytest.mark.parametrize("num_requests", [1, 3, 64])
def test_one_page_is_reserved_whatever_the_bucket(num_requests: int, device: Device) -> None:
    cache = _cache(device, num_requests=num_requests)
    held = [PageList(number) for number in range(num_requests)]
    for one in held:
        cache.extend(one, 32)
    pages = [page for one in held for page in one.pages]
    # Every page but the padding page is handed out.
    assert sorted([*pages, cache.padding_page]) == list(range(cache.num_pages))


def test_plan_requests_count_what_is_resident(device: Device) -> None:
    request = _cache(device).plan_request(PageList(1, 2, [7, 4]), start_pos=50, q_len=3)
    # Pages 2 and 3 hold positions 32 .. 63; 53 tokens end 5 into page 3.
    assert (request.page_origin, tuple(request.page_indices), request.last_page_len) == (2, (7, 4), 5)


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_way_of_serving_has_its_cases() -> None:
    cases = {case.id: case for case in replay_cases(MODELS)}
    for name in NAMES:
        mine = {case_id.split("/", 2)[2]: case for case_id, case in cases.items() if case_id.startswith(f"e2e/{name}/")}
        settings = [case.settings for case in mine.values()]
        assert mine["default"].steps == 48
        assert {one.prefill_chunk for one in settings} == {0, 1, 5, 16}
        assert {one.decode_form for one in settings} == {form.label for form in decode_forms()}
        for form in decode_forms():
            splits = {one.num_splits for one in settings if one.decode_form == form.label}
            assert len(splits) >= (3 if form.takes_splits else 1)
        assert {one.page_size for one in settings} == {1, 16, 64}
        batches = [case for case in mine.values() if case.companions]
        folds = name != "e4b_p23"
        assert sorted(case.companions for case in batches) == ([1, 2, 2] if folds else [1, 2])
        formats = [case_id.split("/")[0] == case.settings.kv_format for case_id, case in mine.items()]
        assert sum(formats) == (3 if folds else 0) == sum(one.kv_format == "folded" for one in settings)
        assert all(case.settings.bucket_width == 4 > case.companions + 1 for case in batches)
    assert len(cases["e2e/turns/12b_p7+31b_p40+e4b_p23"].paths) == 3
    assert all(is_end_to_end(case_id) for case_id in cases)
    assert not is_end_to_end("prep/12b-local/decode/closed-form")


def test_one_file_has_no_turns_and_far_walks_need_none() -> None:
    ids = [case.id for case in end_to_end_cases(MODELS / "12b_p7.npz")]
    assert not any("/turns/" in case_id for case_id in ids)
    assert sum(case_id.startswith("e2e/far/") for case_id in ids) == 8


def test_companions_come_and_go(e4b: RecordedModel) -> None:
    for count in (1, 2):
        companions = companions_of(e4b, count, 32)
        assert all(0 < one.joins < one.leaves <= 32 for one in companions)
        for step in range(32):
            assert sum(one.joins <= step < one.leaves for one in companions) <= count
        assert len({one.leaves for one in companions}) > 1
        prompts = [one.prompt.tolist() for one in companions]
        assert all(prompt != other for index, prompt in enumerate(prompts) for other in prompts[:index])
    assert companions_of(e4b, 0, 32) == ()


@pytest.mark.parametrize(("got", "want", "is_wrong"), [(4, 4, False), (5, 4, True), (4, 5, True)])
def test_any_other_token_is_wrong(got: int, want: int, is_wrong: bool) -> None:
    assert (judge_token(0, 1, got, want) is not None) == is_wrong
