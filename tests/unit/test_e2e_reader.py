"""A recorded model that is not as described gets one clear line that names the file and the array, and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.e2e.model_reader import _Reader, read_model
from g4kv_cli.errors import UsageError
from g4kv_cli.main import run as g4kv
from g4kv_cli.records.npz import npz_files

MODELS = Path(__file__).resolve().parent.parent / "golden" / "greedy"
Arrays = dict[str, np.ndarray[Any, Any]]


def _arrays(name: str) -> Arrays:
    with np.load(MODELS / f"{name}.npz") as archive:
        return dict(archive)


E4B, E12B = _arrays("e4b_p23"), _arrays("12b_p7")
NUMBERS = sorted(name for name in E4B if name != "meta_json")
FLOATS = [name for name in NUMBERS if E4B[name].dtype != np.int32]


def _refusal(arrays: Arrays) -> str:
    with pytest.raises(UsageError) as caught:
        _Reader(Path("some.npz"), arrays).read()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("recorded model some.npz: ")
    return text


def _with_meta(arrays: Arrays, **fields: Any) -> Arrays:
    meta = json.loads(str(arrays["meta_json"])) | fields
    return arrays | {"meta_json": np.array(json.dumps({key: at for key, at in meta.items() if at is not None}))}


def test_the_recorded_files_are_complete() -> None:
    read = {path.stem: read_model(path) for path in npz_files(MODELS, "--model-golden")}
    assert list(read) == ["12b_p7", "31b_p40", "e4b_p23"]
    model = read["31b_p40"]
    assert [layer.geometry.name for layer in model.layers] == ["31b-local"] * 5 + ["31b-global"]
    assert [layer.family_layer for layer in model.layers] == [0, 1, 2, 3, 4, 0]
    assert [layer.v_proj is None for layer in model.layers] == [False] * 5 + [True]
    local, global_ = model.families
    assert (local.window, local.num_qo_heads, local.num_kv_heads) == (16, 32, 16)
    assert (global_.window, global_.num_qo_heads, global_.num_kv_heads) == (None, 32, 4)
    assert (len(model.prompt), model.num_steps, model.num_positions) == (40, 48, 87)
    assert model.trace_steps == (0, 30)
    # 1.5 times the gaps that stand in the file's own evidence, which was made by another program.
    assert model.max_limit == pytest.approx(1.5 * 0.2500801086425781, rel=1e-6)
    assert model.rms_limit == pytest.approx(1.5 * 0.09469780325889587, rel=1e-6)
    assert read["e4b_p23"].layers[0].geometry.window == 21


@pytest.mark.parametrize("name", NUMBERS)
def test_an_array_that_is_missing_misshapen_or_of_another_type(name: str) -> None:
    assert f"has no array {name}" in _refusal({key: at for key, at in E4B.items() if key != name})
    assert f"{name} must have shape" in _refusal(E4B | {name: E4B[name][..., :-1]})
    assert f"{name} must have shape" in _refusal(E4B | {name: E4B[name][None]})
    assert f"{name} must hold" in _refusal(E4B | {name: E4B[name].astype(np.float64)})


@pytest.mark.parametrize("name", FLOATS)
def test_an_array_with_a_value_that_is_not_finite(name: str) -> None:
    for value in (0x7FC0, 0xFF80) if E4B[name].dtype == np.uint16 else (np.nan, -np.inf):
        array = E4B[name].copy()
        array.flat[-1] = value
        last = [extent - 1 for extent in array.shape]
        assert f"{name} holds a value that is not finite, at {last}" in _refusal(E4B | {name: array})


def _poked(name: str, value: float, arrays: Arrays = E4B) -> Arrays:
    array = arrays[name].copy()
    array.flat[0] = value
    return arrays | {name: array}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (E4B | {"meta_json": np.array("{")}, "meta_json is not JSON"),
        (E4B | {"meta_json": np.array("[]")}, "meta_json must be a JSON object"),
        (E4B | {"meta_json": np.zeros(3)}, "meta_json must be one text"),
        (_with_meta(E4B, vocab_size=None), "meta_json has no 'vocab_size'"),
        (_with_meta(E4B, hidden_size=True), "hidden_size must be an integer"),
        (_with_meta(E4B, sliding_window=0), "sliding_window must be an integer from 1"),
        (_with_meta(E4B, geometry="13b"), "names geometry '13b'; known are e2b"),
        (_with_meta(E4B, rms_norm_eps=1e-5), "rms_norm_eps is 1e-05"),
        (_with_meta(E4B, hidden_activation="relu"), "hidden_activation is 'relu'"),
        (_with_meta(E4B, tie_word_embeddings=False), "tie_word_embeddings is False"),
        (_with_meta(E4B, final_logit_softcapping=-1), "final_logit_softcapping must be a positive number"),
        (_with_meta(E4B, layer_types=["sliding_attention"] * 5), "layer_types must be a list of 6"),
        (_with_meta(E4B, layer_types=["banded"] * 6), "layer_types[0] is 'banded'"),
        (_with_meta(E4B, head_dim=[128] * 6), "head_dim of layer 0 is 128; e4b-local has 256"),
        (_with_meta(E4B, k_eq_v=[True] * 6), "k_eq_v of layer 0 is True; e4b-local has False"),
        (_with_meta(E4B, attention_scale=[0.0625] * 6), "attention_scale of layer 0 is 0.0625"),
        (_with_meta(E4B, num_key_value_heads=[3] * 6), "8 q heads for 3 kv heads in layer 0"),
        (_with_meta(E4B, num_key_value_heads=[2, 4, 2, 2, 2, 2]), "of layer 1 differs from earlier e4b-local layers"),
        (_with_meta(E4B, trace_steps=[48]), "trace_steps must list steps from 0 to 47"),
        (_poked("tokens", 128), "tokens must be ids from 0 to 127"),
        (_poked("prompt_ids", -1), "prompt_ids must be ids from 0 to 127"),
        (_poked("tokens", (E4B["tokens"][0] + 1) % 128), "tokens are not the argmax of logits_f32"),
        (_poked("inv_freq.full_attention", 0.5), "inv_freq.full_attention differs from the frequencies of e4b-global"),
        (_poked("margin_f32", 0.0), "margin_f32 has a step"),
        (E4B | {"logits_bf16": E4B["logits_f32"]}, "there is no gap"),
        (E12B | {"model.layers.5.self_attn.v_proj.weight": E12B["model.layers.5.self_attn.k_proj.weight"]},
         "model.layers.5 has a v_proj"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself(arrays: Arrays, words: str) -> None:
    assert words in _refusal(arrays)


def _save(edit: Callable[[Arrays], Arrays], path: Path) -> Path:
    np.savez(path, **edit(E4B))
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "no such file or directory"),
        (lambda path: path.write_bytes(b"PK\x03\x04 not a zip") and path, "is no .npz file; name one"),
        (
            lambda path: _save(lambda arrays: {"tokens": np.array([None])}, path),
            "it holds pickled objects; write it again as plain arrays",
        ),
        (lambda path: _save(lambda arrays: _poked("hidden", 0x7FC0), path), "hidden holds a value that is not finite"),
        (lambda path: path.parent, "no .npz file in this directory"),
    ],
)
def test_the_command_ends_with_one_line_and_exit_2(
    make: Callable[[Path], Path], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "model.npz")
    assert g4kv(["smoke", "--device", "emulated", "--model-golden", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("g4kv: error: ")
    assert words in shown.err


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory; name an"):
        read_model(tmp_path / "absent.npz")
