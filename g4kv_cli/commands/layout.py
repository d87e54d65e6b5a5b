"""``g4kv layout``: parse, compute, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from g4kv_cli.commands.layout_coordinates import PAGE_IDS, coordinate_of, offset_of, parse_coordinate
from g4kv_cli.commands.options import device_options, geometry_option, kernels_option, kv_format_option
from g4kv_cli.errors import EXIT_FINDINGS, UsageError
from g4kv_cli.model.geometry import MODELS, Geometry, select_geometries
from g4kv_cli.model.kv_format import SPLIT, KvFormat, format_for, require_format
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, INT32_MAX, KvLayout
from g4kv_cli.model.slots import derived_layout, model_pools
from g4kv_cli.model.stated_layout import check_stated_layout, read_stated_layout
from g4kv_cli.records.files import require_place, write_whole
from g4kv_cli.records.run import SCHEMA_VERSION, DeviceInfo
from g4kv_cli.report import layout as text
from g4kv_cli.report import layout_json as values
from g4kv_cli.report.layout_numbers import ProbeLine, ShownLayout
from g4kv_cli.report.output import outlive_reader
from g4kv_cli.report.terminal import results_console

if TYPE_CHECKING:
    from g4kv_cli.cases.layout_probe import ProbeGroup

_file = click.Path(path_type=Path)


@click.command(name="layout")
@geometry_option("", name="geometry_names", default="12b-local")
@kv_format_option("A geometry that does not fold is split either way.", default=SPLIT)
@click.option(
    "--page-size", type=int, metavar="TOKENS", help=f"Token slots of a page.  [default: {DEFAULT_PAGE_SIZE_TOKENS}]"
)
@click.option(
    "--num-layers", type=int, metavar="N", help="Layers of a page.  [default: the family's layers that own K/V]"
)
@click.option("--num-pages", type=int, metavar="N", help="Pages of the pool: adds the pool's size.")
@click.option(
    "--tp", type=int, default=1, show_default=True, metavar="N", help="Heads of one of N tensor-parallel ranks."
)
@click.option(
    "--context",
    "context_tokens",
    type=int,
    metavar="TOKENS",
    help="Pool bytes of both families for requests of up to this many tokens.",
)
@click.option("--slots", type=int, metavar="N", help="Requests in the pools at once, with --context.  [default: 1]")
@click.option(
    "--step-tokens",
    type=int,
    metavar="TOKENS",
    help="Tokens that one step appends before pages are released, with --context.  [default: 1]",
)
@click.option(
    "--at",
    "at_text",
    metavar="COORDINATE",
    help="page=..,layer=..,kv=k|v,slot=..,head=..,dim=..: its element and byte offset.",
)
@click.option("--offset", "element_offset", type=int, metavar="ELEMENTS", help="The coordinate at an element offset.")
@click.option(
    "--check",
    "check_path",
    type=_file,
    metavar="FILE.json",
    help="Hold a layout that somebody else states against the derived one.",
)
@click.option(
    "--pool",
    "pool_path",
    type=_file,
    metavar="FILE.toml",
    help="Show and check a pool that somebody else lays out: axes in any order, gaps, K and V apart (docs/layout.md).",
)
@click.option(
    "--provider",
    "provider_path",
    type=_file,
    metavar="FILE.toml",
    help="The same for the pool of a provider's manifest.",
)
@click.option(
    "--probe/--no-probe",
    default=None,
    help="Prove kv_offsets.cuh on the device.  [default: unless --at, --offset or --check asks]",
)
@device_options
@kernels_option
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write all of it as one JSON object, which --check takes too.",
)
def layout(
    geometry_names: str,
    kv_format: KvFormat,
    page_size: int | None,
    num_layers: int | None,
    num_pages: int | None,
    tp: int,
    context_tokens: int | None,
    slots: int | None,
    step_tokens: int | None,
    at_text: str | None,
    element_offset: int | None,
    check_path: Path | None,
    pool_path: Path | None,
    provider_path: Path | None,
    probe: bool | None,
    device: str,
    require_gpu: bool,
    kernels: Path | None,
    json_path: Path | None,
) -> None:
    """Show how the paged KV pool of a geometry lies in memory, and prove the kernels' offsets.

    \b
    g4kv layout --geometry 12b-local
    g4kv layout --geometry 31b --context 131072 --slots 8
    g4kv layout --geometry 12b-local --at page=820,layer=0,kv=v,slot=3,head=7,dim=128
    g4kv layout --geometry 12b-local --offset 2147483648
    g4kv layout --geometry 12b-local --check theirs.json
    g4kv layout --geometry 12b-global --kv-format folded
    g4kv layout --geometry 12b-local --pool hnd.toml --num-pages 1000

    --at, --offset and --check answer just that, and prove nothing on a device unless --probe says so. Exit
    code 1: a stated layout is wrong, or an offset computed on the device is.
    """
    asks = at_text is not None or element_offset is not None or check_path is not None
    if context_tokens is None and (slots is not None or step_tokens is not None):
        raise UsageError("--slots and --step-tokens size pools: give --context too")
    if context_tokens is not None and num_layers is not None:
        raise UsageError("--context sizes the pools of whole models: leave out --num-layers")
    if num_pages is not None and not 1 <= num_pages < PAGE_IDS:
        raise UsageError(f"--num-pages must be from 1 to {PAGE_IDS - 1}, got {num_pages}")
    for option, value in (("--page-size", page_size), ("--num-layers", num_layers)):
        if value is not None and value > INT32_MAX:
            raise UsageError(f"{option} must be from 1 to {INT32_MAX}, got {value}")
    geometries = select_geometries(geometry_names, tp)
    if asks and len(geometries) != 1:
        raise UsageError("--at, --offset and --check need one geometry: name one, such as 12b-local")
    page_size_tokens = DEFAULT_PAGE_SIZE_TOKENS if page_size is None else page_size
    require_format(geometries, kv_format)
    formats = {one: format_for(one, kv_format) for one in geometries}
    shown = [
        ShownLayout(one, derived_layout(one, page_size_tokens, num_layers, formats[one]), num_pages)
        for one in geometries
    ]
    report = LayoutReport(json_path)

    if pool_path is not None or provider_path is not None:
        others = {"--check": check_path is not None, "--context": context_tokens is not None, "--probe": bool(probe)}
        others["--kv-format"] = kv_format != SPLIT
        both = {"--provider": None not in (pool_path, provider_path)}
        for option, given in {**others, **both}.items():
            if given:
                raise UsageError(f"{option} does not go with --{'provider' if pool_path is None else 'pool'}; drop one")
        from g4kv_cli.commands.layout_pool import add_pools  # late: it needs NumPy

        extents = {"page_size": page_size, "num_layers": num_layers, "num_pages": num_pages}
        add_pools(report, (pool_path, provider_path), geometries, extents, at_text, element_offset)
        report.finish()
        return

    if not asks:
        for one in shown:
            report.add("layouts", values.layout_json(one))
            report.write(text.write_layout, one)
    if context_tokens is not None:
        for model in dict.fromkeys(one.model for one in geometries):
            pools = model_pools(
                model,
                context_tokens=context_tokens,
                slots=1 if slots is None else slots,
                page_size=page_size_tokens,
                step_tokens=1 if step_tokens is None else step_tokens,
                tp=tp,
                # Of a built-in model both pools are shown, whichever was named.
                families=None if model in MODELS else tuple(one for one in geometries if one.model == model),
                kv_format=kv_format,
            )
            report.add("pools", values.pools_json(pools))
            report.write(text.write_pools, pools)
    if at_text is not None:
        coordinate = parse_coordinate(at_text)
        offset = offset_of(coordinate, shown[0].layout, num_pages)
        report.set("at", values.element_json(shown[0].layout, coordinate, offset))
        report.write(text.write_element, shown[0].layout, coordinate, offset)
    if element_offset is not None:
        found = coordinate_of(element_offset, shown[0].layout, num_pages)
        report.set("offset", values.element_json(shown[0].layout, found, element_offset))
        report.write(text.write_element, shown[0].layout, found, element_offset)
    if check_path is not None:
        stated = read_stated_layout(check_path, geometries[0].name)
        check = check_stated_layout(
            stated, geometries[0], page_size=page_size, num_layers=num_layers, num_pages=num_pages,
            kv_format=formats[geometries[0]],
        )  # fmt: skip
        report.set("check", values.check_json(check))
        report.write(text.write_check, geometries[0], check)
        report.findings += len(check.contradictions)
    if probe or (probe is None and not asks):
        report.show()  # the device takes a moment
        device_info, lines = _probe(shown, device, require_gpu, kernels)
        report.set("probe", values.probe_json(device_info, lines))
        report.write(text.write_probe, device_info, lines)
        report.findings += sum(line.disagreeing for line in lines)
    report.finish()


class LayoutReport:
    """Text, once all that was asked for makes sense; at the end the same as one JSON object, where a file is asked for,
    and the exit code."""

    def __init__(self, json_path: Path | None) -> None:
        outlive_reader(json_path)
        if json_path is not None:
            require_place(json_path, "--json")
        self.findings = 0
        self._json_path = json_path
        self._values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        self._console = results_console()
        self._text: list[tuple[Any, tuple[Any, ...]]] = []

    def add(self, name: str, value: dict[str, Any]) -> None:
        self._values.setdefault(name, []).append(value)

    def set(self, name: str, value: dict[str, Any]) -> None:
        self._values[name] = value

    def write(self, writer: Any, *arguments: Any) -> None:
        self._text.append((writer, arguments))

    def show(self) -> None:
        """Write the text so far."""
        for writer, arguments in self._text:
            writer(self._console, *arguments)
        self._text.clear()

    def finish(self) -> None:
        self.show()
        if self._json_path is not None:
            write_whole(self._json_path, json.dumps(self._values, indent=2) + "\n", "--json")
        if self.findings:
            click.get_current_context().exit(EXIT_FINDINGS)


def _probe(
    shown: list[ShownLayout], device_spec: str, require_gpu: bool, kernels_directory: Path | None
) -> tuple[DeviceInfo, list[ProbeLine]]:
    # Imported here: everything else that this command does needs no device, no compiler and no NumPy.
    from g4kv_cli.cases.layout_probe import probe_layout, probe_small_pool
    from g4kv_cli.device.open import open_device
    from g4kv_cli.entries.library import KernelLibrary

    device = open_device(device_spec, require_gpu)
    try:
        library = KernelLibrary(device, kernels_directory)
        of_each = dict.fromkeys((SPLIT, *(one.layout.kv_format for one in shown)))
        lines = [_probe_line(_small_name(kv_format), probe_small_pool(library, kv_format)) for kv_format in of_each]
        for one in shown:
            lines += [
                _probe_line(_layout_name(one.geometry, one.layout), group)
                for group in probe_layout(library, one.layout)
            ]
        return device.info, lines
    finally:
        device.close()


def _probe_line(subject: str, group: ProbeGroup) -> ProbeLine:
    return ProbeLine(subject, group.name, group.total, group.disagreeing, group.mismatches)


def _layout_name(geometry: Geometry, layout: KvLayout) -> str:
    folded = "" if layout.kv_format == SPLIT else f", {layout.kv_format}"
    return f"{geometry.name}{folded}, page size {layout.page_size}"


def _small_name(kv_format: KvFormat) -> str:
    return "a small pool" if kv_format == SPLIT else f"a small {kv_format} pool"
