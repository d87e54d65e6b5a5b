"""Whatever stands in an argument's place, nothing but ContractError comes out of an entry, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g4kv_cli.cases.reject.entries import example_geometry
from g4kv_cli.cases.reject.request import Draft, RejectBench
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries
from g4kv_cli.errors import ContractError


class CountingDevice(EmulatedDevice):
    """A launch is counted and nothing else."""

    def launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.launch_count += 1


class NoKernels(KernelLibrary):
    """Kernels that are named and never compiled."""

    def kernel(self, source_name: str, symbol: str, *, arch_specific: bool = False) -> LoadedKernel:
        return LoadedKernel(symbol, image=None, handle=None)  # type: ignore[arg-type]


garbage = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            "",
            "3",
            b"3",
            0,
            -1,
            2**31,
            2**32,
            2**63,
            2**64 + 1,
            10**5000,
            -(10**5000),
            0.0,
            1.5,
            float("nan"),
            float("inf"),
            1j,
            (),
            [],
            {},
            [None],
            object(),
            int,
            np.float32(1),
            np.bool_(True),
            np.array(3),
            np.array([3]),
            np.zeros((2, 2)),
            range(3),
            Ellipsis,
            print,
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
)

FIELDS = {
    "layout": ("page_size", "num_layers", "num_kv_heads", "head_dim", "kv_block_len", "page_stride", "element_bytes"),
    "rope": ("cos", "sin", "cos_max_pos"),
    "shape": ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "window_left", "sm_scale", "cta_tile_q"),
    "workspace": ("partial_out", "partial_max", "partial_sum"),
}
INGREDIENTS = (
    "page_ids",
    "positions",
    "page_lists",
    "page_origins",
    "padding_page",
    "requests",
    "pool_data",
    "library",
    "rope",
    "layout",
    "shape",
    "workspace",
)
REQUEST_FIELDS = ("start_pos", "q_len", "page_indices", "last_page_len", "page_origin")


def spoil(draft: Draft, data: st.DataObject, value: Any) -> str:
    """Put garbage in one place of a valid call; the place."""
    places = [f"arguments.{name}" for name in [*draft.arguments, "eps", "page_origin", "cta_tile_q", "lse"]]
    places += [f"{owner}.{name}" for owner, names in FIELDS.items() for name in names if getattr(draft, owner)]
    places += [*INGREDIENTS, *(f"request.{name}" for name in REQUEST_FIELDS)]
    place: str = data.draw(st.sampled_from(places))
    owner, _, name = place.partition(".")
    if owner == "arguments":
        draft.arguments[name] = value
    elif owner == "request":
        if draft.requests:
            draft.requests = (replace(draft.requests[0], **{name: value}), *draft.requests[1:])
    elif name:
        setattr(draft, owner, replace(getattr(draft, owner), **{name: value}))
    else:
        setattr(draft, owner, value)
    return place


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, RejectBench]]:
    device, foreign = CountingDevice(), EmulatedDevice()
    library = NoKernels(device)
    yield {
        entry.name: RejectBench(library, entry, geometry, foreign)
        for entry in entries()
        if (geometry := example_geometry(entry)) is not None
    }
    device.close()
    foreign.close()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=garbage)
@pytest.mark.parametrize("entry", sorted(entry.name for entry in entries()))
def test_no_other_exception_escapes(
    entry: str, data: st.DataObject, value: Any, benches: dict[str, RejectBench]
) -> None:
    bench = benches[entry]
    draft = bench.draft()
    place = spoil(draft, data, value)
    known = inspect.signature(bench.entry.function).parameters
    # A keyword that the entry does not have is Python's own affair.
    draft.arguments = {name: given for name, given in draft.arguments.items() if name in known}
    launches = bench.device.launch_count
    refusal = ""
    try:
        draft.call()
    except ContractError as error:
        refusal = str(error)
    finally:
        draft.release()
    assert (bench.device.launch_count == launches) == bool(refusal), place
    assert "\n" not in refusal
    assert len(refusal) < 500
