"""A geometry of one's own: a model's families from a TOML file, checked as the built-in ones are (docs/geometry.md).

The words are those of the built-in table, and for RoPE those of published configurations: ``rope_theta``,
``rope_type`` (``default``: every pair turns; ``proportional``: the first ``partial_rotary_factor`` of them, with
frequencies over the whole head) and ``rotary_dim`` where a kernel turns the first columns only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from g4kv_cli.model.document import Document, Table, read_toml
from g4kv_cli.model.geometry import (
    FAMILIES,
    GEOMETRIES,
    INT32_MAX,
    MODELS,
    Family,
    Geometry,
    contradictions,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]*")
_KEY_OF = {"num_rotated_pairs": "partial_rotary_factor"}
"""Where a field of a geometry stands in a file, if not under its own name."""
_OF_MODEL = ("num_qo_heads", "hidden_size", "max_positions")


def read_geometries(text: str) -> tuple[Geometry, ...]:
    """The families of ``my.toml``, local before global, or the one that ``my.toml:local`` names.

    Raises UsageError with file, line and key.
    """
    file, family = (text, "") if text.endswith(".toml") else text.rsplit(":", 1)
    document = read_toml(Path(file), "geometry")
    found = {geometry.family: geometry for geometry in _families(document)}
    if family and family not in found:
        raise document.error((), f"has no [{family}]; it has {', '.join(f'[{one}]' for one in found)}")
    return tuple(geometry for geometry in found.values() if family in ("", geometry.family))


def _families(document: Document) -> Iterator[Geometry]:
    root = Table(document, document.values)
    model = root.text("model")
    if not _NAME.fullmatch(model):
        raise root.error("model", f"{model!r} is no name: lower-case letters, digits, '.', '_', '+' and '-'")
    if model in (*MODELS, *GEOMETRIES) or any(f"{model}-{family}" in GEOMETRIES for family in FAMILIES):
        raise root.error("model", f"{model} is a built-in model; give yours another name")
    common = {key: root.integer(key, 0 if key == "hidden_size" else None, low=1, high=INT32_MAX)
              for key in _OF_MODEL if key in root or key != "hidden_size"}  # fmt: skip
    tables = {family: table for family in FAMILIES if (table := root.table(family)) is not None}
    root.finish()
    if not tables:
        raise root.error("", "has no family: give a table [local], [global] or both")
    for family, table in tables.items():
        yield _family(root, table, family, common)


def _family(root: Table, table: Table, family: Family, common: dict[str, int]) -> Geometry:
    def count(key: str, default: int | None = None, low: int = 1) -> int:
        return table.integer(key, default, low=low, high=INT32_MAX)

    head_dim = count("head_dim")
    window = count("window") if "window" in table or family == "local" else None
    rotary_dim = count("rotary_dim", head_dim)
    model = root.text("model")
    geometry = Geometry(
        name=f"{model}-{family}",
        model=model,
        family=family,
        num_layers=count("num_layers"),
        num_shared_kv_layers=count("num_shared_kv_layers", 0, low=0),
        hidden_size=common.get("hidden_size", common["num_qo_heads"] * head_dim),
        num_qo_heads=common["num_qo_heads"],
        num_kv_heads=count("num_kv_heads"),
        head_dim=head_dim,
        window=window,
        rope_theta=table.number("rope_theta"),
        rotary_dim=rotary_dim,
        num_rotated_pairs=_rotated_pairs(table, rotary_dim, head_dim),
        k_eq_v=table.flag("k_eq_v", None),
        max_positions=common["max_positions"],
    )
    table.finish()
    for field, words in contradictions(geometry):
        key = _KEY_OF.get(field, field)
        raise (root if key in _OF_MODEL else table).error(key, words)
    return geometry


def _rotated_pairs(table: Table, rotary_dim: int, head_dim: int) -> int:
    """How many pairs of columns turn."""
    if table.text("rope_type", "default", ("default", "proportional")) == "default":
        if "partial_rotary_factor" in table:
            raise table.error("partial_rotary_factor", 'goes with rope_type = "proportional"')
        return rotary_dim // 2
    if rotary_dim != head_dim:
        words = "a proportional rotation runs over the whole head, with an identity table where nothing turns: drop it"
        raise table.error("rotary_dim", words)
    factor = table.number("partial_rotary_factor")
    pairs = factor * (head_dim // 2)
    if factor > 1 or pairs != int(pairs):
        words = f"must be up to 1 and a whole number of the {head_dim // 2} pairs, got {factor:g}"
        raise table.error("partial_rotary_factor", words)
    return int(pairs)
