"""The records of a run's parts as one record again.

Parts that could not belong to one run are refused. A part that is missing or did not get to its end is a finding:
the merged record says so, and has what there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4kv_cli.errors import UsageError
from g4kv_cli.records.run import CaseResult, RunRecord, ShardInfo

FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Finding:
    """What keeps a record from being whole, in words. ``file``: that of the part, empty for a missing one."""

    text: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """The whole record, whose ``ended`` has the findings' words, and the findings."""

    record: RunRecord
    findings: tuple[Finding, ...]


def merge_shards(parts: Mapping[str, RunRecord]) -> Merged:
    """Merge records by the names of their files. Raises UsageError for one that is no shard, for two of the same shard,
    and for shards of different runs."""
    shards: dict[str, ShardInfo] = {}
    for name, record in parts.items():
        if record.shard is None:
            raise UsageError(f"{name} is a whole run, not a part of one: merge records made with --shard I/N")
        _require_sound(name, record, record.shard)
        shards[name] = record.shard
    first_name = next(iter(parts))
    first = parts[first_name]
    for name, record in parts.items():
        for what, value_of in _MUST_AGREE.items():
            here, there = value_of(record), value_of(first)
            if here != there:
                raise UsageError(
                    f"{name} and {first_name} are not of one run: {what} {_shown(here)} and {_shown(there)}"
                )
    of_shard: dict[int, str] = {}
    for name, shard in shards.items():
        other = of_shard.setdefault(shard.index, name)
        if other != name:
            raise UsageError(f"{other} and {name} are both part {shard.index} of {shard.count}: give one of them")
    return _merged(parts, shards, of_shard)


def _merged(parts: Mapping[str, RunRecord], shards: Mapping[str, ShardInfo], of_shard: Mapping[int, str]) -> Merged:
    first = parts[next(iter(parts))]
    whole = shards[next(iter(parts))]
    at: dict[int, CaseResult] = {}
    findings: list[Finding] = []
    for name, record in parts.items():
        places = shards[name].places
        for place, result in zip(places, record.cases, strict=False):
            if place in at:
                raise UsageError(f"{name}: case {result.id} is in another part too; run all parts with one g4kv")
            at[place] = result
        if len(record.cases) < record.planned or record.ended != FINISHED:
            part = f"part {shards[name].index} of {whole.count}"
            text = f"{part} has {len(record.cases)} of its {record.planned} cases: {record.ended}"
            findings.append(Finding(text, name))
    missing = [index for index in range(1, whole.count + 1) if index not in of_shard]
    if missing:
        left = whole.total - sum(len(shard.places) for shard in shards.values())
        parts_text = ", ".join(map(str, missing))
        text = f"part {parts_text} of {whole.count} is missing, and {left} of {whole.total} cases with it"
        findings.append(Finding(text))
    run = dataclasses.replace(first.run, date=min(record.run.date for record in parts.values()))
    cases = tuple(at[place] for place in sorted(at))
    ended = "; ".join(finding.text for finding in findings) or FINISHED
    return Merged(RunRecord(run, first.settings, cases, whole.total, ended, first.command), tuple(findings))


def _require_sound(name: str, record: RunRecord, shard: ShardInfo) -> None:
    """Raises UsageError for a record that no run writes."""
    in_table = all(0 <= place < shard.total for place in shard.places) and len(set(shard.places)) == len(shard.places)
    if not (1 <= shard.index <= shard.count and in_table and len(shard.places) == record.planned >= len(record.cases)):
        raise UsageError(f"{name} contradicts itself: its part, its places and its cases do not fit together")


_MUST_AGREE: dict[str, Callable[[RunRecord], Any]] = {
    "command": lambda record: record.command,
    "kernels digest": lambda record: record.run.kernels_digest,
    "provider": lambda record: record.run.provider,
    "device": lambda record: f"{record.run.device.name} {record.run.device.arch}",
    "driver": lambda record: record.run.device.driver,
    "NVRTC": lambda record: record.run.nvrtc,
    "seed": lambda record: record.run.seed,
    "settings": lambda record: record.settings,
    "versions": lambda record: record.run.versions,
    "commit": lambda record: record.run.git_commit,
    "declared": lambda record: record.run.declared,
    "waivers": lambda record: record.run.waivers,
    "number of parts": lambda record: record.shard and record.shard.count,
    "table of cases": lambda record: record.shard and (record.shard.table, record.shard.total),
}
"""What records of one run have in common, by its name in an error."""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(one)[:12] for one in value) or "none"
    text = str(value)
    return text[:12] if len(text) == 64 else text or "none"
