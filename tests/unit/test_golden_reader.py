"""A golden file that is not as described gets one clear line that names the file and what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.prep.golden import golden_cases, read_recording
from g4kv_cli.errors import UsageError
from g4kv_cli.records.npz import npz_files

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Callable[[Arrays], None]], Path]:
    """A copy of a recording with its arrays changed."""

    def change(edit: Callable[[Arrays], None], source: str = "12b-local_decode") -> Path:
        with np.load(GOLDEN / f"{source}.npz") as archive:
            arrays = dict(archive)
        edit(arrays)
        path = tmp_path / "changed.npz"
        np.savez(path, **arrays)
        return path

    return change


def _meta(**fields: Any) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        arrays["meta_json"] = np.array(json.dumps(json.loads(str(arrays["meta_json"])) | fields))

    return edit


def _set(name: str, value: Any) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        arrays[name] = value(arrays[name])

    return edit


def _poke(pattern: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array.flat[-1] = pattern
        return array

    return change


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda arrays: arrays.pop("k_raw"), "has no array k_raw"),
        (lambda arrays: arrays.pop("v_raw"), "has no array v_raw"),
        (lambda arrays: arrays.pop("meta_json"), "has no array meta_json"),
        (_set("q_expect", lambda a: a[:, :3]), "q_expect must have shape [1, 16, 256], got [1, 3, 256]"),
        (_set("cos_bf16", lambda a: a[:, :64]), "cos_bf16 must have shape [1, 128], got [1, 64]"),
        (_set("q_raw", lambda a: a.astype(np.float32)), "q_raw must hold bf16 bit patterns as uint16, got float32"),
        (_set("positions", lambda a: a.astype(np.int64)), "positions must be int32 [tokens], got int64 [1]"),
        (_set("positions", lambda a: -a), "positions must be from 0"),
        (_set("positions", lambda a: a[:0]), "positions must be int32 [tokens]"),
        (_set("k_raw", _poke(0x7F80)), "k_raw holds a value that is not finite"),
        (_set("v_expect", _poke(0xFFFF)), "v_expect holds a value that is not finite"),
        (_set("meta_json", lambda a: np.array("{")), "meta_json is not JSON"),
        (_set("meta_json", lambda a: np.array(3)), "meta_json must be one text"),
        (_set("meta_json", lambda a: np.array("[]")), "meta_json must be a JSON object"),
        (_meta(model="13b"), "meta_json names geometry '13b-local'; known are e2b-local"),
        (_meta(head_dim=512), "says head_dim 512"),
        (_meta(k_eq_v=True), "k_eq_v True"),
        (_meta(q_heads="16"), "q_heads must be a positive integer, got '16'"),
        (_meta(kv_heads=5), "16 q heads, which is no multiple of 5"),
        (_meta(eps=1e-5), "says eps 1e-05"),
    ],
)
def test_one_clear_line(changed, edit, words: str) -> None:
    path = changed(edit)
    with pytest.raises(UsageError) as raised:
        read_recording(path)
    text = str(raised.value)
    assert words in text
    assert str(path) in text
    assert "\n" not in text
    assert raised.value.exit_code == 2


def test_v_raw_in_a_k_eq_v_file(changed) -> None:
    path = changed(lambda arrays: arrays.update(v_raw=arrays["k_raw"]), "12b-global_short")
    with pytest.raises(UsageError, match="has v_raw, although V comes from k_raw"):
        read_recording(path)


def test_pickles_are_refused(changed) -> None:
    path = changed(_set("q_raw", lambda a: np.array([{"code": 1}], dtype=object)))
    with pytest.raises(UsageError, match="it holds pickled objects; write it again"):
        read_recording(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"text"])
def test_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.npz is no \.npz file; name one"):
        read_recording(path)


def test_damaged_bytes(tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    data = bytearray((GOLDEN / "12b-local_decode.npz").read_bytes())
    data[400:480] = bytes(80)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"damaged\.npz"):
        read_recording(path)


def test_places_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        npz_files(tmp_path / "nothing.npz", "--golden")
    with pytest.raises(UsageError, match=r"no \.npz file in this directory"):
        npz_files(tmp_path, "--golden")


def test_which_forms_a_file_is_run_in(tmp_path: Path) -> None:
    for name in ("12b-local_short", "12b-local_decode", "12b-local_far", "12b-global_short", "e2b-global_offset"):
        shutil.copy(GOLDEN / f"{name}.npz", tmp_path)
    assert {case.id: case.entry for case in golden_cases(tmp_path)} == {
        "golden/12b-global_short/prefill": "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into",
        "golden/12b-global_short/folded/prefill": "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into",
        "golden/12b-local_decode/decode": "qkv_norm_rope_paged_decode_hd256_plain_into",
        "golden/12b-local_far/decode": "qkv_norm_rope_paged_decode_hd256_plain_into",
        "golden/12b-local_short/contiguous": "qk_norm_rope_prefill_hd256_plain_into",
        "golden/12b-local_short/prefill": "qkv_norm_rope_paged_prefill_hd256_plain_into",
        "golden/e2b-global_offset/prefill": "qkv_norm_rope_paged_prefill_hd512_plain_into",
    }


def test_far_positions_keep_their_rows() -> None:
    case, folded = golden_cases(GOLDEN / "12b-global_far.npz")
    assert (case.kv_format, folded.kv_format, folded.placement) == ("split", "folded", case.placement)
    assert case.positions == (1023, 131073, 262143)
    assert case.table_positions == 262144
    assert case.placement is not None
    assert case.page_and_slot() == ([3, 2, 1], [15, 1, 15])
