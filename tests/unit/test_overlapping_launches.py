"""Kernels whose launch always begins before the one in front of it has ended wait before they touch global memory.

What others may read before they wait, and that they read no more, tests/emulated/test_early_reads.py and the faults of
the serving loop show.
"""

from __future__ import annotations

import re

import pytest

from g4kv_cli.compiler import compile_image, find_source
from g4kv_cli.entries.table import ENTRIES

# Kernels that stay, and merges for the architecture (entries/attention_request.py, entries/clusters.py).
OVERLAPPING = {
    kernel.symbol: kernel
    for entry in ENTRIES
    for kernel in (
        *(one for one in entry.kernels if one.resident_tiles),
        *(one for one in entry.merge_kernels if one.arch),
    )
}
WAIT = "griddepcontrol.wait"
GLOBAL_ACCESS = re.compile(r"^\s*(?:@!?%\w+ )?(?:(?:ld|st|red|atom|prefetch)\.[\w.:]*global|cp\.async)", re.MULTILINE)


def body_of(symbol: str, ptx: str) -> str:
    """The text of a kernel between its braces."""
    begin = ptx.index("\n{\n", ptx.index(f".entry {symbol}("))
    return ptx[begin : ptx.index("\n}\n", begin)]


@pytest.mark.parametrize("symbol", OVERLAPPING)
def test_nothing_is_read_or_written_before_the_launch_in_front_has_ended(symbol: str) -> None:
    kernel = OVERLAPPING[symbol]
    ptx = compile_image(find_source(kernel.source), arch=kernel.arch, kind="ptx").data.decode()
    before, wait, behind = body_of(symbol, ptx).partition(WAIT)
    assert wait
    assert not GLOBAL_ACCESS.findall(before)
    assert GLOBAL_ACCESS.findall(behind)


def test_prefill_and_the_merge_overlap() -> None:
    assert {"batch_prefill_paged_hd256_tile64_pairs", "merge_splits_after_hd256"} <= set(OVERLAPPING)
