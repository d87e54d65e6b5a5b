"""A geometry is a line of model/geometry.py: one of a single family is known everywhere, and moves no other's cases."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import MappingProxyType

import pytest
from click.testing import CliRunner

from g4kv_cli.bench.run import Request, make_plan
from g4kv_cli.cases import gate
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.commands.layout import layout
from g4kv_cli.commands.reject import reject
from g4kv_cli.commands.smoke import smoke
from g4kv_cli.entries.table import entries_for
from g4kv_cli.model import geometry as registry
from g4kv_cli.model.geometry import GEOMETRIES, Geometry, model_families, select_geometries
from g4kv_cli.model.slots import model_pools

LOCAL_ONLY = replace(
    GEOMETRIES["12b-local"], name="of-a-test-local", model="of-a-test", num_qo_heads=12, num_kv_heads=4
)
GLOBAL_ONLY = replace(
    GEOMETRIES["31b-global"], name="of-a-test-global", model="of-a-test", num_qo_heads=12, num_kv_heads=4
)


@pytest.fixture(params=[LOCAL_ONLY, GLOBAL_ONLY], ids=lambda one: one.name)
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """In the registry, in front of all others: nothing may depend on the order."""
    one: Geometry = request.param
    monkeypatch.setattr(registry, "GEOMETRIES", MappingProxyType({one.name: one, **GEOMETRIES}))
    monkeypatch.setattr(registry, "MODELS", (one.model, *registry.MODELS))
    return one


def test_its_cases_and_those_of_no_other_change(added: Geometry) -> None:
    own = gate_cases([added])
    assert {case.entry for case in own} >= {entry.name for entry in entries_for(added, "prep")}
    assert {case.entry for case in own} >= {entry.name for entry in entries_for(added, "attention")}
    names = {case.id.split("/")[1] for case in own}
    assert names == {added.name}


def _of_others() -> list[Case]:
    gate._made.cache_clear()  # else these would be those that were made before
    return gate_cases(list(GEOMETRIES.values()), every_trap=True)


@cache
def _without() -> list[Case]:
    return _of_others()


def test_cases_of_a_geometry_do_not_depend_on_the_registry(added: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = _of_others()
    monkeypatch.undo()
    without = _without()
    assert [case.id for case in with_it] == [case.id for case in without]
    # Data but for the traps, which are functions of the table.
    assert [case for case in with_it if not case.traps] == [case for case in without if not case.traps]


def test_commands_know_it(added: Geometry) -> None:
    assert select_geometries("of-a-test") == model_families("of-a-test") == (added,)
    listed = CliRunner().invoke(
        smoke, ["--geometry", "of-a-test", "--list"], standalone_mode=False, catch_exceptions=False
    )
    assert f"serve/{added.name}/interleaved" in listed.stdout.splitlines()
    contradictions = CliRunner().invoke(
        reject, ["--geometry", added.name, "--list"], standalone_mode=False, catch_exceptions=False
    )
    entries = {line.split("/")[1] for line in contradictions.stdout.split()}
    assert entries == {entry.name for entry in entries_for(added)}
    pools = model_pools("of-a-test", context_tokens=2048, slots=2, page_size=16)
    assert [pool.geometry for pool in pools.families] == [added]
    assert (pools.windowed is None) == (added.window is None)
    shown = CliRunner().invoke(
        layout,
        ["--geometry", added.name, "--context", "2048", "--slots", "2"],
        standalone_mode=False,
        catch_exceptions=False,
    )
    assert shown.exit_code == 0, shown.output
    assert added.name in shown.stdout
    plan = make_plan(Request("all", (added,), "quick"))
    assert {shape.kind for shape in plan.shapes} == {"decode", "prefill", "prep"}


def test_reject_of_other_entries_stays_where_it_was_unless_it_wins(added: Geometry) -> None:
    """The head counts of an entry's contradictions change only where the new geometry takes their place."""
    before = {case.entry: case.geometry for case in [*reject_cases(), *trap_cases()]}
    everything = [added, *GEOMETRIES.values()]
    after = {case.entry: case.geometry for case in [*reject_cases(everything), *trap_cases(everything)]}
    assert all(after[name] in (before[name], added) for name in before)
