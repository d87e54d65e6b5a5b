"""bar.warp.sync where lanes of a warp may wait at an mbarrier or in a loop: the others wait for them.

So they do before all other instructions that lanes execute together, where lanes may wait in a loop (ptx/ordering.py).
In other kernels the lanes of a warp are together again at each of them; only the member mask is checked there (see
warp_ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ptx.ordering import MEETING
from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import WARP, ChunkState, LaneSet, pack_lanes
from .warp_ops import check_members


@dataclass
class _Parked:
    group: Group
    following: int
    site: Site


class WarpMeetings:
    """Lanes of a chunk that wait for the other members of their warp."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.parked: list[_Parked] = []
        self.masks = np.zeros(chunk.lane_count, np.uint32)
        """The member mask of each lane that waits, 0 of all others."""

    def arrive(self, mask: npt.NDArray[np.uint32], site: Site, following: int, group: Group) -> bool:
        """A group reaches a bar.warp.sync; True if it may go straight on."""
        lanes = group.lanes
        if lanes.frame.is_whole:
            if not site.opcode.startswith(MEETING):
                check_members(lanes, mask, site)
                self.chunk.order.warp_barrier(lanes, mask)
            return True
        self.masks[lanes.index] = mask
        self.parked.append(_Parked(group, following, site))
        self.release()
        return False

    def release(self) -> bool:
        """Let lanes go on whose living members have all arrived; False if there are none."""
        if not self.parked:
            return False
        arrived = pack_lanes(self.masks.reshape(-1, WARP) != 0)
        alive = pack_lanes(self.chunk.alive_flags().reshape(-1, WARP))
        parked, self.parked = self.parked, []
        found = False
        ordered: list[npt.NDArray[np.int64]] = []
        freed: list[npt.NDArray[np.int64]] = []
        for each in parked:
            lanes = each.group.lanes
            warps = lanes.index // WARP
            masks = self.masks[lanes.index]
            ready = (masks & alive[warps] & ~arrived[warps]) == 0
            if not ready.any():
                self.parked.append(each)
                continue
            found = True
            going = each.group
            if not ready.all():
                going, rest = going.split((np.flatnonzero(ready), np.flatnonzero(~ready)))
                self.parked.append(_Parked(rest, each.following, each.site))
            if not each.site.opcode.startswith(MEETING):
                ordered.append(going.lanes.index)
            self.chunk.wait_at(each.following, going)
            freed.append(going.lanes.index)
        if ordered:
            index = np.sort(np.concatenate(ordered))
            self.chunk.order.warp_barrier(LaneSet(self.chunk, index), self.masks[index])
        for index in freed:
            self.masks[index] = 0
        return found

    def report_deadlock(self) -> None:
        """Nothing can run and lanes still wait for others of their warp: raise that as a fault."""
        for each in self.parked:
            lanes = each.group.lanes
            warp = int(lanes.index[0]) // WARP
            here = self.masks.reshape(-1, WARP)[warp]
            missing = int(here[here != 0][0]) & ~int(pack_lanes((here != 0)[None])[0])
            words = f"bar.warp.sync waits for the lanes {missing:#010x} of its warp, and no thread can run"
            self.chunk.run.collector.add("deadlock", words, each.site, lanes, 0, lanes.count)
