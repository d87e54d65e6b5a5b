"""Our attention entries as calls on a problem's pools; any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from g4kv_cli.bench.attention_problem import SM_SCALE, AttentionProblem
from g4kv_cli.bench.noise_data import BF16
from g4kv_cli.bench.workloads import Variant
from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import entry_named
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.model.plan_request import PlanShape
from g4kv_cli.oracle.compare import POISON_BYTE


@dataclass(slots=True)
class AttentionCall:
    """One entry with its plan, output and workspace."""

    problem: AttentionProblem
    library: KernelLibrary
    variant: Variant
    plan: PrefillPagedPlan
    out: DeviceArray
    workspace: SplitWorkspace | None
    renewed_in_place: bool = True

    def queue(self, pool: int) -> None:
        """One call on this pool."""
        entry = entry_named(self.variant.entry)
        arguments: dict[str, Any] = {
            "q": self.problem.q,
            "plan": self.plan,
            "pool": self.problem.pools[pool],
            "layer": 0,
            "out": self.out,
        }
        if self.workspace is not None:
            arguments |= {"num_splits": self.variant.num_splits, "workspace": self.workspace}
        if entry.takes_tile:
            arguments["cta_tile_q"] = self.variant.tile or None
        if entry.takes_pdl:
            arguments["enable_pdl"] = self.variant.enable_pdl
        entry(self.library, **arguments)

    def poison(self) -> None:
        """Output and workspace."""
        device = self.library.device
        device.fill(self.out, POISON_BYTE)
        if self.workspace is not None:
            for scratch in self.workspace.by_name().values():
                device.fill(scratch, POISON_BYTE)

    def output(self) -> npt.NDArray[Any]:
        """bf16 [tokens, num_qo_heads, head_dim]."""
        return self.library.device.read(self.out)


def attention_call(problem: AttentionProblem, library: KernelLibrary, variant: Variant) -> AttentionCall:
    """Make the plan, the output and, for a split form, the workspace. Raises what the device and the contract raise."""
    shape, device = problem.shape, library.device
    plan = plan_of(problem, device, variant.tile)
    out = device.allocate((problem.tokens, shape.num_qo_heads, shape.head_dim), BF16, "out")
    workspace = None
    if entry_named(variant.entry).takes_splits:
        workspace = SplitWorkspace.allocate(
            device,
            tokens=problem.tokens,
            num_qo_heads=shape.num_qo_heads,
            num_splits=variant.num_splits,
            head_dim=shape.head_dim,
        )
    return AttentionCall(problem, library, variant, plan, out, workspace)


def plan_of(problem: AttentionProblem, device: Device, tile: int) -> PrefillPagedPlan:
    """The problem's plan with this tile (0: derived), made once: all decode forms share it, as a server's layers do."""
    if tile not in problem.plans:
        shape = problem.shape
        problem.plans[tile] = PrefillPagedPlan.batch(
            device,
            problem.requests(),
            shape=PlanShape(
                num_qo_heads=shape.num_qo_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                page_size=shape.page_size,
                window_left=problem.geometry.window_left,
                sm_scale=SM_SCALE,
                cta_tile_q=tile or None,
            ),
            padding_page=problem.padding_page,
        )
    return problem.plans[tile]
