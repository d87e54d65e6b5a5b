"""NVRTC: options, images, errors in words, and what the assembler says about a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from g4kv_cli.compiler import SourceFile, compile_image, compile_with_log, resource_usage, toolkit
from g4kv_cli.errors import CompileError, UsageError

EMPTY = SourceFile("empty.cu", 'extern "C" __global__ void empty() {}\n')
MULTIPLY_ADD = SourceFile(
    "fma.cu",
    'extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; x[4] = fmaf(x[1], x[2], x[3]); }\n',
)
BF16 = SourceFile(
    "bf16.cu",
    '#include <cuda_bf16.h>\nextern "C" __global__ void k(float* x, __nv_bfloat16* y) { *x = __bfloat162float(*y); }\n',
)


@pytest.mark.parametrize(("arch", "target"), [("sm_80", "sm_80"), ("sm_90a", "sm_90a"), ("sm_120", "sm_120")])
def test_ptx_is_made_for_the_arch_that_was_asked_for(arch: str, target: str) -> None:
    image = compile_image(EMPTY, arch=arch, kind="ptx")
    assert f".target {target}\n".encode() in image.data
    assert not image.data.endswith(b"\0")
    assert (image.arch, image.kind, image.name) == (arch, "ptx", "empty.cu")


def test_a_cubin_is_an_elf_file() -> None:
    assert compile_image(EMPTY, arch="sm_90a", kind="cubin").data[:4] == b"\x7fELF"


def test_the_cuda_headers_are_found() -> None:
    assert b".entry k" in compile_image(BF16, arch="sm_80", kind="ptx").data


def test_contraction_is_off_and_fmaf_is_kept() -> None:
    ptx = compile_image(MULTIPLY_ADD, arch="sm_90", kind="ptx").data
    assert ptx.count(b"fma.rn.f32") == 1
    assert ptx.count(b"mul.f32") + ptx.count(b"mul.rn.f32") == 1


def test_line_information_names_the_source_without_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ptx = compile_image(MULTIPLY_ADD, arch="sm_90", kind="ptx").data
    assert b'.file\t1 "fma.cu"' in ptx
    assert b".loc\t1 1" in ptx
    assert str(tmp_path).encode() not in ptx


def test_defines_reach_the_source() -> None:
    source = SourceFile("d.cu", 'extern "C" __global__ void k(int* x) { *x = WANTED; }\n')
    assert b"4711" in compile_image(source, arch="sm_80", kind="ptx", defines={"WANTED": "4711"}).data


def test_an_error_names_source_line_and_arch_and_carries_the_log() -> None:
    source = SourceFile("wrong.cu", 'extern "C" __global__ void k() {\n  undefined_thing();\n}\n')
    with pytest.raises(CompileError) as caught:
        compile_image(source, arch="sm_90a", kind="cubin")
    first, *rest = str(caught.value).splitlines()
    assert "wrong.cu" in first
    assert "wrong.cu(2)" in first
    assert "sm_90a" in first
    assert "undefined_thing" in first
    assert "^" in "\n".join(rest)
    assert "undefined_thing" in caught.value.log


def test_an_error_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "broken.cuh").write_text("\n\nint broken(;\n")
    source = SourceFile.from_text("user.cu", '#include "broken.cuh"\n', tmp_path)
    with pytest.raises(CompileError, match=r"broken\.cuh\(3\): error"):
        compile_image(source, arch="sm_80", kind="ptx")


@pytest.mark.parametrize("arch", ["", "90", "compute_90", "sm_90b", "sm_", "sm_90a "])
def test_a_malformed_arch_is_a_usage_error(arch: str) -> None:
    with pytest.raises(UsageError, match="unknown architecture"):
        compile_image(EMPTY, arch=arch, kind="ptx")


def test_an_arch_that_nvrtc_lacks_lists_those_it_has() -> None:
    with pytest.raises(CompileError, match=r"cannot compile empty\.cu for sm_42; it knows .*sm_90"):
        compile_image(EMPTY, arch="sm_42", kind="ptx")


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit.load_nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        with pytest.raises(CompileError, match=r"NVRTC is not available: .*pip install 'cuda-python"):
            toolkit.load_nvrtc()
    finally:
        toolkit.load_nvrtc.cache_clear()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13 not found\nsearched everywhere")

    toolkit.load_nvrtc.cache_clear()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    try:
        with pytest.raises(CompileError) as caught:
            toolkit.load_nvrtc()
    finally:
        toolkit.load_nvrtc.cache_clear()
    text = str(caught.value)
    assert "\n" not in text
    assert "libnvrtc.so.13 not found; install it with: python -m pip install 'nvidia-cuda-nvrtc" in text


def _header_tree(root: Path, *, nested_only: bool) -> Path:
    include = root / "include"
    (include / "cccl" / "nv").mkdir(parents=True)
    (include / "cccl" / "nv" / "target").write_text("")
    (include / "cuda_bf16.h").write_text("")
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    if not nested_only:
        (include / "nv").mkdir()
        (include / "nv" / "target").write_text("")
    return include


# Each with something of the header in use.
LIBRARY_KERNELS = {
    "cuda/std/cstdint": "cuda::std::uint32_t* x) { *x = 1u; }",
    "cuda/std/type_traits": "int* x) { *x = cuda::std::is_same_v<int, int>; }",
    "cub/block/block_reduce.cuh": """int* x) {
      using Reduce = cub::BlockReduce<int, 128>;
      __shared__ typename Reduce::TempStorage storage;
      const int sum = Reduce(storage).Sum(x[threadIdx.x]);
      if (threadIdx.x == 0) *x = sum;
    }""",
    "cuda/barrier": """int* x) {
      __shared__ cuda::barrier<cuda::thread_scope_block> all;
      if (threadIdx.x == 0) init(&all, blockDim.x);
      __syncthreads();
      all.arrive_and_wait();
    }""",
    "cooperative_groups.h": "int* x) { cooperative_groups::this_thread_block().sync(); }",
    "cuda_bf16.h": "__nv_bfloat16* x) { *x = __float2bfloat16(1.0f); }",
    "mma.h": """const half* x) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> a;
      nvcuda::wmma::load_matrix_sync(a, x, 16);
    }""",
}


@pytest.mark.parametrize("header", LIBRARY_KERNELS)
def test_a_kernel_may_use_nvidias_header_libraries(header: str) -> None:
    if header == "mma.h" and not toolkit._has_header("crt/mma.h"):
        pytest.skip("needs the headers of nvidia-cuda-crt, a dependency of g4kv")
    text = f'#include <{header}>\nextern "C" __global__ void k({LIBRARY_KERNELS[header]}\n'
    assert b".entry k" in compile_image(SourceFile("library.cu", text), arch="sm_90a", kind="ptx").data


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("cstdint", "include <cuda/std/cstdint> and write cuda::std::"),
        ("stdint.h", "include <cuda/std/cstdint> and write cuda::std::"),
        ("type_traits", "include <cuda/std/type_traits> and write cuda::std::"),
        ("cuda.h", "cuda.h is for the host's compiler; leave it out of device code"),
        ("no_such.cuh", 'included with quotes: "no_such.cuh"'),
    ],
)
def test_a_header_that_is_not_found_comes_with_what_to_do(header: str, words: str) -> None:
    with pytest.raises(CompileError) as raised:
        compile_image(SourceFile("k.cu", f"#include <{header}>\n"), arch="sm_90a", kind="ptx")
    assert str(raised.value).splitlines()[0].endswith(words)


def test_a_header_whose_package_is_missing_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "include_directories", lambda: (tmp_path,))
    packages = {
        "crt/mma.h": "nvidia-cuda-crt",
        "cub/cub.cuh": "nvidia-cuda-cccl",
        "cuda/std/cstdint": "nvidia-cuda-cccl",
        "curand_kernel.h": "nvidia-curand",
    }
    for header, package in packages.items():
        assert f"pip install '{package}" in toolkit.missing_header_hint(header, str(tmp_path / "mma.h"))


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
@pytest.mark.parametrize("nested_only", [False, True])
def test_headers_of_an_installed_toolkit_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, nested_only: bool
) -> None:
    include = _header_tree(tmp_path, nested_only=nested_only)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(toolkit, "_library_path", lambda: None)
    monkeypatch.setattr(toolkit, "_located_by_pathfinder", lambda: None)
    directories = toolkit.include_directories.__wrapped__()
    assert directories == (include, include / "cccl")


def test_headers_next_to_the_library_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = _header_tree(tmp_path / "beside", nested_only=False)
    _header_tree(tmp_path / "other", nested_only=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "other"))
    monkeypatch.setattr(toolkit, "_library_path", lambda: tmp_path / "beside" / "lib64" / "libnvrtc.so.13")
    assert toolkit.include_directories.__wrapped__() == (include, include / "cccl")


def test_cccl_in_another_folder_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel that was installed beside, as with --user or --target."""
    include, cccl = tmp_path / "a" / "cu13" / "include", tmp_path / "b" / "cu13" / "include" / "cccl"
    include.mkdir(parents=True)
    cccl.mkdir(parents=True)
    (include / toolkit._MARKER_HEADER).touch()
    monkeypatch.setattr(toolkit, "_candidates", lambda: [include])
    monkeypatch.setattr(toolkit, "_package_folders", lambda: [str(tmp_path / "a"), str(tmp_path / "b")])
    assert toolkit.include_directories.__wrapped__() == (include, cccl)
    (include / "cuda" / "std").mkdir(parents=True)
    (include / "cuda" / "std" / "cstdint").touch()
    assert toolkit.include_directories.__wrapped__() == (include,)


