"""The contract's rules as a registry: each has cases, none can go without one turning red, no check is unexercised."""

from __future__ import annotations

import ast
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import g4kv_cli
from g4kv_cli.cases.reject.run import RejectCase, RejectRunner, reject_cases
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries
from g4kv_cli.errors import ContractError
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.rules import LAUNCH_RULES, RULES, Rule, launch_rule, rule, shown

PACKAGE = Path(g4kv_cli.__file__).parent
VALIDATION = sorted(
    str(path.relative_to(PACKAGE))
    for room in ("model", "entries")
    for path in (PACKAGE / room).glob("*.py")
    if ".require(" in path.read_text(encoding="utf-8") and path.name not in ("rules.py", "kv_pool.py")
)
"""Where requests of entries are checked. A pool's own fill and read (kv_pool) are no entries; test_api has them."""

CASES = reject_cases()


class CountingDevice(EmulatedDevice):
    """Memory as usual; a launch is counted and nothing else, so that no request can do harm here."""

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.launch_count += 1


class NoKernels(KernelLibrary):
    """Kernels that are named and never compiled."""

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        return LoadedKernel(symbol, image=None, handle=None)  # type: ignore[arg-type]


@pytest.fixture
def runner() -> Iterator[RejectRunner]:
    device, foreign = CountingDevice(), EmulatedDevice()
    runner = RejectRunner(NoKernels(device), foreign)
    yield runner
    device.close()
    foreign.close()


def test_codes_are_unique_words() -> None:
    both = RULES | LAUNCH_RULES
    assert len(both) == len(RULES) + len(LAUNCH_RULES)
    assert all(code == rule.code for code, rule in both.items())
    assert all(code.isidentifier() and code == code.lower() for code in both)
    sentences = Counter(rule.sentence for rule in both.values())
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def test_only_rule_require_raises_a_contract_error() -> None:
    """The registry is complete only if nothing beside it refuses requests."""
    devices = [f"device/{path.name}" for path in (PACKAGE / "device").glob("*.py")]
    assert {"device/validation.py", "device/cuda.py"} <= set(devices)
    raising = [
        name for name in (*VALIDATION, *devices) if "ContractError(" in (PACKAGE / name).read_text(encoding="utf-8")
    ]
    assert raising == []


def test_every_rule_has_a_rejected_case_and_a_twin() -> None:
    by_rule = Counter(case.rule for case in CASES)
    assert sorted(by_rule) == sorted(RULES)
    # A case without a twin of its own has the unchanged request as its twin: the runner launches one for each.
    assert all(callable(case.spoiled.twin) or case.spoiled.twin is None for case in CASES)


def test_the_catalogue_is_as_large_as_was_asked_for() -> None:
    assert len(CASES) >= 150
    assert len(trap_cases()) >= 24
    ids = [case.id for case in [*CASES, *trap_cases()]]
    assert len(set(ids)) == len(ids)
    assert all(len(case_id.split("/")) == 4 for case_id in ids)


def test_every_entry_has_cases() -> None:
    assert {case.entry for case in CASES} == {entry.name for entry in entries()}
    # The attention kernels have no traps: the host is their only defence.
    assert {case.entry for case in trap_cases()} == {entry.name for entry in entries("prep")}


@pytest.fixture(scope="module")
def refusals() -> Iterator[list[tuple[RejectCase, ContractError]]]:
    """The error of every case."""
    device, foreign = CountingDevice(), EmulatedDevice()
    runner = RejectRunner(NoKernels(device), foreign)
    yield [(case, _refusal(case, runner)) for case in CASES]
    device.close()
    foreign.close()


def test_what_was_given_is_never_what_is_wanted(refusals: list[tuple[RejectCase, ContractError]]) -> None:
    """An error that says the same of both, or nothing of one, cannot be acted on."""
    told = [(case.id, str(error.got), str(error.want)) for case, error in refusals]
    assert [one for one in told if one[1] == one[2] or not one[1] or not one[2]] == []


