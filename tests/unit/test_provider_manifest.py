"""Manifests: a whole one is read, and every fault of one names its file, line and field."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.device.emulated_device import EmulatedDevice
from g4kv_cli.entries.contract import Contract
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import UsageError
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.toml_lines import lines_of
from g4kv_cli.providers.expression import Expression
from g4kv_cli.providers.load import load_providers
from g4kv_cli.providers.manifest import ELEMENT_KINDS, Waiver
from g4kv_cli.providers.manifest_provider import ManifestProvider, PreparedCall, _tolerates
from g4kv_cli.providers.packing import element_type
from g4kv_cli.providers.read import read_manifest
from g4kv_cli.providers.scope import names_of

GOOD = """\
provider = "mine"
lse = "log2"
rounds_to_bf16_after = ["norm"]

[image.kernels]
ptx = "kernels.ptx"

[[waive]]
kind = "shared_race"
where = "a.cu:1"
why = "what is read there is never used"

[[entry]]
name = "batch_decode_*|batch_prefill_*"
only_if = { "group in (1, 2)" = "compiled for groups 1 and 2" }
[entry.let]
twice = "page_size * 2"
[entry.arrays]
table = "i32 padded_rows(page_indices, page_indptr)"
[[entry.launch]]
image = "kernels"
symbol = "decode_hd{head_dim}_"
grid = ["tokens", 1]
block = [128]
arguments = [
    "ptr q",    # a comment, with "quotes" and [brackets]
    ["u32 page_size", "ptr pool"],
]
"""

MAP = '{ tensor_map = "q", extents = [64], box = [64]'
"""The beginning of a tensor map."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels.ptx").write_text("")
    return tmp_path


def _write(folder: Path, text: str) -> Path:
    file = folder / "provider.toml"
    file.write_text(text)
    return file


