"""What ``g4kv layout --json`` writes, as plain values; names carry the units."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.model.kv_layout import Coordinate, KvLayout
from g4kv_cli.model.slots import PADDING_PAGES, ModelPools
from g4kv_cli.model.stated_layout import StatedCheck
from g4kv_cli.records.run import DeviceInfo, to_json
from g4kv_cli.report.layout_numbers import ProbeLine, ShownLayout, layout_numbers


def layout_json(shown: ShownLayout) -> dict[str, Any]:
    """A layout's geometry and numbers; names carry the units."""
    geometry = to_json(shown.geometry) | {
        "gqa_group": shown.geometry.gqa_group,
        "window_left": shown.geometry.window_left,
        "num_kv_layers": shown.geometry.num_kv_layers,
    }
    kv_format = shown.layout.kv_format
    folded = {} if kv_format == SPLIT else {"kv_format": kv_format}
    return {"geometry": geometry, **folded, **{number.name: number.value for number in layout_numbers(shown)}}


def pools_json(pools: ModelPools) -> dict[str, Any]:
    """The pools of a model."""
    families: dict[str, Any] = {
        family.geometry.family: {
            "geometry": family.geometry.name,
            "num_layers": family.layout.num_layers,
            **({} if family.layout.kv_format == SPLIT else {"kv_format": family.layout.kv_format}),
            "page_bytes": family.layout.page_bytes,
            "pages_per_slot": family.pages_per_slot,
            "num_pages": family.num_pages,
            "pool_bytes": family.pool_bytes,
        }
        for family in pools.families
    }
    return {
        "model": pools.model,
        "context_tokens": pools.context_tokens,
        "slots": pools.slots,
        "page_size": pools.page_size,
        "step_tokens": pools.step_tokens,
        "padding_pages": PADDING_PAGES,
        **families,
        "total_bytes": pools.total_bytes,
        "uncapped_local_bytes": pools.uncapped_local_bytes,
    }


def element_json(layout: KvLayout, coordinate: Coordinate, element_offset: int) -> dict[str, Any]:
    """One element: coordinate and both offsets."""
    return {
        **dataclasses.asdict(coordinate),
        "element_offset": element_offset,
        "byte_offset": element_offset * layout.element_bytes,
    }


def check_json(check: StatedCheck) -> dict[str, Any]:
    """A stated layout's contradictions, and what it was held against."""
    return {
        "file": check.stated.source,
        "page_size": check.layout.page_size,
        "num_layers": check.layout.num_layers,
        "num_pages": check.num_pages,
        "statements": check.stated.statements,
        "contradictions": [dataclasses.asdict(contradiction) for contradiction in check.contradictions],
    }


def probe_json(device: DeviceInfo, lines: Sequence[ProbeLine]) -> dict[str, Any]:
    """The device and every set of coordinates with its mismatches."""
    total = sum(line.total for line in lines)
    return {
        "device": to_json(device),
        "coordinates": total,
        "agreeing": total - sum(line.disagreeing for line in lines),
        "groups": [
            {
                "subject": line.subject,
                "coordinates": line.coordinates,
                "total": line.total,
                "agreeing": line.total - line.disagreeing,
                "mismatches": [to_json(mismatch) for mismatch in line.mismatches],
            }
            for line in lines
        ],
    }
