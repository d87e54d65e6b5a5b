"""g4kv: verify and measure the CUDA kernels that write and read Gemma 4's two-family paged KV cache.

As a library: the names of ``g4kv_cli.api``, which says what they are for. They are loaded when they are first used,
so that ``import g4kv_cli`` needs neither NumPy nor CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from g4kv_cli.api import *  # noqa: F403

__version__ = "0.1.0"

API_NAMES = frozenset(
    {
        "ENTRIES",
        "GEOMETRIES",
        "LAUNCH_RULES",
        "RULES",
        "CompileError",
        "ContractError",
        "Device",
        "DeviceArray",
        "DeviceFault",
        "DeviceUnavailable",
        "Dump",
        "Entry",
        "ExpectedAttention",
        "G4kvError",
        "Geometry",
        "KernelLibrary",
        "KvLayout",
        "PageRow",
        "PagedBatch",
        "PagedPool",
        "PlanRequest",
        "PlanShape",
        "PoisonedPool",
        "PrefillPagedPlan",
        "RopeTables",
        "SplitWorkspace",
        "UsageError",
        "attend",
        "entry_for",
        "entry_named",
        "load_dump",
        "open_device",
        "rope_rows",
        "suggested_splits",
    }
)
"""What ``g4kv_cli.api`` exports, said here so that asking for anything else (a module, say) does not load it."""


def __getattr__(name: str) -> Any:
    if name not in API_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("g4kv_cli.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *API_NAMES})
