"""The reader of one recorded model (.npz): every array is checked before anything runs.

Each complaint is one line that names the file and the array. bf16 is stored as uint16 bit patterns. What the arrays
are and how they were made: tests/golden/greedy/README.md.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from g4kv_cli.cases.e2e.recorded_model import TRACE_PARTS, Array, Float32, Float64, Int64, RecordedLayer, RecordedModel
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import MODELS, Geometry, model_families
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.records.npz import load_npz

LIMIT_OVER_GAP = 1.5
"""Rule B: a harness that is float32 outside the kernels stays within 1.5 times the gap between the recorded bf16 and
float32 runs; the worst of six runs with jittered rounding used 0.65 of it."""
MAX_EXTENT = 1 << 20
MAX_GROUP = 16
"""Query heads a KV head that the attention kernels take."""
_FAMILY_OF_LAYER_TYPE = {"sliding_attention": "local", "full_attention": "global"}


def read_model(path: Path) -> RecordedModel:
    """Read and check one file; the same unchanged file is read once a process.

    Raises UsageError: unreadable, a missing array, a wrong dtype or shape, a value that is not finite or out of range,
    or a meta_json that does not describe the arrays.
    """
    try:
        stamp = path.stat()
    except OSError as error:
        raise UsageError(f"recorded model {path} cannot be read: {error.strerror}; name an .npz file") from error
    return _read(path, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, _modified_ns: int, _size_bytes: int) -> RecordedModel:
    return _Reader(path, load_npz(path, "recorded model")).read()


class _Reader:
    """Checks one file array by array."""

    def __init__(self, path: Path, arrays: dict[str, Array]) -> None:
        self.path = path
        self.arrays = arrays

    def fail(self, what: str) -> UsageError:
        return UsageError(f"recorded model {self.path}: {what}")

    def read(self) -> RecordedModel:
        self._meta_json()
        hidden, vocabulary = self._count("hidden_size"), self._count("vocab_size")
        prompt_len, steps = self._count("prompt_len"), self._count("steps")
        layers = tuple(self._layer(number, geometry, at) for number, (geometry, at) in enumerate(self._geometries()))
        rows = prompt_len + steps - 1
        if rows > layers[0].geometry.max_positions:
            raise self.fail(f"{prompt_len} prompt tokens and {steps} steps do not fit the model's positions")
        logits = self._float32("logits_f32", (steps, vocabulary))
        gap = np.abs(self._float32("logits_bf16", (steps, vocabulary)).astype(np.float64) - logits)
        if gap.max() == 0:
            raise self.fail("logits_bf16 equals logits_f32, so there is no gap to derive the limits from")
        tokens = self._token_ids("tokens", steps, vocabulary)
        if (logits.argmax(axis=1) != tokens).any():
            raise self.fail("tokens are not the argmax of logits_f32")
        self._unused(prompt_len, steps, vocabulary)
        return RecordedModel(
            path=self.path,
            name=self.path.stem,
            model=self._model(),
            layers=layers,
            embedding=self._weight("model.embed_tokens.weight", (vocabulary, hidden)),
            embedding_scale=self._positive("embed_scale_f32"),
            final_norm=self._weight("model.norm.weight", (hidden,)),
            logit_softcap=self._positive("final_logit_softcapping"),
            prompt=self._token_ids("prompt_ids", prompt_len, vocabulary),
            tokens=tokens,
            logits=logits,
            prompt_logits=self._float32("prompt_logits_f32", (prompt_len, vocabulary)),
            max_limit=LIMIT_OVER_GAP * float(gap.max()),
            rms_limit=LIMIT_OVER_GAP * float(np.sqrt(np.square(gap).mean(axis=1)).max()),
            hidden=self._bf16("hidden", (rows, len(layers) + 1, hidden)).astype(np.float32),
            traces={
                (step, number): self._trace(step, number, layer)
                for step in self._trace_steps(steps)
                for number, layer in enumerate(layers)
            },
        )

    def _unused(self, prompt_len: int, steps: int, vocabulary: int) -> None:
        """Arrays that the replay does not need: a file that is damaged in them is not trusted in the others."""
        self._float32("logits_bf16_sdpa", (steps, vocabulary))
        self._float32("prompt_logits_bf16", (prompt_len, vocabulary))
        for name in ("margin_bf16", "margin_f32"):
            if self._float32(name, (steps,)).min() <= 0:
                raise self.fail(f"{name} has a step whose best token is not ahead of the second")

    # --- meta_json ---------------------------------------------------------------------------------------------

    def _meta_json(self) -> None:
        array = self._array("meta_json")
        if array.shape != () or array.dtype.kind != "U":
            raise self.fail(f"meta_json must be one text, got {array.dtype} of shape {list(array.shape)}")
        try:
            meta = json.loads(str(array))
        except json.JSONDecodeError as error:
            raise self.fail(f"meta_json is not JSON: {error}") from error
        if not isinstance(meta, dict):
            raise self.fail("meta_json must be a JSON object")
        self.meta: dict[str, Any] = meta
        for key, want in (("rms_norm_eps", 1e-6), ("hidden_activation", "gelu_pytorch_tanh"),
                          ("tie_word_embeddings", True)):  # fmt: skip
            if self._entry(key) != want:
                raise self.fail(f"meta_json {key} is {self._entry(key)!r}, the replay has {want!r} only")

    def _entry(self, key: str) -> Any:
        if key not in self.meta:
            raise self.fail(f"meta_json has no {key!r}")
        return self.meta[key]

    def _count(self, key: str) -> int:
        value = self._entry(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_EXTENT:
            raise self.fail(f"meta_json {key} must be an integer from 1 to {MAX_EXTENT}, got {value!r}")
        return value

    def _positive(self, key: str) -> float:
        value = self._entry(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise self.fail(f"meta_json {key} must be a positive number, got {value!r}")
        return float(value)

    def _model(self) -> str:
        model = self._entry("geometry")
        if model not in MODELS:
            raise self.fail(f"meta_json names geometry {model!r}; known are {', '.join(MODELS)}")
        return str(model)

    def _per_layer(self, key: str, count: int) -> list[Any]:
        values = self._entry(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.fail(f"meta_json {key} must be a list of {count}, one a layer")
        return values

    def _geometries(self) -> list[tuple[Geometry, int]]:
        """The geometry of each layer, and the layer's number inside its family."""
        count, window, heads = (
            self._count(key) for key in ("num_hidden_layers", "sliding_window", "num_attention_heads")
        )
        known: dict[str, Geometry] = {geometry.family: geometry for geometry in model_families(self._model())}
        kinds, head_dims, k_eq_v, scales = (
            self._per_layer(key, count) for key in ("layer_types", "head_dim", "k_eq_v", "attention_scale")
        )
        kv_heads = self._per_layer("num_key_value_heads", count)
        families: dict[str, Geometry] = {}
        found: list[tuple[Geometry, int]] = []
        for layer, kind in enumerate(kinds):
            if kind not in _FAMILY_OF_LAYER_TYPE:
                raise self.fail(f"meta_json layer_types[{layer}] is {kind!r}; known are {list(_FAMILY_OF_LAYER_TYPE)}")
            base = known.get(_FAMILY_OF_LAYER_TYPE[kind])
            if base is None:
                raise self.fail(f"meta_json layer_types[{layer}] is {kind!r}; {self._model()} has no such layers")
            for key, got, want in (("head_dim", head_dims[layer], base.head_dim),
                                   ("k_eq_v", k_eq_v[layer], base.k_eq_v),
                                   ("attention_scale", scales[layer], 1.0)):  # fmt: skip
                if got != want:
                    raise self.fail(f"meta_json {key} of layer {layer} is {got!r}; {base.name} has {want!r}")
            fewer = kv_heads[layer]
            if not isinstance(fewer, int) or not 1 <= fewer <= heads or heads % fewer or heads // fewer > MAX_GROUP:
                raise self.fail(f"meta_json says {heads} q heads for {fewer!r} kv heads in layer {layer}")
            # The heads are the file's: they may be one tensor-parallel rank's share.
            geometry = dataclasses.replace(
                base, num_qo_heads=heads, num_kv_heads=fewer, window=None if base.window is None else window
            )
            if families.setdefault(base.family, geometry) != geometry:
                raise self.fail(
                    f"meta_json num_key_value_heads of layer {layer} differs from earlier {base.name} layers"
                )
            found.append((geometry, sum(other == geometry for other, _ in found)))
        for geometry in families.values():
            self._frequencies(geometry)
        return found

    def _frequencies(self, geometry: Geometry) -> None:
        """The recorded RoPE frequencies are the registry's, to one float32 unit: the tables are ours."""
        name = f"inv_freq.{'full' if geometry.window is None else 'sliding'}_attention"
        array = self._float32(name, (geometry.head_dim // 2,))
        if not np.allclose(array, geometry.inv_freq(), rtol=2.0**-23, atol=0):
            raise self.fail(f"{name} differs from the frequencies of {geometry.name}")

    def _trace_steps(self, steps: int) -> list[int]:
        values = self._entry("trace_steps")
        if not isinstance(values, list) or not all(isinstance(at, int) and 0 <= at < steps for at in values):
            raise self.fail(f"meta_json trace_steps must list steps from 0 to {steps - 1}, got {values!r}")
        return values

    # --- arrays ------------------------------------------------------------------------------------------------

    def _layer(self, number: int, geometry: Geometry, family_layer: int) -> RecordedLayer:
        hidden, inner = self._count("hidden_size"), self._count("intermediate_size")
        head_dim = geometry.head_dim
        q_rows, kv_rows = geometry.num_qo_heads * head_dim, geometry.num_kv_heads * head_dim
        prefix = f"model.layers.{number}"

        def linear(name: str, rows: int, columns: int) -> Float64:
            return self._weight(f"{prefix}.{name}.weight", (rows, columns))

        def norm(name: str) -> Float64:
            return self._weight(f"{prefix}.{name}.weight", (hidden,))

        if geometry.k_eq_v and f"{prefix}.self_attn.v_proj.weight" in self.arrays:
            raise self.fail(f"{prefix} has a v_proj, although V comes from raw K in K=V layers")
        return RecordedLayer(
            geometry=geometry,
            family_layer=family_layer,
            input_norm=norm("input_layernorm"),
            post_attention_norm=norm("post_attention_layernorm"),
            pre_feedforward_norm=norm("pre_feedforward_layernorm"),
            post_feedforward_norm=norm("post_feedforward_layernorm"),
            layer_scalar=float(self._weight(f"{prefix}.layer_scalar", (1,))[0]),
            q_proj=linear("self_attn.q_proj", q_rows, hidden),
            k_proj=linear("self_attn.k_proj", kv_rows, hidden),
            v_proj=None if geometry.k_eq_v else linear("self_attn.v_proj", kv_rows, hidden),
            o_proj=linear("self_attn.o_proj", hidden, q_rows),
            q_norm=self._bf16(f"{prefix}.self_attn.q_norm.weight", (head_dim,)),
            k_norm=self._bf16(f"{prefix}.self_attn.k_norm.weight", (head_dim,)),
            gate_proj=linear("mlp.gate_proj", inner, hidden),
            up_proj=linear("mlp.up_proj", inner, hidden),
            down_proj=linear("mlp.down_proj", hidden, inner),
        )

    def _trace(self, step: int, number: int, layer: RecordedLayer) -> dict[str, Float32]:
        geometry = layer.geometry
        trace = {}
        for part in TRACE_PARTS:
            if part == "v_raw" and geometry.k_eq_v:
                continue
            heads = geometry.num_qo_heads if part in ("q_raw", "q", "attn") else geometry.num_kv_heads
            name = f"trace.step{step}.layer{number}.{part}"
            trace[part] = self._bf16(name, (heads, geometry.head_dim)).astype(np.float32)
        return trace

    def _array(self, name: str) -> Array:
        if name not in self.arrays:
            raise self.fail(f"has no array {name}")
        return self.arrays[name]

    def _shaped(self, name: str, kind: str, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        array = self._array(name)
        if array.dtype != dtype:
            raise self.fail(f"{name} must hold {kind}, got {array.dtype}")
        if array.shape != shape:
            raise self.fail(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
        return np.ascontiguousarray(array)

    def _finite(self, name: str, values: Array) -> Array:
        finite = np.isfinite(values.astype(np.float32))
        if not finite.all():
            where = [int(at) for at in np.unravel_index(int(np.argmin(finite)), finite.shape)]
            raise self.fail(f"{name} holds a value that is not finite, at {where}")
        return values

    def _bf16(self, name: str, shape: tuple[int, ...]) -> Array:
        array = self._shaped(name, "bf16 bit patterns as uint16", np.uint16, shape)
        return self._finite(name, array.view(BF16))

    def _weight(self, name: str, shape: tuple[int, ...]) -> Float64:
        return self._bf16(name, shape).astype(np.float64)

    def _float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        return self._finite(name, self._shaped(name, "float32", np.float32, shape))

    def _token_ids(self, name: str, count: int, vocabulary: int) -> Int64:
        array = self._shaped(name, "int32", np.int32, (count,))
        if array.min() < 0 or array.max() >= vocabulary:
            raise self.fail(f"{name} must be ids from 0 to {vocabulary - 1}, got {array.min()} to {array.max()}")
        return array.astype(np.int64)
