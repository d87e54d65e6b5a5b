"""Providers from files: one manifest, or several that serve different entries of the same pools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from g4kv_cli.device.interface import Device
from g4kv_cli.entries.contract import Contract
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.provider import CheckedRequest, NotCovered
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.providers.manifest_provider import ManifestProvider
from g4kv_cli.providers.read import read_manifest


class Providers:
    """Several manifests as one provider: the first that has an entry serves it. Raises UsageError if they disagree on
    what all cases share: the order of the pool's axes."""

    def __init__(self, parts: Sequence[ManifestProvider]) -> None:
        orders = {part.pool_order for part in parts}  # a pool form is each part's own: it is copied a call
        if len(orders) != 1:
            said = "; ".join(f"{part.manifest.file}: {' '.join(part.pool_order.axes)}" for part in parts)
            raise UsageError(f"providers that run together must have one order of the pool's axes: {said}")
        self.parts = tuple(parts)
        self.name = " + ".join(part.name for part in parts)
        self.pool_order = parts[0].pool_order

    def part_of(self, entry: str) -> ManifestProvider:
        """The one that serves an entry. Raises NotCovered."""
        for part in self.parts:
            if part.serves(entry):
                return part
        raise NotCovered(f"{self.name} has no entry {entry}")

    def contract_of(self, entry: str) -> Contract:
        """What is stated of the kernels that serve an entry."""
        return self.part_of(entry).manifest.contract

    def compile_libraries(self, entry: Entry, device: Device) -> None:
        """Compile the sources that serve an entry and have host code. Raises CompileError."""
        for part in self.parts:
            if part.serves(entry.name):
                part.compile_libraries(entry, device)
                return

    def require_good_pools(self, geometries: Sequence[Geometry]) -> None:
        """Raises UsageError for a form of a pool that is none on any of the geometries, in pages of the usual size."""
        for part in self.parts:
            problem = part.problem_of_pool(geometries)
            if problem:
                raise UsageError(f"{part.manifest.file}: [pool]: {problem}")

    def take_waived(self) -> tuple[str, ...]:
        """The waivers that tolerated something since the last call."""
        return tuple(text for part in self.parts for text in part.take_waived())

    @property
    def waivers(self) -> tuple[str, ...]:
        """Every waiver of the manifests."""
        return tuple(part.waiver_text(at) for part in self.parts for at in range(len(part.manifest.waivers)))

    def launch(self, request: CheckedRequest) -> None:
        """Queue whatever the request needs; see ManifestProvider."""
        self.part_of(request.entry.name).launch(request)

    @property
    def declared(self) -> tuple[str, ...]:
        """Every statement of the manifests that differs from what is asked of the built-in kernels."""
        return tuple(f"{part.name}: {text}" for part in self.parts for text in part.manifest.contract.stated())

    @property
    def digest(self) -> str:
        """Of all manifests, as hex."""
        return hashlib.sha256("".join(part.manifest.digest for part in self.parts).encode()).hexdigest()


def load_each(files: Sequence[Path]) -> tuple[ManifestProvider, ...]:
    """A provider a manifest. Raises UsageError."""
    return tuple(ManifestProvider(read_manifest(file)) for file in files)


def load_providers(files: Sequence[Path]) -> Providers | None:
    """The providers of these manifests; None for no file. Raises UsageError."""
    return Providers(load_each(files)) if files else None
