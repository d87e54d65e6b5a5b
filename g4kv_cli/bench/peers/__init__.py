"""Other libraries' kernels at the same shapes: imported on use, checked and timed exactly as ours are.

Each peer is one configuration. Nothing is imported before it is asked for; what is not installed is skipped with the
reason and the line that installs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import PEER_PREFIX, Shape

if TYPE_CHECKING:
    from g4kv_cli.bench.attention_problem import AttentionProblem
    from g4kv_cli.bench.prep_problem import PrepProblem
    from g4kv_cli.device.cuda import CudaDevice


@dataclass(frozen=True, slots=True)
class Peer:
    """``maker`` of ``module`` makes its Runnable; ``needs`` are the import names; ``kinds`` the shapes it takes.
    ``library``: of ``module``, what names the library under the package, with its version; empty: there is none."""

    name: str
    what: str
    module: str
    maker: str
    needs: tuple[str, ...]
    distribution: str
    pip_line: str
    kinds: tuple[str, ...]
    library: str = ""


_TORCH_LINE = "python -m pip install torch"
_HERE = "g4kv_cli.bench.peers"
# fmt: off
PEERS: tuple[Peer, ...] = (
    Peer("torch-sdpa", "scaled_dot_product_attention; contiguous keys, the group's heads as rows of one head",
         f"{_HERE}.torch_peers", "make_sdpa", ("torch",), "torch", _TORCH_LINE, ("decode", "prefill")),
    Peer("torch-flex", "flex_attention, compiled, block mask of the window; contiguous keys",
         f"{_HERE}.torch_peers", "make_flex", ("torch",), "torch", _TORCH_LINE, ("prefill",)),
    Peer("torch-bmm", "two batched GEMMs around a softmax; contiguous keys",
         f"{_HERE}.torch_peers", "make_bmm", ("torch",), "torch", _TORCH_LINE, ("decode",)),
    Peer("flashinfer-cuda", "BatchDecodeWithPagedKVCacheWrapper on CUDA cores",
         f"{_HERE}.flashinfer_peers", "make_decode_cuda", ("torch", "flashinfer"), "flashinfer-python",
         "python -m pip install flashinfer-python", ("decode",)),
    Peer("flashinfer-tc", "BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores (fa2, split-KV on its own)",
         f"{_HERE}.flashinfer_peers", "make_decode_tensor", ("torch", "flashinfer"), "flashinfer-python",
         "python -m pip install flashinfer-python", ("decode",)),
    Peer("flashinfer-fa2", "BatchPrefillWithPagedKVCacheWrapper, backend fa2",
         f"{_HERE}.flashinfer_peers", "make_prefill_fa2", ("torch", "flashinfer"), "flashinfer-python",
         "python -m pip install flashinfer-python", ("prefill",)),
    Peer("flashinfer-fa3", "BatchPrefillWithPagedKVCacheWrapper, backend fa3",
         f"{_HERE}.flashinfer_peers", "make_prefill_fa3", ("torch", "flashinfer"), "flashinfer-python",
         "python -m pip install flashinfer-python", ("prefill",)),
    Peer("cudnn-sdpa", "cuDNN's SDPA graph: page tables, window, bottom-right causal",
         f"{_HERE}.cudnn_peers", "make_sdpa", ("torch", "cudnn"), "nvidia-cudnn-frontend",
         "python -m pip install nvidia-cudnn-frontend", ("decode", "prefill"), "library"),
    Peer("torch-compile", "prep: norms, RoPE and the scatter in one torch.compile",
         f"{_HERE}.prep_peers", "make_compiled", ("torch",), "torch", _TORCH_LINE, ("prep",)),
    Peer("flashinfer-chain", "prep: three rmsnorm, apply_rope_with_cos_sin_cache, append_paged_kv_cache",
         f"{_HERE}.prep_peers", "make_flashinfer_chain", ("torch", "flashinfer"), "flashinfer-python",
         "python -m pip install flashinfer-python", ("prep",)),
    Peer("flash-attn-3", "flash_attn_with_kvcache of FlashAttention 3, paged",
         f"{_HERE}.other_peers", "make_flash_attention_3", ("torch", "flash_attn_interface"), "flash-attn-3",
         "build it from the hopper folder of FlashAttention's repository", ("decode", "prefill")),
    Peer("flash-attn-4", "flash_attn_varlen_func of FlashAttention 4, paged",
         f"{_HERE}.other_peers", "make_flash_attention_4", ("torch", "flash_attn"), "flash-attn-4",
         "python -m pip install --pre flash-attn-4", ("decode", "prefill")),
    Peer("vllm-triton", "vLLM's Triton unified attention",
         f"{_HERE}.other_peers", "make_vllm_triton", ("torch", "vllm"), "vllm",
         "python -m pip install vllm", ("decode", "prefill")),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Whether a peer can be imported here. ``reason`` says what is missing and how to install it."""

    peer: Peer
    version: str
    reason: str


