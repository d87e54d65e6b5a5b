"""Manifests as peers of ``g4kv bench``, on the emulated device in the guise of a CUDA one (bench_helper.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_helper import FakeCuda, fake_cuda, invoke
from provider_helper import engine_in, prep_and_attention

from g4kv_cli.device.interface import LoadedKernel
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import BenchRecord, read_bench_record

pytestmark = pytest.mark.usefixtures("forms_a_b_c")

DECODE = ("--batch", "2", "--kv-len", "33", "--splits", "2")


def _seconds(kernel: LoadedKernel) -> float:
    """The engine's kernels take 7 us, all others 20."""
    return 7e-6 if "attentionI" in kernel.name or "prepI" in kernel.name else 20e-6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    fake = fake_cuda(monkeypatch, tmp_path)
    fake._seconds = _seconds
    return fake


def _run(manifest: Path, *arguments: str) -> tuple[int, BenchRecord, str]:
    result = invoke(*arguments, "--provider", str(manifest), "--json", "bench.json")
    return result.return_value, read_bench_record(Path("bench.json"), "--from"), result.stdout


def _statuses(record: BenchRecord) -> dict[str, str]:
    return {item.configuration: item.status for item in record.measurements if item.form == "peer"}


def test_decode_forms_of_a_manifest_stand_beside_ours(
    device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    upload = FakeCuda.upload

    def watched(self: FakeCuda, values: object, label: str) -> object:
        assert self._capturing is None, f"{label} is uploaded into a graph"
        made.append(label)
        return upload(self, values, label)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeCuda, "upload", watched)
    before = len(device._allocations)
    code, record, shown = _run(engine_in(tmp_path) / "kernels.toml", *DECODE)
    assert code == 0, shown
    name = "peer:example-kernels"
    assert _statuses(record) == {f"{name}/a": "measured", f"{name}/b": "measured", f"{name}/c": "not covered"}
    times = {item.configuration: item for item in record.measurements}
    assert times[f"{name}/b"].seconds == pytest.approx(7e-6)
    assert times[f"{name}/b"].pools == times["b"].pools == 2
    assert "not covered: decode/12b-local@tp8/batch2/kv33/peer:example-kernels/c: example-kernels has no entry" in shown
    assert "example-kernels/a 0." in shown, "the best peer's time over ours stands in the table of forms"
    (peer,) = record.peers
    assert (peer["name"], peer["what"]) == ("example-kernels", "traps = false")
    assert made.count("table") == 4, "of two forms and two pools once each, however often they are replayed"
    assert len(device._allocations) == before, "metadata that was kept for the graphs goes with its shape"


