"""What a case's entry is called with: its plan, pool and workspace, and the arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from g4kv_cli.cases.attention.case import AttentionCase, KvRequest
from g4kv_cli.cases.attention.pool import page_owner
from g4kv_cli.cases.session import Session
from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.entries.arguments import PagedPool
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.model.plan_request import PlanRequest, PlanShape


def make_plan(session: Session, case: AttentionCase) -> PrefillPagedPlan:
    """The case's requests as a plan of their own."""
    plan = PrefillPagedPlan.batch(
        session.device,
        plan_requests(case.requests, case.page_size),
        shape=plan_shape(case),
        padding_page=case.padding_page,
    )
    session.arrays.extend(plan.buffers.by_name().values())
    return plan


def plan_shape(case: AttentionCase) -> PlanShape:
    """What the plan's requests share."""
    return PlanShape(
        num_qo_heads=case.geometry.num_qo_heads,
        num_kv_heads=case.geometry.num_kv_heads,
        head_dim=case.geometry.head_dim,
        page_size=case.page_size,
        window_left=case.window_left,
        sm_scale=case.sm_scale,
        cta_tile_q=case.cta_tile_q if case.row.takes_tile else None,
    )


def plan_requests(requests: Sequence[KvRequest], page_size: int) -> list[PlanRequest]:
    """The requests as a plan takes them."""
    return [
        PlanRequest.of(kv_len=request.kv_len, q_len=request.q_len, pages=request.pages, page_size=page_size)
        for request in requests
    ]


def workspace(session: Session, tokens: int, num_qo_heads: int, num_splits: int, head_dim: int) -> SplitWorkspace:
    """Scratch that holds NaN in every place: what a split does not write must not be read."""
    rows = (tokens, num_qo_heads, num_splits)
    return SplitWorkspace(
        session.poisoned((*rows, head_dim), "partial_out", np.float32),
        session.poisoned(rows, "partial_max", np.float32),
        session.poisoned(rows, "partial_sum", np.float32),
    )


def paged_pool(case: AttentionCase, pool: DeviceArray, holders: Sequence[KvRequest]) -> PagedPool:
    """The pool with the case's layout, and who holds its pages."""
    return PagedPool(case.layout, pool, page_owner(holders))


def call_arguments(
    case: AttentionCase,
    plan: PrefillPagedPlan,
    pool: PagedPool,
    q: DeviceArray,
    out: DeviceArray,
    lse: DeviceArray | None,
    scratch: SplitWorkspace | None,
) -> dict[str, Any]:
    """The arguments of the case's entry; ``scratch`` where it takes splits."""
    arguments: dict[str, Any] = {"q": q, "plan": plan, "pool": pool, "layer": case.layer, "out": out, "lse": lse}
    if case.row.takes_tile and case.cta_tile_q is not None:
        arguments["cta_tile_q"] = case.cta_tile_q
    if scratch is not None:
        arguments |= {"num_splits": case.num_splits, "workspace": scratch}
    return arguments
