"""The verdict as a table that a serving engine can load."""

from __future__ import annotations

import json
from typing import Any

from g4kv_cli.entries.table import decode_forms
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.records.findings import Analysis, CellVerdict, GeometryVerdict

DISPATCH_SCHEMA_VERSION = 1


def dispatch_table(analysis: Analysis) -> dict[str, Any]:
    """Per geometry and format of its pool: the cells measured (look up the nearest from below in visible keys, then in
    batch), and the rule.

    A pool whose rows of K are not split says its geometry and format, one of other pages than the usual ones how many
    tokens they hold. ``forms`` says what the labels stand for; a split form launches with ``num_splits`` splits and a
    merge. ``decided`` false: either is as good.
    """
    run = analysis.record.run
    return {
        "schema_version": DISPATCH_SCHEMA_VERSION,
        "kind": "g4kv-decode-dispatch",
        "gpu": run.device.name,
        "arch": run.device.arch,
        "kernels_digest": run.kernels_digest,
        "date": run.date,
        "forms": {form.label: {"form": form.form, "is_split": form.takes_splits} for form in decode_forms()},
        "geometries": {verdict.pool: _geometry(verdict) for verdict in analysis.verdicts},
    }


def dispatch_text(analysis: Analysis) -> str:
    """The table as JSON text."""
    return json.dumps(dispatch_table(analysis), indent=1) + "\n"


def _geometry(verdict: GeometryVerdict) -> dict[str, Any]:
    rule = verdict.rule
    others = {cell.shape.page_size for cell in verdict.cells} - {DEFAULT_PAGE_SIZE_TOKENS}
    return {
        **({"geometry": verdict.geometry, "kv_format": verdict.kv_format} if verdict.kv_format else {}),
        **({"page_size": max(others)} if others else {}),
        "num_kv_heads": verdict.num_kv_heads,
        "rule": None
        if rule is None
        else {
            "target_blocks": rule.target_blocks,
            "min_keys_per_split": rule.min_keys_per_split,
            "mean_loss": rule.mean_loss,
            "worst_loss": rule.worst_loss,
        },
        "cells": [_cell(cell) for cell in verdict.cells],
    }


def _cell(cell: CellVerdict) -> dict[str, Any]:
    return {
        "visible_keys": cell.shape.visible_keys,
        "kv_len": cell.shape.kv_len,
        "batch": cell.shape.batch,
        "form": cell.form,
        "num_splits": cell.num_splits,
        "seconds": cell.seconds,
        "decided": cell.decided,
        "tied": list(cell.tied),
        "margin": cell.margin,
        "margin_noise": cell.margin_noise,
    }
