"""Manifests as peers: other people's kernels through our entries, timed as ours are.

A call's metadata is made once and kept: a graph that was recorded from it can be replayed, and making it is not timed,
as a server makes it once a step and not once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from g4kv_cli.bench.attention_problem import AttentionProblem
from g4kv_cli.bench.attention_runs import attention_call
from g4kv_cli.bench.graph_runnable import Call, GraphRunnable
from g4kv_cli.bench.peers import PEERS
from g4kv_cli.bench.prep_problem import PrepProblem, prep_call
from g4kv_cli.bench.workloads import Variant
from g4kv_cli.entries.contract import Contract
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import CheckedRequest, NotCovered
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import UsageError
from g4kv_cli.providers.load import load_each
from g4kv_cli.providers.manifest_provider import ManifestProvider, PreparedCall
from g4kv_cli.providers.named import named_providers
from g4kv_cli.records.bench import PEER_PREFIX, Shape

if TYPE_CHECKING:
    from pathlib import Path

    from g4kv_cli.device.cuda import CudaDevice


def read_providers(files: Sequence[Path]) -> tuple[ManifestProvider, ...]:
    """The manifests as peers of their own names. Raises UsageError for a name that is taken."""
    found = load_each(files)
    taken = {peer.name: "a peer of g4kv bench" for peer in PEERS}
    for provider in found:
        if provider.manifest.file in named_providers().values():
            raise UsageError(f"--provider {provider.name}: g4kv bench times it as a peer; say --peer {provider.name}")
        if provider.name in taken:
            raise UsageError(
                f"{provider.manifest.file}: {provider.name!r} is {taken[provider.name]} too; give it another name with "
                "provider = "
            )
        taken[provider.name] = str(provider.manifest.file)
    return found


def provider_variants(provider: ManifestProvider, shape: Shape, ours: Sequence[Variant]) -> dict[str, Variant]:
    """The provider's configurations at a shape by name. A decode form that it does not serve has one, which will say
    so; the tile of a prefill is its own affair."""
    name = f"{PEER_PREFIX}{provider.name}"
    if shape.kind != "decode":
        entry = ours[0].entry
        return {name: Variant(name, "peer", entry)}
    found = {}
    for variant in ours:
        label = variant.name if provider.serves(variant.entry) else variant.form
        found[f"{name}/{label}"] = Variant(f"{name}/{label}", "peer", variant.entry, variant.num_splits)
    return found


def provider_entry(provider: ManifestProvider) -> dict[str, str]:
    """What a record says of it: its manifest, the digest of what was run, and what it states."""
    manifest = provider.manifest
    stated = ", ".join(manifest.contract.stated())
    return {"name": provider.name, "version": manifest.digest, "manifest": str(manifest.file), "what": stated}


class KeptCalls:
    """A provider for one shape: what a call needs is made when it is first asked for, and kept."""

    def __init__(self, provider: ManifestProvider) -> None:
        self.name, self.pool_order = provider.name, provider.pool_order
        self._provider = provider
        self._calls: dict[tuple[Any, ...], PreparedCall] = {}

    def contract_of(self, entry: str) -> Contract:
        """As the provider."""
        self._provider.spec_of(entry)
        return self._provider.manifest.contract

    def launch(self, request: CheckedRequest) -> None:
        """Queue the launches of the call with these arrays; its plan is that of its first time."""
        copied = self._provider.copies(request.entry.name)
        if copied:
            raise NotCovered(f"{copied}, through the host: such a call is not timed")
        key = (request.entry.name, *((name, array.address) for name, array in request.arrays.items()))
        if key not in self._calls:
            self._calls[key] = self._provider.prepare(request)
        self._calls[key].run()


class ManifestRunnable(GraphRunnable):
    """As GraphRunnable; every pool is called once before its graph is recorded, in which nothing can be made."""

    def capture(self) -> None:
        """Both graphs, each replayed once."""
        for pool in range(self.pools):
            self.call.queue(pool)
        self.device.synchronize()
        super().capture()


def make_manifest_runnable(
    provider: ManifestProvider, variant: Variant, problem: AttentionProblem | PrepProblem, device: CudaDevice
) -> ManifestRunnable:
    """The provider's call at a problem, held to what it promises. Raises NotCovered."""
    kept = KeptCalls(provider)
    contract = kept.contract_of(variant.entry)
    library = KernelLibrary(device, provider=kept)
    order = provider.pool_order
    call: Call
    if isinstance(problem, AttentionProblem):
        call = attention_call(problem, library, variant)
        roundings = contract.roundings(is_split=entry_named(variant.entry).takes_splits)

        def wrong(out: Any, pool: int) -> str:
            return problem.check(out, pool, roundings=roundings, order=order)

    else:
        call = prep_call(problem, library)

        def wrong(out: Any, pool: int) -> str:
            return problem.check(out, pool, rounds_norm=contract.rounds_norm)

    return ManifestRunnable(variant.name, device, call, wrong, len(problem.pools))
