"""``g4kv reject``: every contradictory request fails on the host before any launch, and the kernels trap behind it."""

from __future__ import annotations

from pathlib import Path

import click

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.cases.reject.valid import SEED
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.shard import Shard
from g4kv_cli.cases.trap.table import trap_cases
from g4kv_cli.commands.gate import GateOptions, list_cases, run_gate
from g4kv_cli.commands.options import (
    case_timeout_option,
    device_options,
    dump_options,
    dump_settings,
    geometry_option,
    kernels_option,
    provider_option,
    shard_option,
)
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.report.reject import RejectConsole

_file = click.Path(dir_okay=False, path_type=Path)


@click.command()
@geometry_option(
    "The requests are made at these head counts; entries that serve none of them are left out.  [default: one of all, "
    "spread over the entries]"
)
@device_options
@click.option("--case", multiple=True, metavar="ID", help="Only this case, or those a glob matches; repeatable.")
@click.option("--list", "list_only", is_flag=True, help="List the case ids and run nothing.")
@click.option("--host-only", is_flag=True, help="Leave out the traps: only what the host must refuse.")
@kernels_option
@provider_option
@dump_options
@shard_option
@click.option("--json", "json_path", type=_file, metavar="FILE", help="Write a record, again and again as it runs.")
@click.option("--junit", "junit_path", type=_file, metavar="FILE", help="Write JUnit XML.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Worker processes, at most one a core; on a GPU, of traps, at most one each.  [default: up to 2, on a GPU "
    "up to 8]",
)
@case_timeout_option
@click.option("--no-isolate", is_flag=True, help="Run a trap in this process, for a debugger; needs one --case.")
@click.option("-q", "--quiet", is_flag=True, help="Only the device, what did not pass, and the summary.")
def reject(
    geometry: str | None,
    device: str,
    require_gpu: bool,
    case: tuple[str, ...],
    list_only: bool,
    host_only: bool,
    kernels: Path | None,
    provider: tuple[Path, ...],
    dump: Path | None,
    dump_all: bool,
    shard: Shard | None,
    json_path: Path | None,
    junit_path: Path | None,
    jobs: int | None,
    case_timeout: float,
    no_isolate: bool,
    quiet: bool,
) -> int:
    """Check that contradictory requests are refused: on the host before any launch, and by traps behind it.

    Each case spoils one thing in a valid request of one entry. It passes only if the error has the rule's code and
    names the field, nothing was launched, every buffer is bit-equal to what it was, and the same request just inside
    the limit launches and writes exactly its rows. A trap case hands the kernel what the host would refuse, on a fresh
    device (on a GPU in a process of its own); it passes only if that trap stops it before its block writes to the pool.
    With --provider other kernels run: what they do not serve, or do not promise to trap on, is counted as not covered.

    \b
    In CI, without a GPU:
      g4kv reject --junit reject.xml
    On a GPU runner, where a missing GPU must fail:
      g4kv reject --require-gpu --junit reject.xml --json reject.json
    One rule, one entry, one case:
      g4kv reject --case 'reject/*/page_id_range/*'
      g4kv reject --case '*/qkv_norm_rope_paged_decode_hd256_plain_into/*'
      g4kv reject --case trap/qkv_norm_rope_paged_decode_hd256_plain_into/page_indptr/reversed

    Exit codes: 0 all passed; 1 something was not refused, or a kernel did not trap; 2 the request or a tool failed.
    docs/reject.md says how a case is judged.
    """
    geometries = None if geometry is None else select_geometries(geometry)
    cases: list[Case] = [*reject_cases(geometries), *([] if host_only else trap_cases(geometries))]
    chosen = select_cases(cases, case, "g4kv reject --list shows all ids")
    part = None
    if shard is not None:
        chosen, part = shard.of(chosen)
    if no_isolate and not list_only and (len(chosen) != 1 or not chosen[0].traps):
        raise UsageError("--no-isolate runs one trap in this process: name it with --case")
    options = GateOptions(
        "reject", device, require_gpu, kernels, "", jobs, case_timeout, json_path, junit_path, provider,
        here=no_isolate, shard=part, dumps=dump_settings(dump, dump_all),
    )  # fmt: skip
    if list_only:
        return list_cases(chosen, options)
    rerun = ["--geometry", geometry] if geometry is not None else []
    return run_gate(chosen, options, RejectConsole(quiet=quiet), seed=SEED, rerun=rerun)
