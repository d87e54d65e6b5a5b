"""``g4kv merge``: the records of a run's parts as one record again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from g4kv_cli.commands.gate import GateConsole, exit_code_of_results
from g4kv_cli.commands.options import require_two_files
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, UsageError
from g4kv_cli.records.merge import merge_shards
from g4kv_cli.report.console import SmokeConsole
from g4kv_cli.report.json import read_run
from g4kv_cli.report.reject import RejectConsole
from g4kv_cli.report.result_files import ResultFiles

_file = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("records", metavar="RECORD.json...", nargs=-1, required=True, type=_file)
@click.option("--json", "json_path", type=_file, metavar="FILE", help="Write the record of the whole run.")
@click.option("--junit", "junit_path", type=_file, metavar="FILE", help="Write JUnit XML of the whole run.")
@click.option("-q", "--quiet", is_flag=True, help="Only the device, what did not pass, and the summary.")
def merge(records: tuple[Path, ...], json_path: Path | None, junit_path: Path | None, quiet: bool) -> int:
    """Merge the records of g4kv smoke --shard I/N (or reject) into one, and show and judge it as the whole run.

    \b
    g4kv smoke --shard 1/2 --json one.json
    g4kv smoke --shard 2/2 --json two.json
    g4kv merge one.json two.json --json whole.json --junit whole.xml

    Exit codes: 0 all passed; 1 a kernel is wrong, or a part is missing or did not get to its end; 2 a tool failed, or
    the records are not parts of one run.
    """
    require_two_files(json_path, junit_path)
    for target in (json_path, junit_path):
        if target is not None and any(_same_file(target, record) for record in records):
            raise UsageError(f"{target} is one of the records; name another file to write")
    if len({str(path) for path in records}) < len(records):
        twice = next(path for path in records if records.count(path) > 1)
        raise UsageError(f"{twice} is given twice: give each part once")
    merged = merge_shards({str(path): read_run(path, "record") for path in records})
    whole = merged.record
    files = ResultFiles(
        json_path, junit_path, whole.run, whole.planned, command=whole.command,
        seconds_between_records=float("inf"), settings=whole.settings,
    )  # fmt: skip
    is_smoke = whole.command != "reject"
    console: GateConsole = SmokeConsole(len(whole.cases), quiet=quiet) if is_smoke else RejectConsole(quiet=quiet)
    console.start(whole.run)
    for result in whole.cases:
        files.add(result)
        console.add(result)
    files.finish(because=whole.ended)
    console.finish(sum(result.seconds for result in whole.cases))
    files.require_whole()
    for finding in merged.findings:
        where = f"{finding.file}: " if finding.file else ""
        sys.stderr.write(f"g4kv: error: {where}{finding.text}\n")
    code = exit_code_of_results(whole.cases)
    return EXIT_FINDINGS if merged.findings and code != EXIT_FAILURE else code


def _same_file(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()
