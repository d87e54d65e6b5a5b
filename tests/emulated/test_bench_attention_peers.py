"""The attention peers without a GPU: torch on the CPU over the emulated device's memory, cuDNN's graph by its docs.

Needs torch, which the project does not install; a GPU run is what counts (``g4kv bench prefill --peer torch --peer
cudnn``), this holds the plumbing: which keys a query sees, on which pages, of which pool.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: python -m pip install torch")

from g4kv_cli.bench.attention_problem import AttentionProblem, attention_problem  # noqa: E402
from g4kv_cli.bench.noise_data import NoiseArena  # noqa: E402
from g4kv_cli.bench.peers import paged_arguments, torch_peers, torch_runnable  # noqa: E402
from g4kv_cli.bench.workloads import decode_shape, prefill_shape, with_pages  # noqa: E402
from g4kv_cli.device.emulated_device import EmulatedDevice  # noqa: E402
from g4kv_cli.device.interface import DeviceArray  # noqa: E402
from g4kv_cli.entries.library import KernelLibrary  # noqa: E402
from g4kv_cli.entries.provider import NotCovered  # noqa: E402
from g4kv_cli.model.geometry import select_geometries  # noqa: E402
from g4kv_cli.records.bench import Shape  # noqa: E402

LOCAL, GLOBAL = (select_geometries(name, 4)[0] for name in ("12b-local", "31b-global"))
"""A quarter of the heads: two KV heads of two query heads with a window of 1024, one KV head of eight without."""
GEOMETRIES = {geometry.name: geometry for geometry in (LOCAL, GLOBAL)}


@pytest.fixture(scope="module")
def arena() -> Iterator[NoiseArena]:
    device = EmulatedDevice("sm_90a", "a test")
    yield NoiseArena(KernelLibrary(device), 2**22, seed=1)
    device.close()


@pytest.fixture(autouse=True)
def _on_the_host(arena: NoiseArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are copies, but for the queries, which are renewed."""

    def tensor_of(array: DeviceArray, _device: object) -> Any:
        return torch.from_numpy(arena.device.read(array).view(np.int16)).view(torch.bfloat16)

    for module in (torch_peers, paged_arguments, torch_runnable):
        for name, value in (("stream_of", lambda _device: None), ("place_of", lambda _device: "cpu"),
                            ("tensor_of", tensor_of), ("require_memory", lambda *_asked: None)):  # fmt: skip
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)


def _problem(shape: Shape, arena: NoiseArena) -> AttentionProblem:
    return attention_problem(shape, GEOMETRIES[shape.geometry], arena, 2, seed=1)


SHAPES = [
    prefill_shape(LOCAL, 40, 0),
    prefill_shape(LOCAL, 40, 1003),
    with_pages(prefill_shape(LOCAL, 33, 1500), 64),
    prefill_shape(GLOBAL, 21, 0),
    prefill_shape(GLOBAL, 21, 100),
]
_by_id = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)


def _checked_on_both_pools(make: Any, problem: AttentionProblem, device: Any) -> list[str]:
    runnable = make("peer:x", problem, device)
    return [runnable.check(fresh=False), runnable.check(fresh=True)]


@_by_id
def test_flex_attention_sees_the_window_and_the_history(shape: Shape, arena: NoiseArena) -> None:
    device = types.SimpleNamespace(synchronize=lambda: None, synchronize_context=lambda _what: None)
    assert _checked_on_both_pools(torch_peers.make_flex, _problem(shape, arena), device) == ["", ""]


@_by_id
def test_sdpa_takes_what_plain_causal_is_right_for(shape: Shape, arena: NoiseArena) -> None:
    device = types.SimpleNamespace(synchronize=lambda: None)
    problem = _problem(shape, arena)
    if shape.kv_len == shape.tokens:
        assert _checked_on_both_pools(torch_peers.make_sdpa, problem, device) == ["", ""]
    else:
        with pytest.raises(NotCovered, match="torch-flex has them"):
            torch_peers.make_sdpa("peer:x", problem, device)


