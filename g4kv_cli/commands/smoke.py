"""``g4kv smoke``: gate the kernels that write and read the pool on real geometries, on a GPU or without one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.e2e.every import end_to_end_cases, is_end_to_end
from g4kv_cli.cases.gate import gate_cases, recorded_cases
from g4kv_cli.cases.prep.table import DEFAULT_SEED
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.shard import Shard
from g4kv_cli.cases.workload.table import workload_cases
from g4kv_cli.commands.asked import NOTHING_ASKED, Asked, asked_options
from g4kv_cli.commands.gate import GateOptions, list_cases, run_gate
from g4kv_cli.commands.options import (
    case_timeout_option,
    device_options,
    dump_options,
    dump_settings,
    geometry_option,
    kernels_option,
    kv_format_option,
    provider_option,
    shard_option,
    variant_option,
)
from g4kv_cli.entries.table import arithmetic_of
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import MODELS, Geometry, names_file, select_geometries
from g4kv_cli.model.kv_format import SPLIT, KvFormat, format_for, require_format
from g4kv_cli.records.run import OF_SOME_BLOCKS, CaseResult, RunInfo, to_json
from g4kv_cli.report.console import SmokeConsole
from g4kv_cli.report.json import GEOMETRIES_OF_FILES, OF_FILES, PAGE_SIZE, WORKLOAD, EarlierRun, read_record

DEFAULT_GEOMETRY = "12b-local"
SAME_BITS_OPTION = "--same-bits-as"

_file = click.Path(dir_okay=False, path_type=Path)


@dataclasses.dataclass(frozen=True)
class Request:
    """The command's options that choose cases and how they run."""

    geometry: str | None = None
    tp: int = 1
    case: tuple[str, ...] = ()
    seed: int = DEFAULT_SEED
    page_size: int | None = None
    golden: Path | None = None
    model_golden: Path | None = None
    same_bits_as: Path | None = None
    asked: Asked = NOTHING_ASKED
    kv_format: KvFormat | None = None

    def rerun(self) -> list[str]:
        """The words that choose the same table."""
        words: list[str] = []
        if self.golden is not None:
            words += ["--golden", str(self.golden)]
        elif self.model_golden is not None:
            words += ["--model-golden", str(self.model_golden)]
        elif self.asked:
            words += self.asked.rerun()
            words += ["--kv-format", self.kv_format] if self.kv_format is not None else []
            words += ["--seed", str(self.seed)] if self.seed != DEFAULT_SEED else []
        else:
            if self.geometry is not None and names_file(self.geometry):
                words += ["--geometry", self.geometry]
            words += ["--tp", str(self.tp)] if self.tp != 1 else []
            words += ["--seed", str(self.seed)] if self.seed != DEFAULT_SEED else []
        words += ["--page-size", str(self.page_size)] if self.page_size is not None else []
        words += [SAME_BITS_OPTION, str(self.same_bits_as)] if self.same_bits_as is not None else []
        return words

    def settings(self) -> dict[str, Any]:
        """What a record says of the request: what changes outputs without changing a case's id."""
        found: dict[str, Any] = {PAGE_SIZE: self.page_size}
        if self.asked:
            return found | {WORKLOAD: self.asked.values()}
        if self.geometry is not None and names_file(self.geometry):
            own = [one for one in select_geometries(self.geometry, self.tp) if one.model not in MODELS]
            found[GEOMETRIES_OF_FILES] = {one.name: to_json(one) for one in own}
        return found