def test_missing_headers_say_where_they_were_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(toolkit, "_library_path", lambda: None)
    monkeypatch.setattr(toolkit, "_located_by_pathfinder", lambda: None)
    monkeypatch.setattr(toolkit, "_SYSTEM_TOOLKIT", tmp_path / "no-system-toolkit")
    with pytest.raises(CompileError, match=r"were not found \(looked in .*CUDA_PATH.*pip install"):
        toolkit.include_directories.__wrapped__()


def test_a_process_without_a_driver_compiles(tmp_path: Path) -> None:
    """Nothing of the driver is loaded on the way from source to image."""
    script = (
        "import sys\n"
        "from g4kv_cli.compiler import SourceFile, compile_image\n"
        "source = SourceFile('e.cu', 'extern \"C\" __global__ void e() {}')\n"
        "assert compile_image(source, arch='sm_90a', kind='cubin').data\n"
        "assert 'cuda.core' not in sys.modules\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


SPILLING = SourceFile(
    "spill.cu",
    """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[63 - i] + v[(i * 7) % 64];
}
extern "C" __global__ void shared(float* x) {
  __shared__ float row[300];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[299 - threadIdx.x];
}
""",
)


def test_resource_usage_sees_spills_and_shared_memory() -> None:
    unit = compile_with_log(SPILLING, arch="sm_80", kind="cubin")
    usage = {item.kernel: item for item in resource_usage(unit.log)}
    assert set(usage) == {"spill", "shared"}
    assert usage["spill"].spill_store_bytes > 0
    assert usage["spill"].spill_load_bytes > 0
    assert usage["spill"].registers <= 32  # 65536 registers / 2048 threads
    assert usage["shared"].spill_store_bytes == usage["shared"].stack_bytes == 0
    assert usage["shared"].static_shared_bytes == 300 * 4
    assert {item.arch for item in usage.values()} == {"sm_80"}


def test_resource_usage_comes_from_the_cache_too(fresh_cache: Path) -> None:
    first = compile_with_log(EMPTY, arch="sm_80", kind="cubin")
    second = compile_with_log(EMPTY, arch="sm_80", kind="cubin")
    assert resource_usage(first.log) == resource_usage(second.log) != ()