class NotSupported(Exception):
    pass


class StandInTensor:
    def __init__(self, like: Any) -> None:
        self.dim, self.stride = list(like.shape), list(like.stride())


class StandInOutput:
    def set_output(self, _is_output: bool) -> StandInOutput:
        return self

    def set_dim(self, dim: list[int]) -> StandInOutput:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> StandInOutput:
        self.stride = stride
        return self


class StandInGraph:
    """cuDNN's SDPA graph as its docs have it, in float32; of a version without kernels for head_dim 512."""

    def __init__(self, **_types: Any) -> None:
        self.asked: dict[str, Any] = {}
        self.output = StandInOutput()

    def tensor_like(self, like: Any) -> StandInTensor:
        return StandInTensor(like)

    def sdpa(self, **asked: Any) -> tuple[StandInOutput, None]:
        self.asked = asked
        return self.output, None

    def validate(self) -> None:
        pass

    build_operation_graph = build_plans = validate

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def check_support(self) -> None:
        if self.asked["q"].dim[-1] > 256:
            raise NotSupported("no kernel\nfor head_dim 512")

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: dict[Any, Any], _workspace: Any, handle: Any) -> None:
        assert handle == "handle"
        asked = self.asked
        assert (asked["generate_stats"], asked["use_padding_mask"]) == (False, True)
        assert asked["diagonal_alignment"] == "BOTTOM_RIGHT"
        for described, tensor in tensors.items():
            assert described.dim == list(tensor.shape)
            assert described.stride == list(tensor.stride())
        q, k, v = (tensors[asked[name]].float() for name in "qkv")
        k_table, v_table = (tensors[asked[f"paged_attention_{name}_table"]][:, 0, :, 0].long() for name in "kv")
        q_lens, kv_lens = (tensors[asked[f"seq_len_{name}"]].flatten().tolist() for name in ("q", "kv"))
        for batch, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            assert kv_len <= asked["paged_attention_max_seq_len_kv"]
            # [page, head, slot, dim] -> [head, key, dim], and as many heads as q has
            keys, values = (
                side[table[batch]].transpose(0, 1).flatten(1, 2)[:, :kv_len].repeat_interleave(
                    q.shape[1] // side.shape[1], 0
                )
                for side, table in ((k, k_table), (v, v_table))
            )  # fmt: skip
            scores = asked["attn_scale"] * (q[batch] @ keys.transpose(1, 2))
            row, column = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
            diagonal = row + kv_len - q_len
            seen = column <= diagonal + asked["diagonal_band_right_bound"]
            if asked["diagonal_band_left_bound"] is not None:
                seen &= column > diagonal - asked["diagonal_band_left_bound"]
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            tensors[self.output][batch] = (weights @ values).to(torch.bfloat16)


