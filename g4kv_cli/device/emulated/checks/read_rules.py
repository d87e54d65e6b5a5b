"""What a launch says about reads of global memory, beyond that the memory is there: whose it is, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import Allocation
from .early_reads import EarlyReads
from .owned_reads import BlockReads, OwnedReads

Units = npt.NDArray[np.int64]


class ReadRule(Protocol):
    """A rule of one chunk."""

    def check(self, lanes: LaneSet, units: Units, shift: int, allocation: Allocation | None, site: Site) -> None:
        """Look at a load of units of 1 << shift bytes, (1,) or (lanes,), by these lanes."""


def read_rules(chunk: ChunkState, owned: Sequence[OwnedReads], early: EarlyReads | None) -> list[ReadRule]:
    """Those of a launch."""
    return [*(BlockReads(chunk, rule) for rule in owned), *([] if early is None else [early])]


def check_read(lanes: LaneSet, units: Units, shift: int, allocation: Allocation | None, site: Site) -> None:
    """Hold a load against all of them."""
    every: list[ReadRule] = lanes.chunk.read_rules
    for rule in every:
        rule.check(lanes, units, shift, allocation, site)
