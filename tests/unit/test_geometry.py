"""The registry against the published table, typed here by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES, MODELS, model_families, select_geometries

# name: layers, shared K/V layers, hidden, query heads, KV heads, GQA group, head_dim, window_left, K=V, max positions
TABLE = {
    "e2b-local": (28, 16, 1536, 8, 1, 8, 256, 511, False, 131072),
    "e2b-global": (7, 4, 1536, 8, 1, 8, 512, -1, False, 131072),
    "e4b-local": (35, 15, 2560, 8, 2, 4, 256, 511, False, 131072),
    "e4b-global": (7, 3, 2560, 8, 2, 4, 512, -1, False, 131072),
    "12b-local": (40, 0, 3840, 16, 8, 2, 256, 1023, False, 262144),
    "12b-global": (8, 0, 3840, 16, 1, 16, 512, -1, True, 262144),
    "26b-a4b-local": (25, 0, 2816, 16, 8, 2, 256, 1023, False, 262144),
    "26b-a4b-global": (5, 0, 2816, 16, 2, 8, 512, -1, True, 262144),
    "31b-local": (50, 0, 5376, 32, 16, 2, 256, 1023, False, 262144),
    "31b-global": (10, 0, 5376, 32, 4, 8, 512, -1, True, 262144),
}


def test_the_registry_has_the_published_table() -> None:
    found = {
        name: (
            geometry.num_layers,
            geometry.num_shared_kv_layers,
            geometry.hidden_size,
            geometry.num_qo_heads,
            geometry.num_kv_heads,
            geometry.gqa_group,
            geometry.head_dim,
            geometry.window_left,
            geometry.k_eq_v,
            geometry.max_positions,
        )
        for name, geometry in GEOMETRIES.items()
        if name in TABLE
    }
    assert found == TABLE


@pytest.mark.parametrize(("model", "layers", "global_every", "shared"), [("e2b", 35, 5, 20), ("e4b", 42, 6, 18)])
def test_shared_layers_follow_from_the_layer_pattern(model: str, layers: int, global_every: int, shared: int) -> None:
    # Layer i is global where (i + 1) is a multiple of the pattern; the last `shared` ones own no K/V.
    is_global = [(layer + 1) % global_every == 0 for layer in range(layers)]
    local, global_ = model_families(model)
    assert (local.num_layers, global_.num_layers) == (is_global.count(False), is_global.count(True))
    owning = is_global[: layers - shared]
    assert (local.num_kv_layers, global_.num_kv_layers) == (owning.count(False), owning.count(True))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_inv_freq(name: str) -> None:
    geometry = GEOMETRIES[name]
    theta, head_dim, pairs = (1e4, 256, 128) if geometry.family == "local" else (1e6, 512, 64)
    frequencies = geometry.inv_freq()
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (head_dim // 2,)
    exact = np.array([theta ** (-2 * pair / head_dim) for pair in range(pairs)])
    # Three float32 roundings (exponent, power, reciprocal): 2^-24 each, the exponent's times ln(theta) < 14.
    np.testing.assert_allclose(frequencies[:pairs], exact, rtol=16 * 2.0**-24)
    assert frequencies[0] == 1
    assert not frequencies[pairs:].any()


def test_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        GEOMETRIES["12b-local"] = GEOMETRIES["31b-local"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        GEOMETRIES["12b-local"].head_dim = 128  # type: ignore[misc]


def test_select() -> None:
    assert [geometry.name for geometry in select_geometries("all")] == list(GEOMETRIES)
    chosen = select_geometries("31b-global, 12b-local,31b-global")
    assert [geometry.name for geometry in chosen] == ["31b-global", "12b-local"]
    assert [geometry.name for geometry in select_geometries("E4B")] == ["e4b-local", "e4b-global"]
    assert list(MODELS) == list(dict.fromkeys(geometry.model for geometry in GEOMETRIES.values()))


@pytest.mark.parametrize(("wrong", "nearest"), [("12b-locl", "12b-local"), ("31-global", "31b-global")])
def test_unknown_geometry_gets_the_nearest_and_all_known(wrong: str, nearest: str) -> None:
    with pytest.raises(UsageError) as raised:
        select_geometries(f"12b-local,{wrong}")
    message = str(raised.value)
    assert wrong in message
    assert f"did you mean {nearest}?" in message
    assert all(name in message for name in TABLE)
    assert "\n" not in message


def test_unknown_geometry_with_no_near_one_guesses_nothing() -> None:
    with pytest.raises(UsageError) as raised:
        select_geometries("xyzzy")
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "tp", "qo_heads", "kv_heads"),
    [
        ("12b-local", 1, 16, 8),
        ("12b-local", 2, 8, 4),
        ("12b-local", 16, 1, 1),  # 8 KV heads on 16 ranks: each twice
        ("12b-global", 4, 4, 1),  # 1 KV head on every rank
        ("31b-local", 8, 4, 2),
        ("31b-global", 8, 4, 1),
        ("e4b-local", 8, 1, 1),
    ],
)
def test_heads_of_one_rank(name: str, tp: int, qo_heads: int, kv_heads: int) -> None:
    whole = GEOMETRIES[name]
    rank = whole.for_rank(tp)
    assert (rank.num_qo_heads, rank.num_kv_heads) == (qo_heads, kv_heads)
    assert rank.name == (name if tp == 1 else f"{name}@tp{tp}")
    unchanged = ("head_dim", "window", "num_layers", "hidden_size", "k_eq_v", "model")
    assert all(getattr(rank, field) == getattr(whole, field) for field in unchanged)


@pytest.mark.parametrize("tp", [0, -1, 3, 32])
def test_ranks_that_do_not_divide_the_heads(tp: int) -> None:
    with pytest.raises(UsageError, match=r"--tp"):
        GEOMETRIES["12b-local"].for_rank(tp)


def test_a_rank_is_not_split_again() -> None:
    with pytest.raises(UsageError, match="12b-local@tp2 is one rank's share"):
        GEOMETRIES["12b-local"].for_rank(2).for_rank(2)


def test_no_rank_holds_part_of_a_kv_heads_group() -> None:
    six = GEOMETRIES["12b-local"].with_heads(6, 4)
    with pytest.raises(UsageError, match=r"--tp 4 splits a KV head of 12b-local \(6 KV heads\)"):
        six.for_rank(4)
    assert (six.for_rank(3).num_kv_heads, six.for_rank(12).num_kv_heads) == (2, 1)
