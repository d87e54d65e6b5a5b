"""The options of ``g4kv bench``: what each means, which go together, and all of them as one value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from g4kv_cli.bench.sweep import REST_SECONDS, SweepSettings
from g4kv_cli.bench.workloads import Preset, Workload
from g4kv_cli.commands.asked import Asked, asked_options
from g4kv_cli.commands.options import (
    device_options,
    geometry_option,
    kernels_option,
    provider_option,
    variant_option,
)
from g4kv_cli.entries.entry import PORTABLE
from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_format import KV_FORMATS, SPLIT, KvFormat
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, INT32_MAX, MAX_PAGE_SIZE_TOKENS
from g4kv_cli.model.workload import MAX_SPLITS
from g4kv_cli.records.bench import BenchRecord, ShapeKind, read_bench_record

BUILT_IN = "built-in"
BOTH = "both"
MAX_REST_SECONDS = 10.0
MAX_BURSTS = 1000
DEFAULT_GEOMETRY = "12b-local"
DEFAULT_THRESHOLD = "5%"
_file = click.Path(dir_okay=False, path_type=Path)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The command line. ``batch``, ``kv_len`` and ``splits`` are None where the preset decides."""

    workload: Workload
    geometry: str | None
    tp: int
    preset: Preset
    batch: tuple[int, ...] | None
    kv_len: tuple[int, ...] | None
    splits: tuple[int, ...] | None
    workload_path: Path | None
    shape: str | None
    kv_format: str
    page_size: int
    enable_pdl: bool
    device: str
    require_gpu: bool
    kernels: Path | None
    variant: str
    baseline: str | None
    peer: tuple[str, ...]
    provider: tuple[Path, ...]
    list_peers: bool
    dry_run: bool
    from_record: Path | None
    compare: tuple[Path, Path] | None
    threshold: float
    json_path: Path | None
    html_path: Path | None
    plots_directory: Path | None
    dispatch_path: Path | None
    no_cold: bool
    rounds: int
    round_ms: float
    bursts: int
    rest: float | None
    seed: int
    quiet: bool

    @property
    def asked(self) -> Asked:
        """Requests of the user's own in place of the shapes, if there are any."""
        return Asked(self.workload_path, self.shape, self.geometry, self.tp)

    @property
    def sampling(self) -> SweepSettings:
        """How cells and ceilings are sampled."""
        return SweepSettings(self.rounds, self.round_ms * 1e-3, self.bursts, self.rest)

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """Of the pools that are measured."""
        return KV_FORMATS if self.kv_format == BOTH else tuple(one for one in KV_FORMATS if one == self.kv_format)

    @property
    def baseline_is_record(self) -> bool:
        """True if the baseline is a file of times, False if it is kernels to run."""
        return self.baseline not in (None, BUILT_IN, PORTABLE) and Path(str(self.baseline)).is_file()

    @property
    def alternates(self) -> bool:
        """True if the run takes turns with other kernels."""
        return self.baseline is not None and not self.baseline_is_record

    def baseline_record(self) -> BenchRecord | None:
        """The record to hold the run against, if it is one. Raises UsageError."""
        if not self.baseline_is_record:
            return None
        record = read_bench_record(Path(str(self.baseline)), "--baseline")
        if record.overlaps != self.enable_pdl:
            raise UsageError(
                f"--baseline {self.baseline}: launches overlap in one run alone (--pdl); compare like runs"
            )
        return record

    def baseline_kernels(self) -> tuple[Path | None, str]:
        """The baseline's directory and variant, as a KernelLibrary takes them. Raises UsageError."""
        if self.baseline == PORTABLE:
            return self.kernels, PORTABLE
        if self.baseline == BUILT_IN:
            if self.kernels is None:
                raise UsageError("--baseline built-in compares with other kernels: name them with --kernels DIR")
            return None, ""
        path = Path(self.baseline or "")
        if not path.is_dir():
            raise UsageError(
                f"--baseline {self.baseline}: neither a directory of kernels nor a record; or say built-in or portable"
            )
        return path, ""


