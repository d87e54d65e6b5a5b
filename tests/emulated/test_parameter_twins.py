"""The by-value parameter structs: every field lies where the Python twin says, as the compiler placed it.

NVRTC 13.0 has no offsetof, so a kernel measures: it gets a struct by value and reports the distance of each field from
its start. Fields are named by the twin; a field that only one side has changes the size or does not compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from g4kv_cli.compiler import SourceFile, compile_image
from g4kv_cli.device.arguments import by_value
from g4kv_cli.device.interface import Device, Launch
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.attention_parameters import AttentionParameters
from g4kv_cli.entries.prep_parameters import PrepParameters

TWINS = {
    "prep": (PrepParameters, "PrepParams", "prep_params.cuh"),
    "attention": (AttentionParameters, "AttentionParams", "attention_params.cuh"),
}
PROBE = """
#include "{header}"
struct Probe {{ g4kv::{struct} measured; long long* report; }};
extern "C" __global__ void probe(const Probe p) {{
  const char* base = reinterpret_cast<const char*>(&p.measured);
  p.report[0] = sizeof(p.measured);
{lines}
}}
"""


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("emulated")
    yield opened
    opened.close()


def measured(device: Device, struct: str, header: str, names: list[str]) -> list[int]:
    lines = "\n".join(
        f"  p.report[{index}] = reinterpret_cast<const char*>(&p.measured.{name}) - base;"
        for index, name in enumerate(names, start=1)
    )
    source = SourceFile.from_text("probe.cu", PROBE.format(header=header, struct=struct, lines=lines))
    kernel = device.load(compile_image(source, arch=device.info.arch, kind=device.image_kind), "probe")
    report = device.allocate((len(names) + 1,), np.int64, "report")
    twin = next(twin for twin, name, _ in TWINS.values() if name == struct)
    arguments = (by_value(bytes(ctypes.sizeof(twin)) + report.address.to_bytes(8, "little")),)
    device.launch(kernel, Launch(grid=(1, 1, 1), block=(1, 1, 1), arguments=arguments, must_write=(report,)))
    return [int(value) for value in device.read(report)]


@pytest.mark.parametrize("name", TWINS)
def test_a_struct_lies_as_its_twin_says(device: Device, name: str) -> None:
    twin, struct, header = TWINS[name]
    fields = [field for field, *_ in twin._fields_]
    sizes_and_offsets = measured(device, struct, header, fields)
    assert sizes_and_offsets[0] == ctypes.sizeof(twin)
    assert dict(zip(fields, sizes_and_offsets[1:], strict=True)) == {
        field: getattr(twin, field).offset for field in fields
    }
    assert sorted(sizes_and_offsets[1:]) == sizes_and_offsets[1:]


def test_the_probe_sees_a_field_that_moved(device: Device) -> None:
    """Two fields exchanged in the order asked for: the reported offsets follow the struct, not the question."""
    fields = [field for field, *_ in PrepParameters._fields_]
    fields[0], fields[1] = fields[1], fields[0]
    assert measured(device, "PrepParams", "prep_params.cuh", fields)[1:3] == [8, 0]
