"""Recorded vectors of another implementation: the reader of one npz file, and the cases that run it.

A file holds one chunk of tokens of one layer (tests/golden/README.md describes every array): raw projections, norm
weights, the bf16 RoPE rows that were used, and the expected q, k and v. bf16 is stored as uint16 bit patterns.
Attention arrays may be there; prep cases do not read them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.prep.build import id_part
from g4kv_cli.cases.prep.case import Placement, PrepCase
from g4kv_cli.entries.table import entry_for
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.kv_format import SPLIT, formats_of
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.records.npz import load_npz, npz_files

Array = npt.NDArray[Any]

MAX_POSITION = 1 << 24

_ARRAYS = (
    "meta_json", "positions", "q_raw", "k_raw", "v_raw", "q_norm_w", "k_norm_w", "cos_bf16", "sin_bf16",
    "q_expect", "k_expect", "v_expect",
)  # fmt: skip
_META_KEYS = ("model", "kind", "q_heads", "kv_heads", "head_dim", "k_eq_v", "eps")


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One checked file. Tensors bf16: q, q_expect [tokens, q_heads, head_dim]; k, v, k_expect, v_expect [tokens,
    kv_heads, head_dim] (v is k in K=V layers); weights [head_dim]; cos, sin [tokens, head_dim / 2]."""

    path: Path
    geometry: Geometry
    case_name: str
    positions: npt.NDArray[np.int64]
    q: Array
    k: Array
    v: Array
    q_weight: Array
    k_weight: Array
    cos: Array
    sin: Array
    q_expect: Array
    k_expect: Array
    v_expect: Array

    @property
    def is_consecutive(self) -> bool:
        """True if the positions are start, start + 1, ...: only then a prefill call can produce them."""
        return bool((np.diff(self.positions) == 1).all())


def read_recording(path: Path) -> Recording:
    """Read and check one file. Raises UsageError with one line: unreadable, a missing array, a wrong dtype or shape,
    a value that is not finite, or a meta_json that does not describe the arrays."""
    # Only what a prep case needs is unpacked; the attention arrays are the larger part.
    arrays = load_npz(path, "golden file", _ARRAYS)
    return _Reader(path, arrays).read()


def golden_cases(path: Path, page_size: int | None = None) -> list[PrepCase]:
    """The cases of a file or directory: contiguous and paged prefill, or decode where the file is for it; the paged
    ones in each format that the geometry has."""
    cases: list[PrepCase] = []
    for file in npz_files(path, "--golden"):
        cases.extend(_cases_of(read_recording(file), DEFAULT_PAGE_SIZE_TOKENS if page_size is None else page_size))
    ids = [case.id for case in cases]
    if len(set(ids)) != len(ids):
        raise UsageError(f"--golden {path}: two files of the same name; rename one, for ids are made of names")
    return cases


