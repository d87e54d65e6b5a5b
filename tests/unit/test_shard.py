"""Parts of a table: every case in one part, whose it is follows from the ids, and parts cost alike."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.shard import Shard
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import select_geometries


@dataclass(frozen=True)
class _Case:
    id: str
    weight: float = 1.0


def _parts(cases: list, count: int) -> list[list]:
    return [Shard(index, count).of(cases)[0] for index in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_case_of_smoke_is_in_one_part_and_parts_are_even(count: int) -> None:
    cases = gate_cases(select_geometries("12b", 1))
    parts = _parts(cases, count)
    order = [case.id for case in cases]
    assert sorted((case.id for part in parts for case in part), key=order.index) == order
    for part in parts:
        ids = [case.id for case in part]
        assert ids == sorted(ids, key=order.index)
    loads = [sum(case.weight for case in part) for part in parts]
    assert max(loads) - min(loads) <= max(case.weight for case in cases)
    # Cases that stand together cost alike: no part has all of a family or of an entry.
    if count == 2:
        for geometry in ("12b-local", "12b-global"):
            shares = [sum(case.geometry.name == geometry for case in part) for part in parts]
            assert min(shares) > 0.35 * sum(shares)


def test_what_the_record_says_of_a_part() -> None:
    cases = [_Case(f"case/{number}") for number in range(10)]
    mine, info = Shard(2, 3).of(cases)  # type: ignore[type-var]
    assert (info.index, info.count, info.total) == (2, 3, 10)
    assert [cases[place] for place in info.places] == mine
    assert Shard(1, 3).of(cases)[1].table == info.table  # type: ignore[type-var]
    assert Shard(1, 3).of(cases[:9])[1].table != info.table  # type: ignore[type-var]


def test_the_heavy_ones_are_shared_out() -> None:
    cases = [_Case(f"case/{number}", 50.0 if number == 7 else 1.0) for number in range(61)]
    parts = _parts(cases, 2)
    assert sorted(len(part) for part in parts) == [6, 55]
    assert [sum(case.weight for case in part) for part in parts] == [55, 55]


def test_cases_that_take_turns_in_the_table_are_spread() -> None:
    cases = [_Case(f"{kind}/{number}") for number in range(100) for kind in ("short", "long")]
    for part in _parts(cases, 2):
        assert 30 < sum(case.id.startswith("long") for case in part) < 70


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/", "/2", "-1/2", "1/0", "a/b", "1/2/3", "1.5/2"])
def test_no_part(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        Shard.parse(text)


def test_more_parts_than_cases() -> None:
    with pytest.raises(UsageError, match="there are only 2 cases"):
        Shard(1, 3).of([_Case("a"), _Case("b")])  # type: ignore[type-var]
