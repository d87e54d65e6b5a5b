"""A wrong row is told whose it is: each usual mistake, made here by plain loops, and nothing where it is nobody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from g4kv_cli.oracle.attention import attend, concatenate
from g4kv_cli.oracle.attention_suspects import AttentionSuspects, RequestRows
from g4kv_cli.oracle.bfloat16 import BF16, round_to_bf16
from g4kv_cli.oracle.compare import ROWS, Axes, compare_values
from g4kv_cli.oracle.compare_attention import compare_attention
from g4kv_cli.oracle.prep_suspects import PrepRows
from g4kv_cli.oracle.reference import expected_rotated, expected_value_rows
from g4kv_cli.oracle.suspects import MAX_NAMED
from g4kv_cli.records.run import Mismatch, to_json
from g4kv_cli.report.console import mismatch_lines

Array = Any

HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, WINDOW_LEFT, SM_SCALE = 64, 4, 2, 16, 39, 0.25
LENGTHS = ((70, 4), (50, 1), (41, 2))
"""Keys and queries of each request."""
REQUEST, TOKEN, HEAD = 0, 1, 2
"""The row that goes wrong: of the second query of four, so that there are two later keys; KV head 1."""


def _requests() -> list[RequestRows]:
    random = np.random.default_rng(5)

    def rows(*shape: int) -> Array:
        return (random.standard_normal((*shape, HEAD_DIM)) * 1.5).astype(BF16)

    return [
        RequestRows(rows(queries, HEADS), rows(keys, KV_HEADS) * BF16.type(0.5), rows(keys, KV_HEADS), 0, number)
        for number, (keys, queries) in enumerate(LENGTHS)
    ]


def _softmax_row(
    q: Array, k: Array, v: Array, keys: list[int], scale: float = SM_SCALE, values: list[int] | None = None
) -> Array:
    """The formula key by key; ``values``: which V rows are taken for these keys."""
    scores = [scale * float(np.dot(q.astype(float), k[j].astype(float))) for j in keys]
    weights = [np.exp(score - max(scores)) for score in scores]
    out = np.zeros(HEAD_DIM)
    for weight, j in zip(weights, keys if values is None else values, strict=True):
        out += weight / sum(weights) * v[j].astype(float)
    return out


def _position(request: RequestRows, token: int) -> int:
    return len(request.k) - len(request.q) + token


def _attention_mistakes() -> dict[str, Callable[[list[RequestRows]], Array]]:
    kv_head, other_head = HEAD * KV_HEADS // HEADS, 0

    def row(
        change: Callable[[int], list[int]], k_of: str = "k", v_of: str = "v", scale: float = SM_SCALE,
        head: int = kv_head, v_head: int = kv_head, keys_of: int = REQUEST, shift: int = 0,
    ) -> Callable[[list[RequestRows]], Array]:  # fmt: skip
        def make(requests: list[RequestRows]) -> Array:
            own, given = requests[REQUEST], requests[keys_of]
            keys = [j for j in change(_position(own, TOKEN)) if 0 <= j < len(given.k)]
            k, v = getattr(given, k_of)[:, head], getattr(given, v_of)[:, v_head]
            values = [(j + shift) % len(v) for j in keys]
            return _softmax_row(own.q[TOKEN, HEAD], k, v, keys, scale, values)

        return make

    def seen(i: int) -> list[int]:
        return list(range(i - WINDOW_LEFT, i + 1))

    return {
        "with a window one key longer": row(lambda i: list(range(i - WINDOW_LEFT - 1, i + 1))),
        "with a window one key shorter": row(lambda i: list(range(i - WINDOW_LEFT + 1, i + 1))),
        "without the window": row(lambda i: list(range(i + 1))),
        "with the next key too": row(lambda i: list(range(i - WINDOW_LEFT, i + 2))),
        "without the query's own key": row(lambda i: list(range(i - WINDOW_LEFT, i))),
        "without the mask of later keys": row(lambda i: list(range(i - WINDOW_LEFT, LENGTHS[REQUEST][0]))),
        "without any mask": row(lambda i: list(range(LENGTHS[REQUEST][0]))),
        "with V in place of K": row(seen, k_of="v"),
        "with K in place of V": row(seen, v_of="k"),
        "with the V row of the key before": row(seen, shift=-1),
        "with the V row of the key behind": row(seen, shift=1),
        "without sm_scale": row(seen, scale=1.0),
        "with sm_scale twice": row(seen, scale=SM_SCALE**2),
        "with 1 / sqrt(head_dim) as one more scale": row(seen, scale=SM_SCALE / HEAD_DIM**0.5),
        "with equal weights": row(seen, scale=0.0),
        "with KV head 0": row(seen, head=other_head, v_head=other_head),
        "with V of KV head 0": row(seen, v_head=other_head),
        "with the keys of request 1": row(lambda i: [j for j in seen(i) if j < LENGTHS[1][0]], keys_of=1),
        "with the keys that the last query of request 2 sees": row(
            lambda _i: list(range(LENGTHS[2][0] - 1 - WINDOW_LEFT, LENGTHS[2][0])), keys_of=2
        ),
        "without the keys of its logical page 3": row(lambda i: [j for j in seen(i) if j // PAGE_SIZE != 3]),
    }


def _judge(got: Array, requests: list[RequestRows]) -> Mismatch | None:
    parts = [
        attend(request.q, request.k, request.v, first_key=0, window_left=WINDOW_LEFT, sm_scale=SM_SCALE)
        for request in requests
    ]
    suspects = AttentionSuspects(requests, WINDOW_LEFT, SM_SCALE, PAGE_SIZE)
    of = [number for number, request in enumerate(requests) for _ in request.q]
    return compare_attention("out", got, concatenate(parts), Axes(ROWS, per_token={"request": of}), suspects)


def _right(requests: list[RequestRows]) -> Array:
    rows = []
    for request in requests:
        for token in range(len(request.q)):
            i = _position(request, token)
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                keys = [j for j in range(i - WINDOW_LEFT, i + 1) if j >= 0]
                rows.append(_softmax_row(request.q[token, head], request.k[:, kv], request.v[:, kv], keys))
    return round_to_bf16(np.stack(rows).reshape(-1, HEADS, HEAD_DIM))


def test_a_row_that_is_a_mistakes_in_all_columns_but_the_last_is_not_named() -> None:
    requests = _requests()
    got = _right(requests)
    got[TOKEN, HEAD] = round_to_bf16(_attention_mistakes()["without any mask"](requests))
    got[TOKEN, HEAD, -1] += 1
    found = _judge(got, requests)
    assert found is not None
    assert found.first_row_equals == ""


@pytest.mark.parametrize("words", _attention_mistakes())
def test_a_mistake_of_attention_is_named(words: str) -> None:
    requests = _requests()
    got = _right(requests)
    assert _judge(got, requests) is None
    got[TOKEN, HEAD] = round_to_bf16(_attention_mistakes()[words](requests))
    found = _judge(got, requests)
    assert found is not None
    assert found.first_row_equals == f"the expected row {words}"
    assert (found.first["token"], found.first["head"]) == (TOKEN, HEAD)


def test_another_row_is_named_by_what_differs() -> None:
    requests = _requests()
    right = _right(requests)
    for other, words in (
        ((TOKEN, 0), "head 0"),
        ((2, HEAD), "token 2"),
        ((4, 1), "token 4, head 1, request 1"),
    ):
        got = right.copy()
        got[TOKEN, HEAD] = right[other]
        found = _judge(got, requests)
        assert found is not None
        assert found.first_row_equals == f"the expected row of {words}"


def test_a_row_of_nobody_has_no_name() -> None:
    requests = _requests()
    got = _right(requests)
    got[TOKEN, HEAD, 5] = 3.0
    got[3, 1] = 0
    found = _judge(got, requests)
    assert found is not None
    assert found.first_row_equals == ""
    got[TOKEN, HEAD] = _right(requests)[TOKEN, HEAD]
    found = _judge(got, requests)
    assert found is not None
    assert found.first_row_equals == "zero in every column"
    got[3, 1, 0] = np.nan
    found = _judge(got, requests)
    assert found is not None
    assert "non-finite" in found.operation
    assert found.first_row_equals == ""


def test_the_worst_row_is_named_too_where_it_is_another() -> None:
    requests = _requests()
    right = _right(requests)
    got = right.copy()
    got[0, 0] = right[0, 3]
    got[2, 1] = right[2, 0] * BF16.type(-4)
    got[2, 1] = round_to_bf16(_attention_mistakes()["without sm_scale"](requests)) * BF16.type(8)
    found = _judge(got, requests)
    assert found is not None
    assert found.worst["token"] == 2
    assert found.first_row_equals == "the expected row of head 3"
    assert found.worst_row_equals == ""
    record = to_json(found)
    assert record["first_row_equals"] == "the expected row of head 3"
    assert "worst_row_equals" not in record
    lines = mismatch_lines(found)
    assert lines[2] == "         that row equals the expected row of head 3"


def test_rows_that_are_all_alike_are_not_listed_without_end() -> None:
    value = np.ones((50, 2, HEAD_DIM))
    value[0, 0] = 2
    expected = expected_value_rows(value.astype(BF16))
    got = round_to_bf16(expected.value)
    got[0, 0] = -1
    expected.value[1:] = -1
    found = compare_values("v", got, expected, Axes(ROWS))
    assert found is not None
    assert found.first_row_equals.count("token") == MAX_NAMED


# --- prep ---------------------------------------------------------------------------------------------------------

ROTARY = 32
EPS = 1e-6


def _prep_rows(*, with_v: bool) -> PrepRows:
    random = np.random.default_rng(7)
    tokens = 5

    def rows(*shape: int) -> Array:
        return random.standard_normal(shape).astype(BF16)

    angle = random.uniform(0, 6, (tokens, ROTARY // 2))
    cos, sin = (np.concatenate([part, part], 1).astype(BF16) for part in (np.cos(angle), np.sin(angle)))
    weights = [(1 + random.uniform(0, 1, HEAD_DIM)).astype(BF16) for _ in range(2)]
    v = rows(tokens, KV_HEADS, HEAD_DIM) if with_v else None
    return PrepRows(
        rows(tokens, HEADS, HEAD_DIM),
        rows(tokens, KV_HEADS, HEAD_DIM),
        v,
        *weights,
        cos,
        sin,
        np.arange(10, 10 + tokens),
    )


def _norm(x: Array, weight: Array | float = 1.0) -> Array:
    wide = x.astype(float)
    return wide / np.sqrt(np.mean(wide * wide) + EPS) * np.asarray(weight, float)


def _turn(x: Array, cos: Array, sin: Array, pairs: list[tuple[int, int]] | None = None) -> Array:
    out = np.array(x, float)
    for angle, (a, b) in enumerate(pairs or [(i, i + ROTARY // 2) for i in range(ROTARY // 2)]):
        c, s = float(cos[angle]), float(sin[angle])
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


_NEIGHBOURS = [(2 * i, 2 * i + 1) for i in range(ROTARY // 2)]

ROTATED_MISTAKES: dict[str, Callable[[PrepRows, Array, Array, Array, int, int], Array]] = {
    # given, raw row, own weight, the other weight, token, head
    "without the rotation": lambda g, x, w, o, t, h: _norm(x, w),
    "rotated the other way": lambda g, x, w, o, t, h: _turn(_norm(x, w), g.cos[t], -g.sin[t]),
    "rotated in pairs (d, d + 1)": lambda g, x, w, o, t, h: _turn(_norm(x, w), g.cos[t], g.sin[t], _NEIGHBOURS),
    "rotated as position 13": lambda g, x, w, o, t, h: _turn(_norm(x, w), g.cos[3], g.sin[3]),
    "normed with 1 + weight": lambda g, x, w, o, t, h: _turn(_norm(x, 1 + w.astype(float)), g.cos[t], g.sin[t]),
    "normed without a weight": lambda g, x, w, o, t, h: _turn(_norm(x), g.cos[t], g.sin[t]),
    "normed with the weight of": lambda g, x, w, o, t, h: _turn(_norm(x, o), g.cos[t], g.sin[t]),
    "without the norm": lambda g, x, w, o, t, h: _turn(x.astype(float) * w.astype(float), g.cos[t], g.sin[t]),
    "as it came in": lambda g, x, w, o, t, h: x.astype(float),
}


@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("words", ROTATED_MISTAKES)
def test_a_mistake_of_the_rotated_rows_is_named(words: str, part: str) -> None:
    given, token, head = _prep_rows(with_v=True), 2, 1
    x, weight, other = given.k, given.k_weight, given.q_weight
    if part == "q":
        x, weight, other = given.q, given.q_weight, given.k_weight
    expected = expected_rotated(x, weight, given.cos, given.sin)
    got = round_to_bf16(expected.value)
    suspects = given.suspects("q" if part == "q" else "k")
    assert compare_values(part, got, expected, Axes(ROWS), suspects) is None
    got[token, head] = round_to_bf16(ROTATED_MISTAKES[words](given, x[token, head], weight, other, token, head))
    found = compare_values(part, got, expected, Axes(ROWS), suspects)
    assert found is not None
    other_name = " K" if part == "q" else " Q"
    assert found.first_row_equals == f"the expected row {words}{other_name if words.endswith('weight of') else ''}"


def test_a_neighbours_raw_row_at_ones_own_position() -> None:
    given = _prep_rows(with_v=True)
    expected = expected_rotated(given.q, given.q_weight, given.cos, given.sin)
    got = round_to_bf16(expected.value)
    got[2, 0] = round_to_bf16(_turn(_norm(given.q[1, 0], given.q_weight), given.cos[2], given.sin[2]))
    found = compare_values("q", got, expected, Axes(ROWS), given.suspects("q"))
    assert found is not None
    assert found.first_row_equals == "the expected row made of the raw row of token 1"


VALUE_MISTAKES: dict[str, Callable[[PrepRows, Array, int, int], Array]] = {
    "as it came in": lambda g, x, t, h: x.astype(float),
    "normed with the weight of K": lambda g, x, t, h: _norm(x, g.k_weight),
    "and rotated": lambda g, x, t, h: _turn(_norm(x), g.cos[t], g.sin[t]),
    "of K": lambda g, x, t, h: _turn(_norm(g.k[t, h], g.k_weight), g.cos[t], g.sin[t]),
    "of K, not rotated": lambda g, x, t, h: _norm(g.k[t, h], g.k_weight),
    "made of K after its norm": lambda g, x, t, h: _norm(_norm(g.k[t, h], g.k_weight)),
    "made of raw K": lambda g, x, t, h: _norm(g.k[t, h]),
}


@pytest.mark.parametrize("with_v", [True, False], ids=["own V", "K=V"])
@pytest.mark.parametrize("words", VALUE_MISTAKES)
def test_a_mistake_of_v_is_named(words: str, with_v: bool) -> None:
    given, token, head = _prep_rows(with_v=with_v), 3, 1
    source = given.k if given.v is None else given.v
    expected = expected_value_rows(source)
    got = round_to_bf16(expected.value)
    got[token, head] = round_to_bf16(VALUE_MISTAKES[words](given, source[token, head], token, head))
    found = compare_values("v", got, expected, Axes(ROWS), given.suspects("v"))
    if words == "made of raw K" and not with_v:
        assert found is None  # that is what V is there
        return
    assert found is not None
    same = {"of K, not rotated": "normed with the weight of K"}  # where V is made of raw K
    named = found.first_row_equals.removeprefix("the expected row ").split(", or ")
    assert words in named
    assert set(named) <= {words, same.get(words, words), *(key for key, value in same.items() if value == words)}


def test_v_in_place_of_k() -> None:
    given = _prep_rows(with_v=True)
    assert given.v is not None
    expected = expected_rotated(given.k, given.k_weight, given.cos, given.sin)
    got = round_to_bf16(expected.value)
    got[1, 0] = round_to_bf16(_norm(given.v[1, 0]))
    found = compare_values("K in the pool", got, expected, Axes(ROWS, per_token={"page": [4] * 5}), given.suspects("k"))
    assert found is not None
    assert found.first_row_equals == "the expected row of V"
    got[1, 0] = round_to_bf16(expected.value)[1, 1]
    found = compare_values("K in the pool", got, expected, Axes(ROWS, per_token={"page": [4] * 5}), given.suspects("k"))
    assert found is not None
    assert found.first_row_equals == "the expected row of head 1"
