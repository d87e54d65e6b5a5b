"""The device's heap: what kernels get from malloc and new, each as an allocation of its own with its own bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .memory import GLOBAL_BASE, DeviceMemory

HEAP_BYTES = 8 << 20
"""cudaLimitMallocHeapSize as it is if nobody sets it."""
_GRAIN_BYTES = 16
Mark = tuple[int, dict[int, int], int]
"""Where a heap stands: end of the memory in use, live allocations, bytes taken."""


def _taken(nbytes: int) -> int:
    """What an allocation takes of the heap, with what the heap keeps about it."""
    return -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES + _GRAIN_BYTES


@dataclass
class Heap:
    """Allocations of kernels, by their address; they stay from launch to launch, as on a GPU."""

    memory: DeviceMemory
    live: dict[int, int] = field(default_factory=dict)
    used_bytes: int = 0

    def allocate(self, nbytes: int, label: str) -> int:
        """The address of ``nbytes`` uninitialised bytes; 0 if there are not so many, or none are asked for."""
        if not nbytes or self.used_bytes + _taken(nbytes) > HEAP_BYTES:
            return 0
        begin = self.memory.allocate(nbytes, label).begin
        self.live[begin] = nbytes
        self.used_bytes += _taken(nbytes)
        return begin

    def free(self, address: int) -> str:
        """End an allocation; returns what is wrong with the address, nothing if all is right."""
        if address not in self.live:
            label, _, place = self.memory.describe(address)
            known = self.memory.find(address)
            if known is not None and known.begin == address and known.is_freed and label is not None:
                return f"free of {place}, which was freed already"
            return f"free of {place}, which is nothing that malloc gave"
        self.used_bytes -= _taken(self.live.pop(address))
        self.memory.end(address)
        return ""

    def mark(self) -> Mark:
        """Where the heap stands."""
        return self.memory.used_bytes, dict(self.live), self.used_bytes

    def rewind(self, mark: Mark) -> None:
        """Take back what was allocated and freed since, so that a launch can be run again."""
        taken, live, used_bytes = mark
        for address in live.keys() - self.live.keys():
            self.memory.revive(address)
        self.memory.forget(GLOBAL_BASE + taken)
        self.live, self.used_bytes = dict(live), used_bytes
