"""What a launcher's machine code does, through ctypes: for tests of the stand-in for libcudart."""

from __future__ import annotations

import ctypes
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.device.interface import Launch, LoadedKernel
from g4kv_cli.providers.cudart.build import HERE
from g4kv_cli.providers.cudart.runtime import StandInRuntime, _Call

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 out) DIRECTIVES {
  .reg .b32 %r<4>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [out];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %cluster_ctarank;
  mov.u32 %r3, %cluster_nctarank;
  mul.wide.u32 %rd3, %r1, 8;
  add.s64 %rd4, %rd2, %rd3;
  st.global.v2.u32 [%rd4], {%r2, %r3};
  ret;
}
"""
"""Each of the blocks (one thread) stores its number within its cluster and how many that has."""


def fixtures_of(kind: type[Caller]) -> tuple[Any, Any]:
    """Two fixtures of a ``kind`` of caller: one that makes a test run on the stand-ins of CUDA 12 and of 13, and one on
    that of 13 alone."""

    def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
        caller = kind(tmp_path, getattr(request, "param", 13))
        yield caller
        caller.device.close()

    return pytest.fixture(params=[12, 13])(made), pytest.fixture(made)


class Caller:
    """What a launcher's machine code does, through ctypes: the stand-in of a CUDA's runtime, within one call."""

    def __init__(self, folder: Path, major: int, arch: str = "sm_90") -> None:
        self.major, self.device, self.runtime = major, EmulatedDevice(arch), StandInRuntime()
        file = HERE / f"libcudart.so.{major}"
        if not file.is_file():
            pytest.skip("the stand-in was not built here")
        # A copy is another library to the loader: the stand-in of this process keeps its own handler.
        self.cudart = ctypes.CDLL(shutil.copy(file, folder))
        self.cudart.g4kv_set_handler(self.runtime._handler)
        self.runtime._operations = self.runtime._numbered(self.cudart)
        self.launches: list[Launch] = []
        self.state = self.runtime._call = _Call(self.device, self._launch, "libengine.so")
        self._kept: list[Any] = []

    def _launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        self.launches.append(launch)
        self.device.launch(kernel, launch)

    def __getitem__(self, name: str) -> Any:
        return self.cudart[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cudart, name)

    def allocate(self, nbytes: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        assert self.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(nbytes)) == 0
        return found

    def read(self, at: ctypes.c_void_p, count: int) -> list[int]:
        host = (ctypes.c_uint32 * count)()
        assert self.cudaMemcpy(host, at, ctypes.c_size_t(4 * count), 2) == 0
        return list(host)

    def registered(self, ptx: bytes, variable: bytes = b"") -> ctypes.c_void_p:
        """The host's handle of the kernel ``ranks`` in this PTX, or of a variable of it."""
        head = struct.pack("<HHIQ", 1, 0x101, 64, len(ptx)) + bytes(12) + struct.pack("<I", 90) + bytes(32)
        body = head + ptx
        binary = ctypes.create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body)
        wrapper = (ctypes.c_uint64 * 3)(0x1_466243B1, ctypes.addressof(binary), 0)
        host = ctypes.create_string_buffer(8)
        self._kept += [binary, wrapper, host]
        register_binary, register = self.cudart["__cudaRegisterFatBinary"], self.cudart["__cudaRegisterFunction"]
        register_binary.restype = ctypes.c_void_p
        handle = ctypes.c_void_p(register_binary(wrapper))
        if variable:
            self.cudart["__cudaRegisterVar"](handle, host, variable, variable, 0, ctypes.c_size_t(8), 1, 0)
        else:
            register(handle, host, b"ranks", b"ranks", -1, None, None, None, None, None)
        return ctypes.c_void_p(ctypes.addressof(host))

    def launch_ex(self, host: ctypes.c_void_p, out: ctypes.c_void_p, cluster: tuple[int, int, int] | None) -> int:
        """cudaLaunchKernelExC of 4 blocks of one thread."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(out))
        attribute = ctypes.create_string_buffer(struct.pack("<i4x3I52x", 4, *(cluster or (1, 1, 1))), 72)
        count = int(cluster is not None)
        config = struct.pack("<6IQQQI4x", 4, 1, 1, 1, 1, 1, 0, 0, ctypes.addressof(attribute), count)
        return int(self.cudaLaunchKernelExC(ctypes.create_string_buffer(config), host, pointers))