def _cases_of(recording: Recording, page_size: int) -> list[PrepCase]:
    positions = tuple(int(position) for position in recording.positions)
    logical = [position // page_size for position in positions]
    cases: list[PrepCase] = []

    def add(form: str, placement: Placement | None) -> None:
        formats = formats_of(recording.geometry) if placement is not None else (SPLIT,)
        cases.extend(
            PrepCase(
                id=f"golden/{recording.path.stem}/{id_part(kv_format)}{form}",
                entry=entry_for(recording.geometry, "prep", form).name,
                geometry=recording.geometry,
                form=form,
                kind="random",
                seed=0,
                positions=positions,
                rotary_dim=recording.geometry.head_dim,
                table_positions=max(positions) + 1,
                placement=placement,
                golden=recording.path,
                kv_format=kv_format,
            )
            for kv_format in formats
        )

    if recording.is_consecutive and recording.case_name != "decode":
        if recording.geometry.head_dim == 256:
            add("contiguous", None)
        covered = logical[-1] - logical[0] + 1
        # Pages from the last to the first, so that a page id is never the logical page's own number.
        row = tuple(reversed(range(covered + 1)))[:covered]
        add("prefill", Placement(page_size, covered + 2, 2, 1, (row,), (logical[0],), unread=(covered + 2,)))
    if not recording.is_consecutive or recording.case_name == "decode":
        rows = tuple((len(positions) - token,) for token in range(len(positions)))
        add("decode", Placement(page_size, len(positions) + 2, 2, 1, rows, tuple(logical)))
    return cases


class _Reader:
    """Checks one file array by array; every complaint names the file."""

    def __init__(self, path: Path, arrays: dict[str, Array]) -> None:
        self.path = path
        self.arrays = arrays

    def fail(self, what: str) -> UsageError:
        return UsageError(f"golden file {self.path}: {what}")

    def read(self) -> Recording:
        meta = self._meta()
        heads, kv_heads, head_dim = (self._count(meta, name) for name in ("q_heads", "kv_heads", "head_dim"))
        geometry = self._geometry(meta, heads, kv_heads, head_dim)
        positions = self._positions()
        tokens = len(positions)
        q_shape, kv_shape = (tokens, heads, head_dim), (tokens, kv_heads, head_dim)
        k = self._bf16("k_raw", kv_shape)
        if geometry.k_eq_v and "v_raw" in self.arrays:
            raise self.fail("has v_raw, although V comes from k_raw in K=V layers")
        return Recording(
            path=self.path,
            geometry=geometry,
            case_name=str(meta.get("case", "")),
            positions=positions,
            q=self._bf16("q_raw", q_shape),
            k=k,
            v=k if geometry.k_eq_v else self._bf16("v_raw", kv_shape),
            q_weight=self._bf16("q_norm_w", (head_dim,)),
            k_weight=self._bf16("k_norm_w", (head_dim,)),
            cos=self._bf16("cos_bf16", (tokens, head_dim // 2)),
            sin=self._bf16("sin_bf16", (tokens, head_dim // 2)),
            q_expect=self._bf16("q_expect", q_shape),
            k_expect=self._bf16("k_expect", kv_shape),
            v_expect=self._bf16("v_expect", kv_shape),
        )

    def _array(self, name: str) -> Array:
        if name not in self.arrays:
            raise self.fail(f"has no array {name}")
        return self.arrays[name]

    def _meta(self) -> dict[str, Any]:
        array = self._array("meta_json")
        if array.shape != () or array.dtype.kind != "U":
            raise self.fail(f"meta_json must be one text, got {array.dtype} of shape {list(array.shape)}")
        try:
            meta = json.loads(str(array))
        except json.JSONDecodeError as error:
            raise self.fail(f"meta_json is not JSON: {error}") from error
        if not isinstance(meta, dict):
            raise self.fail("meta_json must be a JSON object")
        for key in _META_KEYS:
            if key not in meta:
                raise self.fail(f"meta_json has no {key!r}")
        if meta["eps"] != 1e-6:
            raise self.fail(f"meta_json says eps {meta['eps']}, the prep entries have 1e-06")
        return meta

    def _count(self, meta: dict[str, Any], key: str) -> int:
        value = meta[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(f"meta_json {key} must be a positive integer, got {value!r}")
        return value

    def _geometry(self, meta: dict[str, Any], heads: int, kv_heads: int, head_dim: int) -> Geometry:
        name = f"{meta['model']}-{meta['kind']}"
        known = GEOMETRIES.get(name)
        if known is None:
            raise self.fail(f"meta_json names geometry {name!r}; known are {', '.join(GEOMETRIES)}")
        if head_dim != known.head_dim or meta["k_eq_v"] is not known.k_eq_v:
            raise self.fail(
                f"meta_json says head_dim {head_dim}, k_eq_v {meta['k_eq_v']}; "
                f"{name} has {known.head_dim}, {known.k_eq_v}"
            )
        if heads % kv_heads:
            raise self.fail(f"meta_json says {heads} q heads, which is no multiple of {kv_heads} kv heads")
        # The heads may be one tensor-parallel rank's share.
        return dataclasses.replace(known, num_qo_heads=heads, num_kv_heads=kv_heads)

    def _positions(self) -> npt.NDArray[np.int64]:
        array = self._array("positions")
        if array.dtype != np.int32 or array.ndim != 1 or array.size == 0:
            raise self.fail(f"positions must be int32 [tokens], got {array.dtype} {list(array.shape)}")
        if array.min() < 0 or array.max() >= MAX_POSITION:
            raise self.fail(f"positions must be from 0 to {MAX_POSITION - 1}, got {array.min()} to {array.max()}")
        return array.astype(np.int64)

    def _bf16(self, name: str, shape: tuple[int, ...]) -> Array:
        array = self._array(name)
        if array.dtype != np.uint16:
            raise self.fail(f"{name} must hold bf16 bit patterns as uint16, got {array.dtype}")
        if array.shape != shape:
            raise self.fail(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
        values = np.ascontiguousarray(array).view(BF16)
        if not np.isfinite(values.astype(np.float32)).all():
            raise self.fail(f"{name} holds a value that is not finite")
        return values
