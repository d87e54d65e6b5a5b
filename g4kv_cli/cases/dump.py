"""Writing down what a case had and what came out of it, for whoever looks at a failure with tools of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import DeviceArray
from g4kv_cli.errors import G4kvError, UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import SPARSE_POOL_BYTES
from g4kv_cli.records.dump import dump_bytes
from g4kv_cli.records.files import make_directory, unwritable, write_whole
from g4kv_cli.records.run import CaseResult, RunInfo, to_json

OPTION = "--dump"
MAX_ARRAY_BYTES = SPARSE_POOL_BYTES
"""Larger arrays (the pools that are never on the host) are left out, and named."""
MAX_BYTES = 1 << 30
"""Of all arrays of a case: of a longer run the last ones are kept, where it went wrong."""
MAX_NAME = 160

Array = npt.NDArray[Any]


class Dumped(Protocol):
    """What a dump says of its case."""

    @property
    def id(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...


@dataclass(frozen=True, slots=True)
class DumpSettings:
    """Where dumps go, whether of each case or of those that did not pass, and the head of the run's record."""

    directory: Path
    every: bool
    run: Mapping[str, Any] = field(default_factory=dict)

    def of(self, run: RunInfo) -> DumpSettings:
        """With the head of a run."""
        return dataclasses.replace(self, run=to_json(run))

    def wants(self, result: CaseResult) -> bool:
        """Whether a case with this result is written down."""
        return result.status in ("failed", "error") or (self.every and result.status == "passed")


def prepare_directory(path: Path) -> bool:
    """Make the directory of dumps; True if it was not there. UsageError if it has other content or cannot be made."""
    if make_directory(path, OPTION):
        return True
    try:
        inside = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise unwritable(path, OPTION, error) from error
    if inside:
        words = f"{inside[0]}{f' and {len(inside) - 1} more' if len(inside) > 1 else ''}"
        raise UsageError(f"{OPTION} {path}: the directory holds {words}; name a new or an empty one")
    return False


class CaseDump:
    """The arrays of one case, by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.left_out: dict[str, str] = {}
        self._uploaded: set[int] = set()
        self._numbers: dict[str, int] = {}
        self._bytes = 0
        self._dropped = 0

    def uploaded(self, array: DeviceArray, values: Array) -> None:
        """What was given to the kernels: a copy, since the host's array may change."""
        self._uploaded.add(id(array.allocation))
        self._add("input", array.label, np.array(values))

    def compared(self, operation: str, got: Array, want: Array, limit: Array | None) -> None:
        """Both sides of a comparison."""
        name = self._add("got", operation, np.array(got))
        self._put(f"want.{name}", np.array(want))
        if limit is not None:
            self._put(f"limit.{name}", np.broadcast_to(limit, np.shape(want)).copy())

    def given(self, name: str, values: Array) -> None:
        """A logical tensor of the inputs."""
        self._add("input", name, np.array(values))

    def gather(self, arrays: Iterable[DeviceArray]) -> None:
        """What stands in the arrays that were made on the device, as far as it still answers."""
        for array in arrays:
            if id(array.allocation) in self._uploaded or not array.size:
                continue
            if array.size * array.dtype.itemsize > MAX_ARRAY_BYTES:
                self.left_out[f"device.{_plain(array.label)}"] = f"{array.size * array.dtype.itemsize} bytes"
                continue
            with suppress(G4kvError, ValueError):  # a GPU that has faulted answers no more
                values = array.device.peek(array)
                self._add("device", array.label, array.device.read(array) if values is None else values)

    def _add(self, kind: str, label: str, values: Array) -> str:
        """Under a name of its own; the name without its kind."""
        name = _plain(label)
        number = self._numbers[f"{kind}.{name}"] = self._numbers.get(f"{kind}.{name}", 0) + 1
        name = name if number == 1 else f"{name}.{number}"
        self._put(f"{kind}.{name}", values)
        return name

    def _put(self, name: str, values: Array) -> None:
        if values.nbytes > MAX_ARRAY_BYTES:
            self.left_out[name] = f"{values.nbytes} bytes"
            return
        self.arrays[name] = values
        self._bytes += values.nbytes
        while self._bytes > MAX_BYTES:
            first = next(iter(self.arrays))
            self._bytes -= self.arrays.pop(first).nbytes
            self._dropped += 1
            self.left_out["earlier"] = f"{self._dropped} arrays"


def write_dump(settings: DumpSettings, case: Dumped, result: CaseResult, dump: CaseDump) -> CaseResult:
    """The result with where its dump is, if it is to be written, or why there is none: a full disk costs the dump, not
    the run."""
    if not settings.wants(result):
        return result
    path = settings.directory / f"{_file_stem(case.id)}.npz"
    parameters: dict[str, Any] = {}
    if dataclasses.is_dataclass(case):
        for one in dataclasses.fields(case):
            if one.name not in ("id", "geometry"):
                parameters[one.name] = _json_value(getattr(case, one.name))
    about = {
        "case": case.id,
        "entry": result.entry,
        "status": result.status,
        "reason": result.reason,
        "mismatches": to_json(result.mismatches),
        "seed": getattr(case, "seed", None),
        "geometry": to_json(case.geometry),
        "parameters": parameters,
        "kernels": list(result.kernels),
        "rerun": result.rerun,
        "run": settings.run,
        "left_out": dump.left_out,
    }
    try:
        write_whole(path, dump_bytes(about, dump.arrays), OPTION)
    except (UsageError, MemoryError) as error:
        return dataclasses.replace(result, dump_error=str(error) or "not enough memory to write it")
    return dataclasses.replace(result, dump=str(path))


def _plain(label: str) -> str:
    """A name for an array: no spaces, no slashes."""
    return re.sub(r"[^\w.\[\]+-]+", "_", label).strip("_")


def _file_stem(case_id: str) -> str:
    """The case's id as a file's name; long ones end in a digest of what is cut."""
    stem = case_id.replace("/", "__")
    if len(stem) <= MAX_NAME:
        return stem
    return f"{stem[:MAX_NAME]}-{hashlib.sha256(case_id.encode()).hexdigest()[:12]}"


def _json_value(value: Any) -> Any:
    """As JSON values; what has none (a path, a function) by its name."""
    return json.loads(json.dumps(to_json(value), default=lambda other: getattr(other, "__name__", str(other))))