def test_a_code_is_declared_once() -> None:
    with pytest.raises(ValueError, match="rule eps is declared twice"):
        rule("eps", "is another rule of the same code")
    with pytest.raises(ValueError, match="rule eps is declared twice"):
        launch_rule("eps", "is a rule of launches of the same code")
    with pytest.raises(ValueError, match="rule launch_grid is declared twice"):
        rule("launch_grid", "is a rule of launches already")


@pytest.mark.filterwarnings("ignore:divide by zero")  # of a tile of 0 rows, which nothing refuses then
@pytest.mark.parametrize("code", sorted(RULES))
def test_a_case_turns_red_without_the_rule(code: str, runner: RejectRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    require = Rule.require

    def without_one(self: Rule, holds: bool, field: str, got: object, want: object) -> None:
        if self.code != code:
            require(self, holds, field, got, want)

    cases = [case for case in CASES if case.rule == code]
    assert runner.refuse(cases[0], runner.bench_of(cases[0])) == []
    monkeypatch.setattr(Rule, "require", without_one)
    # The first red one is enough; those after it might ask for memory that no machine has.
    assert any(runner.refuse(case, runner.bench_of(case)) for case in cases)


def test_every_check_is_seen_rejecting(refusals: list[tuple[RejectCase, ContractError]]) -> None:
    """Every call of a rule, and of a helper that holds rules, lies on the way to some case's error."""
    seen = {line for _, error in refusals for line in _lines_of(error)}
    sites = {(name, line): text for name in VALIDATION for line, text in _check_sites(name)}
    assert len(sites) > 100
    assert [f"{name}:{line} {text}" for (name, line), text in sites.items() if (name, line) not in seen] == []


def _refusal(case: RejectCase, runner: RejectRunner) -> ContractError:
    draft = runner.bench_of(case).draft()
    try:
        case.spoiled.change(draft)
        draft.call()
    except ContractError as error:
        return error
    finally:
        draft.release()
    pytest.fail(f"{case.id} was accepted")


def _lines_of(error: ContractError) -> set[tuple[str, int]]:
    """(module, line) of every frame of the validation code on the way to the error."""
    return {
        (str(Path(frame.filename).relative_to(PACKAGE)), frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(PACKAGE)
    }


def _check_sites(name: str) -> Iterator[tuple[int, str]]:
    """Line and text of every call that can refuse a request, from the syntax tree."""
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _can_refuse(node.func):
            yield node.lineno, ast.unparse(node)[:80]


def _can_refuse(called: ast.expr) -> bool:
    """A rule's require, or a helper of the validation code by its name."""
    if isinstance(called, ast.Attribute):
        return called.attr == "require"
    return isinstance(called, ast.Name) and called.id.startswith(("require_", "product_", "check_"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**400, "an integer of 1329 bits"),
        (-(2**40), "-1099511627776"),
        ("x" * 200, "x" * 120 + "..."),
        (None, "None"),
        ([0] * 3, "[0, 0, 0]"),
    ],
)
def test_what_was_given_is_shown_in_a_line(value: object, text: str) -> None:
    with pytest.raises(ContractError) as caught:
        RULES["integer"].require(False, "field", value, "int")
    assert str(caught.value) == f"field: must be an integer (got {text}, want int) [integer]"
    assert str(shown(value)) == text


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=lambda geometry: geometry.name)
def test_what_counts_heads_is_refused_at_every_models_heads(geometry: Geometry, runner: RejectRunner) -> None:
    of_heads = {"plan_heads", "kv_heads", "gqa_group", "q_heads_multiple", "plan_tile", "capacity", "workspace"}
    cases = [case for case in reject_cases([geometry]) if case.rule in of_heads]
    assert {case.rule for case in cases} == of_heads
    wrong = {case.id: found for case in cases if (found := runner.refuse(case, runner.bench_of(case)))}
    assert wrong == {}
