"""Scratch memory of the split decode forms."""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.device.interface import Device, DeviceArray
from g4kv_cli.entries.arguments import FLOAT32

MERGE_COLUMNS = 64
"""Columns of one query row that a block of the merge serves."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitWorkspace:
    """Partial results of split decode, float32: partial_out [tokens, num_qo_heads, num_splits, head_dim], partial_max
    and partial_sum [tokens, num_qo_heads, num_splits].

    A call packs what it needs from the first element on, so one workspace serves every call that needs no more
    elements: fewer tokens, heads or splits. Its contents mean nothing between calls.
    """

    partial_out: DeviceArray
    partial_max: DeviceArray
    partial_sum: DeviceArray

    @classmethod
    def allocate(
        cls, device: Device, *, tokens: int, num_qo_heads: int, num_splits: int, head_dim: int
    ) -> SplitWorkspace:
        """A workspace for up to this many token rows, heads and splits of one family."""
        rows = (tokens, num_qo_heads, num_splits)
        return cls(
            partial_out=device.allocate((*rows, head_dim), FLOAT32, "partial_out"),
            partial_max=device.allocate(rows, FLOAT32, "partial_max"),
            partial_sum=device.allocate(rows, FLOAT32, "partial_sum"),
        )

    def by_name(self) -> dict[str, DeviceArray]:
        """The arrays by the names that errors give them."""
        return {name: getattr(self, name) for name in ("partial_out", "partial_max", "partial_sum")}
