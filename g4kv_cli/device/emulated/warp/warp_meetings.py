"""bar.warp.sync where lanes of a warp may sleep at an mbarrier: the others wait for them.

In kernels without mbarriers the lanes of a warp are together again at every bar.warp.sync; only its member mask is
checked there (see warp_ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import WARP, ChunkState, pack_lanes
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
            check_members(lanes, mask, site)
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
            self.masks[going.lanes.index] = 0
            self.chunk.wait_at(each.following, going)
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
