"""What a program that calls the entries needs; ``from g4kv_cli import ...`` gives the same names, loaded when used.

A step of one family takes three objects, each made once and used for all its layers:

* a pool: ``PoisonedPool`` (NaN until written; ``fill`` and ``read`` by request and position), or your own memory as
  ``PagedPool(layout, array)``;
* a plan: ``PrefillPagedPlan.batch(device, requests, shape=PlanShape.of(geometry, page_size=...))``. It serves prep
  (``batch_prefill``, one token a request or many; ``decode_batch()`` for the decode form) and attention alike.
  ``preallocated`` and ``update`` keep its addresses for CUDA graphs. Requests are made by ``PlanRequest.of``, padding
  by ``PlanRequest.padding``;
* a ``KernelLibrary``: a device (``open_device``) and, if you have your own, a directory of kernel sources.

An entry is found by what it does, ``entry_for(geometry, "prep" | "attention" | "merge", form)``, or imported by its
name (``g4kv_cli.entries.prep``, ``g4kv_cli.entries.attention``), and called with the library and keyword arguments.
It checks everything on the host before it launches: ContractError has ``code``, ``field``, ``got`` and ``want``, and
``RULES`` the sentence of each code (``LAUNCH_RULES`` of those that a device has for any launch). ``RopeTables``,
``PageRow``, ``PagedBatch`` and ``SplitWorkspace`` (for any number of splits up to its own; ``suggested_splits`` says
how many) are its typed arguments, ``rope_rows`` makes rows of the tables, and ``attend`` is the float64 oracle of
attention: values, and how far off a right kernel may be.

``load_dump`` reads the arrays of a case that ``g4kv smoke --dump DIR`` wrote.

``window`` is a number of keys, the query's own included, wherever people say it (``Geometry.window``,
``PlanRequest.of``); the kernels take ``window_left`` = window - 1, -1 for none. Lengths and positions count tokens,
offsets and strides elements. Arrays on the host are NumPy, bf16 is ``ml_dtypes.bfloat16``.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.arguments import PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.clusters import suggested_splits
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.kv_pool import PoisonedPool
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import ENTRIES, entry_for, entry_named
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.errors import CompileError, ContractError, DeviceFault, DeviceUnavailable, G4kvError, UsageError
from g4kv_cli.inputs import rope_rows
from g4kv_cli.model.geometry import ATTENTION_SCALE, GEOMETRIES, Geometry
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.plan_request import PlanRequest, PlanShape
from g4kv_cli.model.rules import LAUNCH_RULES, RULES
from g4kv_cli.oracle import attention as oracle_attention
from g4kv_cli.oracle.attention import ExpectedAttention
from g4kv_cli.records.dump import Dump, load_dump

__all__ = [
    "ENTRIES",
    "GEOMETRIES",
    "LAUNCH_RULES",
    "RULES",
    "CompileError",
    "ContractError",
    "Device",
    "DeviceArray",
    "DeviceFault",
    "DeviceUnavailable",
    "Dump",
    "Entry",
    "ExpectedAttention",
    "G4kvError",
    "Geometry",
    "KernelLibrary",
    "KvLayout",
    "PageRow",
    "PagedBatch",
    "PagedPool",
    "PlanRequest",
    "PlanShape",
    "PoisonedPool",
    "PrefillPagedPlan",
    "RopeTables",
    "SplitWorkspace",
    "UsageError",
    "attend",
    "entry_for",
    "entry_named",
    "load_dump",
    "open_device",
    "rope_rows",
    "suggested_splits",
]


def attend(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    *,
    first_key: int = 0,
    window: int | None = None,
    sm_scale: float = ATTENTION_SCALE,
) -> ExpectedAttention:
    """Attention of one request's chunk in float64, and how far off a right kernel may be.

    ``q`` [q_len, num_qo_heads, head_dim] as prep left it; ``k``, ``v`` [keys, num_kv_heads, head_dim], row 0 at
    position ``first_key``; the last query stands at the last key. ``window`` counts keys, the query's own included
    (None: all). The answer's ``value`` is [q_len, num_qo_heads, head_dim], ``rounding.limit`` likewise; ``lse`` and
    ``lse_limit`` are [q_len, num_qo_heads]. ValueError if a query sees no key.
    """
    window_left = -1 if window is None else window - 1
    return oracle_attention.attend(q, k, v, first_key=first_key, window_left=window_left, sm_scale=sm_scale)
