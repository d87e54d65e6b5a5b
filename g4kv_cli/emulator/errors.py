"""What a program that uses the emulated device can catch: each says in one line what is wrong and what to do.

All are G4kvErrors. A CompileError of ``g4kv_cli.errors`` comes with NVRTC's log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from g4kv_cli.device.emulated import Fault
from g4kv_cli.device.emulated_device import report_line
from g4kv_cli.errors import CompileError, DeviceFault, G4kvError, UsageError

if TYPE_CHECKING:
    from g4kv_cli.emulator.report import Report


class SourceError(UsageError):
    """What was to be loaded is not there, or is nothing that can be loaded."""


class KernelNotFound(UsageError):
    """No kernel of this name, or several."""


class SymbolError(UsageError):
    """No ``__device__`` or ``__constant__`` variable of this name, or not one of these bytes."""


class ArgumentError(UsageError):
    """An argument that is not what the kernel's parameter takes, or one too many or too few."""


class LaunchRefused(UsageError):
    """Grid, block or shared memory that a device would refuse too."""


class DeviceLost(UsageError):
    """An earlier launch ended in what a GPU would not have survived either."""


class Unsupported(CompileError):
    """PTX that the emulated device does not know to the bit; nothing is guessed."""


class LaunchTimedOut(G4kvError):
    """The launch had not ended in the time it was given; the text says where it stood."""


class LaunchFailed(DeviceFault):
    """The kernel broke a rule that the policy raises for.

    ``faults`` are those, ``report`` is the whole launch's, with the findings that the policy only reports too.
    """

    def __init__(self, faults: Sequence[Fault], report: Report) -> None:
        super().__init__([report_line(fault) for fault in faults], [fault.kind for fault in faults])
        self.faults = tuple(faults)
        self.report = report
