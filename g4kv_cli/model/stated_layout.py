"""A layout that somebody else states, in a JSON file, against the one derived from the geometry.

The file is one object with any of the integer fields in FIELDS, and optionally ``samples``: a list of objects
``{"page", "layer", "kv": "k" | "v", "slot", "head", "dim", "element_offset"}``, ``kv_format``, and ``geometry``: an
object with any of GEOMETRY_FIELDS. Or it is what ``g4kv layout --json`` wrote: its layout of the geometry in question,
and the elements that it answered for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import KV_FORMATS, SPLIT, KvFormat
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, Coordinate, KvKind, KvLayout
from g4kv_cli.model.slots import derived_layout

_DERIVED: Mapping[str, Callable[[KvLayout], int | str]] = MappingProxyType(
    {
        "page_size": lambda layout: layout.page_size,
        "num_layers": lambda layout: layout.num_layers,
        "num_kv_heads": lambda layout: layout.num_kv_heads,
        "head_dim": lambda layout: layout.head_dim,
        "k_dim": lambda layout: layout.k_dim,
        "slot_stride": lambda layout: _of_both(layout.slot_stride("k"), layout.slot_stride("v")),
        "k_slot_stride": lambda layout: layout.slot_stride("k"),
        "v_slot_stride": lambda layout: layout.slot_stride("v"),
        "kv_block_len": lambda layout: _of_both(layout.kv_block_len, layout.v_block_len),
        "k_block_len": lambda layout: layout.kv_block_len,
        "v_block_len": lambda layout: layout.v_block_len,
        "layer_stride": lambda layout: layout.layer_stride,
        "page_stride": lambda layout: layout.page_stride,
        "element_bytes": lambda layout: layout.element_bytes,
        "page_bytes": lambda layout: layout.page_bytes,
        "bytes_per_token": lambda layout: layout.bytes_per_token,
        "first_page_past_int32": lambda layout: layout.first_page_past(31),
        "first_page_past_uint32": lambda layout: layout.first_page_past(32),
    }
)
LAYOUT_FIELDS = tuple(_DERIVED)
POOL_FIELDS = ("num_pages", "pool_elems", "pool_bytes")
FIELDS = LAYOUT_FIELDS + POOL_FIELDS
KV_FORMAT = "kv_format"
SAMPLES = "samples"
GEOMETRY = "geometry"
GEOMETRY_FIELDS = (
    *(field.name for field in dataclasses.fields(Geometry)), "gqa_group", "window_left", "num_kv_layers",
)  # fmt: skip
_OWN_LAYOUTS = "layouts"
_OWN_ELEMENTS = ("at", "offset")
_OWN_KEYS = ("schema_version", _OWN_LAYOUTS, *_OWN_ELEMENTS, "pools", "check", "probe")

_COORDINATE_INTEGERS = ("page", "layer", "slot", "head", "dim")
_BYTE_OFFSET = "byte_offset"
_SAMPLE_KEYS = (*_COORDINATE_INTEGERS, "kv", "element_offset")

Scalar = int | float | str | None


def _of_both(of_k: int, of_v: int) -> int | str:
    """What K and V have alike, or what each has."""
    return of_k if of_k == of_v else f"{of_k} of K and {of_v} of V"


@dataclass(frozen=True, slots=True)
class StatedSample:
    """One element and the offsets that the file gives it; ``name`` is where it stands in the file."""

    name: str
    coordinate: Coordinate
    element_offset: int
    byte_offset: int | None = None


@dataclass(frozen=True, slots=True)
class StatedLayout:
    """What the file says; at least one statement."""

    source: str
    fields: dict[str, int]
    samples: tuple[StatedSample, ...]
    geometry: Mapping[str, Scalar] = field(default_factory=dict)
    kv_format: str | None = None

    @property
    def statements(self) -> int:
        """How many things it says that can be right or wrong."""
        return len(self.fields) + len(self.samples) + len(self.geometry) + (self.kv_format is not None)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One statement that the derived layout does not bear out."""

    field: str
    got: Scalar
    want: Scalar


@dataclass(frozen=True, slots=True)
class StatedCheck:
    """A stated layout, what it was held against, and every contradiction."""

    stated: StatedLayout
    layout: KvLayout
    num_pages: int | None
    contradictions: tuple[Contradiction, ...]


