"""What an entry is: an operation as a caller sees it, and the compiled kernels that can do it.

``form`` is the one word for how an operation gets its tokens and pages; case ids, records and messages use it as the
table (entries/table.py) spells it. What a form takes and how it launches is said by the other columns, never by the
word, so that a new form is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from g4kv_cli.device.interface import Device
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, KvFormat

Operation = Literal["prep", "attention", "merge"]
Metadata = Literal["none", "page_row", "batch", "plan"]
"""How a call says where tokens lie: not at all (contiguous rows), the pages of one request (PageRow), one token a
request (PagedBatch), or a ragged batch (PrefillPagedPlan)."""
ValueSource = Literal["none", "raw_v", "raw_k"]
"""What prep makes V of; ``none``: it makes no V."""

PORTABLE = "portable"
"""The path of kernels that run on every supported device."""


@dataclass(frozen=True, slots=True)
class Target:
    """What of a device decides which kernels it can run."""

    kind: str
    arch: str
    max_shared_bytes: int

    @classmethod
    def of(cls, device: Device) -> Target:
        """An open device's."""
        return cls(device.info.kind, device.info.arch, device.limits.max_shared_bytes_per_block)


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One compiled kernel. ``threads`` a block (of prep: at most); ``shared_bytes`` dynamic shared memory a block.

    ``tile_rows`` are packed query rows (token, head of the group) of a block; ``rows_per_warp`` head rows that a warp
    of prep serves. ``arch`` is empty where any supported device runs it, else what it is built for and runs on alone
    (``sm_90a``). ``page_sizes`` empty: any. ``device_kinds``: where it can be launched. ``one_request_a_block``: no
    block of an attention kernel serves two requests, as a persistent one's does. ``page_multiple``: what divides the
    page size; ``max_group``: query heads a KV head at most, 0 for all that the entry takes. ``kv_formats``: of
    the pool (model/kv_format.py), those that it takes.

    ``max_cluster_blocks``: a request's keys go to a thread block cluster of up to so many blocks, which merge what they
    found (entries/clusters.py), or to blocks alone; 0 for kernels that are launched otherwise. A block alone takes
    ``alone_shared_bytes``, or is of the kernel ``alone`` where one is named.

    ``same_bits_as``: the symbol of another kernel that gives the same bits, by design; empty for none.

    ``cluster_tiles``: so many neighbouring tiles make a thread block cluster and share their copies of keys, which are
    read by tensor maps (entries/kv_boxes.py). ``resident_tiles``: blocks stay, one a multiprocessor, and take so many
    neighbouring tiles at a time, read by tensor maps too, queries as well; two of them, a cluster, share out the keys
    of a request's tiles if these times the KV heads are no more than ``split_tiles``. All are 0 for kernels that take
    pointers alone.
    ``on_request``: kinds of device where the kernel is taken only if it is asked for.
    """

    symbol: str
    source: str
    threads: int
    shared_bytes: int = 0
    tile_rows: int = 0
    rows_per_warp: int = 0
    arch: str = ""
    page_sizes: tuple[int, ...] = ()
    device_kinds: tuple[str, ...] = ("cuda", "emulated")
    one_request_a_block: bool = True
    page_multiple: int = 1
    max_group: int = 0
    max_cluster_blocks: int = 0
    alone_shared_bytes: int = 0
    alone: KernelVariant | None = None
    cluster_tiles: int = 0
    same_bits_as: str = ""
    resident_tiles: int = 0
    split_tiles: int = 0
    on_request: tuple[str, ...] = ()
    kv_formats: tuple[KvFormat, ...] = (SPLIT,)

    @property
    def path(self) -> str:
        """What forces it, beside its symbol: the architecture it is made for, or ``portable``."""
        return self.arch or PORTABLE

    def suits(self, arch: str) -> bool:
        """Whether devices of this architecture can run it."""
        return not self.arch or arch.rstrip("af") == self.arch.rstrip("af")

    def arch_on(self, arch: str) -> str:
        """What it is compiled for on a device of this architecture that it suits."""
        return self.arch or arch

    def lacking(self, target: Target) -> str:
        """What the device has not that the kernel needs; empty if it runs there."""
        if target.kind not in self.device_kinds:
            return f"runs on {' or '.join(self.device_kinds)} only"
        if not self.suits(target.arch):
            return f"is made for {self.arch}, this device is {target.arch}"
        if self.shared_bytes > target.max_shared_bytes:
            return (
                f"needs {self.shared_bytes} bytes of shared memory a block, this device has {target.max_shared_bytes}"
            )
        return ""

    def refuses(self, page_size: int | None, group: int | None, kv_format: KvFormat | None) -> str:
        """What of a request the kernel does not take; empty if it takes it. None leaves a property open."""
        if kv_format is not None and kv_format not in self.kv_formats:
            return f"takes {' or '.join(self.kv_formats)} rows of K and V, not {kv_format} ones"
        if page_size is not None and self.page_sizes and page_size not in self.page_sizes:
            return f"reads pages of {' or '.join(map(str, self.page_sizes))} tokens, not of {page_size}"
        if page_size is not None and page_size % self.page_multiple:
            return f"reads pages of a multiple of {self.page_multiple} tokens, not of {page_size}"
        if group is not None and self.max_group and group > self.max_group:
            return f"takes up to {self.max_group} query heads a KV head, not {group}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One row of the table. Calling it checks everything on the host and launches: ``entry(library, q=..., ...)``.

    ``function`` takes the row first, so that rows of one signature share it. ``kernels`` stand in the order of
    preference: the first that the device and the request can use is launched. ``merge_kernels`` follow it in a second
    launch, over a workspace of ``num_splits`` partial results a row; an entry has them or takes no splits.
    ``label`` is the short name of a decode form in tables and plots (a, b, c), where prefill at one token a request is
    one too; ``preference`` ranks those whose times cannot be told apart, the lowest first.
    """

    name: str
    function: Callable[..., None]
    operation: Operation
    form: str
    head_dim: int
    metadata: Metadata
    kernels: tuple[KernelVariant, ...]
    value_source: ValueSource = "none"
    one_token_each: bool = False
    merge_kernels: tuple[KernelVariant, ...] = ()
    label: str = ""
    preference: int = 0
    what: str = ""

    def __call__(self, library: Any, **arguments: Any) -> None:
        """Make the call. Raises ContractError, DeviceUnavailable, CompileError or DeviceFault."""
        self.function(self, library, **arguments)

    @property
    def is_prep(self) -> bool:
        """True if it norms and rotates."""
        return self.operation == "prep"

    @property
    def has_pool(self) -> bool:
        """True if it reads or writes pages."""
        return self.metadata != "none"

    @property
    def writes_pool(self) -> bool:
        """True if the pool is an output."""
        return self.is_prep and self.has_pool

    @property
    def takes_plan(self) -> bool:
        """True if the metadata is a PrefillPagedPlan."""
        return self.metadata == "plan"

    @property
    def takes_tile(self) -> bool:
        """True if a call can name the tile of its plan."""
        return self.takes_plan and not self.one_token_each

    @property
    def takes_splits(self) -> bool:
        """True if a call names ``num_splits`` and brings a workspace for partial results."""
        return bool(self.merge_kernels) or self.operation == "merge"

    @property
    def takes_pdl(self) -> bool:
        """True if a call may say that it overlaps the launch in front of it (``enable_pdl``)."""
        return self.operation == "attention" and self.one_token_each

    @property
    def has_v_input(self) -> bool:
        """True if V is an input of its own."""
        return self.value_source == "raw_v"

    @property
    def writes_v(self) -> bool:
        """True if prep makes V."""
        return self.value_source != "none"

    @property
    def kv_bands(self) -> int:
        """Inputs of prep with KV heads: K, and V where it is an input of its own."""
        return 2 if self.has_v_input else 1

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """Formats of K and V in the pool that there are kernels for."""
        return tuple(dict.fromkeys(known for kernel in self.kernels for known in kernel.kv_formats))

    @property
    def launches(self) -> tuple[int, ...]:
        """How many launches one valid call may make. Kernels in clusters merge up to so many splits themselves."""
        if not self.merge_kernels:
            return (1,)
        return (1, 2) if any(kernel.max_cluster_blocks for kernel in self.kernels) else (2,)

    @property
    def sources(self) -> tuple[str, ...]:
        """The translation units that a call may launch from."""
        return tuple(dict.fromkeys(kernel.source for kernel in (*self.kernels, *self.merge_kernels)))

    def serves(self, geometry: Geometry) -> bool:
        """True if layers of this geometry can call it."""
        if geometry.head_dim != self.head_dim:
            return False
        return not self.writes_v or (self.value_source == "raw_k") == geometry.k_eq_v


