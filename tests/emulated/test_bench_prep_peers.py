"""The prep peers without a GPU: torch on the CPU over the emulated device's memory, FlashInfer's calls by their docs.

Needs torch, which the project does not install; a GPU run is what counts (``g4kv bench prep --peer torch --peer
flashinfer``), this holds the plumbing: which rows go in, which positions, pages and slots they go to.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: python -m pip install torch")

from g4kv_cli.bench.noise_data import BF16, NoiseArena  # noqa: E402
from g4kv_cli.bench.peers import prep_peers, torch_runnable  # noqa: E402
from g4kv_cli.bench.prep_problem import PrepProblem  # noqa: E402
from g4kv_cli.bench.workloads import prep_shape  # noqa: E402
from g4kv_cli.device.emulated_device import EmulatedDevice  # noqa: E402
from g4kv_cli.device.interface import DeviceArray  # noqa: E402
from g4kv_cli.entries.library import KernelLibrary  # noqa: E402
from g4kv_cli.entries.table import entries_for  # noqa: E402
from g4kv_cli.model.geometry import GEOMETRIES  # noqa: E402

LOCAL, GLOBAL = GEOMETRIES["12b-local"], GEOMETRIES["12b-global"]
TOKENS = 21
"""More than a page, and not a whole number of them."""
CASES = [(geometry, entry) for geometry in (LOCAL, GLOBAL) for entry in entries_for(geometry, "prep")]


@pytest.fixture(scope="module")
def arena() -> Iterator[NoiseArena]:
    device = EmulatedDevice("sm_90a", "a test")
    yield NoiseArena(KernelLibrary(device), 2**21, seed=1)
    device.close()


@pytest.fixture
def _on_the_host(arena: NoiseArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are copies; what a call wrote goes back before the check reads it."""
    handed: list[tuple[DeviceArray, Any]] = []

    def tensor_of(array: DeviceArray, _device: object) -> Any:
        tensor = torch.from_numpy(arena.device.read(array).view(np.int16)).view(torch.bfloat16)
        handed.append((array, tensor))
        return tensor

    plain = prep_peers.torch_prep

    def with_write_back(configuration: str, problem: PrepProblem, device: Any, run: Any) -> Any:
        def run_and_write(pool: int) -> None:
            run(pool)
            for array, tensor in handed:
                arena.device.write(array, tensor.view(torch.int16).numpy().view(BF16))
            handed.clear()

        return plain(configuration, problem, device, run_and_write)

    for module in (prep_peers, torch_runnable):
        monkeypatch.setattr(module, "stream_of", lambda _device: None)
        monkeypatch.setattr(module, "place_of", lambda _device: "cpu")
    monkeypatch.setattr(prep_peers, "tensor_of", tensor_of)
    monkeypatch.setattr(prep_peers, "torch_prep", with_write_back)
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)


def _rmsnorm(x: Any, weight: Any, eps: float, out: Any) -> None:
    wide = x.float()
    out.copy_(wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.float())


def _rope(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True) -> None:
    assert is_neox
    assert cos_sin_cache.dtype == torch.float32
    rows = cos_sin_cache[positions]
    half = rows.shape[-1] // 2
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    for packed in (query, key):
        heads = packed.view(len(positions), -1, head_size)
        left, right = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., :half] = (left * cos - right * sin).bfloat16()
        heads[..., half : 2 * half] = (right * cos + left * sin).bfloat16()


def _append(keys: Any, values: Any, owners: Any, positions: Any, cache: Any, indices: Any, indptr: Any, lasts: Any,
            kv_layout: str) -> None:  # fmt: skip
    """flashinfer.page.append_paged_kv_cache as its docs have it; page by page, so that a wrong indptr shows."""
    assert kv_layout == "NHD"
    page_size = cache.shape[2]
    for request in range(len(indptr) - 1):
        taken = (int(indptr[request + 1]) - int(indptr[request]) - 1) * page_size + int(lasts[request])
        assert taken == int(positions[owners == request].max()) + 1
    for row, (owner, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
        page = int(indices[int(indptr[owner]) + position // page_size])
        cache[page, 0, position % page_size] = keys[row]
        cache[page, 1, position % page_size] = values[row]


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in {
        "flashinfer": {"rmsnorm": _rmsnorm},
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": _rope},
        "flashinfer.page": {"append_paged_kv_cache": _append},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_on_the_host", "_flashinfer")
@pytest.mark.parametrize("make", [prep_peers.make_compiled, prep_peers.make_flashinfer_chain])
@pytest.mark.parametrize(("geometry", "entry"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_prep_peer_writes_what_our_entry_does(make: Any, geometry: Any, entry: Any, arena: NoiseArena) -> None:
    problem = PrepProblem.make(prep_shape(geometry, entry, TOKENS), geometry, arena, 2, seed=1)
    runnable = make("peer:x", problem, arena.device)
    assert runnable.check(fresh=False) == ""
    problem.renew_queries()
    assert runnable.check(fresh=True) == ""


@pytest.mark.usefixtures("_on_the_host")
def test_a_peer_that_rotates_the_other_way_is_wrong(arena: NoiseArena, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prep_peers.rotated
    monkeypatch.setattr(prep_peers, "rotated", lambda x, cos, sin: right(x, cos, -sin))
    problem = PrepProblem.make(prep_shape(LOCAL, entries_for(LOCAL, "prep")[0], TOKENS), LOCAL, arena, 1, seed=1)
    assert prep_peers.make_compiled("peer:x", problem, arena.device).check(fresh=False).startswith("q: ")


@pytest.mark.usefixtures("_on_the_host")
def test_a_value_that_is_off_by_5_percent_is_wrong(arena: NoiseArena, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prep_peers.normed
    monkeypatch.setattr(prep_peers, "normed", lambda x, weight: right(x, weight) * (1.05 if weight is None else 1.0))
    (entry,) = [one for one in entries_for(LOCAL, "prep") if one.form == "prefill"]
    problem = PrepProblem.make(prep_shape(LOCAL, entry, TOKENS), LOCAL, arena, 1, seed=1)
    assert prep_peers.make_compiled("peer:x", problem, arena.device).check(fresh=False).startswith("v: ")
