"""Races in global memory: between the lanes of a warp, the warps of a block, and blocks.

All accesses of a launch are logged and searched for conflicts (conflicts.py) at its end. Only those to allocations that
the launch stores to matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import RACED_READ
from ..ptx.ordering import manner
from ..ptx.sites import Site
from ..state.lanes import WARP, Collector, LaneSet
from ..state.memory import GLOBAL_BASE, DeviceMemory
from .conflicts import ATOMIC, READ, WRITE, Access, Conflict, block_of, find_conflicts
from .order import ChunkOrder, Order

Units = npt.NDArray[np.int64]
_COMPACT_AT_LANES = 1 << 24
"""Logged accesses at which equal ones are dropped; twice as many as are left then at the next time."""
_ENTRY_LANES = 64
_OF_BLOCK = ".cta orders threads of one block"
_OF_CLUSTER = ".cluster orders threads of one cluster, and each of these blocks is its own"


class GlobalLog:
    """Global accesses of one launch."""

    def __init__(self, order: Order, memory: DeviceMemory) -> None:
        self.order = order
        self.memory = memory
        self.accesses: list[Access] = []
        self._logged = 0
        self._compact_at = _COMPACT_AT_LANES
        self._serial = 0

    def add(
        self, kind: int, units: Units, shift: int, lanes: LaneSet, site: Site, data: npt.NDArray[Any] | None = None
    ) -> None:
        """Remember an access; ``units`` are arena offsets in units of 1 << shift bytes, (1,) or (lanes,)."""
        order: ChunkOrder = lanes.chunk.order
        lanes.chunk.run.note_addresses(units)
        self.accesses.append(Access(self._serial, kind, units, shift, lanes, site, self.order.now, order.stand, data))
        self._serial += 1
        self._logged += max(units.size, _ENTRY_LANES)
        if self._logged > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Keep the first of a thread's equal accesses; a loop over one place fills no memory."""
        groups: dict[tuple[int, int, int, int], list[Access]] = {}
        for access in self.accesses:
            key = (access.site.number, access.shift, access.kind, id(access.stand))
            groups.setdefault(key, []).append(access)
        kept: list[Access] = []
        for group in groups.values():
            head = group[0]
            units = np.concatenate([np.broadcast_to(part.units, (part.lanes.count,)) for part in group])
            index = np.concatenate([part.lanes.index for part in group])
            _, first = np.unique(units * head.lanes.chunk.lane_count + index, return_index=True)
            first.sort()
            data = None
            if all(part.data is not None and part.data.shape[0] == part.lanes.count for part in group):
                data = np.concatenate([part.data for part in group if part.data is not None])[first]
            lanes = type(head.lanes)(head.lanes.chunk, index[first])
            kept.append(replace(head, units=units[first], lanes=lanes, data=data))
        self.accesses = sorted(kept, key=lambda access: access.serial)
        self._logged = sum(max(access.units.size, _ENTRY_LANES) for access in kept)
        self._compact_at = max(_COMPACT_AT_LANES, 2 * self._logged)

    def check(self, may_collide: Sequence[tuple[int, int]], collector: Collector) -> None:
        """Report the conflicts outside ``may_collide`` (byte ranges of the arena)."""
        begins = np.array(sorted(allocation.begin - GLOBAL_BASE for allocation in self.memory.allocations), np.int64)
        of = [self._allocations(access, begins) for access in self.accesses]
        stored: set[int] = set()
        for access, found in zip(self.accesses, of, strict=True):
            if access.kind != READ:
                stored |= found
        chosen = [access for access, found in zip(self.accesses, of, strict=True) if found & stored]
        for conflict in find_conflicts(chosen, self.order, allowed=may_collide):
            self._report(conflict, collector)

    def _allocations(self, access: Access, begins: Units) -> set[int]:
        low, high = int(access.units.min()) << access.shift, int(access.units.max()) << access.shift
        first, last = np.searchsorted(begins, [low, high], "right")
        if first == last:
            return {int(first)}
        return set(np.unique(np.searchsorted(begins, access.units << access.shift, "right")).tolist())

    def _report(self, conflict: Conflict, collector: Collector) -> None:
        later, earlier = conflict.later, conflict.earlier
        address = conflict.place + GLOBAL_BASE
        label, offset, place = self.memory.describe(address)
        line = earlier.site.location.line or earlier.site.ptx_line
        one, other = (_thread(later.lanes, conflict.lane), _thread(earlier.lanes, conflict.earlier_lane))
        at = f"({earlier.site.opcode}, line {line})"
        kind = "global_race"
        if conflict.is_between_blocks:
            block, grid = block_of(earlier.lanes, conflict.earlier_lane), later.lanes.chunk.grid_dim
            where = (block % grid[0], block // grid[0] % grid[1], block // (grid[0] * grid[1]))
            if later.kind != READ and earlier.kind != READ:
                kind = "block_write_conflict"
                did = "has an atomic on" if earlier.kind == ATOMIC else "stored to"
                words = f"block {where} {did} the same location {at}, and nothing orders the two: {place}"
            else:
                words = f"{conflict.hazard} race with block {where} {at}, which nothing orders: {place}"
            scopes = [manner(each.site.opcode, False) for each in (later, earlier) if each.in_block]
            if scopes:
                words += f" ({_OF_BLOCK if any(scope.in_block for scope in scopes) else _OF_CLUSTER})"
            who = f"this block and block {where}"
        elif not conflict.is_within_warp:
            who = f"warp {one // WARP} and warp {other // WARP} {at}"
            words = f"{conflict.hazard} race: {who} without a barrier between them: {place}"
        elif later is earlier:
            who = f"lanes {other % WARP} and {one % WARP} of a warp"
            words = f"{who} write different values with one instruction ({conflict.hazard}): {place}"
        else:
            who = f"lane {one % WARP} and lane {other % WARP} of warp {one // WARP} {at}"
            words = f"{conflict.hazard} race: {who} without a __syncwarp between them: {place}"
        if conflict.is_equal:
            kind, words = "equal_stores", f"{who} store the same value: {place}"
        if conflict.read_sites:
            kind = RACED_READ
            collector.stale_sites |= conflict.read_sites
        collector.add(kind, words, later.site, later.lanes, conflict.lane, conflict.count, address, label, offset)


def _thread(lanes: LaneSet, position: int) -> int:
    return int(lanes.thread[position])


__all__ = ["READ", "WRITE", "GlobalLog"]
