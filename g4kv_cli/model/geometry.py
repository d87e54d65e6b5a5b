"""What a geometry is, and the registry of Gemma 4's: one entry per model size and attention family, read-only.

Numbers are those of the published checkpoints' configurations (huggingface/transformers, conversion scripts
of gemma4 and gemma4_unified). Common to all: norm weight is plain ``w``, eps 1e-6 inside the root, V gets a
weightless RMS norm and is never rotated, attention scale 1.0, query head h reads KV head ``h // gqa_group``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from g4kv_cli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Family = Literal["local", "global"]
FAMILIES: tuple[Family, ...] = ("local", "global")
HEAD_DIMS = (256, 512)
"""head_dim of the local and of the global family of every Gemma 4 size: what kernels are compiled for."""
MAX_POSITIONS = 1 << 24
"""Positions up to here are whole numbers in float32, in which a RoPE angle is one product."""
INT32_MAX = (1 << 31) - 1

ATTENTION_SCALE = 1.0
"""sm_scale of every Gemma 4 size: queries are normed, not scaled (Hugging Face transformers, models/gemma4)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One attention family of one model, as one tensor-parallel rank sees it."""

    name: str
    """``12b-local``, ``31b-global@tp4``, ..."""
    model: str
    family: Family
    num_layers: int
    """Layers of this family in the model, whether or not they own K/V."""
    num_shared_kv_layers: int
    """Of those, the last ones that read the K/V of an earlier layer and never write their own (E2B, E4B)."""
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Keys that a query sees, itself included; None on global layers."""
    rope_theta: float
    rotary_dim: int
    """Columns that the kernel rotates: the whole head; pairs that must not turn have an identity table."""
    num_rotated_pairs: int
    """Pairs (d, d + head_dim / 2) with a frequency above zero, from d = 0 on."""
    k_eq_v: bool
    """V is made from the same raw K (no v_proj)."""
    max_positions: int
    tensor_parallel: int = 1

    @property
    def gqa_group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """Keys left of the query that it sees (window - 1); -1 where there is no window."""
        return -1 if self.window is None else self.window - 1

    @property
    def num_kv_layers(self) -> int:
        """Layers that own K/V, hence the layers of a page in this family's pool."""
        return self.num_layers - self.num_shared_kv_layers

    def inv_freq(self) -> npt.NDArray[np.float32]:
        """RoPE frequencies, float32 [head_dim / 2]: ``theta^(-2i / head_dim)``, 0 from num_rotated_pairs on.

        The denominator is the full head on both families ("default" and "proportional" RoPE). Rounded to
        float32 where the published implementation rounds: the exponent, the power and its reciprocal.
        """
        import numpy as np

        pair = np.arange(self.num_rotated_pairs, dtype=np.float32)
        exponent = (2 * pair / np.float32(self.head_dim)).astype(np.float64)
        frequencies = np.zeros(self.head_dim // 2, dtype=np.float32)
        powers = np.power(self.rope_theta, exponent).astype(np.float32)
        frequencies[: self.num_rotated_pairs] = np.float32(1) / powers
        return frequencies

    def with_heads(self, num_kv_heads: int, group: int | None = None) -> Geometry:
        """The same layer with other heads; its own group unless given."""
        per_kv_head = self.gqa_group if group is None else group
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, num_qo_heads=num_kv_heads * per_kv_head)

    def for_rank(self, tp: int) -> Geometry:
        """The heads of one of ``tp`` tensor-parallel ranks; KV heads are replicated where there are fewer.

        Raises UsageError if the query heads do not divide, or a rank would hold part of a KV head's group.
        """
        if tp < 1:
            raise UsageError(f"--tp must be at least 1, got {tp}")
        if tp == 1:
            return self
        if self.tensor_parallel != 1:
            raise UsageError(f"{self.name} is one rank's share already: use {self.model}-{self.family}")
        if self.num_qo_heads % tp:
            fitting = ", ".join(str(n) for n in range(1, self.num_qo_heads + 1) if self.num_qo_heads % n == 0)
            raise UsageError(
                f"--tp {tp} does not divide the {self.num_qo_heads} query heads of {self.name}: use {fitting}"
            )
        if max(self.num_kv_heads, tp) % min(self.num_kv_heads, tp):
            raise UsageError(f"--tp {tp} splits a KV head of {self.name} ({self.num_kv_heads} KV heads)")
        return dataclasses.replace(
            self,
            name=f"{self.name}@tp{tp}",
            num_qo_heads=self.num_qo_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
            tensor_parallel=tp,
        )


