"""The usual mistakes of a prep kernel, as rows in float64: what one head of one token would get with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle import tolerance
from g4kv_cli.oracle.prep import pair_magnitude, rms_norm, rotate_half_rope
from g4kv_cli.oracle.suspects import Suspect, Suspects

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Part = Literal["q", "k", "v"]

_NEAREST_TOKENS = 32
"""Tokens whose positions are tried in place of a row's own."""


@dataclass(frozen=True, slots=True, eq=False)
class PrepRows:
    """What one call of prep was given, and the suspects of what it made.

    ``q`` [tokens, num_qo_heads, head_dim], ``k`` and ``v`` [tokens, num_kv_heads, head_dim] raw, ``v`` None where V is
    made of raw K; weights [head_dim]; ``cos``, ``sin`` [tokens, rotary_dim] of each token's position. ``turning``: the
    columns that a folded row of K has; None for rows of whole heads.
    """

    q: Array
    k: Array
    v: Array | None
    q_weight: Array
    k_weight: Array
    cos: Array
    sin: Array
    positions: npt.NDArray[np.int64]
    turning: npt.NDArray[np.intp] | None = None

    def suspects(self, part: Part) -> Suspects:
        """Suspects of the rows of one output."""
        if self.turning is not None and part != "v":
            return partial(self._folded_suspects, part, self.turning)
        return partial(self._value_suspects if part == "v" else self._rotated_suspects, part)

    def _folded_suspects(self, part: Part, turning: npt.NDArray[np.intp], token: int, head: int) -> Iterator[Suspect]:
        """Those of split rows, in the columns or with the weight that the row has; and the fold's own mistakes."""
        x, weight = (self.q, self.q_weight) if part == "q" else (self.k, self.k_weight)
        split = _rotated("", rms_norm(x[token, head], weight), self.cos[token], self.sin[token])
        k_weight = np.asarray(self.k_weight, np.float64)
        if part == "q":
            factor = k_weight.copy()
            factor[turning] = 1.0
            yield _scaled("of split rows, without the weight of K", split, np.ones_like(factor))
            yield _scaled("with the weight of K in the columns that turn, too", split, k_weight)
            yield _scaled("with the weight of K in the columns that turn, not in the others", split, k_weight / factor)
            for other in self._rotated_suspects(part, token, head):
                yield _scaled(other.words, other, factor)
            return
        half = turning.size // 2
        orders = {
            "of K, its first columns of all": np.arange(turning.size),
            "with its two halves exchanged": np.roll(turning, half),
            "with the columns of each pair side by side": np.stack([turning[:half], turning[half:]], 1).reshape(-1),
        }
        for words, columns in orders.items():
            yield _columns(words, split, columns)
        for other in self._rotated_suspects(part, token, head):
            yield _columns(other.words, other, turning)

    def _rotated_suspects(self, part: Part, token: int, head: int) -> Iterator[Suspect]:
        x = (self.q if part == "q" else self.k)[token, head]
        weight, other = (self.q_weight, self.k_weight) if part == "q" else (self.k_weight, self.q_weight)
        cos, sin, normed = self.cos[token], self.sin[token], rms_norm(x, weight)
        still = np.ones_like(cos), np.zeros_like(sin)
        yield _rotated("without the rotation", normed, *still)
        yield _rotated("rotated the other way", normed, cos, -sin)
        yield _interleaved("rotated in pairs (d, d + 1)", normed, cos, sin)
        yield _rotated("normed with 1 + weight", rms_norm(x, 1 + np.asarray(weight, np.float64)), cos, sin)
        yield _rotated("normed without a weight", rms_norm(x, None), cos, sin)
        yield _rotated(f"normed with the weight of {'K' if part == 'q' else 'Q'}", rms_norm(x, other), cos, sin)
        yield _rotated("without the norm", np.asarray(x, np.float64) * np.asarray(weight, np.float64), cos, sin)
        yield _rotated("as it came in", np.asarray(x, np.float64), *still)
        if head < self.k.shape[1]:
            if part == "k" and self.v is not None:
                yield _plain("of V", rms_norm(self.v[token, head], None))
            elif part == "k":
                yield _plain("of V (from raw K)", rms_norm(x, None))
            else:
                yield _rotated("of K", rms_norm(self.k[token, head], self.k_weight), cos, sin)
        for near in _nearest(len(self.positions), token):
            if self.positions[near] != self.positions[token]:
                words = f"rotated as position {int(self.positions[near])}"
                yield _rotated(words, normed, self.cos[near], self.sin[near])
                row = (self.q if part == "q" else self.k)[near, head]
                yield _rotated(f"made of the raw row of token {near}", rms_norm(row, weight), cos, sin)

    def _value_suspects(self, _part: Part, token: int, head: int) -> Iterator[Suspect]:
        k = self.k[token, head]
        x = k if self.v is None else self.v[token, head]
        cos, sin, k_normed = self.cos[token], self.sin[token], rms_norm(k, self.k_weight)
        yield _plain("as it came in", np.asarray(x, np.float64))
        yield _plain("normed with the weight of K", rms_norm(x, self.k_weight))
        yield _rotated("and rotated", rms_norm(x, None), cos, sin)
        yield _rotated("of K", k_normed, cos, sin)
        yield _plain("of K, not rotated", k_normed)
        yield _plain("made of K after its norm", rms_norm(k_normed, None))
        if self.v is not None:
            yield _plain("made of raw K", rms_norm(k, None))


def _nearest(tokens: int, token: int) -> list[int]:
    order = np.argsort(np.abs(np.arange(tokens) - token), kind="stable")
    return [int(at) for at in order[1 : _NEAREST_TOKENS + 1]]


def _plain(words: str, value: Float64) -> Suspect:
    return Suspect.row(words, value, tolerance.normed_limit(value))


def _scaled(words: str, of: Suspect, factor: Float64) -> Suspect:
    value, limit = of.of(slice(None))
    return Suspect.row(words, value * factor, limit * np.abs(factor) + tolerance.folded_limit(value * factor))


def _columns(words: str, of: Suspect, columns: npt.NDArray[np.intp]) -> Suspect:
    value, limit = of.of(slice(None))
    return Suspect.row(words, value[columns], limit[columns])


def _rotated(words: str, normed: Float64, cos: Array, sin: Array) -> Suspect:
    value = rotate_half_rope(normed[None, None], cos[None], sin[None])[0, 0]
    return _within(words, value, pair_magnitude(normed, cos.shape[-1]), cos, sin)


def _interleaved(words: str, normed: Float64, cos: Array, sin: Array) -> Suspect:
    """Pairs (2 i, 2 i + 1), each turned by the angle of column i."""
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    cos64, sin64 = (np.asarray(rows, np.float64)[:half] for rows in (cos, sin))
    value = normed.copy()
    even, odd = normed[:rotary_dim:2], normed[1:rotary_dim:2]
    value[:rotary_dim:2], value[1:rotary_dim:2] = even * cos64 - odd * sin64, odd * cos64 + even * sin64
    magnitude = np.abs(normed)
    magnitude[:rotary_dim] = np.repeat(np.hypot(even, odd), 2)
    return _within(words, value, magnitude, cos, sin)


def _within(words: str, value: Float64, magnitude: Float64, cos: Array, sin: Array) -> Suspect:
    length = np.ones_like(value)
    length[: cos.shape[-1]] = np.hypot(np.asarray(cos, np.float64), np.asarray(sin, np.float64))
    return Suspect.row(words, value, tolerance.rotated_limit(value, magnitude, length))