def test_a_whole_manifest(folder: Path) -> None:
    manifest = read_manifest(_write(folder, GOOD))
    assert manifest.contract.stated() == ("rounds_to_bf16_after = norm", "lse = log2")
    (entry,) = manifest.entries
    assert entry.names == ("batch_decode_*", "batch_prefill_*")
    (step,) = entry.steps
    assert step.symbol is not None
    assert step.symbol.format({"head_dim": 512}) == "decode_hd512_"
    assert [argument.kind for argument in step.arguments] == ["ptr", "struct"]


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('provider = "mine"\n', "", 1, "lacks 'provider'"),
        ('"log2"', '"log10"', 2, "'log10' is not one of natural, log2"),
        ('["norm"]', '["softmax"]', 3, "'softmax' is not one of norm"),
        ("lse = ", "lze = ", 2, "lze: is no field here"),
        ("kernels.ptx", "other.ptx", 6, "there is no file"),
        ('ptx = "kernels.ptx"', 'ptx = "kernels.ptx"\nsource = "a.cu"', 5, "this one has ptx, source"),
        ('where = "a.cu:1"', 'where = "a.cu:(1"', 10, "is no regular expression"),
        ('why = "what is read there is never used"\n', "", 8, "lacks 'why'"),
        ("group in (1, 2)", "group in (1, 2", 15, "is no expression"),
        ("page_size * 2", "page_size *", 17, "is no expression"),
        ('"i32 padded_rows', '"int padded_rows', 19, "must be a type and an expression"),
        (
            '"i32 padded_rows',
            '"fp8 padded_rows',
            19,
            "fp8: rows and pools of a call are bfloat16, and kernels for another",
        ),
        ('"i32 padded_rows', '"e4m3 padded_rows', 19, "scratch of such a type goes as u16 or u8"),
        (
            "[entry.arrays]",
            '[entry.host]\ntable = "i64 kv_lens"\n[entry.arrays]',
            18,
            "entry[0].host: 'table' is made twice",
        ),
        ('"i32 padded_rows(page_indices, page_indptr)"', "[]", 19, "a struct has at least one field"),
        ('"ptr pool"]', '"ptr lens"]', 20, "'lens' is in the host's memory (entry.host), where no kernel reads"),
        ("block = [128]", 'block = [128]\nreturns = "void"', 25, "returns: is no field here"),
        ('image = "kernels"', 'image = "kernel"', 21, "'kernel' is no image here"),
        ('symbol = "decode_hd{head_dim}_"\n', "", 20, "lacks 'symbol'"),
        ('symbol = "decode_hd{head_dim}_"', 'call = "decode"', 22, "only a library has functions to call"),
        ('grid = ["tokens", 1]', 'grid = ["tokens", 1, 1, 1]', 23, "one to three expressions"),
        ('grid = ["tokens", 1]\n', "", 20, "lacks 'grid'"),
        ('"ptr q",', '"pointer q",', 25, "'pointer q' must be a type and an expression"),
        (
            '"ptr q",',
            '{ tensor_map = "q", extents = [64], box = [64, 2] },',
            25,
            "a tensor map has 1 to 5 extents, a box",
        ),
        (
            '"ptr q",',
            f"{MAP}, swizzle = 100 }},",
            25,
            "arguments.swizzle: must be one of 0, 32, 64, 128 bytes, got 100",
        ),
        ('"ptr q",', f'{MAP}, elements = "half" }},', 25, "arguments.elements: 'half' is not one of"),
        ('"ptr q",', f"{MAP}, interleave = 1 }},", 25, "arguments.interleave: is no field here"),
        ('"ptr q",', '{ map = "q" },', 25, "lacks 'tensor_map'"),
        ("block = [128]", 'block = [128]\noverlap = "yes"', 25, "overlap: must be true or false"),
        (
            "[[entry.launch]]",
            '[[entry.prepare]]\nimage = "kernels"\nsymbol = "a"\ngrid = [1]\nblock = [1]\n[[entry.launch]]',
            20,
            "prepare has calls of C functions",
        ),
        ("block = [128]", "block = [true]", 24, "got true or false"),
        ('name = "batch_decode_*|batch_prefill_*"', "name = 3", 14, "must be a string, got an integer"),
        ('provider = "mine"', 'provider = "mine"\ncases = ["*"]', 2, "cases: is no field here"),
        ('ptx = "kernels.ptx"', 'ptx = "kernels.ptx"\ncompiler = "nvcc"', 7, "compiler: is no field here"),
        ('ptx = "kernels.ptx"', 'ptx = "kernels.ptx"\nconstants = { D = 1 }', 7, "constants: is no field here"),
        ('ptx = "kernels.ptx"', 'ptx = "kernels.ptx"\nfiles = ["*.py"]', 7, "files: is no field here"),
        ("grid = ", 'named = { q = "ptr q" }\ngrid = ', 23, "named: goes with a builder or a Python function"),
        ('ptx = "kernels.ptx"', 'builder = ["python"]', 25, "arguments: stand in an order that the builder knows"),
        ('ptx = "kernels.ptx"', 'builder = ["python"]\nfiles = ["*.none"]', 7, "files: no file in "),
        ('ptx = "kernels.ptx"', 'python = "engine"', 6, "'engine' must be 'module:function'"),
        ('ptx = "kernels.ptx"', 'python = "engine:run"', 23, "grid: means nothing for a Python function"),
    ],
)
def test_a_fault_names_its_line(folder: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "ptr lens" in new:  # behind everything that has a line above
        text += '[entry.host]\nlens = "i32 kv_lens"\n'
    file = _write(folder, text)
    with pytest.raises(UsageError) as caught:
        read_manifest(file)
    text = str(caught.value)
    assert text.startswith(f"{file}:{line}: "), text
    assert says in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grid", "[1]"), ("block", "[1]"), ("cluster", "[1]"), ("shared", "0"), ("writes", '["out"]'),
        ("named", '{ q = "ptr q" }'),
    ],
)  # fmt: skip
def test_what_is_a_kernels_alone_is_refused_beside_a_call(folder: Path, key: str, value: str) -> None:
    (folder / "libengine.so").write_text("")
    called = GOOD.replace('ptx = "kernels.ptx"', 'library = "libengine.so"')
    called = called.replace(
        'symbol = "decode_hd{head_dim}_"\ngrid = ["tokens", 1]\nblock = [128]\n', 'call = "decode"\n'
    )
    read_manifest(_write(folder, called))
    file = _write(folder, called.replace('call = "decode"\n', f'call = "decode"\n{key} = {value}\n'))
    with pytest.raises(
        UsageError, match=rf"provider\.toml:23: entry\[0\]\.launch\[0\]\.{key}: means nothing beside 'call'"
    ):
        read_manifest(file)