def test_prep_and_prefill_in_another_order_of_the_pool(
    device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from g4kv_cli.bench import workloads

    monkeypatch.setattr(workloads, "_PREP_TOKENS", {"quick": (3,)})
    monkeypatch.setattr(workloads, "_PREFILL", {"quick": ((5, 20),)})
    monkeypatch.setattr(workloads, "_MIXED", {"quick": ()})
    prep, attention = prep_and_attention(engine_in(tmp_path), "layer page head slot dim")
    code, record, shown = _run(prep, "prep", "--geometry", "12b-global", "--preset", "quick")
    assert code == 0, shown
    assert set(_statuses(record).values()) == {"measured"}
    code, record, shown = _run(attention, "prefill", "--preset", "quick")
    assert (code, _statuses(record)) == (0, {"peer:engine-attention": "measured"}), shown
    code, record, shown = _run(prep, "prefill", "--preset", "quick")
    assert (code, _statuses(record)) == (0, {"peer:engine-prep": "not covered"}), shown


def test_folded_rows_of_a_manifest_that_takes_them(device: FakeCuda, tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "folded.toml"
    shapes = ("--geometry", "12b-global", *DECODE)
    code, record, shown = _run(manifest, *shapes, "--kv-format", "both")
    assert code == 0, shown
    cell, name = "batch2/kv33", "peer:folded-rows"
    found = {item.id.removeprefix("decode/"): item.status for item in record.measurements if item.form == "peer"}
    split, folded = f"12b-global@tp8/{cell}/{name}", f"12b-global@tp8-folded/{cell}/{name}"
    assert found == {
        f"{split}/a": "not covered", f"{split}/b": "not covered", f"{split}/c": "not covered",
        f"{folded}/a": "not covered", f"{folded}/b": "measured", f"{folded}/c": "not covered",
    }  # fmt: skip
    assert "folded-rows: its kernels take folded rows of K and V, not split ones" in shown
    manifest.write_text(manifest.read_text().replace('kv_formats = ["folded"]\n', ""))
    with pytest.raises(UsageError, match="--provider folded-rows reads whole rows of K: say --kv-format both"):
        invoke(*shapes, "--kv-format", "folded", "--provider", str(manifest))


def test_a_wrong_kernel_of_a_manifest_is_not_timed_and_exits_1(device: FakeCuda, tmp_path: Path) -> None:
    # The sum of weights misses a share that no rounding takes.
    change = ("kernels.cu", "value / all", "1.02f * value / all")
    code, record, shown = _run(engine_in(tmp_path, change) / "kernels.toml", *DECODE)
    name = "peer:example-kernels"
    assert _statuses(record) == {f"{name}/a": "wrong", f"{name}/b": "wrong", f"{name}/c": "not covered"}
    assert code == 1, shown


def test_a_manifest_is_held_to_its_own_statements(device: FakeCuda, tmp_path: Path) -> None:
    """One rounding behind the norm is wrong unless it is stated."""
    rounds = ("kernels.cu", "row[dim] = x * scale * __bfloat162float((is_q ? q_weight : k_weight)[dim]);",
              "row[dim] = __bfloat162float(__float2bfloat16(x * scale * "
              "__bfloat162float((is_q ? q_weight : k_weight)[dim])));")  # fmt: skip
    manifest = engine_in(tmp_path, rounds) / "kernels.toml"
    shapes = ("prep", "--geometry", "12b-local", "--preset", "quick")
    from g4kv_cli.bench import workloads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "_PREP_TOKENS", {"quick": (3,)})
        code, record, _ = _run(manifest, *shapes)
        assert code == 1
        assert "wrong" in _statuses(record).values()
        manifest.write_text(manifest.read_text().replace("traps = false", 'rounds_to_bf16_after = ["norm"]'))
        code, record, shown = _run(manifest, *shapes)
        assert code == 0, shown
        assert "wrong" not in _statuses(record).values()


def test_a_request_that_a_manifest_refuses_is_not_covered(device: FakeCuda, tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    text = manifest.read_text()
    limited = text.replace('name = "batch_prefill_*|batch_decode_paged_*"\n',
                           'name = "batch_prefill_*|batch_decode_paged_*"\nonly_if = { "group > 2" = "compiled for large groups" }\n')  # noqa: E501  # fmt: skip
    assert limited != text
    manifest.write_text(limited)
    code, record, shown = _run(manifest, *DECODE)
    assert code == 0
    assert set(_statuses(record).values()) == {"not covered"}
    assert "compiled for large groups" in shown


def test_names_that_are_taken_and_manifests_that_are_none(device: FakeCuda, tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "kernels.toml"
    with pytest.raises(UsageError, match=r"'example-kernels' is .*kernels\.toml too; give it another name"):
        invoke(*DECODE, "--provider", str(manifest), "--provider", str(manifest))
    manifest.write_text(manifest.read_text().replace('"example-kernels"', '"torch-sdpa"'))
    with pytest.raises(UsageError, match="'torch-sdpa' is a peer of g4kv bench too"):
        invoke(*DECODE, "--provider", str(manifest))
    assert not list(tmp_path.glob("results/**/*.json"))


def test_the_plan_shows_a_manifests_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from g4kv_cli.main import run as g4kv

    manifest = engine_in(tmp_path) / "kernels.toml"
    assert g4kv(["bench", "--dry-run", *DECODE, "--provider", str(manifest)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a b c2 peer:example-kernels/a peer:example-kernels/b peer:example-kernels/c" in shown
