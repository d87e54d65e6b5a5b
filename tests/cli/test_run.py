"""``g4kv run``: a launch from the command line, what it shows and writes, its exit codes and its refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from g4kv_cli import emulator
from g4kv_cli.commands.run_arguments import parse_arguments
from g4kv_cli.commands.run_device import launch_on
from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.errors import DeviceFault, UsageError
from g4kv_cli.main import COMMANDS, run

SOURCE = """
struct Pair { int a, b; };
template <class T> __global__ void scale(T* x, T by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}
__constant__ float offset[1];
extern "C" __global__ void __launch_bounds__(128) sum(const float* x, float* out, int n) {
  __shared__ float part[128];
  float s = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[i];
  part[threadIdx.x] = s;
  for (int half = 64; half > 0; half /= 2) {
    BARRIER;
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *out = part[0] + offset[0];
}
extern "C" __global__ void take_struct(int* out, Pair pair) { *out = pair.a * 100 + pair.b; }
extern "C" __global__ void rank(int* out) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  out[blockIdx.x] = rank;
}
extern "C" __global__ void say(int n) { printf("%d of %d\\n", threadIdx.x, n); }
extern "C" __global__ void forever(volatile int* flag) {
  for (unsigned i = *flag; i != 1; i += 2) asm volatile("" : "+r"(i));
}
"""
BARRIER = "--option=-DBARRIER=__syncthreads()"
NO_BARRIER = "--option=-DBARRIER=(void)0"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.cu").write_text(SOURCE)
    return "all.cu"


def test_the_four_main_commands_come_first() -> None:
    assert list(COMMANDS)[:5] == ["smoke", "reject", "layout", "bench", "run"]


def test_a_clean_launch_of_a_template(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--grid", "4", "--block", "256", "--arg", "x=f32[1000]:arange", "--arg", "f32:2.5", "--arg", "i32:1000"]
    assert (
        run(["run", source, BARRIER, "--kernel", "scale<float>", *words, "--save", "x=y.npy", "--json", "r.json"]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("device   emulated sm_90 (H200 limits), NVRTC ")
    assert "kernel   scale<float>(float*, float, int) of all.cu\n" in shown
    assert "launch   grid 4, block 256, 0 bytes of dynamic shared memory, seed 1\n" in shown
    want = "x  float32 [1000], stored to: 0 2.5 5 7.5 10 12.5 ...; from 0 to 2497.5, mean 1248.75\n"
    assert want in shown
    assert "\n0 findings in " in shown
    np.testing.assert_array_equal(np.load("y.npy"), np.arange(1000, dtype=np.float32) * np.float32(2.5))
    record = json.loads(Path("r.json").read_text())
    assert record["ended"] == "finished"
    assert record["findings"] == []
    assert record["launch"]["stored_bytes_by_argument"] == {"x": 4000}
    assert [argument["spec"] for argument in record["arguments"]] == ["f32[1000]:arange", "f32:2.5", "i32:1000"]


SUM = ["--kernel", "sum", "--grid", "1", "--block", "128", "--arg", "f32[999]:ones", "--arg", "out=f32[1]:out", "--arg"]


def test_a_finding_is_told_by_its_line_and_is_exit_code_1(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", source, BARRIER, *SUM, "i32:999", "--symbol", "offset=f32:1.5"]) == 0
    assert "out  float32 [1], stored to: 1000.5;" in capsys.readouterr().out
    line = next(number for number, text in enumerate(SOURCE.split("\n"), 1) if "part[threadIdx.x + half]" in text)
    assert run(["run", source, NO_BARRIER, *SUM, "i32:999", "--json", "r.json"]) == 1
    shown = capsys.readouterr().out
    assert f"  FOUND  shared_race: all.cu:{line}: block (0, 0, 0) thread" in shown
    record = json.loads(Path("r.json").read_text())
    assert {found["kind"] for found in record["launch"]["findings"]} == {"shared_race"}
    assert {found["source_line"] for found in record["launch"]["findings"]} >= {line}
    assert run(["run", source, NO_BARRIER, *SUM, "i32:999", "--ignore", "shared_race"]) == 0
    assert "of kind shared_race ignored" in capsys.readouterr().out


def test_what_ends_a_launch_is_shown_with_what_was_stored(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", source, BARRIER, *SUM, "i32:1000"]) == 1
    shown = capsys.readouterr().out
    assert "FOUND  global_out_of_bounds" in shown
    assert "0 bytes past the end of 'args[0]' (3996 bytes)" in shown
    assert "ended by global_out_of_bounds" in shown


def test_blocks_form_clusters(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kernel", "rank", "--grid", "6", "--block", "1", "--arg", "out=i32[6]:out", "--save", "out=out.npy"]
    assert run(["run", source, BARRIER, *words, "--cluster", "3", "--json", "r.json"]) == 0
    assert "grid 6, block 1, cluster 3" in capsys.readouterr().out
    assert np.load("out.npy").tolist() == [0, 1, 2, 0, 1, 2]
    assert json.loads(Path("r.json").read_text())["cluster"] == [3, 1, 1]


def test_bytes_are_a_struct(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kernel", "take_struct", "--grid", "1", "--block", "1", "--arg", "out=i32[1]:out"]
    assert run(["run", source, BARRIER, *words, "--arg", "bytes:0700000009000000"]) == 0
    assert "out  int32 [1], stored to: 709;" in capsys.readouterr().out


def test_what_the_kernel_prints_is_shown(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", source, BARRIER, "--kernel", "say", "--grid", "1", "--block", "2", "--arg", "i32:7"]) == 0
    assert "  printf  0 of 7\n  printf  1 of 7\n" in capsys.readouterr().out


def test_notes_are_shown_and_are_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.cu").write_text("__global__ void mark(int* flag) { *flag = 7; }\n")
    assert run(["run", "k.cu", "--grid", "4", "--block", "1", "--arg", "i32[1]:zeros"]) == 0
    assert "  note   equal_stores: k.cu:1: " in capsys.readouterr().out


def test_bits_that_the_ptx_leaves_open_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    body = "float p = x[0] * x[1]; x[2] = p + x[3]; x[4] = p - x[3];"
    Path("k.cu").write_text(f'extern "C" __global__ void k(float* x) {{ {body} }}\n')
    assert run(["run", "k.cu", "--grid", "1", "--block", "1", "--arg", "f32[5]:ones"]) == 0
    assert "2 sums fused with products as ptxas does, which the PTX leaves open" in capsys.readouterr().out
    assert run(["run", "k.cu", "--grid", "1", "--block", "1", "--arg", "f32[5]:ones", "--option=--fmad=false"]) == 0
    assert "fused" not in capsys.readouterr().out


def test_list_shows_kernels_parameters_templates_and_variables(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", source, BARRIER, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("kernel    sum")
    assert lines[at + 1].strip() == "args[0]  a pointer or a 64-bit integer, 8 bytes"
    assert lines[at + 3].strip() == "args[2]  an integer of 32 bits, 4 bytes"
    assert "template  scale, of which --kernel names an instance: --kernel 'scale<float>'" in lines
    assert "variable  offset, 4 bytes" in lines


def test_a_file_of_templates_alone_says_how_to_name_an_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.cu").write_text("template <class T> __global__ void scale(T* x, T by) { *x *= by; }\n")
    assert run(["run", "t.cu", "--list"]) == 0
    shown = "template  scale, of which --kernel names an instance: --kernel 'scale<float>'\n"
    assert capsys.readouterr().out == shown
    for words in (["run", "t.cu", "--grid", "1", "--block", "1"], ["kernels", "--check", "t.cu"]):
        assert run(words) == 2
        told = capsys.readouterr().err
        assert "t.cu has no kernel in its PTX: scale is a template, and of a template an instance has to be" in told
        assert "g4kv run --kernel 'scale<float>'" in told
        assert "template __global__ void scale<float>(...)" in told
    Path("t.cu").write_text("template <class T> __global__ void scale(T* x, T by) { *x *= by; }\n"
                            "template __global__ void scale<float>(float*, float);\n")  # fmt: skip
    assert run(["kernels", "--check", "t.cu"]) == 0
    Path("t.cu").write_text("__device__ int none;\n")
    assert run(["run", "t.cu", "--list"]) == 2
    assert "no kernel in its PTX: a kernel is a __global__ function\n" in capsys.readouterr().err


def test_a_file_whose_name_is_no_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, source = tmp_path / os.fsdecode(b"d\xff"), tmp_path / os.fsdecode(b"k\xff.cu")
    try:
        folder.mkdir()
        source.write_text('extern "C" __global__ void k(int* x) { *x = 1; x[9] = 2; }\n')
    except OSError as error:
        pytest.skip(f"no such names here: {error}")
    launch = ["--grid", "1", "--block", "1", "--arg", "i32[1]:zeros"]
    assert run(["run", str(source), *launch]) == 1
    assert "global_out_of_bounds: k?.cu:1: " in capsys.readouterr().out
    assert run(["run", str(source), *launch, "--include", str(folder)]) == 2
    assert "NVRTC takes names in UTF-8 alone; rename the directory" in capsys.readouterr().err


def test_ptx_runs_as_it_stands(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("all.ptx").write_text(emulator.load(SOURCE, options=["-DBARRIER=__syncthreads()"]).ptx[0])
    assert run(["run", "all.ptx", *SUM, "i32:999", "--symbol", "offset=f32:0"]) == 0
    assert "stored to: 999;" in capsys.readouterr().out
    assert run(["run", "all.ptx", *SUM, "i32:999", "--device", "emulated:sm_80"]) == 2
    assert "is compiled already" in capsys.readouterr().err


def test_the_architecture_is_the_devices(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SUM, "i32:999", "--shared", "200000"]
    assert run(["run", source, BARRIER, *words, "--device", "emulated:sm_86"]) == 2
    assert "200512 bytes of shared memory in a block, sm_86 has 101376" in capsys.readouterr().err
    assert run(["run", source, BARRIER, *words, "--device", "emulated:sm_90"]) == 0


def test_an_endless_launch_is_given_up(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kernel", "forever", "--grid", "1", "--block", "1", "--arg", "i32[1]:zeros", "--seconds", "0.2"]
    assert run(["run", source, BARRIER, *words, "--json", "r.json"]) == 2
    assert "forever had not ended after 0.2 s" in capsys.readouterr().err
    assert "had not ended" in json.loads(Path("r.json").read_text())["ended"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--kernel", "sum"], "needs --grid and --block"),
        (["--kernel", "forever", "--grid", "0", "--block", "1", "--arg", "null"], "grid.x is 0"),
        (["--kernel", "rank", "--grid", "6", "--block", "1", "--cluster", "4", "--arg", "i32[6]:out"], "do not fill"),
        (["--kernel", "sum", "--grid", "a", "--block", "1"], "'a' is no extent"),
        (["--kernel", "smu", "--grid", "1", "--block", "1"], "did you mean sum?"),
        (["--kernel", "scale", "--grid", "1", "--block", "1"], "is a template, and it has no instance scale"),
        (["--grid", "1", "--block", "1"], "kernels: "),
        ([*SUM[:-1]], "sum takes 3 arguments, 2 given"),
        ([*SUM, "i32:x"], "--arg i32:x: 'x' is no whole number; write i32:5"),
        ([*SUM, "f32[4]:1,2"], "--arg f32[4]:1,2: '1,2' is no number; write i32:5"),
        ([*SUM, "i32:5000000000"], "5000000000 is not from -2147483648 to 2147483647"),
        ([*SUM, "int:5"], "there is no type 'int'"),
        ([*SUM, "5"], "it is no type with a value; write i32:5"),
        ([*SUM, "out=i32:5"], "out stands there already"),
        ([*SUM, "i32[a]:5"], "[a] is no shape"),
        ([*SUM, "f32:1e39"], "1e39 is more than float32 holds"),
        ([*SUM, "@none.npy"], "cannot read none.npy: No such file"),
        ([*SUM, "@all.cu"], "all.cu is no .npy file"),
        ([*SUM, "bytes:0g"], "non-hexadecimal"),
        ([*SUM, "i32:5", "--save", "x=y.npy"], "no array argument is called x; there are: args[0], out"),
        ([*SUM, "i32:5", "--save", "out"], "write NAME=FILE.npy"),
        ([*SUM, "i32:5", "--save", "out=nowhere/y.npy"], "--save nowhere/y.npy: cannot write: No such file"),
        ([*SUM, "i32:5", "--symbol", "ofset=f32:1"], "did you mean offset?"),
        ([*SUM, "i32:5", "--ignore", "races"], "no finding is of kind 'races'"),
        ([*SUM, "i32:5", "--device", "emulated:sm_1"], "does not know 'sm_1'"),
        ([*SUM, "i32:5", "--json", "/nowhere/r.json"], "--json /nowhere/r.json: cannot write"),
        ([*SUM, "i32:5", "--include", "nowhere"], "include path nowhere is no directory"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_line(
    source: str, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = sorted(os.listdir())
    assert run(["run", source, BARRIER, *words]) == 2
    printed, shown = capsys.readouterr()
    assert "thread instructions" not in printed  # nothing was launched
    assert shown.startswith("g4kv: error: ")
    assert shown.count("\n") == 1
    assert error in shown
    assert sorted(os.listdir()) == kept


def test_specs_make_the_arrays_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("half.npy", np.arange(4).astype(ml_dtypes.bfloat16))
    words = (
        "bf16[2,3]:ones",
        "i32[5]:arange",
        "u8[3]:7",
        "f32[1000]:random",
        "u16[1000]:random",
        "@half.npy",
        "bool:true",
        "null",
    )
    made = [argument.value for argument in parse_arguments("--arg", words, seed=3)]
    assert made[0].dtype == ml_dtypes.bfloat16
    assert made[0].shape == (2, 3)
    assert (made[0] == 1).all()
    assert made[1].tolist() == [0, 1, 2, 3, 4]
    assert made[2].tolist() == [7, 7, 7]
    assert abs(float(made[3].mean())) < 0.2
    assert 0.8 < float(made[3].std()) < 1.2
    assert made[4].max() < 100
    assert made[5].tolist() == [0, 1, 2, 3]
    assert made[6] is np.True_ or made[6] == np.True_
    assert made[7] is None
    again = [argument.value for argument in parse_arguments("--arg", words, seed=3)]
    other = [argument.value for argument in parse_arguments("--arg", words, seed=4)]
    np.testing.assert_array_equal(made[3], again[3])
    assert (made[3] != other[3]).any()
    with pytest.raises(UsageError, match="GiB"):
        parse_arguments("--arg", ("f64[1000000,1000000]:zeros",), seed=1)


def test_a_launch_through_the_interface_of_all_devices() -> None:
    """What a GPU is given: the emulated device takes the same."""
    module = emulator.load(SOURCE, options=["-DBARRIER=__syncthreads()"], names=["scale<float>"])
    device = EmulatedDevice()
    x, out = np.ones(1000, np.float32), np.zeros(1, np.float32)
    extents = ((4, 1, 1), (256, 1, 1))
    arguments = {"x": x, "by": 2.0, "n": 1000}
    launch_on(device, module, module.symbol("scale"), module.ptx[0].encode(), extents, arguments, 0)
    assert (x == 2).all()
    module.set("offset", np.zeros(1, np.float32))
    arguments = {"x": x, "out": emulator.out(out), "n": 1000}
    launch_on(device, module, "sum", module.ptx[0].encode(), ((1, 1, 1), (128, 1, 1)), arguments, 0)
    assert out[0] == 2000
    with pytest.raises(DeviceFault, match="past the end of 'x'"):
        launch_on(device, module, "sum", module.ptx[0].encode(), ((1, 1, 1), (128, 1, 1)), {**arguments, "n": 1001}, 0)


WHERE_THE_GRID_MEETS = """.version 8.0
.target sm_90
.address_size 64
.visible .entry where(.param .u64 out)
{
  .reg .b32 %r<3>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out]; mov.u32 %r1, %envreg1; mov.u32 %r2, %envreg2; st.global.v2.u32 [%rd1], {%r1, %r2};
  ret;
}
"""


def test_a_device_is_told_that_a_kernel_meets_its_grid() -> None:
    module, out = emulator.load(WHERE_THE_GRID_MEETS), np.zeros(2, np.uint32)
    launch_on(EmulatedDevice(), module, "where", module.ptx[0].encode(), ((1, 1, 1), (1, 1, 1)), {"out": out}, 0)
    assert out.any()


def test_a_device_is_told_of_clusters(source: str) -> None:
    module, out = emulator.load(Path(source), options=["-DBARRIER="], names=["scale<float>"]), np.zeros(4, np.int32)
    extents = ((4, 1, 1), (1, 1, 1))
    launch_on(EmulatedDevice(), module, "rank", module.ptx[0].encode(), extents, {"out": out}, 0, (2, 1, 1))
    assert out.tolist() == [0, 1, 0, 1]
