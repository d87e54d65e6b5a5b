"""What ``g4kv layout`` shows on a console: numbers, a page's picture, pool sizes, answers and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import SPLIT, k_columns
from g4kv_cli.model.kv_layout import Coordinate, KvLayout
from g4kv_cli.model.slots import PADDING_PAGES, ModelPools
from g4kv_cli.model.stated_layout import GEOMETRY, StatedCheck
from g4kv_cli.records.run import DeviceInfo, Mismatch
from g4kv_cli.report.layout_numbers import ProbeLine, ShownLayout, layout_numbers, size_text
from g4kv_cli.report.layout_picture import page_picture
from g4kv_cli.report.terminal import print_line, print_table, terminal_width


def write_layout(console: Console, shown: ShownLayout) -> None:
    """A title, the table of numbers, and the picture of a page."""
    geometry = shown.geometry
    window = (
        "no window" if geometry.window is None else f"window {geometry.window} (window_left {geometry.window_left})"
    )
    heads = f"{_count(geometry.num_qo_heads, 'query head')} on {_count(geometry.num_kv_heads, 'KV head')}"
    value_source = "V from raw K" if geometry.k_eq_v else "own V"
    if shown.layout.kv_format != SPLIT:
        value_source += f", {shown.layout.kv_format}"
    print_line(console, f"{geometry.name}  ", f"{heads}, {window}, {value_source}", label_style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for number in layout_numbers(shown):
        table.add_row(f"  {number.name}", str(number.value), number.unit, number.meaning)
    print_table(console, table)
    console.print()
    width = terminal_width(console)
    for line in page_picture(shown.layout, ascii_only=console.options.ascii_only, width=width):
        if width is not None and len(line) > width:
            print_line(console, "", line)
            continue
        text = Text(line)
        text.highlight_regex(r"\bK\b", "bold cyan")
        text.highlight_regex(r"\bV\b", "bold magenta")
        console.print(text)
    console.print()


def write_pools(console: Console, pools: ModelPools) -> None:
    """Pages and bytes of a model's pools."""
    title = f"{pools.model}: {_count(pools.slots, 'slot')} of up to {_count(pools.context_tokens, 'token')}"
    step = "" if pools.step_tokens == 1 else f", {pools.step_tokens} tokens a step"
    console.print(Text(f"{title}, page size {pools.page_size}{step}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in ("  pool", "layers", "pages a slot", "pages", "bytes", ""):
        table.add_column(header, justify="left" if header in ("  pool", "") else "right", no_wrap=True)
    for family in pools.families:
        table.add_row(
            f"  {family.geometry.name}",
            str(family.layout.num_layers),
            str(family.pages_per_slot),
            str(family.num_pages),
            str(family.pool_bytes),
            size_text(family.pool_bytes),
        )
    if len(pools.families) > 1:
        table.add_row("  both", "", "", "", str(pools.total_bytes), size_text(pools.total_bytes))
    print_table(console, table)
    notes = [f"pages = slots x pages a slot + {PADDING_PAGES} reserved padding page in each pool"]
    if pools.windowed is not None:
        notes.append(
            f"local pages a slot are capped by the window of {pools.windowed.geometry.window}, and one page more that "
            f"it can straddle; uncapped: {size_text(pools.uncapped_local_bytes)}"
        )
    shared = sum(family.geometry.num_shared_kv_layers for family in pools.families)
    if shared:
        notes.append(f"the last {shared} layers read the K/V of earlier layers and have no block in any page")
    for note in notes:
        print_line(console, "  ", note, "dim")
    console.print()


def write_element(console: Console, layout: KvLayout, coordinate: Coordinate, element_offset: int) -> None:
    """One line: an element in logical terms, its element offset and its byte offset."""
    column = ""
    if layout.kv_format != SPLIT and coordinate.kv == "k":
        column = f" (column {k_columns(layout.head_dim, layout.k_dim)[coordinate.dim]} of the head)"
    console.print(
        Text(
            f"{coordinate_text(dataclasses.asdict(coordinate))}{column}: element offset {element_offset}, "
            f"byte offset {element_offset * layout.element_bytes}"
        ),
    )


def write_check(console: Console, geometry: Geometry, check: StatedCheck) -> None:
    """Each contradiction with got and want, and how many statements agree."""
    stated = check.stated
    wrong = {_statement_of(contradiction.field) for contradiction in check.contradictions}
    for contradiction in check.contradictions:
        console.print(
            Text.assemble(
                ("wrong ", "bold red"),
                f"{contradiction.field}: got {contradiction.got}, want {contradiction.want}",
            ),
        )
    folded = "" if check.layout.kv_format == SPLIT else f", {check.layout.kv_format}"
    against = f"{geometry.name}{folded}, page size {check.layout.page_size}, {_count(check.layout.num_layers, 'layer')}"
    console.print(
        Text(
            f"{stated.source}: {stated.statements - len(wrong)} of "
            f"{_count(stated.statements, 'statement')} agree with {against}"
        ),
    )


def _statement_of(field: str) -> str:
    """A sample is one statement however much of it is wrong; each field of the geometry is one."""
    return field if field.startswith(f"{GEOMETRY}.") else field.split(".")[0]


def write_probe(console: Console, device: DeviceInfo, lines: Sequence[ProbeLine]) -> None:
    """Which device computed the offsets, each disagreement, and the summary line."""
    console.print(Text(f"device twin on {device_text(device)}", style="bold"))
    for line in lines:
        if line.mismatches:
            # A wrong block makes every row and element in it wrong: one line says it, and names the others.
            first, *others = line.mismatches
            too = f"; wrong too: {', '.join(other.operation for other in others)}" if others else ""
            found = f"{line.subject}, {line.coordinates}: {mismatch_text(first)}{too}"
            console.print(Text.assemble(("wrong ", "bold red"), found))
    total = sum(line.total for line in lines)
    agreeing = total - sum(line.disagreeing for line in lines)
    for line in lines:
        console.print(
            Text(
                f"  {line.total - line.disagreeing} of {line.total}  {line.subject}, {line.coordinates}",
                style="dim",
            ),
        )
    verdict = ("agree", "green") if agreeing == total else ("agree", "bold red")
    console.print(
        Text.assemble(f"kv_offsets.cuh and an independent derivation: {agreeing} of {total} coordinates ", verdict),
    )


def mismatch_text(mismatch: Mismatch) -> str:
    """One line: what is wrong, how often, the first place and the worst one."""
    first = f"first at {coordinate_text(mismatch.first)}: got {mismatch.first_got}, want {mismatch.first_want}"
    if mismatch.worst == mismatch.first:
        places = first
    else:
        worst = coordinate_text(mismatch.worst)
        places = f"{first}; worst at {worst}: got {mismatch.worst_got}, want {mismatch.worst_want}"
    return f"{mismatch.operation} is wrong at {mismatch.count} of {mismatch.total} coordinates, {places}"


def coordinate_text(coordinate: Mapping[str, int | str]) -> str:
    """A coordinate as ``--at`` takes it."""
    kinds: dict[int | str, str] = {0: "k", 1: "v"}
    return ",".join(
        f"{axis}={kinds.get(value, value) if axis == 'kv' else value}" for axis, value in coordinate.items()
    )


def device_text(device: DeviceInfo) -> str:
    """The device in a few words, with the reason it was chosen if there is one."""
    arch = "" if device.arch in device.name else f", {device.arch}"
    reason = f" ({device.reason})" if device.reason else ""
    return f"{device.name}{arch}{reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