def peer_status(peer: Peer) -> PeerStatus:
    """Looks for the packages without importing them."""
    for name in peer.needs:
        if importlib.util.find_spec(name) is None:
            return PeerStatus(peer, "", f"{name} is not installed: {peer.pip_line}")
    try:
        version = metadata.version(peer.distribution)
    except metadata.PackageNotFoundError:
        version = "unknown version"
    return PeerStatus(peer, version, "")


def library_of(status: PeerStatus) -> str:
    """``cuDNN 9.15.1``: what lies under the peer's package, as that says; imports it. Empty where there is none, or the
    peer is not here or cannot be imported."""
    peer = status.peer
    if status.reason or not peer.library:
        return ""
    try:
        return str(getattr(importlib.import_module(peer.module), peer.library)())
    except ImportError:
        return ""


def select_peers(names: Sequence[str]) -> tuple[Peer, ...]:
    """The peers of these names; ``all`` is every peer, ``none`` is none, a first word (torch) all that begin with it.

    Raises UsageError for an unknown name.
    """
    found: dict[str, Peer] = {}
    for name in names:
        matching = [peer for peer in PEERS if name in ("all", peer.name, peer.name.partition("-")[0])]
        if not matching and name != "none":
            known = ", ".join(("all", "none", *(peer.name for peer in PEERS)))
            raise UsageError(f"--peer {name}: unknown; there are: {known}")
        found.update({peer.name: peer for peer in matching})
    return tuple(found.values())


def configurations_of(peers: Sequence[Peer], shape: Shape) -> list[str]:
    """The configurations of these peers at a shape; they take batches of equals and whole rows of K."""
    if shape.requests or shape.kv_format:
        return []
    return [f"{PEER_PREFIX}{peer.name}" for peer in peers if shape.kind in peer.kinds]


def make_runnable(configuration: str, problem: AttentionProblem | PrepProblem, device: CudaDevice) -> Any:
    """The peer's Runnable. Raises NotCovered where it is not installed, does not take the shape, or lacks a module that
    it may not compile."""
    name = configuration.removeprefix(PEER_PREFIX)
    peer = next(peer for peer in PEERS if peer.name == name)
    status = peer_status(peer)
    if status.reason:
        raise NotCovered(status.reason)
    try:
        module = importlib.import_module(peer.module)
        return getattr(module, peer.maker)(configuration, problem, device)
    except ImportError as error:
        raise NotCovered(f"{peer.name} cannot be imported: {error}") from error
    except RuntimeError as error:
        # FlashInfer's MissingJITCacheError: its message does not say which module, its spec does.
        module_name = getattr(getattr(error, "spec", None), "name", None)
        if module_name is None:
            raise
        raise NotCovered(
            f"FLASHINFER_DISABLE_JIT is set and the module {module_name} was not built ahead (g4kv_cli/bench/README.md)"
        ) from error
