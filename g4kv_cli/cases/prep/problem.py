"""From a case to logical tensors and what must come out of them; no device and no pool layout yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.cases.prep.closed_form import closed_form_expected
from g4kv_cli.cases.prep.golden import read_recording
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.inputs import PrepInputs, make_inputs, turning_columns
from g4kv_cli.model.kv_format import FOLDED
from g4kv_cli.oracle import reference
from g4kv_cli.oracle.reference import Expected

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Inputs of one call and what each output must be: every ``Expected`` of an output has to hold."""

    inputs: PrepInputs
    q: tuple[Expected, ...]
    k: tuple[Expected, ...]
    v: tuple[Expected, ...]


def build_problem(case: PrepCase, contract: Contract = STRICT) -> Problem:
    """The tensors and expectations of a case, for kernels that promise ``contract``.

    UsageError if its golden file is not what it was.
    """
    if case.golden is not None:
        return _recorded(case, contract)
    inputs = make_inputs(
        case.geometry,
        case.kind,
        seed=case.seed,
        positions=case.positions,
        rotary_dim=case.rotary_dim,
        table_positions=case.table_positions,
        with_v=case.has_v_input,
        folded=case.kv_format == FOLDED,
    )
    if case.kind == "closed-form":
        q, k, v = closed_form_expected(
            case.geometry, inputs.positions, case.rotary_dim, case.has_v_input, folded=case.kv_format == FOLDED
        )
        return Problem(inputs, (q,), (k,), (v,))
    return Problem(inputs, *_oracle(case, inputs, contract))


def _oracle(
    case: PrepCase, inputs: PrepInputs, contract: Contract
) -> tuple[tuple[Expected], tuple[Expected], tuple[Expected]]:
    rounds_norm = contract.rounds_norm
    tables = inputs.cos, inputs.sin
    k = reference.expected_rotated(inputs.k, inputs.k_weight, *tables, case.eps, rounds_norm=rounds_norm)
    if case.kv_format == FOLDED:
        kept = turning_columns(case.geometry)
        q = reference.expected_folded_query(inputs.q, inputs.q_weight, inputs.k_weight, *tables, kept, case.eps)
        k = k.columns(kept)
    else:
        q = reference.expected_rotated(inputs.q, inputs.q_weight, *tables, case.eps, rounds_norm=rounds_norm)
    return (q,), (k,), (reference.expected_value_rows(inputs.value_source, case.eps),)


def _recorded(case: PrepCase, contract: Contract) -> Problem:
    """A recording is judged twice: within the recorded side's own rounding, and within the oracle's tight limits."""
    if case.golden is None:
        raise ValueError("not a golden case")
    recording = read_recording(case.golden)
    half_twice = [np.concatenate([half, half], axis=-1) for half in (recording.cos, recording.sin)]
    inputs = PrepInputs(
        q=recording.q,
        k=recording.k,
        v=recording.v if case.has_v_input else None,
        q_weight=recording.q_weight,
        k_weight=recording.k_weight,
        cos=half_twice[0],
        sin=half_twice[1],
        positions=recording.positions,
        table_positions=case.table_positions,
    )
    q, k, v = _oracle(case, inputs, contract)
    rotary_dim = inputs.rotary_dim
    recorded_q = reference.expected_recorded_rotated(recording.q_expect, inputs.q, inputs.q_weight, rotary_dim)
    recorded_k = reference.expected_recorded_rotated(recording.k_expect, inputs.k, inputs.k_weight, rotary_dim)
    if case.kv_format == FOLDED:
        kept = turning_columns(case.geometry)
        recorded_q = reference.expected_recorded_fold(recorded_q, recording.k_weight, kept)
        recorded_k = recorded_k.columns(kept)
    recorded_v = reference.expected_recorded_value_rows(recording.v_expect)
    return Problem(inputs, (recorded_q, *q), (recorded_k, *k), (recorded_v, *v))
