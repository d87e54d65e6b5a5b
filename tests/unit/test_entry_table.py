"""The table of entries: its rows agree with the public functions and with each other."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli import main
from g4kv_cli.compiler.images import compile_image
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.device.open import open_device
from g4kv_cli.entries import attention, prep
from g4kv_cli.entries.entry import Entry, KernelVariant, choose_variant
from g4kv_cli.entries.kernel_shapes import declared_threads, stated_shared_bytes
from g4kv_cli.entries.table import (
    arithmetic_of,
    decode_entries,
    decode_entry,
    entries,
    entries_for,
    entry_named,
    kernel_variants,
)
from g4kv_cli.errors import DeviceUnavailable
from g4kv_cli.model.geometry import GEOMETRIES

MODULES = {"prep": prep, "attention": attention, "merge": attention}


def test_every_row_is_a_public_function_with_the_signature_of_its_form() -> None:
    for entry in entries():
        function = getattr(MODULES[entry.operation], entry.name)
        assert function.__name__ == entry.name
        assert function.__doc__.startswith(entry.what)
        wanted = [name for name in inspect.signature(entry.function).parameters if name != "entry"]
        assert list(inspect.signature(function).parameters) == wanted
    named = {name for module in (prep, attention) for name in module.__all__ if name.endswith("_into")}
    assert named <= {entry.name for entry in entries()}
    with pytest.raises(AttributeError, match="has no attribute 'batch_decode_of_nothing_into'"):
        attention.batch_decode_of_nothing_into  # noqa: B018


def test_a_public_function_calls_its_own_row() -> None:
    """Each reaches the first check with its arguments; what it says names the library."""
    for entry in entries():
        arguments: dict[str, Any] = {
            name: None
            for name, parameter in inspect.signature(entry.function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        }
        with pytest.raises(Exception, match="library: "):
            getattr(MODULES[entry.operation], entry.name)(None, **arguments)


def test_names_and_forms_are_unique() -> None:
    names = [entry.name for entry in entries()]
    assert len(set(names)) == len(names)
    for geometry in GEOMETRIES.values():
        rows = [(entry.operation, entry.form) for entry in entries_for(geometry)]
        assert len(set(rows)) == len(rows)
        labels = [entry.label for entry in decode_entries(geometry)]
        assert labels == sorted(set(labels))


def test_every_geometry_is_written_decoded_and_merged() -> None:
    for geometry in GEOMETRIES.values():
        rows = entries_for(geometry)
        assert {"prefill", "decode", "batch_prefill"} <= {entry.form for entry in rows if entry.is_prep}
        assert any(entry.one_token_each for entry in rows)
        assert all(entry.has_v_input != geometry.k_eq_v for entry in rows if entry.writes_v)


def test_families_agree_on_what_a_label_means() -> None:
    local, global_ = GEOMETRIES["12b-local"], GEOMETRIES["12b-global"]
    for one in decode_entries(local):
        other = decode_entry(global_, one.label)
        if other.label == one.label:
            assert (other.form, other.takes_splits, other.preference) == (one.form, one.takes_splits, one.preference)


def test_kernels_have_the_blocks_that_their_sources_state() -> None:
    for kernel in kernel_variants().values():
        source = find_source(kernel.source)
        threads = declared_threads(compile_image(source, arch=kernel.arch_on("sm_90"), kind="ptx").data)
        assert threads[kernel.symbol] == kernel.threads, kernel.symbol
        if kernel.shared_bytes:
            assert stated_shared_bytes(source, kernel.symbol) == kernel.shared_bytes, kernel.symbol


SIXTEEN_WARPS = "G4KV_DECODE(paged_decode_hd256_groups4, 256, 8, 1, false, 1, 140288)"
MORE_STAGES = "G4KV_DECODE(paged_decode_hd256_groups4, 256, 4, 2, false, 1, 139776)"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (SIXTEEN_WARPS, "paged_decode_hd256_groups4 is written for 256 threads a block, and is launched with 128"),
        (MORE_STAGES, "_groups4 is written for 139776 bytes of shared memory, and is launched with 74240"),
    ],
)
def test_a_directory_s_kernel_of_another_block_ends_the_run_in_one_line(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built_in = "G4KV_DECODE(paged_decode_hd256_groups4, 256, 4, 1, false, 2, 74240)"
    text = find_source("decode_hd256.cu").text
    assert text.count(built_in) == 1
    (tmp_path / "decode_hd256.cu").write_text(text.replace(built_in, line), encoding="utf-8")
    case = "attention/12b-local/decode/kv-len-one"
    assert main.run(["smoke", "--device", "emulated", "--kernels", str(tmp_path), "--case", case]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_kernels_of_the_same_bits_have_one_name_for_them() -> None:
    known = kernel_variants()
    alike = {symbol: kernel.same_bits_as for symbol, kernel in known.items() if kernel.same_bits_as}
    assert alike
    for symbol, other in alike.items():
        assert known[other].same_bits_as == ""
        assert arithmetic_of([symbol]) == arithmetic_of([other]) == {other}
    for entry in entries("attention"):
        portable, special = ([k.symbol for k in entry.kernels if bool(k.arch) == is_special] for is_special in (0, 1))
        assert not arithmetic_of(portable) & arithmetic_of(special)
    assert arithmetic_of(["somebody_elses"]) == {"somebody_elses"}


# --- the choice among kernels ---------------------------------------------------------------------------------------


def _with_kernels(entry: Entry, *kernels: KernelVariant) -> Entry:
    return replace(entry, kernels=kernels)


SPECIAL = KernelVariant("special", "decode_hd256.cu", 128, tile_rows=16, arch="sm_90a", page_sizes=(16, 64))
PORTABLE = KernelVariant("portable_one", "decode_hd256.cu", 128, tile_rows=16)


def _chosen(arch: str, page_size: int, forced: str = "", *kernels: KernelVariant) -> str:
    device = open_device(f"emulated:{arch}")
    entry = _with_kernels(entry_named("batch_decode_paged_hd512_into"), *(kernels or (SPECIAL, PORTABLE)))
    try:
        return choose_variant(entry, device, tile_rows=16, page_size=page_size, forced=forced).symbol
    finally:
        device.close()


def test_the_first_kernel_that_the_device_and_the_pages_allow_is_taken() -> None:
    assert _chosen("sm_90", 16) == "special"
    assert _chosen("sm_90a", 64) == "special"
    assert _chosen("sm_90", 48) == "portable_one"
    assert _chosen("sm_80", 16) == "portable_one"
    assert _chosen("sm_120", 16) == "portable_one"
    on_gpus_only = replace(SPECIAL, device_kinds=("cuda",))
    assert _chosen("sm_90", 16, "", on_gpus_only, PORTABLE) == "portable_one"


def test_a_path_or_a_symbol_can_be_forced() -> None:
    assert _chosen("sm_90", 16, "portable") == "portable_one"
    assert _chosen("sm_90", 16, "sm_90a") == "special"
    assert _chosen("sm_90", 16, "special") == "special"
    # Another entry's kernel leaves this one its own.
    assert _chosen("sm_90", 16, "batch_prefill_paged_hd512_tile64") == "special"


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["smoke", "--variant", "fastest", "--case", "attention/12b-local/decode/kv-len-one"]) == 2
    assert "no kernel is of 'fastest'; write portable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "page_size", "forced", "why"),
    [
        ("sm_80", 16, "sm_90a", "special is made for sm_90a, this device is sm_80"),
        ("sm_90", 48, "special", "special reads pages of 16 or 64 tokens, not of 48"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arch: str, page_size: int, forced: str, why: str) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        _chosen(arch, page_size, forced)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"(asked for: {forced})" in str(caught.value)


def test_a_card_without_the_shared_memory_takes_the_next_kernel_or_says_what_is_lacking() -> None:
    device = open_device("emulated:sm_86")
    entry = entry_named("batch_decode_paged_hd512_into")
    limit = device.limits.max_shared_bytes_per_block
    chosen = choose_variant(entry, device, tile_rows=16)
    assert chosen.shared_bytes <= limit
    large = next(kernel for kernel in entry.kernels if not kernel.arch and kernel.shared_bytes > limit)
    with pytest.raises(DeviceUnavailable, match=f"bytes of shared memory a block, this device has {limit}"):
        choose_variant(_with_kernels(entry, large), device)
    device.close()