def read_stated_layout(path: Path, geometry_name: str = "") -> StatedLayout:
    """Read and type-check a file; of a record with several layouts, the one of ``geometry_name``.

    Raises UsageError for an unreadable file, text that is not JSON, an unknown, repeated or missing key, a
    wrong type, a record without that geometry, and a file that states nothing.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; name a file that states a layout") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}; write one object with any of {', '.join(FIELDS)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold one JSON object with fields of a layout, not {_kind(content)}")
    elements: list[tuple[str, object]] = []
    where = str(path)
    if "schema_version" in content:
        elements = [(name, content[name]) for name in _OWN_ELEMENTS if name in content]
        where, content = _own_layout(path, content, geometry_name)
    _known_keys(where, content, (*FIELDS, SAMPLES, GEOMETRY, KV_FORMAT))
    kv_format = content.get(KV_FORMAT)
    if KV_FORMAT in content and kv_format not in KV_FORMATS:
        raise UsageError(f"{where}: {KV_FORMAT} must be {' or '.join(KV_FORMATS)}, not {_kind(kv_format)}")
    fields = {name: _integer(f"{where}: {name}", content[name]) for name in FIELDS if name in content}
    listed = content.get(SAMPLES, [])
    if not isinstance(listed, list):
        raise UsageError(f"{where}: samples must be a list of objects, not {_kind(listed)}")
    elements += [(f"{SAMPLES}[{index}]", sample) for index, sample in enumerate(listed)]
    samples = tuple(_sample(str(path), name, sample) for name, sample in elements)
    stated = StatedLayout(str(path), fields, samples, _geometry(where, content.get(GEOMETRY, {})), kv_format)
    if not stated.statements:
        raise UsageError(f"{path} states nothing: give any of {', '.join(FIELDS)}, {SAMPLES}")
    return stated


def _own_layout(path: Path, record: dict[str, Any], geometry_name: str) -> tuple[str, dict[str, Any]]:
    """The layout of this geometry in a record of ``g4kv layout --json``, and where it stands; empty if it has none."""
    _known_keys(str(path), record, _OWN_KEYS)
    layouts = record.get(_OWN_LAYOUTS, [])
    if not isinstance(layouts, list) or not all(isinstance(one, dict) for one in layouts):
        raise UsageError(f"{path}: layouts must be a list of objects, not {_kind(layouts)}")
    names = []
    for index, one in enumerate(layouts):
        geometry = one.get(GEOMETRY)
        names.append(geometry.get("name") if isinstance(geometry, dict) else None)
        if names[-1] == geometry_name:
            return f"{path}: layouts[{index}]", one
    if layouts:
        held = ", ".join(str(name) for name in names)
        raise UsageError(f"{path} holds no layout of {geometry_name} but of {held}; choose one with --geometry")
    return str(path), {}


def _geometry(where: str, content: object) -> dict[str, Scalar]:
    if not isinstance(content, dict):
        raise UsageError(f"{where}: geometry must be an object, not {_kind(content)}")
    _known_keys(f"{where}: geometry", content, GEOMETRY_FIELDS)
    for name, value in content.items():
        if isinstance(value, (dict, list)):
            raise UsageError(f"{where}: geometry.{name} must be a number or a text, not {_kind(value)}")
    return dict(content)


def check_stated_layout(
    stated: StatedLayout,
    geometry: Geometry,
    *,
    page_size: int | None = None,
    num_layers: int | None = None,
    num_pages: int | None = None,
    kv_format: KvFormat = SPLIT,
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
    layout = derived_layout(geometry, page_size, num_layers, kv_format)
    of_format = stated.kv_format not in (None, kv_format)
    found = (
        *((Contradiction(KV_FORMAT, stated.kv_format, kv_format),) if of_format else ()),
        *_wrong_geometry_fields(stated, geometry),
        *_wrong_layout_fields(stated, layout),
        *_wrong_pool_fields(stated, layout, num_pages),
        *_wrong_samples(stated, layout, num_pages),
    )
    return StatedCheck(stated, layout, num_pages, found)


def _wrong_geometry_fields(stated: StatedLayout, geometry: Geometry) -> Iterator[Contradiction]:
    for name, got in stated.geometry.items():
        want = getattr(geometry, name)
        if got != want or isinstance(got, bool) != isinstance(want, bool):
            yield Contradiction(f"{GEOMETRY}.{name}", got, want)


def _wrong_layout_fields(stated: StatedLayout, layout: KvLayout) -> Iterator[Contradiction]:
    for name, derive in _DERIVED.items():
        want = derive(layout)
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
    for sample in stated.samples:
        where, name = sample.coordinate, sample.name
        extents = {
            "page": num_pages,
            "layer": layout.num_layers,
            "slot": layout.page_size,
            "head": layout.num_kv_heads,
            "dim": layout.row_dim(where.kv),
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
        want_bytes = want * layout.element_bytes
        if sample.byte_offset is not None and sample.byte_offset != want_bytes:
            yield Contradiction(f"{name}.{_BYTE_OFFSET}", sample.byte_offset, want_bytes)


def _sample(path: str, name: str, content: object) -> StatedSample:
    where = f"{path}: {name}"
    if not isinstance(content, dict):
        raise UsageError(f"{where} must be an object, not {_kind(content)}")
    _known_keys(where, content, (*_SAMPLE_KEYS, _BYTE_OFFSET))
    missing = [name for name in _SAMPLE_KEYS if name not in content]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}: a sample gives {', '.join(_SAMPLE_KEYS)}")
    kv = content["kv"]
    if kv not in ("k", "v"):
        raise UsageError(f'{where}: kv must be "k" or "v", not {_kind(kv)}')
    integers = {axis: _integer(f"{where}: {axis}", content[axis]) for axis in _COORDINATE_INTEGERS}
    coordinate = Coordinate(kv=cast(KvKind, kv), **integers)
    bytes_given = _integer(f"{where}: {_BYTE_OFFSET}", content[_BYTE_OFFSET]) if _BYTE_OFFSET in content else None
    return StatedSample(name, coordinate, _integer(f"{where}: element_offset", content["element_offset"]), bytes_given)


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
