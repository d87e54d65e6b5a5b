"""The device twin of the layout on the emulated device: it agrees, and a broken copy of it is found."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from seeding import seed

from g4kv_cli.cases import layout_probe
from g4kv_cli.commands.layout import layout
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.kv_layout import KvLayout, KvLayoutParameters
from g4kv_cli.model.slots import derived_layout


@pytest.fixture(scope="module")
def library() -> Iterator[KernelLibrary]:
    device = open_device("emulated")
    yield KernelLibrary(device)
    device.close()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(layout, ["--device", "emulated", *arguments], catch_exceptions=False)


def test_every_coordinate_of_a_small_pool_agrees(library: KernelLibrary) -> None:
    group = layout_probe.probe_small_pool(library)
    # 3 pages, 2 layers, K and V, 5 slots, 3 heads, 7 columns
    assert (group.total, group.disagreeing, group.mismatches) == (1260, 0, ())


def test_every_coordinate_of_a_small_folded_pool_agrees(library: KernelLibrary) -> None:
    group = layout_probe.probe_small_pool(library, "folded")
    # 3 pages, 2 layers, 5 slots, 3 heads, 4 columns of K and 7 of V
    assert (group.total, group.disagreeing, group.mismatches) == (990, 0, ())
    folded = derived_layout(GEOMETRIES["31b-global"], 16, kv_format="folded")
    groups = layout_probe.probe_layout(library, folded)
    assert [(group.disagreeing, group.mismatches) for group in groups] == [(0, ())] * 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_ptx_dialect_agrees(arch: str) -> None:
    device = open_device(f"emulated:{arch}")
    try:
        library = KernelLibrary(device)
        groups = layout_probe.probe_layout(library, derived_layout(GEOMETRIES["26b-a4b-local"], 16))
        groups += (layout_probe.probe_small_pool(library),)
        assert [group.mismatches for group in groups] == [(), (), (), ()]
        assert device.launch_count == 4
    finally:
        device.close()


@pytest.mark.parametrize("name", ["12b-local", "12b-global", "31b-local", "e2b-global"])
def test_corners_and_edges_agree(library: KernelLibrary, name: str) -> None:
    groups = layout_probe.probe_layout(library, derived_layout(GEOMETRIES[name], 16))
    assert len(groups) == 3
    assert [(group.disagreeing, group.mismatches) for group in groups] == [(0, ())] * 3
    assert all(group.total > 100 for group in groups)


def test_offsets_past_both_edges_by_hand(library: KernelLibrary) -> None:
    pages = np.array([[819], [820], [1638], [1639], [2**31 - 1]])
    coordinates = np.hstack([pages, np.tile([39, 1, 15, 7, 255], (5, 1))]).astype(np.int32)
    elements = layout_probe.device_offsets(library, derived_layout(GEOMETRIES["12b-local"], 16), coordinates)[:, 0]
    # The last element of a page is the one before the next page: (page + 1) x 2621440 - 1.
    assert elements.tolist() == [
        2149580799,
        2152202239,
        4296540159,
        4299161599,
        2**31 * 2621440 - 1,
    ]


def test_a_page_past_64_bit_offsets_is_refused(library: KernelLibrary) -> None:
    huge = KvLayout.derive(page_size=2**31 - 1, num_layers=2**20, num_kv_heads=2**10, head_dim=2**10)
    with pytest.raises(UsageError, match="does not fit 64-bit offsets"):
        layout_probe.probe_layout(library, huge)


def test_struct_twins_as_the_compiler_placed_them(library: KernelLibrary) -> None:
    device = library.device
    report = device.allocate((23,), np.int64, "report")
    stated = KvLayout(16, 40, 8, 256, 128, kv_block_len=32768, layer_stride=65536, page_stride=2621440)
    parameters = layout_probe.LayoutProbeParameters(stated.parameters(), report.address, report.address, 77)
    launch(
        library,
        layout_probe.PROBE_SOURCE,
        layout_probe.STRUCT_PROBE_KERNEL,
        grid=(1, 1, 1),
        block=(32, 1, 1),
        arguments=(parameters,),
        must_write=(report,),
    )
    inner, outer = KvLayoutParameters, layout_probe.LayoutProbeParameters
    placed = [
        ctypes.sizeof(inner),
        *(getattr(inner, name).offset for name, _ in inner._fields_),
        ctypes.sizeof(outer),
        *(getattr(outer, name).offset for name, _ in outer._fields_),
    ]
    values = [32768, 65536, 2621440, 16, 40, 8, 256, 128, 77]
    assert device.read(report).tolist() == [*placed, *values]
    assert placed == [48, 0, 8, 16, 24, 28, 32, 36, 40, 72, 0, 48, 56, 64]


def test_the_command_proves_it_by_default() -> None:
    result = invoke("--geometry", "12b-local")
    assert result.exit_code == 0
    assert "one page, 2621440 elements" in result.stdout
    last = result.stdout.rstrip().splitlines()[-1].split()
    # "kv_offsets.cuh and an independent derivation: N of N coordinates agree"
    assert last[0] == "kv_offsets.cuh"
    assert last[-5] == last[-3]
    assert int(last[-5]) > 1260 + 2048


def test_json_of_the_probe(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    assert invoke("--geometry", "12b-local", "--json", str(file)).exit_code == 0
    probe = json.loads(file.read_text())["probe"]
    assert probe["device"]["kind"] == "emulated"
    assert probe["agreeing"] == probe["coordinates"] == sum(group["total"] for group in probe["groups"])
    assert [group["mismatches"] for group in probe["groups"]] == [[], [], [], []]


ORIGIN = {"page": 0, "layer": 0, "kv": 0, "slot": 0, "head": 0, "dim": 0}

# fault: (text of kv_offsets.cuh, its replacement, the first wrong element: coordinate, got, want, in which group)
FAULTS = {
    "layer offset dropped": (
        " + (long long)layer * layout.layer_stride",
        "",
        # Small pool: a layer is K and V of 5 slots x 3 heads x 7 columns.
        ({**ORIGIN, "layer": 1}, 0, 210, 0),
    ),
    "K and V exchanged": ("is_v ? kv_layer_v_offset", "!is_v ? kv_layer_v_offset", (ORIGIN, 105, 0, 0)),
    "slot and head exchanged": (
        "(long long)slot * layout.num_kv_heads + head",
        "(long long)head * layout.page_size + slot",
        ({**ORIGIN, "head": 1}, 35, 7, 0),
    ),
    "column dropped": ("slot, head) + dim;", "slot, head);", ({**ORIGIN, "dim": 1}, 0, 1, 0)),
    "int32 arithmetic": (
        "(long long)page * layout.page_stride",
        "(long long)(page * (int)layout.page_stride)",
        # 2^30 pages of 5 x 2^19 elements: nothing of it is left in 32 bits.
        ({**ORIGIN, "page": 2**30}, 0, 2**30 * 2621440, 1),
    ),
    "uint32 arithmetic": (
        "(long long)page * layout.page_stride",
        "(long long)((unsigned int)page * (unsigned int)layout.page_stride)",
        ({**ORIGIN, "page": 2**30}, 0, 2**30 * 2621440, 1),
    ),
}
# The same, of faults that a folded pool alone can show.
FOLDED_FAULTS = {
    "rows of K as long as those of V": (
        "(is_v ? layout.head_dim : layout.k_dim)",
        "layout.head_dim",
        ({**ORIGIN, "head": 1}, 7, 4, 1),
    ),
    "V behind a block of its own length": (
        "+ layout.kv_block_len;",
        "+ (long long)layout.page_size * layout.num_kv_heads * layout.head_dim;",
        ({**ORIGIN, "kv": 1}, 105, 60, 1),
    ),
}
FOLDED = ("--geometry", "12b-global", "--kv-format", "folded")


def overlay(directory: Path, old: str, new: str) -> Path:
    """A kernels directory whose kv_offsets.cuh has one fault."""
    return seed(directory, (("kv_offsets.cuh", old, new),))


def probe_with(directory: Path, *arguments: str) -> dict[str, Any]:
    file = directory / "layout.json"
    asked = arguments or ("--geometry", "12b-local")
    result = invoke(*asked, "--kernels", str(directory), "--json", str(file))
    assert result.exit_code == 1
    probe: dict[str, Any] = json.loads(file.read_text())["probe"]
    return probe


@pytest.mark.parametrize("fault", [*FAULTS, *FOLDED_FAULTS])
def test_a_broken_twin_is_found_and_the_coordinate_named(fault: str, tmp_path: Path) -> None:
    old, new, (first, got, want, group_index) = (FAULTS | FOLDED_FAULTS)[fault]
    probe = probe_with(overlay(tmp_path, old, new), *(FOLDED if fault in FOLDED_FAULTS else ()))
    assert probe["agreeing"] < probe["coordinates"]
    wrong = [index for index, group in enumerate(probe["groups"]) if group["mismatches"]]
    assert wrong[0] == group_index
    mismatch = probe["groups"][group_index]["mismatches"][0]
    assert mismatch["operation"] == "kv_element_offset"
    assert mismatch["first"] == first
    assert (mismatch["first_got"], mismatch["first_want"]) == (str(got), str(want))


def test_32_bit_faults_show_at_their_own_edge(tmp_path: Path) -> None:
    for fault, right_group, first_page in (("int32 arithmetic", None, 820), ("uint32 arithmetic", 2, 1639)):
        directory = tmp_path / fault.split()[0]
        directory.mkdir()
        old, new, _ = FAULTS[fault]
        groups = probe_with(overlay(directory, old, new))["groups"]
        assert not groups[0]["mismatches"]  # a small pool cannot show it
        if right_group is not None:
            assert not groups[right_group]["mismatches"]
        at_the_edge = groups[3 if right_group is not None else 2]["mismatches"][0]
        assert at_the_edge["first"]["page"] == first_page


def test_the_text_names_the_coordinate_and_the_command_exits_1(tmp_path: Path) -> None:
    old, new, _ = FAULTS["layer offset dropped"]
    result = invoke("--geometry", "12b-local", "--kernels", str(overlay(tmp_path, old, new)))
    assert result.exit_code == 1
    (small_pool,) = [line for line in result.stdout.splitlines() if line.startswith("wrong a small pool")]
    # Layer 1 of two: half of the 1260 coordinates.
    assert "kv_element_offset is wrong at 630 of 1260 coordinates" in small_pool
    assert "first at page=0,layer=1,kv=k,slot=0,head=0,dim=0: got 0, want 210" in small_pool
    assert "wrong too: kv_row_offset" in small_pool
    last = result.stdout.rstrip().splitlines()[-1].split()
    assert int(last[-5]) < int(last[-3])