@pytest.mark.parametrize(
    ("returns", "arguments", "says"),
    [
        ("status", '["ptr q"]', "returns: 'status' is not one of int, bool, void, nor a type and the name of a value"),
        ("ptr", '["ptr q"]', "'ptr' is not one of int, bool, void"),
        ("bf16 x", '["ptr q"]', "'bf16 x' is not one of int, bool, void"),
        ("ptr table", '["ptr q"]', "'table', which a function returns, is an array's name too"),
        ("int", f"[{MAP} }}]", "a tensor map goes to a kernel; a function gets its address"),
        ("int", f'[["i32 tokens", {MAP} }}]]', "a tensor map goes to a kernel"),
    ],
)
def test_what_a_function_cannot_return_or_take(folder: Path, returns: str, arguments: str, says: str) -> None:
    (folder / "libengine.so").write_text("")
    head, _, _ = GOOD.replace('ptx = "kernels.ptx"', 'library = "libengine.so"').partition("[[entry.launch]]")
    step = '[[entry.launch]]\nimage = "kernels"\ncall = "run"\n'
    for name in ("ptr handle", "i64 count", "void"):
        read_manifest(_write(folder, f'{head}{step}arguments = ["ptr q"]\nreturns = "{name}"\n'))
    with pytest.raises(UsageError) as caught:
        read_manifest(_write(folder, f'{head}{step}arguments = {arguments}\nreturns = "{returns}"\n'))
    assert says in str(caught.value)


def test_a_python_functions_arguments_are_tensors(folder: Path) -> None:
    step = '[[entry.launch]]\nimage = "a"\n[entry.launch.named]\n'
    text = f'provider = "p"\n[image.a]\npython = "engine:run"\n[[entry]]\nname = "batch_*"\n{step}q = "bf16 q"\n'
    (entry,) = read_manifest(_write(folder, text)).entries
    assert [(name, spec.kind) for name, spec in entry.steps[0].named] == [("q", "bf16")]
    with pytest.raises(UsageError, match=r":9: .*'ptr q' must be a type and an expression .*bf16"):
        read_manifest(_write(folder, text.replace("bf16 q", "ptr q")))


def test_every_element_kind_is_a_type() -> None:
    sizes = {kind: element_type(kind).itemsize for kind in ELEMENT_KINDS}
    assert sizes == {"i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "f32": 4, "f64": 8,
                     "f16": 2, "bf16": 2, "bool": 1}  # fmt: skip
    assert len({element_type(kind) for kind in ELEMENT_KINDS}) == len(sizes) - 1, "bool is a byte, as u8"


def test_the_digest_is_of_the_images_files_too(folder: Path) -> None:
    first = read_manifest(_write(folder, GOOD)).digest
    assert read_manifest(_write(folder, GOOD)).digest == first
    (folder / "kernels.ptx").write_text("another")
    assert read_manifest(_write(folder, GOOD)).digest != first
    image = '[image.a]\nbuilder = ["python", "build.py"]\nfiles = ["kernel*.py"]\n'
    step = '[[entry.launch]]\nimage = "a"\nsymbol = "."\ngrid = [1]\n[entry.launch.named]\nq = "ptr q"\n'
    built = f'provider = "p"\n{image}[[entry]]\nname = "batch_*"\n{step}'
    (folder / "build.py").write_text("a")
    (folder / "kernel_a.py").write_text("a")
    digests = set()
    for name in ("build.py", "kernel_a.py"):
        digests.add(read_manifest(_write(folder, built)).digest)
        (folder / name).write_text("b")
    digests.add(read_manifest(_write(folder, built)).digest)
    assert len(digests) == 3