@pytest.fixture
def cudnn_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kinds = types.SimpleNamespace(BFLOAT16="bf16", FLOAT="f32")
    stand_in: Any = types.ModuleType("cudnn")
    vars(stand_in).update(
        data_type=kinds, pygraph=StandInGraph, cudnnGraphNotSupportedError=NotSupported,
        heur_mode=types.SimpleNamespace(A="A", FALLBACK="FALLBACK"), backend_version_string=lambda: "9.19.0",
        diagonal_alignment=types.SimpleNamespace(BOTTOM_RIGHT="BOTTOM_RIGHT"), create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    module = importlib.import_module("g4kv_cli.bench.peers.cudnn_peers")
    for name in ("stream_of", "place_of", "tensor_of"):
        monkeypatch.setattr(module, name, getattr(torch_peers, name))
    yield module
    del sys.modules["g4kv_cli.bench.peers.cudnn_peers"]


@pytest.mark.parametrize("shape", [*SHAPES[:3], decode_shape(LOCAL, 3, 500)], ids=lambda shape: shape.id)
def test_cudnn_reads_our_pages(shape: Shape, arena: NoiseArena, cudnn_peers: Any) -> None:
    device = types.SimpleNamespace(synchronize=lambda: None, stream=types.SimpleNamespace(handle=7))
    assert _checked_on_both_pools(cudnn_peers.make_sdpa, _problem(shape, arena), device) == ["", ""]


def test_the_version_of_cudnn_itself(cudnn_peers: Any) -> None:
    assert cudnn_peers.library() == "cuDNN 9.19.0"


def test_what_cudnn_has_no_kernel_for_is_not_covered(arena: NoiseArena, cudnn_peers: Any) -> None:
    device = types.SimpleNamespace(synchronize=lambda: None, stream=types.SimpleNamespace(handle=7))
    with pytest.raises(NotCovered, match=r"cuDNN 9\.19\.0: no kernel for head_dim 512"):
        cudnn_peers.make_sdpa("peer:x", _problem(SHAPES[3], arena), device)


class StandInDecode:
    """FlashInfer's decode wrapper as its docs have it, in float32; like 0.7.4 it splits the keys only if its kernel ran
    before it planned."""

    ran = False

    def __init__(self, _workspace: Any, kv_layout: str, use_tensor_cores: bool) -> None:
        assert kv_layout == "NHD"
        self.splits, self.use_tensor_cores = use_tensor_cores, use_tensor_cores

    def plan(self, indptr: Any, indices: Any, last: Any, q_heads: int, kv_heads: int, dim: int, page_size: int,
             **rest: Any) -> None:  # fmt: skip
        self.pages = [indices[start:end].long() for start, end in itertools.pairwise(indptr.tolist())]
        self.lens = [(len(pages) - 1) * page_size + tail for pages, tail in zip(self.pages, last.tolist(), strict=True)]
        self.heads, self.dim, self.rest = (q_heads, kv_heads), dim, rest
        self.splits = self.use_tensor_cores or self.ran

    def run(self, q: Any, pool: Any, out: Any = None) -> Any:
        self.ran = True
        out = torch.empty_like(q) if out is None else out
        q_heads, kv_heads = self.heads
        for batch, (pages, kv_len) in enumerate(zip(self.pages, self.lens, strict=True)):
            keys, values = (
                pool[pages, side].flatten(0, 1)[:kv_len].float().repeat_interleave(q_heads // kv_heads, 1)
                for side in (0, 1)
            )
            scores = self.rest["sm_scale"] * torch.einsum("hd,khd->hk", q[batch].float(), keys)
            if self.rest["window_left"] >= 0:
                scores[:, : max(0, kv_len - 1 - self.rest["window_left"])] = -torch.inf
            out[batch] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), values).to(out.dtype)
        return out


@pytest.mark.parametrize("make", ["make_decode_cuda", "make_decode_tensor"])
@pytest.mark.parametrize(
    "shape", [decode_shape(LOCAL, 3, 500), decode_shape(LOCAL, 1, 1500), decode_shape(GLOBAL, 2, 700)],
    ids=lambda shape: shape.id,
)  # fmt: skip
def test_flashinfer_decode_reads_our_pages_and_plans_for_a_kernel_that_ran(
    make: str, shape: Shape, arena: NoiseArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StandInDecode] = []

    def wrapper(*given: Any, **named: Any) -> StandInDecode:
        made.append(StandInDecode(*given, **named))
        return made[-1]

    stand_in: Any = types.ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.delitem(sys.modules, "g4kv_cli.bench.peers.flashinfer_peers", raising=False)
    module = importlib.import_module("g4kv_cli.bench.peers.flashinfer_peers")
    monkeypatch.setitem(sys.modules, "g4kv_cli.bench.peers.flashinfer_peers", module)
    for name in ("stream_of", "place_of", "tensor_of"):
        monkeypatch.setattr(module, name, getattr(torch_peers, name))
    device = types.SimpleNamespace(synchronize=lambda: None)
    assert _checked_on_both_pools(getattr(module, make), _problem(shape, arena), device) == ["", ""]
    assert made[0].splits
