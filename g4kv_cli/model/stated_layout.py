"""A layout that somebody else states, in a JSON file, against the one derived from the geometry.

The file is one object with any of the integer fields in FIELDS, and optionally ``samples``: a list of objects
``{"page", "layer", "kv": "k" | "v", "slot", "head", "dim", "element_offset"}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, Coordinate, KvKind, KvLayout
from g4kv_cli.model.slots import derived_layout

LAYOUT_FIELDS = (
    "page_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "kv_block_len",
    "layer_stride",
    "page_stride",
    "element_bytes",
)
POOL_FIELDS = ("num_pages", "pool_elems", "pool_bytes")
FIELDS = LAYOUT_FIELDS + POOL_FIELDS
SAMPLES = "samples"

_COORDINATE_INTEGERS = ("page", "layer", "slot", "head", "dim")
_SAMPLE_KEYS = (*_COORDINATE_INTEGERS, "kv", "element_offset")


@dataclass(frozen=True, slots=True)
class StatedSample:
    """One element and the offset that the file gives it."""

    coordinate: Coordinate
    element_offset: int


@dataclass(frozen=True, slots=True)
class StatedLayout:
    """What the file says; at least one statement."""

    source: str
    fields: dict[str, int]
    samples: tuple[StatedSample, ...]

    @property
    def statements(self) -> int:
        """How many things it says that can be right or wrong."""
        return len(self.fields) + len(self.samples)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One statement that the derived layout does not bear out."""

    field: str
    got: int
    want: int | str


@dataclass(frozen=True, slots=True)
class StatedCheck:
    """A stated layout, what it was held against, and every contradiction."""

    stated: StatedLayout
    layout: KvLayout
    num_pages: int | None
    contradictions: tuple[Contradiction, ...]


def read_stated_layout(path: Path) -> StatedLayout:
    """Read and type-check a file.

    Raises UsageError for an unreadable file, text that is not JSON, an unknown, repeated or missing key, a
    wrong type, and a file that states nothing.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold one JSON object with fields of a layout, not {_kind(content)}")
    _known_keys(str(path), content, (*FIELDS, SAMPLES))
    fields = {name: _integer(f"{path}: {name}", content[name]) for name in FIELDS if name in content}
    listed = content.get(SAMPLES, [])
    if not isinstance(listed, list):
        raise UsageError(f"{path}: samples must be a list of objects, not {_kind(listed)}")
    samples = tuple(_sample(f"{path}: samples[{index}]", sample) for index, sample in enumerate(listed))
    if not fields and not samples:
        raise UsageError(f"{path} states nothing: give any of {', '.join(FIELDS)}, {SAMPLES}")
    return StatedLayout(str(path), fields, samples)


def check_stated_layout(
    stated: StatedLayout,
    geometry: Geometry,
    *,
    page_size: int | None = None,
    num_layers: int | None = None,
    num_pages: int | None = None,
) -> StatedCheck:
    """Hold the statements against the geometry's derived layout.

    Page size and number of pages are free choices: where they are None here, the file's own are taken, so its
    other numbers are judged by them. The layers are the family's unless ``num_layers`` says otherwise.
    """
    own_page_size = stated.fields.get("page_size", 0)
    if page_size is None:
        page_size = own_page_size if own_page_size >= 1 else DEFAULT_PAGE_SIZE_TOKENS
    if num_pages is None and stated.fields.get("num_pages", 0) >= 1:
        num_pages = stated.fields["num_pages"]
    layout = derived_layout(geometry, page_size, num_layers)
    found = (
        *_wrong_layout_fields(stated, layout),
        *_wrong_pool_fields(stated, layout, num_pages),
        *_wrong_samples(stated, layout, num_pages),
    )
    return StatedCheck(stated, layout, num_pages, found)


def _wrong_layout_fields(stated: StatedLayout, layout: KvLayout) -> Iterator[Contradiction]:
    for name in LAYOUT_FIELDS:
        want = getattr(layout, name)
        if name in stated.fields and stated.fields[name] != want:
            yield Contradiction(name, stated.fields[name], want)


def _wrong_pool_fields(stated: StatedLayout, layout: KvLayout, num_pages: int | None) -> Iterator[Contradiction]:
    got_pages = stated.fields.get("num_pages")
    if got_pages is not None and got_pages != num_pages:
        yield Contradiction("num_pages", got_pages, "at least 1" if num_pages is None else num_pages)
    for name, page in (("pool_elems", layout.page_stride), ("pool_bytes", layout.page_bytes)):
        got = stated.fields.get(name)
        if got is None:
            continue
        if num_pages is not None:
            if got != num_pages * page:
                yield Contradiction(name, got, num_pages * page)
        elif got < page or got % page:
            yield Contradiction(name, got, f"one or more whole pages of {page}")


def _wrong_samples(stated: StatedLayout, layout: KvLayout, num_pages: int | None) -> Iterator[Contradiction]:
    for index, sample in enumerate(stated.samples):
        where = sample.coordinate
        name = f"{SAMPLES}[{index}]"
        extents = {
            "page": num_pages,
            "layer": layout.num_layers,
            "slot": layout.page_size,
            "head": layout.num_kv_heads,
            "dim": layout.head_dim,
        }
        outside = [
            Contradiction(f"{name}.{axis}", value, "at least 0" if extent is None else f"0 to {extent - 1}")
            for axis, extent in extents.items()
            if (value := getattr(where, axis)) < 0 or (extent is not None and value >= extent)
        ]
        yield from outside
        if outside:
            continue
        want = layout.element_offset(where.page, where.layer, where.kv, where.slot, where.head, where.dim)
        if sample.element_offset != want:
            yield Contradiction(f"{name}.element_offset", sample.element_offset, want)


def _sample(where: str, content: object) -> StatedSample:
    if not isinstance(content, dict):
        raise UsageError(f"{where} must be an object, not {_kind(content)}")
    _known_keys(where, content, _SAMPLE_KEYS)
    missing = [name for name in _SAMPLE_KEYS if name not in content]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}: a sample gives {', '.join(_SAMPLE_KEYS)}")
    kv = content["kv"]
    if kv not in ("k", "v"):
        raise UsageError(f'{where}: kv must be "k" or "v", not {_kind(kv)}')
    integers = {name: _integer(f"{where}: {name}", content[name]) for name in _COORDINATE_INTEGERS}
    coordinate = Coordinate(kv=cast(KvKind, kv), **integers)
    return StatedSample(coordinate, _integer(f"{where}: element_offset", content["element_offset"]))


def _integer(where: str, value: object) -> int:
    # bool is an int to Python, not to JSON.
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{where} must be an integer, not {_kind(value)}")
    return value


def _known_keys(where: str, content: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in content if name not in known]
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {repeated!r} is there twice")
    return content


def _kind(value: object) -> str:
    """What a JSON value is, in a word or two, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
