"""Where an instruction stands, for faults; and the numbers that generated code refers to it by."""

from __future__ import annotations

from dataclasses import dataclass

from .instruction import Instruction, Location
from .origins import Extent


@dataclass(frozen=True)
class Site:
    """One instruction of one kernel. ``number`` counts the sites of the kernel from 0; ``in_wait``: it is in
    a loop that may wait for other threads; ``is_used``: something reads a register that it writes; ``is_validated``: it
    is a load of which a compare-and-swap makes sure; ``within``: where in shared memory its accesses have to stay."""

    number: int
    kernel: str
    opcode: str
    ptx_line: int
    location: Location
    in_wait: bool = False
    is_used: bool = False
    is_validated: bool = False
    within: Extent | None = None


class SiteTable:
    """Sites of one kernel in the order they were made."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.sites: list[Site] = []

    def add(
        self,
        instruction: Instruction,
        in_wait: bool = False,
        is_used: bool = False,
        is_validated: bool = False,
        within: Extent | None = None,
    ) -> Site:
        """A new site for an instruction."""
        what = instruction.opcode, instruction.ptx_line, instruction.location
        site = Site(len(self.sites), self.kernel, *what, in_wait, is_used, is_validated, within)
        self.sites.append(site)
        return site
