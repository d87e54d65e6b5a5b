"""Offsets against numbers worked out by hand and against NumPy's index arithmetic over the pool's shape."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_format import k_columns, k_dim_of
from g4kv_cli.model.kv_layout import KV_KINDS, Coordinate, KvLayout, KvLayoutParameters
from g4kv_cli.model.pool_image import PoolImage
from g4kv_cli.model.slots import derived_layout

KIB, MIB = 1024, 1024 * 1024


def layout_of(name: str, page_size: int = 16) -> KvLayout:
    return derived_layout(GEOMETRIES[name], page_size)


def test_strides_of_12b_local_by_hand() -> None:
    layout = layout_of("12b-local")
    assert layout.slot_stride("k") == layout.slot_stride("v") == 2048  # 8 heads of 256
    assert layout.kv_block_len == 32768  # 16 slots of 2048
    assert layout.layer_stride == 65536  # K and V
    assert layout.page_stride == 2621440  # 40 layers
    assert layout.bytes_per_token == 327680  # 40 layers, K and V, 2048 elements of 2 bytes
    assert layout.pool_elems(3) == 7864320
    assert layout.pool_bytes(3) == 15 * MIB


@pytest.mark.parametrize(
    ("name", "page_bytes"),
    [("12b-local", 5 * MIB), ("12b-global", 256 * KIB), ("31b-local", 12 * MIB + 512 * KIB)],
)
def test_page_bytes(name: str, page_bytes: int) -> None:
    assert layout_of(name).page_bytes == page_bytes


@pytest.mark.parametrize(
    ("name", "past_int32", "past_uint32"),
    [
        # 2^31 and 2^32 over page_stride, rounded up: 6553600, 2621440, 1638400 and 655360 elements a page.
        ("31b-local", 328, 656),  # 327.68, 655.36
        ("12b-local", 820, 1639),  # 819.2, 1638.4
        ("26b-a4b-local", 1311, 2622),  # 1310.72, 2621.44
        ("31b-global", 3277, 6554),  # 3276.8, 6553.6
        ("12b-global", 16384, 32768),  # 131072 elements a page divide both
    ],
)
def test_first_page_past_32_bits(name: str, past_int32: int, past_uint32: int) -> None:
    layout = layout_of(name)
    assert layout.first_page_past(31) == past_int32
    assert layout.first_page_past(32) == past_uint32
    for page, limit in ((past_int32, np.iinfo(np.int32).max), (past_uint32, np.iinfo(np.uint32).max)):
        assert layout.element_offset(page, 0, "k", 0, 0, 0) > limit
        assert layout.element_offset(page - 1, 0, "k", 0, 0, 0) <= limit


def test_one_offset_by_hand() -> None:
    layout = layout_of("12b-local")
    # page 820 + V block + slot 3 + head 7 + dim 128
    assert layout.element_offset(820, 0, "v", 3, 7, 128) == 2149580800 + 32768 + 3 * 2048 + 7 * 256 + 128
    # page 1, layer 2
    assert layout.layer_offset(1, 2, "k") == 2621440 + 2 * 65536
    assert layout.layer_offset(1, 2, "v") == 2621440 + 2 * 65536 + 32768


@st.composite
def coordinates_in_a_pool(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape [page][layer][2][slot][head][dim], an index into it); pages as many as int32 ids allow."""
    layers, slots, heads, dims = (draw(st.integers(1, most)) for most in (60, 256, 16, 512))
    shape = (1 << 31, layers, 2, slots, heads, dims)
    return shape, tuple(draw(st.integers(0, extent - 1)) for extent in shape)


