"""The tensor-core model: recorded H200 outputs, the two forms of the model against each other, and plain
cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hardware_vectors import DATA

from g4kv_cli.device.emulated.arithmetic.mma import mma
from g4kv_cli.device.emulated.arithmetic.mma_reference import mma_reference

BF16_CLASSES = "normal normal0 cancel mixed mixed2 probe big tiny subn special zeros"
F16_CLASSES = "normal mixed2 probe"
FORMS = {"mma": mma, "mma_reference": mma_reference}


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """64 tiles a class: CLASS.A [64, 16, 16], .B [64, 16, 8] (uint16), .C, .D [64, 16, 8] (uint32)."""
    with np.load(DATA / "mma.npz") as stored:
        return {name: stored[name] for name in stored.files}


def test_all_recorded_classes_are_tested(recorded: dict[str, Any]) -> None:
    names = {name.split(".")[0] for name in recorded if name.endswith(".D") and ".f16" not in name}
    assert names == set(BF16_CLASSES.split())
    assert {name.split(".")[0] for name in recorded if name.endswith(".f16.D")} == set(F16_CLASSES.split())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BF16_CLASSES.split())
def test_bf16_equals_the_hardware(recorded: dict[str, Any], name: str, form: str) -> None:
    d = FORMS[form](recorded[f"{name}.A"], recorded[f"{name}.B"], recorded[f"{name}.C"], "bf16")
    assert int((d != recorded[f"{name}.D"]).sum()) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", F16_CLASSES.split())
def test_f16_equals_the_hardware(recorded: dict[str, Any], name: str, form: str) -> None:
    d = FORMS[form](recorded[f"{name}.f16.A"], recorded[f"{name}.f16.B"], recorded[f"{name}.C"], "f16")
    assert int((d != recorded[f"{name}.f16.D"]).sum()) == 0


@pytest.mark.parametrize("name", ["normal", "mixed2"])
def test_k8_is_k16_with_zeros(recorded: dict[str, Any], name: str) -> None:
    """m16n8k8 on the lower half of k."""
    a = recorded[f"{name}.A"].copy()
    a[:, :, 8:] = 0
    expected = recorded[f"{name}.D_k8_lowhalf"]
    assert int((mma(a, recorded[f"{name}.B"], recorded[f"{name}.C"], "bf16") != expected).sum()) == 0
    short = mma(a[:, :, :8], recorded[f"{name}.B"][:, :8], recorded[f"{name}.C"], "bf16")
    assert int((short != expected).sum()) == 0


@pytest.mark.parametrize("form", ["bf16", "f16"])
def test_random_bits_agree_with_the_reference(form: str) -> None:
    """Any bits at all: every exponent, infinities, NaN; some tiles with moderate exponents only."""
    random = np.random.default_rng(17)
    tiles = 300  # more than two chunks
    a = random.integers(0, 2**16, (tiles, 16, 16)).astype(np.uint16)
    b = random.integers(0, 2**16, (tiles, 16, 8)).astype(np.uint16)
    c = random.integers(0, 2**32, (tiles, 16, 8)).astype(np.uint32)
    moderate = slice(0, 200)
    keep, base = (np.uint16(0x87FF), np.uint16(0x3C00)) if form == "bf16" else (np.uint16(0x9FFF), np.uint16(0x2000))
    a[moderate], b[moderate] = (a[moderate] & keep) | base, (b[moderate] & keep) | base
    c[moderate] = (c[moderate] & np.uint32(0x83FFFFFF)) | np.uint32(0x3C000000)
    assert (mma(a, b, c, form) == mma_reference(a, b, c, form)).all()


@pytest.mark.parametrize("name", ["normal", "special"])
def test_rows_that_repeat_are_computed_once_and_rows_that_nearly_do_are_not(
    recorded: dict[str, Any], name: str
) -> None:
    """Attention pads its query rows by repeating the last one."""
    a, b, c = (recorded[f"{name}.{part}"].copy() for part in "ABC")
    expected = recorded[f"{name}.D"].copy()
    for values in (a, c, expected):
        values[:, 3:] = values[:, 2:3]
    assert (mma(a, b, c, "bf16") == expected).all()
    # One C of one row of one tile, and one A of another.
    c[5, 9, 7] = 0x3F800000
    a[40, 12, 0] ^= 0x8000
    found = mma(a, b, c, "bf16")
    assert (found == mma_reference(a, b, c, "bf16")).all()
    assert not (found[40, 12] == found[40, 11]).all() or name == "special"


def test_results_do_not_depend_on_the_number_of_tiles(recorded: dict[str, Any]) -> None:
    a, b, c = (recorded[f"mixed.{name}"] for name in "ABC")
    many = [np.tile(array, (5, 1, 1)) for array in (a, b, c)]
    whole = mma(*many, "bf16")
    assert (whole.reshape(5, *c.shape) == recorded["mixed.D"]).all()
    for tiles in (1, 2, 17):
        assert (mma(a[:tiles], b[:tiles], c[:tiles], "bf16") == recorded["mixed.D"][:tiles]).all()


def tile(row: list[float], column: list[float], addend: float, form: Any) -> float:
    """d of one output with the given products, all other inputs zero."""
    a, b, c = (
        np.zeros((1, 16, 16), np.uint16),
        np.zeros((1, 16, 8), np.uint16),
        np.zeros((1, 16, 8), np.uint32),
    )
    a[0, 3, : len(row)] = np.array(row, np.float32).view(np.uint32) >> np.uint32(16)
    b[0, : len(column), 5] = np.array(column, np.float32).view(np.uint32) >> np.uint32(16)
    c[0, 3, 5] = np.float32(addend).view(np.uint32)
    d = form(a, b, c, "bf16")
    others = np.delete(d.ravel(), 3 * 8 + 5)
    assert (others == 0).all() or not np.isfinite(row).all()  # infinity times the zeros is NaN
    return float(d[0, 3, 5].view(np.float32))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_addends_are_cut_toward_zero(form: Any) -> None:
    """By hand. E = 0 here, so addends are cut to multiples of 2^-25 and the sum to 24 significant bits."""
    assert tile([1.0], [1.0], 2.0**-25, form) == 1.0  # 1 + 2^-25 cut to 24 bits
    assert tile([1.0], [1.0], -(2.0**-25), form) == 1.0 - 2.0**-24  # below 1 the step is 2^-24: cut toward zero
    assert tile([1.0], [1.0], -(2.0**-26), form) == 1.0  # the addend itself is cut to zero
    assert tile([1.0, 1.0], [1.0, -1.0], 2.0**-26, form) == 0.0  # also where 1 - 1 leaves nothing else
    assert tile([1.0, 1.0], [1.0, -1.0], 2.0**-25, form) == 2.0**-25
    assert tile([1.5], [1.5], 2.0**-24, form) == 2.25  # ea + eb = 0 although 2.25 >= 2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_special_results(form: Any) -> None:
    infinity, largest = float("inf"), 3.3895313892515355e38  # the largest bf16
    assert tile([infinity], [1.0], 0.0, form) == infinity
    assert tile([largest, largest], [2.0, 2.0], 0.0, form) == infinity
    assert tile([-largest, -largest], [2.0, 2.0], 0.0, form) == -infinity
    assert not np.signbit(tile([0.0], [-1.0], -0.0, form))  # -0 + -0 is +0 here


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("row", "column", "addend"),
    [
        ([0x7F80], [0x0000], 0x3F800000),  # inf * 0
        ([0x7F80, 0x7F80], [0x3F80, 0xBF80], 0),  # inf - inf
        ([0x7F80], [0x3F80], 0xFF800000),
        ([0x7F81], [0x3F80], 0),  # NaN
        ([0x3F80], [0xFFC0], 0),
        ([0x3F80], [0x3F80], 0xFFC00001),
    ],
)
def test_invalid_operations_give_the_one_nan(row: list[int], column: list[int], addend: int, form: Any) -> None:
    a, b, c = (
        np.zeros((1, 16, 16), np.uint16),
        np.zeros((1, 16, 8), np.uint16),
        np.zeros((1, 16, 8), np.uint32),
    )
    a[0, 3, : len(row)], b[0, : len(column), 5], c[0, 3, 5] = row, column, addend
    assert form(a, b, c, "bf16")[0, 3, 5] == 0x7FFFFFFF


def test_many_tiles_are_the_same_as_few(recorded: dict[str, Any]) -> None:
    """More than one chunk, with tiles that only the reference can do in the second."""
    names = ["normal", "mixed", "special", "normal0"]
    a, b, c, d = (np.concatenate([recorded[f"{name}.{part}"] for name in names]) for part in "ABCD")
    assert len(a) == 256
    assert (mma(a, b, c, "bf16") == d).all()
    assert (mma(a[::-1], b[::-1], c[::-1], "bf16") == d[::-1]).all()