def _share(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """``5%`` or ``0.05``: a share above 0 and below 1."""
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise click.BadParameter(f"{value!r} is no share between 0 and 100 %; write 5% or 0.05", ctx, param)
    return share


def _counts(most: int) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...] | None]:
    """A callback for ``1,16,64``: counts from 1 to ``most``, in the order given."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(int(part) for part in value.split(","))
        except ValueError:
            found = (0,)
        if not all(1 <= count <= most for count in found):
            raise click.BadParameter(f"{value!r} is no list of counts from 1 to {most}; write 1,16,64", ctx, param)
        return tuple(dict.fromkeys(found))

    return parse


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no time", ctx, param)
    return value


_REPORT = frozenset(("html_path", "plots_directory", "dispatch_path", "quiet"))
_PLAN = frozenset(
    ("workload", "geometry", "tp", "preset", "batch", "kv_len", "splits", "peer", "provider", "kernels", "baseline",
     "workload_path", "shape", "kv_format", "page_size", "enable_pdl")
)  # fmt: skip
_NOT_ASKED = ("workload", "preset", "batch", "kv_len", "splits", "peer", "dispatch_path", "kv_format", "page_size")
"""What --workload and --shape say themselves, or what a single batch has not."""
_MODES: dict[str, frozenset[str]] = {
    "list_peers": frozenset(),
    "compare": frozenset(("threshold", "quiet")),
    "from_record": _REPORT | {"threshold"},
    "dry_run": _PLAN,
}
"""What is done in place of a run, and the options that mean something to it."""


def require_one_mode(ctx: click.Context) -> None:
    """Raises UsageError for an option on the command line that the chosen mode would not heed."""
    options = {parameter.name: parameter.opts[0] for parameter in ctx.command.params if parameter.name}
    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    asked = next((name for name in ("workload_path", "shape") if name in given), None)
    also = next((name for name in given if asked is not None and name in _NOT_ASKED), None)
    if asked is not None and also is not None:
        word = f"{ctx.params[also]}" if also == "workload" else options[also]
        raise UsageError(f"{word} does not apply to {options[asked]}, which is one batch of requests; leave one out")
    if "enable_pdl" in given:
        _require_plain(ctx, given)
    mode = next((name for name in _MODES if name in given), None)
    if mode is None:
        return
    stray = next((name for name in given if name != mode and name not in _MODES[mode]), None)
    if stray is not None:
        raise UsageError(f"{options[stray]} does not apply to {options[mode]}; leave one of them out")


def _require_plain(ctx: click.Context, given: Collection[str]) -> None:
    """Raises UsageError for --pdl with what needs times of launches that do not overlap, or kernels that never do."""
    if "dispatch_path" in given:
        raise UsageError(
            "--pdl does not apply to --dispatch, which tells forms by times of launches that do not overlap"
        )
    if ctx.params["variant"] == PORTABLE:
        raise UsageError(
            "--pdl does not apply to --variant portable: these kernels begin when the one in front has ended"
        )


def require_rest(ctx: click.Context, kinds: Collection[ShapeKind]) -> None:
    """Raises UsageError for --bursts on the command line where cells of none of these kinds have any."""
    sampling = BenchOptions(**ctx.params).sampling
    given = ctx.get_parameter_source("bursts") is ParameterSource.COMMANDLINE
    if given and not any(sampling.rest_of(kind) for kind in kinds):
        raise UsageError("--bursts: these cells have no bursts; give the rest before each too (--rest 0.2)")


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("workload", type=click.Choice(["decode", "prefill", "prep", "all"]), default="decode"),
    geometry_option(f"Default: {DEFAULT_GEOMETRY}."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Heads of one of N ranks."),
    click.option(
        "--preset",
        type=click.Choice(["quick", "decode-forms", "full"]),
        default="decode-forms",
        show_default=True,
        help="How many shapes.",
    ),
    click.option(
        "--batch", callback=_counts(INT32_MAX), metavar="N[,N...]", help="Decode: these batch sizes, not the preset's."
    ),
    click.option(
        "--kv-len", callback=_counts(INT32_MAX), metavar="N[,N...]", help="Decode: these lengths, not the preset's."
    ),
    click.option("--splits", callback=_counts(MAX_SPLITS), metavar="N[,N...]", help="Decode: these split counts."),
    asked_options,
    click.option(
        "--kv-format",
        type=click.Choice([*KV_FORMATS, BOTH]),
        default=SPLIT,
        show_default=True,
        help="How rows of K lie in the pool, whole (split) or, where V is made of raw K, their "
        "rotated columns alone (folded).",
    ),
    click.option(
        "--page-size",
        type=click.IntRange(1, MAX_PAGE_SIZE_TOKENS),
        default=DEFAULT_PAGE_SIZE_TOKENS,
        show_default=True,
        metavar="TOKENS",
        help="Token slots of a page.",
    ),
    click.option(
        "--pdl",
        "enable_pdl",
        is_flag=True,
        help="Decode: our launches each begin while the one in front ends (programmatic dependent launch), where their "
        "kernels can; times are then of launches that overlap.",
    ),
    device_options,
    kernels_option,
    variant_option,
    click.option(
        "--baseline",
        metavar="built-in|portable|DIR|RECORD.json",
        help="Hold the run against other kernels, round by round in turn, or against a record.",
    ),
    click.option(
        "--peer", multiple=True, metavar="NAME", help="Also time torch-sdpa, flashinfer-tc, ..., torch, or all."
    ),
    lambda function: provider_option(
        function, "Also time the kernels that a manifest describes, each as a peer of its name; repeatable."
    ),
    click.option("--list-peers", is_flag=True, help="List the peers and what is installed."),
    click.option("--dry-run", is_flag=True, help="Show the cells with bytes, FLOPs and floors, and time nothing."),
    click.option("--from", "from_record", type=_file, metavar="RECORD.json", help="Report a record in place of a run."),
    click.option(
        "--compare", nargs=2, type=_file, metavar="A.json B.json", help="Compare two records: exit 1 if B is slower."
    ),
    click.option(
        "--threshold",
        callback=_share,
        default=DEFAULT_THRESHOLD,
        show_default=True,
        metavar="SHARE",
        help="Changes up to this are none.",
    ),
    click.option(
        "--json",
        "json_path",
        type=_file,
        metavar="FILE",
        help="Where the record goes.  [default: results/GPU/DATE-COMMIT/bench.json]",
    ),
    click.option(
        "--html", "html_path", type=_file, metavar="FILE", help="Write one self-contained page with the plots."
    ),
    click.option(
        "--plots",
        "plots_directory",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Write the plots as PNG.",
    ),
    click.option(
        "--dispatch", "dispatch_path", type=_file, metavar="FILE", help="Write the verdict as a table to load."
    ),
    click.option("--no-cold", is_flag=True, help="Time graph replays only: no cold and warm times, no cuda-bench."),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=SweepSettings().rounds,
        show_default=True,
        help="Rounds over the configurations of a shape; up to twice as many where they scatter by more than 2 % "
        "around their median.",
    ),
    click.option(
        "--round-ms",
        type=click.FloatRange(min=0.1),
        default=SweepSettings().seconds_per_round * 1e3,
        callback=_finite,
        show_default=True,
        help="Milliseconds of samples a round and configuration.",
    ),
    click.option(
        "--rest",
        type=click.FloatRange(0, MAX_REST_SECONDS),
        callback=_finite,
        metavar="SECONDS",
        help="Time bursts too, the card at rest for so long before each; 0: none.  "
        f"[default: {REST_SECONDS['prefill']:g} in prefill, none elsewhere]",
    ),
    click.option(
        "--bursts",
        type=click.IntRange(1, MAX_BURSTS),
        default=SweepSettings().bursts,
        show_default=True,
        help="Bursts a configuration.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**32), default=1, show_default=True, help="Seed of the data."),
    click.option("-q", "--quiet", is_flag=True, help="Only the verdict, what is missing, and comparisons."),
)


def bench_options(function: _Function) -> _Function:
    """Add all options: the fields of BenchOptions."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
