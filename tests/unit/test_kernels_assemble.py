"""Every kernel source assembles for every arch that we name, and no kernel spills or uses a stack."""

from __future__ import annotations

import re

import pytest

from g4kv_cli.compiler import compile_with_log, find_source, resource_usage, source_names
from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY
from g4kv_cli.entries.table import kernel_variants

SERIALISED = re.compile(r"\(C751[0-8]\)")
"""The assembler's words for wgmma that it could not leave asynchronous."""
GENERIC_LAMBDA = re.compile(r"\[[&=\w, ]*\]\s*\([^)]*\bauto\b")
ARCHS = ("sm_80", "sm_90a", "sm_120")
MORE_ARCHS = ("sm_86", "sm_89", "sm_100a")
"""Their assemblers take the same code as one of those above: `pytest --all-archs` runs them too."""


def test_there_are_kernels() -> None:
    assert "prep_hd256.cu" in source_names()


def test_no_lambda_has_a_parameter_of_any_type() -> None:
    """NVRTC 13.0 takes such a lambda for a function of the host and refuses it; 13.5 does not."""
    files = [*BUILT_IN_KERNELS_DIRECTORY.glob("*.cu"), *BUILT_IN_KERNELS_DIRECTORY.glob("*.cuh")]
    assert files
    assert {path.name: GENERIC_LAMBDA.findall(path.read_text()) for path in files} == {path.name: [] for path in files}
    assert GENERIC_LAMBDA.search("const auto copy = [&](unsigned at, const auto& place) {")


@pytest.mark.parametrize("arch", [*ARCHS, *(pytest.param(arch, marks=pytest.mark.more_archs) for arch in MORE_ARCHS)])
@pytest.mark.parametrize("name", source_names())
def test_assembles_without_spills(name: str, arch: str) -> None:
    log = compile_with_log(find_source(name), arch=arch, kind="cubin").log
    usage = resource_usage(log)
    made = [kernel for kernel in kernel_variants().values() if kernel.source == name]
    wanted = {kernel.symbol for kernel in made if kernel.arch in ("", arch)}
    assert {item.kernel for item in usage} >= wanted
    assert usage or made, f"the assembler reports no kernel in {name}"
    assert {item.arch for item in usage} <= {arch}
    assert not SERIALISED.search(log), log
    spilled = [item for item in usage if item.spill_store_bytes or item.spill_load_bytes or item.stack_bytes]
    assert not spilled
    assert all(0 < item.registers <= 255 for item in usage)