@given(coordinates_in_a_pool())
def test_offsets_are_those_of_an_array_of_the_pools_shape(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, index = case
    _, layers, _, slots, heads, dims = shape
    layout = KvLayout.derive(page_size=slots, num_layers=layers, num_kv_heads=heads, head_dim=dims)
    page, layer, is_v, slot, head, dim = index
    kv = "kv"[is_v]
    assert layout.kv_format == "split"
    offset = layout.element_offset(page, layer, kv, slot, head, dim)  # type: ignore[arg-type]
    assert offset == int(np.ravel_multi_index(index, shape))
    assert layout.coordinates(offset) == Coordinate(page, layer, kv, slot, head, dim)  # type: ignore[arg-type]


def test_a_folded_layout_by_hand() -> None:
    layout = derived_layout(GEOMETRIES["31b-global"], 16, kv_format="folded")
    assert (layout.kv_format, layout.head_dim, layout.k_dim) == ("folded", 512, 128)
    assert (layout.slot_stride("k"), layout.slot_stride("v")) == (512, 2048)  # 4 heads of 128, 4 of 512
    assert (layout.kv_block_len, layout.v_block_len) == (8192, 32768)  # 16 slots of each
    assert layout.layer_stride == 40960  # 16 slots of 4 heads of 640
    assert layout.page_stride == 409600  # 10 layers
    assert layout.bytes_per_token == 10 * 4 * 640 * 2
    # page 3, layer 2, V block, slot 5, head 1, dim 511
    offset = layout.element_offset(3, 2, "v", 5, 1, 511)
    assert offset == 3 * 409600 + 2 * 40960 + 8192 + 5 * 2048 + 512 + 511
    assert layout.coordinates(offset) == Coordinate(3, 2, "v", 5, 1, 511)
    assert layout.element_offset(3, 2, "k", 5, 1, 127) == 3 * 409600 + 2 * 40960 + 5 * 512 + 128 + 127
    with pytest.raises(UsageError, match="dim must be from 0 to 127"):
        layout.element_offset(0, 0, "k", 0, 0, 128)


def test_a_folded_row_keeps_the_columns_that_turn() -> None:
    for name in ("12b-global", "26b-a4b-global", "31b-global"):
        geometry = GEOMETRIES[name]
        turning = np.flatnonzero(np.concatenate([geometry.inv_freq()] * 2))
        assert turning.tolist() == [*range(64), *range(256, 320)]
        assert k_columns(512, k_dim_of(geometry, "folded")) == tuple(turning)
        assert k_columns(512, k_dim_of(geometry, "split")) == tuple(range(512))


@pytest.mark.parametrize(
    ("name", "why"), [("12b-local", "its V is not made of raw K"), ("e4b-global", "its V is not made of raw K")]
)
def test_a_geometry_that_does_not_fold_says_why(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no folded format of K and V: {why}; it is for 12b-global, 26b"):
        derived_layout(GEOMETRIES[name], 16, kv_format="folded")
    other = dataclasses.replace(GEOMETRIES["12b-global"], num_rotated_pairs=32)
    with pytest.raises(UsageError, match="64 of its 512 columns turn, and compiled are 128 of 512"):
        derived_layout(other, 16, kv_format="folded")


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 9), st.integers(1, 64), st.data())
def test_folded_offsets_are_those_of_arrays_of_the_blocks(
    layers: int, slots: int, heads: int, pairs: int, data: st.DataObject
) -> None:
    """Both directions, and the same places that the NumPy view has."""
    layout = KvLayout.derive(
        page_size=slots, num_layers=layers, num_kv_heads=heads, head_dim=2 * pairs + 7, k_dim=2 * pairs
    )
    image = PoolImage.of(layout, 5)
    assert image.elements == layout.pool_elems(5)
    offset = data.draw(st.integers(0, image.elements - 1))
    found = layout.coordinates(offset)
    assert layout.element_offset(*dataclasses.astuple(found)) == offset
    place = dataclasses.asdict(found)
    kv = "kv".index(place.pop("kv"))
    assert image.coordinate(offset) == {**place, "kv": kv}
    assert int(image.offsets(tuple(place.values()), kv)) == offset


def test_the_views_of_a_folded_pool_are_its_memory() -> None:
    layout = KvLayout.derive(page_size=3, num_layers=2, num_kv_heads=2, head_dim=8, k_dim=4)
    image = PoolImage.of(layout, 2)
    flat = np.arange(image.elements)
    for kv, block in zip(KV_KINDS, image.blocks(flat), strict=True):
        for place in np.ndindex(block.shape):
            page, layer, slot, head, dim = place
            assert block[place] == layout.element_offset(page, layer, kv, slot, head, dim)
        block[...] = -1
    assert (flat == -1).all()  # views: every element is one of K or of V
    assert image.page_pieces(1, 1) == [(3 * layout.layer_stride, layout.layer_stride)]
    assert image.page_pieces(1) == [(layout.page_stride, layout.page_stride)]


