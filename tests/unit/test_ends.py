"""Of so many rows that a case looks at those at both ends: which of them have to be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention.ends import _judge
from g4kv_cli.cases.prep.ends import EndRows
from g4kv_cli.cases.session import Session
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.attention import ExpectedAttention
from g4kv_cli.oracle.attention_limits import Rounding
from g4kv_cli.oracle.bfloat16 import BF16, bits
from g4kv_cli.oracle.compare import POISON_BITS
from g4kv_cli.oracle.reference import Expected

VALUES = np.arange(1, 33, dtype=np.float32).reshape(2, 2, 8)


def judged(kind: str, which: str, token: int) -> Session:
    """A session that has judged right rows [2 end tokens, 2 heads, 8], all but those of a token's first head."""
    device: Any = SimpleNamespace(info=SimpleNamespace(kind=kind))
    session = Session(library=SimpleNamespace(device=device, provider=None))  # type: ignore[arg-type]
    got = VALUES.astype(BF16)
    bits(got)[token, 0] = POISON_BITS
    value, limit = VALUES.astype(np.float64), np.full(VALUES.shape, 0.125)
    if which == "prep":
        expected = Expected(value, limit, "an eighth")
        EndRows(session, 2**24).judge("q_out", got, expected, must_be_there=True)
    else:
        none = np.zeros(VALUES.shape[:2])
        expected_attention = ExpectedAttention(value, Rounding(limit, none, none), none, none + 1)
        case: Any = SimpleNamespace(geometry=GEOMETRIES["12b-local"].with_heads(2, 1))
        _judge(session, case, got, expected_attention, SimpleNamespace(tokens=[0, 2**24 - 1]))  # type: ignore[arg-type]
    return session


@pytest.mark.parametrize("which", ["prep", "attention"])
@pytest.mark.parametrize("token", [0, 1])
def test_a_gpu_has_to_have_written_every_row(which: str, token: int) -> None:
    """A row at a wrapped offset leaves poison where it belongs; the emulated device may not have run its block."""
    assert judged("cuda", which, token).mismatches
    assert not judged("emulated", which, token).mismatches
