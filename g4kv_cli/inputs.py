"""Logical tensors for a prep kernel, from (geometry, kind, seed): what the kernel reads, never where it writes.

The same arguments always give the same bits. RoPE tables hold only the rows that the positions name; an uploaded
table has NaN everywhere else, so that a read of any other row shows.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli.model.geometry import Geometry

Array = npt.NDArray[Any]
BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

InputKind = Literal["closed-form", "random", "tiny", "large"]
INPUT_KINDS: tuple[InputKind, ...] = ("closed-form", "random", "tiny", "large")

ROPE_PERIOD = 3
"""The closed form's RoPE rows repeat: identity, swap-negate, negate (exact in bf16)."""
IDENTITY, SWAP_NEGATE, NEGATE = range(ROPE_PERIOD)

_Q_SIGNS, _K_SIGNS = 1, 2

KEPT_NUMBERS = 32 << 20
"""Random numbers that are kept in all, 128 MiB. Cases of one kind draw the same ones in each geometry, more or fewer
of them; to draw them takes longer than all that is made of them."""


class NormalNumbers:
    """Standard normal numbers, float32, in the order in which the generator of one seed draws them."""

    def __init__(self, seed: tuple[int, ...]) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._numbers = np.empty(0, np.float32)
        self._states = {0: self._random.bit_generator.state}
        """Of the generator behind so many numbers."""

    def __len__(self) -> int:
        return self._numbers.size

    def first(self, count: int) -> Array:
        """The first so many, read-only; those that were drawn before are not drawn again."""
        more = count - len(self)
        if more > 0:
            self._numbers = np.concatenate([self._numbers, self._random.standard_normal(more, dtype=np.float32)])
            self._numbers.flags.writeable = False
            self._states[count] = self._random.bit_generator.state
        return self._numbers[:count]

    def behind(self, count: int) -> np.random.Generator:
        """A generator that has drawn so many."""
        drawn = max(known for known in self._states if known <= count)
        random = np.random.Generator(np.random.PCG64())
        random.bit_generator.state = self._states[drawn]
        if drawn < count:
            random.standard_normal(count - drawn, dtype=np.float32)
            self._states[count] = random.bit_generator.state
        return random


_kept: OrderedDict[tuple[int, ...], NormalNumbers] = OrderedDict()


def normal_numbers(seed: tuple[int, ...], count: int) -> NormalNumbers:
    """Those of a seed, of which ``count`` will be asked for; the ones used last are kept for the next who asks."""
    if count > KEPT_NUMBERS:
        return NormalNumbers(seed)
    found = _kept.pop(seed, None) or NormalNumbers(seed)
    found.first(count)
    _kept[seed] = found
    while sum(map(len, _kept.values())) > KEPT_NUMBERS:
        _kept.popitem(last=False)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PrepInputs:
    """What one prep call reads. All tensors bf16 except ``positions``.

    ``q`` [tokens, num_qo_heads, head_dim]; ``k``, ``v`` [tokens, num_kv_heads, head_dim], ``v`` None where V comes
    from raw K; weights [head_dim]; ``cos``, ``sin`` [tokens, rotary_dim]: the table row of each token's position;
    ``positions`` int64 [tokens]; ``table_positions``: rows of the whole table.
    """

    q: Array
    k: Array
    v: Array | None
    q_weight: Array
    k_weight: Array
    cos: Array
    sin: Array
    positions: npt.NDArray[np.int64]
    table_positions: int

    @property
    def value_source(self) -> Array:
        """The raw rows that V is made from: ``v``, or ``k`` where there is none."""
        return self.k if self.v is None else self.v

    @property
    def rotary_dim(self) -> int:
        """Columns of the RoPE tables."""
        return int(self.cos.shape[-1])


