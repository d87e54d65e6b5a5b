"""The checked-geometry helper: widths by hand, integers of every kind, what is derived again."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from g4kv_cli.errors import ContractError
from g4kv_cli.model.checked import (
    check_head_relation,
    check_layout,
    check_pool,
    finite_f32,
    product_i32,
    product_i64,
    require_i32,
    require_i32_vector,
    require_integer,
    require_sequence,
    require_type,
)
from g4kv_cli.model.kv_layout import KvLayout

# 12b-local, 2 layers of 4-token pages, by hand: a block is 4 * 8 * 256 elements, a layer twice that.
LAYOUT = KvLayout(
    page_size=4,
    num_layers=2,
    num_kv_heads=8,
    head_dim=256,
    k_dim=256,
    kv_block_len=8192,
    layer_stride=16384,
    page_stride=32768,
)


def refusal(call: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(ContractError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("value", [7, np.int32(7), np.uint8(7), np.int64(7), np.array(7)])
def test_integers(value: object) -> None:
    number = require_integer("n", value)
    assert number == 7
    assert type(number) is int


@pytest.mark.parametrize(
    "value",
    [7.0, np.float32(7), True, np.bool_(True), "7", b"7", None, int, [7], np.array([7, 8]), 7 + 0j, Fraction(7)],
)
def test_what_is_no_integer(value: object) -> None:
    assert refusal(require_integer, "n", value) == ("integer", "n")


@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_i32_holds(value: int) -> None:
    assert require_i32("n", value) == value


@pytest.mark.parametrize("value", [-(2**31) - 1, 2**31, 2**32 + 1, 2**63, 10**400, -(10**4000)])
def test_i32_overflows(value: int) -> None:
    assert refusal(require_i32, "n", value) == ("fits_i32", "n")


def test_products_at_the_edge() -> None:
    assert product_i32("n", 2**15, 2**16 - 1) == 2147450880
    assert product_i32("n", 1, 2**31 - 1) == 2**31 - 1
    assert refusal(product_i32, "n", 2**15, 2**16) == ("fits_i32", "n")
    assert product_i64("n", 7, 9223372036854775807 // 7) == 2**63 - 1
    assert refusal(product_i64, "n", 2, 2**62) == ("fits_i64", "n")
    assert product_i64("n") == 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        (3.4028234663852886e38, 3.4028234663852886e38),
        (-1e38, -1e38),
        (3.5e38, None),
        (1e400, None),
        (float("nan"), None),
        (float("-inf"), None),
        (10**400, None),
        (True, None),
        ("0.5", None),
        (b"0.5", None),
        (None, None),
        (np.zeros(1), None),
        (float, None),
        (1j, None),
        (Decimal("sNaN"), None),
    ],
)
def test_finite_in_float32(value: object, number: float | None) -> None:
    assert finite_f32(value) == number


@pytest.mark.parametrize("values", [(1, 2), [1, 2], range(1, 3), np.array([1, 2])])
def test_sequences(values: object) -> None:
    assert require_sequence("s", values) == [1, 2]


@pytest.mark.parametrize("values", [None, 5, "12", b"12", {1, 2}, {1: 2}, np.array(5), np.zeros((1, 2)), iter([1])])
def test_what_is_no_sequence(values: object) -> None:
    assert refusal(require_sequence, "s", values) == ("argument_type", "s")


def test_types() -> None:
    assert require_type("layout", LAYOUT, KvLayout) is LAYOUT
    assert refusal(require_type, "layout", None, KvLayout) == ("argument_type", "layout")


@pytest.mark.parametrize(
    ("qo_heads", "kv_heads", "want"),
    [
        (16, 8, None),
        (16, 1, None),
        (8, 8, None),
        (8, 0, ("extent_positive", "num_kv_heads")),
        (8, -8, ("extent_positive", "num_kv_heads")),
        (0, 8, ("q_heads_multiple", "num_qo_heads")),
        (-8, 8, ("q_heads_multiple", "num_qo_heads")),
        (12, 8, ("q_heads_multiple", "num_qo_heads")),
        (2**32 + 8, 8, ("fits_i32", "num_qo_heads")),
        (8.0, 8, ("integer", "num_qo_heads")),
    ],
)
def test_head_relation(qo_heads: object, kv_heads: object, want: tuple[str, str] | None) -> None:
    if want is None:
        assert check_head_relation(qo_heads, kv_heads) == (qo_heads, kv_heads)
    else:
        assert refusal(check_head_relation, qo_heads, kv_heads) == want


def test_a_right_layout_comes_back_in_python_integers() -> None:
    """Its products must not be NumPy's: those wrap at 32 bits."""
    given = KvLayout(**{name: np.int32(getattr(LAYOUT, name)) for name in KvLayout.__slots__})
    checked = check_layout(given, head_dim=256, num_kv_heads=8)
    assert checked == LAYOUT
    assert all(type(getattr(checked, name)) is int for name in KvLayout.__slots__)