def choose_variant(
    entry: Entry,
    device: Device,
    *,
    page_size: int | None = None,
    group: int | None = None,
    tile_rows: int | None = None,
    rows_per_warp: int | None = None,
    kv_format: KvFormat | None = None,
    forced: str = "",
    replaced: Callable[[str], frozenset[str]] | None = None,
) -> KernelVariant:
    """The first kernel of the entry that the device and the request can use.

    None leaves a property open. ``forced`` (a path or a symbol, or several with commas between them) leaves only the
    kernels of that name, in the order of the names, where there are any. ``replaced`` names the files of a source that
    a directory of one's own replaces: a kernel for one architecture is then taken only if one of its own files is among
    them, so that it does not stand before the kernels that were replaced. Raises DeviceUnavailable, which says what is
    lacking, before any launch.
    """
    target, reasons = Target.of(device), []
    fitting = [
        kernel
        for kernel in entry.kernels
        if tile_rows in (None, kernel.tile_rows) and rows_per_warp in (None, kernel.rows_per_warp)
    ]
    named = [kernel for name in forced.split(",") for kernel in fitting if name in (kernel.path, kernel.symbol)]
    passed_over = _passed_over(entry, replaced) if replaced is not None and not forced else frozenset()
    for kernel in named or fitting:
        if kernel.source in passed_over or (not named and device.info.kind in kernel.on_request):
            continue
        lacking = kernel.lacking(target) or kernel.refuses(page_size, group, kv_format)
        if not lacking:
            return kernel
        reasons.append(f"{kernel.symbol} {lacking}")
    raise DeviceUnavailable(_no_variant(entry, target, tile_rows, forced, reasons))


