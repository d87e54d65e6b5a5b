"""Runs one trap case on one device and judges it: the right trap, at the right line, before that block stores."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from g4kv_cli.cases.reject.request import RejectBench
from g4kv_cli.cases.reject.valid import LAYER, NUM_LAYERS, NUM_PAGES, PAGE_SIZE
from g4kv_cli.cases.trap.table import TRAP_COMMENTS, TRAP_SOURCE, TrapCase
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import ContractError, DeviceFault

_BLOCK = re.compile(r"block \((\d+), (\d+), (\d+)\)")
_THREAD = re.compile(r"thread \(\d+, \d+, \d+\)")


def run_trap(case: TrapCase, library: KernelLibrary) -> list[str]:
    """Launch the contradiction; what is wrong with how the kernel met it, empty if nothing.

    The device is lost afterwards. CompileError is passed on.
    """
    device = library.device
    bench = RejectBench(library, entry_named(case.entry), case.geometry, device)
    draft = bench.draft()
    case.change(draft)
    launches = device.launch_count
    try:
        draft.call()
        device.synchronize()
    except ContractError as error:
        return [f"the host refused it, so the trap was not tried: {error}"]
    except DeviceFault as fault:
        reasons = [] if device.launch_count == launches + 1 else ["it was not launched once"]
        if device.info.kind == "emulated":
            reasons += _judge_report(case, fault, library.kernels_directory)
            reasons += _judge_pool(case, bench)
        return reasons
    return [f"no fault: the kernel ran to its end, want a trap ({case.comment})"]


def trap_lines(directory: Path | None) -> dict[str, list[int]]:
    """Line numbers (from 1) of the traps in the kernel's source, by the comment that ends the line."""
    text = find_source(TRAP_SOURCE, directory).text
    found: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        code, _, comment = line.partition("//")
        if "__trap()" in code:
            found.setdefault(comment.strip(), []).append(number)
    return found


def _judge_report(case: TrapCase, fault: DeviceFault, directory: Path | None) -> list[str]:
    report = fault.reports[0]
    if fault.kinds[0] != "trap":
        return [f"a fault of kind {fault.kinds[0]} came before the trap: {report}"]
    reasons = []
    lines = trap_lines(directory)
    wanted = lines.get(case.comment, [])
    if not set(lines) & set(TRAP_COMMENTS):
        # Sources of one's own that say it all in other words: then any trap of theirs will do.
        wanted = [number for numbers in lines.values() for number in numbers]
    if not wanted:
        return [f"{TRAP_SOURCE} has no trap that ends in '// {case.comment}'; what came instead: {report}"]
    places = [f"{TRAP_SOURCE}:{number}" for number in wanted]
    if not any(re.search(re.escape(place) + r"(?!\d)", report) for place in places):
        reasons.append(f"trapped elsewhere than {' or '.join(places)} ({case.comment}): {report}")
    block = _BLOCK.search(report)
    if block is None or _THREAD.search(report) is None:
        reasons.append(f"the report names no block and thread: {report}")
    elif int(block[1]) not in case.tokens:
        reasons.append(f"block {block[1]} trapped, want one of {list(case.tokens)}: {report}")
    return reasons


def _judge_pool(case: TrapCase, bench: RejectBench) -> list[str]:
    """Nothing in the pool may have changed but the slots of the tokens in order, which ran in other blocks."""
    pool = bench.pool
    if pool is None:
        return []
    stored = bench.device.peek(pool)
    if stored is None:
        return []
    # pool[page][layer][K, V][slot][head and dim]
    changed = stored.view(np.uint16).reshape(NUM_PAGES, NUM_LAYERS, 2, PAGE_SIZE, -1) != 0xFFFF
    for page, slot in case.others:
        changed[page, LAYER, :, slot] = False
    if not changed.any():
        return []
    page, layer, kv, slot, _ = (int(at) for at in np.argwhere(changed)[0])
    where = f"page {page}, layer {layer}, {'KV'[kv]}, slot {slot}"
    return [f"{int(changed.sum())} elements of the pool were written before the trap, the first in {where}"]