def test_a_wrapped_product_is_not_believed() -> None:
    """2^20 * 8 * 256 is 2^31: a 32-bit product would be -2^31, and the stored one says so."""
    wrapped = replace(LAYOUT, page_size=2**20, kv_block_len=-(2**31))
    assert refusal(check_layout, wrapped, head_dim=256, num_kv_heads=8) == ("kv_block_len", "layout.kv_block_len")


@pytest.mark.parametrize("page_size", [2**19 - 1, 2**19, 2**20, 2**31 - 1])
def test_strides_past_32_bits_are_right(page_size: int) -> None:
    """2 layers * 2 * page_size * 2048 elements: 2^32 at page_size 2^19. Kernels keep offsets in 64 bits."""
    layout = KvLayout.derive(page_size=page_size, num_layers=2, num_kv_heads=8, head_dim=256)
    assert check_layout(layout, head_dim=256, num_kv_heads=8).page_stride == 8192 * page_size


@pytest.mark.parametrize(
    ("pool_elems", "layer", "want"),
    [
        (32768, 0, 1),
        (7 * 32768, 1, 7),
        (0, 0, ("pool_not_empty", "pool")),
        (32767, 0, ("pool_not_empty", "pool")),
        (32769, 0, ("pool_whole_pages", "pool")),
        (32768, 2, ("layer_range", "layer")),
        (32768, -1, ("layer_range", "layer")),
        ((2**31 - 1) * 32768, 0, 2**31 - 1),
        (2**31 * 32768, 0, ("fits_i32", "pool pages")),
    ],
)
def test_pools(pool_elems: int, layer: int, want: int | tuple[str, str]) -> None:
    arguments = {"layout": LAYOUT, "layer": layer, "pool_elems": pool_elems, "head_dim": 256, "num_kv_heads": 8}
    if isinstance(want, int):
        checked = check_pool(**arguments)  # type: ignore[arg-type]
        assert (checked.num_pages, checked.layer, checked.layout) == (want, layer, LAYOUT)
    else:
        assert refusal(check_pool, **arguments) == want


def test_an_integer_without_a_text_is_described() -> None:
    """Python refuses to print integers of more than 4300 digits; the refusal must still be ours."""
    with pytest.raises(ContractError, match=r"got an integer of 16610 bits, want -2147483648"):
        require_i32("n", 10**5000)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([1, 2**31], "v[1]"),
        ([-(2**31) - 1, 1], "v[0]"),
        (np.array([1, 2**31]), "v[1]"),
        (np.array([2**63, 1], np.uint64), "v[0]"),
        ([1, True], "v[1]"),
        (np.array([True]), "v[0]"),
        ([1, 2.0], "v[1]"),
        (np.array([1.0]), "v[0]"),
        ([1, "2"], "v[1]"),
        ([1, None], "v[1]"),
    ],
)
def test_a_vector_names_the_element_that_is_no_int32(values: object, wrong: str) -> None:
    with pytest.raises(ContractError) as caught:
        require_i32_vector("v", values)
    assert caught.value.field == wrong
    assert caught.value.code in ("integer", "fits_i32")


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_a_vector_is_an_int32_copy(kind: type[np.integer]) -> None:
    values = np.array([3, 0, 7], kind)
    vector = require_i32_vector("v", values)
    values[0] = 1
    for made in (vector, require_i32_vector("v", [3, 0, 7]), require_i32_vector("v", [np.int8(3), 0, np.uint8(7)])):
        assert made.dtype == np.int32
        assert made.tolist() == [3, 0, 7]
    assert require_i32_vector("v", ()).shape == (0,)
    assert require_i32_vector("v", np.array([-(2**31), 2**31 - 1])).tolist() == [-(2**31), 2**31 - 1]