def _passed_over(entry: Entry, replaced: Callable[[str], frozenset[str]]) -> frozenset[str]:
    """Sources of kernels for one architecture of which nothing is replaced but what portable kernels use as well."""
    portable: frozenset[str] = frozenset()
    portable = portable.union(*(replaced(kernel.source) for kernel in entry.kernels if not kernel.arch))
    return frozenset(kernel.source for kernel in entry.kernels if kernel.arch and replaced(kernel.source) <= portable)


def _no_variant(entry: Entry, target: Target, tile_rows: int | None, forced: str, reasons: Sequence[str]) -> str:
    """One line: what was asked for, what each kernel lacks, and what to choose in its place."""
    asked = entry.name if tile_rows is None else f"{entry.name} with tiles of {tile_rows} rows"
    named = f" (asked for: {forced})" if forced else ""
    why = "; ".join(reasons) or "it has no such kernel"
    tiles = sorted({kernel.tile_rows for kernel in entry.kernels if kernel.tile_rows and not kernel.lacking(target)})
    paths = list(dict.fromkeys(kernel.path for kernel in entry.kernels if not kernel.lacking(target)))
    if entry.takes_tile:
        hint = f"choose a cta_tile_q it can run ({', '.join(map(str, tiles)) or 'none'})"
    else:
        hint = f"this device can run {', '.join(paths) or 'none of its kernels'}"
    return f"no kernel of {asked}{named} runs here: {why}: {hint}"
