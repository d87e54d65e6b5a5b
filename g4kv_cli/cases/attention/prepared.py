"""Tensors and expectations of attention cases, kept for the next cases that ask for the same ones.

Numbers of splits, tiles and checks are tried over the same requests, so cases that follow one another often differ in
the call alone, and in pages. What a case asks for is its ``subject``: the case without that. Tensors and expectations
are made from the subject, so what it leaves out cannot matter to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.inputs import AttentionTensors, expected_attention, make_attention_inputs
from g4kv_cli.entries.contract import Contract
from g4kv_cli.oracle.attention import ExpectedAttention

KEPT_BYTES = 64 << 20
"""Of all tensors and expectations that are kept; larger ones are made anew for each case."""

Prepared = tuple[AttentionTensors, ExpectedAttention]
_kept: OrderedDict[tuple[AttentionCase, Contract], tuple[Prepared, int]] = OrderedDict()


def prepared(case: AttentionCase, contract: Contract) -> Prepared:
    """The case's tensors and what must come out, for kernels that promise ``contract``. The arrays are read-only."""
    subject = _subject(case)
    key = (subject, contract)
    if key in _kept:
        _kept.move_to_end(key)
        return _kept[key][0]
    tensors = make_attention_inputs(subject)
    made = tensors, expected_attention(subject, tensors, contract=contract)
    arrays = list(_arrays(made))
    for array in arrays:
        array.flags.writeable = False
    nbytes = sum(array.nbytes for array in arrays)
    if nbytes <= KEPT_BYTES:
        _kept[key] = made, nbytes
        while sum(size for _, size in _kept.values()) > KEPT_BYTES:
            _kept.popitem(last=False)
    return made


def _subject(case: AttentionCase) -> AttentionCase:
    """The case without its name, how it is called, and which pages hold its keys."""
    requests = tuple(replace(request, pages=()) for request in case.requests)
    return replace(
        case, id="", requests=requests, num_pages=0, num_splits=1, cta_tile_q=None, empty_splits=(), wants_lse=True,
        check="oracle",
    )  # fmt: skip


def _arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """All arrays in nested dataclasses and tuples."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _arrays(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