def make_inputs(
    geometry: Geometry,
    kind: InputKind,
    *,
    seed: int,
    positions: Sequence[int],
    rotary_dim: int,
    table_positions: int,
    with_v: bool,
    folded: bool = False,
) -> PrepInputs:
    """The inputs of one call. ``positions`` [tokens], each below ``table_positions``; ``rotary_dim`` even. ``folded``:
    for rows of K that are folded, which only pairs that the geometry turns may turn."""
    at = np.asarray(positions, dtype=np.int64)
    if kind == "closed-form":
        return _closed_form(geometry, at, rotary_dim, table_positions, with_v, folded)
    scale, head_dim = _scales(kind, len(at)), geometry.head_dim
    heads = [geometry.num_qo_heads, geometry.num_kv_heads, *([geometry.num_kv_heads] if with_v else [])]
    ends = list(itertools.accumulate((len(at) * count * head_dim for count in heads), initial=0))
    numbers = normal_numbers((seed, len(at), head_dim, INPUT_KINDS.index(kind)), ends[-1])

    def rows(number: int) -> Array:
        values = numbers.first(ends[-1])[ends[number] : ends[number + 1]]
        return (values.reshape(len(at), heads[number], head_dim) * scale[:, None, None]).astype(BF16)

    q, k = rows(0), rows(1)
    v = rows(2) if with_v else None
    random = numbers.behind(ends[-1])
    cos, sin = rope_rows(geometry, at, rotary_dim)
    return PrepInputs(
        q, k, v, _random_weight(random, head_dim), _random_weight(random, head_dim), cos, sin, at, table_positions
    )


