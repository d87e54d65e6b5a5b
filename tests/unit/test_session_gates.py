"""What a case needs is asked before anything is built for it; how many processes run follows from what there is."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention import run as attention_run
from g4kv_cli.cases.attention.table import attention_cases
from g4kv_cli.cases.prep import pool as prep_pool
from g4kv_cli.cases.prep import run as prep_run
from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.cases.prep.table import prep_cases
from g4kv_cli.cases.run import CaseRunner, RunSettings
from g4kv_cli.cases.session import Session, Skip, require_coverage, run_session
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.commands.gate import _jobs, exit_code_of_results
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.contract import NO_PAGE_ORIGIN, STRICT
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.entries.table import decode_entries
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.pool_order import OWN_ORDER
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.records.run import CaseResult, Mismatch, Status

LOCAL = GEOMETRIES["12b-local"]


class NoOrigins:
    """A provider whose rows of pages begin at a request's first."""

    name, pool_order = "a test", OWN_ORDER

    def contract_of(self, _entry: str) -> Any:
        return dataclasses.replace(STRICT, page_origin=False)

    def launch(self, _request: Any) -> None:
        raise AssertionError("nothing may be launched")


def _nothing(*_arguments: Any, **_named: Any) -> Any:
    raise AssertionError("nothing may be built")


@pytest.fixture
def small_gpu() -> EmulatedDevice:
    """A device that says it is a GPU of 1 GiB."""
    device = EmulatedDevice("sm_90", "a test")
    device.info = dataclasses.replace(device.info, kind="cuda")
    device.limits = dataclasses.replace(device.limits, memory_bytes=1 << 30)
    return device


CASES = [
    (attention_run.run_attention_case, attention_run, ("prepared", "recorded_tensors", "expected_attention"),
     attention_cases(LOCAL, seed=1)),
    (prep_run.run_prep_case, prep_run, ("build_problem",), prep_cases(LOCAL)),
]  # fmt: skip


@pytest.mark.parametrize(("run", "module", "builders", "cases"), CASES, ids=["attention", "prep"])
def test_what_is_not_covered_is_known_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, run: Any, module: Any, builders: tuple[str, ...], cases: list[Any]
) -> None:
    for name in builders:
        monkeypatch.setattr(module, name, _nothing)

    def begins_late(case: Any) -> bool:
        if isinstance(getattr(case, "requests", None), tuple) and case.requests and hasattr(case.requests[0], "origin"):
            return any(request.origin for request in case.requests)
        return getattr(case, "placement", None) is not None and any(case.placement.origins)

    case = next(case for case in cases if begins_late(case))
    library = KernelLibrary(EmulatedDevice("sm_90", "a test"), provider=NoOrigins())  # type: ignore[arg-type]
    result = run(case, library, "")
    assert (result.status, result.reason) == ("not covered", NO_PAGE_ORIGIN)


@pytest.mark.parametrize(("run", "module", "builders", "cases"), CASES, ids=["attention", "prep"])
def test_a_pool_that_a_gpu_lacks_the_memory_for_is_known_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, small_gpu: EmulatedDevice, run: Any, module: Any, builders: tuple[str, ...],
    cases: list[Any],
) -> None:  # fmt: skip
    for name in builders:
        monkeypatch.setattr(module, name, _nothing)
    case = next(case for case in cases if case.is_sparse and case.pool_bytes > 1 << 30)
    result = run(case, KernelLibrary(small_gpu), "")
    assert result.status == "skipped"
    assert result.reason == f"the pool takes {case.pool_bytes / 2**30:.1f} GiB, this GPU has 1.0 GiB"


def test_a_pool_as_large_as_a_gpus_memory_is_tried(small_gpu: EmulatedDevice) -> None:
    case: Any = SimpleNamespace(entry=prep_cases(LOCAL)[0].entry, is_sparse=True, pool_bytes=1 << 30)
    require_coverage(KernelLibrary(small_gpu), case, ())
    case.pool_bytes += 1
    with pytest.raises(Skip, match=r"the pool takes 1\.0 GiB, this GPU has 1\.0 GiB"):
        require_coverage(KernelLibrary(small_gpu), case, ())