def test_what_is_no_toml_and_what_is_no_file(folder: Path) -> None:
    with pytest.raises(UsageError, match="is no TOML"):
        read_manifest(_write(folder, "provider = \n"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_manifest(folder / "nowhere.toml")
    with pytest.raises(UsageError, match="serves no entry"):
        read_manifest(_write(folder, 'provider = "mine"\n'))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("page layer kv slot head", "must have each of .* once, .*; dim has none"),
        ("page page kv slot head dim", "must name each of"),
        ("page layer slot head dim/8", "or both its pieces .*; dim has dim/8"),
        ("page layer slot head dim/8 dim%4", "or both its pieces .*; dim has dim/8, dim%4"),
        ("page layer slot slot/2 slot%2 head dim%8 dim/8", "slot has slot, slot/2, slot%2"),
        ("page/2 page%2 layer slot head dim", "'page/2' is no axis; .*, and pieces of slot, head, dim such as dim/8"),
        ("page layer slot head dim/0 dim%0", "'dim/0' is no axis"),
    ],
)
def test_a_pool_that_is_none(folder: Path, axes: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_manifest(_write(folder, f'{GOOD}\n[pool]\naxes = "{axes}"\n'))


PLAIN = 'axes = "layer page slot head dim"\n'


@pytest.mark.parametrize(
    ("pool", "line", "says"),
    [
        (f"[pool]\n{PLAIN}page_size = 16\n", 2, "page_size: is the case's in a manifest; state what"),
        (f"[pool]\n{PLAIN}element_bytes = 1\n", 2, "the pools of a call are bfloat16"),
        (f"[pool]\n{PLAIN}[pool.strides]\nslots = 264\n", 3, "is no axis"),
        ('[pool]\naxes = "layer page head dim/8 slot dim%8"\n[pool.strides]\ndim = 2\n', 1,
         "'dim' is none of the axes kv, layer"),
        (f"[pool.k]\n{PLAIN}", 0, "is alone: [pool.k] and [pool.v] go together, and v is not there"),
        (f'[pool.k]\naxes = "layer page kv slot head dim"\n[pool.v]\n{PLAIN}', 1, "kv has kv"),
    ],
)  # fmt: skip
def test_a_pool_in_a_form_that_is_none(folder: Path, pool: str, line: int, says: str) -> None:
    file = _write(folder, f"{GOOD}\n{pool}")
    with pytest.raises(UsageError) as caught:
        read_manifest(file)
    assert str(caught.value).startswith(f"{file}:{len(GOOD.splitlines()) + 2 + line}: "), caught.value
    assert says in str(caught.value)


def test_the_form_of_a_pool(folder: Path) -> None:
    """Strides and offsets by hand: 3 pages of 2 layers, 4 slots, 5 heads, dim 16 in packs of 8."""
    v = '[pool.v]\naxes = "layer page head dim slot"\n[pool.v.strides]\nhead = 80\n'
    text = f'[pool.k]\naxes = "layer page head dim/8 slot dim%8"\n{v}'
    form = read_manifest(_write(folder, f"{GOOD}\n{text}")).pool_form
    assert form is not None
    shape = (3, 2, 2, 4, 5, 16)
    assert form.numbers(shape, 1) == {
        "k_stride_layer": 960, "k_stride_page": 320, "k_stride_head": 64, "k_stride_dim_div": 32, "k_stride_slot": 8,
        "k_stride_dim_mod": 1, "k_offset": 960, "v_stride_layer": 1200, "v_stride_page": 400, "v_stride_head": 80,
        "v_stride_dim": 4, "v_stride_slot": 1, "v_offset": 1200,
    }  # fmt: skip
    gaps = '[pool]\naxes = "layer page head slot dim"\n[pool.strides]\nslot = 24\n'
    shared = read_manifest(_write(folder, f"{GOOD}\n{gaps}")).pool_form
    assert shared is not None
    strides = {"layer": 1440, "page": 480, "head": 96, "slot": 24, "dim": 1}
    each = {f"{side}stride_{axis}": step for side in ("", "k_", "v_") for axis, step in strides.items()}
    assert shared.numbers(shape, 1) == each | {"stride_kv": 2880, "k_offset": 1440, "v_offset": 1440 + 2880}
    logical = np.arange(3 * 2 * 4 * 5 * 16).reshape(3, 2, 4, 5, 16)
    for part in form.parts:
        flat = np.full(part.elements(shape), -1)
        part.view(flat, shape)[...] = part.split(logical)
        at = 1 * 960 + 2 * 320 + 3 * 64 + (13 // 8) * 32 + 1 * 8 + 13 % 8
        at = at if part.name == "k_pool" else 1 * 1200 + 2 * 400 + 3 * 80 + 13 * 4 + 1
        assert flat[at] == logical[2, 1, 1, 3, 13]
        assert (flat >= 0).sum() == logical.size
    assert names_of(entry_named("batch_decode_paged_hd512_into"), form)[1] >= {"k_pool", "v_pool"}
    assert "pool" not in names_of(entry_named("batch_decode_paged_hd512_into"), form)[1]


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (f"[pool]\n{PLAIN}[pool.strides]\npage = 4000\n", "the pool overlaps itself: one page is 4000 elements, and "),
        (f"[pool]\n{PLAIN}alignment = 16\n[pool.strides]\nslot = 4100\n", "but one slot is 8200 bytes"),
        (f"[pool]\n{PLAIN}alignment = 16\n[pool.strides]\nslot = 4104\n", ""),
    ],
)
def test_a_pool_that_no_case_can_have_ends_the_run_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], pool: str, says: str
) -> None:
    file = _write(folder, f"{GOOD}\n{pool}")
    words = ["smoke", "--device", "emulated", "--provider", str(file), "--case", "prep/12b-local/decode/closed-form"]
    code = g4kv([*words, "--json", str(folder / "record.json")])
    error = capsys.readouterr().err.strip()
    assert code == (2 if says else 1), error  # prep is not served: where nothing ran, that is a failure
    assert error.startswith(f"g4kv: error: {file}: [pool]: ") == bool(says), error
    assert says in error
    assert not says or "\n" not in error
    assert (folder / "record.json").exists() == (not says)


