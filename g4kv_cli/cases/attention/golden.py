"""Recorded attention of another implementation: the cases of one file, their tensors, and how they are judged.

The keys and values are the recorded cache, so an error of prep does not reach these cases. Two targets: float64
attention over the recorded bf16 tensors, which the recording holds as float32; and the recorded bf16 attention, which
rounds scores and weights too. A result of one kernel is off from that by no more than both limits together. Folded
rows are made of the recorded V, and of queries that K's weight went into before their one rounding; what that does to
scores is stated (attention_limits.py) and allowed for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.inputs import AttentionTensors, expected_attention
from g4kv_cli.cases.prep.build import id_part
from g4kv_cli.cases.prep.golden import Recording, read_recording
from g4kv_cli.entries.table import entries_for
from g4kv_cli.errors import UsageError
from g4kv_cli.inputs import turning_columns
from g4kv_cli.model.kv_format import FOLDED, formats_of
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.oracle.attention import ExpectedAttention, ScoreParts
from g4kv_cli.oracle.attention_limits import FOLD_SHARE
from g4kv_cli.oracle.bfloat16 import BF16, round_to_bf16
from g4kv_cli.oracle.compare import Axes, compare_values
from g4kv_cli.oracle.prep import rms_norm
from g4kv_cli.oracle.reference import Expected
from g4kv_cli.oracle.tolerance import U_FLOAT32
from g4kv_cli.records.npz import load_npz, npz_files
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]

NUM_SPLITS = 3

_ARRAYS = ("k_cache", "v_cache", "attn_ref_f32", "attn_eager")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAttention:
    """``k_cache``, ``v_cache`` bf16 [keys, kv heads, head_dim] from position 0 on; ``reference`` float32 and ``eager``
    bf16 [tokens, q heads, head_dim]."""

    window_left: int
    k_cache: Array
    v_cache: Array
    reference: Array
    eager: Array


def attention_golden_cases(path: Path, page_size: int | None = None) -> list[AttentionCase]:
    """The attention cases of a file or directory; a file without attention arrays has none."""
    size = DEFAULT_PAGE_SIZE_TOKENS if page_size is None else page_size
    return [case for file in npz_files(path, "--golden") for case in _cases_of(read_recording(file), size)]


def recorded_tensors(case: AttentionCase) -> AttentionTensors:
    """q, and the recorded cache up to each request's last key."""
    recording, recorded = _read(case)
    lengths = [request.kv_len for request in case.requests]
    q, k_cache = recording.q_expect, recorded.k_cache
    if case.kv_format == FOLDED:
        q, k_cache = _folded(recording, recorded)
    return AttentionTensors(
        q,
        tuple(k_cache[:length] for length in lengths),
        tuple(recorded.v_cache[:length] for length in lengths),
        (0,) * len(lengths),
    )


def check_recorded(
    case: AttentionCase, tensors: AttentionTensors, expected: ExpectedAttention, got: Array, axes: Axes
) -> Iterator[Mismatch]:
    """Hold ``got`` [tokens, q heads, head_dim] against both recorded results."""
    _, recorded = _read(case)
    reference = recorded.reference.astype(np.float64)
    fold = None
    if case.kv_format == FOLDED:
        fold = ScoreParts(np.setdiff1d(np.arange(case.geometry.head_dim), turning_columns(case.geometry)), FOLD_SHARE)
        expected = expected_attention(case, tensors, differing=fold)
    limit = expected.rounding.limit + U_FLOAT32 * np.abs(reference)
    exact = Expected(reference, limit, "bf16 weights and output, float32 sums, the recording's float32")
    rounded = expected_attention(case, tensors, rounds_scores=True, differing=fold)
    eager = Expected(
        recorded.eager.astype(np.float64),
        expected.rounding.limit + rounded.rounding.limit,
        "bf16 weights and output, and the recording's bf16 scores, weights and output",
    )
    for operation, want in (
        ("out against the recorded float64 attention", exact),
        ("out against the recorded bf16 attention", eager),
    ):
        found = compare_values(operation, got, want, axes)
        if found is not None:
            yield found


