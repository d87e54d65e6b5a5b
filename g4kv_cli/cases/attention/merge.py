"""The merge kernel alone: partial results made on the host, so that any split can be the empty one.

The split kernels deal keys out from the front, so only the last splits of a request are ever empty. The merge must not
rely on it: a split that saw no key has maximum -infinity and sum 0, its output was never written and holds NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.inputs import AttentionTensors
from g4kv_cli.cases.session import Session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.oracle.attention import visible_keys

Array = npt.NDArray[Any]


def launch_merge(session: Session, case: AttentionCase, tensors: AttentionTensors) -> tuple[DeviceArray, DeviceArray]:
    """Merge the case's partial results; (out, lse) on the device, as the split entry leaves them. Where lse is not
    wanted it has no row."""
    partial_out, partial_max, partial_sum = partial_results(case, tensors)
    out = session.poisoned((case.num_tokens, case.geometry.num_qo_heads, case.geometry.head_dim), "out")
    lse = session.poisoned((case.num_tokens if case.wants_lse else 0, out.shape[1]), "lse", np.float32)
    workspace = SplitWorkspace(
        session.upload(partial_out, "partial_out"),
        session.upload(partial_max, "partial_max"),
        session.upload(partial_sum, "partial_sum"),
    )
    case.row(
        session.library,
        workspace=workspace,
        num_splits=case.num_splits,
        out=out,
        lse=lse if case.wants_lse else None,
        sm_scale=case.sm_scale,
    )
    return out, lse


def partial_results(case: AttentionCase, tensors: AttentionTensors) -> tuple[Array, Array, Array]:
    """float32 partial_out [tokens, heads, splits, head_dim] (not normalised), partial_max (unscaled score) and
    partial_sum [tokens, heads, splits]: every request's keys dealt out in turn to the splits that are not empty."""
    geometry = case.geometry
    shape = (case.num_tokens, geometry.num_qo_heads, case.num_splits)
    outs = np.full((*shape, geometry.head_dim), np.nan, np.float32)
    maxima, sums = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
    used = [split for split in range(case.num_splits) if split not in case.empty_splits]
    for token, (request, k, v, first) in enumerate(
        zip(case.requests, tensors.k, tensors.v, tensors.first_keys, strict=True)
    ):
        positions = np.arange(first, request.kv_len)
        seen = visible_keys(np.array([request.kv_len - 1]), positions, case.window_left)[0]
        for place, split in enumerate(used):
            keys = np.flatnonzero(seen & (positions % len(used) == place))
            if not len(keys):
                continue
            for head in range(geometry.num_qo_heads):
                kv_head = head // geometry.gqa_group
                scores = k[keys, kv_head].astype(np.float64) @ tensors.q[token, head].astype(np.float64)
                weights = np.exp(case.sm_scale * (scores - scores.max()))
                maxima[token, head, split] = scores.max()
                sums[token, head, split] = weights.sum()
                outs[token, head, split] = weights @ v[keys, kv_head].astype(np.float64)
    return outs, maxima, sums