@click.command()
@geometry_option(f"Default: {DEFAULT_GEOMETRY}, or where --case says.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Heads of one of N ranks.")
@device_options
@click.option("--case", multiple=True, metavar="ID", help="Only this case, or those a glob matches; repeatable.")
@click.option("--list", "list_only", is_flag=True, help="List the case ids and run nothing.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32), default=DEFAULT_SEED, show_default=True, help="First seed of random data."
)
@click.option("--page-size", type=int, metavar="TOKENS", help="Use this page size in place of 16 and of the sweep.")
@kv_format_option(
    "Only cases of that format, all of them.  [default: those of split, and some of folded where a geometry has it]"
)
@asked_options
@kernels_option
@provider_option
@variant_option
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Run recorded vectors of another implementation (.npz) in place of the table.",
)
@click.option(
    "--model-golden",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Replay recorded models (.npz) end to end; without it, --case 'e2e/*' replays those of the checkout, or of "
    "tests/golden/greedy here.",
)
@dump_options
@shard_option
@click.option("--json", "json_path", type=_file, metavar="FILE", help="Write a record; whole after every case.")
@click.option("--junit", "junit_path", type=_file, metavar="FILE", help="Write JUnit XML.")
@click.option(
    SAME_BITS_OPTION,
    type=_file,
    metavar="RECORD.json",
    help="Every output must have the same bits as in this record (of another device, say).",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Worker processes on the emulated device, at most one a core.  [default: up to 2]",
)
@case_timeout_option
@click.option("-q", "--quiet", is_flag=True, help="Only the device, what did not pass, and the summary.")
def smoke(
    geometry: str | None,
    tp: int,
    device: str,
    require_gpu: bool,
    case: tuple[str, ...],
    list_only: bool,
    seed: int,
    page_size: int | None,
    kv_format: KvFormat | None,
    workload_path: Path | None,
    shape: str | None,
    kernels: Path | None,
    provider: tuple[Path, ...],
    variant: str,
    golden: Path | None,
    model_golden: Path | None,
    dump: Path | None,
    dump_all: bool,
    shard: Shard | None,
    json_path: Path | None,
    junit_path: Path | None,
    same_bits_as: Path | None,
    jobs: int | None,
    case_timeout: float,
    quiet: bool,
) -> int:
    """Check every kernel that writes or reads the pool: right values, right places, and nothing else touched.

    Exit codes: 0 all passed; 1 a kernel is wrong; 2 the request or a tool failed.
    """
    asked = Asked(workload_path, shape, geometry, tp)
    request = Request(geometry, tp, case, seed, page_size, golden, model_golden, same_bits_as, asked, kv_format)
    cases = cases_of(request)
    part = None
    if shard is not None:
        cases, part = shard.of(cases)
    earlier = read_record(same_bits_as, SAME_BITS_OPTION) if same_bits_as is not None else None
    options = GateOptions(
        "smoke", device, require_gpu, kernels, variant, jobs, case_timeout, json_path, junit_path, provider, shard=part,
        dumps=dump_settings(dump, dump_all),
    )  # fmt: skip
    if list_only:
        return list_cases(cases, options)
    return run_gate(
        cases,
        options,
        SmokeConsole(len(cases), quiet=quiet, recorded=golden or model_golden),
        seed=seed,
        rerun=request.rerun(),
        settings=request.settings(),
        before=lambda run: _require_comparable(earlier, run, request, cases),
        judge=lambda result: _judge_bits(result, earlier),
    )


def cases_of(request: Request) -> list[Case]:
    """The table that a request chooses. Raises UsageError."""
    recorded = request.golden is not None or request.model_golden is not None
    if request.kv_format is not None and (recorded or any(is_end_to_end(text) for text in request.case)):
        raise UsageError("--kv-format chooses among the cases of geometries; drop it here, where both formats run")
    if request.asked:
        return _asked_cases(request)
    if request.model_golden is not None or any(is_end_to_end(text) for text in request.case):
        return _end_to_end_cases(request)
    geometries = None
    if request.geometry is not None or not request.case:
        geometries = select_geometries(request.geometry or DEFAULT_GEOMETRY, request.tp)
    if request.golden is not None:
        for option, given in (("--tp", request.tp != 1), ("--seed", request.seed != DEFAULT_SEED)):
            if given:
                raise UsageError(f"{option} does not apply to --golden, whose files hold heads and data; drop it")
        table = recorded_cases(request.golden, request.page_size)
        if request.geometry is not None and geometries is not None:
            names = {geometry.name for geometry in geometries}
            table = [case for case in table if case.geometry.name in names]
        return select_cases(table, request.case)
    # An id names its geometry, so --case needs no --geometry.
    if geometries is None:
        return _of_any_geometry(request)
    return _of_table(geometries, request)


def _of_any_geometry(request: Request) -> list[Case]:
    """The cases that ``--case`` names; where the ids name geometries, tables are made of those alone."""
    everything = select_geometries("all", request.tp)
    named = {text.split("/")[1] if "/" in text else "" for text in request.case}
    some = [geometry for geometry in everything if geometry.name in named]
    if len(some) == len(named):
        with suppress(UsageError):  # of what is not there, the nearest is looked for in all tables
            return _of_table(some, request)
    return _of_table(everything, request)


def _of_table(geometries: Sequence[Geometry], request: Request) -> list[Case]:
    table = gate_cases(geometries, seed=request.seed, page_size=request.page_size, every_trap=bool(request.case),
                       kv_format=request.kv_format, whole=bool(request.case))  # fmt: skip
    return select_cases(table, request.case)


