"""The device twin of the layout on a real GPU."""

from __future__ import annotations

import pytest

from g4kv_cli.cases import layout_probe
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.slots import derived_layout

pytestmark = pytest.mark.gpu


def test_the_gpu_agrees_for_every_geometry(cuda_device: Device) -> None:
    library = KernelLibrary(cuda_device)
    groups = [layout_probe.probe_small_pool(library)]
    for geometry in GEOMETRIES.values():
        groups += layout_probe.probe_layout(library, derived_layout(geometry, 16))
    assert [group.mismatches for group in groups] == [()] * (1 + 3 * len(GEOMETRIES))
