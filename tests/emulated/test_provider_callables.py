"""Python functions as providers: a NumPy reference passes, wrong ones turn red, and what is no right call is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from provider_helper import Change, engine_in, run_cases_of

from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.errors import CompileError
from g4kv_cli.main import run as g4kv
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.providers import callables, tensors
from g4kv_cli.providers.callables import TensorArgument, call_function, find_module

PREP = ("prep/12b-local/prefill/closed-form", "prep/12b-local/decode/closed-form")
ATTENTION = ("attention/12b-local/decode/ragged",)
NEEDLE = "attention/12b-local/decode/needle/window40"
KEYS_EQUAL_VALUES = "prep/12b-global/decode/closed-form"


def test_a_numpy_reference_passes(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path) / "reference.toml"
    cases = ["attention/12b-local/decode/plan/refilled-smaller", NEEDLE]
    results = run_cases_of([manifest], [*PREP, *ATTENTION, *cases])
    results += run_cases_of([manifest], [KEYS_EQUAL_VALUES], "12b-global")
    assert [result.status for result in results] == ["passed"] * len(results), results


def test_tensors_have_the_rows_of_the_tokens(tmp_path: Path) -> None:
    pairs = "zip(positions, token_requests, strict=True)"
    strict = ("reference.py", f"enumerate({pairs})", f"zip(range(len(q)), {pairs}, strict=True)")
    cases = ["attention/12b-local/decode/rows-behind-the-tokens", "attention/12b-local/decode/padding/poisoned-page"]
    results = run_cases_of([engine_in(tmp_path, strict) / "reference.toml"], cases)
    assert [result.status for result in results] == ["passed"] * 2, results


@pytest.mark.parametrize(
    ("change", "case", "says"),
    [
        (("reference.py", "_normed(k if v is None else v, eps)", "_normed(k, eps)"), PREP[1], "V in the pool"),
        (("reference.py", "left * c - right * s", "left * c + right * s"), PREP[0], "q_out"),
        (("reference.py", "int(position) - window_left)", "int(position) - window_left + 1)"), NEEDLE, "out"),
        (("reference.py", "top + np.log(total)", "np.log(total)"), ATTENTION[0], "lse"),
        (("reference.py", "pool[pages, layer, 0, slots] = keys", "pool[pages, layer, 0, slots - 1] = keys"), PREP[0],
         "K in the pool"),
    ],
)  # fmt: skip
def test_a_wrong_function_turns_red(tmp_path: Path, change: Change, case: str, says: str) -> None:
    (result,) = run_cases_of([engine_in(tmp_path, change) / "reference.toml"], [case])
    assert result.status == "failed", result
    assert any(says in mismatch.operation for mismatch in result.mismatches), result.mismatches


FUNCTIONAL = (
    ("reference.toml", 'out = "bf16 out"\nlse = "f32 lse"\n', ""),
    ("reference.py", "def attention(q, pool, out, lse, page_indices", "def attention(q, pool, page_indices"),
    ("reference.py", "    page_size = pool.shape[3]\n",
     "    page_size, out, lse = pool.shape[3], np.empty_like(q), np.empty(q.shape[:2], np.float32)\n"),
    ("reference.py", "        if lse is not None:\n            lse[token] = (top + np.log(total))[:, 0]",
     "        lse[token] = (top + np.log(total))[:, 0]\n    return {'out': out, 'lse': lse}"),
)  # fmt: skip
"""As a library without assignment has it: the outputs are no arguments, and are returned by name."""


def test_outputs_may_be_returned_by_name(tmp_path: Path) -> None:
    manifest = engine_in(tmp_path, *FUNCTIONAL) / "reference.toml"
    cases = ("attention/12b-local/decode/lse/not-wanted", "attention/12b-local/decode/padding/poisoned-page", NEEDLE)
    results = run_cases_of([manifest], [*ATTENTION, *cases])
    assert [result.status for result in results] == ["passed"] * 4, results
    (tmp_path / "in_place").mkdir()
    (own,) = run_cases_of([engine_in(tmp_path / "in_place") / "reference.toml"], ATTENTION)
    assert own.output_digest in {result.output_digest for result in results}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{'out': out, 'lse': lse}", "out, lse", "returned tuple: it has to write into the tensors .* by name"),
        ("'out': out", "'o': out", r"returned 'o', which is none of its outputs \(lse, out\)$"),
        ("'out': out", "'out': out[:, 1:].copy()", r"returned out as bfloat16 \[(\d), 15, 256\], not as .* \[\1, 16,"),
        ("'out': out", "'out': out.astype(np.float32)", r"returned out as float32 \[\d, 16, 256\], not as bfloat16"),
        ("'out': out", "'out': out.tolist()", "returned out as something else than a tensor: TypeError: list is no"),
        ("'lse': lse", "'lse': np.stack([lse] * 2, -1)[..., 0]", "returned lse as .*: BufferError: it has gaps"),
        ("{'out': out, 'lse': lse}", "{'out': out}", ""),
    ],
)  # fmt: skip
def test_what_is_returned_has_to_be_outputs(tmp_path: Path, old: str, new: str, says: str) -> None:
    (result,) = run_cases_of(
        [engine_in(tmp_path, *FUNCTIONAL, ("reference.py", old, new)) / "reference.toml"], ATTENTION
    )
    assert result.status == ("error" if says else "failed"), result
    assert re.search(says, result.reason), result.reason
    assert says or any("lse" in one.operation for one in result.mismatches), "what was never written is poison"


def test_a_pool_in_another_form_has_its_axes(tmp_path: Path) -> None:
    """K and V apart: each a tensor [layer][page][head][slot][dim]."""
    changes = (
        ("reference.toml", "[image.prep]", '[pool.k]\naxes = "layer page head slot dim"\n[pool.v]\n'
         'axes = "layer page slot head dim"\n\n[image.prep]'),
        ("reference.toml", 'pool = "bf16 pool"', 'k_pool = "bf16 k_pool"\nv_pool = "bf16 v_pool"'),
        ("reference.py", "def attention(q, pool,", "def attention(q, k_pool, v_pool,"),
        ("reference.py", "pool.shape[3]", "v_pool.shape[2]"),
        ("reference.py", "(pool[pages, layer, kv, keys % page_size].astype(np.float32) for kv in (0, 1))",
         "(side[layer, pages, keys % page_size].astype(np.float32) for side in (k_pool.swapaxes(2, 3), v_pool))"),
    )  # fmt: skip
    results = run_cases_of([engine_in(tmp_path, *changes) / "reference.toml"], [*ATTENTION, NEEDLE])
    assert [result.status for result in results] == ["passed"] * 2, results


BEGIN = "    page_size = pool.shape[3]\n"


def _toml(old: str, new: str) -> Change:
    return ("reference.toml", old, new)


def _first(line: str) -> Change:
    """This line at the beginning of the function."""
    return ("reference.py", BEGIN, f"    {line}\n{BEGIN}")


GROUP = 'group = "i32 group"'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _first("raise KeyError('no page 7')"),
            r"^reference:attention raised at reference\.py:3\d: KeyError: 'no page",
        ),
        (_first("raise SystemExit(0)"), r"^reference:attention raised at reference\.py:3\d: SystemExit: 0$"),
        (_first("return q"), r"^reference:attention returned HostTensor: it has to write"),
        (
            _first("e = KeyError('seen'); e.add_note('a note of a library'); raise e"),
            r"reference\.py:3\d: KeyError: 'seen'$",
        ),
        (_first("np.asarray(object(), np.float32)"), r"^reference:attention raised at reference\.py:3\d: TypeError: "),
        (_first("np.stack([])"), r"raised at \w+\.py:\d+ in reference\.py:3\d: ValueError: "),
        (_first("return"), r"^reference:attention wrote nothing to out$"),
        (_first("q[0] = 1"), r"^reference:attention changed q, which is an input"),
        (_toml('lse = "f32 lse"', 'lse = "bf16 lse"'), r"reference\.toml:\d+: lse: lse is of f32, not of bf16$"),
        (_toml(f"{GROUP}\n", ""), r"^reference:attention cannot be called with the arguments of 'named': .*'group'"),
        (_toml(GROUP, 'group = "i32 groups"'), r"reference\.toml:\d+: 'groups': no name 'groups'"),
        (_toml(GROUP, 'group = "i32 kv_lens[:1]"'), r"reference\.toml:\d+: .* is no integer"),
    ],
)
def test_what_a_function_may_not_do_is_told_in_a_line(tmp_path: Path, change: Change, says: str) -> None:
    (result,) = run_cases_of([engine_in(tmp_path, change) / "reference.toml"], ATTENTION)
    assert result.status == "error", result
    assert re.search(says, result.reason), result.reason
    assert "\n" not in result.reason


NUMPY, NAME = "import numpy as np", "reference:attention"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_toml(NAME, "references:attention"), "no module 'references' in "),
        (_toml(NAME, "no.such.module:attention"), "no module 'no.such.module'"),
        (_toml(NAME, "reference:atention"), "has no function 'atention'; it has attention, prep"),
        (("reference.py", NUMPY, "import numpyy as np"), "'numpyy'; it has to be installed beside g4kv"),
        (("reference.py", NUMPY, "import numpy as np)"), "importing reference failed: SyntaxError"),
        (("reference.py", NUMPY, "import numpy as np; raise SystemExit(0)"), "failed: SystemExit: 0"),
    ],
)
def test_a_function_that_is_not_there_ends_the_run_in_a_line(tmp_path: Path, change: Change, says: str) -> None:
    manifest = engine_in(tmp_path, change) / "reference.toml"
    with pytest.raises(CompileError) as caught:
        run_cases_of([manifest], ATTENTION)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_finds_a_module_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = engine_in(tmp_path) / "reference.toml"
    assert g4kv(["provider", "check", str(manifest)]) == 0
    (tmp_path / "reference.py").unlink()
    assert g4kv(["provider", "check", str(manifest)]) == 2
    assert f"{manifest}:5: no module 'reference'" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_module("broken_package.kernels:run", tmp_path / "elsewhere") == (
        "no module 'broken_package.kernels': RuntimeError: no licence"
    )


def test_two_manifests_may_have_modules_of_one_name(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    right = engine_in(tmp_path / "right") / "reference.toml"
    wrong = engine_in(tmp_path / "wrong", ("reference.py", "left * c", "right * c")) / "reference.toml"
    assert run_cases_of([right], PREP[:1])[0].status == "passed"
    assert run_cases_of([wrong], PREP[:1])[0].status == "failed"


def test_the_function_is_part_of_the_runs_digest(tmp_path: Path) -> None:
    from g4kv_cli.providers.load import load_providers

    manifest = engine_in(tmp_path) / "reference.toml"
    digests = {load_providers([manifest]).digest}  # type: ignore[union-attr]
    (tmp_path / "reference.py").write_text((tmp_path / "reference.py").read_text() + "# another\n")
    digests.add(load_providers([manifest]).digest)  # type: ignore[union-attr]
    assert len(digests) == 2


# --- tensors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("emulated")
    yield opened
    opened.close()


def test_numpy_shares_a_tensors_memory_and_lets_it_go() -> None:
    values = tensors.host_tensor(np.arange(12, dtype=np.int32).reshape(3, 4))
    before = len(tensors._alive)
    shared = np.from_dlpack(values[:, 1:3])
    assert (shared == [[1, 2], [5, 6], [9, 10]]).all()
    shared[2, 1] = 77
    assert values[2, 2] == 77
    assert len(tensors._alive) == before + 1
    del shared
    capsule = values.__dlpack__()
    tensors.let_go_of_unused()
    assert len(tensors._alive) == before + 1, "somebody holds the capsule"
    del capsule
    tensors.let_go_of_unused()
    assert len(tensors._alive) == before


def test_bfloat16_is_a_type_of_dlpack(device: Device) -> None:
    values = tensors.host_tensor(np.ones((2, 3), BF16))
    with pytest.raises((BufferError, RuntimeError, TypeError), match=r"(?i)dlpack|dltensor|dtype"):
        np.from_dlpack(values)  # NumPy has no such type; torch and JAX do
    there = tensors.DeviceTensor(device.upload(np.ones((2, 3), BF16), "ones"), 3)
    for tensor, place in ((values, (tensors.CPU, 0)), (there, (tensors.CUDA, 3))):
        assert tensor.__dlpack_device__() == place
        capsule = tensor.__dlpack__(max_version=(1, 0))
        assert "dltensor_versioned" in repr(capsule)
        address = tensors._offered[-1][1]
        made = tensors._ManagedVersioned.from_address(address).dl_tensor
        assert (made.dtype.code, made.dtype.bits, made.dtype.lanes) == (4, 16, 1)
        assert (list(made.shape[:2]), list(made.strides[:2])) == ([2, 3], [3, 1])
        assert (made.device.device_type, made.device.device_id) == place


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.float32, np.float64, np.bool_, BF16])
def test_a_tensor_of_another_library_is_read(kind: np.dtype) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(kind)
    own = values if kind is not BF16 else tensors.host_tensor(values)
    taken = tensors.given_tensor(own[1:])
    assert (taken.shape, taken.dtype, taken.device_type) == ((1, 3, 4), np.dtype(kind), tensors.CPU)
    assert (taken.on_host() == values[1:]).all()
    assert tensors.given_tensor(own[:, :0]).on_host().shape == (2, 0, 4)
    with pytest.raises(BufferError, match="gaps"):
        tensors.given_tensor(own[..., :3])
    with pytest.raises(TypeError, match="int is no array"):
        tensors.given_tensor(3)


def test_what_lies_on_a_device_is_read_from_there(device: Device) -> None:
    array = device.upload(np.arange(6, dtype=np.int32).reshape(2, 3), "a result")
    there = tensors.GivenTensor(array.address + 4, tensors.CUDA, (5,), np.dtype(np.int32), None)
    assert callables._on_host(there, device).tolist() == [1, 2, 3, 4, 5]


def test_a_type_that_no_array_has_is_refused() -> None:
    with pytest.raises(BufferError, match="of DLPack's type 5 with 64 bits"):
        tensors.given_tensor(np.zeros(2, np.complex64))


def test_torch_takes_every_tensor() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: python -m pip install torch")
    values = tensors.host_tensor(np.ones((2, 3), BF16))
    taken = torch.from_dlpack(values)
    assert taken.dtype == torch.bfloat16
    taken[1, 2] = 5
    assert values[1, 2] == 5


def test_what_changed_is_stored_as_a_kernel_stores(device: Device) -> None:
    out = device.allocate((4, 2), BF16, "out")
    device.fill(out, 0xFF)

    def write_some(out: np.ndarray) -> None:
        out[1] = 0.5

    call_function(write_some, "some", {"out": TensorArgument(out, True)}, {}, device)
    written = device.written_ranges(out)
    assert written is not None
    assert written.tolist() == [[4, 8]]
    assert device.launch_count == 1