def _folded(recording: Recording, recorded: RecordedAttention) -> tuple[Array, Array]:
    """q with K's weight in the columns that do not turn, rounded once; K with V in those. The others as recorded."""
    turning = turning_columns(recording.geometry)
    still = rms_norm(recording.q, recording.q_weight) * recording.k_weight.astype(np.float64)
    q, k = round_to_bf16(still), recorded.v_cache.copy()
    q[..., turning], k[..., turning] = recording.q_expect[..., turning], recorded.k_cache[..., turning]
    return q, k


def _cases_of(recording: Recording, page_size: int) -> Iterator[AttentionCase]:
    recorded = _attention_of(recording)
    if recorded is None:
        return
    positions = [int(position) for position in recording.positions]
    rows = entries_for(recording.geometry, "attention")
    for kv_format, entry in itertools.product(formats_of(recording.geometry), rows):
        chunks = [(len(recorded.k_cache), len(positions))]
        if entry.one_token_each:
            chunks = [(position + 1, 1) for position in positions]
        requests, used = [], 0
        for kv_len, q_len in chunks:
            count = -(-kv_len // page_size)
            # Pages from the last to the first, so that a page id is never the logical page's own number.
            requests.append(KvRequest(kv_len, q_len, 0, tuple(reversed(range(used + 1, used + 1 + count)))))
            used += count
        yield AttentionCase(
            id=f"golden/{recording.path.stem}/{id_part(kv_format)}attention-{entry.form}",
            entry=entry.name,
            geometry=recording.geometry,
            form=entry.form,
            kind="spread",
            seed=0,
            requests=tuple(requests),
            page_size=page_size,
            num_pages=used + 2,
            num_layers=2,
            layer=1,
            window_left=recorded.window_left,
            num_splits=NUM_SPLITS if entry.takes_splits else 1,
            golden=recording.path,
            kv_format=kv_format,
        )


def _read(case: AttentionCase) -> tuple[Recording, RecordedAttention]:
    if case.golden is None:
        raise ValueError(f"{case.id} is not a recorded case")
    recording = read_recording(case.golden)
    recorded = _attention_of(recording)
    if recorded is None:
        raise UsageError(f"golden file {case.golden}: its attention arrays are gone")
    return recording, recorded


def _attention_of(recording: Recording) -> RecordedAttention | None:
    """The attention arrays of a file that was read and checked already; None if it has none.

    Raises UsageError: one of them missing, of another dtype or shape, or not finite.
    """
    path = recording.path
    arrays = load_npz(path, "golden file", {*_ARRAYS, "meta_json"})
    meta = json.loads(str(arrays.pop("meta_json")))
    if not arrays:
        return None
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise UsageError(f"golden file {path}: has attention arrays, but no {missing[0]}")
    if not recording.is_consecutive:
        raise UsageError(f"golden file {path}: attention needs consecutive positions")
    heads, head_dim = recording.geometry.num_kv_heads, recording.geometry.head_dim
    cache = (int(recording.positions[-1]) + 1, heads, head_dim)
    shapes = {"k_cache": cache, "v_cache": cache, "attn_ref_f32": recording.q.shape, "attn_eager": recording.q.shape}
    for name, shape in shapes.items():
        dtype = np.float32 if name == "attn_ref_f32" else np.uint16
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            raise UsageError(
                f"golden file {path}: {name} must be {np.dtype(dtype)} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
    bf16 = {name: array.view(BF16) for name, array in arrays.items() if array.dtype == np.uint16}
    for name, values in (bf16 | {"attn_ref_f32": arrays["attn_ref_f32"]}).items():
        if not np.isfinite(values.astype(np.float32)).all():
            raise UsageError(f"golden file {path}: {name} holds a value that is not finite")
    window = meta.get("window")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise UsageError(f"golden file {path}: meta_json window must be a positive integer or null, got {window!r}")
    return RecordedAttention(
        -1 if window is None else window - 1,
        bf16["k_cache"],
        bf16["v_cache"],
        arrays["attn_ref_f32"],
        bf16["attn_eager"],
    )
