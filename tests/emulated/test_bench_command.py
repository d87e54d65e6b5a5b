"""``g4kv bench`` from the command line to the record, on the emulated device in the guise of a CUDA one.

Kernels really run (interpreted), graphs replay what was captured, results are really checked; only the clock is made
up: each launch takes a time that the test sets.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_helper import FakeCuda, fake_cuda, invoke, seconds_by_name
from seeding import seed

from g4kv_cli.bench import ceilings
from g4kv_cli.bench.clock import ClockProbe
from g4kv_cli.bench.sweep import SweepSettings
from g4kv_cli.commands import bench_run as bench_command
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.device.interface import LoadedKernel
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.records.bench import Ceilings, read_bench_record

pytestmark = pytest.mark.usefixtures("forms_a_b_c")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    return fake_cuda(monkeypatch, tmp_path)


def test_decode_from_the_command_to_the_record(device: FakeCuda) -> None:
    result = invoke("--batch", "1", "--kv-len", "33", "--splits", "2")
    assert result.return_value == 0, result.stdout
    (path,) = Path("results/test-gpu").glob("*/bench.json")
    record = read_bench_record(path, "--from")
    assert record.ended == "finished"
    assert record.clocks == ("1980 MHz", "1980 MHz")
    times = {item.configuration: item for item in record.measurements}
    assert list(times) == ["a", "b", "c2"]
    assert [round((item.seconds or 0) * 1e6, 3) for item in times.values()] == [20.0, 20.0, 12.0]
    assert times["c2"].pools == 2
    assert times["c2"].checked_rows == 1
    assert re.search(r"   33  c2 12\.00 us\s+unsplit \+66\.7 %\n", result.stdout)
    # A second run is another record.
    assert invoke("--batch", "1", "--kv-len", "33", "--splits", "2", "--quiet").return_value == 0
    assert sorted(file.name for file in path.parent.iterdir()) == ["bench-2.json", "bench.json"]
    # Nothing is left on the device but what the caller had.
    assert device._allocations == []


def test_folded_pools_from_the_command_to_the_record(device: FakeCuda) -> None:
    options = ("--geometry", "12b-global", "--batch", "1", "--kv-len", "17", "--splits", "2", "--kv-format", "folded")
    result = invoke(*options, "--json", "folded.json", "--dispatch", "dispatch.json")
    assert result.return_value == 0, result.stdout
    record = read_bench_record(Path("folded.json"), "--from")
    assert [(shape.id, shape.kv_format) for shape in record.shapes] == [
        ("decode/12b-global@tp8-folded/batch1/kv17", "folded")
    ]
    assert [(item.configuration, item.status) for item in record.measurements] == [
        (name, "measured") for name in ("a", "b", "c2")
    ]
    assert "12b-global@tp8-folded: which decode form" in result.stdout
    (table,) = json.loads(Path("dispatch.json").read_text(encoding="utf-8"))["geometries"].values()
    assert (table["geometry"], table["kv_format"]) == ("12b-global@tp8", "folded")


def test_prep_and_prefill(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from g4kv_cli.bench import workloads

    monkeypatch.setattr(workloads, "_PREP_TOKENS", {"quick": (3,)})
    monkeypatch.setattr(workloads, "_PREFILL", {"quick": ((5, 20),)})
    monkeypatch.setattr(workloads, "_MIXED", {"quick": ((3, 20, 2),)})
    compiled: list[str] = []

    def compile_sources(_device: Any, _directory: Any, names: Any, _forced: str) -> None:
        compiled.extend(names)

    monkeypatch.setattr(bench_command, "compile_sources", compile_sources)
    # Three forms of prep, each beside a copy.
    for workload, count in (("prep", 6), ("prefill", 5)):
        result = invoke(workload, "--geometry", "12b-global", "--preset", "quick", "--json", f"{workload}.json")
        assert result.return_value == 0, result.stdout
        record = read_bench_record(Path(f"{workload}.json"), "--from")
        assert len(record.measurements) <= count
        assert {item.status for item in record.measurements} == {"measured"}
    # What a run calls is compiled in front of it; nothing of head_dim 256, and no merge.
    assert {"prep_hd512.cu", "prefill_hd512.cu", "decode_hd512.cu"} <= set(compiled)
    assert [name for name in compiled if "256" in name or "merge" in name] == []


def test_prep_is_held_against_a_copy_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from g4kv_cli.bench import workloads

    device = fake_cuda(monkeypatch, tmp_path)
    copies = {"ceiling_copy_2": 12e-6, "ceiling_copy_4": 11.26e-6, "ceiling_copy_8": 11.5e-6}
    monkeypatch.setattr(device, "_seconds", lambda kernel: copies.get(kernel.name, 12.5e-6))
    monkeypatch.setattr(workloads, "_PREP_TOKENS", {"quick": (3,)})
    result = invoke("prep", "--geometry", "12b-local", "--preset", "quick", "--json", "prep.json")
    assert result.return_value == 0, result.stdout
    record = read_bench_record(Path("prep.json"), "--from")
    kernels, plain = (
        [item for item in record.measurements if item.configuration == name] for name in ("kernel", "copy")
    )
    assert len(record.measurements) == 2 * len(record.shapes) == len(kernels) + len(plain)
    assert {(item.form, item.status, item.pools) for item in plain} == {("copy", "measured", 2)}
    # The fastest of its variants, in as many rounds as the kernel it stands beside.
    assert {round((item.seconds or 0) * 1e6, 3) for item in plain} == {11.26}
    assert {len(item.graph.round_medians) for item in record.measurements if item.graph} == {2}
    lines = [line for line in result.stdout.splitlines() if "of copy" in line or " 90.1 %" in line]
    assert len(lines) > len(kernels), result.stdout
    assert device._allocations == []


def test_bursts_from_the_command_to_the_record(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from g4kv_cli.bench import run as bench_run

    in_bursts = Ceilings(4.7e12, 4.28e12, 0.0, 1e-6, note="the same in bursts")
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda *_arguments: (in_bursts, in_bursts))
    monkeypatch.setattr(ClockProbe, "hertz", lambda _probe: (1.5e9,))
    rested = ("--rest", "0.001", "--bursts", "4")
    result = invoke("--batch", "1", "--kv-len", "33", "--splits", "2", *rested, "--json", "bursts.json")
    assert result.return_value == 0, result.stdout
    record = read_bench_record(Path("bursts.json"), "--from")
    assert record.burst_ceilings == in_bursts
    assert record.settings["rest_seconds"] == {"decode": 0.001, "prefill": 0.001, "prep": 0.001}
    assert record.settings["bursts"] == 4
    found = {item.configuration: (item.burst, item.burst_calls) for item in record.measurements}
    assert {name: (burst.count, calls) for name, (burst, calls) in found.items() if burst} == {
        "a": (4, 2), "b": (4, 2), "c2": (4, 2),
    }  # fmt: skip
    clocks = [(item.graph, item.burst) for item in record.measurements]
    assert [[found and found.round_clocks_hz for found in both] for both in clocks] == [
        [(1.5e9,) * 2, (1.5e9,) * 4]
    ] * 3
    assert "(the same in bursts)" in result.stdout
    assert re.search(r"burst\s+burst \+-", result.stdout)


def test_a_clock_is_of_one_multiprocessor_and_of_work_that_is_long_enough(device: FakeCuda) -> None:
    probe = ClockProbe(KernelLibrary(device))

    def hertz(begin: tuple[int, int, int], end: tuple[int, int, int]) -> tuple[float, ...]:
        device.write(probe._readings, np.array([begin, end], np.uint64))
        return probe.hertz()

    assert hertz((2**40, 5_000, 7), (2**40 + 165_000, 105_000, 7)) == (1.65e9,)
    assert hertz((2**40, 5_000, 7), (2**40 + 165_000, 105_000, 8)) == ()
    assert hertz((2**40, 5_000, 7), (2**40 + 33_000, 24_999, 7)) == ()
    probe.begin()
    probe.end()
    found = device.read(probe._readings)
    assert (found[:, :2] != [[2**40, 5_000], [2**40 + 33_000, 24_999]]).all()  # the kernel wrote both readings
    assert found[:, 2].tolist() == [0, 0]
    probe.close()


def test_ceilings_are_sampled_as_cells_are(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    microseconds = {
        "copy_2": 9,
        "copy_4": 8,
        "copy_8": 10,
        "read_2": 5,
        "read_4": 6,
        "read_8": 4,
        "empty": 1,
    }

    def seconds(kernel: LoadedKernel) -> float:
        return microseconds[kernel.name.removeprefix("ceiling_")] * (0.5e-6 if rests else 1e-6)

    monkeypatch.setattr(ceilings.time, "sleep", rests.append)
    monkeypatch.setattr(ceilings, "EMPTY_LAUNCHES", 3)
    device._seconds = seconds
    library = KernelLibrary(device)
    arena = device.upload(np.ones(4096, np.int16), "arena")
    settings = SweepSettings(rounds=2, seconds_per_round=1e-5, bursts=3)
    without, none = ceilings.measure_ceilings(library, device, arena, None, settings, 0.0)  # type: ignore[arg-type]
    assert (none, rests) == (None, [])
    assert without.read_bytes_per_second == pytest.approx(8192 / 4e-6)
    assert without.copy_bytes_per_second == pytest.approx(2 * 8192 / 8e-6)
    assert without.launch_seconds == pytest.approx(1e-6)
    again, rested = ceilings.measure_ceilings(library, device, arena, ClockProbe(library), settings, 0.5)  # type: ignore[arg-type]
    assert (again.note, again.read_bytes_per_second) == (without.note, pytest.approx(without.read_bytes_per_second))
    assert rests == [0.5] * 9  # three bursts of the fastest copy and read, and of the empty kernel
    assert rested is not None
    assert rested.read_bytes_per_second == pytest.approx(8192 / 2e-6)
    assert rested.note == "the same in 3 bursts, 0.5 s of rest before each"


def test_a_kernel_with_a_seeded_fault_is_wrong_and_exits_1(device: FakeCuda, tmp_path: Path) -> None:
    right = "sum = fmaf(weight.y, weight.x, sum);"
    faulty = seed(tmp_path / "faulty", (("decode_body.cuh", right, right.replace("weight.x", "1.1f * weight.x")),))
    result = invoke("--batch", "1", "--kv-len", "33", "--splits", "2", "--kernels", str(faulty), "--json", "bad.json")
    record = read_bench_record(Path("bad.json"), "--from")
    assert [item.status for item in record.measurements] == ["measured", "measured", "wrong"]
    assert result.return_value == 1


def test_a_slower_kernel_against_the_built_in_one(device: FakeCuda, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    copy.mkdir()
    (copy / "decode_hd256.cu").write_text(
        (BUILT_IN_KERNELS_DIRECTORY / "decode_hd256.cu").read_text(encoding="utf-8") + "// mine\n", encoding="utf-8"
    )
    digests: dict[str, set[str]] = {}

    def seconds(kernel: LoadedKernel) -> float:
        digests.setdefault(kernel.image.name, set()).add(kernel.image.source_digest)
        mine = kernel.image.source_digest != first[0] if first else False
        return seconds_by_name(kernel) * (1.08 if mine else 1.0)

    first: list[str] = []
    from g4kv_cli.compiler.images import compile_image
    from g4kv_cli.compiler.sources import find_source

    image = compile_image(find_source("decode_hd256.cu"), arch=device.info.arch, kind=device.image_kind)
    first.append(image.source_digest)
    device._seconds = seconds
    shapes = ("--batch", "1", "--kv-len", "33", "--splits", "2", "--json", "pair.json")
    result = invoke(*shapes, "--kernels", str(copy), "--baseline", "built-in")
    assert result.return_value == 1
    assert "3 cells: 3 slower (threshold 5 %)" in result.stdout
    assert {name: len(seen) for name, seen in digests.items()} == {"decode_hd256.cu": 2, "merge.cu": 1}
    configurations = [item.configuration for item in read_bench_record(Path("pair.json"), "--from").measurements]
    assert configurations == ["a", "a@baseline", "b", "b@baseline", "c2", "c2@baseline"]
    assert invoke(*shapes, "--kernels", str(copy), "--baseline", "built-in", "--threshold", "10%").return_value == 0


def test_the_portable_kernels_as_a_baseline(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path | None, str]] = []

    class Watched(KernelLibrary):
        def __init__(self, device: Any, kernels_directory: Path | None = None, variant: str = "") -> None:
            super().__init__(device, kernels_directory, variant)
            made.append((kernels_directory, variant))

    monkeypatch.setattr(bench_command, "KernelLibrary", Watched)
    shapes = ("--batch", "1", "--kv-len", "33", "--splits", "2", "--json", "pair.json")
    assert invoke(*shapes, "--baseline", "portable").return_value == 0
    assert made == [(None, ""), (None, "portable")]
    configurations = [item.configuration for item in read_bench_record(Path("pair.json"), "--from").measurements]
    assert configurations == ["a", "a@baseline", "b", "b@baseline", "c2", "c2@baseline"]


def test_a_run_against_a_record(device: FakeCuda) -> None:
    shapes = ("--batch", "1", "--kv-len", "33", "--splits", "2")
    assert invoke(*shapes, "--json", "old.json").return_value == 0
    device._seconds = lambda kernel: 1.2 * seconds_by_name(kernel)
    result = invoke(*shapes, "--json", "new.json", "--baseline", "old.json")
    assert result.return_value == 1
    assert "3 cells: 3 slower (threshold 5 %)" in result.stdout


def test_memory_for_one_shape_only(device: FakeCuda) -> None:
    # 40 MB are free, the arena takes 24: 65536 keys of 2 KiB (K and V of one head of 512) do not fit, 33 do.
    result = invoke("--geometry", "12b-global", "--batch", "1", "--kv-len", "33,65536", "--json", "part.json")
    values = json.loads(Path("part.json").read_text(encoding="utf-8"))
    status = {(item["shape"].split("/")[3], item["status"]) for item in values["measurements"]}
    assert status == {("kv33", "measured"), ("kv65536", "skipped")}
    assert result.return_value == 0
    assert "one pool takes 0.1 GiB" in result.stdout


def test_an_unwritable_record_is_known_before_anything_is_timed(device: FakeCuda) -> None:
    from g4kv_cli.errors import UsageError

    with pytest.raises(UsageError, match="cannot write"):
        invoke("--batch", "1", "--kv-len", "33", "--json", "nowhere/bench.json")
    assert device.launch_count < 50