@given(st.integers(0, 2**44))
def test_every_offset_has_its_coordinate(offset: int) -> None:
    shape = (1 << 31, 40, 2, 16, 8, 256)
    page, layer, is_v, slot, head, dim = (int(index) for index in np.unravel_index(offset, shape))
    want = Coordinate(page, layer, "v" if is_v else "k", slot, head, dim)
    assert layout_of("12b-local").coordinates(offset) == want


@pytest.mark.parametrize(
    ("axis", "value", "words"),
    [
        ("page", -1, "page must be at least 0"),
        ("layer", 40, "layer must be from 0 to 39"),
        ("layer", -1, "layer must be from 0 to 39"),
        ("kv", "q", "kv must be k or v"),
        ("slot", 16, "slot must be from 0 to 15"),
        ("head", 8, "head must be from 0 to 7"),
        ("dim", 256, "dim must be from 0 to 255"),
    ],
)
def test_coordinates_outside_the_layout(axis: str, value: object, words: str) -> None:
    inside = {"page": 0, "layer": 0, "kv": "k", "slot": 0, "head": 0, "dim": 0}
    layout_of("12b-local").element_offset(**inside)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        layout_of("12b-local").element_offset(**{**inside, axis: value})  # type: ignore[arg-type]


def test_no_coordinate_for_a_negative_offset_or_a_gap() -> None:
    layout = layout_of("12b-local")
    with pytest.raises(UsageError, match="at least 0"):
        layout.coordinates(-1)
    padded = dataclasses.replace(layout, page_stride=layout.page_stride + 512)
    assert padded.coordinates(layout.page_stride - 1).layer == 39
    with pytest.raises(UsageError, match="gap"):
        padded.coordinates(layout.page_stride)
    stride, block = layout.layer_stride, layout.kv_block_len
    for of_layer, of_block, gap in ((512, 0, stride), (512, 512, block)):  # behind V, behind K
        padded = dataclasses.replace(layout, layer_stride=stride + of_layer, kv_block_len=block + of_block)
        assert padded.coordinates(gap - 1).slot == 15
        with pytest.raises(UsageError, match="gap"):
            padded.coordinates(gap)


@pytest.mark.parametrize("extent", ["page_size", "num_layers", "num_kv_heads", "head_dim", "element_bytes"])
@pytest.mark.parametrize("value", [0, -16])
def test_extents_are_positive(extent: str, value: int) -> None:
    extents = {"page_size": 16, "num_layers": 2, "num_kv_heads": 8, "head_dim": 256, "element_bytes": 2}
    with pytest.raises(UsageError, match=f"{extent} must be at least 1, got {value}"):
        KvLayout.derive(**{**extents, extent: value})


def test_the_struct_for_kernels() -> None:
    assert ctypes.sizeof(KvLayoutParameters) == 48
    layout = layout_of("12b-local")
    # Three int64, then five int32, little-endian, padded to a multiple of 8.
    want = np.array([32768, 65536, 2621440], "<i8").tobytes() + np.array([16, 40, 8, 256, 256, 0], "<i4").tobytes()
    assert bytes(layout.parameters()) == want
    folded = derived_layout(GEOMETRIES["31b-global"], 16, kv_format="folded")
    want = np.array([8192, 40960, 409600], "<i8").tobytes() + np.array([16, 10, 4, 512, 128, 0], "<i4").tobytes()
    assert bytes(folded.parameters()) == want


def test_the_struct_refuses_what_it_cannot_hold() -> None:
    layout = layout_of("12b-local")
    with pytest.raises(UsageError, match=r"page_size .* int32"):
        dataclasses.replace(layout, page_size=1 << 31).parameters()
    with pytest.raises(UsageError, match=r"page_stride .* int64"):
        dataclasses.replace(layout, page_stride=1 << 63).parameters()
