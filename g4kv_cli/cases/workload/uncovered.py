"""An entry that cannot take a workload: counted as not covered, with the reason, and never a pass."""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.cases.case import OfOneEntry, RunContext
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.records.run import CaseResult


@dataclass(frozen=True, slots=True)
class UncoveredCase(OfOneEntry):
    """What would have been asked of ``entry``, and why it cannot be."""

    id: str
    entry: str
    geometry: Geometry
    reason: str

    @property
    def sources(self) -> tuple[str, ...]:
        """Nothing is launched."""
        return ()

    def run(self, context: RunContext) -> CaseResult:
        """Say so."""
        return CaseResult(self.id, self.entry, self.geometry.name, "not covered", 0.0, self.reason)
