"""Every error that reaches a user: one sentence, and the exit code the command ends with.

Exit codes: 0 as expected; 1 findings (wrong, slower, not rejected); 2 usage or tool failure.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_FINDINGS = 1
EXIT_FAILURE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class G4kvError(Exception):
    """Base of all expected errors. ``str(error)`` is the one line that the command prints."""

    exit_code: int = EXIT_FAILURE


class UsageError(G4kvError):
    """The request itself is wrong: an unknown name, a value out of range, an unreadable file."""


class DeviceUnavailable(G4kvError):
    """The device that was asked for cannot be used on this machine."""


class CompileError(G4kvError):
    """NVRTC is missing or refused the source; ``log`` holds the compiler's own words."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message if not log else f"{message}\n{log.rstrip()}")
        self.log = log


class ContractError(G4kvError):
    """A request that contradicts itself, found on the host before any launch.

    ``code`` is stable and names the rule, ``field`` the argument at fault; ``got`` and ``want`` are what was
    given and what the contract asks for.
    """

    def __init__(self, code: str, field: str, got: object, want: object, sentence: str) -> None:
        super().__init__(f"{field}: {sentence} (got {got}, want {want}) [{code}]")
        self.code = code
        self.field = field
        self.got = got
        self.want = want
        self.sentence = sentence


class CaseTimeout(G4kvError):
    """A kernel had not ended when its case's time was over. ``standing`` says where it was, if the device knows."""

    def __init__(self, seconds: float, standing: str) -> None:
        super().__init__(
            f"not finished after {seconds:g} s: {standing}; where it is only slow, give --case-timeout more seconds"
        )
        self.seconds = seconds
        self.standing = standing

    def __reduce__(self) -> tuple[type[CaseTimeout], tuple[float, str]]:
        return type(self), (self.seconds, self.standing)


class DeviceFault(G4kvError):
    """A kernel trapped, or broke a rule that the device checks, or the driver reported a sticky error.

    ``reports`` holds one readable line per fault: kind, kernel source line, block and thread where the device
    knows them. ``kinds`` holds the stable names of the same faults (``trap``, ``global_out_of_bounds``, ...).
    """

    exit_code = EXIT_FINDINGS

    def __init__(self, reports: Sequence[str], kinds: Sequence[str] = ()) -> None:
        more = f" (and {len(reports) - 1} more)" if len(reports) > 1 else ""
        super().__init__(f"{reports[0]}{more}" if reports else "the device reported a fault")
        self.reports = tuple(reports)
        self.kinds = tuple(kinds)
