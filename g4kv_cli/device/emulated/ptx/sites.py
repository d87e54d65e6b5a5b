"""Where an instruction stands, for faults; and the numbers that generated code refers to it by."""

from __future__ import annotations

from dataclasses import dataclass

from .instruction import Instruction, Location


@dataclass(frozen=True)
class Site:
    """One instruction of one kernel. ``number`` counts the sites of the kernel from 0."""

    number: int
    kernel: str
    opcode: str
    ptx_line: int
    location: Location


class SiteTable:
    """Sites of one kernel in the order they were made."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.sites: list[Site] = []

    def add(self, instruction: Instruction) -> Site:
        """A new site for an instruction."""
        site = Site(len(self.sites), self.kernel, instruction.opcode, instruction.ptx_line, instruction.location)
        self.sites.append(site)
        return site