def test_providers_of_different_pools_do_not_run_together(folder: Path) -> None:
    first = _write(folder, GOOD)
    second = folder / "other.toml"
    second.write_text(f'{GOOD}\n[pool]\naxes = "layer page kv slot head dim"\n')
    with pytest.raises(UsageError, match="one order of the pool's axes"):
        load_providers([first, second])


def test_lines_of_keys_in_tables_arrays_and_long_strings() -> None:
    text = 'a = 1\nb = """\nc = 2\n"""\n[t]\nd = [\n  "e = 3",\n]\n[[x]]\nf = 1\n[[x]]\nf = { g = 1 }\n[x.y]\nh = 1\n'
    found = lines_of(text)
    assert found[("a",)] == 1
    assert ("c",) not in found
    assert found[("t", "d")] == 6
    assert found[("x", 0, "f")] == 10
    assert found[("x", 1, "f")] == 12
    assert found[("x", 1, "y", "h")] == 14


def test_a_waiver_is_of_a_kind_and_a_place() -> None:
    waiver = Waiver("shared_race", re.compile(r"prefill\.cuh:2545"), "never used")
    assert _tolerates(waiver, "shared_race", "shared_race: prefill.cuh:2545: block (0, 0, 0)")
    assert not _tolerates(waiver, "shared_race", "shared_race: prefill.cuh:12: block (0, 0, 0)")
    assert not _tolerates(waiver, "global_race", "global_race: prefill.cuh:2545: block (0, 0, 0)")


@pytest.mark.parametrize(("stated", "whole", "split"), [("f32", 1, 1), ("bf16", 1, 2)])
def test_rounded_partial_results_are_one_rounding_more_of_splits(stated: Any, whole: int, split: int) -> None:
    contract = Contract(split_partials=stated)
    assert [contract.roundings(is_split=is_split) for is_split in (False, True)] == [whole, split]


def test_scratch_is_nan_before_a_call() -> None:
    device = EmulatedDevice("sm_90")
    scratch = SimpleNamespace(name="scratch", kind="f32", value=Expression.parse("2 * tokens"))
    spec: Any = SimpleNamespace(line=1, late_names=frozenset(), arrays=(), host=(), workspace=(scratch,))
    kept: dict[str, Any] = {}
    made: Any = SimpleNamespace(request=SimpleNamespace(device=device),
                                keep=lambda name, array: kept.setdefault(name, array))  # fmt: skip
    provider: Any = SimpleNamespace(evaluated=lambda line, compute: compute())
    ManifestProvider._fill(provider, spec, {"tokens": 3}, made, late=False)
    held = device.read(kept["scratch"])
    assert (held.shape, held.dtype) == ((6,), np.float32)
    assert (held.view(np.uint32) == 0xFFFF_FFFF).all()


@pytest.mark.parametrize(("base", "factor"), [("natural", 1.0), ("log2", np.log(2.0))])
def test_a_log_sum_exp_to_base_2_is_converted(base: str, factor: float) -> None:
    device = EmulatedDevice("sm_90")
    lse = device.upload(np.array([[1.0, -2.5]], np.float32), "lse")
    call: Any = SimpleNamespace(
        _provider=SimpleNamespace(manifest=SimpleNamespace(contract=SimpleNamespace(lse=base))),
        _spec=SimpleNamespace(steps=(), results=()),
        _made=SimpleNamespace(staged=None),
        _request=SimpleNamespace(device=device, arrays={"lse": lse}),
        take_steps=lambda steps: None,
    )
    PreparedCall.run(call)
    np.testing.assert_allclose(device.read(lse), np.array([[1.0, -2.5]]) * factor, rtol=1e-7)
