"""The CUDA device on a real GPU: memory, launches, faults, graphs and time."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from g4kv_cli.bench.clock import ClockProbe
from g4kv_cli.bench.samples import sample_replays
from g4kv_cli.compiler import SourceFile, compile_image
from g4kv_cli.device.arguments import Argument, by_value
from g4kv_cli.device.cuda import CudaDevice
from g4kv_cli.device.interface import DeviceArray, Launch, LoadedKernel
from g4kv_cli.device.open import open_device
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.errors import CompileError, ContractError, DeviceUnavailable
from g4kv_cli.records.run import KernelImage

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).resolve().parents[2]

SOURCE = SourceFile(
    "device_probe.cu",
    r"""
struct Parameters { unsigned long long out; int count; float scale; unsigned long long pad; };

extern "C" __global__ void index_times_scale(const Parameters p) {
  int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.count) reinterpret_cast<float*>(p.out)[i] = p.scale * i;
}
extern "C" __global__ void count_up(const Parameters p) {
  atomicAdd(reinterpret_cast<int*>(p.out), 1);
}
extern "C" __global__ void reverse_in_shared(const Parameters p) {
  extern __shared__ float row[];
  float* out = reinterpret_cast<float*>(p.out);
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) row[i] = p.scale * i;
  __syncthreads();
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) out[i] = row[p.count - 1 - i];
}
extern "C" __global__ void trap(const Parameters p) { __trap(); }
extern "C" __global__ void wild(const Parameters p) { *reinterpret_cast<int*>(p.out + (1ull << 45)) = 1; }
extern "C" __global__ void misaligned(const Parameters p) {
  *reinterpret_cast<volatile int*>(p.out + 1) = 1;
}
""",
)


def _load(device: CudaDevice, name: str) -> LoadedKernel:
    return device.load(compile_image(SOURCE, arch=device.info.arch, kind="cubin"), name)


def _parameters(out: DeviceArray, count: int = 0, scale: float = 1.0) -> tuple[Argument, ...]:
    return (by_value(struct.pack("<QifQ", out.address, count, scale, 0)),)


def test_what_the_device_says_of_itself(cuda_device: CudaDevice) -> None:
    assert cuda_device.info.kind == "cuda"
    assert cuda_device.info.name
    assert cuda_device.info.driver
    assert cuda_device.limits.multiprocessors > 0
    assert cuda_device.limits.max_threads_per_block == 1024
    assert cuda_device.limits.max_shared_bytes_per_block >= 99 * 1024
    free, total = cuda_device.memory_bytes()
    assert 0 < free <= total == cuda_device.limits.memory_bytes


def test_auto_takes_the_gpu(cuda_device: CudaDevice) -> None:
    chosen = open_device("auto", require_gpu=True)
    try:
        assert chosen.info.kind == "cuda"
    finally:
        chosen.close()


def test_bytes_go_there_and_back(cuda_device: CudaDevice) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    array = cuda_device.upload(bits.view(ml_dtypes.bfloat16), "all bf16 bit patterns")
    np.testing.assert_array_equal(cuda_device.read(array).view(np.uint16), bits)
    cuda_device.fill(array.view((100,), offset_elems=50), 0xA5)
    want = bits.copy()
    want[50:150] = 0xA5A5
    np.testing.assert_array_equal(cuda_device.read(array).view(np.uint16), want)


def test_a_struct_by_value_and_a_two_dimensional_grid(cuda_device: CudaDevice) -> None:
    kernel = _load(cuda_device, "index_times_scale")
    out = cuda_device.allocate((1000,), np.float32, "out")
    cuda_device.fill(out, 0)
    cuda_device.launch(kernel, Launch((4, 3, 1), (64, 1, 1), _parameters(out, 700, 0.5)))
    want = np.where(np.arange(1000) < 700, np.arange(1000) * 0.5, 0.0).astype(np.float32)
    np.testing.assert_array_equal(cuda_device.read(out), want)


def test_ptx_is_loaded_through_the_drivers_compiler(cuda_device: CudaDevice) -> None:
    image = compile_image(SOURCE, arch="sm_80", kind="ptx")
    try:
        kernel = cuda_device.load(image, "index_times_scale")
    except CompileError as error:
        if "UNSUPPORTED_PTX_VERSION" not in str(error):
            raise
        pytest.skip(f"needs a driver as new as NVRTC {image.compiler_version}: {error}")
    out = cuda_device.allocate((64,), np.float32, "out")
    cuda_device.launch(kernel, Launch((1, 1, 1), (64, 1, 1), _parameters(out, 64, 2.0)))
    np.testing.assert_array_equal(cuda_device.read(out), np.arange(64, dtype=np.float32) * 2)


def test_ptx_that_the_drivers_compiler_refuses_is_told_in_its_words(cuda_device: CudaDevice) -> None:
    """The first line of its log: a label that is not there. A version that no driver has is told apart."""
    text = ".version {}\n.target sm_80\n.address_size 64\n.visible .entry probe()\n{{\n\tbra NOWHERE;\n}}\n"
    for version, says in (("8.0", "its compiler says: .*NOWHERE"), ("99.0", "The PTX is of version 99.0, which this")):
        image = KernelImage("ptx", "sm_80", "probe.ptx", text.format(version).encode(), version, "")
        with pytest.raises(CompileError, match=says):
            cuda_device.load(image, "probe")


def test_a_parameter_struct_of_the_wrong_size_is_refused(cuda_device: CudaDevice) -> None:
    kernel = _load(cuda_device, "index_times_scale")
    with pytest.raises(ContractError, match="16 bytes, want 24 bytes"):
        cuda_device.launch(kernel, Launch((1, 1, 1), (32, 1, 1), (by_value(bytes(16)),)))
    assert cuda_device.launch_count == 0


def test_a_missing_kernel_is_named(cuda_device: CudaDevice) -> None:
    with pytest.raises(CompileError, match=r"cannot load nothing from device_probe\.cu"):
        _load(cuda_device, "nothing")


def test_more_than_48_kib_of_dynamic_shared_memory(cuda_device: CudaDevice) -> None:
    kernel = _load(cuda_device, "reverse_in_shared")
    nbytes = cuda_device.limits.max_shared_bytes_per_block
    count = nbytes // 4
    out = cuda_device.allocate((count,), np.float32, "out")
    cuda_device.launch(kernel, Launch((1, 1, 1), (256, 1, 1), _parameters(out, count), dynamic_shared_bytes=nbytes))
    np.testing.assert_array_equal(cuda_device.read(out), np.arange(count, dtype=np.float32)[::-1])


def test_out_of_memory_says_how_much(cuda_device: CudaDevice) -> None:
    nbytes = 2 * cuda_device.limits.memory_bytes
    with pytest.raises(DeviceUnavailable, match=rf"too much: {nbytes} bytes asked, \d+ of \d+ bytes free"):
        cuda_device.allocate((nbytes,), np.uint8, "too much")
    assert cuda_device.read(cuda_device.upload(np.ones(4, np.int32), "afterwards")).sum() == 4


def test_freed_memory_comes_back(cuda_device: CudaDevice) -> None:
    nbytes = 1 << 30
    before, _ = cuda_device.memory_bytes()
    array = cuda_device.allocate((nbytes,), np.uint8, "one GiB")
    during, _ = cuda_device.memory_bytes()
    cuda_device.free(array)
    after, _ = cuda_device.memory_bytes()
    assert before - during >= nbytes
    assert after - during >= nbytes


def test_a_captured_graph_runs_when_it_is_replayed_and_only_then(cuda_device: CudaDevice) -> None:
    kernel = _load(cuda_device, "count_up")
    counter = cuda_device.upload(np.zeros(1, np.int32), "counter")
    with cuda_device.capture() as graph:
        for _ in range(3):
            cuda_device.launch(kernel, Launch((2, 1, 1), (32, 1, 1), _parameters(counter)))
    assert cuda_device.read(counter)[0] == 0
    graph.replay(5)
    assert cuda_device.read(counter)[0] == 5 * 3 * 64
    graph.close()


def test_more_work_takes_longer(cuda_device: CudaDevice) -> None:
    array = cuda_device.allocate((1 << 28,), np.uint8, "256 MiB")

    def fill(times: int) -> None:
        for _ in range(times):
            cuda_device.fill(array, 1)

    one, twenty = (min(sample_replays(cuda_device, partial(fill, times), 5).seconds) for times in (1, 20))
    assert 0 < one < 0.1
    assert 5 * one < twenty < 100 * one


def test_the_clock_of_samples_is_one_that_a_card_may_have(cuda_device: CudaDevice) -> None:
    array = cuda_device.allocate((1 << 28,), np.uint8, "256 MiB")
    probe = ClockProbe(KernelLibrary(cuda_device))
    found = sample_replays(cuda_device, lambda: cuda_device.fill(array, 1), 20, probe)
    (clock,) = found.clocks_hz
    assert 0.2e9 < clock < 4e9
    assert probe.hertz() == found.clocks_hz
    probe.close()


_POISON = """
import json, sys
sys.path.insert(0, {repository!r})
import importlib.util
spec = importlib.util.spec_from_file_location("probe", {this_file!r})
probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(probe)
from g4kv_cli.errors import DeviceFault
device = probe.CudaDevice(0)
out = device.upload(probe.np.zeros(4, probe.np.int32), "out")
kernel = probe._load(device, {name!r})
device.launch(kernel, probe.Launch((1, 1, 1), (32, 1, 1), probe._parameters(out)))
faults = []
for action in (device.synchronize, lambda: device.read(out), lambda: device.upload(probe.np.zeros(1), "new")):
    try:
        action()
    except DeviceFault as fault:
        faults.append([list(fault.kinds), str(fault)])
device.close()
print(json.dumps(faults))
"""


@pytest.mark.parametrize(
    ("name", "kind", "driver_name"),
    [
        ("trap", "trap", "CUDA_ERROR_LAUNCH_FAILED|CUDA_ERROR_ILLEGAL_INSTRUCTION"),
        ("wild", "illegal_address", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("misaligned", "misaligned_address", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    ],
)
def test_a_fault_is_reported_and_sticks(cuda_device: CudaDevice, name: str, kind: str, driver_name: str) -> None:
    """In a process of its own: the fault makes the context unusable."""
    script = _POISON.format(repository=str(REPOSITORY), this_file=__file__, name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    faults = json.loads(done.stdout)
    assert len(faults) == 3
    for kinds, text in faults:
        assert kinds == [kind]
        assert any(wanted in text for wanted in driver_name.split("|"))
