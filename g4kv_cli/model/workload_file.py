"""Workloads from files: the schema (docs/workload.md), whose errors name file and JSON path."""

from __future__ import annotations

import re
from pathlib import Path

from g4kv_cli.errors import UsageError
from g4kv_cli.model.document import Table, near, read_json, type_words
from g4kv_cli.model.geometry import ATTENTION_SCALE, Geometry, is_geometry_file, select_geometries
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, INT32_MAX, MAX_PAGE_SIZE_TOKENS
from g4kv_cli.model.workload import (
    DEFAULT_SPLITS,
    MAX_REQUESTS,
    MAX_SPLITS,
    PAGE_RULES,
    RequestSpec,
    Workload,
    WorkloadSpec,
    lay_out,
)
from g4kv_cli.model.workload_geometry import with_window

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_INDEX = re.compile(r"(\w+)\[(\d+)\]")


def read_workload(file: Path, geometry: str | None = None, tp: int = 1) -> tuple[WorkloadSpec, list[Workload]]:
    """A file's workload on each of the geometries that it names, or that ``geometry`` names in their place.

    Raises UsageError with file and JSON path.
    """
    root = Table(document := read_json(file, "workload"), document.values)
    spec = _spec(root)
    window = _window(root)
    of_file = root.text("geometry", "") if "geometry" in root else ""
    root.finish()
    if geometry is None and not of_file:
        raise root.error("", "lacks 'geometry' (a name or a file): give it here or as --geometry")
    if geometry is None:
        places = (part.strip() for part in of_file.split(","))
        geometry = ",".join(str(file.parent / part) if is_geometry_file(part) else part for part in places)
        try:
            chosen = select_geometries(geometry, tp)
        except UsageError as error:
            raise root.error("geometry", str(error)) from error
    else:
        chosen = select_geometries(geometry, tp)
    return spec, [lay_out(spec, one) for one in _windowed(root, chosen, window)]


def _windowed(root: Table, geometries: tuple[Geometry, ...], window: int | None) -> list[Geometry]:
    """The geometries with that window, where they have one."""
    if window is None:
        return list(geometries)
    if all(one.window is None for one in geometries):
        raise root.error("window", f"{geometries[0].name} has no window: leave it out")
    return [one if one.window is None else with_window(one, window, root.error) for one in geometries]


def _window(root: Table) -> int | None:
    return root.integer("window", low=1, high=INT32_MAX) if "window" in root else None


def _spec(root: Table) -> WorkloadSpec:
    name = root.text("workload")
    if not NAME.fullmatch(name):
        raise root.error("workload", f"{name!r} is no name: letters, digits, '.', '_', '+' and '-'")
    page_size = root.integer("page_size", DEFAULT_PAGE_SIZE_TOKENS, low=1, high=MAX_PAGE_SIZE_TOKENS)
    splits = root.integers("splits", low=1, high=MAX_SPLITS) or DEFAULT_SPLITS
    if len(set(splits)) != len(splits):
        raise root.error("splits", "names a number twice")
    tables = root.tables("requests")
    if not tables:
        raise root.error("requests", "must be a list of at least one object")
    default = root.text("pages", "permuted", PAGE_RULES)
    requests = [one for table in tables for one in _requests(table, default)]
    if len(requests) > MAX_REQUESTS:
        raise root.error("requests", f"{len(requests)} requests are more than {MAX_REQUESTS}")
    return WorkloadSpec(
        name=name,
        requests=tuple(requests),
        page_size=page_size,
        splits=tuple(splits),
        padding=root.integer("padding", 0, low=0, high=MAX_REQUESTS),
        released=root.flag("released", True),
        page_seed=root.integer("page_seed", 0, low=0, high=INT32_MAX),
        num_pages=root.integer("num_pages", low=1, high=INT32_MAX) if "num_pages" in root else None,
        num_layers=root.integer("num_layers", low=1, high=1024) if "num_layers" in root else None,
        sm_scale=root.number("sm_scale", ATTENTION_SCALE),
        values=root.document.values,
        fault=root.error,
    )


def _requests(table: Table, default: str) -> list[RequestSpec]:
    """The requests of one object, ``count`` of them."""
    kv_len = table.integer("kv_len", low=1, high=INT32_MAX)
    q_len = table.integer("q_len", 1, low=0, high=kv_len)
    count = table.integer("count", 1, low=1, high=MAX_REQUESTS)
    rule = table.value("pages")
    pages: tuple[int, ...] | str = default
    if isinstance(rule, list):
        pages = table.integers("pages", low=0, high=INT32_MAX - 1)
        if count > 1:
            raise table.error("count", "several requests cannot have the same pages: give a rule")
    elif rule is not None:
        if rule not in PAGE_RULES:
            words = repr(rule) if isinstance(rule, str) else type_words(rule, is_json=True)
            known = ", ".join(PAGE_RULES)
            raise table.error("pages", f"must be a list of page ids or one of {known}, got {words}{near(words, known)}")
        pages = rule
    origin = table.integer("page_origin", low=0, high=INT32_MAX) if "page_origin" in table else None
    table.finish()

    def fault(key: str, words: str) -> UsageError:
        element = _INDEX.fullmatch(key)
        if element is None:
            return table.error(key if key in table else "", words)
        return table.document.error((*table.path, element[1], int(element[2])), words)

    return [RequestSpec(kv_len, q_len, pages, origin, fault)] * count  # type: ignore[arg-type]