def _asked_cases(request: Request) -> list[Case]:
    """The cases of requests of the user's own."""
    option = request.asked.option
    for other, given in (("--golden", request.golden), ("--model-golden", request.model_golden),
                         ("--page-size", request.page_size)):  # fmt: skip
        if given is not None:
            raise UsageError(f"{other} does not apply to {option}, which says its own; drop one of them")
    kv_format = request.kv_format or SPLIT
    workloads = request.asked.workloads
    require_format([one.geometry for one in workloads], kv_format)
    table = [
        case
        for one in workloads
        if format_for(one.geometry, kv_format) == kv_format
        for case in workload_cases(one, seed=request.seed, kv_format=kv_format)
    ]
    return select_cases(table, request.case, f"g4kv smoke --list {option} ... shows the ids")


def _end_to_end_cases(request: Request) -> list[Case]:
    """The end-to-end cases, which stand by themselves: all but their kernels and device is in their ids."""
    for option, given in (("--golden", request.golden is not None), ("--geometry", request.geometry is not None),
                          ("--tp", request.tp != 1), ("--page-size", request.page_size is not None),
                          ("--seed", request.seed != DEFAULT_SEED)):  # fmt: skip
        if given:
            raise UsageError(f"{option} does not apply to end-to-end cases; drop it and choose with --case")
    other = next((text for text in request.case if not is_end_to_end(text)), None)
    if other is not None:
        raise UsageError(f"--case {other} is no end-to-end case; give it in a run of its own")
    table = end_to_end_cases(request.model_golden, with_walks=bool(request.case))
    listing = "recorded models come with --model-golden; g4kv smoke --list --case 'e2e/*' shows the ids"
    return list(select_cases(table, request.case, listing))


def _require_comparable(earlier: EarlierRun | None, run: RunInfo, request: Request, cases: Sequence[Case]) -> None:
    """Raises UsageError where bits would differ for another reason than a kernel's."""
    if earlier is None:
        return
    if not any(earlier.digests.get(case.id) for case in cases):
        raise UsageError(
            f"{SAME_BITS_OPTION} {earlier.path}: it has outputs of none of these cases; name another record"
        )
    if earlier.kernels_digest != run.kernels_digest:
        raise UsageError(
            f"{SAME_BITS_OPTION} {earlier.path}: made with other kernel sources ({earlier.kernels_digest[:12]}, here "
            f"{run.kernels_digest[:12]}); make the record again, or point --kernels at its sources"
        )
    if earlier.seed != run.seed:
        raise UsageError(f"{SAME_BITS_OPTION} {earlier.path}: made with --seed {earlier.seed}; run with that seed")
    for name, values in request.settings().items():
        # A record of the same names: that they mean the same is what is asked here.
        if name in OF_FILES and earlier.of_files.get(name) != json.loads(json.dumps(values)):
            raise UsageError(
                f"{SAME_BITS_OPTION} {earlier.path}: its {name} are not those of the files here; make the record again"
            )
    if earlier.knows_page_size and earlier.page_size != request.page_size:
        how = "without --page-size" if earlier.page_size is None else f"with --page-size {earlier.page_size}"
        raise UsageError(f"{SAME_BITS_OPTION} {earlier.path}: made {how}; run it {how}")


def _judge_bits(result: CaseResult, earlier: EarlierRun | None) -> CaseResult:
    """A passed case whose bits differ from the record's, or that the record lacks, is failed; one that other kernels
    ran there, which need not have the same bits, is skipped."""
    if earlier is None or result.status != "passed":
        return result
    want = earlier.digests.get(result.id, "")
    if want == result.output_digest:
        return result
    if want and want.endswith(OF_SOME_BLOCKS) != result.output_digest.endswith(OF_SOME_BLOCKS):
        reason = (
            "no bits to compare: of so many rows the emulated device runs the blocks at both ends of the grid alone"
        )
        return dataclasses.replace(result, status="skipped", reason=reason)
    others = earlier.kernels.get(result.id, result.kernels)
    if want and arithmetic_of(others) != arithmetic_of(result.kernels):
        ran, there = (", ".join(sorted(set(one) - set(two))) for one, two in
                      ((result.kernels, others), (others, result.kernels)))  # fmt: skip
        reason = f"no bits to compare: {ran or 'fewer kernels'} ran here, {there or 'fewer'} there ({earlier.path})"
        return dataclasses.replace(result, status="skipped", reason=reason)
    if want:
        digests = f"{result.output_digest[:12]} here, {want[:12]} there"
        reason = f"the outputs differ in bits from {earlier.path} ({earlier.device}): {digests}"
    else:
        reason = f"{earlier.path} ({earlier.device}) has no output digest of this case"
    return dataclasses.replace(result, status="failed", reason=reason)