def contradictions(geometry: Geometry) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) of everything in a geometry that no kernel could serve or that contradicts itself.

    The built-in ones and those of files (geometry_file.py) pass through here alike.
    """
    one = geometry
    for name in ("num_layers", "num_qo_heads", "num_kv_heads", "hidden_size", "max_positions", "rotary_dim"):
        if not 1 <= getattr(one, name) <= INT32_MAX:
            yield name, f"must be from 1 to {INT32_MAX}, got {getattr(one, name)}"
            return
    if one.num_qo_heads % one.num_kv_heads:
        words = f"{one.num_kv_heads} KV heads do not divide {one.num_qo_heads} query heads: each serves a whole group"
        yield "num_kv_heads", words
    if one.head_dim not in HEAD_DIMS:
        known = " and ".join(map(str, HEAD_DIMS))
        yield "head_dim", f"no kernel is compiled for {one.head_dim}: compiled are {known}"
    elif one.num_qo_heads * one.head_dim > INT32_MAX:
        yield "num_qo_heads", f"a row of {one.num_qo_heads} x {one.head_dim} elements does not fit an int32"
    if not 0 <= one.num_shared_kv_layers < one.num_layers:
        words = f"must leave a layer that owns K/V: from 0 to {one.num_layers - 1}, got {one.num_shared_kv_layers}"
        yield "num_shared_kv_layers", words
    if one.max_positions > MAX_POSITIONS:
        yield "max_positions", f"must be up to {MAX_POSITIONS} (2^24), got {one.max_positions}"
    if (one.window is None) != (one.family == "global"):
        words = "a global layer has none: what has one is local" if one.window is not None else "a local layer has one"
        yield "window", words
    elif one.window is not None and not 1 <= one.window <= one.max_positions:
        yield "window", f"must be from 1 to the {one.max_positions} positions, got {one.window}"
    if one.rotary_dim % 2 or one.rotary_dim > one.head_dim:
        yield "rotary_dim", f"must be even and up to head_dim {one.head_dim}, got {one.rotary_dim}"
    elif not 1 <= one.num_rotated_pairs <= one.rotary_dim // 2:
        words = f"of {one.rotary_dim // 2} pairs must turn from 1 to all, got {one.num_rotated_pairs}"
        yield "num_rotated_pairs", words
    elif one.rotary_dim < one.head_dim and one.num_rotated_pairs != one.rotary_dim // 2:
        words = f"a rotation of {one.rotary_dim} columns turns all of its {one.rotary_dim // 2} pairs"
        yield "num_rotated_pairs", words
    if not one.rope_theta > 1:
        yield "rope_theta", f"must be above 1, got {one.rope_theta:g}"


_LOCAL: dict[str, Any] = {
    "family": "local",
    "head_dim": 256,
    "rope_theta": 1e4,
    "rotary_dim": 256,
    "num_rotated_pairs": 128,
    "k_eq_v": False,
}
_GLOBAL: dict[str, Any] = {
    "family": "global",
    "head_dim": 512,
    "window": None,
    "rope_theta": 1e6,
    "rotary_dim": 512,
    "num_rotated_pairs": 64,
}


def _families(
    model: str,
    *,
    hidden_size: int,
    num_qo_heads: int,
    max_positions: int,
    window: int,
    k_eq_v: bool,
    layers: tuple[int, int],
    shared_kv_layers: tuple[int, int],
    num_kv_heads: tuple[int, int],
) -> tuple[Geometry, Geometry]:
    """Both families of a model; the pairs are (local, global)."""
    common: dict[str, Any] = {
        "model": model,
        "hidden_size": hidden_size,
        "num_qo_heads": num_qo_heads,
        "max_positions": max_positions,
    }

    def own(index: int) -> dict[str, Any]:
        return {
            "name": f"{model}-{FAMILIES[index]}",
            "num_layers": layers[index],
            "num_shared_kv_layers": shared_kv_layers[index],
            "num_kv_heads": num_kv_heads[index],
        }

    return (
        Geometry(**_LOCAL, **common, **own(0), window=window),
        Geometry(**_GLOBAL, **common, **own(1), k_eq_v=k_eq_v),
    )


# The shared layers are the model's last 20 (E2B) and 18 (E4B). A global layer stands at every fifth (E2B) or
# sixth (E4B) place, so those last layers are 16 local + 4 global, and 15 local + 3 global.
_ALL = (
    *_families("e2b", hidden_size=1536, num_qo_heads=8, max_positions=131072, window=512, k_eq_v=False,
               layers=(28, 7), shared_kv_layers=(16, 4), num_kv_heads=(1, 1)),
    *_families("e4b", hidden_size=2560, num_qo_heads=8, max_positions=131072, window=512, k_eq_v=False,
               layers=(35, 7), shared_kv_layers=(15, 3), num_kv_heads=(2, 2)),
    *_families("12b", hidden_size=3840, num_qo_heads=16, max_positions=262144, window=1024, k_eq_v=True,
               layers=(40, 8), shared_kv_layers=(0, 0), num_kv_heads=(8, 1)),
    *_families("26b-a4b", hidden_size=2816, num_qo_heads=16, max_positions=262144, window=1024, k_eq_v=True,
               layers=(25, 5), shared_kv_layers=(0, 0), num_kv_heads=(8, 2)),
    *_families("31b", hidden_size=5376, num_qo_heads=32, max_positions=262144, window=1024, k_eq_v=True,
               layers=(50, 10), shared_kv_layers=(0, 0), num_kv_heads=(16, 4)),
)  # fmt: skip

GEOMETRIES: Mapping[str, Geometry] = MappingProxyType({geometry.name: geometry for geometry in _ALL})
"""All geometries of one rank, by name."""

MODELS: tuple[str, ...] = tuple(dict.fromkeys(geometry.model for geometry in _ALL))
"""Names of the model sizes, smallest first."""


def model_families(model: str, tp: int = 1) -> tuple[Geometry, ...]:
    """The geometries of a model on one of ``tp`` ranks, local before global, where it has both. UsageError on an
    unknown name."""
    if model not in MODELS:
        raise UsageError(_unknown("model", model, MODELS))
    found = [geometry for geometry in GEOMETRIES.values() if geometry.model == model]
    return tuple(geometry.for_rank(tp) for geometry in sorted(found, key=lambda one: FAMILIES.index(one.family)))


def select_geometries(names: str, tp: int = 1) -> tuple[Geometry, ...]:
    """The geometries of a comma list of names, files, or of ``all``, in the order asked for, each once.

    A model's name alone means all of its families, and so does a file of one (``my.toml``, geometry_file.py);
    ``my.toml:local`` means one of them. Raises UsageError on an unknown name, with the known ones and the nearest
    match, on a file that is no geometry, and on two geometries of one name.
    """
    selected: dict[str, Geometry] = {}
    for part in (part.strip() for part in names.split(",")):
        name = part.lower()
        if is_geometry_file(part):
            from g4kv_cli.model.geometry_file import read_geometries  # late: most runs read no file

            found = list(read_geometries(part))
        elif name == "all":
            found = list(GEOMETRIES.values())
        elif name in MODELS:
            found = list(model_families(name))
        elif name in GEOMETRIES:
            found = [GEOMETRIES[name]]
        else:
            raise UsageError(_unknown("geometry", part, ("all", *MODELS, *GEOMETRIES)))
        for geometry in found:
            ranked = geometry.for_rank(tp)
            if selected.setdefault(geometry.name, ranked) != ranked:
                raise UsageError(f"--geometry {names}: two geometries are called {geometry.name}; rename one of them")
    return tuple(selected.values())


def names_file(names: str) -> bool:
    """True if one of a comma list of names is a file."""
    return any(is_geometry_file(part.strip()) for part in names.split(","))


def is_geometry_file(part: str) -> bool:
    """True for what names a file, with a family behind it or not."""
    file, _, family = part.rpartition(":")
    return part.endswith(".toml") or (file.endswith(".toml") and family != "")


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}"
