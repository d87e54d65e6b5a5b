"""The stand-in for libcudart answers for the emulated card at hand."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.providers.cudart.runtime import StandInRuntime, _Call


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_90a", 90), ("sm_120", 120)])
def test_a_functions_attributes_are_of_the_card_that_is_emulated(
    arch: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, runtime = EmulatedDevice(arch), StandInRuntime()
    kernel = SimpleNamespace(handle=SimpleNamespace(max_threads=256, shared_bytes=1024, local_bytes=16))
    monkeypatch.setattr(StandInRuntime, "_kernel", lambda _self, _name, _fatbin: kernel)
    runtime._call = _Call(device, lambda _kernel, _launch: None, "libengine.so")
    name, answer = ctypes.create_string_buffer(b"decode"), ctypes.create_string_buffer(64)
    values = (ctypes.c_uint64 * 3)(ctypes.addressof(name), 0, ctypes.addressof(answer))
    assert runtime._function_attributes(values) == 0
    # cudaFuncAttributes: shared, constant and local bytes; threads, registers, ptxVersion, binaryVersion.
    shared, constant, local, threads, registers, ptx, binary = struct.unpack("<3Q4i", answer.raw[:40])
    assert (shared, constant, local, threads, registers) == (1024, 0, 16, 256, 0)
    assert (ptx, binary) == (number, number)
    device.close()
