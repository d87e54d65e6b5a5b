"""Runs one trap case on one device and judges it: the right trap, at the right line, before that block stores."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from g4kv_cli.cases.dump import CaseDump, DumpSettings, write_dump
from g4kv_cli.cases.reject.request import RejectBench
from g4kv_cli.cases.reject.valid import LAYER, NUM_LAYERS, NUM_PAGES, PAGE_SIZE
from g4kv_cli.cases.trap.table import TRAP_COMMENTS, TrapCase
from g4kv_cli.compiler.sources import find_source
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import CaseTimeout, CompileError, ContractError, DeviceFault, G4kvError
from g4kv_cli.records.run import CaseResult, Status

_BLOCK = re.compile(r"block \((\d+), (\d+), (\d+)\)")
_THREAD = re.compile(r"thread \(\d+, \d+, \d+\)")


def run_trap_case(case: TrapCase, library: KernelLibrary, rerun: str, dumps: DumpSettings | None = None) -> CaseResult:
    """Run a case. A kernel that neither traps nor ends is wrong, as one that runs to its end is."""
    begin = time.perf_counter()
    status: Status = "failed"
    dump = None if dumps is None else CaseDump()
    try:
        if not library.contract_of(case.entry).traps:
            raise NotCovered("traps = false: its kernels do not stop on what only the device knows")
        reasons = run_trap(case, library, dump)
    except CaseTimeout as error:
        reasons = [f"hung, want a trap ({case.comment}): {error}"]
    except CompileError:
        raise
    except NotCovered as why:
        status, reasons = "not covered", [str(why)]
    except G4kvError as error:
        status, reasons = "error", [str(error)]
    if not reasons:
        status = "passed"
    digest = hashlib.sha256(b"trapped").hexdigest() if status == "passed" else ""
    seconds = time.perf_counter() - begin
    reason = "\n".join(reasons)
    result = CaseResult(
        case.id, case.entry, case.geometry.name, status, seconds, reason, output_digest=digest, rerun=rerun
    )
    return result if dumps is None or dump is None else write_dump(dumps, case, result, dump)


def run_trap(case: TrapCase, library: KernelLibrary, dump: CaseDump | None = None) -> list[str]:
    """Launch the contradiction; what is wrong with how the kernel met it, empty if nothing. ``dump`` gets the arrays.

    The device is lost afterwards. CompileError is passed on.
    """
    device = library.device
    bench = RejectBench(library, entry_named(case.entry), case.geometry, device)
    draft = bench.draft()
    case.change(draft)
    launches = device.launch_count
    try:
        try:
            draft.call()
            device.synchronize()
        finally:
            if dump is not None:
                dump.gather(bench.at_hand())
    except ContractError as error:
        return [f"the host refused it, so the trap was not tried: {error}"]
    except DeviceFault as fault:
        made = device.launch_count - launches
        once = made == 1 or (made > 1 and library.provider is not None)  # a provider's call may be a chain
        reasons = [] if once else ["it was not launched once"]
        if device.info.kind == "emulated":
            reasons += _judge_report(case, fault, library)
            reasons += _judge_pool(case, bench)
        return reasons
    return [f"no fault: the kernel ran to its end, want a trap ({case.comment})"]


def trap_lines(sources: Iterable[str], directory: Path | None) -> dict[str, list[str]]:
    """Where the traps of these sources and their headers are (``file:line``), by the comment that ends the line."""
    found: dict[str, list[str]] = {}
    for name in sources:
        source = find_source(name, directory)
        for file, text in ((source.name, source.text), *((header.name, header.text) for header in source.headers)):
            for number, line in enumerate(text.splitlines(), start=1):
                code, _, comment = line.partition("//")
                if "__trap()" in code:
                    found.setdefault(comment.strip(), []).append(f"{file}:{number}")
    return found


def _judge_report(case: TrapCase, fault: DeviceFault, library: KernelLibrary) -> list[str]:
    report = fault.reports[0]
    if fault.kinds[0] != "trap":
        return [f"a fault of kind {fault.kinds[0]} came before the trap: {report}"]
    if library.provider is not None:
        return []  # whose blocks serve which tokens, and what its sources say, is its own affair
    reasons = []
    lines = trap_lines(case.sources, library.kernels_directory)
    wanted = lines.get(case.comment, [])
    if not set(lines) & set(TRAP_COMMENTS):
        # Sources of one's own that say it all in other words: then any trap of theirs will do.
        wanted = [place for places in lines.values() for place in places]
    if not wanted:
        return [f"{', '.join(case.sources)}: no trap ends in '// {case.comment}'; what came instead: {report}"]
    if not any(re.search(rf"\b{re.escape(place)}(?!\d)", report) for place in wanted):
        reasons.append(f"trapped elsewhere than {' or '.join(wanted)} ({case.comment}): {report}")
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
    heads, head_dim = case.geometry.num_kv_heads, case.geometry.head_dim
    shape = (NUM_PAGES, NUM_LAYERS, 2, PAGE_SIZE, heads, head_dim)
    changed = bench.library.pool_order.logical(stored.view(np.uint16), shape) != 0xFFFF
    for page, slot in case.others:
        changed[page, LAYER, :, slot] = False
    if not changed.any():
        return []
    page, layer, kv, slot, *_ = (int(at) for at in np.argwhere(changed)[0])
    where = f"page {page}, layer {layer}, {'KV'[kv]}, slot {slot}"
    return [f"{int(changed.sum())} elements of the pool were written before the trap, the first in {where}"]