def test_jobs_are_no_more_than_can_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2}, raising=False)
    traps = trap_cases()[:4]
    others = prep_cases(LOCAL)[:9]
    assert [_jobs(asked, "emulated", others) for asked in (None, 1, 3, 1000)] == [2, 1, 3, 3]
    assert [_jobs(asked, "cuda", [*others, *traps]) for asked in (None, 2, 1000)] == [3, 2, 4]
    assert _jobs(1000, "cuda", others) == 1


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("passed", "skipped", "not covered"), 0),
        (("passed", "failed"), 1),
        (("error", "failed", "passed"), 1),
        (("error", "passed"), 2),
        (("skipped",), 2),
        (("not covered", "skipped"), 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_that_happened(statuses: tuple[Status, ...], code: int) -> None:
    assert exit_code_of_results([CaseThat(status).run(None) for status in statuses]) == code


def test_limits_of_cases_are_said_once() -> None:
    package = Path(prep_run.__file__).parents[2]
    for name in ("MAX_SPAN", "SPARSE_POOL_BYTES", "MAX_PAGE_SIZE_TOKENS", "NO_PAGE_ORIGIN"):
        texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
        assert sum(f"\n{name} = " in text for text in texts) == 1, name


def test_one_finding_fails_a_case_which_names_its_own_kernels_alone() -> None:
    case, library = prep_cases(LOCAL)[0], KernelLibrary(EmulatedDevice("sm_90", "a test"))
    place = {"dim": 0}
    wrong = Mismatch("out", 1, 2, place, "1", "2", place, "1", "2", "exact")
    library.launched["of_the_case_before"] = None
    result = run_session(case, "", library, lambda: Session(library), lambda session: session.found(wrong))
    assert (result.status, result.mismatches, result.kernels) == ("failed", (wrong,), ())
    result = run_session(case, "", library, lambda: Session(library), lambda session: session.found(None))
    assert (result.status, result.mismatches) == ("passed", ())


def test_outputs_are_poison_before_a_call() -> None:
    library = KernelLibrary(EmulatedDevice("sm_90", "a test"))
    for dtype in (BF16, np.float32):
        held = library.device.read(Session(library).poisoned((3, 2), "out", dtype))
        assert set(held.view(np.uint8).reshape(-1).tolist()) == {0xFF}


def test_a_promise_is_one_of_all_kernels_at_hand() -> None:
    class Half(NoOrigins):
        def contract_of(self, entry: str) -> Any:
            return dataclasses.replace(STRICT, batch_invariant="split" not in entry)

    library = KernelLibrary(EmulatedDevice("sm_90", "a test"), provider=Half())
    forms = decode_entries(LOCAL)
    session = Session(library)
    assert session.promises("batch_invariant", [form for form in forms if not form.takes_splits])
    assert not session.left_out
    assert not session.promises("batch_invariant", forms)
    assert list(session.left_out) == ["batch_invariant = false: those bits are not compared"]


@dataclasses.dataclass
class CaseThat:
    """A case that ends in a known way."""

    status: Status
    reason: str = ""
    id, entry, geometry, weight, traps = "a/case", "an_entry", LOCAL, 1.0, False

    def run(self, _context: Any) -> CaseResult:
        return CaseResult(self.id, self.entry, LOCAL.name, self.status, 0.0, self.reason)


def test_behind_a_fault_the_next_case_has_a_fresh_device() -> None:
    runner = CaseRunner(RunSettings("emulated:sm_90", None, ()))
    device = runner._context.library.device
    for case in (CaseThat("passed"), CaseThat("failed"), CaseThat("error", "no memory"), CaseThat("skipped", "no GPU")):
        runner.run(case)  # type: ignore[arg-type]
        assert runner._context.library.device is device, case
    runner.run(CaseThat("failed", "trap at prep.cu:3"))  # type: ignore[arg-type]
    assert runner._context.library.device is not device
    runner.close()


class Recording:
    """A device of one pool that says what kernels stored to (``written``, bytes), or nothing of it (None)."""

    info = SimpleNamespace(kind="emulated")

    def __init__(self, content: Any, written: list[tuple[int, int]] | None) -> None:
        self.content, self.written = content, written

    def synchronize(self) -> None: ...

    def written_ranges(self, _pool: Any) -> Any:
        return None if self.written is None else np.array(sorted(self.written), np.int64).reshape(-1, 2)

    def view(self, shape: tuple[int, ...], *, offset_elems: int) -> Any:
        return self.content[offset_elems : offset_elems + shape[0]]

    def read(self, array: Any) -> Any:
        return array.copy()


@pytest.mark.parametrize("records_stores", [True, False])
def test_a_store_beside_the_rows_of_a_pool_that_is_never_whole_on_the_host(
    records_stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrepCase, "is_sparse", True)
    monkeypatch.setattr(prep_pool, "_READ_CHUNK_BYTES", 1 << 20)
    case = next(case for case in prep_cases(LOCAL) if case.placement and len(case.positions) == 2)
    check = prep_pool.PoolCheck(case, case.placement)
    flat = np.full(check.image.elements, 0xFFFF, np.uint16)
    for block in check.image.blocks(flat):
        block[check.pages, case.placement.layer, check.slots] = 0x3F80
    edges = 2 * np.flatnonzero(np.diff(flat == 0xFFFF, prepend=True, append=True))
    stores = [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def read(stray: int | None) -> prep_pool.Stored:
        content, written = flat.copy(), list(stores)
        if stray is not None:
            content[stray] = 0
            written.append((2 * stray, 2 * stray + 2))
        device = Recording(content.view(BF16), written if records_stores else None)
        return check.read(device, device)  # type: ignore[arg-type]

    assert read(None).untouched == ()
    assert (read(None).k == 1).all()
    numbers = check.image.blocks(np.arange(flat.size))
    for kv, stray in enumerate(int(one[flat[one] == 0xFFFF][-1]) for one in numbers):
        place = np.argwhere(numbers[kv] == stray)[0].tolist()
        (found,) = read(stray).untouched
        assert (found.operation[0], found.count) == ("KV"[kv], 1)
        assert found.first == dict(zip(("page", "layer", "slot", "head", "dim"), place, strict=True))
    if records_stores:  # a row that nobody stored to is poison, whatever stands there
        stores.clear()
        assert np.isnan(read(None).v.astype(np.float32)).all()


@pytest.mark.parametrize("label", ["q_out of the contiguous form", "k_out of the contiguous form"])
def test_the_paged_form_is_held_against_the_contiguous_ones_bits(label: str) -> None:
    case = next(case for case in prep_cases(LOCAL) if getattr(case, "against_contiguous", False))
    device = EmulatedDevice("sm_90", "a test")
    read = device.read

    def one_off(array: Any) -> Any:
        values = read(array)
        if array.label == label:
            values = values.copy()
            bits(values)[0, 0, 0] ^= 1
        return values

    device.read = one_off  # type: ignore[method-assign]
    result = prep_run.run_prep_case(case, KernelLibrary(device), "")
    what = "q_out" if label.startswith("q") else "K in the pool"
    assert [one.operation for one in result.mismatches] == [f"{what} against the contiguous form"]


def test_padding_rows_alone_are_not_compared() -> None:
    padded = [case for case in prep_cases(LOCAL) if case.placement and case.placement.padding_page is not None]
    assert padded
    for case in padded:
        pages, _ = case.page_and_slot()
        kept = prep_pool.PoolCheck(case, case.placement).compared_tokens.tolist()
        assert kept == [token for token, page in enumerate(pages) if page != case.placement.padding_page]
        assert 0 < len(kept) < len(pages)


def test_what_was_wrong_before_the_part_that_is_not_covered_stays_wrong() -> None:
    case, library = prep_cases(LOCAL)[0], KernelLibrary(EmulatedDevice("sm_90", "a test"))
    place = {"dim": 0}
    wrong = Mismatch("out", 1, 2, place, "1", "2", place, "1", "2", "exact")

    def in_part(session: Session) -> None:
        session.found(wrong)
        raise NotCovered("no such form")

    def nothing(_session: Session) -> None:
        raise NotCovered("no such form")

    result = run_session(case, "", library, lambda: Session(library), in_part)
    assert (result.status, result.mismatches, result.left_out) == ("failed", (wrong,), ("no such form",))
    result = run_session(case, "", library, lambda: Session(library), nothing)
    assert (result.status, result.reason, result.left_out) == ("not covered", "no such form", ())
