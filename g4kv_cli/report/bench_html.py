"""A bench as one self-contained page: no script, no network; plots as inline SVG."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from g4kv_cli.records.files import write_whole
from g4kv_cli.records.findings import Analysis, GeometryVerdict, Row
from g4kv_cli.report.bench_console import cell_lines, place_text, rule_lines
from g4kv_cli.report.bench_format import Column, burst_text, bytes_text, ceilings_text, clocks_text, columns_of
from g4kv_cli.report.bench_plots import Plot, missing_matplotlib, plots_of, render
from g4kv_cli.report.format import digest_text

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: #666; } dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th { text-align: left; color: #555; font-weight: 600; border-bottom: 1px solid #999; position: sticky; top: 0;
  background: #fff; }
th, td { padding: .15rem .8rem .15rem 0; white-space: nowrap; } td.n, th.n { text-align: right; }
tr.first td { border-top: 1px solid #ddd; } tr.best td { font-weight: 600; color: #1d6b34; }
tr.tie td { color: #1d6b34; } tr.peer td { color: #0b6479; } tr.none td { color: #8a5a00; }
td.split { background: #fbe3d0; } td.unsplit { background: #dbe9f6; } td.undecided { background: #e8e8e8; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .87rem; }
ul { margin: .5rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; color: #333; }
"""

Renderer = Callable[[Plot, str], bytes]


def write_html(analysis: Analysis, path: Path, option: str) -> None:
    """Write the page, without plots where matplotlib is missing. Raises UsageError where it cannot be written."""
    write_whole(path, page(analysis, None if missing_matplotlib() else render), option)


def page(analysis: Analysis, renderer: Renderer | None = render) -> str:
    """The whole page. ``renderer`` makes a plot's SVG; with None the page has no plots, and says so."""
    record = analysis.record
    plots = {plot.name: plot for plot in plots_of(analysis)}
    title = f"g4kv bench, {record.run.device.name}, {record.run.date[:10]}"
    parts = [f"<h1>{_text(title)}</h1>", _facts(analysis)]
    if renderer is None:
        parts.append("<p>This page was written where matplotlib is not installed, so it has no plots.</p>")
    for verdict in analysis.verdicts:
        parts += [f"<h2>{_text(verdict.pool)}: which decode form</h2>", _verdict(verdict)]
        for name in (f"{verdict.pool}-winners", f"{verdict.pool}-time"):
            parts += _figure(plots.pop(name), renderer)
    if "roofline" in plots and renderer is not None:
        parts += ["<h2>Roofline</h2>", *_figure(plots["roofline"], renderer)]
    if analysis.missing:
        parts += ["<h2>Without a time</h2>", _list(analysis.missing)]
    parts += ["<h2>All measurements</h2>", *_tables(analysis.rows)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _facts(analysis: Analysis) -> str:
    record = analysis.record
    run, device = record.run, record.run.device
    facts = [
        ("device", f"{device.name}, {device.arch}" + (f", driver {device.driver}" if device.driver else "")),
        ("date", run.date),
        ("commit", run.git_commit or "none"),
        ("kernels", f"{run.kernels_directory or 'built in'}, sources {digest_text(run.kernels_digest)}"),
        ("NVRTC", run.nvrtc),
    ]
    if record.ceilings is not None:
        facts.append(("ceilings of this run", ceilings_text(record.ceilings)))
        facts.append(("how", record.ceilings.note))
    if record.burst_ceilings is not None:
        facts.append(("in bursts", burst_text(record)))
    facts += [("peer", _peer_words(peer)) for peer in record.peers]
    when = ("before", "after")
    facts += [(f"clocks {name}", clocks_text(line)) for name, line in zip(when, record.clocks, strict=False)]
    facts.append(("run", record.ended))
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>"


def _peer_words(peer: Mapping[str, str]) -> str:
    """``cudnn-sdpa 1.32.0, cuDNN 9.15.1``"""
    words = [f"{peer['name']} {peer.get('version') or peer.get('reason', '')}", peer.get("library", "")]
    return ", ".join(word for word in words if word)


def _verdict(verdict: GeometryVerdict) -> str:
    batches = sorted({cell.shape.batch for cell in verdict.cells})
    head = "".join(f"<th>batch {batch}</th>" for batch in batches)
    rows = []
    for kv_len in dict.fromkeys(cell.shape.kv_len for cell in verdict.cells):
        found = {cell.shape.batch: cell for cell in verdict.cells if cell.shape.kv_len == kv_len}
        cells = []
        for batch in batches:
            cell = found.get(batch)
            if cell is None:
                cells.append("<td></td>")
                continue
            kind = "undecided" if not cell.decided else "split" if cell.is_split else "unsplit"
            cells.append(f'<td class="{kind}">{"<br>".join(map(_text, cell_lines(cell)))}</td>')
        rows.append(f'<tr><td class="n">{kv_len}</td>{"".join(cells)}</tr>')
    table = f'<div class="scroll"><table><tr><th class="n">kv_len</th>{head}</tr>{"".join(rows)}</table></div>'
    return _list([*verdict.sentences, *rule_lines(verdict)]) + "\n" + table


def _figure(plot: Plot, renderer: Renderer | None) -> list[str]:
    if renderer is None:
        return []
    svg = renderer(plot, "svg").decode()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Ids are document-wide: two inlined plots must not share them.
    prefix = re.sub(r"[^\w.-]", "_", plot.name)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{prefix}-", svg)
    label = html.escape(plot.alt, quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return [f"<figure>\n{svg.rstrip()}\n<figcaption>{_text(plot.title)}. {_text(plot.alt)}.</figcaption>\n</figure>"]


def _tables(rows: Sequence[Row]) -> Iterable[str]:
    for pool, kind in dict.fromkeys((row.shape.pool, row.shape.kind) for row in rows):
        here = [row for row in rows if (row.shape.pool, row.shape.kind) == (pool, kind)]
        columns = columns_of(here)
        numbers = "".join(f'<th class="n">{column.name}</th>' for column in columns)
        head = f'<th>shape</th><th class="n">bytes</th><th>configuration</th>{numbers}<th></th>'
        body = "\n".join(_table_rows(here, columns))
        count = len(here)
        yield (
            f"<details><summary>{_text(pool)}, {_text(kind)}: {count} measurements</summary>\n"
            f'<div class="scroll"><table><tr>{head}</tr>\n{body}\n</table></div></details>'
        )


def _table_rows(rows: Sequence[Row], columns: Sequence[Column]) -> Iterable[str]:
    before = ""
    for row in rows:
        item, place = row.measurement, place_text(row.shape)
        first = place != before
        before = place
        kind = {"best": "best", "tie": "tie", "best peer": "peer"}.get(row.standing, "")
        moved = bytes_text(row.shape.read_bytes + row.shape.write_bytes) if first else ""
        if item.graph is None:
            numbers, last, kind = [item.status, *[""] * (len(columns) - 1)], item.reason, "none"
        else:
            numbers, last = [column.text(row) for column in columns], row.standing
        cells = (
            f'<td>{_text(place if first else "")}</td><td class="n">{_text(moved)}</td>'
            f"<td>{_text(item.configuration)}</td>"
            + "".join(f'<td class="n">{_text(number)}</td>' for number in numbers)
            + f"<td>{_text(last)}</td>"
        )
        classes = " ".join(name for name in (kind, "first" if first else "") if name)
        yield f'<tr class="{classes}">{cells}</tr>' if classes else f"<tr>{cells}</tr>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _text(value: str) -> str:
    return html.escape(value, quote=False)
