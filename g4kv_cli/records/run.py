"""All that is written down about a run, as frozen dataclasses. JSON holds base units (seconds, bytes)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1

Status = Literal["passed", "failed", "error", "skipped", "not covered"]
"""``skipped``: the device lacks something; ``not covered``: the provider states that it does not serve the case."""
ImageKind = Literal["ptx", "cubin"]


@dataclass(frozen=True, slots=True)
class KernelImage:
    """One compiled translation unit: what the compiler hands to a device.

    ``data`` is PTX text or a cubin, made for ``arch`` (``sm_90a``, ...); ``source_digest`` is the SHA-256 of the
    source, all its headers and the options, as hex.
    """

    kind: ImageKind
    arch: str
    name: str
    data: bytes
    source_digest: str
    compiler_version: str


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Which device ran, in words. ``driver`` is empty where there is none (emulated)."""

    kind: Literal["cuda", "emulated"]
    name: str
    arch: str
    driver: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Where and with what a run was made."""

    device: DeviceInfo
    nvrtc: str
    kernels_digest: str
    kernels_directory: str
    git_commit: str
    versions: dict[str, str]
    date: str
    seed: int
    provider: str = ""
    """Whose kernels ran, by manifests; empty: the built-in ones. The digest is then that of the manifests."""
    waivers: tuple[str, ...] = ()
    """What the manifests tolerate; a run of all cases in which one tolerated nothing has found something."""
    declared: tuple[str, ...] = ()
    """What the manifests state that differs from what is asked of the built-in kernels."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of a table of cases a run was: the ``index``-th (from 1) of ``count``.

    ``places`` are those of its cases in the table, in which there are ``total``; ``table`` is the SHA-256 of its ids.
    """

    index: int
    count: int
    total: int
    table: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A wrong result: which operation, how many elements, and the first and the worst one in logical terms.

    ``first`` and ``worst`` are coordinates such as ``{"layer": 1, "page": 7, "slot": 3, "head": 0, "dim": 128}``. What
    their whole row equals, if it is somebody else's ("the expected row of head 3"), is in ``first_row_equals`` and,
    where that is another row, ``worst_row_equals``.
    """

    operation: str
    count: int
    total: int
    first: dict[str, int]
    first_got: str
    first_want: str
    worst: dict[str, int]
    worst_got: str
    worst_want: str
    limit: str
    note: str = ""
    first_row_equals: str = ""
    worst_row_equals: str = ""


OF_SOME_BLOCKS = " of the blocks that a device runs"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case's outcome. ``mismatches`` only with status failed; ``reason`` only where it did not pass.

    ``output_digest`` is the SHA-256 over all outputs' bytes, so that two devices can be compared bit for bit;
    OF_SOME_BLOCKS stands behind it where another device may run others.
    ``kernels`` are the names of those that were launched, in the order of their first launch.
    """

    id: str
    entry: str
    geometry: str
    status: Status
    seconds: float
    reason: str = ""
    mismatches: tuple[Mismatch, ...] = ()
    output_digest: str = ""
    rerun: str = ""
    kernels: tuple[str, ...] = ()
    waived: tuple[str, ...] = ()
    """The waivers of a provider that tolerated something in this case, as RunInfo.waivers names them."""
    left_out: tuple[str, ...] = ()
    """Why parts of the case are not covered; the rest of it ran."""
    dump: str = ""
    """The file that its arrays were written to (``--dump``)."""
    dump_error: str = ""
    """Why they could not be."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts by status."""

    passed: int = 0
    failed: int = 0
    error: int = 0
    skipped: int = 0
    not_covered: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that the file of a run says. ``command`` is empty in records of before it was written down."""

    run: RunInfo
    settings: dict[str, Any]
    cases: tuple[CaseResult, ...]
    planned: int
    ended: str
    command: str = ""
    shard: ShardInfo | None = None


def summarise(results: list[CaseResult]) -> Summary:
    """Count the results by status."""
    counts = Counter(result.status for result in results)
    return Summary(counts["passed"], counts["failed"], counts["error"], counts["skipped"], counts["not covered"])


def to_json(record: Any) -> Any:
    """A dataclass (nested) as plain JSON values, empty optional texts and tuples left out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        return {name: to_json(value) for name, value in fields.items() if value not in ("", ())}
    if isinstance(record, dict):
        return {str(name): to_json(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_json(value) for value in record]
    return record
