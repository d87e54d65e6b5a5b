"""The serving loop: its scheduler by arithmetic, a run on the emulated device, and a rule of the release broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from smoke_helper import smoke

import g4kv_cli.cases.serve.table as serve
from g4kv_cli.cases.serve import run as serve_run
from g4kv_cli.cases.serve.page_allocator import PageAllocator
from g4kv_cli.cases.serve.run import run_serve_case
from g4kv_cli.cases.serve.table import ServeCase, serve_cases, serving_steps
from g4kv_cli.cases.session import Session
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import BF16, bits

CASES = [case for geometry in GEOMETRIES.values() for case in serve_cases(geometry, seed=1)]


# --- the allocator ------------------------------------------------------------------------------------------------


def test_pages_go_lowest_first_and_reserved_ones_never() -> None:
    pages = PageAllocator(4, reserved=1)
    assert [pages.take(7) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UsageError, match="no page is free for request 7"):
        pages.take(7)
    pages.give_back(2, 7)
    assert (pages.recycled, pages.take(8), pages.recycled) == (0, 2, 1)
    pages.give_back(2, 8)
    assert (pages.take(8), pages.recycled, pages.high_water) == (2, 1, 4)


def test_a_page_is_given_back_by_its_owner_once() -> None:
    pages = PageAllocator(4, reserved=1)
    page = pages.take(0)
    with pytest.raises(ValueError, match="request 1 does not hold page 1"):
        pages.give_back(page, 1)
    pages.give_back(page, 0)
    with pytest.raises(ValueError, match="request 0 does not hold page 1"):
        pages.give_back(page, 0)
    with pytest.raises(ValueError, match="leave none to hand out"):
        PageAllocator(1, reserved=1)


# --- the scheduler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_token_is_computed_once_in_order_on_pages_of_its_own(case: ServeCase, release: bool) -> None:
    script = serving_steps(case, release=release)
    done = [request.cached for request in case.requests]
    owner: dict[int, int] = {}
    for step in script.steps:
        for page in step.released:
            del owner[page]
        for work in (*step.cached, *step.prefill, *step.decode):
            assert work.kv.start_pos == done[work.request]
            done[work.request] += work.kv.q_len
            assert len(work.kv.pages) == -(-work.kv.kv_len // case.page_size) - work.kv.origin
            for page in work.kv.pages:
                assert 1 <= page < script.num_pages  # page 0 is the padding rows'
                assert owner.setdefault(page, work.request) == work.request
        for page in step.ended:
            del owner[page]
    assert done == [request.total for request in case.requests]
    assert not owner


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_happens_on_the_way(case: ServeCase) -> None:
    script, keeping = (serving_steps(case, release=release) for release in (True, False))
    window = case.geometry.window
    assert script.recycled >= 1  # a page changes hands
    assert any(len(step.decode) >= 2 for step in script.steps)
    assert any(step.prefill and step.decode for step in script.steps)
    assert any(work.kv.q_len == 0 for step in script.steps for work in step.prefill)
    if window is None:
        assert not any(step.released for step in script.steps)
    else:
        assert any(step.released for step in script.steps)
        assert not any(step.released for step in keeping.steps)
        assert script.num_pages < keeping.num_pages
        # The window's edge is crossed inside a chunk, and again token by token.
        works = [work.kv for step in script.steps for work in step.prefill]
        assert any(kv.start_pos < window < kv.kv_len for kv in works)
        assert sum(work.kv.kv_len > window for step in script.steps for work in step.decode) >= 6


def test_pages_go_by_the_release_rule() -> None:
    """Page p goes when (p + 1) * page_size + window <= frontier: by hand, pages of 8, window 48."""
    case = next(case for case in CASES if case.id == "serve/12b-local/interleaved")
    script = serving_steps(case, release=True)
    origins = {work.kv.start_pos: work.kv.origin for step in script.steps for work in step.decode if work.request == 0}
    assert origins == {position: (position - 48) // 8 for position in range(58, 72)}


# --- on the device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["e2b-local", "e2b-global"])
def test_a_serving_run_is_green(geometry: str, tmp_path: Path) -> None:
    code, record = smoke(tmp_path / "run.json", "--case", f"serve/{geometry}/*")
    assert code == 0
    assert record["summary"]["passed"] == len(record["cases"]) >= 1


def test_a_page_released_too_early_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_page_early(frontier: int, window: int | None, page_size: int) -> int:
        return 0 if window is None else max(0, frontier - window + page_size) // page_size

    monkeypatch.setattr(serve, "page_origin", one_page_early)
    code, _ = smoke(tmp_path / "run.json", "--case", "serve/e2b-local/interleaved")
    assert code == 2  # the plan refuses a row of pages that begins behind what its queries see
    assert "page_origin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("label", "element", "operation"),
    [
        ("q_out", 0, "q_out"),
        ("out", 0, "): out"),
        ("pool", -1, "V in the pool after step 0"),
    ],
)
def test_one_wrong_element_of_a_step_is_seen(
    label: str, element: int, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = EmulatedDevice("sm_90")
    read = device.read

    def changed(array: Any) -> Any:
        values = read(array).copy()
        if array.label == label:
            bits(values).reshape(-1)[element] ^= 0x4000
        return values

    monkeypatch.setattr(device, "read", changed)
    monkeypatch.setattr(device, "inspect", changed)
    case = next(iter(serve_cases(GEOMETRIES["e2b-local"], seed=1)))
    result = run_serve_case(case, KernelLibrary(device), "")
    assert result.status == "failed"
    assert result.mismatches[0].operation.endswith(operation)


@pytest.mark.parametrize("differs", [False, True])
def test_other_bits_without_released_pages_are_seen(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pass:
        """One of the two passes, which leaves the outputs of a step."""

        def __init__(self, session: serve_run.ServeSession, *, release: bool) -> None:
            self.session, self.release = session, release

        def run(self) -> None:
            out = np.ones((2, 8, 256), BF16)
            bits(out)[1, 7, 255] ^= differs and not self.release
            self.session.outputs[3, "decode", 1] = out

    monkeypatch.setattr(serve_run, "_Run", Pass)
    case = next(iter(serve_cases(GEOMETRIES["e2b-local"], seed=1)))
    result = run_serve_case(case, KernelLibrary(EmulatedDevice("sm_90")), "")
    found = [one.operation for one in result.mismatches]
    assert found == (["step 3, decode: out without and with released pages, request 1"] if differs else [])
    assert result.status == ("failed" if differs else "passed")


def test_what_is_given_back_is_poison_on_both_sides() -> None:
    device = EmulatedDevice("sm_90")
    case = next(iter(serve_cases(GEOMETRIES["e2b-local"], seed=1)))
    run = serve_run._Run(serve_run.ServeSession(library=KernelLibrary(device), case=case), release=True)
    for block in run.blocks:
        block[2:4] = 1
    for page in (2, 3):
        run._write_page(page)
    run._poison([2])
    held = run.image.blocks(device.read(run.pool.data))
    for ours, theirs in zip(run.blocks, held, strict=True):
        for block in (ours, theirs):
            assert (bits(block[2]) == 0xFFFF).all()
            assert (block[3] == 1).all()


@pytest.mark.parametrize("differs", [False, True])
def test_bits_of_decode_that_overlaps_prep_are_compared(differs: bool) -> None:
    calls: list[tuple[str, Any]] = []
    first = np.ones((1, 8, 256), BF16)
    second = first.copy()
    bits(second)[0, 3, 9] ^= differs
    reads = iter((first, second))
    device = SimpleNamespace(
        read=lambda array: next(reads),
        write=lambda array, values: calls.append(("write", values)),
        fill=lambda array, byte: calls.append(("fill", (array, byte))),
    )

    def entry(name: str) -> Any:
        return lambda library, **arguments: calls.append((name, arguments.get("enable_pdl", False)))

    session = Session(KernelLibrary(EmulatedDevice("sm_90")))
    run: Any = SimpleNamespace(session=session, device=device, pool=SimpleNamespace(data="pool"))
    prep = serve_run._Launched(entry("prep"), {"q_out": "q_out"})
    attention = serve_run._Launched(entry("attention"), {"out": "out"})
    rows: Any = SimpleNamespace(count=1)
    serve_run._Run._compare_overlapped(run, "step 0", prep, attention, "before", rows)
    poisoned = [("fill", (name, 0xFF)) for name in ("q_out", "out")]
    assert calls == [("write", "before"), *poisoned, ("prep", False), ("attention", True)]
    assert [one.operation for one in session.mismatches] == (["step 0"] if differs else [])