def rope_rows(geometry: Geometry, positions: npt.NDArray[np.int64], rotary_dim: int) -> tuple[Array, Array]:
    """(cos, sin), bf16 [tokens, rotary_dim]: the angle is one float32 product, its cosine is cast to bf16.

    With ``rotary_dim`` the whole head the frequencies are the model's; a narrower rotation (no Gemma 4 model has
    one, the kernels must still get it right) uses ``theta^(-2i / rotary_dim)``. The second half repeats the first.
    """
    if rotary_dim == geometry.head_dim:
        frequencies = geometry.inv_freq()
    else:
        pair = np.arange(rotary_dim // 2, dtype=np.float64)
        frequencies = (geometry.rope_theta ** (-2 * pair / rotary_dim)).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * frequencies[None, :]
    # float64 functions of the float32 angle: the bf16 result then does not depend on a math library's last bit.
    wide = np.concatenate([angles, angles], axis=-1).astype(np.float64)
    return np.cos(wide).astype(np.float32).astype(BF16), np.sin(wide).astype(np.float32).astype(BF16)


def turning_columns(geometry: Geometry) -> npt.NDArray[np.intp]:
    """The columns of a head whose pair has a frequency, ascending: those that a folded row of K keeps."""
    return np.flatnonzero(np.tile(geometry.inv_freq(), 2))


def table_of(rows: Array, positions: npt.NDArray[np.int64], table_positions: int) -> Array:
    """The whole table [table_positions, rotary_dim] with NaN (0xffff) in every row that no position names."""
    table = np.full((table_positions, rows.shape[-1]), 0xFFFF, dtype=np.uint16).view(BF16)
    table[positions] = rows
    return table


def _scales(kind: InputKind, tokens: int) -> npt.NDArray[np.float32]:
    """A magnitude per token. tiny: mean squares around eps (1e-6) and far below; large: squares stay in float32."""
    steps = {"random": [1.0], "tiny": [1e-3, 3e-4, 2e-3, 1e-5], "large": [40.0, 1e3, 1e4, 300.0]}[kind]
    return np.resize(np.asarray(steps, dtype=np.float32), tokens)


def _random_weight(random: np.random.Generator, head_dim: int) -> Array:
    """Norm weights around +-1, one in eight negative: neither 0 nor one sign, so a lost weight shows."""
    magnitude = 1 + 0.25 * random.standard_normal(head_dim)
    return np.where(random.random(head_dim) < 0.125, -magnitude, magnitude).astype(np.float32).astype(BF16)


def closed_form_signs(
    positions: npt.NDArray[np.int64], heads: int, head_dim: int, *, of_query: bool
) -> npt.NDArray[np.int8]:
    """+1 and -1 [tokens, heads, head_dim], without period along any axis: a row's signs name its position and head.

    One bit of a multiplicative hash (SplitMix64's finaliser) of (position, head, dim, Q or K). Read-only.
    """
    if len(positions) * heads * head_dim > KEPT_SIGNS:
        return _signs(tuple(positions.tolist()), heads, head_dim, of_query)
    return _kept_signs(tuple(positions.tolist()), heads, head_dim, of_query)


def _signs(positions: tuple[int, ...], heads: int, head_dim: int, of_query: bool) -> npt.NDArray[np.int8]:
    where = (
        np.array(positions, np.int64).astype(np.uint64)[:, None, None] * np.uint64(0x9E37_79B9_7F4A_7C15)
        + np.arange(heads, dtype=np.uint64)[None, :, None] * np.uint64(0xD1B5_4A32_D192_ED03)
        + np.arange(head_dim, dtype=np.uint64)[None, None, :] * np.uint64(0x8CB9_2BA7_2F3D_8DD7)
        + np.uint64(_Q_SIGNS if of_query else _K_SIGNS)
    )
    where ^= where >> np.uint64(30)
    where *= np.uint64(0xBF58_476D_1CE4_E5B9)
    where ^= where >> np.uint64(27)
    where *= np.uint64(0x94D0_49BB_1331_11EB)
    signs = np.where(where >> np.uint64(63), -1, 1).astype(np.int8)
    signs.flags.writeable = False
    return signs


KEPT_SIGNS = 1 << 18
"""No more are kept for the next call that has the same tokens, as most refused calls have."""
_kept_signs = lru_cache(maxsize=32)(_signs)


def closed_form_weight(head_dim: int) -> npt.NDArray[np.float32]:
    """Norm weights 1, 1 + 1/128, .. 1 + 127/128, again from 1: exact in bf16, and never 0 (0 looks unwritten)."""
    return (1 + (np.arange(head_dim) % 128) / 128).astype(np.float32)


def closed_form_k_weight(head_dim: int, *, folded: bool) -> npt.NDArray[np.float32]:
    """K's: the negated weights; of folded rows negated powers of two, so that Q's weight times K's is exact in bf16."""
    if not folded:
        return -closed_form_weight(head_dim)
    return -np.exp2((np.arange(head_dim) % 5) - 2).astype(np.float32)


def _closed_form(
    geometry: Geometry, positions: npt.NDArray[np.int64], rotary_dim: int, table_positions: int, with_v: bool,
    folded: bool,
) -> PrepInputs:  # fmt: skip
    """Rows of one magnitude each, so that mean(x^2) is exact; the norm erases it and the signs carry the identity."""
    tokens = len(positions)

    def rows(signs: npt.NDArray[np.int8]) -> Array:
        heads = signs.shape[1]
        # 2, 2.25, .. 3.75: exact in bf16, its square exact in float32.
        magnitude = 2 + ((3 * np.arange(tokens)[:, None] + 5 * np.arange(heads)[None, :]) % 8) / 4
        return (signs * magnitude[:, :, None]).astype(np.float32).astype(BF16)

    q_signs = closed_form_signs(positions, geometry.num_qo_heads, geometry.head_dim, of_query=True)
    k_signs = closed_form_signs(positions, geometry.num_kv_heads, geometry.head_dim, of_query=False)
    weight = closed_form_weight(geometry.head_dim)
    turn = positions % ROPE_PERIOD
    cos = np.choose(turn, [1.0, 0.0, -1.0])[:, None] * np.ones(rotary_dim)
    sin = np.choose(turn, [0.0, 1.0, 0.0])[:, None] * np.ones(rotary_dim)
    if folded:
        still = np.arange(rotary_dim) % (rotary_dim // 2) >= geometry.num_rotated_pairs
        cos[:, still], sin[:, still] = 1.0, 0.0
    return PrepInputs(
        q=rows(q_signs),
        k=rows(k_signs),
        v=rows(-k_signs) if with_v else None,
        q_weight=weight.astype(BF16),
        k_weight=closed_form_k_weight(geometry.head_dim, folded=folded).astype(BF16),
        cos=cos.astype(np.float32).astype(BF16),
        sin=sin.astype(np.float32).astype(BF16),
        positions=positions,
        table_positions=table_positions,
    )
